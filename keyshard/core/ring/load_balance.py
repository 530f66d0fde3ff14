"""Weighted assignment: owners get equal loads instead of equal parts of the ring.

The finest unit is a slot: the broker cannot separate keys that share a slot, and one key has one
owner. So a hot slot is a lower bound for every assignment.

Load moves from the busiest owner to one with little load, in contiguous pieces cut from the ends of
the owner's ranges. A move must reduce the load, because each piece needs one more consumer per
topic partition.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import accumulate
from operator import attrgetter

from keyshard.core.ring.assignment import Assignment, joined, slot_owners
from keyshard.core.ring.hash_range import RING_SIZE, HashRange
from keyshard.core.ring.slot_load import SlotLoad

TOLERANCE = 0.03
"""Excess over the level that is left in place, as a fraction of the level."""
RESERVE = 0.02
"""Fraction of the load that is spread over all slots: an idle slot may get messages later."""
MOVES_PER_OWNER = 4
"""Most pieces that move, per owner. Nearly all balances need less than one."""


@dataclass(frozen=True, slots=True)
class Balance:
    """A weighted assignment and its effect."""

    assignment: Assignment
    messages: int
    """Number of messages in the measured load."""
    max_over_mean_before: float
    """Load of the busiest owner over the mean, before; 1 is even."""
    max_over_mean_after: float
    """Load of the busiest owner over the mean, after."""
    hot_key_floor: float | None
    """Share of the hottest key times the number of owners, if above 1: a lower bound for the
    busiest owner in any assignment. ``None``: no key is a limit."""
    hot_key: str | None
    """The hottest key."""
    hot_slot_floor: float | None
    """Share of the hottest slot, which may hold several keys, times the number of owners, if
    above 1."""
    hot_slot: int | None
    """The hottest slot."""
    hot_slot_keys: tuple[str, ...]
    """Frequent keys in the hottest slot, the most frequent first."""

    def __str__(self) -> str:
        text = f"max/mean {self.max_over_mean_before:.2f} -> {self.max_over_mean_after:.2f}"
        if self.hot_key_floor is not None:
            text += f", floor {self.hot_key_floor:.2f} by key {self.hot_key!r}"
        elif self.hot_slot_floor is not None:
            text += f", floor {self.hot_slot_floor:.2f} by slot {self.hot_slot}"
            text += f" with keys {', '.join(map(repr, self.hot_slot_keys[:5])) or 'unknown'}"
        return text


def balance(assignment: Assignment, load: SlotLoad) -> Balance:
    """Spread the load evenly over the present owners; a load within the tolerance stays.

    Args:
        assignment: The present assignment.
        load: Messages by slot. Without messages, no slot moves.
    """
    before = max_over_mean(assignment, load)
    after = _Moves(assignment, load).made() if load.messages else assignment
    owners = len(assignment)
    hot_slot = max(range(RING_SIZE), key=load.slots.__getitem__)
    slot_floor = owners * load.slots[hot_slot] / max(1, load.messages)
    keys = load.hottest_keys()
    key_floor = owners * keys[0][1] / load.messages if keys else 0.0
    slot_is_hot = slot_floor > 1
    return Balance(
        after,
        load.messages,
        before,
        max_over_mean(after, load),
        key_floor if key_floor > 1 else None,
        keys[0][0] if key_floor > 1 else None,
        slot_floor if slot_is_hot else None,
        hot_slot if slot_is_hot else None,
        tuple(load.keys_in(hot_slot)) if slot_is_hot else (),
    )


def max_over_mean(assignment: Assignment, load: SlotLoad) -> float:
    """Return the load of the busiest owner over the mean of all; 1 without load."""
    if not load.messages:
        return 1.0
    busiest = max(
        sum(sum(load.slots[part.start : part.end + 1]) for part in ranges) for ranges in assignment
    )
    return busiest * len(assignment) / load.messages


@dataclass(frozen=True, slots=True)
class _Move:
    """A piece that one owner could give to another."""

    giver: int
    whole: HashRange
    """The giver's range that the piece is cut from."""
    piece: HashRange
    taker: int
    highest: float
    """Higher load of the two owners afterwards, or the level that is good enough."""
    pieces: int
    """Number of ranges that this adds in total; none if the taker is the neighbour."""

    @property
    def cost(self) -> tuple[float, int, int]:
        return self.highest, self.pieces, len(self.piece)


