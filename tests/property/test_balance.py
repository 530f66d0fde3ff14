"""Whatever the load is, the ring stays covered, each range has a slot, no balance is worse."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from keyshard.core.ring.assignment import assign, reassign
from keyshard.core.ring.hash_range import RING_SIZE
from keyshard.core.ring.load_balance import TOLERANCE, balance, max_over_mean
from keyshard.core.ring.slot_load import SlotLoad

BOUNDED = settings(max_examples=40, deadline=None)

loads = st.dictionaries(
    st.integers(1, RING_SIZE - 1), st.integers(1, 10_000), min_size=1, max_size=300
)


@BOUNDED
@given(st.lists(st.integers(1, 24), min_size=1, max_size=3), loads)
def test_a_balance_covers_the_ring_once_and_is_no_worse(
    counts: list[int], load_of: dict[int, int]
) -> None:
    load = SlotLoad()
    for slot, messages in load_of.items():
        load.add(slot, messages)
    now = assign(counts[0])
    for count in counts:
        now = reassign(now, count)
        found = balance(now, load)
        everything = sorted(part for ranges in found.assignment for part in ranges)
        assert (everything[0].start, everything[-1].end) == (0, RING_SIZE - 1)
        assert all(left.end + 1 == right.start for left, right in pairwise(everything))
        assert all(found.assignment)
        assert found.max_over_mean_after == max_over_mean(found.assignment, load)
        assert found.max_over_mean_after <= max(found.max_over_mean_before, 1 + TOLERANCE) + 0.05
        hottest = max(load_of.values()) / sum(load_of.values())
        assert found.max_over_mean_after >= count * hottest - 1e-9
        now = found.assignment
