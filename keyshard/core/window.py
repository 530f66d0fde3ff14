"""The window: entries received and not yet released, and the cut that makes a batch of them.

One window serves one source. It is not thread-safe: its owner calls it under one lock.

Life of an entry::

    received --cut--------------------> planned --release--> committed (only its id is kept,
        |                                ^   ^               in ``delivered``)
        +--take--> taken --commit--------+   +-- replayed after a restart

Delivered again at any time, it is dropped, and acknowledged if it is committed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import chain

from keyshard.core.admission import share_out
from keyshard.core.checkpoint import Checkpoint, PartitionCheckpoint
from keyshard.core.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.fingerprint import check_delivered, check_unknown, lowest_known_ledger
from keyshard.core.layout import merged
from keyshard.core.partition_window import PartitionWindow
from keyshard.core.settling import Proofs
from keyshard.errors import BatchUnknownError


class Receipt(Enum):
    """What became of a delivered entry."""

    ACCEPTED = auto()
    """It is new and in the window now."""
    HELD = auto()
    """It is in the window already: dropped; acknowledged when its batch is released."""
    COMMITTED = auto()
    """Its batch is committed, or it is settled: dropped; acknowledge it, the broker forgot."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Most that a window holds, received and planned together."""

    rows_max: int
    bytes_max: int
    partition_rows_max: int | None = None
    """Most rows of one topic partition; ``None``: its share of ``rows_max`` only."""
    checkpoint_bytes_max: int = 256 * 1024
    """Size of a checkpoint at which the fast ranges of a topic partition pause."""


@dataclass(slots=True)
class Batch:
    """A planned batch: its end checkpoint and its entries."""

    checkpoint: Checkpoint
    entries: dict[TopicPartition, list[EntryBlock]]

    @property
    def rows(self) -> int:
        return sum(block.rows for blocks in self.entries.values() for block in blocks)


@dataclass(slots=True)
class Counters:
    """What a user wants to know; all since the start of this run."""

    rows_received: int = 0
    duplicates_dropped: int = 0
    """Messages that were delivered again and dropped."""
    misrouted: int = 0
    """Messages whose slot is outside the range that received them."""
    keyless: int = 0
    holes_settled: int = 0
    """Entries of holes that a checkpoint calls settled."""
    entries_lost: int = 0
    """Entries left out because they are gone or were acknowledged by somebody else."""


