"""Which actor gets which rows, in which order, and which entries are done with them.

An actor owns one contiguous range of the ring. An entry goes to the actor of its key; one whose
producer does not batch by key is shared, and done when all who share it are. Entries without a key
have no order: they go where the least waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from keyshard.arrow.content import only
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.ring.hash_range import range_index
from keyshard.core.window.layout import Located

Entries = dict[TopicPartition, list[EntryId]]


class Shares:
    """How many pieces of an entry are not done yet."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = 0


class Piece(NamedTuple):
    """An entry, or the messages of it that one actor gets."""

    where: TopicPartition
    block: EntryBlock
    shares: Shares | None
    """``None`` for a whole entry."""


def rows_of(pieces: Iterable[Piece]) -> int:
    """Messages in some pieces."""
    return sum(piece.block.rows for piece in pieces)


def whole_pieces(pieces: Sequence[Piece], rows: int) -> int:
    """How many of the first pieces lie within so many rows."""
    count = 0
    for piece in pieces:
        rows -= piece.block.rows
        if rows < 0:
            break
        count += 1
    return count


def entries_done(pieces: Iterable[Piece]) -> Entries:
    """Entries that are done when these pieces are; each piece is given once."""
    done: Entries = {}
    for piece in pieces:
        if piece.shares is not None:
            piece.shares.left -= 1
            if piece.shares.left:
                continue
        done.setdefault(piece.where, []).append(piece.block.id)
    return done


class Waiting:
    """Rows that no actor has yet, per actor and in order of receipt. For one thread at a time.

    Args:
        actors: How many share the ring.
    """

    def __init__(self, actors: int) -> None:
        self._queues: list[deque[Piece]] = [deque() for _ in range(actors)]
        self.rows = [0] * actors
        """Messages waiting for each actor."""
        self.since_s = [0.0] * actors
        """When the first of them came, where there are any; seconds."""

    def push(self, located: Iterable[Located], now_s: float) -> None:
        """Add received entries, in order of receipt."""
        for where, block in located:
            self._add(Piece(where, block, None), now_s)

    def pop(self, actor: int, rows_max: int, bytes_max: int) -> list[Piece]:
        """The next rows of an actor, up to both limits unless one piece has more."""
        queue = self._queues[actor]
        popped: list[Piece] = []
        rows = size = 0
        while queue:
            block = queue[0].block
            rows, size = rows + block.rows, size + block.column_bytes
            if popped and (rows > rows_max or size > bytes_max):
                break
            popped.append(queue.popleft())
            self.rows[actor] -= block.rows
        return popped

    def give_back(self, actor: int, pieces: Sequence[Piece]) -> None:
        """Put the rows that were popped last before the others again."""
        self._queues[actor].extendleft(reversed(pieces))
        self.rows[actor] += rows_of(pieces)

    def split_anew(self, actors: int, now_s: float) -> Waiting:
        """The same rows for another number of actors, none of which works on anything."""
        anew = Waiting(actors)
        # The rows of a key wait in one queue, so queues may follow each other in any order.
        for queue in self._queues:
            for piece in queue:
                anew._add(piece, now_s)
        return anew

    def _add(self, piece: Piece, now_s: float) -> None:
        owners = self._owners(piece.block)
        if isinstance(owners, int):
            self._append(owners, piece, now_s)
            return
        shares = piece.shares or Shares()
        rows: dict[int, list[int]] = {}
        for index, owner in zip(piece.block.indices, owners, strict=True):
            rows.setdefault(owner, []).append(index)
        # A piece that is divided counted as one.
        shares.left += len(rows) - (piece.shares is not None)
        for owner, indices in rows.items():
            part = only(piece.block, frozenset(indices))
            self._append(owner, Piece(piece.where, part, shares), now_s)

    def _append(self, actor: int, piece: Piece, now_s: float) -> None:
        if not self.rows[actor]:
            self.since_s[actor] = now_s
        self._queues[actor].append(piece)
        self.rows[actor] += piece.block.rows

    def _owners(self, block: EntryBlock) -> int | list[int]:
        """The actor of an entry; of each message where they differ."""
        count = len(self._queues)
        if block.mixed_slots is None and not block.keys_of_bytes:
            if block.slot is None:
                return self._least()
            return range_index(block.slot, count)
        # By the text of the key, which no change of ranges changes.
        slots = block.text_slots
        known = [range_index(slot, count) for slot in slots if slot is not None]
        if not known:
            return self._least()
        if len(set(known)) == 1:
            return known[0]
        return [known[0] if slot is None else range_index(slot, count) for slot in slots]

    def _least(self) -> int:
        return min(range(len(self.rows)), key=self.rows.__getitem__)
