"""Assignments: the owner of each slot of the ring, and changes that move few slots.

One contiguous range per owner cannot change cheaply. From 10 to 11 equal ranges, 27.3 % of the ring
change hands however the new ranges are numbered; 9.1 % would suffice. So after a change, an owner
may have several ranges. STICKY consumers support that.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import ne
from typing import Any

from keyshard.core.ring.hash_range import RING_SIZE, HashRange, split_ring

Assignment = tuple[tuple[HashRange, ...], ...]
"""Ranges of each owner, ascending; together they cover the ring without overlap."""


@dataclass(frozen=True, slots=True)
class Rescaled:
    """The assignment with which a restart begins after a rescale, as in the checkpoint."""

    parallelism: int
    """The option ``parallelism`` at that time. If the option has changed since, this record is
    ignored."""
    assignment: Assignment
    _text: list[int | str] = field(default_factory=list, init=False, repr=False, compare=False)
    """Cached JSON text of the owners: it is the same in every checkpoint."""

    @classmethod
    def of(cls, parallelism: int, assignment: Assignment) -> Rescaled | None:
        """Return the state to store for an assignment; ``None`` if parallelism implies it.

        At a restart, no range has an owner, so moves are free. If the owners have equal parts,
        their number suffices: each gets one range. Unequal parts come from a balance. A restart
        does not know the load of slots, so it could not balance again. All ranges are stored.
        """
        begins = fewest_pieces(assignment)
        return None if begins == assign(parallelism) else cls(parallelism, begins)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object: a number of equal ranges, or the ranges of each owner."""
        if not self._text:
            equal = self.assignment == assign(len(self.assignment))
            self._text.append(len(self.assignment) if equal else _text_of(self.assignment))
        return {"owners": self._text[0], "parallelism": self.parallelism}

    @classmethod
    def from_dict(cls, data: Any) -> Rescaled:
        """Parse the form of :meth:`to_dict`; raises ``ValueError``."""
        if not isinstance(data, dict) or data.keys() != {"owners", "parallelism"}:
            raise ValueError("rescaled is not an object of owners and parallelism")
        owners, parallelism = data["owners"], data["parallelism"]
        if type(parallelism) is not int or not 1 <= parallelism <= RING_SIZE:
            raise ValueError(f"its parallelism before the rescale is {parallelism!r}")
        if type(owners) is int and 1 <= owners <= RING_SIZE:
            return cls(parallelism, assign(owners))
        if not isinstance(owners, str):
            raise ValueError(f"its owners are {owners!r}")
        return cls(parallelism, _parse(owners))


def assign(count: int) -> Assignment:
    """Assign one range of the ring to each of ``count`` owners.

    Raises:
        ConfigError: ``count`` is not 1 to 65,536.
    """
    return tuple((hash_range,) for hash_range in split_ring(count))


def reassign(assignment: Assignment, count: int) -> Assignment:
    """Distribute the ring over another number of owners; as few slots as possible change hands.

    Owners keep their numbers; those from ``count`` on leave. An owner can keep at most the minimum
    of its old and its new size, and keeps that many. The owners with the most slots get the larger
    size, because that makes the sum of the kept slots largest.

    Args:
        assignment: The present assignment.
        count: Number of owners, 1 to 65,536.

    Returns:
        The new assignment; sizes differ by at most one slot.

    Raises:
        ConfigError: ``count`` is outside its limits.
    """
    sizes = sorted((len(hash_range) for hash_range in split_ring(count)), reverse=True)
    owned = [*assignment[:count], *[()] * (count - len(assignment))]
    by_size = sorted(range(count), key=lambda owner: -_slots(owned[owner]))
    wanted = dict(zip(by_size, sizes, strict=True))
    kept: list[list[HashRange]] = []
    free = [hash_range for leaving in assignment[count:] for hash_range in leaving]
    for owner, ranges in enumerate(owned):
        own, given = _divide(ranges, wanted[owner])
        kept.append(own)
        free += given
    free.sort()
    for owner, own in enumerate(kept):
        taken, free = _divide(free, wanted[owner] - _slots(own))
        kept[owner] = own + taken
    return tuple(map(joined, kept))


def fewest_pieces(assignment: Assignment) -> Assignment:
    """Return an assignment of one range per owner if all parts are equal, else the given one.

    Use this only when all slots may move.
    """
    equal = assign(len(assignment))
    sizes, equal_sizes = (sorted(map(_slots, one)) for one in (assignment, equal))
    return equal if sizes == equal_sizes and assignment != equal else assignment


def moved_slots(old: Assignment, new: Assignment) -> int:
    """Return the number of slots whose owner differs in ``new``."""
    stay = sum(
        max(0, min(before.end, after.end) - max(before.start, after.start) + 1)
        for had, has in zip(old, new, strict=False)
        for before in had
        for after in has
    )
    return RING_SIZE - stay


def fewest_moved(assignment: Assignment, count: int) -> int:
    """Return the fewest slots that change hands when ``count`` owners get equal sizes.

    Sizes may differ by one slot. A remaining owner keeps at most the smaller size. It keeps one
    slot more if it has that slot and is among those that may have the larger size.
    """
    small, larger = divmod(RING_SIZE, count)
    stay = [_slots(ranges) for ranges in assignment[:count]]
    one_more = min(larger, sum(size > small for size in stay))
    return RING_SIZE - sum(min(size, small) for size in stay) - one_more


def slot_owners(assignment: Assignment) -> list[int]:
    """Return the owner of each slot."""
    owners = [0] * RING_SIZE
    for owner, ranges in enumerate(assignment):
        for part in ranges:
            owners[part.start : part.end + 1] = [owner] * len(part)
    return owners


