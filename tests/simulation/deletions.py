"""Subscriptions that are deleted between two lives of a program, and perhaps created again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from random import Random
from typing import NamedTuple

from keyshard.broker.memory import MemoryCluster
from keyshard.broker.memory.log import StoredEntry
from keyshard.broker.port import StartPosition
from keyshard.core.position.checkpoint import PartitionCheckpoint
from keyshard.core.position.entry import EntryId, TopicPartition
from tests.simulation.starts import entries_of

RUNS = 0.5
"""Share of runs with deletions."""
LIVES = 0.5
"""Share of their lives before which subscriptions are deleted."""
TRIMS = 0.3
"""Share of deletions after which all stored entries are deleted."""


class Deletion(NamedTuple):
    """A subscription that was deleted."""

    where: TopicPartition
    trimmed: list[StoredEntry]
    """Entries that were deleted while no subscription retained them."""


def shows(state: PartitionCheckpoint, entry_id: EntryId) -> bool:
    """Whether a checkpoint shows that it lacks a deleted entry.

    It does not say where older ledgers end, nor which ledgers there were (ADR 44).
    """
    lasts = state.delivered.last_entries
    if state.floor is not None:
        lasts.setdefault(state.floor.ledger, state.floor.entry)
    is_newest = entry_id.ledger >= max(lasts, default=0)
    return is_newest or entry_id.entry < lasts.get(entry_id.ledger, 0)


class Deletions:
    """Deletes subscriptions.

    Args:
        seed: Decides.
    """

    def __init__(self, seed: int) -> None:
        self._random = Random(f"{seed}:deletions")
        self._happens = self._random.random() < RUNS
        self.trimmed: set[TopicPartition] = set()
        """Topic partitions whose entries were deleted after a subscription."""

    def between_lives(
        self, cluster: MemoryCluster, name: str, known: Iterable[TopicPartition], *, may_trim: bool
    ) -> Iterator[Deletion]:
        """Perhaps delete the subscription of some topic partitions.

        Args:
            cluster: Has the subscriptions.
            name: The subscription.
            known: The topic partitions of the checkpoint.
            may_trim: Whether entries may be deleted afterwards.
        """
        random = self._random
        if not self._happens or random.random() >= LIVES:
            return
        for where in known:
            subscription = cluster.subscriptions(where).get(name)
            if subscription is None or subscription.connected or random.random() < 0.5:
                continue
            cluster.delete_subscription(where, name)
            trimmed: list[StoredEntry] = []
            if may_trim and random.random() < TRIMS:
                trimmed = entries_of(cluster, where)
                cluster.roll_ledger(where)
                cluster.trim(where, EntryId(cluster.log(where).last_written.ledger + 1, 0))
                self.trimmed.add(where)
            if random.random() < 0.5:
                with cluster.lock:
                    cluster.open_subscription(where, name, StartPosition.EARLIEST)
            yield Deletion(where, trimmed)
