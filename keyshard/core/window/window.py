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
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import chain, islice

from keyshard.core.holes.settling import Proofs
from keyshard.core.position.checkpoint import Checkpoint, PartitionCheckpoint
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.position.fingerprint import (
    Known,
    check_delivered,
    check_held,
    check_unknown,
    lowest_known_ledger,
)
from keyshard.core.window.admission import share_out
from keyshard.core.window.checkpoint_size import PARTITION_BYTES
from keyshard.core.window.layout import merged
from keyshard.core.window.partition_window import PartitionWindow
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
    queue_max: int = 1_000
    """Most messages in the client queue of each consumer, beside those rows."""


@dataclass(slots=True)
class PlannedBatch:
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
    unreadable: int = 0
    """Messages with a time, key or property that cannot be what it should."""
    holes_settled: int = 0
    """Entries of holes that a checkpoint calls settled."""
    entries_lost: int = 0
    """Entries left out because they are gone or were acknowledged by somebody else."""


class Window:
    """Received and planned entries of all topic partitions of a source."""

    def __init__(self, checkpoint: Checkpoint, ranges: int, budget: Budget) -> None:
        self._newest: Checkpoint | None = checkpoint
        self._frame = replace(checkpoint, partitions={})
        self._ranges = ranges
        self.budget = budget
        self._partitions: dict[TopicPartition, PartitionWindow] = {}
        self._active: dict[TopicPartition, None] = {}
        self._filled: dict[TopicPartition, None] = {}
        """Topic partitions with received entries, the next in turn first."""
        self._changing: dict[TopicPartition, None] = {}
        """Of these the next checkpoint says something else, also without new entries."""
        self._states: dict[TopicPartition, PartitionCheckpoint] = {}
        """What the newest checkpoint says."""
        self._checkpoint_bytes = 0
        self.received_rows = 0
        """Rows that a cut could take."""
        self.tight: set[TopicPartition] = set()
        """Topic partitions whose newest cut or commit left entries out: there was no room."""
        self.batches: dict[str, PlannedBatch] = {}
        """Planned batches by batch id, oldest first."""
        self.completed: dict[TopicPartition, list[EntryBlock]] = {}
        """What :meth:`commit` took and :meth:`release_completed` has not let go."""
        self.counters = Counters()
        for topic_partition, state in checkpoint.partitions.items():
            self._partitions[topic_partition] = PartitionWindow(
                state, lowest_ledger=lowest_known_ledger(state)
            )
            self._record(topic_partition, state)
            self.add_partition(topic_partition)

    @property
    def newest(self) -> Checkpoint:
        """The checkpoint that the next cut continues."""
        if self._newest is None:
            self._newest = replace(self._frame, partitions=dict(self._states))
        return self._newest

    def add_partition(self, topic_partition: TopicPartition) -> None:
        """Make room for a topic partition, also for one that was dropped. Idempotent."""
        window = self._partitions.get(topic_partition)
        if window is None:
            window = self._partitions[topic_partition] = PartitionWindow(PartitionCheckpoint())
        window.gone = False
        window.doubt()
        self._active[topic_partition] = self._changing[topic_partition] = None

    def drop_partition(self, topic_partition: TopicPartition, *, gone: bool) -> None:
        """Forget what a topic partition has received; what is planned stays until its release.
        Idempotent.

        Args:
            gone: Whether it exists no more, or else is only not consumed any longer: then its
                delivered set stays in the checkpoint.
        """
        window = self._partitions.get(topic_partition)
        if window is None:
            return
        self._active.pop(topic_partition, None)
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
        self._ranges = max(owners) + 1
        self.budget = budget
        for window in self._partitions.values():
            window.reassign(owners)

    def is_full(self, topic_partition: TopicPartition) -> bool:
        """Whether the partition's share of the budget is used up: its consumers pause."""
        active = topic_partition in self._active
        return active and self._fill(self._partitions[topic_partition]) >= 1

    def receive(
        self, topic_partition: TopicPartition, range_index: int, block: EntryBlock
    ) -> Receipt:
        """Take a delivered entry.

        Raises:
            TopicRecreatedError: The ids were handed out a second time: it was published later than
                everything delivered, but the checkpoint calls its id delivered, or its ledger lies
                below all that the checkpoint knows; or later than what is held under its id.
        """
        window = self._partitions[topic_partition]
        rows = block.rows
        if block.id in window.held or window.state.settled(block.id):
            self.counters.duplicates_dropped += rows
            return self._check_known(topic_partition, window, block)
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
        filled = {tp: self._partitions[tp] for tp in self._filled}
        ready = {tp: window for tp, window in filled.items() if not window.waiting_rows}
        order = sorted(ready)
        budget = self.budget
        rows_limit = min(rows_max or budget.rows_max, max(1, budget.rows_max // 2))
        rows = share_out(rows_limit, {tp: ready[tp].received_rows for tp in order})
        # Who was left out of the cut before has a part in this one, whatever the limit.
        rows |= {tp: max(1, rows[tp]) for tp in order if ready[tp].left_out}
        held = share_out(
            max(1, budget.bytes_max // 2), {tp: ready[tp].received_bytes for tp in order}
        )
        demand = {tp: ready[tp].received_payload for tp in order}
        payload = share_out(payload_max, demand) if payload_max else demand
        wanted = [tp for tp in order if rows[tp]]
        cuts = {
            tp: ready[tp].take((rows[tp], held[tp], payload[tp]), self._room(tp, len(wanted)))
            for tp in wanted
        }
        entries = {tp: blocks for tp, blocks in cuts.items() if blocks}
        for tp in wanted:
            self._looked(tp)
        self.received_rows = sum(window.ready_rows for window in filled.values())
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
        turn = list(islice(self._filled, rows_max))
        share = None if rows_max is None or not turn else max(1, rows_max // len(turn))
        taken: list[tuple[TopicPartition, int, EntryBlock]] = []
        for topic_partition in turn:
            window = self._partitions[topic_partition]
            self.received_rows -= window.ready_rows
            taken += [(topic_partition, at, block) for block, at in window.take_oldest(share)]
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
            room = self._room(topic_partition, len(completed))
            blocks = self._partitions[topic_partition].give_back(ids, room)
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
        return self._let_go(completed)

    def expect(self, checkpoint: Checkpoint) -> None:
        """Hold the ids of a planned batch that is going to be read again.

        Without this, a redelivery that comes first would pass for committed and be acknowledged.
        """
        for topic_partition, state in checkpoint.partitions.items():
            window = self._partitions[topic_partition]
            window.expected |= state.batch

    def plan(
        self, checkpoint: Checkpoint, entries: Mapping[TopicPartition, Sequence[EntryBlock]]
    ) -> None:
        """Put back an expected batch that was read again after a restart.

        What is missing in ``entries`` is lost, counted, and expected no longer.
        """
        for topic_partition, blocks in entries.items():
            window = self._partitions[topic_partition]
            window.expected -= EntrySet.of(block.id for block in blocks)
            for block in blocks:
                window.hold(block)
        for topic_partition, state in checkpoint.partitions.items():
            window = self._partitions[topic_partition]
            gone = window.expected & state.batch
            window.expected -= gone
            self.counters.entries_lost += len(gone)
            self._forget(topic_partition)
        # A topic partition of which nothing is left may be forgotten before the batch is released.
        self.batches[checkpoint.batch_id] = PlannedBatch(
            checkpoint, {tp: list(blocks) for tp, blocks in entries.items() if blocks}
        )

    def batch(self, batch_id: str) -> PlannedBatch:
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
            for topic_partition, ids in self._let_go(self.batches.pop(oldest).entries).items():
                released.setdefault(topic_partition, []).extend(ids)
            if oldest == batch_id:
                break
        return released

    def doubt(self, topic_partition: TopicPartition) -> None:
        """Nothing shows any longer that a topic partition is the one that was received from."""
        window = self._partitions.get(topic_partition)
        if window is not None:
            window.doubt()

    def doubted(self, topic_partition: TopicPartition) -> Known | None:
        """What was known of a topic partition that may be another one by now."""
        window = self._partitions.get(topic_partition)
        return None if window is None else window.doubted

    def compare(self, topic_partition: TopicPartition, block: EntryBlock) -> bool:
        """Whether what a topic partition that is doubted stores ends the doubt.

        It does where the id is known and the entry as old as it should be; and where the id is
        higher than all that are known, because ids only grow.

        Raises:
            TopicRecreatedError: The ids were handed out a second time.
        """
        window = self._partitions.get(topic_partition)
        known = None if window is None else window.doubted
        if window is None or known is None:
            return True
        first, last = known.span
        if block.id in known:
            self._check_known(topic_partition, window, block)
        elif block.id < last:
            check_unknown(topic_partition, known.published_ms, first.ledger, block)
            return False
        window.doubted = None
        return True

    def _check_known(
        self, topic_partition: TopicPartition, window: PartitionWindow, block: EntryBlock
    ) -> Receipt:
        published_ms = window.published_ms_of(block.id)
        if published_ms is not None:
            check_held(topic_partition, published_ms, block)
            return Receipt.HELD
        check_delivered(topic_partition, window.latest_ms_of(block.id), block)
        return Receipt.COMMITTED

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
        window = self._partitions.get(topic_partition)
        if window is None:
            return
        self.received_rows += window.waiting_rows if proofs else 0
        window.prove(proofs, owners)
        if proofs:
            self._changing[topic_partition] = None

    def paused(self, topic_partition: TopicPartition) -> frozenset[int] | None:
        """Ranges that pause for the size of the checkpoint; ``None`` when it has room.

        Otherwise the ranges that are not named go on receiving, even when the window is full.
        """
        if topic_partition not in self.tight:
            return None
        budget, shares = self.budget, max(1, len(self._active))
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
    def checkpoint_bytes(self) -> int:
        """About the size of the newest checkpoint."""
        return self._checkpoint_bytes

    def oldest_published_ms(self) -> int | None:
        """Publish time of the oldest row held that has one, milliseconds since the epoch."""
        received = (block for w in self._partitions.values() for block, _ in w.received)
        taken = (block for w in self._partitions.values() for block in w.taken.values())
        planned = (
            block
            for entries in (self.completed, *(batch.entries for batch in self.batches.values()))
            for part in entries.values()
            for block in part
        )
        held = chain(received, taken, planned)
        return min((block.publish_ms for block in held if block.publish_ms), default=None)

    def fill(self) -> float:
        """How full the fullest partition's share is, 0 to 1 and rarely more."""
        return max(map(self._fill, self._partitions.values()), default=0.0)

    def _fill(self, window: PartitionWindow) -> float:
        budget, shares = self.budget, max(1, len(self._active))
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
                for entries in (self.completed, *(one.entries for one in self.batches.values()))
                for block in entries.get(topic_partition, ())
            ]
            planned = {block.id for block in blocks}
            assert len(planned) == len(blocks), "an entry is planned twice"
            assert not any(one in window.expected for one in planned), "or read again twice"
            received = {block.id for block, _ in window.received}
            assert window.held.keys() == planned | received | window.taken.keys()
            assert all(map(window.state.settled, planned | set(window.expected)))
            blocks += window.taken.values()
            assert window.rows == window.received_rows + sum(block.rows for block in blocks)
            assert bool(window.received) == (topic_partition in self._filled)
            assert window.tight == (topic_partition in self.tight)
            held = window.held or window.expected
            assert not window.gone or held or topic_partition in self._states, (
                "it is never forgotten"
            )
        windows = self._partitions.values()
        assert self.received_rows == sum(window.ready_rows for window in windows)
        sizes = (_text_bytes(where, state) for where, state in self._states.items())
        assert self._checkpoint_bytes == sum(sizes), "the checkpoint's size is counted wrong"

    def _planned(self, entries: dict[TopicPartition, list[EntryBlock]]) -> Checkpoint:
        """Plan a batch of ``entries``, which are taken out of what was received; its end."""
        self._advance(entries)
        checkpoint = self.newest
        self.batches[checkpoint.batch_id] = PlannedBatch(checkpoint, entries)
        return checkpoint

    def _advance(self, entries: Mapping[TopicPartition, Sequence[EntryBlock]]) -> None:
        """Make the checkpoint after a batch of ``entries`` the newest."""
        changing, self._changing = self._changing, dict.fromkeys(entries)
        for topic_partition in changing | self._changing:
            window = self._partitions[topic_partition]
            own, old = entries.get(topic_partition, ()), window.state
            if own or old.delivered or old.floor is not None:
                self.counters.holes_settled += window.advance(own)
                self._record(topic_partition, None if window.gone else window.state)
            self._forget(topic_partition)
        blocks = [block for part in entries.values() for block in part]
        together = merged(
            sum(block.rows for block in blocks),
            sum(block.payload_bytes for block in blocks),
            self._ranges,
        )
        self._frame = replace(
            self._frame,
            ranges=self._ranges,
            merged=None if together == self._ranges else together,
        )
        self._newest = None

    def _record(self, topic_partition: TopicPartition, state: PartitionCheckpoint | None) -> None:
        """What the newest checkpoint says of a topic partition; ``None``: nothing any more."""
        before = self._states.pop(topic_partition, None)
        if before is not None:
            self._checkpoint_bytes -= _text_bytes(topic_partition, before)
        if state is not None:
            self._states[topic_partition] = state
            self._checkpoint_bytes += _text_bytes(topic_partition, state)
            if state.batch:
                self._changing[topic_partition] = None

    def _room(self, topic_partition: TopicPartition, others: int) -> int:
        """Size that a topic partition may have in the next checkpoint: its own, and a share of
        what all leave over."""
        left = max(0, self.budget.checkpoint_bytes_max - self._checkpoint_bytes) // others
        state = self._states.get(topic_partition)
        if state is None:
            return left
        return PARTITION_BYTES + len(str(state.delivered)) + len(str(state.batch)) + left

    def _looked(self, topic_partition: TopicPartition) -> None:
        """Follow a topic partition from which entries were taken."""
        window = self._partitions[topic_partition]
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
            window = self._partitions[topic_partition]
            for block in blocks:
                window.let_go(block)
            self._forget(topic_partition)
        return {where: [block.id for block in blocks] for where, blocks in entries.items()}

    def _forget(self, topic_partition: TopicPartition) -> None:
        """Forget a topic partition that is gone, once nothing of it is held or checkpointed."""
        window = self._partitions[topic_partition]
        held = window.held or window.expected
        if window.gone and not held and topic_partition not in self._states:
            del self._partitions[topic_partition]
            self._changing.pop(topic_partition, None)
            self.tight.discard(topic_partition)


def _text_bytes(topic_partition: TopicPartition, state: PartitionCheckpoint) -> int:
    return len(topic_partition.name) + len(state.to_json()) + 4
