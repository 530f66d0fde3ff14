"""Any number of owners becomes any other: the ring stays covered, and few slots change hands."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyshard.core.ring import assignment
from keyshard.core.ring.assignment import (
    Assignment,
    Rescaled,
    assign,
    fewest_pieces,
    joined,
    moved_ranges,
    moved_slots,
    reassign,
)
from keyshard.core.ring.hash_range import RING_SIZE, HashRange, split_ring
from keyshard.errors import ConfigError

BOUNDED = settings(max_examples=60, deadline=None)

counts = st.integers(1, 40)


def sizes(assignment: Assignment) -> list[int]:
    return [sum(map(len, ranges)) for ranges in assignment]


def fewest_moved(old: Assignment, count: int) -> int:
    """Compute the optimum only from the sizes of the owners; check the value of core with it.

    A remaining owner keeps at most the smaller size, and one slot more if it has that and is among
    the owners with the larger size.
    """
    small, larger = divmod(RING_SIZE, count)
    stay = sizes(old)[:count]
    one_more = min(larger, sum(size > small for size in stay))
    fewest = RING_SIZE - sum(min(size, small) for size in stay) - one_more
    assert assignment.fewest_moved(old, count) == fewest
    return fewest


@BOUNDED
@given(st.lists(counts, min_size=2, max_size=6))
def test_every_change_of_many_covers_the_ring_once_and_moves_the_fewest_slots(
    changes: list[int],
) -> None:
    now = assign(changes[0])
    for count in changes[1:]:
        before, now = now, reassign(now, count)
        everything = sorted(hash_range for ranges in now for hash_range in ranges)
        assert (everything[0].start, everything[-1].end) == (0, RING_SIZE - 1)
        assert all(left.end + 1 == right.start for left, right in pairwise(everything))
        assert len(now) == count
        assert max(sizes(now)) - min(sizes(now)) <= 1
        assert moved_slots(before, now) == fewest_moved(before, count)
        for ranges in now:
            assert all(left.end + 1 < right.start for left, right in pairwise(ranges))


@BOUNDED
@given(counts, counts)
def test_moved_slots_are_those_whose_owner_differs(before: int, after: int) -> None:
    old, new = assign(before), reassign(assign(before), after)
    owners = [
        {
            slot: owner
            for owner, ranges in enumerate(at)
            for part in ranges
            for slot in slots_of(part)
        }
        for at in (old, new)
    ]
    moved = {slot for part in moved_ranges(old, new) for slot in slots_of(part)}
    assert moved == {slot for slot in owners[0] if owners[0][slot] != owners[1][slot]}
    assert moved_slots(old, new) == len(moved)
    assert moved_slots(old, old) == 0


@pytest.mark.parametrize(
    ("before", "after", "share"),
    [
        (10, 11, 1 / 11),
        (11, 10, 1 / 11),
        (4, 8, 1 / 2),
        (8, 3, 5 / 8),
        (4, 5, 1 / 5),
        (5, 8, 3 / 8),
        (10, 16, 3 / 8),
        (16, 10, 3 / 8),
        (1, 2, 1 / 2),
        (100, 101, 1 / 101),
    ],
)
def test_a_rescale_moves_only_slots_of_added_or_removed_owners(
    before: int, after: int, share: float
) -> None:
    old = assign(before)
    moved = moved_slots(old, reassign(old, after))
    assert moved / RING_SIZE == pytest.approx(share, abs=2e-3)
    assert moved == fewest_moved(old, after), "the optimum, exactly"


@BOUNDED
@given(counts, st.integers(0, 30))
def test_one_range_for_each_owner_never_moves_fewer_slots(before: int, more: int) -> None:
    old, after = assign(before), before + more
    assert moved_slots(old, reassign(old, after)) <= contiguous_fewest_moved(before, after)


def test_one_range_each_moves_three_times_as_much_from_ten_to_eleven() -> None:
    assert contiguous_fewest_moved(10, 11) / RING_SIZE == pytest.approx(3 / 11, abs=2e-4)


def contiguous_fewest_moved(before: int, after: int) -> int:
    """Fewest slots that change hands between two divisions of the ring, over all numberings.

    If a lower old range meets a higher new one, then no higher old range meets a lower new one. So
    the best numbering never crosses, and is found as a longest common subsequence is.
    """
    old, new = split_ring(before), split_ring(after)
    best = [[0] * (after + 1) for _ in range(before + 1)]
    for i, had in enumerate(old):
        for j, has in enumerate(new):
            both = max(0, min(had.end, has.end) - max(had.start, has.start) + 1)
            best[i + 1][j + 1] = max(best[i][j] + both, best[i][j + 1], best[i + 1][j])
    return RING_SIZE - best[before][after]


def slots_of(part: HashRange) -> range:
    return range(part.start, part.end + 1)


@st.composite
def assignments(draw: st.DrawFn) -> Assignment:
    """Any owners of any pieces, as balances and rescales leave them."""
    borders = sorted(draw(st.sets(st.integers(1, RING_SIZE - 1), max_size=12)))
    pieces = [HashRange(start, end - 1) for start, end in pairwise([0, *borders, RING_SIZE])]
    owners = draw(st.integers(1, len(pieces)))
    of = [*range(owners), *(draw(st.integers(0, owners - 1)) for _ in pieces[owners:])]
    draw(st.randoms()).shuffle(of)
    return tuple(
        joined(piece for piece, at in zip(pieces, of, strict=True) if at == owner)
        for owner in range(owners)
    )


@BOUNDED
@given(assignments(), counts)
def test_the_checkpoint_after_a_restart_equals_the_written_one(
    now: Assignment, parallelism: int
) -> None:
    rescaled = Rescaled.of(parallelism, now)
    if rescaled is None:
        assert fewest_pieces(now) == assign(parallelism)
    else:
        assert Rescaled.from_dict(rescaled.to_dict()) == rescaled
        assert rescaled.assignment != assign(parallelism)


@BOUNDED
@given(st.lists(counts, min_size=2, max_size=5))
def test_a_restart_after_any_rescales_has_one_range_for_each_owner(changes: list[int]) -> None:
    now = assign(changes[0])
    for count in changes[1:]:
        now = reassign(now, count)
    assert fewest_pieces(now) == assign(changes[-1])
    if changes[0] == changes[-1]:
        assert Rescaled.of(changes[0], now) is None


@BOUNDED
@given(assignments())
def test_a_restart_never_has_more_pieces_and_keeps_the_sizes(now: Assignment) -> None:
    restart = fewest_pieces(now)
    assert sum(map(len, restart)) <= sum(map(len, now))
    assert sorted(sizes(restart)) == sorted(sizes(now))
    assert fewest_pieces(restart) is restart


@pytest.mark.parametrize("count", [0, -1, RING_SIZE + 1])
def test_a_number_of_owners_outside_its_limits_is_refused(count: int) -> None:
    with pytest.raises(ConfigError, match="1 to 65536"):
        reassign(assign(3), count)
