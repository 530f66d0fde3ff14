"""Observers of every attempt of a handler, its notes, and the log of failures."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol

from keyshard.core.lanes.failure import Reject, RetryLater, name_of, text_of, times
from keyshard.core.lanes.key_queue import Work
from keyshard.core.lanes.lane_status import Note
from keyshard.core.message import Message, Place, place_of
from keyshard.errors import ConfigError
from keyshard.handlers.handler_call import Handle
from keyshard.redaction import shown

NOTES_MAX = 10_000
"""Maximum number of notes. If more messages have one, the oldest notes are forgotten."""
OBSERVER_KINDS_MAX = 100
"""Kinds of errors of observers that are logged, each once."""

_log = logging.getLogger(__name__)


class Notes:
    """The newest note of each message that is not done. Thread-safe."""

    def __init__(self) -> None:
        self.kept: dict[Place, Note] = {}
        """The notes; only its length may be read without a method."""
        # Reentrant, because the handler of a signal may set a note.
        self._lock = threading.RLock()

    def take(self, place: Place, text: str) -> None:
        """Keep the note of a message in place of its earlier one."""
        note = Note(text, time.monotonic())
        with self._lock:
            self.kept.pop(place, None)
            self.kept[place] = note
            if len(self.kept) > NOTES_MAX:
                del self.kept[next(iter(self.kept))]

    def forget(self, messages: Iterable[Message]) -> None:
        """Forget the notes of messages that are done. Without notes, read no message."""
        if self.kept:
            with self._lock:
                for one in messages:
                    self.kept.pop(place_of(one), None)

    def of(self, message: Message) -> Note | None:
        """Return the newest note of a message, which may be one of an earlier attempt."""
        with self._lock:
            return self.kept.get(place_of(message))


class Observer(Protocol):
    """Learns the outcome of each message, in the thread of the handler; it must be quick.

    Its exceptions are logged once per kind and counted; the message is not affected.
    """

    def started(self, message: Message) -> None:
        """An attempt begins."""

    def completed(self, message: Message, seconds: float) -> None:
        """The handler returned after ``seconds``."""

    def failed(self, message: Message, seconds: float, error: BaseException) -> None:
        """The handler raised ``error`` after ``seconds``."""


def checked_observers(given: object) -> Sequence[Observer]:
    """Return the argument ``observers`` of a run.

    Raises:
        ConfigError: It is no list, or one of them lacks a method, such as a function.
    """
    methods = ("started", "completed", "failed")
    if not isinstance(given, Sequence) or not all(
        hasattr(one, name) for one in given for name in methods
    ):
        raise ConfigError(
            f"observers is {shown(given)}.",
            "Write a list of objects with the methods started, completed and failed.",
        )
    return given


class Observers:
    """Calls all observers of a run.

    Args:
        observers: In the order of the calls.
        raised: Called each time that an observer raises.
    """

    def __init__(self, observers: Sequence[Observer], raised: Callable[[], None]) -> None:
        self._observers = tuple(observers)
        self._raised = raised
        self._named: set[tuple[str, str, str]] = set()

    def observed(self, handle: Handle) -> Handle:
        """Wrap a handler so that it calls the observers; without observers, return it as it is."""
        if not self._observers:
            return handle

        def observed(message: Message) -> Any:
            self.notify("started", message)
            began_s = time.monotonic()
            try:
                result = handle(message)
            except BaseException as exc:
                self.notify("failed", message, time.monotonic() - began_s, exc)
                raise
            self.notify("completed", message, time.monotonic() - began_s)
            return result

        return observed

    def observed_async(
        self, handle: Callable[[Message], Coroutine[Any, Any, Any]]
    ) -> Callable[[Message], Coroutine[Any, Any, Any]]:
        """Do the same as :meth:`observed` for a coroutine function."""
        if not self._observers:
            return handle

        async def observed(message: Message) -> Any:
            self.notify("started", message)
            began_s = time.monotonic()
            try:
                result = await handle(message)
            except BaseException as exc:
                self.notify("failed", message, time.monotonic() - began_s, exc)
                raise
            self.notify("completed", message, time.monotonic() - began_s)
            return result

        return observed

    def notify(self, what: str, *args: Any) -> None:
        """Call a method of every observer."""
        for observer in self._observers:
            try:
                getattr(observer, what)(*args)
            except BaseException as exc:  # noqa: BLE001, PERF203 - observers are user code
                self._raised()
                kind = name_of(observer), what, name_of(exc)
                if kind not in self._named and len(self._named) < OBSERVER_KINDS_MAX:
                    self._named.add(kind)
                    _log.warning(
                        "the observer %s raised in %s(): %s: %s. The message is not affected. "
                        "Further errors of this kind are only counted",
                        *kind, text_of(exc),
                    )  # fmt: skip


# -- Log of failed messages: each kind once, then their number -------------------------------------

AGAIN_S = 60.0
"""Time after which a kind is logged again, seconds."""
KINDS_MAX = 1_000
"""Most kinds that are counted separately; all further ones count as one."""

_LINE = "message %s of %s, %s, %s%s"


class FailureLog:
    """Logs one line per kind of outcome and error, then one a minute; one traceback per error.

    Not thread-safe: the run calls it with its lock held.

    Args:
        now: Returns the time, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._logged_s: dict[tuple[str, str], float] = {}
        self._left_out: dict[tuple[str, str], int] = {}
        self._traced: set[str] = set()

    def retried(self, work: Work, error: BaseException, reason: str, delay_s: float) -> None:
        """Log that a first attempt failed and the message is retried."""
        self.retried_message(work.message, work.queue.key, error, reason, delay_s)

    def retried_message(
        self,
        message: Message,
        key: str | None,
        error: BaseException,
        reason: str,
        delay_s: float,
    ) -> None:
        """Do the same as :meth:`retried` for a message without a lane."""
        self._log_message(
            "retried", logging.WARNING, message, key, error,
            f"failed, next attempt in {delay_s:.1f} s: {reason}",
        )  # fmt: skip

    def parked(self, work: Work, error: BaseException, reason: str) -> None:
        """Log that the key of a message was parked."""
        attempts = work.queue.attempts + 1
        self._log_work(
            "parked", logging.WARNING, work, error,
            f"failed {times(attempts)}, and its key is parked: {reason}",
        )  # fmt: skip

    def dead_lettered(self, work: Work, error: BaseException, reason: str) -> None:
        """Log that a message alone, not its key, goes to the dead-letter topic."""
        attempts = work.queue.attempts + 1
        self._log_work(
            "dead-lettered", logging.WARNING, work, error,
            f"failed {times(attempts)}, and becomes a dead letter: {reason}",
        )  # fmt: skip

    def rejected(self, work: Work, error: BaseException | None, reason: str) -> None:
        """Log that a message was rejected."""
        self._log_work(
            "rejected", logging.INFO, work, error,
            f"is rejected, and becomes a dead letter: {reason}",
        )  # fmt: skip

    def _log_work(
        self, outcome: str, level: int, work: Work, error: BaseException | None, text: str
    ) -> None:
        self._log_message(outcome, level, work.message, work.queue.key, error, text)

    def _log_message(  # noqa: PLR0917 - only called here
        self,
        outcome: str,
        level: int,
        message: Message,
        key: str | None,
        error: BaseException | None,
        text: str,
    ) -> None:
        now_s = self._now()
        kind = outcome, name_of(error)
        if kind not in self._logged_s and len(self._logged_s) >= KINDS_MAX:
            kind = outcome, ""
        logged_s = self._logged_s.get(kind)
        if logged_s is not None and now_s - logged_s < AGAIN_S:
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return
        self._logged_s[kind] = now_s
        left_out = self._left_out.pop(kind, 0)
        more = f" ({left_out:,} more were {outcome} since the previous line of this kind)"
        # Reject and RetryLater are raised on purpose: their traceback is not informative.
        traced = kind[1] in self._traced or issubclass(type(error), (Reject, RetryLater))
        self._traced.add(kind[1])
        name = "without a key" if key is None else f"of key {key!r}"
        args = (
            message.message_id, message.topic, name, text, more if left_out else "",
        )  # fmt: skip
        try:
            _log.log(level, _LINE, *args, exc_info=None if traced else error)
        except BaseException:  # noqa: BLE001 - an error whose traceback cannot be written
            _log.log(level, _LINE, *args)