def moved_ranges(old: Assignment, new: Assignment) -> tuple[HashRange, ...]:
    """Return the parts of the ring whose owner differs in ``new``, ascending."""
    moved = bytes(map(ne, slot_owners(old), slot_owners(new)))
    parts: list[HashRange] = []
    start = moved.find(1)
    while start >= 0:
        end = moved.find(0, start)
        end = RING_SIZE if end < 0 else end
        parts.append(HashRange(start, end - 1))
        start = moved.find(1, end)
    return tuple(parts)


def joined(ranges: Iterable[HashRange]) -> tuple[HashRange, ...]:
    """Return ranges in ascending order, with neighbours joined."""
    whole: list[HashRange] = []
    for hash_range in sorted(ranges):
        if whole and whole[-1].end + 1 == hash_range.start:
            whole[-1] = HashRange(whole[-1].start, hash_range.end)
        else:
            whole.append(hash_range)
    return tuple(whole)


_RANGE = re.compile(r"([0-9]{1,5})-([0-9]{1,5})")


def _text_of(assignment: Assignment) -> str:
    return ";".join(",".join(map(str, ranges)) for ranges in assignment)


def _parse(text: str) -> Assignment:
    """Parse the form of :func:`_text_of`; raises ``ValueError``."""
    parts: list[list[HashRange]] = []
    for owner in text.split(";"):
        parts.append([])
        for part in owner.split(","):
            found = _RANGE.fullmatch(part)
            start, end = map(int, found.groups()) if found else (1, 0)
            if not start <= end < RING_SIZE:
                raise ValueError(f"{part[:40]!r} is not a range of the ring")
            parts[-1].append(HashRange(start, end))
    assignment = tuple(map(joined, parts))
    if _text_of(assignment) != text:
        raise ValueError("its owners are not in the form that keyshard writes")
    free = 0
    for hash_range in sorted(part for ranges in assignment for part in ranges):
        if hash_range.start != free:
            raise ValueError(
                f"its owners do not cover the ring once: {min(free, hash_range.start)} "
                f"{'has two' if hash_range.start < free else 'has none'}"
            )
        free = hash_range.end + 1
    if free != RING_SIZE:
        raise ValueError(f"its owners do not cover the ring once: {free} has none")
    return assignment


def _slots(ranges: Iterable[HashRange]) -> int:
    return sum(map(len, ranges))


def _divide(ranges: Iterable[HashRange], slots: int) -> tuple[list[HashRange], list[HashRange]]:
    """Return the first ``slots`` slots, and the rest."""
    first: list[HashRange] = []
    rest: list[HashRange] = []
    for hash_range in ranges:
        border = hash_range.start + slots
        if slots > 0:
            first.append(HashRange(hash_range.start, min(hash_range.end, border - 1)))
        if border <= hash_range.end:
            rest.append(HashRange(max(hash_range.start, border), hash_range.end))
        slots = max(0, slots - len(hash_range))
    return first, rest


# -- Effects of another number of ranges: moved slots, and the throughput limit --------------------


@dataclass(frozen=True, slots=True)
class Move:
    """A part of the ring that changes its range."""

    hash_range: HashRange
    source: int
    """Index of the present range."""
    target: int
    """Index of the new range."""


@dataclass(frozen=True, slots=True)
class RescaleDryRun:
    """Moves from one number of ranges to another."""

    before: Assignment
    after: Assignment
    moves: tuple[Move, ...]

    @classmethod
    def make(cls, before: Assignment, count: int) -> RescaleDryRun:
        """Plan ``count`` ranges from the present assignment, without applying the plan.

        Raises:
            ConfigError: ``count`` is not 1 to 65,536.
        """
        after = reassign(before, count)
        moves: list[Move] = []
        old, new = _by_slot(before), _by_slot(after)
        while old and new:
            (had, source), (has, target) = old[-1], new[-1]
            end = min(had.end, has.end)
            if source != target:
                moves.append(Move(HashRange(max(had.start, has.start), end), source, target))
            for ranges in (old, new):
                if ranges[-1][0].end == end:
                    ranges.pop()
        return cls(before, after, tuple(moves))

    @property
    def moved_fraction(self) -> float:
        """Fraction of the ring that changes its range, 0 to 1."""
        return moved_slots(self.before, self.after) / RING_SIZE

    @property
    def optimum_fraction(self) -> float:
        """Smallest fraction of the ring that must move for ranges of equal size."""
        return fewest_moved(self.before, len(self.after)) / RING_SIZE


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Throughput limit of the handlers, independent of the broker."""

    keys: int
    """Keys handled at the same time."""
    rows_per_s: float | None
    """Messages per second; ``None`` if the handler's time is unknown."""
    limited_by: str
    """``lanes`` or ``workers``."""

    @classmethod
    def of(
        cls, ranges: int, lanes: int, handler_s: float | None, workers: int | None = None
    ) -> Ceiling:
        """Return the limit of a number of ranges.

        Args:
            ranges: Number of ranges.
            lanes: Keys that a range handles at the same time.
            handler_s: Mean time of the handler, seconds, if known.
            workers: Handlers that may run at the same time; ``None``: the number of lanes.
        """
        keys = ranges * lanes
        limited_by = "lanes"
        if workers is not None and workers < keys:
            keys, limited_by = workers, "workers"
        return cls(keys, keys / handler_s if handler_s else None, limited_by)


def _by_slot(assignment: Assignment) -> list[tuple[HashRange, int]]:
    """Return all ranges with their owners, in descending order; ``pop`` takes the lowest slots."""
    owned = [
        (hash_range, owner) for owner, ranges in enumerate(assignment) for hash_range in ranges
    ]
    return sorted(owned, reverse=True)
