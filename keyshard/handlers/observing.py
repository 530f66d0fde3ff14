"""Who is told about every attempt of a handler."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from keyshard.core.lanes.failure import name_of, text_of
from keyshard.core.message import Message
from keyshard.handlers.calling import Handle

KINDS_MAX = 100
"""Kinds of errors of observers that are named, each once."""

_log = logging.getLogger(__name__)


class Observer(Protocol):
    """Told what becomes of messages, by the thread of the handler; it must be quick.

    What it raises is named once in the log and counted; it changes nothing for the message.
    """

    def started(self, message: Message) -> None:
        """An attempt begins."""

    def completed(self, message: Message, seconds: float) -> None:
        """The handler returned after ``seconds``."""

    def failed(self, message: Message, seconds: float, error: BaseException) -> None:
        """The handler raised ``error`` after ``seconds``."""


class Observers:
    """Tells all observers of a run.

    Args:
        observers: In the order in which they are told.
        raised: Called each time one of them raises.
    """

    def __init__(self, observers: Sequence[Observer], raised: Callable[[], None]) -> None:
        self._observers = tuple(observers)
        self._raised = raised
        self._named: set[tuple[str, str, str]] = set()

    def observed(self, handle: Handle) -> Handle:
        """A handler that tells them; itself when there is none."""
        if not self._observers:
            return handle

        def told(message: Message) -> None:
            self._tell("started", message)
            began_s = time.monotonic()
            try:
                handle(message)
            except BaseException as exc:
                self._tell("failed", message, time.monotonic() - began_s, exc)
                raise
            self._tell("completed", message, time.monotonic() - began_s)

        return told

    def observed_async(
        self, handle: Callable[[Message], Awaitable[None]]
    ) -> Callable[[Message], Awaitable[None]]:
        """The same of a coroutine function."""
        if not self._observers:
            return handle

        async def told(message: Message) -> None:
            self._tell("started", message)
            began_s = time.monotonic()
            try:
                await handle(message)
            except BaseException as exc:
                self._tell("failed", message, time.monotonic() - began_s, exc)
                raise
            self._tell("completed", message, time.monotonic() - began_s)

        return told

    def _tell(self, what: str, *args: Any) -> None:
        for observer in self._observers:
            try:
                getattr(observer, what)(*args)
            except BaseException as exc:  # noqa: BLE001, PERF203 - observers are the user's
                self._raised()
                kind = name_of(observer), what, name_of(exc)
                if kind not in self._named and len(self._named) < KINDS_MAX:
                    self._named.add(kind)
                    _log.warning(
                        "the observer %s raised in %s(): %s: %s. The message is not affected; more "
                        "of this kind are only counted",
                        *kind, text_of(exc),
                    )  # fmt: skip
