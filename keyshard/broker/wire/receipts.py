"""What a consumer acknowledged, until its broker says that it took it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from keyshard.broker.wire.connection import WireConnection
from keyshard.broker.wire.errors import RefusedError
from keyshard.broker.wire.frames import api
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.refusals import Refusals
from keyshard.errors import BrokerError, BrokerUnavailableError, KeyShardError

ACKNOWLEDGED_AT_ONCE = 10_000
"""Entries that one command acknowledges at most."""
REFUSED_AT_ONCE = 1_000
"""The same while the broker refuses acknowledgements, one command at a time."""
WAITING_MAX = 100_000
"""Acknowledgements that wait for a connection at most, and as many for a receipt."""
UNCONFIRMED_S = 5.0
"""Time without an answer to acknowledgements after which that is worth a word, seconds."""
SEND_AGAIN_S = 0.1
"""Time between two attempts to send what is left at the end, seconds."""
SENT_AGAIN_WITHIN_S = 2.0
"""Longest absence after which what was acknowledged before is sent again, seconds. Shorter than a
cluster is away whose data are deleted meanwhile: it hands the same ids out for new entries."""
_INDIVIDUAL = 0

_log = logging.getLogger(__name__)

Standing = tuple[WireConnection | None, int]
"""A connection, while there is one, and the consumer id there."""


class Receipts:
    """Acknowledgements of one consumer; called by any thread.

    What was sent and not confirmed is sent again when the subscription is lost: with the next one,
    before its first permits, so that it does not come again; and what was refused, after a pause.
    Behind a longer absence it is forgotten: everything comes again then, and is compared with what
    was received before it is acknowledged. A receipt says that the broker has taken an
    acknowledgement; a crash may still make it forget.

    Args:
        topic_partition: Where it acknowledges.
        standing: Tells the subscription.
        until_true: Calls something again and again.
        error_of: The error that a refusal is.
        end: Told a refusal that does not pass; called without locks.
    """

    def __init__(
        self,
        topic_partition: TopicPartition,
        standing: Callable[[], Standing],
        until_true: Callable[[Callable[[], bool]], None],
        error_of: Callable[[RefusedError], BrokerError],
        end: Callable[[KeyShardError], None],
    ) -> None:
        self._topic_partition = topic_partition
        self._standing = standing
        self._until_true = until_true
        self._error_of = error_of
        self._end = end
        self._refusals = Refusals()
        self._heard_s = 0.0
        """When the broker answered last, or was asked when it owed no answer."""
        self._trying = False
        self._closed = False
        self._changed = threading.Condition()
        self._unsent: list[EntryId] = []
        self._asked: dict[int, tuple[WireConnection, list[EntryId]]] = {}
        """What was sent, by the request that it was, the oldest first."""
        self._asked_entries = 0
        self._lost_id = 0
        """The newest consumer id that is lost: what is sent with it is not heard."""
        self._at: WireConnection | None = None
        """Where the newest subscription is, or was."""
        self._lost_s: float | None = None
        """Since when there is none."""

    def add(self, entries: Sequence[EntryId]) -> None:
        """Acknowledge entries.

        Raises:
            BrokerUnavailableError: There is no connection, or no receipts come, and too many wait
                for that.
        """
        with self._changed:
            if self._asked_entries > WAITING_MAX:
                raise BrokerUnavailableError(
                    f"Could not acknowledge in {self._topic_partition}: the broker has not "
                    f"confirmed {self._asked_entries} acknowledgements. Check its load."
                )
            self._unsent.extend(entries)
            if not self._send(*self._standing()) and len(self._unsent) > WAITING_MAX:
                del self._unsent[len(self._unsent) - len(entries) :]
                refused = self.refused()
                raise BrokerUnavailableError(
                    f"{refused} {len(self._unsent)} acknowledgements wait."
                    if refused
                    else f"Could not acknowledge in {self._topic_partition}: there is no "
                    f"connection, and {WAITING_MAX} acknowledgements wait for one."
                )

    def refused(self) -> str:
        """Why the broker does not take acknowledgements; empty while it does."""
        error, asked = self._refusals.error, self._asked_entries
        if error is not None:
            return error.message
        silent_s = time.monotonic() - self._heard_s
        if not asked or silent_s < UNCONFIRMED_S:
            return ""
        return (
            f"The broker has not confirmed {asked} acknowledgements in {self._topic_partition} "
            f"for {silent_s:.0f} s."
        )

    def subscribed(self, at: WireConnection, consumer_id: int) -> None:
        """Send what waited for a subscription, unless that took long."""
        with self._changed:
            if not self.may_be_sent(at):
                _log.debug(
                    "%d acknowledgements in %s are forgotten: there was no connection for long",
                    len(self._unsent), self._topic_partition,
                )  # fmt: skip
                self._unsent.clear()
                self._changed.notify_all()
            self._at = at
            if consumer_id > self._lost_id:
                self._lost_s = None
            self._send(at, consumer_id)

    def may_be_sent(self, at: WireConnection) -> bool:
        """Whether what waits may be sent on a connection."""
        # On one that stood all the time is the broker that was there before.
        lost_s = self._lost_s
        return at is self._at or lost_s is None or time.monotonic() - lost_s <= SENT_AGAIN_WITHIN_S

    def lost(self, consumer_id: int) -> None:
        """What was sent with this consumer id is confirmed no more."""
        with self._changed:
            if consumer_id <= self._lost_id:
                return
            self._lost_id = consumer_id
            if self._lost_s is None:
                self._lost_s = time.monotonic()
            for number, (at, entries) in self._asked.items():
                at.forget(number)
                self._unsent.extend(entries)
            self._asked.clear()
            self._asked_entries = 0
            self._refusals.succeeded()  # the next subscription may be taken from

    def wait(self, timeout_s: float) -> int:
        """Wait until everything is confirmed; how many entries are not."""
        end_s = time.monotonic() + timeout_s
        with self._changed:
            while self._unsent or self._asked:
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    break
                self._send(*self._standing())
                self._changed.wait(min(left_s, SEND_AGAIN_S))
            return len(self._unsent) + self._asked_entries

    def close(self) -> list[EntryId]:
        """Send nothing more; what was not sent."""
        with self._changed:
            self._closed = True
            left, self._unsent = self._unsent, []
            return left

    def unheard(self) -> list[EntryId]:
        """What was sent and not confirmed; nobody waits for that any more."""
        with self._changed:
            left: list[EntryId] = []
            for number, (at, entries) in self._asked.items():
                at.forget(number)
                left += entries
            self._asked.clear()
            self._asked_entries = 0
            return left

    def _try_again(self) -> bool:
        with self._changed:
            self._send(*self._standing())
            self._trying = bool(self._unsent or self._asked) and not self._closed
            return not self._trying

    def _send(self, at: WireConnection | None, consumer_id: int) -> bool:
        """Send what waits; whether nothing does. Under the lock, as an answer is taken."""
        while self._unsent:
            if at is None or consumer_id <= self._lost_id:
                return False
            refused = self._refusals.error is not None
            if refused and self._asked:
                return False
            some = self._unsent[: REFUSED_AT_ONCE if refused else ACKNOWLEDGED_AT_ONCE]
            content = api.Ack(consumer_id=consumer_id, ack_type=_INDIVIDUAL)
            for ledger, entry in some:
                # An object for each id, put into a list first, takes eight times as long.
                content.message_id.add(ledger=ledger, entry=entry)
            try:
                number = at.begin("ack", content, self._answered)
            except BrokerUnavailableError:
                return False
            del self._unsent[: len(some)]
            if not self._asked:
                self._heard_s = time.monotonic()
            self._asked[number] = at, some
            self._asked_entries += len(some)
        return True

    def _answered(self, number: int, answer: Future[Any]) -> None:
        ends: KeyShardError | None = None
        with self._changed:
            entries = self._taken_out(number)
            self._heard_s = time.monotonic()
            error = answer.exception()
            if error is None:
                self._refusals.succeeded()
                self._send(*self._standing())
            else:
                _log.debug("acknowledging in %s: %s", self._topic_partition, error)
                self._unsent.extend(entries)
            if isinstance(error, RefusedError):
                refused = self._error_of(error)
                ends = refused if self._refusals.failed(refused, time.monotonic()) else None
            begins = bool(self._unsent) and not self._trying
            self._trying = self._trying or begins
            self._changed.notify_all()
        if begins:
            self._until_true(self._try_again)
        if ends is not None:
            self._end(ends)

    def _taken_out(self, number: int) -> Sequence[EntryId]:
        _, entries = self._asked.pop(number, (None, ()))
        self._asked_entries -= len(entries)
        return entries
