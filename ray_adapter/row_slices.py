"""Assigns rows to actors, in order, and tracks which entries are done.

An actor owns one contiguous range of the ring. An entry goes to the actor of its key. If a producer
does not batch by key, actors share the entry; it is done when all of them are done. Entries
without a key have no order, so they go to the actor with the fewest waiting rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from keyshard.columns.entry_rows import divided, only
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.ring.hash_range import range_index
from keyshard.core.window.layout import Located
from keyshard.handlers.entry_run import HandledMessages

Entries = dict[TopicPartition, list[EntryId]]


class EntryShares:
    """Counts the pieces of an entry that are not done yet."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = 0


class RowSlice(NamedTuple):
    """A piece of the waiting rows: an entry, or the messages of it that one actor gets."""

    where: TopicPartition
    block: EntryBlock
    shares: EntryShares | None
    """``None`` for a whole entry."""


def rows_of(pieces: Iterable[RowSlice]) -> int:
    """Return the number of messages in pieces."""
    return sum(piece.block.rows for piece in pieces)


def whole_pieces(pieces: Sequence[RowSlice], rows: int) -> int:
    """Return how many of the first pieces fit completely into ``rows``."""
    count = 0
    for piece in pieces:
        rows -= piece.block.rows
        if rows < 0:
            break
        count += 1
    return count


def divided_messages(pieces: Iterable[RowSlice]) -> HandledMessages:
    """Return the messages of pieces that share their entries with others."""
    shared = (piece for piece in pieces if piece.shares is not None)
    return [(one.where, one.block.id, index) for one in shared for index in one.block.indices]


def entries_done(pieces: Iterable[RowSlice]) -> Entries:
    """Return the entries that are done when these pieces are. Pass each piece once."""
    done: Entries = {}
    for piece in pieces:
        if piece.shares is not None:
            piece.shares.left -= 1
            if piece.shares.left:
                continue
        done.setdefault(piece.where, []).append(piece.block.id)
    return done


class PendingRows:
    """Rows that no actor has yet, by actor and in order of receipt. Not thread-safe.

    Args:
        actors: Number of actors that share the ring.
    """

    def __init__(self, actors: int) -> None:
        self._queues: list[deque[RowSlice]] = [deque() for _ in range(actors)]
        self.rows = [0] * actors
        """Number of waiting messages, by actor."""
        self.since_s = [0.0] * actors
        """When the oldest waiting row of each actor came, if there is one; monotonic seconds."""

    def push(self, located: Iterable[Located], now_s: float) -> None:
        """Add received entries, in order of receipt."""
        for where, block in located:
            self._add(RowSlice(where, block, None), now_s)

    def pop(
        self, actor: int, rows_max: int, bytes_max: int, *, divides: bool = False
    ) -> list[RowSlice]:
        """Remove and return the next rows of an actor, within both limits; at least one piece.

        Args:
            actor: Index of the actor.
            rows_max: Most rows.
            bytes_max: Most content, bytes.
            divides: Whether a first piece with more rows is divided.
        """
        queue = self._queues[actor]
        if divides and queue and queue[0].block.rows > rows_max:
            where, block, shares = queue.popleft()
            first, rest = divided(block, rows_max)
            if shares is None:
                shares = EntryShares()
                shares.left = 1
            shares.left += 1
            queue.extendleft((RowSlice(where, rest, shares), RowSlice(where, first, shares)))
        popped: list[RowSlice] = []
        rows = size = 0
        while queue:
            block = queue[0].block
            rows, size = rows + block.rows, size + block.column_bytes
            if popped and (rows > rows_max or size > bytes_max):
                break
            popped.append(queue.popleft())
            self.rows[actor] -= block.rows
        return popped

    def give_back(self, actor: int, pieces: Sequence[RowSlice]) -> None:
        """Put rows that were popped last back at the front."""
        self._queues[actor].extendleft(reversed(pieces))
        self.rows[actor] += rows_of(pieces)

    def split_anew(self, actors: int, now_s: float) -> PendingRows:
        """Divide the rows among another number of actors, while no actor has rows."""
        anew = PendingRows(actors)
        # All rows of a key are in one queue, so the order of the queues does not matter.
        for queue in self._queues:
            for piece in queue:
                anew._add(piece, now_s)
        return anew

    def _add(self, piece: RowSlice, now_s: float) -> None:
        owners = self._owners(piece.block)
        if isinstance(owners, int):
            self._append(owners, piece, now_s)
            return
        shares = piece.shares or EntryShares()
        rows: dict[int, list[int]] = {}
        for index, owner in zip(piece.block.indices, owners, strict=True):
            rows.setdefault(owner, []).append(index)
        # A piece that is divided again was already counted once.
        shares.left += len(rows) - (piece.shares is not None)
        for owner, indices in rows.items():
            part = only(piece.block, frozenset(indices))
            self._append(owner, RowSlice(piece.where, part, shares), now_s)

    def _append(self, actor: int, piece: RowSlice, now_s: float) -> None:
        if not self.rows[actor]:
            self.since_s[actor] = now_s
        self._queues[actor].append(piece)
        self.rows[actor] += piece.block.rows

    def _owners(self, block: EntryBlock) -> int | list[int]:
        """Return the actor of an entry, or of each message if they differ."""
        count = len(self._queues)
        if block.mixed_slots is None and not block.keys_of_bytes:
            if block.slot is None:
                return self._least()
            return range_index(block.slot, count)
        # By the text of the key, so that a change of the source's ranges does not move a key.
        slots = block.text_slots
        known = [range_index(slot, count) for slot in slots if slot is not None]
        if not known:
            return self._least()
        if len(set(known)) == 1:
            return known[0]
        return [known[0] if slot is None else range_index(slot, count) for slot in slots]

    def _least(self) -> int:
        return min(range(len(self.rows)), key=self.rows.__getitem__)
