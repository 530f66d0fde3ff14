"""The resting dead letters of one parked key, and their order in a replay.

Dead letters of a key are replayed in the order of their originals, per topic partition or per
scalable topic: a redelivered message may become a dead letter long after a newer one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

from keyshard.core.message import MessageId
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.topic_segments import place_in_order


@dataclass(slots=True)
class _Originals:
    """Resting dead letters of one key in one topic partition."""

    positions: dict[MessageId, EntryId] = field(default_factory=dict)
    order: list[MessageId] = field(default_factory=list)
    """Heap of the originals; it may contain some whose dead letters no longer rest."""

    def first(self) -> MessageId:
        while self.order[0] not in self.positions:
            heappop(self.order)
        return self.order[0]


@dataclass(slots=True)
class ParkedKey:
    """Resting dead letters of one parked key."""

    last: EntryId
    """Position of the newest dead letter since the key was parked, copies included."""
    since_ms: int
    """When the first of them was written, milliseconds since the epoch; 0 if unknown."""
    count: int = 0
    """Number of resting dead letters."""
    _dead_letters: dict[TopicPartition, _Originals] = field(default_factory=dict)

    def position(self, where: TopicPartition, message_id: MessageId) -> EntryId | None:
        """Return the position of the dead letter of an original; ``None`` if none rests."""
        originals = self._dead_letters.get(where)
        return None if originals is None else originals.positions.get(message_id)

    def begins_after(self, where: TopicPartition, message_id: MessageId) -> bool:
        """Return whether dead letters of a topic partition rest, all of newer originals.

        The segments of a scalable topic count as one topic partition.
        """
        if not (together := self._together(where)):
            return False
        first = together[0]
        place = place_in_order(first), self._dead_letters[first].first()
        return (place_in_order(where), message_id) < place

    def add(self, where: TopicPartition, message_id: MessageId, position: EntryId) -> None:
        """Add a resting dead letter."""
        originals = self._dead_letters.setdefault(where, _Originals())
        originals.positions[message_id] = position
        heappush(originals.order, message_id)
        self.count += 1

    def remove(self, where: TopicPartition, message_id: MessageId) -> EntryId | None:
        """Remove a done dead letter and return its position; ``None`` if it did not rest."""
        originals = self._dead_letters.get(where)
        position = None if originals is None else originals.positions.pop(message_id, None)
        if originals is not None and position is not None:
            self.count -= 1
            if not originals.positions:
                del self._dead_letters[where]
        return position

    def dead_letters(self) -> Iterator[tuple[TopicPartition, MessageId, EntryId]]:
        """Yield the resting dead letters, in no order."""
        for where, originals in self._dead_letters.items():
            for message_id, position in originals.positions.items():
                yield where, message_id, position

    def positions_of(self, message_id: MessageId) -> list[EntryId]:
        """Return the positions of the dead letters of originals with this id."""
        each = self._dead_letters.values()
        return [one.positions[message_id] for one in each if message_id in one.positions]

    def in_order(self) -> list[EntryId]:
        """Return positions in the order of a replay.

        Per topic partition or scalable topic this is the order of the originals; between them, the
        order of writing.
        """
        by_name: defaultdict[str, list[tuple[int, MessageId, EntryId]]] = defaultdict(list)
        written = sorted(
            (position, place_in_order(where), one) for where, one, position in self.dead_letters()
        )
        for position, (name, number), message_id in written:
            by_name[name].append((number, message_id, position))
        originals = {name: iter(sorted(found)) for name, found in by_name.items()}
        return [next(originals[name])[-1] for _, (name, _), _ in written]

    def first_in_order(self) -> EntryId:
        """Return the first position of :meth:`in_order`."""
        where = next(iter(self._dead_letters))
        if len(self._dead_letters) > 1:
            _, oldest = min((position, where) for where, _, position in self.dead_letters())
            where = self._together(oldest)[0]
        return self._dead_letters[where].positions[self._dead_letters[where].first()]

    def _together(self, where: TopicPartition) -> list[TopicPartition]:
        """Return topic partitions with dead letters that share an order with one, in that order."""
        name, _ = place_in_order(where)
        # A topic that was created again has segments of the same numbers, and later originals.
        places = sorted(
            (place_in_order(one), originals.first(), one)
            for one, originals in self._dead_letters.items()
        )
        return [one for (other, _), _, one in places if other == name]
