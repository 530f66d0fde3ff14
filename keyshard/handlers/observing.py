"""Who is told about every attempt of a handler."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from keyshard.core.message import Message
from keyshard.handlers.workers import Handle


class Observer(Protocol):
    """Told what becomes of messages, by the thread of the handler; it must be quick."""

    def started(self, message: Message) -> None:
        """An attempt begins."""

    def completed(self, message: Message, seconds: float) -> None:
        """The handler returned after ``seconds``."""

    def failed(self, message: Message, seconds: float, error: BaseException) -> None:
        """The handler raised ``error`` after ``seconds``."""


def observed(handle: Handle, observers: Sequence[Observer]) -> Handle:
    """A handler that tells observers; itself when there is none."""
    if not observers:
        return handle

    def told(message: Message) -> None:
        with _observing(message, observers):
            handle(message)

    return told


def observed_async(handle: Handle, observers: Sequence[Observer]) -> Callable[[Message], Any]:
    """The same of a coroutine function."""
    if not observers:
        return handle

    async def told(message: Message) -> None:
        with _observing(message, observers):
            await handle(message)

    return told


@contextmanager
def _observing(message: Message, observers: Sequence[Observer]) -> Iterator[None]:
    for observer in observers:
        observer.started(message)
    began_s = time.monotonic()
    try:
        yield
    except BaseException as exc:
        for observer in observers:
            observer.failed(message, time.monotonic() - began_s, exc)
        raise
    for observer in observers:
        observer.completed(message, time.monotonic() - began_s)