class Window:
    """Received and planned entries of all topic partitions of a source."""

    def __init__(self, checkpoint: Checkpoint, ranges: int, budget: Budget) -> None:
        self._base = checkpoint
        self._ranges = ranges
        self._budget = budget
        self._partitions: dict[TopicPartition, PartitionWindow] = {}
        self._active: dict[TopicPartition, None] = {}
        self.batches: dict[str, Batch] = {}
        """Planned batches by batch id, oldest first."""
        self.counters = Counters()
        for topic_partition in checkpoint.partitions:
            self.add_partition(topic_partition)

    @property
    def newest(self) -> Checkpoint:
        """The checkpoint that the next cut continues."""
        return self._base

    def add_partition(self, topic_partition: TopicPartition) -> None:
        """Make room for a topic partition, also for one that was dropped. Idempotent."""
        if topic_partition not in self._partitions:
            state = self._base.partitions.get(topic_partition, PartitionCheckpoint())
            self._partitions[topic_partition] = PartitionWindow(
                state, lowest_ledger=lowest_known_ledger(state)
            )
        self._partitions[topic_partition].gone = False
        self._active[topic_partition] = None

    def drop_partition(self, topic_partition: TopicPartition, *, gone: bool) -> None:
        """Forget what a topic partition has received; what is planned stays until its release.

        Args:
            gone: Whether it exists no more, or else is only not consumed any longer: then its
                delivered set stays in the checkpoint.
        """
        window = self._partitions[topic_partition]
        self._active.pop(topic_partition, None)
        window.drop_received()
        window.gone = gone

    def reassign(self, owners: Sequence[int], budget: Budget) -> None:
        """Others own the ring now: their number counts from the next cut on.

        Planned batches keep the layout that their checkpoints say.

        Args:
            owners: The range that owns each slot.
            budget: Most that the window holds from now on.
        """
        self._ranges = max(owners) + 1
        self._budget = budget
        for window in self._partitions.values():
            window.reassign(owners)

    def is_full(self, topic_partition: TopicPartition) -> bool:
        """Whether the partition's share of the budget is used up: its consumers pause."""
        return self._fill(self._partitions[topic_partition]) >= 1

    def receive(
        self, topic_partition: TopicPartition, range_index: int, block: EntryBlock
    ) -> Receipt:
        """Take a delivered entry.

        Raises:
            TopicRecreatedError: The ids were handed out a second time: it was published later than
                everything delivered, but the checkpoint calls its id delivered, or its ledger lies
                below all that the checkpoint knows.
        """
        window = self._partitions[topic_partition]
        if block.id in window.held:
            self.counters.duplicates_dropped += block.rows
            return Receipt.HELD
        if window.state.settled(block.id):
            check_delivered(topic_partition, window.state, block)
            self.counters.duplicates_dropped += block.rows
            return Receipt.COMMITTED
        check_unknown(topic_partition, window.state, window.lowest_ledger, block)
        window.receive(block, range_index)
        self.counters.rows_received += block.rows
        return Receipt.ACCEPTED

    def cut(self, rows_max: int | None = None, payload_max: int | None = None) -> Checkpoint | None:
        """Plan the next batch of what was received; ``None`` without rows.

        At most half of the budget is taken, so that receiving goes on while the host works. Limits
        are split over the topic partitions by what each has; a single larger entry is still taken.

        Args:
            rows_max: Most rows of the batch.
            payload_max: Most payload of the batch, bytes.
        """
        ready = {tp: w for tp, w in self._partitions.items() if w.received and not w.waiting_rows}
        order = sorted(ready)
        budget = self._budget
        rows_limit = min(rows_max or budget.rows_max, max(1, budget.rows_max // 2))
        rows = share_out(rows_limit, {tp: ready[tp].received_rows for tp in order})
        # Who was left out of the cut before has a part in this one, whatever the limit.
        rows |= {tp: max(1, rows[tp]) for tp in order if ready[tp].left_out}
        held = share_out(
            max(1, budget.bytes_max // 2), {tp: ready[tp].received_bytes for tp in order}
        )
        demand = {tp: ready[tp].received_payload for tp in order}
        payload = share_out(payload_max, demand) if payload_max else demand
        room = budget.checkpoint_bytes_max // len(self._partitions)
        cuts = {
            tp: ready[tp].take((rows[tp], held[tp], payload[tp]), room) for tp in order if rows[tp]
        }
        entries = {tp: blocks for tp, blocks in cuts.items() if blocks}
        for tp in ready.keys() - entries:
            ready[tp].left_out = {index for _, index in ready[tp].received}
        if not entries:
            return None
        return self._planned(entries)

    def take(self, rows_max: int | None = None) -> list[tuple[TopicPartition, int, EntryBlock]]:
        """Hand received entries to handlers; they stay held until their batch is released.

        Args:
            rows_max: About how many rows, the same of each topic partition; default: all.

        Returns:
            (topic partition, index of the range that received it, entry), in order of receipt per
            topic partition.
        """
        filled = {tp: window for tp, window in self._partitions.items() if window.received}
        share = None if rows_max is None or not filled else max(1, rows_max // len(filled))
        return [
            (topic_partition, index, block)
            for topic_partition, window in filled.items()
            for block, index in window.take_oldest(share)
        ]

    def commit(
        self, completed: Mapping[TopicPartition, Collection[EntryId]]
    ) -> tuple[Checkpoint | None, dict[TopicPartition, list[EntryId]]]:
        """Plan a batch of entries that handlers completed.

        Args:
            completed: Entries that :meth:`take` handed out.

        Returns:
            (its end checkpoint, ``None`` for an empty batch; the entries that the checkpoint has no
            room for).
        """
        room = self._budget.checkpoint_bytes_max // max(1, len(self._partitions))
        entries: dict[TopicPartition, list[EntryBlock]] = {}
        left: dict[TopicPartition, list[EntryId]] = {}
        for topic_partition, ids in completed.items():
            blocks = self._partitions[topic_partition].give_back(ids, room)
            if blocks:
                entries[topic_partition] = blocks
            if len(blocks) < len(ids):
                left[topic_partition] = sorted(ids)[len(blocks) :]
        if not entries:
            return None, left
        return self._planned(entries), left

    def expect(self, checkpoint: Checkpoint) -> None:
        """Hold the ids of a planned batch that is going to be read again.

        Without this, a redelivery that comes first would pass for committed and be acknowledged.
        """
        for topic_partition, state in checkpoint.partitions.items():
            window = self._partitions[topic_partition]
            window.expected.update(state.batch)
            window.held |= window.expected

    def plan(
        self, checkpoint: Checkpoint, entries: Mapping[TopicPartition, Sequence[EntryBlock]]
    ) -> None:
        """Put back an expected batch that was read again after a restart.

        What is missing in ``entries`` is lost, counted, and expected no longer.
        """
        for topic_partition, blocks in entries.items():
            window = self._partitions[topic_partition]
            for block in blocks:
                window.expected.discard(block.id)
                window.hold(block)
        for topic_partition, state in checkpoint.partitions.items():
            window = self._partitions[topic_partition]
            gone = {entry_id for entry_id in window.expected if entry_id in state.batch}
            window.expected -= gone
            window.held -= gone
            self.counters.entries_lost += len(gone)
        self.batches[checkpoint.batch_id] = Batch(
            checkpoint, {tp: list(blocks) for tp, blocks in entries.items()}
        )

    def batch(self, batch_id: str) -> Batch:
        """A planned batch.

        Raises:
            BatchUnknownError: It was never planned here, or is released.
        """
        try:
            return self.batches[batch_id]
        except KeyError:
            raise BatchUnknownError(
                f"Batch {batch_id} is not planned.", batch_id=batch_id
            ) from None

    def release(self, checkpoint: Checkpoint) -> dict[TopicPartition, list[EntryId]]:
        """Forget every batch up to ``checkpoint``, which is durable now.

        Returns:
            The entries to acknowledge; empty when the batch was released before. Idempotent.
        """
        batch_id = checkpoint.batch_id
        if batch_id not in self.batches:
            return {}
        released: dict[TopicPartition, list[EntryId]] = {}
        for oldest in list(self.batches):
            for topic_partition, blocks in self.batches.pop(oldest).entries.items():
                window = self._partitions[topic_partition]
                for block in blocks:
                    window.let_go(block)
                released.setdefault(topic_partition, []).extend(block.id for block in blocks)
            if oldest == batch_id:
                break
        return released

    def holes_view(
        self, topic_partition: TopicPartition
    ) -> tuple[PartitionCheckpoint, set[EntryId]] | None:
        """State and held ids of a topic partition with holes or several ledgers, else ``None``."""
        window = self._partitions[topic_partition]
        return (window.state, set(window.held)) if window.holes else None

    def prove(
        self, topic_partition: TopicPartition, proofs: Proofs, owners: frozenset[int] = frozenset()
    ) -> None:
        """Take evidence; the next cut with rows applies it.

        Args:
            topic_partition: What it is about.
            proofs: Entries and ledgers that are settled.
            owners: Ranges that owe an entry of a hole: they go on receiving.
        """
        if topic_partition in self._partitions:
            self._partitions[topic_partition].prove(proofs, owners)

    def paused(self, topic_partition: TopicPartition) -> frozenset[int] | None:
        """Ranges that pause for the size of the checkpoint; ``None`` when it has room.

        Otherwise the ranges that are not named go on receiving, even when the window is full.
        """
        budget, shares = self._budget, len(self._partitions)
        return self._partitions[topic_partition].paused(
            budget.rows_max // shares, budget.bytes_max // shares, self._ranges
        )

    @property
    def partitions(self) -> tuple[TopicPartition, ...]:
        """All topic partitions that are consumed."""
        return tuple(self._active)

    def state(self, topic_partition: TopicPartition) -> PartitionCheckpoint:
        """Floor and delivered set of a topic partition as of the newest cut."""
        return self._partitions[topic_partition].state

    @property
    def holes(self) -> int:
        """Gaps between the runs of delivered entries, over all topic partitions."""
        return sum(window.holes for window in self._partitions.values())

    @property
    def rows(self) -> int:
        """Rows held: received, taken and planned."""
        return sum(window.rows for window in self._partitions.values())

    @property
    def received_rows(self) -> int:
        """Rows that a cut could take."""
        return sum(w.received_rows - w.waiting_rows for w in self._partitions.values())

    def oldest_published_ms(self) -> int | None:
        """Publish time of the oldest row held, milliseconds since the epoch."""
        received = (block for w in self._partitions.values() for block, _ in w.received)
        taken = (block for w in self._partitions.values() for block in w.taken.values())
        planned = (
            block for batch in self.batches.values() for part in batch.entries.values()
            for block in part
        )  # fmt: skip
        return min((block.publish_ms for block in chain(received, taken, planned)), default=None)

    def fill(self) -> float:
        """How full the fullest partition's share is, 0 to 1 and rarely more."""
        return max(map(self._fill, self._partitions.values()), default=0.0)

    def _fill(self, window: PartitionWindow) -> float:
        budget, shares = self._budget, max(1, len(self._active))
        rows_max = budget.rows_max / shares
        if budget.partition_rows_max is not None:
            rows_max = min(rows_max, budget.partition_rows_max)
        return max(window.rows / rows_max, window.bytes * shares / budget.bytes_max)

    def validate(self) -> None:
        """Assert the invariants; tests and simulations call it after every step."""
        for topic_partition, window in self._partitions.items():
            window.validate()
            blocks = [
                block
                for batch in self.batches.values()
                for block in batch.entries.get(topic_partition, ())
            ]
            planned = window.expected.union(block.id for block in blocks)
            assert len(planned) == len(blocks) + len(window.expected), "an entry is planned twice"
            received = {block.id for block, _ in window.received}
            assert window.held == planned | received | window.taken.keys()
            assert all(map(window.state.settled, planned))
            blocks += window.taken.values()
            assert window.rows == window.received_rows + sum(block.rows for block in blocks)

    def _planned(self, entries: dict[TopicPartition, list[EntryBlock]]) -> Checkpoint:
        """Plan a batch of ``entries``, which are taken out of what was received; its end."""
        checkpoint = self._advance(entries)
        self.batches[checkpoint.batch_id] = Batch(checkpoint, entries)
        return checkpoint

    def _advance(self, entries: Mapping[TopicPartition, Sequence[EntryBlock]]) -> Checkpoint:
        """The checkpoint after a batch of ``entries``; becomes the newest."""
        partitions: dict[TopicPartition, PartitionCheckpoint] = {}
        for topic_partition, window in self._partitions.items():
            own = entries.get(topic_partition, ())
            old = window.state
            if window.gone or (not own and not old.delivered and old.floor is None):
                continue
            self.counters.holes_settled += window.advance(own)
            partitions[topic_partition] = window.state
        blocks = [block for part in entries.values() for block in part]
        together = merged(
            sum(block.rows for block in blocks),
            sum(block.payload_bytes for block in blocks),
            self._ranges,
        )
        self._base = Checkpoint(
            self._base.cluster,
            self._base.subscription,
            self._ranges,
            partitions,
            None if together == self._ranges else together,
        )
        return self._base
