"""Hash ranges and the split of the ring."""

from __future__ import annotations

from itertools import pairwise

import pytest

from keyshard.core.ring.hash_range import RING_SIZE, HashRange, range_index, split_ring
from keyshard.errors import ConfigError

COUNTS = [*range(1, 101), 1_000, 65_535, RING_SIZE]


@pytest.mark.parametrize("count", COUNTS)
def test_a_split_covers_the_ring_once_with_ranges_of_nearly_equal_size(count: int) -> None:
    ranges = split_ring(count)
    assert len(ranges) == count
    assert ranges[0].start == 0
    assert ranges[-1].end == RING_SIZE - 1
    assert all(a.end + 1 == b.start for a, b in pairwise(ranges))
    sizes = {len(hash_range) for hash_range in ranges}
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("count", [1, 3, 10, 1_000, RING_SIZE])
def test_range_index_names_the_range_that_holds_each_slot(count: int) -> None:
    expected = [i for i, hash_range in enumerate(split_ring(count)) for _ in range(len(hash_range))]
    assert len(expected) == RING_SIZE
    assert all(range_index(slot, count) == index for slot, index in enumerate(expected))


@pytest.mark.parametrize("count", [0, -1, RING_SIZE + 1])
def test_a_count_outside_its_limits_is_refused(count: int) -> None:
    with pytest.raises(ConfigError, match=f"parallelism is {count}"):
        split_ring(count)


@pytest.mark.parametrize(
    ("start", "end"), [(-1, 5), (6, 5), (0, RING_SIZE), (RING_SIZE, RING_SIZE)]
)
def test_a_range_outside_the_ring_is_refused(start: int, end: int) -> None:
    with pytest.raises(ConfigError, match="hash range"):
        HashRange(start, end)


def test_both_ends_belong_to_a_range() -> None:
    hash_range = HashRange(10, 12)
    assert [slot for slot in range(9, 15) if slot in hash_range] == [10, 11, 12]
    assert len(hash_range) == 3
    assert len(HashRange(7, 7)) == 1


def test_ranges_print_well_and_sort_by_position() -> None:
    assert str(HashRange(10, 12)) == "10-12"
    assert repr(HashRange(10, 12)) == "HashRange(start=10, end=12)"
    assert sorted([HashRange(5, 9), HashRange(0, 4)]) == [HashRange(0, 4), HashRange(5, 9)]