class _Moves:
    """Moves pieces, each from the busiest owner that can give any."""

    def __init__(self, assignment: Assignment, load: SlotLoad) -> None:
        reserve = load.messages * RESERVE / RING_SIZE
        weights = [count + reserve for count in load.slots]
        self._weights = weights
        self._below = [0.0, *accumulate(weights)]
        self._owned = [list(ranges) for ranges in assignment]
        self._owner_of = slot_owners(assignment)
        self._loads = [sum(map(self._weight, ranges)) for ranges in assignment]
        self._level = _level(weights, len(assignment))
        self._enough = self._level * (1 + TOLERANCE)

    def made(self) -> Assignment:
        """Make all moves that reduce the load, and return the assignment."""
        stuck: set[int] = set()
        for _ in range(MOVES_PER_OWNER * len(self._owned)):
            busy = [
                owner
                for owner, load in enumerate(self._loads)
                if load > self._enough and owner not in stuck
            ]
            if not busy:
                break
            giver = max(busy, key=self._loads.__getitem__)
            move = min(self._possible(giver), key=attrgetter("cost"), default=None)
            if move is None:
                stuck.add(giver)
            else:
                self._make(move)
        return tuple(joined(ranges) for ranges in self._owned)

    def _possible(self, giver: int) -> Iterator[_Move]:
        """Yield moves after which both owners have less load than the giver has now."""
        least = min(range(len(self._loads)), key=self._loads.__getitem__)
        hottest = max(max(self._weights[r.start : r.end + 1]) for r in self._owned[giver])
        spare = self._loads[giver] - max(self._level, hottest)
        for whole in self._owned[giver]:
            beside = {self._owner_of[whole.start - 1], self._owner_of[(whole.end + 1) % RING_SIZE]}
            for taker in sorted({least, *beside} - {giver}):
                room = self._level - self._loads[taker]
                if room <= 0 or spare <= 0:
                    continue
                for piece in self._ends(whole, min(spare, room)):
                    if len(piece) == len(whole) and len(self._owned[giver]) == 1:
                        continue
                    weight = self._weight(piece)
                    highest = max(self._loads[giver] - weight, self._loads[taker] + weight)
                    if highest < self._loads[giver]:
                        added = self._added(whole, piece, taker)
                        yield _Move(giver, whole, piece, taker, max(highest, self._enough), added)

    def _ends(self, whole: HashRange, weight: float) -> Iterator[HashRange]:
        """Yield parts at the ends of a range, just lighter and just heavier than wanted."""
        below = self._below
        after = bisect_left(below, below[whole.start] + weight, whole.start + 1, whole.end + 1)
        for border in {max(whole.start + 1, after - 1), after}:
            yield HashRange(whole.start, border - 1)
        first = bisect_left(below, below[whole.end + 1] - weight, whole.start, whole.end)
        for start in {max(whole.start, first - 1), first}:
            yield HashRange(start, whole.end)

    def _added(self, whole: HashRange, piece: HashRange, taker: int) -> int:
        touches = (
            piece.start > 0 and self._owner_of[piece.start - 1] == taker,
            piece.end + 1 < RING_SIZE and self._owner_of[piece.end + 1] == taker,
        )
        return (piece != whole) - sum(touches)

    def _make(self, move: _Move) -> None:
        weight, piece, whole = self._weight(move.piece), move.piece, move.whole
        kept = self._owned[move.giver]
        kept.remove(whole)
        if piece.start > whole.start:
            kept.append(HashRange(whole.start, piece.start - 1))
        if piece.end < whole.end:
            kept.append(HashRange(piece.end + 1, whole.end))
        self._owned[move.taker] = list(joined([*self._owned[move.taker], piece]))
        self._owner_of[piece.start : piece.end + 1] = [move.taker] * len(piece)
        self._loads[move.giver] -= weight
        self._loads[move.taker] += weight

    def _weight(self, part: HashRange) -> float:
        return self._below[part.end + 1] - self._below[part.start]


def _level(weights: Sequence[float], owners: int) -> float:
    """Return the mean load of the owners, apart from those of hot slots.

    A slot is hot if its weight exceeds the mean of the owners that are left. Slots are judged from
    the heaviest on, and each hot slot takes one owner away.
    """
    rest, left = sum(weights), owners
    for weight in nlargest(owners, weights):
        if weight * left <= rest:
            break
        rest -= weight
        left -= 1
    return rest / left
