"""Keys that wait until a time, because an attempt failed; the one that is due first comes first."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from keyshard.core.lanes.queues import KeyQueue


class DueKeys:
    """A heap by :attr:`KeyQueue.not_before_s`; keys of the same time in the order they came."""

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, KeyQueue]] = []
        """Looked at for every message, so that nothing is called while nobody waits."""
        self._pushed = 0

    def __iter__(self) -> Iterator[KeyQueue]:
        return (queue for _, _, queue in self.heap)

    @property
    def due_s(self) -> float | None:
        """When the first of them may go on; ``None`` when none waits."""
        return self.heap[0][0] if self.heap else None

    def push(self, queue: KeyQueue) -> None:
        """A key waits from now on."""
        self._pushed += 1
        heapq.heappush(self.heap, (queue.not_before_s, self._pushed, queue))

    def pop(self, now_s: float) -> KeyQueue | None:
        """A key that is due; ``None`` when there is none."""
        return heapq.heappop(self.heap)[2] if self.heap and self.heap[0][0] <= now_s else None

    def pop_letters(self) -> list[KeyQueue]:
        """Keys whose head is a dead letter that is replayed; they wait no more."""
        letters = [queue for queue in self if queue.work[0].entry is None]
        self.heap = [one for one in self.heap if one[2].work[0].entry is not None]
        heapq.heapify(self.heap)
        return letters
