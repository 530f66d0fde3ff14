"""The window: entries received and not released, and the cut that makes a batch of them.

One window serves one source. It is not thread-safe: its owner calls it under one lock.

Life of an entry::

    received --cut--------------------> planned --release--> committed (only its id is kept,
        |                                ^   ^               in ``delivered``)
        +--take--> taken --commit--------+   +-- replayed after a restart

A redelivered entry is dropped in every state. If it is committed, it is acknowledged again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from operator import attrgetter

from keyshard.core.ack_gaps import GapEvidence
from keyshard.core.position.checkpoint import Checkpoint, PartitionCheckpoint, SubscriptionId
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.topic_identity import lowest_known_ledger
from keyshard.core.topic_segments import SegmentOrder, is_segment, reading_order
from keyshard.core.window.admission import Budget, split_limits
from keyshard.core.window.backpressure import Backpressure
from keyshard.core.window.layout import home_range
from keyshard.core.window.partition_window import (
    PartitionWindow,
    ReceiveResult,
    payload_of,
    rows_of,
)
from keyshard.core.window.planned_batches import CheckpointBuilder, PlannedBatches
from keyshard.core.window.task_costs import TaskCosts

_ANY_BYTES = 2**62
"""Size of a checkpoint without a limit."""


class Window:
    """Received and planned entries of all topic partitions of a source."""

    def __init__(self, checkpoint: Checkpoint, ranges: int, budget: Budget) -> None:
        self._newest = CheckpointBuilder(checkpoint)
        self.ranges = ranges
        self.budget = budget
        self.known: dict[TopicPartition, PartitionWindow] = {}
        """Consumed topic partitions, and former ones until they are forgotten completely."""
        self.active: dict[TopicPartition, None] = {}
        """Consumed topic partitions."""
        self._filled: dict[TopicPartition, None] = {}
        """Topic partitions with received entries; the next in turn comes first."""
        self._changing: dict[TopicPartition, None] = {}
        """Topic partitions whose state changes in the next checkpoint, even without new entries."""
        self.received_rows = 0
        """Rows that a cut could take."""
        self.tight: set[TopicPartition] = set()
        """Topic partitions whose newest cut or commit left entries out, because the checkpoint
        was full."""
        self.pauses = Backpressure(self)
        """Ranges that pause. The caller that adds or drops partitions calls
        :meth:`Backpressure.shared_anew`."""
        self.batches = PlannedBatches()
        self.order = SegmentOrder()
        """Segments hand out nothing while the window has received entries of an ancestor."""
        self.task_costs = TaskCosts()
        """Decides the number of partitions of a batch at its cut; the checkpoint stores it."""
        self.completed: dict[TopicPartition, list[EntryBlock]] = {}
        """Entries planned by :meth:`plan_completed` and not released by
        :meth:`release_completed`."""
        self.counters = WindowCounters()
        for topic_partition, state in checkpoint.partitions.items():
            self.known[topic_partition] = PartitionWindow(
                state, is_segment(topic_partition), lowest_ledger=lowest_known_ledger(state)
            )
            self._record(topic_partition, state)
            self.add_partition(topic_partition)

    @property
    def newest(self) -> Checkpoint:
        """The checkpoint that the next cut continues."""
        return self._newest.whole

    def add_partition(self, topic_partition: TopicPartition) -> None:
        """Add a topic partition, or activate a dropped one again. Idempotent."""
        window = self.known.get(topic_partition)
        if window is None:
            window = PartitionWindow(PartitionCheckpoint(), is_segment(topic_partition))
            self.known[topic_partition] = window
        window.gone = False
        window.doubt()
        self.active[topic_partition] = self._changing[topic_partition] = None

    def drop_partition(self, topic_partition: TopicPartition, *, gone: bool) -> None:
        """Forget the received entries of a topic partition. Idempotent.

        Planned entries stay until their release.

        Args:
            gone: Whether the topic partition was deleted. If it is only no longer consumed, its
                delivered set stays in the checkpoint.
        """
        window = self.known.get(topic_partition)
        if window is None:
            return
        self.active.pop(topic_partition, None)
        self._filled.pop(topic_partition, None)
        self.received_rows -= window.ready_rows
        window.drop_received()
        window.tight = False
        self.tight.discard(topic_partition)
        window.gone = gone
        self._changing[topic_partition] = None
        self._forget(topic_partition)

    def reassign(self, owners: Sequence[int], budget: Budget) -> None:
        """Change the owners of the ring. The new number of ranges counts from the next cut on.

        Planned batches keep the layout of their checkpoints.

        Args:
            owners: The range that owns each slot.
            budget: The new limits of the window.
        """
        self.ranges = max(owners) + 1
        self.budget = budget
        for window in self.known.values():
            window.reassign(owners, self.ranges)
        self.pauses.shared_anew()

    def receive(
        self, topic_partition: TopicPartition, range_index: int, blocks: Sequence[EntryBlock]
    ) -> list[ReceiveResult]:
        """Take delivered entries of a range.

        Returns:
            The outcome of each entry.

        Raises:
            TopicRecreatedError: The broker assigned the ids a second time. Either the entry is
                newer than all delivered ones, but the checkpoint has its id as delivered, or its
                ledger is below all known ones. Or the entry is newer than the one held under its
                id.
        """
        window, counters = self.known[topic_partition], self.counters
        entries, ready, rows = len(window.received), window.ready_rows, window.received_rows
        try:
            outcomes = window.receive(topic_partition, range_index, blocks)
        finally:
            # An error ends the source, but the entries before it were received.
            if new := len(window.received) - entries:
                self.received_rows += window.ready_rows - ready
                self._filled.setdefault(topic_partition)
                counters.rows_received += window.received_rows - rows
                counters.entries_received += new
        if new < len(blocks):
            counters.duplicates_dropped += rows_of(blocks) - (window.received_rows - rows)
        return outcomes

    def cut(self, rows_max: int | None = None, payload_max: int | None = None) -> Checkpoint | None:
        """Plan the next batch of received entries; ``None`` without rows.

        A cut takes at most half of the budget, so that receiving continues while the host works.
        Limits are split over the topic partitions in proportion to their received rows. A single
        larger entry is still taken. Segments come with all entries of their ancestors, or later.

        Args:
            rows_max: Most rows of the batch.
            payload_max: Most payload of the batch, bytes.
        """
        filled = {tp: self.known[tp] for tp in sorted(self._filled, key=reading_order)}
        ready = {tp: window for tp, window in filled.items() if not window.waiting_rows}
        budget = self.budget
        demands = {tp: window.received_sizes for tp, window in ready.items()}
        rows_max = min(rows_max or budget.rows_max, max(1, budget.rows_max // 2))
        totals = rows_max, max(1, budget.bytes_max // 2), payload_max
        left_out = {tp for tp, window in ready.items() if window.left_out}
        limits = split_limits(demands, totals, left_out)
        if limits != demands:
            # Not everything fits. Then segments take no share before their ancestors are cut.
            demands = {tp: sizes for tp, sizes in demands.items() if not self._waits(tp)}
            limits = split_limits(demands, totals, left_out)
        entries: dict[TopicPartition, list[EntryBlock]] = {}
        for tp, most in limits.items():
            room = self._newest.room(tp, len(limits), budget.checkpoint_bytes_max)
            if not self._waits(tp) and (blocks := ready[tp].take(most, room)):
                entries[tp] = blocks
            ready[tp].refused_at_bytes = self._newest.bytes
            self._looked(tp)
        self.received_rows = sum([self.known[tp].ready_rows for tp in self._filled])
        for tp in ready.keys() - entries:
            ready[tp].left_out = {block.received_by for block in ready[tp].received}
        if entries:
            self._advance(entries)
            self.batches.add(self.newest, entries)
        self.pauses.cut()
        return self.newest if entries else None

    def take(self, rows_max: int | None = None) -> list[tuple[TopicPartition, int, EntryBlock]]:
        """Hand received entries to handlers. The entries stay held until their batch is released.

        Args:
            rows_max: Approximate number of rows, split equally over topic partitions; default: all.

        Returns:
            (topic partition, index of its range, entry), in order of receipt per topic partition.
                That range received it; of an entry of a segment, it has the first message.
        """
        turn = list(islice(self._filled, rows_max))
        share = None if rows_max is None or not turn else max(1, rows_max // len(turn))
        taken: list[tuple[TopicPartition, int, EntryBlock]] = []
        for topic_partition in turn:
            if self._waits(topic_partition):
                self._looked(topic_partition)
                continue
            window = self.known[topic_partition]
            self.received_rows -= window.ready_rows
            for block in window.take_oldest(share):
                index = block.received_by
                if window.whole:
                    index = home_range(topic_partition, block.id, block.slot, self.ranges)
                taken.append((topic_partition, index, block))
            self.received_rows += window.ready_rows
            self._looked(topic_partition)
        return taken

    def identify(self, subscription_id: SubscriptionId | None) -> None:
        """Set the id of the subscription in the next checkpoints."""
        self._newest.identify(subscription_id)

    def plan_completed(
        self, completed: Mapping[TopicPartition, Collection[EntryId]], *, limited: bool = True
    ) -> dict[TopicPartition, list[EntryId]]:
        """Put entries that handlers completed into the newest checkpoint.

        Args:
            completed: Entries that :meth:`take` handed out.
            limited: Whether the checkpoint has a limit. The last one of a run has none: entries
                left out of it would be handled again.

        Returns:
            Entries for which the checkpoint has no room.
        """
        entries: dict[TopicPartition, list[EntryBlock]] = {}
        left: dict[TopicPartition, list[EntryId]] = {}
        for topic_partition, ids in sorted(completed.items(), key=lambda of: reading_order(of[0])):
            if left and not left.keys().isdisjoint(self.order.ancestors(topic_partition)):
                # A restart would handle those of the ancestor again, after newer messages of a key.
                left[topic_partition] = sorted(ids)
                continue
            bytes_max = self.budget.checkpoint_bytes_max if limited else _ANY_BYTES
            room = self._newest.room(topic_partition, len(completed), bytes_max)
            blocks = self.known[topic_partition].give_back(ids, room)
            self._looked(topic_partition)
            if blocks:
                entries[topic_partition] = blocks
                self.completed.setdefault(topic_partition, []).extend(blocks)
            if len(blocks) < len(ids):
                left[topic_partition] = sorted(ids)[len(blocks) :]
        if entries:
            self._advance(entries)
        self.pauses.cut()
        return left

    def release_completed(self) -> dict[TopicPartition, list[EntryId]]:
        """Forget committed entries. The newest checkpoint must be durable, unless none is stored.

        Returns:
            The entries to acknowledge.
        """
        completed, self.completed = self.completed, {}
        released = self._let_go(completed)
        self.pauses.released(released)
        return released

    def expect(self, checkpoint: Checkpoint) -> None:
        """Hold the ids of a planned batch before its replay.

        Without this, a redelivery that arrives first would count as committed and be acknowledged.
        """
        for topic_partition, state in checkpoint.partitions.items():
            window = self.known[topic_partition]
            window.expected |= state.batch

    def plan(
        self, checkpoint: Checkpoint, entries: Mapping[TopicPartition, Sequence[EntryBlock]]
    ) -> None:
        """Put back an expected batch that was replayed after a restart.

        Entries missing in ``entries`` are lost: they are counted and no longer expected.
        """
        for topic_partition, blocks in entries.items():
            window = self.known[topic_partition]
            window.expected -= EntrySet.of(block.id for block in blocks)
            window.hold(blocks)
        for topic_partition, state in checkpoint.partitions.items():
            window = self.known[topic_partition]
            gone = window.expected & state.batch
            window.expected -= gone
            self.counters.entries_lost += len(gone)
            self._forget(topic_partition)
        # A topic partition without entries may be forgotten before the batch is released.
        self.batches.add(checkpoint, {tp: list(blocks) for tp, blocks in entries.items() if blocks})
        self.pauses.released(entries)

    def release(self, checkpoint: Checkpoint) -> dict[TopicPartition, list[EntryId]]:
        """Forget every batch up to ``checkpoint``, which is durable. Idempotent.

        Returns:
            The entries to acknowledge; empty if the batch was released before.
        """
        released: dict[TopicPartition, list[EntryId]] = {}
        for batch in self.batches.release(checkpoint.batch_id):
            for topic_partition, ids in self._let_go(batch.entries).items():
                released.setdefault(topic_partition, []).extend(ids)
        self.pauses.released(released)
        return released

    def prove(
        self,
        topic_partition: TopicPartition,
        proofs: GapEvidence,
        owners: frozenset[int] = frozenset(),
    ) -> None:
        """Take evidence. The next cut with rows applies it.

        Args:
            topic_partition: Topic partition of the evidence.
            proofs: Entries and ledgers that are resolved.
            owners: Ranges that owe an entry of an ack gap. They never pause.
        """
        window = self.known.get(topic_partition)
        if window is None:
            return
        self.received_rows += window.waiting_rows if proofs else 0
        window.prove(proofs, owners)
        if proofs:
            self._changing[topic_partition] = None
        self.pauses.fitted(topic_partition)

    def retry_without_room(self) -> bool:
        """Let the next cut retry the rows that did not fit into an earlier, larger checkpoint.

        Other topic partitions may have made room meanwhile.

        Returns:
            Whether there are such rows.
        """
        again = [
            window
            for window in map(self.known.__getitem__, self.tight)
            if window.waiting_rows and self._newest.bytes < window.refused_at_bytes
        ]
        for window in again:
            self.received_rows += window.waiting_rows
            window.waiting_rows = 0
        return bool(again)

    @property
    def partitions(self) -> tuple[TopicPartition, ...]:
        """All consumed topic partitions."""
        return tuple(self.active)

    @property
    def checkpoint_bytes(self) -> int:
        """Approximate size of the newest checkpoint."""
        return self._newest.bytes

    @property
    def ack_gaps(self) -> int:
        """Number of gaps between runs of delivered entries, over all topic partitions."""
        return sum(window.ack_gaps for window in self.known.values())

    @property
    def rows(self) -> int:
        """Rows held: received, taken and planned."""
        return sum(window.rows for window in self.known.values())

    def oldest_published_ms(self) -> dict[TopicPartition, int]:
        """Return the publish time of the oldest held row, milliseconds since the epoch."""
        oldest = {
            where: min(filter(None, window.held.values()), default=None)
            for where, window in self.known.items()
        }
        return {where: ms for where, ms in oldest.items() if ms is not None}

    def _unreleased(self) -> Iterator[Mapping[TopicPartition, Sequence[EntryBlock]]]:
        """Yield the held entries that are in a checkpoint."""
        yield self.completed
        for batch in self.batches.values():
            yield batch.entries

    def validate(self) -> None:
        """Assert the invariants; tests and simulations call it after every step."""
        for topic_partition, window in self.known.items():
            window.validate(
                [
                    block
                    for entries in self._unreleased()
                    for block in entries.get(topic_partition, ())
                ]
            )
            assert bool(window.received) == (topic_partition in self._filled)
            assert window.tight == (topic_partition in self.tight)
            held = window.held or window.expected
            assert not window.gone or held or topic_partition in self._newest, (
                "it is never forgotten"
            )
        windows = self.known.values()
        assert self.received_rows == sum(window.ready_rows for window in windows)
        self._newest.validate()

    def _advance(self, entries: Mapping[TopicPartition, Sequence[EntryBlock]]) -> None:
        """Make the checkpoint after a batch of ``entries`` the newest."""
        changing, self._changing = self._changing, dict.fromkeys(entries)
        for topic_partition in changing | self._changing:
            window = self.known[topic_partition]
            own, old = entries.get(topic_partition, ()), window.state
            if own or old.delivered or old.floor is not None:
                self.counters.ack_gaps_resolved += window.advance(own)
                self.counters.entries_lost += window.newly_lost()
                self._record(topic_partition, None if window.gone else window.state)
            if window.gone:
                self._forget(topic_partition)
        blocks = list(chain.from_iterable(entries.values()))
        together = self.task_costs.tasks(rows_of(blocks), payload_of(blocks), self.ranges)
        self._newest.advance(self.ranges, together)

    def _record(self, topic_partition: TopicPartition, state: PartitionCheckpoint | None) -> None:
        """Store the state of a topic partition in the newest checkpoint; ``None`` removes it."""
        self._newest.record(topic_partition, state)
        if state is not None and state.batch:
            self._changing[topic_partition] = None

    def _waits(self, topic_partition: TopicPartition) -> bool:
        """Return whether the window has received entries of an ancestor of a segment."""
        return not self._filled.keys().isdisjoint(self.order.ancestors(topic_partition))

    def _looked(self, topic_partition: TopicPartition) -> None:
        """Update the bookkeeping of a topic partition from which entries were taken."""
        window = self.known[topic_partition]
        self._filled.pop(topic_partition, None)
        if window.received:
            self._filled[topic_partition] = None
        if window.tight:
            self.tight.add(topic_partition)
        else:
            self.tight.discard(topic_partition)

    def _let_go(
        self, entries: Mapping[TopicPartition, Sequence[EntryBlock]]
    ) -> dict[TopicPartition, list[EntryId]]:
        for topic_partition, blocks in entries.items():
            window = self.known[topic_partition]
            window.let_go(blocks)
            self._forget(topic_partition)
        return {where: list(map(_id, blocks)) for where, blocks in entries.items()}

    def _forget(self, topic_partition: TopicPartition) -> None:
        """Forget a deleted topic partition once none of its entries is held or checkpointed."""
        window = self.known[topic_partition]
        held = window.held or window.expected
        if window.gone and not held and topic_partition not in self._newest:
            del self.known[topic_partition]
            self._changing.pop(topic_partition, None)
            self.tight.discard(topic_partition)


_id = attrgetter("id")


# -- Counts of a window ----------------------------------------------------------------------------


@dataclass(slots=True)
class WindowCounters:
    """Counts for users, since the start of this run."""

    rows_received: int = 0
    entries_received: int = 0
    duplicates_dropped: int = 0
    """Messages that were redelivered and dropped."""
    misrouted: int = 0
    """Messages whose slot is outside the range that received them."""
    keyless: int = 0
    unreadable: int = 0
    """Messages with an invalid time, key or property."""
    corrupt_skipped: int = 0
    """Unreadable entries that were acknowledged because ``on_corrupt`` is ``skip``."""
    encrypted_skipped: int = 0
    """Encrypted entries that were acknowledged because ``on_encrypted`` is ``skip``."""
    ack_gaps_resolved: int = 0
    """Entries of ack gaps that a checkpoint counts as resolved."""
    entries_not_due: int = 0
    """Entries that a bounded run left, because their delivery time had not come."""
    entries_lost: int = 0
    """Entries left out because they are gone or were acknowledged by another application."""
