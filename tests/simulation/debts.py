"""What the query owes: every message that was sent, until it is committed or rightly gone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from keyshard.core.entry import EntryId, TopicPartition


class Place(NamedTuple):
    """Where a message is stored."""

    topic: str | None
    partition: int | None
    ledger: int | None
    entry: int | None
    index: int | None


class Debts:
    """Messages that are owed, committed, and forgiven."""

    def __init__(self) -> None:
        self.owed: set[Place] = set()
        """Sent, not committed and not forgiven."""
        self.committed: set[Place] = set()
        self.forgiven: set[Place] = set()
        """Messages that need not be committed, and may be."""

    def sent(self, where: TopicPartition, entry_id: EntryId, messages: int) -> None:
        """The broker has an entry."""
        self.owed.update(
            Place(where.topic, where.partition, entry_id.ledger, entry_id.entry, index)
            for index in range(messages)
        )

    def paid(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Rows are committed."""
        for row in rows:
            ledger, entry, index = map(int, row["__messageId"].split(":"))
            self.committed.add(Place(row["__topic"], row["__partition"], ledger, entry, index))
        self.owed -= self.committed

    def forgive(self, where: Collection[TopicPartition]) -> None:
        """Topic partitions are deleted with all that they hold."""
        names = {(one.topic, one.partition) for one in where}
        gone = {place for place in self.owed if (place.topic, place.partition) in names}
        self.owed -= gone
        self.forgiven |= gone

    @property
    def lost(self) -> set[Place]:
        """Forgiven messages that were not committed all the same."""
        return self.forgiven - self.committed
