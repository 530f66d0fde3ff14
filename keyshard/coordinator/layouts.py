"""Layouts of planned batches, and which batches were released."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from keyshard.core.window.layout import Located, lay_out
from keyshard.core.window.window import PlannedBatch
from keyshard.errors import BatchReleasedError, BatchUnknownError

RELEASED_REMEMBERED = 1_000
"""Released batches that are still told apart from unknown ones."""


class Layouts:
    """What tasks may read now. Not thread-safe: the coordinator calls it under its lock."""

    def __init__(self) -> None:
        self._planned: dict[str, dict[int, list[Located]]] = {}
        self._released: deque[str] = deque(maxlen=RELEASED_REMEMBERED)

    def add(self, batch: PlannedBatch) -> list[int]:
        """Lay a planned batch out; its partitions with data, ascending."""
        end = batch.checkpoint
        layout = lay_out(batch.entries, end.ranges, end.merged)
        self._planned[end.batch_id] = layout
        return list(layout)

    def partitions(self, batch_id: str) -> list[int] | None:
        """Partitions of a planned batch; ``None`` when it is not planned here yet.

        Raises:
            BatchReleasedError: It was released.
        """
        if batch_id in self._planned:
            return list(self._planned[batch_id])
        if self.is_released(batch_id):
            raise _released(batch_id)
        return None

    def of(self, batch_id: str, index: int) -> list[Located]:
        """Entries of one partition of a planned batch, in their order.

        Raises:
            BatchReleasedError: The batch was released.
            BatchUnknownError: It was never planned here, or has no such partition.
        """
        if self.is_released(batch_id):
            raise _released(batch_id)
        try:
            return self._planned[batch_id][index]
        except KeyError:
            raise BatchUnknownError(
                f"This process planned no batch {batch_id} with a partition {index}. It may be a "
                "task of an earlier run: let it fail, the batch is planned again.",
                batch_id=batch_id,
            ) from None

    def release(self, batch_ids: Iterable[str]) -> None:
        """Forget the layouts of committed batches."""
        for batch_id in batch_ids:
            self._planned.pop(batch_id, None)
            self._released.append(batch_id)

    def is_released(self, batch_id: str) -> bool:
        """Whether a batch was released, as far as remembered."""
        return batch_id in self._released


def _released(batch_id: str) -> BatchReleasedError:
    return BatchReleasedError(
        f"Batch {batch_id} is committed and its rows are gone. Cache the DataFrame if it is needed "
        "after the batch, or read it inside foreachBatch.",
        batch_id=batch_id,
    )
