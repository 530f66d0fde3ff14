"""Entries of a subscription of the in-memory broker that wait for their owner.

Private to :mod:`keyshard.broker.memory`, which documents the whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from heapq import heapify, heappop, heappush


class ReplayQueue:
    """Entries that were read or sent and wait for their owner, in position order for each owner.

    An entry that is acknowledged while it waits stays, and counts, until its owner asks or the
    mark-delete passes it: a real broker does the same.
    """

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._per_slot: Counter[int] = Counter()
        self._heaps: dict[Hashable, list[int]] = {}
        self._all: list[int] = []

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, ordinal: int) -> bool:
        return ordinal in self._slots

    def has_slot(self, slot: int) -> bool:
        """Whether an entry of the slot waits; then no later one may overtake it."""
        return slot in self._per_slot

    def add(self, ordinal: int, slot: int, owner: Hashable) -> None:
        """Put an entry in; ``owner`` is ``None`` while nobody covers its slot."""
        assert ordinal not in self._slots
        self._slots[ordinal] = slot
        self._per_slot[slot] += 1
        heappush(self._heaps.setdefault(owner, []), ordinal)
        heappush(self._all, ordinal)

    def discard_up_to(self, mark_delete: int) -> None:
        """Take out what the mark-delete has passed. The owners' heaps drop it when it comes up."""
        while self._all and self._all[0] <= mark_delete:
            self._discard(heappop(self._all))

    def pop(self, owner: Hashable) -> int | None:
        """Take out the first entry that waits for ``owner``, or ``None``."""
        heap = self._heaps.get(owner, [])
        while heap:
            ordinal = heappop(heap)
            if ordinal in self._slots:
                self._discard(ordinal)
                return ordinal
        return None

    def regroup(self, owner_of: Callable[[int], Hashable]) -> None:
        """Follow a change of owners."""
        self._heaps = {}
        for ordinal, slot in self._slots.items():
            self._heaps.setdefault(owner_of(slot), []).append(ordinal)
        for heap in self._heaps.values():
            heapify(heap)

    def clear(self) -> None:
        """Forget everything."""
        self._slots.clear()
        self._per_slot.clear()
        self._heaps.clear()
        self._all.clear()

    def ordinals(self) -> set[int]:
        """What waits, for checks."""
        return set(self._slots)

    def _discard(self, ordinal: int) -> None:
        slot = self._slots.pop(ordinal, None)
        if slot is not None:
            self._per_slot[slot] -= 1
            if not self._per_slot[slot]:
                del self._per_slot[slot]
