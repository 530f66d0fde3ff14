"""Failures of handlers, as plain facts.

A handler may raise anything: errors without a text, signals with invalid values, classes that
report a false type. Each error is inspected once, here. All other code uses only the facts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from keyshard.base_error import one_line
from keyshard.errors import ConfigError, UnfitHandlerError

REASON_CHARS_MAX = 1_000
"""Most characters of a reason that are kept."""
REJECTED = "rejected by the handler"


class RetryLater(Exception):  # noqa: N818 - a signal of the handler, not an error of keyshard
    """Raised by a handler to retry this message after a time; its key waits until then.

    Args:
        after_s: Time until the next attempt, seconds. The attempt counts, and the limits of the
            retry policy apply.
        reason: Text for logs, status and, if no attempt is left, the dead letter.
    """

    def __init__(self, after_s: float, reason: object = "") -> None:
        seconds = seconds_of(after_s)
        if seconds is None:
            raise ConfigError(
                f"RetryLater(after_s={text_of(after_s)}) is not valid. The time must be a finite "
                "number of seconds, 0 or more."
            )
        super().__init__(after_s, reason)
        self.after_s = seconds
        self.reason = text_of(reason) or f"retry after {seconds:g} s"


class Reject(Exception):  # noqa: N818 - a signal of the handler, not an error of keyshard
    """Raised by a handler if the message will never succeed. Its key continues without it.

    Args:
        reason: Stored with the dead letter: a text, or an error.
    """

    def __init__(self, reason: object = "") -> None:
        super().__init__(reason)
        self.reason = text_of(reason) or REJECTED


class FailureKind(str, Enum):
    """Meaning of a handler's error."""

    FAILED = "failed"
    LATER = "later"
    """By :class:`RetryLater`."""
    REJECTED = "rejected"
    """By :class:`Reject`."""
    UNFIT = "unfit"
    """The handler cannot be run at all; this ends the source."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed attempt."""

    kind: FailureKind
    reason: str
    error: BaseException
    """For retry policies, observers and tracebacks. Any access to it may raise."""
    after_s: float | None = None
    """Time that the handler asked for, seconds."""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return the facts about an error of a handler; never raises."""
        raised = type(error)  # isinstance would ask the error for its class
        if issubclass(raised, UnfitHandlerError):
            return cls(FailureKind.UNFIT, text_of(error), error)
        if issubclass(raised, Reject):
            return cls(FailureKind.REJECTED, _reason(error) or REJECTED, error)
        if issubclass(raised, RetryLater):
            try:
                after_s = seconds_of(error.after_s)  # type: ignore[attr-defined]
            except BaseException:  # noqa: BLE001 - a class of the user's
                after_s = None
            if after_s is not None:
                return cls(FailureKind.LATER, _reason(error), error, after_s)
            return cls(FailureKind.FAILED, f"{name_of(error)} with a time that is not valid", error)
        return cls(FailureKind.FAILED, f"{name_of(error)}: {text_of(error)}", error)


def text_of(thing: object) -> str:
    """Return a printable text of any object; one line for our own errors. Never raises."""
    try:
        text = thing.decode(errors="replace") if isinstance(thing, bytes) else one_line(thing)
        # A subclass of str, or a lone surrogate, could raise elsewhere.
        return str.encode(text, errors="replace").decode()[:REASON_CHARS_MAX]
    except BaseException as exc:  # noqa: BLE001 - a class of the user's
        return f" (its text cannot be read: {name_of(exc)})"


def name_of(thing: object) -> str:
    """Return the name of an object's class; never raises."""
    try:
        return str.encode(type(thing).__name__, errors="replace").decode()
    except BaseException:  # noqa: BLE001 - a class of the user's
        return "a class without a name"


def times(count: int) -> str:
    """Return a number of failures for a sentence: ``once``, ``3 times``."""
    return "once" if count == 1 else f"{count:,} times"


def seconds_of(value: object) -> float | None:
    """Return a value as seconds to wait; ``None`` if it is not a valid time. Never raises."""
    try:
        if isinstance(value, (str, bytes, bool)):
            return None
        seconds = float(value)  # type: ignore[arg-type]
    except BaseException:  # noqa: BLE001 - a class of the user's
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


def _reason(error: BaseException) -> str:
    try:
        return text_of(error.reason)  # type: ignore[attr-defined]
    except BaseException:  # noqa: BLE001 - a class of the user's
        return ""
