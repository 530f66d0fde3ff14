"""The window: entries received and not yet released, and the cut that makes a batch of them.

One window serves one source. It is not thread-safe: its owner calls it under one lock.

Life of an entry::

    received --cut--------------------> planned --release--> committed (only its id is kept,
        |                                ^   ^               in ``delivered``)
        +--take--> taken --commit--------+   +-- replayed after a restart

Delivered again at any time, it is dropped, and acknowledged if it is committed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice

from keyshard.core.holes.settling import Proofs
from keyshard.core.position.checkpoint import Checkpoint, PartitionCheckpoint
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.position.fingerprint import check_unknown, lowest_known_ledger
from keyshard.core.window.admission import split_limits
from keyshard.core.window.budget import Budget
from keyshard.core.window.counters import Counters
from keyshard.core.window.layout import merged
from keyshard.core.window.newest import NewestCheckpoint
from keyshard.core.window.partition_window import PartitionWindow, Receipt
from keyshard.core.window.pauses import Pauses
from keyshard.core.window.planned import PlannedBatches


class Window:
    """Received and planned entries of all topic partitions of a source."""

    def __init__(self, checkpoint: Checkpoint, ranges: int, budget: Budget) -> None:
        self._newest = NewestCheckpoint(checkpoint)
        self.ranges = ranges
        self.budget = budget
        self.known: dict[TopicPartition, PartitionWindow] = {}
        """Topic partitions that are consumed, and others until all of them is forgotten."""
        self.active: dict[TopicPartition, None] = {}
        """Topic partitions that are consumed."""
        self._filled: dict[TopicPartition, None] = {}
        """Topic partitions with received entries, the next in turn first."""
        self._changing: dict[TopicPartition, None] = {}
        """Of these the next checkpoint says something else, also without new entries."""
        self.received_rows = 0
        """Rows that a cut could take."""
        self.tight: set[TopicPartition] = set()
        """Topic partitions whose newest cut or commit left entries out: there was no room."""
        self.pauses = Pauses(self)
        """Which ranges pause. :meth:`Pauses.shared_anew` is left to who adds and drops."""
        self.batches = PlannedBatches()
        self.completed: dict[TopicPartition, list[EntryBlock]] = {}
        """What :meth:`plan_completed` took and :meth:`release_completed` has not let go."""
        self.counters = Counters()
        for topic_partition, state in checkpoint.partitions.items():
            self.known[topic_partition] = PartitionWindow(
                state, lowest_ledger=lowest_known_ledger(state)
            )
            self._record(topic_partition, state)
            self.add_partition(topic_partition)

    @property
    def newest(self) -> Checkpoint:
        """The checkpoint that the next cut continues."""
        return self._newest.whole

    def add_partition(self, topic_partition: TopicPartition) -> None:
        """Make room for a topic partition, also for one that was dropped. Idempotent."""
        window = self.known.get(topic_partition)
        if window is None:
            window = self.known[topic_partition] = PartitionWindow(PartitionCheckpoint())
        window.gone = False
        window.doubt()
        self.active[topic_partition] = self._changing[topic_partition] = None

    def drop_partition(self, topic_partition: TopicPartition, *, gone: bool) -> None:
        """Forget what a topic partition has received; what is planned stays until its release.
        Idempotent.

        Args:
            gone: Whether it exists no more, or else is only not consumed any longer: then its
                delivered set stays in the checkpoint.
        """
        window = self.known.get(topic_partition)
        if window is None:
            return
        self.active.pop(topic_partition, None)
        self._filled.pop(topic_partition, None)
        self.received_rows -= window.ready_rows
        window.drop_received()
        window.gone = gone
        self._changing[topic_partition] = None
        self._forget(topic_partition)

    def reassign(self, owners: Sequence[int], budget: Budget) -> None:
        """Others own the ring now: their number counts from the next cut on.

        Planned batches keep the layout that their checkpoints say.

        Args:
            owners: The range that owns each slot.
            budget: Most that the window holds from now on.
        """
        self.ranges = max(owners) + 1
        self.budget = budget
        for window in self.known.values():
            window.reassign(owners, self.ranges)
        self.pauses.shared_anew()

    def receive(
        self, topic_partition: TopicPartition, range_index: int, block: EntryBlock
    ) -> Receipt:
        """Take a delivered entry.

        Raises:
            TopicRecreatedError: The ids were handed out a second time: it was published later than
                everything delivered, but the checkpoint calls its id delivered, or its ledger lies
                below all that the checkpoint knows; or later than what is held under its id.
        """
        window = self.known[topic_partition]
        rows = block.rows
        if block.id in window.held or window.state.settled(block.id):
            self.counters.duplicates_dropped += rows
            return window.check_known(topic_partition, block)
        check_unknown(topic_partition, window.state.published_ms, window.lowest_ledger, block)
        self.received_rows += rows + window.waiting_rows
        if not window.received:
            self._filled[topic_partition] = None
        window.receive(block, range_index)
        self.counters.rows_received += rows
        return Receipt.ACCEPTED

    def cut(self, rows_max: int | None = None, payload_max: int | None = None) -> Checkpoint | None:
        """Plan the next batch of what was received; ``None`` without rows.

        At most half of the budget is taken, so that receiving goes on while the host works. Limits
        are split over the topic partitions by what each has; a single larger entry is still taken.

        Args:
            rows_max: Most rows of the batch.
            payload_max: Most payload of the batch, bytes.
        """
        filled = {tp: self.known[tp] for tp in self._filled}
        ready = {tp: window for tp, window in filled.items() if not window.waiting_rows}
        order = sorted(ready)
        budget = self.budget
        limits = split_limits(
            {tp: ready[tp].received_sizes for tp in order},
            (
                min(rows_max or budget.rows_max, max(1, budget.rows_max // 2)),
                max(1, budget.bytes_max // 2),
                payload_max,
            ),
            {tp for tp in order if ready[tp].left_out},
        )
        cuts = {
            tp: ready[tp].take(
                most, self._newest.room(tp, len(limits), budget.checkpoint_bytes_max)
            )
            for tp, most in limits.items()
        }
        entries = {tp: blocks for tp, blocks in cuts.items() if blocks}
        for tp in limits:
            self._looked(tp)
        self.received_rows = sum(window.ready_rows for window in filled.values())
        for tp in ready.keys() - entries:
            ready[tp].left_out = {block.received_by for block in ready[tp].received}
        if entries:
            self._advance(entries)
            self.batches.add(self.newest, entries)
        self.pauses.cut()
        return self.newest if entries else None

    def take(self, rows_max: int | None = None) -> list[tuple[TopicPartition, int, EntryBlock]]:
        """Hand received entries to handlers; they stay held until their batch is released.

        Args:
            rows_max: About how many rows, the same of each topic partition; default: all.

        Returns:
            (topic partition, index of the range that received it, entry), in order of receipt per
            topic partition.
        """
        turn = list(islice(self._filled, rows_max))
        share = None if rows_max is None or not turn else max(1, rows_max // len(turn))
        taken: list[tuple[TopicPartition, int, EntryBlock]] = []
        for topic_partition in turn:
            window = self.known[topic_partition]
            self.received_rows -= window.ready_rows
            taken += [
                (topic_partition, block.received_by, block) for block in window.take_oldest(share)
            ]
            self.received_rows += window.ready_rows
            self._looked(topic_partition)
        return taken

    def plan_completed(
        self, completed: Mapping[TopicPartition, Collection[EntryId]]
    ) -> dict[TopicPartition, list[EntryId]]:
        """Put entries that handlers completed into the newest checkpoint.

        Args:
            completed: Entries that :meth:`take` handed out.

        Returns:
            The entries that the checkpoint has no room for.
        """
        entries: dict[TopicPartition, list[EntryBlock]] = {}
        left: dict[TopicPartition, list[EntryId]] = {}
        for topic_partition, ids in completed.items():
            room = self._newest.room(
                topic_partition, len(completed), self.budget.checkpoint_bytes_max
            )
            blocks = self.known[topic_partition].give_back(ids, room)
            self._looked(topic_partition)
            if blocks:
                entries[topic_partition] = blocks
                self.completed.setdefault(topic_partition, []).extend(blocks)
            if len(blocks) < len(ids):
                left[topic_partition] = sorted(ids)[len(blocks) :]
        if entries:
            self._advance(entries)
        return left

    def release_completed(self) -> dict[TopicPartition, list[EntryId]]:
        """Forget what is committed: the newest checkpoint is durable, or there is to be none.

        Returns:
            The entries to acknowledge.
        """
        completed, self.completed = self.completed, {}
        released = self._let_go(completed)
        self.pauses.released(released)
        return released

    def expect(self, checkpoint: Checkpoint) -> None:
        """Hold the ids of a planned batch that is going to be read again.

        Without this, a redelivery that comes first would pass for committed and be acknowledged.
        """
        for topic_partition, state in checkpoint.partitions.items():
            window = self.known[topic_partition]
            window.expected |= state.batch

    def plan(
        self, checkpoint: Checkpoint, entries: Mapping[TopicPartition, Sequence[EntryBlock]]
    ) -> None:
        """Put back an expected batch that was read again after a restart.

        What is missing in ``entries`` is lost, counted, and expected no longer.
        """
        for topic_partition, blocks in entries.items():
            window = self.known[topic_partition]
            window.expected -= EntrySet.of(block.id for block in blocks)
            for block in blocks:
                window.hold(block)
        for topic_partition, state in checkpoint.partitions.items():
            window = self.known[topic_partition]
            gone = window.expected & state.batch
            window.expected -= gone
            self.counters.entries_lost += len(gone)
            self._forget(topic_partition)
        # A topic partition of which nothing is left may be forgotten before the batch is released.
        self.batches.add(checkpoint, {tp: list(blocks) for tp, blocks in entries.items() if blocks})
        self.pauses.released(entries)

    def release(self, checkpoint: Checkpoint) -> dict[TopicPartition, list[EntryId]]:
        """Forget every batch up to ``checkpoint``, which is durable now.

        Returns:
            The entries to acknowledge; empty when the batch was released before. Idempotent.
        """
        released: dict[TopicPartition, list[EntryId]] = {}
        for batch in self.batches.release(checkpoint.batch_id):
            for topic_partition, ids in self._let_go(batch.entries).items():
                released.setdefault(topic_partition, []).extend(ids)
        self.pauses.released(released)
        return released

    def prove(
        self, topic_partition: TopicPartition, proofs: Proofs, owners: frozenset[int] = frozenset()
    ) -> None:
        """Take evidence; the next cut with rows applies it.

        Args:
            topic_partition: What it is about.
            proofs: Entries and ledgers that are settled.
            owners: Ranges that owe an entry of a hole: they go on receiving.
        """
        window = self.known.get(topic_partition)
        if window is None:
            return
        self.received_rows += window.waiting_rows if proofs else 0
        window.prove(proofs, owners)
        if proofs:
            self._changing[topic_partition] = None
        self.pauses.fitted(topic_partition)

    @property
    def partitions(self) -> tuple[TopicPartition, ...]:
        """All topic partitions that are consumed."""
        return tuple(self.active)

    @property
    def holes(self) -> int:
        """Gaps between the runs of delivered entries, over all topic partitions."""
        return sum(window.holes for window in self.known.values())

    @property
    def rows(self) -> int:
        """Rows held: received, taken and planned."""
        return sum(window.rows for window in self.known.values())

    def oldest_published_ms(self) -> int | None:
        """Publish time of the oldest row held that has one, milliseconds since the epoch."""
        published = (ms for window in self.known.values() for ms in window.held.values())
        return min(filter(None, published), default=None)

    def _unreleased(self) -> Iterator[Mapping[TopicPartition, Sequence[EntryBlock]]]:
        """What is in a checkpoint and held."""
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
                self.counters.holes_settled += window.advance(own)
                self._record(topic_partition, None if window.gone else window.state)
            self._forget(topic_partition)
        blocks = [block for part in entries.values() for block in part]
        together = merged(
            sum(block.rows for block in blocks),
            sum(block.payload_bytes for block in blocks),
            self.ranges,
        )
        self._newest.advance(self.ranges, together)

    def _record(self, topic_partition: TopicPartition, state: PartitionCheckpoint | None) -> None:
        """What the newest checkpoint says of a topic partition; ``None``: nothing any more."""
        self._newest.record(topic_partition, state)
        if state is not None and state.batch:
            self._changing[topic_partition] = None

    def _looked(self, topic_partition: TopicPartition) -> None:
        """Follow a topic partition from which entries were taken."""
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
        return {where: [block.id for block in blocks] for where, blocks in entries.items()}

    def _forget(self, topic_partition: TopicPartition) -> None:
        """Forget a topic partition that is gone, once nothing of it is held or checkpointed."""
        window = self.known[topic_partition]
        held = window.held or window.expected
        if window.gone and not held and topic_partition not in self._newest:
            del self.known[topic_partition]
            self._changing.pop(topic_partition, None)
            self.tight.discard(topic_partition)
