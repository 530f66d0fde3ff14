"""The part of the window that takes evidence about holes and keeps checkpoints small."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from keyshard.core.checkpoint import PartitionCheckpoint
from keyshard.core.checkpoint_size import fitting, paused_ranges
from keyshard.core.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.settling import Proofs, Settled, settle

if TYPE_CHECKING:
    from keyshard.core.window import Budget, Counters, PartitionWindow


class SettlingWindow:
    """Base of :class:`keyshard.core.window.Window`; the state is there."""

    _partitions: dict[TopicPartition, PartitionWindow]
    _budget: Budget
    _ranges: int
    counters: Counters

    def holes_view(
        self, topic_partition: TopicPartition
    ) -> tuple[PartitionCheckpoint, set[EntryId]] | None:
        """State and held ids of a topic partition with holes or several ledgers, else ``None``."""
        window = self._partitions[topic_partition]
        return (window.state, set(window.held)) if window.state.delivered.run_count > 1 else None

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
        window.proofs.merge(proofs)
        window.owners = owners
        if proofs:
            window.waiting_rows = 0

    def paused(self, topic_partition: TopicPartition) -> frozenset[int] | None:
        """Ranges that pause for the size of the checkpoint; ``None`` when it has room.

        Otherwise the ranges that are not named go on receiving, even when the window is full.
        """
        window = self._partitions[topic_partition]
        if not window.tight:
            return None
        shares = len(self._partitions)
        return paused_ranges(
            window.received,
            self._budget.rows_max // shares,
            self._budget.bytes_max // shares,
            self._ranges,
            window.owners,
        )

    @property
    def holes(self) -> int:
        """Gaps between the runs of delivered entries, over all topic partitions."""
        return sum(max(0, w.state.delivered.run_count - 1) for w in self._partitions.values())

    def _fitting(self, window: PartitionWindow) -> int:
        """How many of the received entries, which are sorted, the next checkpoint has room for."""
        room = self._budget.checkpoint_bytes_max // len(self._partitions)
        count = fitting(window.state.delivered, window.received, room)
        if count < len(window.received) and window.proofs:
            # The checkpoint of this cut is going to have fewer holes than the newest.
            settled = settle(window.state, window.proofs, [b.id for b, _ in window.received])
            count = fitting(settled.delivered, window.received, room)
        window.tight = count < len(window.received)
        if not count:
            window.waiting_rows = window.received_rows
        return count

    def _settle(self, window: PartitionWindow, blocks: Sequence[EntryBlock]) -> Settled:
        """What the evidence makes of the newest state, before ``blocks`` join it."""
        undelivered: list[EntryId] = []
        if window.proofs:
            undelivered += [block.id for block in blocks]
            undelivered += [block.id for block, _ in window.received]
        settled = settle(window.state, window.proofs, undelivered)
        window.proofs.applied(settled.floor)
        self.counters.holes_settled += settled.newly
        return settled
