"""The letters of one parked key that rest, and the order in which they are replayed.

Letters of a key are replayed in the order of their originals, per topic partition: one that was
delivered again may become a letter long after a newer one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

from keyshard.core.message import MessageId
from keyshard.core.position.entry import EntryId, TopicPartition


@dataclass(slots=True)
class _Originals:
    """Resting letters of one key in one topic partition."""

    positions: dict[MessageId, EntryId] = field(default_factory=dict)
    order: list[MessageId] = field(default_factory=list)
    """Heap of their originals, and of some that rest no more."""

    def first(self) -> MessageId:
        while self.order[0] not in self.positions:
            heappop(self.order)
        return self.order[0]


@dataclass(slots=True)
class ParkedKey:
    """Letters of one parked key that are not done."""

    last: EntryId
    """Position of the newest one since it was parked, a repeated one included."""
    since_ms: int
    """When the first of them was written, milliseconds since the epoch; 0 when unknown."""
    count: int = 0
    """How many rest."""
    _letters: dict[TopicPartition, _Originals] = field(default_factory=dict)

    def position(self, where: TopicPartition, message_id: MessageId) -> EntryId | None:
        """Where the letter of an original lies; ``None`` when none rests."""
        originals = self._letters.get(where)
        return None if originals is None else originals.positions.get(message_id)

    def first(self, where: TopicPartition) -> MessageId | None:
        """Lowest original of a topic partition that rests."""
        originals = self._letters.get(where)
        return None if originals is None else originals.first()

    def add(self, where: TopicPartition, message_id: MessageId, position: EntryId) -> None:
        """A letter rests."""
        originals = self._letters.setdefault(where, _Originals())
        originals.positions[message_id] = position
        heappush(originals.order, message_id)
        self.count += 1

    def remove(self, where: TopicPartition, message_id: MessageId) -> EntryId | None:
        """A letter is done; where it lay, ``None`` when it did not rest."""
        originals = self._letters.get(where)
        position = None if originals is None else originals.positions.pop(message_id, None)
        if originals is not None and position is not None:
            self.count -= 1
            if not originals.positions:
                del self._letters[where]
        return position

    def letters(self) -> Iterator[tuple[TopicPartition, MessageId, EntryId]]:
        """Those that rest, in no order."""
        for where, originals in self._letters.items():
            for message_id, position in originals.positions.items():
                yield where, message_id, position

    @property
    def topics(self) -> set[str]:
        """Topics of the originals."""
        return {where.topic for where in self._letters}

    def in_order(self) -> list[EntryId]:
        """Positions in the order of a replay.

        That of the originals per topic partition; between topic partitions as they were written.
        """
        sorted_ids = {where: iter(sorted(one.positions)) for where, one in self._letters.items()}
        written = sorted((position, where) for where, _, position in self.letters())
        return [self._letters[where].positions[next(sorted_ids[where])] for _, where in written]

    def first_in_order(self) -> EntryId:
        """The first of :meth:`in_order`."""
        where = next(iter(self._letters))
        if len(self._letters) > 1:
            _, where = min((position, where) for where, _, position in self.letters())
        return self._letters[where].positions[self._letters[where].first()]
