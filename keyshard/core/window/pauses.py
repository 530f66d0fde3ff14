"""How full a window is, and which ranges pause: all of a full topic partition, or some while its
checkpoint has no room."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from keyshard.core.position.entry import TopicPartition
from keyshard.core.window.checkpoint_size import paused_ranges

if TYPE_CHECKING:
    from keyshard.core.window.window import Window


class Pauses:
    """A part of one window, which tells what changed.

    Only :meth:`include` may be asked by any thread without the window's lock: a receive thread that
    pauses one round early or late does no harm.

    Args:
        window: What is received and held.
    """

    def __init__(self, window: Window) -> None:
        self._window = window
        self._full: set[TopicPartition] = set()
        self._named: dict[TopicPartition, frozenset[int]] = {}
        """Ranges that pause while a checkpoint has no room; goes before ``_full``: the others go on
        receiving, even when the window is full."""

    @property
    def any_full(self) -> bool:
        """Whether a topic partition has become full since the newest release."""
        return bool(self._full)

    @property
    def for_checkpoint(self) -> int:
        """Number of ranges that pause for the size of the checkpoint."""
        return sum(map(len, self._named.values()))

    def include(self, topic_partition: TopicPartition, range_index: int) -> bool:
        """Whether a range pauses."""
        named = self._named.get(topic_partition)
        return topic_partition in self._full if named is None else range_index in named

    def is_full(self, topic_partition: TopicPartition) -> bool:
        """Whether the topic partition's share of the budget is used up."""
        return topic_partition in self._window.active and self._fill(topic_partition) >= 1

    def fill(self) -> float:
        """How full the fullest topic partition's share is, 0 to 1 and rarely more."""
        return max(map(self._fill, self._window.known), default=0.0)

    def _fill(self, topic_partition: TopicPartition) -> float:
        window = self._window
        held = window.known[topic_partition]
        return window.budget.fill(held.rows, held.bytes, max(1, len(window.active)))

    def received(self, topic_partition: TopicPartition) -> None:
        """A topic partition received entries; when that fills it, it is full until a release."""
        if self.is_full(topic_partition):
            self._full.add(topic_partition)
        self.fitted(topic_partition)

    def fitted(self, topic_partition: TopicPartition) -> None:
        """A topic partition was cut, or evidence about it came: what fits may be other entries."""
        named = self._paused(topic_partition)
        if named is None:
            self._named.pop(topic_partition, None)
        else:
            self._named[topic_partition] = named

    def _paused(self, topic_partition: TopicPartition) -> frozenset[int] | None:
        window = self._window
        held = window.known.get(topic_partition)
        if held is None or not held.tight:
            return None
        budget, shares = window.budget, max(1, len(window.active))
        rows_share, bytes_share = budget.rows_max // shares, budget.bytes_max // shares
        return paused_ranges(held.received, rows_share, bytes_share, window.ranges, held.owners)

    def cut(self) -> None:
        """A batch was cut."""
        for topic_partition in self._window.tight | self._named.keys():
            self.fitted(topic_partition)

    def released(self, topic_partitions: Iterable[TopicPartition]) -> None:
        """Something of these is held no longer, or is put back."""
        for topic_partition in topic_partitions:
            if self.is_full(topic_partition):
                self._full.add(topic_partition)
            else:
                self._full.discard(topic_partition)

    def shared_anew(self) -> None:
        """Topic partitions came or went, or others own the ring: every share is another one."""
        consumed = set(self._window.partitions)
        self._named = {where: named for where, named in self._named.items() if where in consumed}
        for topic_partition in consumed:
            self.fitted(topic_partition)
        self._full.intersection_update(consumed)
        self.released(consumed)
