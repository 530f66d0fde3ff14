"""Planned batches: laid out for the host, from their cut or replay to their release."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import EntryBlock, TopicPartition
from keyshard.core.window.layout import Located, lay_out
from keyshard.errors import BatchReleasedError, BatchUnknownError

RELEASED_REMEMBERED = 1_000
"""Released batches that are still told apart from unknown ones."""


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """A planned batch: its end checkpoint, and its entries ascending by position."""

    checkpoint: Checkpoint
    entries: dict[TopicPartition, list[EntryBlock]]
    layout: dict[int, list[Located]]
    """Its partitions with data, ascending, and the entries of each in their order."""

    @property
    def rows(self) -> int:
        return sum(block.rows for blocks in self.entries.values() for block in blocks)


class PlannedBatches:
    """What the host may read now, and which batches were released; iterates over ids, oldest
    first."""

    def __init__(self) -> None:
        self._planned: dict[str, PlannedBatch] = {}
        self._released: deque[str] = deque(maxlen=RELEASED_REMEMBERED)

    def __len__(self) -> int:
        return len(self._planned)

    def __iter__(self) -> Iterator[str]:
        return iter(self._planned)

    def __getitem__(self, batch_id: str) -> PlannedBatch:
        """A planned batch.

        Raises:
            BatchReleasedError: It was released.
            BatchUnknownError: It was never planned here.
        """
        try:
            return self._planned[batch_id]
        except KeyError:
            raise self._missing(batch_id, "") from None

    def values(self) -> Iterator[PlannedBatch]:
        """All planned batches, oldest first."""
        return iter(self._planned.values())

    def add(self, checkpoint: Checkpoint, entries: dict[TopicPartition, list[EntryBlock]]) -> None:
        """Lay out the batch of these entries that ends at ``checkpoint``."""
        layout = lay_out(entries, checkpoint.ranges, checkpoint.merged)
        self._planned[checkpoint.batch_id] = PlannedBatch(checkpoint, entries, layout)

    def partition(self, batch_id: str, index: int) -> list[Located]:
        """Entries of one partition of a planned batch, in their order.

        Raises:
            BatchReleasedError: The batch was released.
            BatchUnknownError: It was never planned here, or has no such partition.
        """
        try:
            return self._planned[batch_id].layout[index]
        except KeyError:
            raise self._missing(batch_id, f" with a partition {index}") from None

    def restore(self, batch_id: str, entries: dict[TopicPartition, list[EntryBlock]]) -> None:
        """Lay a batch out anew, of its entries as they were read again.

        Raises:
            BatchReleasedError: The batch was released.
            BatchUnknownError: It was never planned here.
        """
        batch = self[batch_id]
        laid_out = lay_out(entries, batch.checkpoint.ranges, batch.checkpoint.merged)
        # What is stored no longer, and may be, leaves its partition empty.
        layout = {index: laid_out.get(index, []) for index in batch.layout}
        self._planned[batch_id] = replace(batch, layout=layout)

    def release(self, batch_id: str) -> list[PlannedBatch]:
        """Forget a batch and all that are older; nothing when it is not planned."""
        if batch_id not in self._planned:
            return []
        count = list(self._planned).index(batch_id) + 1
        released = [self._planned.pop(oldest) for oldest in list(self._planned)[:count]]
        self._released.extend(batch.checkpoint.batch_id for batch in released)
        return released

    def is_released(self, batch_id: str) -> bool:
        """Whether a batch was released, as far as remembered."""
        return batch_id in self._released

    def _missing(self, batch_id: str, part: str) -> BatchReleasedError | BatchUnknownError:
        if self.is_released(batch_id):
            return BatchReleasedError(
                f"Batch {batch_id} is committed and its rows are gone. Cache the DataFrame if it "
                "is needed after the batch, or read it inside foreachBatch.",
                batch_id=batch_id,
            )
        return BatchUnknownError(
            f"This process planned no batch {batch_id}{part}. It may be a task of an earlier run: "
            "let it fail, the batch is planned again.",
            batch_id=batch_id,
        )
