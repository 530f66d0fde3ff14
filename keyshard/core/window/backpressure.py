"""Fill level of a window, and its pauses.

All ranges of a full topic partition pause. One range pauses alone if its rows reach the broker's
limit of unacknowledged messages for a consumer, less its client queue. While a checkpoint has no
room, some ranges pause, and others take only missing entries.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from keyshard.core.position.entry import TopicPartition
from keyshard.core.window.admission import Budget
from keyshard.core.window.checkpoint_size import Kept, kept
from keyshard.core.window.partition_window import PartitionWindow


class Filled(Protocol):
    """The facts that decide pauses: the entries of a window, and its limits."""

    known: dict[TopicPartition, PartitionWindow]
    active: dict[TopicPartition, None]
    tight: set[TopicPartition]
    budget: Budget
    ranges: int


class Backpressure:
    """The pauses of one window. The window reports its changes.

    Any thread may call :meth:`include` and :meth:`late_only` without the window's lock: a receive
    thread that pauses one round early or late does no harm. All other methods need the lock.

    Args:
        window: The window.
    """

    def __init__(self, window: Filled) -> None:
        self._window = window
        self._full: set[TopicPartition] = set()
        self._full_ranges: set[tuple[TopicPartition, int]] = set()
        self._kept: dict[TopicPartition, Kept] = {}
        """Topic partitions whose checkpoint has no room. Takes precedence over ``_full``: the other
        ranges continue to receive. Once the window is full, only ranges that may owe missing
        entries receive, until the window has a late entry."""

    @property
    def any_full(self) -> bool:
        """Whether any topic partition or range is full; one stays so until a release."""
        return bool(self._full or self._full_ranges)

    @property
    def for_checkpoint(self) -> int:
        """Number of ranges that pause because of the size of the checkpoint."""
        return sum(len(one.paused) + len(one.late_only) for one in self._kept.values())

    def include(self, topic_partition: TopicPartition, range_index: int) -> bool:
        """Return whether a range pauses."""
        kept = self._kept.get(topic_partition)
        if kept is None:
            return topic_partition in self._full or (
                (topic_partition, range_index) in self._full_ranges
            )
        held = self._window.known[topic_partition]
        if topic_partition not in self._full:
            return range_index in kept.paused
        # A late entry fits into the checkpoint and makes room there. While a full window has none,
        # ranges that may owe one must receive.
        return bool(held.late) or range_index not in (held.owners or range(self._window.ranges))

    def late_only(self, topic_partition: TopicPartition, range_index: int) -> bool:
        """Return whether a range takes only entries below the newest delivered one."""
        kept = self._kept.get(topic_partition)
        return kept is not None and (topic_partition in self._full or range_index in kept.late_only)

    def is_full(self, topic_partition: TopicPartition) -> bool:
        """Return whether the topic partition's share of the budget is used up."""
        return topic_partition in self._window.active and self._fill(topic_partition) >= 1

    def fill(self) -> float:
        """Return how full the fullest topic partition's share is, from 0 to 1, rarely more."""
        return max(map(self._fill, self._window.known), default=0.0)

    def _fill(self, topic_partition: TopicPartition) -> float:
        window = self._window
        held = window.known[topic_partition]
        return window.budget.fill(held.rows, held.bytes, max(1, len(window.active)))

    def _is_range_full(self, topic_partition: TopicPartition, range_index: int) -> bool:
        most, held = self._window.budget.range_rows_max, self._window.known.get(topic_partition)
        return most is not None and held is not None and held.range_rows[range_index] >= most

    def received(self, topic_partition: TopicPartition, range_index: int) -> None:
        """Update after a receive. A full topic partition or range stays so until a release."""
        if self.is_full(topic_partition):
            self._full.add(topic_partition)
        if self._is_range_full(topic_partition, range_index):
            self._full_ranges.add((topic_partition, range_index))
        self.fitted(topic_partition)

    def fitted(self, topic_partition: TopicPartition) -> None:
        """Update after a cut or new evidence: different entries may fit into the checkpoint."""
        window = self._window
        held = window.known.get(topic_partition)
        if held is None or not held.tight:
            self._kept.pop(topic_partition, None)
            return
        limits = window.budget.share(max(1, len(window.active)))
        row_bytes = held.bytes / max(1, held.rows)
        ranges = 1 if held.whole else window.ranges
        self._kept[topic_partition] = kept(held.range_rows, row_bytes, limits, ranges, held.owners)

    def cut(self) -> None:
        """Update after the cut of a batch."""
        for topic_partition in self._window.tight | self._kept.keys():
            self.fitted(topic_partition)

    def released(self, topic_partitions: Iterable[TopicPartition]) -> None:
        """Update after entries of these topic partitions were released or put back."""
        for topic_partition in topic_partitions:
            if self.is_full(topic_partition):
                self._full.add(topic_partition)
            else:
                self._full.discard(topic_partition)
            if topic_partition in self._kept:
                self.fitted(topic_partition)
        if self._full_ranges:
            self._full_ranges = {one for one in self._full_ranges if self._is_range_full(*one)}

    def shared_anew(self) -> None:
        """Update after topic partitions came or went, or ranges moved: all shares changed."""
        consumed = set(self._window.active)
        self._kept = {where: one for where, one in self._kept.items() if where in consumed}
        for topic_partition in consumed:
            self.fitted(topic_partition)
        self._full.intersection_update(consumed)
        self.released(consumed)
