"""What is logged of messages that a handler did not get done: each kind once, then how many."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from keyshard.core.lanes.failure import Reject, RetryLater, name_of, times
from keyshard.core.lanes.queues import Work
from keyshard.core.message import Message

AGAIN_S = 60.0
"""Time after which a kind that goes on is told again, seconds."""
KINDS_MAX = 1_000
"""Kinds that are told apart; what is above counts as one."""

_LINE = "message %s of %s, %s, %s%s"
_log = logging.getLogger(__name__)


class OutcomeLog:
    """One line for each kind of outcome and error, then one a minute; one traceback per error.

    Not thread-safe: the run calls it under its lock.

    Args:
        now: The time, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._told_s: dict[tuple[str, str], float] = {}
        self._left_out: dict[tuple[str, str], int] = {}
        self._traced: set[str] = set()

    def retried(self, work: Work, error: BaseException, reason: str, delay_s: float) -> None:
        """A first attempt failed, and the message is tried again."""
        self.retried_message(work.message, work.queue.key, error, reason, delay_s)

    def retried_message(
        self,
        message: Message,
        key: str | None,
        error: BaseException,
        reason: str,
        delay_s: float,
    ) -> None:
        """The same of a message that no lane has."""
        self._tell_of(
            "retried", logging.WARNING, message, key, error,
            f"failed and is tried again in {delay_s:.1f} s: {reason}",
        )  # fmt: skip

    def parked(self, work: Work, error: BaseException, reason: str) -> None:
        """The key of a message was parked."""
        attempts = work.queue.attempts + 1
        self._tell(
            "parked", logging.WARNING, work, error,
            f"failed {times(attempts)}, and its key is parked: {reason}",
        )  # fmt: skip

    def dead_lettered(self, work: Work, error: BaseException, reason: str) -> None:
        """A message goes to the dead-letter topic alone."""
        attempts = work.queue.attempts + 1
        self._tell(
            "dead-lettered", logging.WARNING, work, error,
            f"failed {times(attempts)} and goes to the dead-letter topic: {reason}",
        )  # fmt: skip

    def rejected(self, work: Work, error: BaseException | None, reason: str) -> None:
        """A message was rejected."""
        self._tell(
            "rejected", logging.INFO, work, error,
            f"is rejected and goes to the dead-letter topic: {reason}",
        )  # fmt: skip

    def _tell(
        self, outcome: str, level: int, work: Work, error: BaseException | None, text: str
    ) -> None:
        self._tell_of(outcome, level, work.message, work.queue.key, error, text)

    def _tell_of(  # noqa: PLR0917 - only called here
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
        if kind not in self._told_s and len(self._told_s) >= KINDS_MAX:
            kind = outcome, ""
        told_s = self._told_s.get(kind)
        if told_s is not None and now_s - told_s < AGAIN_S:
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return
        self._told_s[kind] = now_s
        left_out = self._left_out.pop(kind, 0)
        more = f" ({left_out:,} more were {outcome} since the last line like this)"
        # A handler says on purpose that it rejects or comes later: where it says so is no news.
        told = kind[1] in self._traced or issubclass(type(error), (Reject, RetryLater))
        self._traced.add(kind[1])
        name = "without a key" if key is None else f"of key {key!r}"
        args = (
            message.message_id, message.topic, name, text, more if left_out else "",
        )  # fmt: skip
        try:
            _log.log(level, _LINE, *args, exc_info=None if told else error)
        except BaseException:  # noqa: BLE001 - an error whose traceback cannot be written
            _log.log(level, _LINE, *args)
