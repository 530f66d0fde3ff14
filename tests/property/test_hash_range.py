"""The split of the ring, for any number of ranges."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from keyshard.core.ring.hash_range import RING_SIZE, range_index, split_ring

BOUNDED = settings(max_examples=40, deadline=None)


@BOUNDED
@given(st.integers(1, 500))
def test_ranges_follow_each_other_and_cover_the_ring(count: int) -> None:
    ranges = split_ring(count)
    ends = [-1, *(hash_range.end for hash_range in ranges)]
    assert [hash_range.start for hash_range in ranges] == [end + 1 for end in ends[:-1]]
    assert ends[-1] == RING_SIZE - 1
    assert {len(hash_range) for hash_range in ranges} <= {
        RING_SIZE // count,
        -(-RING_SIZE // count),
    }


@BOUNDED
@given(st.integers(1, 500), st.integers(0, RING_SIZE - 1))
def test_range_index_agrees_with_the_split(count: int, slot: int) -> None:
    assert slot in split_ring(count)[range_index(slot, count)]
