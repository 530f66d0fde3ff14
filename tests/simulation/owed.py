"""Messages that the query owes: sent, and neither committed nor legitimately gone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from keyshard.core.position.checkpoint import PartitionCheckpoint
from keyshard.core.position.entry import EntryId, TopicPartition


class Place(NamedTuple):
    """The position of a message."""

    topic: str | None
    partition: int | None
    ledger: int | None
    entry: int | None
    batch_index: int | None


def place_of(row: Mapping[str, Any]) -> Place:
    """Return the position of the message of a row."""
    return Place(row["__topic"], row["__partition"], *map(int, row["__messageId"].split(":")))


class Debts:
    """Messages that are owed, committed, and forgiven."""

    def __init__(self) -> None:
        self.owed: set[Place] = set()
        """Sent, not committed and not forgiven."""
        self.committed: set[Place] = set()
        self.forgiven: set[Place] = set()
        """Messages that need not be committed, and may be."""
        self.before: set[Place] = set()
        """Messages before the start of the source; they must not be committed."""
        self._left_out: set[tuple[Any, ...]] = set()
        """Entries that have nothing else."""
        self._inside: set[tuple[Any, ...]] = set()
        """Entries inside which the source begins, perhaps after their last message."""
        self.skipped: dict[tuple[TopicPartition, EntryId], bool] = {}
        """Entries that another client acknowledged whole; whether the source must notice it."""
        self.skipped_entries: set[tuple[Any, ...]] = set()
        """All entries of which another client acknowledged a part."""
        self._hidden: set[tuple[TopicPartition, EntryId]] = set()
        """Entries without a receiver."""
        self.unsubscribed = False
        """Whether a subscription was deleted, and its acknowledgements with it."""
        self.accepted = False
        """Whether a loss was named and accepted: ``failOnDataLoss`` is false from then on."""

    def sent(self, where: TopicPartition, entry_id: EntryId, messages: int) -> None:
        """The broker has an entry."""
        self.owed.update(
            Place(where.topic, where.partition, entry_id.ledger, entry_id.entry, index)
            for index in range(messages)
        )

    def paid(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Rows are committed."""
        for row in rows:
            self.committed.add(place_of(row))
        self.owed -= self.committed
        early = self.before & self.committed
        assert not early, f"{min(early)} lies before the start of the source, and is committed"

    def begin(
        self, known: Collection[Place], before: Collection[Place], inside: tuple[Any, ...] | None
    ) -> None:
        """Record a start: messages before it are not owed, later ones are.

        Args:
            known: Messages of the topic partition.
            before: Those before the start.
            inside: The entry inside which the source begins: topic, partition, ledger, entry.
        """
        self._inside.update(() if inside is None else (inside,))
        self.before -= set(known)
        self.owed |= {place for place in known if self._entry(place) not in self._hidden}
        self.before |= set(before)
        self.owed -= set(before)
        self._left_out = {place[:4] for place in self.before} - {place[:4] for place in self.owed}

    def skip(self, where: TopicPartition, entry_id: EntryId, indices: Collection[int]) -> None:
        """Record foreign acknowledgements: these messages may be committed or not."""
        gone = {
            Place(where.topic, where.partition, entry_id.ledger, entry_id.entry, index)
            for index in indices
        }
        self.owed -= gone
        self.forgiven |= gone
        self.skipped_entries.update(place[:4] for place in gone)

    def delete_subscription(self, where: TopicPartition, known: PartitionCheckpoint) -> None:
        """Record a deletion: messages before the start may come that the checkpoint does not know.

        These are all of them, if a connection was lost before the first checkpoint. Otherwise they
        are in the producer batch inside which the source begins.

        Args:
            where: The topic partition.
            known: Its part of the newest checkpoint.
        """
        self.unsubscribed = True
        unknown = [
            place for place in self.before
            if place[:2] == (where.topic, where.partition)
            and (known.floor is None or place[:4] not in self._left_out - self._inside)
        ]  # fmt: skip
        self.before.difference_update(unknown)
        self.forgiven.update(unknown)
        self.skipped_entries.update(place[:4] for place in unknown)

    def hidden(self, where: TopicPartition, entries: Iterable[EntryId]) -> None:
        """The broker has entries that it never delivers, and acknowledges by itself."""
        self._hidden.update((where, entry_id) for entry_id in entries)

    def lies_before(self, where: TopicPartition, entry_id: EntryId) -> bool:
        """Whether all messages of an entry lie before the start of the source."""
        return (where.topic, where.partition, *entry_id) in self._left_out

    def is_given_up(self, place: Place) -> bool:
        """Whether the source rightly takes an entry for gone or not its own, and acknowledges it.

        A broker acknowledges entries without a receiver by itself. If a crash makes it forget
        that, the source acknowledges them.
        """
        if place[:4] in self._left_out:
            return True
        entry = self._entry(place)
        return entry in self._hidden or (self.accepted and entry in self.skipped)

    @staticmethod
    def _entry(place: Place) -> tuple[TopicPartition, EntryId]:
        where = TopicPartition(str(place.topic), place.partition or 0)
        return where, EntryId(place.ledger or 0, place.entry or 0)

    def forgive(self, where: Collection[TopicPartition]) -> None:
        """Topic partitions are deleted with all that they hold."""
        names = {(one.topic, one.partition) for one in where}
        gone = {place for place in self.owed if (place.topic, place.partition) in names}
        self.owed -= gone
        self.forgiven |= gone
        self.skipped = {key: must for key, must in self.skipped.items() if key[0] not in where}

    @property
    def silent(self) -> list[str]:
        """Entries whose loss the source must have noticed, and has not."""
        if self.accepted:
            return []
        # Messages before the start of the source are no loss.
        lost = {place[:4] for place in self.lost - self.before}
        return [
            f"{where}/{entry_id.ledger}:{entry_id.entry}"
            for (where, entry_id), must in self.skipped.items()
            if must
            and (where, entry_id) not in self._hidden
            and (where.topic, where.partition, *entry_id) in lost
        ]

    @property
    def lost(self) -> set[Place]:
        """Messages that are not owed and were not committed."""
        return (self.forgiven | self.before) - self.committed
