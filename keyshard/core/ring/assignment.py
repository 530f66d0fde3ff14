"""Who owns which slots of the ring, and how another number of owners takes over few of them.

One contiguous range per owner cannot change cheaply: from 10 to 11 equal ranges, 27.3 % of the ring
change hands however the new ranges are numbered, though 9.1 % would do. So an owner may have
several ranges after a change, which a STICKY consumer may have too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import ne
from typing import Any

from keyshard.core.ring.hash_range import RING_SIZE, HashRange, split_ring

Assignment = tuple[tuple[HashRange, ...], ...]
"""Ranges of each owner, ascending; together they cover the ring, and none overlaps another."""


@dataclass(frozen=True, slots=True)
class Rescaled:
    """What a restart begins with after a rescale, as the checkpoint has it."""

    parallelism: int
    """What was configured then: where that is another one now, it counts and this does not."""
    assignment: Assignment
    _text: list[int | str] = field(default_factory=list, init=False, repr=False, compare=False)
    """Owners as JSON has them, once somebody asked: every checkpoint has the same."""

    @classmethod
    def of(cls, parallelism: int, assignment: Assignment) -> Rescaled | None:
        """What has to be remembered of an assignment; ``None`` where it follows from parallelism.

        Nobody owns anything at a restart, so moving is free then: one range each for as many
        owners, where their parts of the ring are equal. Other sizes come from a balance, and where
        the load lies inside of a piece is not known any more: its pieces stay as they are.
        """
        begins = fewest_pieces(assignment)
        return None if begins == assign(parallelism) else cls(parallelism, begins)

    def to_dict(self) -> dict[str, Any]:
        """The JSON object: a number of equal ranges, or the ranges of each owner."""
        if not self._text:
            equal = self.assignment == assign(len(self.assignment))
            self._text.append(len(self.assignment) if equal else _text_of(self.assignment))
        return {"owners": self._text[0], "parallelism": self.parallelism}

    @classmethod
    def from_dict(cls, data: Any) -> Rescaled:
        """Read :meth:`to_dict`'s form; raises ``ValueError``."""
        if not isinstance(data, dict) or data.keys() != {"owners", "parallelism"}:
            raise ValueError("rescaled is not an object of owners and parallelism")
        owners, parallelism = data["owners"], data["parallelism"]
        if type(parallelism) is not int or not 1 <= parallelism <= RING_SIZE:
            raise ValueError(f"the parallelism that it was rescaled from is {parallelism!r}")
        if type(owners) is int and 1 <= owners <= RING_SIZE:
            return cls(parallelism, assign(owners))
        if not isinstance(owners, str):
            raise ValueError(f"the owners of its ranges are {owners!r}")
        return cls(parallelism, _parse(owners))


def assign(count: int) -> Assignment:
    """One range of the ring for each of ``count`` owners.

    Raises:
        ConfigError: ``count`` is not 1 to 65,536.
    """
    return tuple((hash_range,) for hash_range in split_ring(count))


def reassign(assignment: Assignment, count: int) -> Assignment:
    """Spread the ring over another number of owners; as few slots as possible change hands.

    Owners keep their numbers; those from ``count`` on leave. An owner keeps at most the smaller of
    what it has and what it may have. With sizes that differ by at most one, the sum of that is
    largest when those who have most may have the slot more, and all of it is kept.

    Args:
        assignment: Who owns what now.
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
    """The fewest ranges in which as many owners have loads like these, when all may move."""
    equal = assign(len(assignment))
    sizes, equal_sizes = (sorted(map(_slots, one)) for one in (assignment, equal))
    return equal if sizes == equal_sizes and assignment != equal else assignment


def moved_slots(old: Assignment, new: Assignment) -> int:
    """Slots whose owner is another one in ``new``."""
    stay = sum(
        max(0, min(before.end, after.end) - max(before.start, after.start) + 1)
        for had, has in zip(old, new, strict=False)
        for before in had
        for after in has
    )
    return RING_SIZE - stay


def fewest_moved(assignment: Assignment, count: int) -> int:
    """Fewest slots that change hands when ``count`` owners get sizes that differ by at most one.

    Who stays keeps at most the smaller size, and one slot more if it has that and is among those
    who may have the larger size.
    """
    small, larger = divmod(RING_SIZE, count)
    stay = [_slots(ranges) for ranges in assignment[:count]]
    one_more = min(larger, sum(size > small for size in stay))
    return RING_SIZE - sum(min(size, small) for size in stay) - one_more


def slot_owners(assignment: Assignment) -> list[int]:
    """The owner of each slot."""
    owners = [0] * RING_SIZE
    for owner, ranges in enumerate(assignment):
        for part in ranges:
            owners[part.start : part.end + 1] = [owner] * len(part)
    return owners


def moved_ranges(old: Assignment, new: Assignment) -> tuple[HashRange, ...]:
    """The parts of the ring whose owner is another one in ``new``, ascending."""
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
    """Ascending, neighbours as one range."""
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
    """Read :func:`_text_of`'s form; raises ``ValueError``."""
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
        raise ValueError("the owners of its ranges are not written as keyshard writes them")
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
    """The first ``slots`` slots, and the rest."""
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
