"""Consumers and readers that return whole entries."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from keyshard.broker.port import ReadOptions, StartPosition, SubscriptionSpec
from keyshard.broker.wire.ack_grouping import AckGrouping
from keyshard.broker.wire.connection import WireConnection
from keyshard.broker.wire.decoding import decode
from keyshard.broker.wire.entries import Decoded, RawEntry
from keyshard.broker.wire.frames import api
from keyshard.broker.wire.reconnect import Shared
from keyshard.broker.wire.subscription import WireSubscription
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.ring.hash_range import HashRange
from keyshard.core.window.receiver_queue_size import RAW_ENTRY_BYTES, PrefetchSize

CONFIRM_S = 2.0
"""Longest wait at a close for receipts of acknowledgements, seconds."""
QUIET_S = 2.0
"""Silence after which a broker is nudged, seconds; jittered between half and twice."""
UNLIMITED_BYTES = 1 << 60
_EXCLUSIVE, _KEY_SHARED = 0, 3
_STICKY = 1
_LATEST, _EARLIEST = 0, 1

_log = logging.getLogger(__name__)


class WireConsumer(WireSubscription):
    """A consumer of one hash range of one topic partition.

    Args:
        shared: State that all handles share.
        spec: Hash range, name and limits of the consumer.
        start: Where a new subscription begins.
        hand_on: Called at the close with the entries that this consumer could not acknowledge; lets
            another open consumer acknowledge them. The broker may have delivered them to that
            consumer, and would not redeliver them while it is open.
    """

    def __init__(
        self,
        shared: Shared,
        spec: SubscriptionSpec,
        start: StartPosition,
        *,
        hand_on: Callable[[WireConsumer, Sequence[EntryId]], None] = lambda *_: None,
    ) -> None:
        super().__init__(shared, spec.topic_partition, _queue_of(spec), self._key_shared)
        self._hand_on = hand_on
        self._spec = spec
        self._latest = start is StartPosition.LATEST
        self._acks = AckGrouping(
            spec.topic_partition, self.standing, shared.reconnects.until_true,
            partial(self._error, "acknowledge in"), self._end,
        )  # fmt: skip
        self._watched = False
        """Whether a nudge is scheduled in case the broker stays silent."""
        self._stirred = False
        """Whether messages were taken since the last check for silence."""

    @property
    def hash_range(self) -> HashRange:
        return self._spec.hash_range

    def receive(self, timeout_ms: int) -> list[EntryBlock]:
        self.raise_refused()
        entries = self.take(timeout_ms / 1000)
        if not entries:
            return []
        decoded = decode(
            entries, self.topic_partition, self._spec.columns, at_once_bytes=self.at_once_bytes
        )
        self.used(decoded.messages, entries[: decoded.seen])
        return self.accept_decoded(decoded, entries)

    def used(
        self, messages: int, entries: Sequence[RawEntry], ahead_max: int | None = None
    ) -> None:
        super().used(messages, entries, ahead_max)
        self._watch()

    def _watch(self) -> None:
        """Schedule a check for silence, since the broker now has permits."""
        with self._changed:
            if self._watched:
                self._stirred = True
                return
            self._watched = True
        self._shared.nudges.until_true(self._nudge, QUIET_S)

    def _nudge(self) -> bool:
        """Grant a few permits to a silent broker. Return whether to stop checking for silence.

        A Key_Shared dispatcher may hold back redeliveries until an event occurs on its subscription
        (apache/pulsar#23845). A grant is such an event. Nudges become less frequent, and stop
        until messages are taken again.
        """
        with self._changed:
            at, consumer_id = self._at, self._id
            stirred, self._stirred = self._stirred, False
            silent = at is not None and not self._queue
            permits = self._queue.permits.nudge() if silent and not stirred else 0
            self._watched = silent and (stirred or permits > 0)
        if at is not None:
            self._permit(at, consumer_id, permits)
        if silent and stirred:
            # Restart the waits from the shortest.
            self._shared.nudges.until_true(self._nudge, QUIET_S)
        return not permits

    def acknowledge(self, entries: Sequence[EntryId]) -> None:
        self._check_open()
        self._acks.add(entries)

    def problem(self) -> str:
        return super().problem() or ("" if self._closed else self._acks.refused())

    def unconfirmed(self, timeout_s: float) -> int:
        return 0 if self._closed else self._acks.wait(timeout_s)

    def close(self, timeout_s: float | None = None, *, for_another: bool = False) -> None:
        if not for_another and timeout_s is None and (left := self.unconfirmed(CONFIRM_S)):
            warn_of_unconfirmed(left, str(self.topic_partition))
        if unsent := self._acks.close():
            self._hand_on(self, unsent)
        try:
            super().close(timeout_s)
        finally:
            if for_another and (rest := self._acks.take_unconfirmed()):
                # A broker that dropped this consumer without notice ignored them.
                self._hand_on(self, rest)

    def stands_in_for(self, other: WireConsumer) -> bool:
        """Return whether this consumer can acknowledge entries that another one could not."""
        at, _ = self.standing()
        same = self._spec.subscription == other._spec.subscription
        same = same and self.topic_partition == other.topic_partition
        return same and at is not None and at.is_open and other._acks.may_be_sent(at)

    def lost(self, handle_id: int, *, ended: bool) -> None:
        self._acks.lost(handle_id)
        super().lost(handle_id, ended=ended)

    def subscribed_again(self, at: WireConnection, consumer_id: int) -> None:
        """Send outstanding acknowledgements first, so that their entries are not redelivered."""
        self._latest = False
        self._acks.subscribed(at, consumer_id)
        self._watch()

    def _key_shared(self) -> Any:
        where = self.hash_range
        return api.Subscribe(
            topic=self.topic_partition.name.encode(),
            subscription=self._spec.subscription.encode(),
            sub_type=_KEY_SHARED,
            consumer_id=0,
            request_id=0,
            consumer_name=self._spec.consumer_name.encode(),
            initial_position=_LATEST if self._latest else _EARLIEST,
            key_shared=api.KeySharedMeta(
                mode=_STICKY, hash_ranges=[api.IntRange(start=where.start, end=where.end)]
            ),
        )


def warn_of_unconfirmed(entries: int, where: str) -> None:
    """Warn of acknowledgements without a receipt at a close."""
    _log.warning(
        "The broker did not confirm the acknowledgement of %d entries of %s. If they are not "
        "acknowledged, the broker delivers them again; the next run drops them by its "
        "checkpoint.",
        entries, where,
    )  # fmt: skip


def _queue_of(spec: SubscriptionSpec) -> PrefetchSize:
    size, bytes_max = spec.receiver_queue_size, spec.receiver_queue_bytes
    if bytes_max is None:
        return PrefetchSize(size, UNLIMITED_BYTES, size)
    if spec.message_bytes is None:
        return PrefetchSize(size, bytes_max)
    return PrefetchSize(size, bytes_max, bytes_max // (spec.message_bytes + RAW_ENTRY_BYTES))


class WireReader(WireSubscription):
    """Reads a topic partition from a position.

    A reader acknowledges nothing, so its cursor stays at the start. If a time to live or an
    administrator expires messages, the cursor moves, and the broker skips stored entries
    (apache/pulsar#26504). If entries are missing between two received ones, the reader asks for the
    mark-delete position. If it is before the gap, the missing entries are not stored. Otherwise,
    the reader subscribes anew at the gap.

    Before the first entry, the mark-delete position may be after the gap for another reason: the
    broker itself acknowledges markers, for example. If a second reader then gets the same first
    entry, the missing entries are not stored either.

    Args:
        shared: State that all handles share.
        topic_partition: The topic partition.
        start: First entry to read.
        how: Limits, and the content to read.
    """

    def __init__(
        self, shared: Shared, topic_partition: TopicPartition, start: EntryId, how: ReadOptions
    ) -> None:
        self._start = start
        self._passed: EntryId | None = None
        """The last entry that was handed out or skipped."""
        self._served_id = 0
        """Consumer id of the subscription that entries were handed out from last."""
        self._how = how
        queue = PrefetchSize(how.receiver_queue_size, how.receiver_queue_bytes, how.first)
        super().__init__(
            shared, topic_partition, queue, self._from_here, ahead_max=self._ahead_max()
        )
        self._name = f"reader-{uuid.uuid4().hex[:16]}".encode()

    def read(self, timeout_ms: int) -> list[EntryBlock]:
        self.raise_refused()
        entries = self.take(timeout_ms / 1000)
        try:
            proved = self._proved(entries)
        except BaseException:
            self._put_back(entries)
            raise
        if not proved:
            return []
        self._served_id = self._taken_id
        decoded = self._decode(entries[:proved])
        self.used(decoded.messages, entries[: decoded.seen], self._ahead_max())
        return self.accept_decoded(decoded, entries)

    def _proved(self, entries: Sequence[RawEntry]) -> int:
        """Return how many leading entries have no stored entry missing before or among them."""
        at = _gap(self._expected(), entries)
        if at is None:
            return len(entries)
        marked = self._marked()
        connection, consumer_id = self.standing()
        if connection is None or consumer_id != self._taken_id:
            return 0  # A new subscription's cursor may have answered. It gets the entries again.
        gap, number = at
        is_start = not number and self._served_id != self._taken_id
        if is_start and marked >= gap and self._first_of_another(gap) == entries[0].id:
            gap, number = _gap(entries[0].id, entries) or (marked, len(entries))
        if marked < gap:
            return len(entries)
        if not number:
            _log.info(
                "The broker moved a reader of %s from %d:%d to %d:%d, as a time to live does. The "
                "entries between are read again.",
                self.topic_partition, *gap, *entries[0].id,
            )  # fmt: skip
            self._ask_again(connection, consumer_id)
        # The next read begins at the gap.
        return number

    def _marked(self) -> EntryId:
        """Ask for the mark-delete position; (-1, -1) if an old broker does not return it."""
        ends = self._ask_for_ends()
        if not ends.HasField("consumer_mark_delete_position"):
            return EntryId(-1, -1)
        marked = ends.consumer_mark_delete_position
        return EntryId(_signed(marked.ledger), _signed(marked.entry))

    def _first_of_another(self, start: EntryId) -> EntryId | None:
        """Return the first entry that a new reader gets; ``None`` if it gets none in time."""
        how = ReadOptions(receiver_queue_size=1, first=1)
        other = WireReader(self._shared, self.topic_partition, start, how)
        other.open()
        try:
            entries = other.take(self._shared.timeout_s)
        finally:
            other.close()
        return entries[0].id if entries else None

    def _expected(self) -> EntryId | None:
        """Return the lowest id that the next entry can have; ``None`` at the topic's beginning."""
        if self._passed is not None:
            return EntryId(self._passed.ledger, self._passed.entry + 1)
        return self._start if self._start > EntryId(0, 0) else None

    def passed(self, entry_id: EntryId) -> None:
        self._passed = entry_id

    def _ahead_max(self) -> int:
        """Return the number of messages to request ahead.

        An entry has at least one message. So if the last wanted entry is in the current ledger, the
        number of entries up to it is enough. The broker reads as many entries as it has permits for
        messages, and sends them whole.
        """
        most, last = self._how.receiver_queue_size, self._how.last
        ledger, entry = self._start if self._passed is None else self._passed
        if last is None or ledger != last.ledger:
            return most
        left = last.entry - entry + (self._passed is None)
        return max(1, min(most, left))

    def _decode(self, entries: Sequence[RawEntry]) -> Decoded:
        decoded = decode(
            entries, self.topic_partition, self._how.columns, at_once_bytes=self.at_once_bytes
        )
        if decoded.refused is None:
            self._passed = entries[decoded.seen - 1].id
        elif decoded.blocks:
            self._passed = decoded.blocks[-1].id
        return decoded

    def at_end(self) -> bool:
        last = self.last_entry()
        if last is None:
            return True
        return last < self._start if self._passed is None else last <= self._passed

    def stayed_connected(self) -> bool:
        return not self.losses and self.is_connected()

    def _from_here(self) -> Any:
        ledger, entry = self._start
        if self._passed is not None:
            ledger, entry = self._passed.ledger, self._passed.entry + 1
        mask = (1 << 64) - 1
        # With a batch index, the broker includes the start entry.
        start = api.MessageId(ledger=ledger & mask, entry=entry & mask, batch_index=0)
        return api.Subscribe(
            topic=self.topic_partition.name.encode(),
            subscription=self._name,
            sub_type=_EXCLUSIVE,
            consumer_id=0,
            request_id=0,
            durable=False,
            start_message_id=start,
            initial_position=_EARLIEST,
            # A partition without entries may not be created yet, although its topic is.
            create=self.topic_partition.partition >= 0,
        )


def _gap(expected: EntryId | None, entries: Sequence[RawEntry]) -> tuple[EntryId, int] | None:
    """Return the id of the first missing entry, and the index of the entry after it."""
    if not entries:
        return None
    first, last = entries[0].id, entries[-1].id
    expected = expected or EntryId(first.ledger, 0)
    if first > expected:
        return expected, 0
    if (last.ledger, last.entry - first.entry) == (first.ledger, len(entries) - 1):
        return None
    for index, (one, other) in enumerate(pairwise(entries), 1):
        following = EntryId(one.id.ledger, one.id.entry + 1)
        if other.id > following:
            return following, index
    return None


def _signed(number: int) -> int:
    """Return the signed number that the protocol stores as an unsigned one."""
    return number - (1 << 64) if number >= 1 << 63 else number
