"""Groups acknowledgements of a consumer into commands, and sends them until they are confirmed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from keyshard.base_error import one_line
from keyshard.broker.wire.connection import WireConnection
from keyshard.broker.wire.errors import RefusedError
from keyshard.broker.wire.frames import api
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.refusal_timer import RefusalTimer
from keyshard.errors import BrokerUnavailableError, KeyShardError

ACKNOWLEDGED_AT_ONCE = 10_000
"""Maximum number of entries that one command acknowledges."""
REFUSED_AT_ONCE = 1_000
"""The same limit while the broker refuses acknowledgements; one command is sent at a time."""
WAITING_MAX = 100_000
"""Maximum number of acknowledgements that wait for a connection, and that wait for a receipt."""
UNCONFIRMED_S = 5.0
"""Time without an answer to acknowledgements after which it is reported as a problem, seconds."""
SEND_AGAIN_S = 0.1
"""Time between two attempts to send the rest at a close, seconds."""
SENT_AGAIN_WITHIN_S = 2.0
"""Longest absence after which unconfirmed acknowledgements are sent again, seconds. It is shorter
than an outage in which a cluster loses its data: a new cluster reuses the ids for new entries."""
_INDIVIDUAL = 0

_log = logging.getLogger(__name__)

Standing = tuple[WireConnection | None, int]
"""The connection, if any, and the consumer id on it."""


class AckGrouping:
    """Unsent and unconfirmed acknowledgements of one consumer. Any thread may call it.

    If the subscription is lost, unconfirmed acknowledgements are sent again with the next one,
    before its first permits, so that their entries are not redelivered. Refused ones are sent again
    after a pause. After a longer absence they are dropped: the broker redelivers everything, and
    the entries are compared with the received ones before they are acknowledged. A receipt says
    that the broker has accepted an acknowledgement; the broker may still lose it in a crash.

    Args:
        topic_partition: The topic partition.
        standing: Returns the current connection and consumer id.
        until_true: Repeats a function until it returns true.
        error_of: Translates a refusal into an error.
        end: Called with a permanent refusal, without locks held.
    """

    def __init__(
        self,
        topic_partition: TopicPartition,
        standing: Callable[[], Standing],
        until_true: Callable[[Callable[[], bool]], None],
        error_of: Callable[[RefusedError], KeyShardError],
        end: Callable[[KeyShardError], None],
    ) -> None:
        self._topic_partition = topic_partition
        self._standing = standing
        self._until_true = until_true
        self._error_of = error_of
        self._end = end
        self._refusals = RefusalTimer()
        self._answered_s = 0.0
        """When the broker answered last, or got a request while it owed no answer (monotonic)."""
        self._trying = False
        self._closed = False
        self._changed = threading.Condition()
        self._unsent: list[EntryId] = []
        self._asked: dict[int, tuple[WireConnection, list[EntryId]]] = {}
        """Sent and unconfirmed entries by request id, oldest first."""
        self._asked_entries = 0
        self._lost_id = 0
        """The newest lost consumer id: acknowledgements sent with it are not confirmed."""
        self._at: WireConnection | None = None
        """Connection of the newest subscription, current or lost."""
        self._lost_s: float | None = None
        """Since when there is no subscription, monotonic seconds."""

    def add(self, entries: Sequence[EntryId]) -> None:
        """Acknowledge entries.

        Raises:
            BrokerUnavailableError: Too many acknowledgements wait for a connection or a receipt.
        """
        with self._changed:
            if self._asked_entries > WAITING_MAX:
                raise BrokerUnavailableError(
                    f"Could not acknowledge in {self._topic_partition}: the broker has not "
                    f"confirmed {self._asked_entries} acknowledgements.",
                    "Check the load of the broker.",
                )
            self._unsent.extend(entries)
            if not self._send(*self._standing()) and len(self._unsent) > WAITING_MAX:
                del self._unsent[len(self._unsent) - len(entries) :]
                if refused := self.refused():
                    raise BrokerUnavailableError(
                        f"{refused} {len(self._unsent)} acknowledgements wait."
                    )
                raise BrokerUnavailableError(
                    f"Could not acknowledge in {self._topic_partition}: there is no connection, "
                    f"and {WAITING_MAX} acknowledgements wait for one.",
                    "Check that the broker is running.",
                )

    def refused(self) -> str:
        """Return why the broker does not accept acknowledgements; empty while it does."""
        error, asked = self._refusals.error, self._asked_entries
        if error is not None:
            return error.message
        silent_s = time.monotonic() - self._answered_s
        if not asked or silent_s < UNCONFIRMED_S:
            return ""
        return (
            f"The broker has not confirmed {asked} acknowledgements in {self._topic_partition} "
            f"for {silent_s:.0f} s."
        )

    def subscribed(self, at: WireConnection, consumer_id: int) -> None:
        """Send waiting acknowledgements to a new subscription. Drop them after a long absence."""
        with self._changed:
            if not self.may_be_sent(at):
                _log.debug(
                    "dropped %d acknowledgements in %s, because there was no connection for too "
                    "long",
                    len(self._unsent), self._topic_partition,
                )  # fmt: skip
                self._unsent.clear()
                self._changed.notify_all()
            self._at = at
            if consumer_id > self._lost_id:
                self._lost_s = None
            self._send(at, consumer_id)

    def may_be_sent(self, at: WireConnection) -> bool:
        """Return whether waiting acknowledgements may be sent on a connection."""
        # If the connection was never lost, the same broker still has the same data.
        lost_s = self._lost_s
        return at is self._at or lost_s is None or time.monotonic() - lost_s <= SENT_AGAIN_WITHIN_S

    def lost(self, consumer_id: int) -> None:
        """Requeue acknowledgements that were sent with a lost consumer id."""
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
            self._refusals.succeeded()  # The next subscription may accept acknowledgements.

    def wait(self, timeout_s: float) -> int:
        """Wait until everything is confirmed. Return the number of unconfirmed entries."""
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
        """Send nothing more. Return the unsent entries."""
        with self._changed:
            self._closed = True
            left, self._unsent = self._unsent, []
            return left

    def take_unconfirmed(self) -> list[EntryId]:
        """Stop waiting for receipts. Return the sent, unconfirmed entries."""
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
        """Send waiting acknowledgements. Return whether none is left. Call it under the lock."""
        while self._unsent:
            if at is None or consumer_id <= self._lost_id:
                return False
            refused = self._refusals.error is not None
            if refused and self._asked:
                return False
            some = self._unsent[: REFUSED_AT_ONCE if refused else ACKNOWLEDGED_AT_ONCE]
            content = api.Ack(consumer_id=consumer_id, ack_type=_INDIVIDUAL)
            for ledger, entry in some:
                # Building a list of id objects first takes eight times as long.
                content.message_id.add(ledger=ledger, entry=entry)
            try:
                number = at.begin("ack", content, self._answered)
            except BrokerUnavailableError:
                return False
            del self._unsent[: len(some)]
            if not self._asked:
                self._answered_s = time.monotonic()
            self._asked[number] = at, some
            self._asked_entries += len(some)
        return True

    def _answered(self, number: int, answer: Future[Any]) -> None:
        ends: KeyShardError | None = None
        with self._changed:
            entries = self._taken_out(number)
            self._answered_s = time.monotonic()
            error = answer.exception()
            if error is None:
                self._refusals.succeeded()
                self._send(*self._standing())
            else:
                _log.debug("acknowledging in %s: %s", self._topic_partition, one_line(error))
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
