"""Delayed delivery of the in-memory broker: the entries of a subscription that are not due yet.

Private to :mod:`keyshard.broker.memory`, which documents the package.

The rules are those of Pulsar's ``InMemoryDelayedDeliveryTracker``, which is the default of brokers
4.0 to 5.0, without ``isDelayedDeliveryDeliverAtTimeStrict``.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

TICK_MS = 1_000
"""Time by which an entry may come before it is due, milliseconds: Pulsar's
``delayedDeliveryTickTimeMillis``."""


class DelayedEntries:
    """Entries that wait for their time, by ordinal.

    Args:
        look_ahead: From this number of waiting entries on, the broker sends nothing until the first
            of them is due. This applies if all entries since the first have ascending times.
        now_ms: The clock, milliseconds.
        first_waits: Whether the first entry with a time is kept even if it is due.
    """

    def __init__(self, look_ahead: int, now_ms: Callable[[], int], *, first_waits: bool) -> None:
        self._look_ahead = look_ahead
        self._first_waits = first_waits
        self._now_ms = now_ms
        self._times: list[tuple[int, int]] = []
        """A heap of due times and ordinals. Acknowledged entries stay in it until they are due."""
        self._ordinals: set[int] = set()
        self._begun = False
        """Whether an entry had a time since the broker loaded the subscription."""
        self._latest_ms = 0
        self._ascending = True

    def __len__(self) -> int:
        return len(self._ordinals)

    def __contains__(self, ordinal: int) -> bool:
        return ordinal in self._ordinals

    def keeps(self, ordinal: int, deliver_at_ms: int | None) -> bool:
        """Keep an entry until it is due; ``False`` if it can be sent now."""
        if deliver_at_ms is None and not self._begun:
            return False
        waits = self._first_waits and not self._begun
        self._begun = True
        if deliver_at_ms is None or (deliver_at_ms <= self._now_ms() + TICK_MS and not waits):
            self._ascending = False
            return False
        self._ascending = self._ascending and deliver_at_ms >= self._latest_ms - TICK_MS
        self._latest_ms = max(self._latest_ms, deliver_at_ms)
        self._ordinals.add(ordinal)
        heappush(self._times, (deliver_at_ms, ordinal))
        return True

    def is_due(self) -> bool:
        """Return whether the first entry can be sent."""
        return bool(self._times) and self._times[0][0] <= self._now_ms() + TICK_MS

    def take_due(self) -> list[int]:
        """Remove and return the entries that are due, in the order of their times."""
        found = []
        while self.is_due():
            found.append(heappop(self._times)[1])
        self._ordinals.difference_update(found)
        if not self._times:
            self._latest_ms, self._ascending = 0, True
        return found

    def stop_all(self) -> bool:
        """Return whether the broker sends nothing until the first waiting entry is due."""
        return self._ascending and len(self) >= self._look_ahead and not self.is_due()

    def ordinals(self) -> frozenset[int]:
        """The waiting entries, for checks."""
        return frozenset(self._ordinals)

    def clear(self) -> None:
        """Forget all entries."""
        self._times.clear()
        self._ordinals.clear()
        self._latest_ms, self._ascending = 0, True
