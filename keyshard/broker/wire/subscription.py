"""The common part of a consumer and a reader: a subscription at the broker of the topic partition.

If a subscription is lost, it is subscribed again. Entries that were not taken by then are dropped,
because the broker sends them again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from keyshard.base_error import AGAIN
from keyshard.broker.unreadable_entries import entry_of
from keyshard.broker.wire.connection import WireConnection
from keyshard.broker.wire.entries import PAYLOAD_AT_ONCE, Decoded, RawEntry
from keyshard.broker.wire.errors import RefusedError, error_of
from keyshard.broker.wire.frames import api
from keyshard.broker.wire.permits import GRANT_MAX
from keyshard.broker.wire.receiver_queue import ReceiverQueue
from keyshard.broker.wire.reconnect import RETRY_S, ReconnectingHandle, Shared
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.window.receiver_queue_size import PrefetchSize
from keyshard.errors import (
    BrokerError,
    BrokerUnavailableError,
    KeyShardError,
    UnreadableEntryError,
)

ENDED_REST_S = 0.2
"""Longest pause before the first attempt after the broker ended the subscription, seconds. A topic
that is being deleted may accept a consumer and then forget it without an error."""
WAITS_S = 5.0
"""Time without an answer to an attempt after which it is reported as a problem, seconds."""
_log = logging.getLogger(__name__)


class WireSubscription(ReconnectingHandle):
    """A subscription, and the entries that arrived and were not taken yet.

    Args:
        shared: State that all handles share.
        topic_partition: The subscribed topic partition.
        queue: Size of the receiver queue.
        request: Builds the subscribe request; called for every attempt.
        ahead_max: Maximum number of messages that the broker may first send ahead, if that is
            less than the queue holds.
    """

    request_name = "subscribe"
    action = "subscribe to"
    rest_s = ENDED_REST_S

    def __init__(
        self,
        shared: Shared,
        topic_partition: TopicPartition,
        queue: PrefetchSize,
        request: Callable[[], Any],
        *,
        ahead_max: int | None = None,
    ) -> None:
        super().__init__(shared, topic_partition)
        self.losses = 0
        """Number of times that the subscription was lost."""
        self._queue = ReceiverQueue(queue, shared.excess, ahead_max)
        self._make_request = request
        self._taken_id = 0
        """Consumer id of the subscription from which entries were taken last."""
        self._ring: Callable[[], None] | None = None
        self._refused: KeyShardError | None = None
        """Why the entry after the last handed-out one is refused."""

    def take(self, timeout_s: float) -> list[RawEntry]:
        """Take arrived entries, oldest first; ``[]`` if none arrive in time.

        Raises:
            BrokerError: The subscription is closed.
        """
        end_s = time.monotonic() + timeout_s
        with self._changed:
            while not self._queue:
                self._check_open()
                if self._queue.overflown:
                    break
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    return []
                self._changed.wait(left_s)
            self._check_open()
            self._taken_id = self._id
            found = self._queue.take()
            if found:
                return found
            at, consumer_id = self._at, self._id
        if at is not None:
            _log.info(
                "the broker sends more of %s than was requested, or more than fits into memory; "
                "keyshard requests the rest again",
                self.topic_partition,
            )
            self._ask_again(at, consumer_id)
        return []

    @property
    def at_once_bytes(self) -> int:
        """Memory limit of one decoding step, bytes; at most that of the queue."""
        return min(PAYLOAD_AT_ONCE, self._queue.bytes_max)

    def _ask_again(self, at: WireConnection, consumer_id: int) -> None:
        """Subscribe anew to get entries again, with permits for messages of their size."""
        at.unregister(consumer_id)
        self._forget(at, consumer_id)
        self.lost(consumer_id, ended=False)

    def accept_decoded(self, decoded: Decoded, entries: Sequence[RawEntry]) -> list[EntryBlock]:
        """Return the blocks of the entries that were taken last; requeue those not decoded.

        Raises:
            KeyShardError: The first of them is refused.
        """
        self._put_back(entries[decoded.seen :])
        self._refused = decoded.refused
        if self._refused is not None and not decoded.blocks:
            self.raise_refused()
        return decoded.blocks

    def _put_back(self, rest: Sequence[RawEntry]) -> None:
        """Requeue entries that were taken last."""
        with self._changed:
            if rest and self._taken_id == self._id and not self._closed:
                self._queue.put_back(rest)

    def raise_refused(self) -> None:
        """Raise the refusal of the next entry, if any.

        An unreadable entry is raised once, and not if it will be sent again.

        Raises:
            KeyShardError: The refusal.
        """
        refused = self._refused
        if refused is None:
            return
        self._check_open()
        if isinstance(refused, UnreadableEntryError):
            self._refused = None
            with self._changed:
                if self._taken_id != self._id:
                    return
            self.passed(entry_of(refused))
        raise refused

    def passed(self, entry_id: EntryId) -> None:
        """Note that an unreadable entry was reported."""

    def used(
        self, messages: int, entries: Sequence[RawEntry], ahead_max: int | None = None
    ) -> None:
        """Grant permits for the messages that were taken last.

        Args:
            messages: Number of the messages, as the broker counts them.
            entries: Entries of the messages.
            ahead_max: Maximum number of messages that the broker may send ahead from now on, if
                that is less than the queue holds.
        """
        with self._changed:
            self._queue.measure(messages, entries, ahead_max)
            if self._at is None or self._taken_id != self._id:
                return
            permits = self._queue.use(messages)
            at, consumer_id = self._at, self._id
        self._permit(at, consumer_id, permits)

    def _permit(self, at: WireConnection, consumer_id: int, messages: int) -> None:
        try:
            while messages > 0:
                permits = min(messages, GRANT_MAX)
                at.send("flow", api.Flow(consumer_id=consumer_id, permits=permits))
                messages -= permits
        except BrokerUnavailableError:
            _log.debug("%s lost its connection", self.topic_partition)

    def when_ready(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once when there are entries to take."""
        with self._changed:
            if not self._queue:
                self._ring = callback
                return
        callback()

    def is_connected(self) -> bool:
        """Return whether the broker holds the subscription, as far as this side knows."""
        at = self._at
        return not self._closed and at is not None and at.is_open

    def problem(self) -> str:
        at, error, waits_for = self._at, self._refusals.error, self._waits_for
        if at is not None:
            return at.unresponsive()
        if self._closed or self._ended is not None:
            return ""
        if error is not None:
            return error.message
        if waits_for is not None and time.monotonic() - waits_for[1] > WAITS_S:
            waited_s = time.monotonic() - waits_for[1]
            return f"The broker at {waits_for[0]} has not answered for {waited_s:.0f} s."
        return ""

    def has_given_all(self) -> bool:
        """See :meth:`Consumer.has_given_all`. No other process queues entries for this handle."""
        return self.is_connected() and not self._queue.overflown

    def standing(self) -> tuple[WireConnection | None, int]:
        """Return the connection, if any, and the consumer id on it."""
        with self._changed:
            return self._at, self._id

    def last_entry(self) -> EntryId | None:
        """Return the last stored entry; ``None`` if nothing is stored.

        Raises:
            BrokerUnavailableError: No answer before the deadline (retriable).
        """
        found = self._ask_for_ends().last_message_id
        return None if found.entry >= 1 << 63 else EntryId(found.ledger, found.entry)

    def _ask_for_ends(self) -> Any:
        """Ask for the last stored entry, and for the mark-delete position of this subscription."""
        end_s = time.monotonic() + self._shared.timeout_s
        while True:
            with self._changed:
                self._check_open()
                at, consumer_id = self._at, self._id
            try:
                if at is None:
                    raise BrokerUnavailableError(
                        f"{self.topic_partition} has no connection to its broker.",
                        "Check that the broker is running.",
                    )
                asked = api.GetLastMessageId(consumer_id=consumer_id, request_id=0)
                left_s = max(0.001, end_s - time.monotonic())
                return at.ask("get_last_message_id", asked, left_s)
            except (BrokerUnavailableError, RefusedError) as exc:
                error = self._error("ask for the last entry of", exc)
                if not error.retriable or time.monotonic() + RETRY_S >= end_s:
                    raise error from exc
            time.sleep(RETRY_S)

    def close(self, timeout_s: float | None = None) -> None:
        """Close the subscription, after everything that was sent before. Idempotent.

        Args:
            timeout_s: Longest wait for the broker, seconds; ``None``: the timeout of a request.

        Raises:
            BrokerUnavailableError: The broker did not answer in time.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            at, consumer_id = self._at, self._id
            self._at = self._ring = None
            self._queue.clear()
            self._changed.notify_all()
        if at is not None:
            self._give_back(
                at, consumer_id, self._shared.timeout_s if timeout_s is None else timeout_s
            )

    def arrived(self, handle_id: int, entries: Sequence[RawEntry]) -> None:
        with self._changed:
            if handle_id != self._id or self._closed:
                return
            self._queue.put(entries)
            ring, self._ring = self._ring, None
            self._changed.notify()
        if ring is not None:
            ring()

    def _was_lost(self) -> None:
        self.losses += 1
        self._queue.clear()

    def _end(self, error: KeyShardError) -> None:
        """End the subscription for good. The next call that takes entries raises the error."""
        with self._changed:
            if self._is_over():
                return
            self._ended = error
            self._at, self._id = None, 0
            self._queue.clear()
            ring, self._ring = self._ring, None
            self._changed.notify_all()
        if ring is not None:
            ring()

    def subscribed_again(self, at: WireConnection, consumer_id: int) -> None:
        """Hook: called twice for a new subscription, before and after its first permits."""

    def _may_pass(self, error: KeyShardError) -> bool:
        # A topic that is being moved is soon served by another broker.
        return isinstance(error, BrokerUnavailableError)

    def _request(self, handle_id: int) -> Any:
        request = self._make_request()
        request.consumer_id = handle_id
        return request

    def _opened(self, at: WireConnection, handle_id: int, answer: Any) -> None:  # noqa: ARG002
        self.subscribed_again(at, handle_id)
        with self._changed:
            if self._lost_id >= handle_id:
                raise BrokerUnavailableError(
                    f"Could not subscribe to {self.topic_partition}: it is being moved.", AGAIN
                )
            closed = self._is_over()
            if not closed:
                self._at, self._id = at, handle_id
            permits = self._queue.permits.begin()
        if closed:
            self._give_back(at, handle_id, self._shared.timeout_s)
            return
        try:
            at.send("flow", api.Flow(consumer_id=handle_id, permits=permits))
        except BrokerUnavailableError:
            # The connection may have been lost before this subscription could be notified.
            self.lost(handle_id, ended=False)
        # Send the acknowledgements that came in between.
        self.subscribed_again(at, handle_id)

    def _give_back(self, at: WireConnection, consumer_id: int, timeout_s: float) -> None:
        request = api.CloseConsumer(consumer_id=consumer_id, request_id=0)
        try:
            at.ask("close_consumer", request, timeout_s)
        except BrokerUnavailableError:
            if at.is_open:
                raise
            # The broker closes the consumers of a lost connection.
        except RefusedError as exc:
            raise self._error("close", exc) from exc
        finally:
            at.unregister(consumer_id)

    def _forget(self, at: WireConnection, handle_id: int) -> None:
        with suppress(BrokerUnavailableError):
            at.send("close_consumer", api.CloseConsumer(consumer_id=handle_id, request_id=0))

    def _refusal(self, action: str, refused: RefusedError) -> BrokerError:
        where = self.topic_partition
        return error_of(refused, action, where, where.topic, self._shared.credentials.who())
