"""Planned batches, from their cut or replay to their release, and the newest checkpoint."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from keyshard.core.position.checkpoint import (
    Checkpoint,
    PartitionCheckpoint,
    SubscriptionId,
    WrittenStates,
    named,
    partition_texts,
)
from keyshard.core.position.entry import EntryBlock, TopicPartition
from keyshard.core.window.checkpoint_size import PARTITION_BYTES
from keyshard.core.window.layout import Located, lay_out
from keyshard.errors import BatchReleasedError, BatchUnknownError

RELEASED_REMEMBERED = 1_000
"""Number of released batches that are remembered, to distinguish them from unknown ones."""


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """A planned batch: its end checkpoint, and its entries ascending by position."""

    checkpoint: Checkpoint
    entries: dict[TopicPartition, list[EntryBlock]]
    layout: dict[int, list[Located]]
    """Entries of each partition that has data, in their order; partitions ascending."""

    @property
    def rows(self) -> int:
        return sum(block.rows for blocks in self.entries.values() for block in blocks)


class PlannedBatches:
    """Batches that the host may read now, and released batches. Iterates over ids, oldest first."""

    def __init__(self) -> None:
        self._planned: dict[str, PlannedBatch] = {}
        self._released: deque[str] = deque(maxlen=RELEASED_REMEMBERED)

    def __len__(self) -> int:
        return len(self._planned)

    def __iter__(self) -> Iterator[str]:
        return iter(self._planned)

    def __getitem__(self, batch_id: str) -> PlannedBatch:
        """Return a planned batch.

        Raises:
            BatchReleasedError: The batch was released.
            BatchUnknownError: The batch was never planned here.
        """
        try:
            return self._planned[batch_id]
        except KeyError:
            raise self._missing(batch_id, "") from None

    def values(self) -> Iterator[PlannedBatch]:
        return iter(self._planned.values())

    def add(self, checkpoint: Checkpoint, entries: dict[TopicPartition, list[EntryBlock]]) -> None:
        """Lay out the batch of these entries, which ends at ``checkpoint``."""
        layout = lay_out(entries, checkpoint.ranges, checkpoint.merged)
        self._planned[checkpoint.batch_id] = PlannedBatch(checkpoint, entries, layout)

    def partition(self, batch_id: str, index: int) -> list[Located]:
        """Return the entries of one partition of a planned batch, in their order.

        Raises:
            BatchReleasedError: The batch was released.
            BatchUnknownError: The batch was never planned here, or has no such partition.
        """
        try:
            return self._planned[batch_id].layout[index]
        except KeyError:
            raise self._missing(batch_id, f" with a partition {index}") from None

    def restore(self, batch_id: str, entries: dict[TopicPartition, list[EntryBlock]]) -> int:
        """Lay out a batch again, after a replay of its entries.

        Returns:
            The number of entries that the replay did not find.

        Raises:
            BatchReleasedError: The batch was released.
            BatchUnknownError: The batch was never planned here.
        """
        batch = self[batch_id]
        laid_out = lay_out(entries, batch.checkpoint.ranges, batch.checkpoint.merged)
        # If entries are no longer stored and data loss is allowed, their partition stays, empty.
        layout = {index: laid_out.get(index, []) for index in batch.layout}
        self._planned[batch_id] = replace(batch, layout=layout)
        found = {(where, block.id) for where, blocks in entries.items() for block in blocks}
        held = ((where, block.id) for where, blocks in batch.entries.items() for block in blocks)
        return sum(one not in found for one in held)

    def release(self, batch_id: str) -> list[PlannedBatch]:
        """Forget a batch and all older ones; does nothing if the batch is not planned."""
        if batch_id not in self._planned:
            return []
        count = list(self._planned).index(batch_id) + 1
        released = [self._planned.pop(oldest) for oldest in list(self._planned)[:count]]
        self._released.extend(batch.checkpoint.batch_id for batch in released)
        return released

    def is_released(self, batch_id: str) -> bool:
        """Return whether a batch was released, among those remembered."""
        return batch_id in self._released

    def _missing(self, batch_id: str, part: str) -> BatchReleasedError | BatchUnknownError:
        if self.is_released(batch_id):
            return BatchReleasedError(
                f"Batch {batch_id} is committed, and its rows are released.",
                "Read the DataFrame inside foreachBatch, or cache it there for later use.",
                batch_id=batch_id,
            )
        return BatchUnknownError(
            f"This process planned no batch {batch_id}{part}.",
            "If the task belongs to an earlier run, ignore this error: the batch is planned again.",
            batch_id=batch_id,
        )


# -- The newest checkpoint, stored per topic partition: a cut changes only those that it touches ---


class CheckpointBuilder:
    """The checkpoint that the next cut continues, and its size.

    Args:
        checkpoint: The first checkpoint. The caller must record its topic partitions.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._whole: Checkpoint | None = checkpoint
        self._frame = replace(checkpoint, partitions={})
        self._states: dict[TopicPartition, PartitionCheckpoint] = {}
        self._sizes: dict[TopicPartition, int] = {}
        """Approximate size of the text of each of them."""
        self._texts: dict[TopicPartition, str] = {}
        """Text of each of them as of the newest complete checkpoint, in the order of the text."""
        self._unwritten: dict[TopicPartition, None] = {}
        """Topic partitions with a newer state."""
        self._compact: set[TopicPartition] = set()
        """Topic partitions with a compact entry set."""
        self.bytes = 0
        """Approximate size of the text."""

    def __contains__(self, topic_partition: TopicPartition) -> bool:
        return topic_partition in self._states

    @property
    def whole(self) -> Checkpoint:
        """The complete checkpoint."""
        if self._whole is None:
            self._write()
            text = ",".join(self._texts.values())
            states = WrittenStates(self._states, text, compact=bool(self._compact))
            self._whole = replace(self._frame, partitions=states)
        return self._whole

    def _write(self) -> None:
        """Write the texts of new states. The other texts stay: there may be many."""
        new = {one: self._states[one] for one in self._unwritten}
        texts, self._unwritten = partition_texts(new), {}
        if texts.keys() <= self._texts.keys():
            self._texts |= texts
        else:
            self._texts = partition_texts(self._states)

    def record(self, topic_partition: TopicPartition, state: PartitionCheckpoint | None) -> None:
        """Store the state of a topic partition; ``None`` removes it."""
        self.bytes -= self._sizes.pop(topic_partition, 0)
        self._compact.discard(topic_partition)
        if state is None:
            self._states.pop(topic_partition, None)
            self._texts.pop(topic_partition, None)
            self._unwritten.pop(topic_partition, None)
        else:
            self._states[topic_partition] = state
            self._unwritten[topic_partition] = None
            size = self._sizes[topic_partition] = _text_bytes(topic_partition, state)
            self.bytes += size
            if state.is_compact:
                self._compact.add(topic_partition)

    def identify(self, subscription_id: SubscriptionId | None) -> None:
        """Set the id of the subscription in the next checkpoints."""
        if subscription_id != self._frame.subscription_id:
            self._frame = replace(self._frame, subscription_id=subscription_id)
            self._whole = None

    def advance(self, ranges: int, merged: int) -> None:
        """Begin the next checkpoint, with a number of ranges and of partitions of its batch."""
        self._frame = replace(
            self._frame, ranges=ranges, merged=None if merged == ranges else merged
        )
        self._whole = None

    def room(self, topic_partition: TopicPartition, others: int, bytes_max: int) -> int:
        """Return the size that a topic partition may have in the next checkpoint, bytes.

        That is its present size, and an equal share of the free space.

        Args:
            topic_partition: The topic partition.
            others: Number of topic partitions that share the free space.
            bytes_max: Size limit of the whole checkpoint.
        """
        left = max(0, bytes_max - self.bytes) // others
        state = self._states.get(topic_partition)
        if state is None:
            return left
        return PARTITION_BYTES + state.delivered.text_bytes + state.batch.text_bytes + left

    def validate(self) -> None:
        """Assert that the size is counted correctly."""
        sizes = {where: _text_bytes(where, state) for where, state in self._states.items()}
        assert self._sizes == sizes, "the checkpoint's size is counted wrong"
        assert self.bytes == sum(sizes.values())
        if self._whole is not None:
            plain = replace(self._whole, partitions=dict(self._whole.partitions))
            assert self._whole.to_json() == plain.to_json(), "the text of a state is old"


def _text_bytes(topic_partition: TopicPartition, state: PartitionCheckpoint) -> int:
    return len(named(topic_partition)[0]) + state.json_bytes + 4
