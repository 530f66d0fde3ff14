"""Who owns which slots of the ring, and how another number of owners takes over few of them.

One contiguous range per owner cannot change cheaply: from 10 to 11 equal ranges, 27.3 % of the ring
change hands however the new ranges are numbered, though 9.1 % would do. So an owner may have
several ranges after a change, which a STICKY consumer may have too.
"""

from __future__ import annotations

from collections.abc import Iterable

from keyshard.core.hash_range import RING_SIZE, HashRange, split_ring

Assignment = tuple[tuple[HashRange, ...], ...]
"""Ranges of each owner, ascending; together they cover the ring, and none overlaps another."""


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
    owners = zip(slot_owners(old), slot_owners(new), strict=True)
    moved = bytes(before != after for before, after in owners)
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
