"""Ranges by weight: even loads from few pieces, and the lower bound of a hot key or slot."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest

from keyshard.core.ring.assignment import Assignment, assign, moved_slots
from keyshard.core.ring.hash_range import RING_SIZE, HashRange, split_ring
from keyshard.core.ring.key_slot import key_slot
from keyshard.core.ring.load_balance import balance, max_over_mean
from keyshard.core.ring.slot_load import SlotLoad
from tests.helpers import key_in

KEYS = 100_000
SAMPLED = 60_000


class Zipf:
    """A load over 100,000 keys, of which a sample is seen."""

    def __init__(self, exponent: float, seed: int) -> None:
        weights = [1 / number**exponent for number in range(1, KEYS + 1)]
        self.keys = [f"{seed}-{number}" for number in range(KEYS)]
        self.slots = list(map(key_slot, self.keys))
        total = sum(weights)
        self.hottest_share = weights[0] / total
        self.slot_shares = [0.0] * RING_SIZE
        for slot, weight in zip(self.slots, weights, strict=True):
            self.slot_shares[slot] += weight / total
        self.sampled = SlotLoad()
        chosen = random.Random(seed).choices(
            range(KEYS), cum_weights=list(accumulate(weights)), k=SAMPLED
        )
        for number in chosen:
            self.sampled.add(self.slots[number], key=self.keys[number])

    def max_over_mean(self, assignment: Assignment) -> float:
        """Return the maximum over the mean of all load, not of the sample."""
        shares = [
            sum(sum(self.slot_shares[part.start : part.end + 1]) for part in ranges)
            for ranges in assignment
        ]
        return max(shares) * len(assignment)


@pytest.mark.parametrize("seed", range(5))
def test_ten_ranges_of_a_zipf_load_are_within_a_tenth_of_the_mean(seed: int) -> None:
    zipf = Zipf(0.99, seed)
    before = assign(10)
    found = balance(before, zipf.sampled)
    assert zipf.max_over_mean(before) > 1.4
    assert zipf.max_over_mean(found.assignment) <= 1.1
    assert found.max_over_mean_after <= 1.1
    assert found.hot_key_floor is found.hot_key is None
    assert sum(map(len, found.assignment)) <= 20, "pieces, each a consumer per topic partition"
    assert moved_slots(before, found.assignment) < RING_SIZE / 5


@pytest.mark.parametrize("seed", range(3))
def test_a_key_with_more_than_a_mean_sets_the_lower_bound_and_is_named(seed: int) -> None:
    zipf = Zipf(1.2, seed)
    found = balance(assign(10), zipf.sampled)
    floor = 10 * zipf.hottest_share
    assert found.hot_key == zipf.keys[0]
    assert found.hot_key_floor == pytest.approx(floor, rel=0.05)
    assert found.hot_slot == zipf.slots[0]
    assert found.hot_slot_keys[0] == zipf.keys[0]
    assert zipf.max_over_mean(found.assignment) == pytest.approx(floor, rel=0.02)
    assert f"key {zipf.keys[0]!r}" in str(found)
    owner = next(
        ranges for ranges in found.assignment if any(zipf.slots[0] in part for part in ranges)
    )
    others = [ranges for ranges in found.assignment if ranges != owner]
    shares = [
        sum(sum(zipf.slot_shares[part.start : part.end + 1]) for part in ranges)
        for ranges in others
    ]
    assert max(shares) / (sum(shares) / len(shares)) <= 1.1, "the others share the rest evenly"


def test_keys_of_one_slot_stay_together_and_the_slot_is_the_lower_bound() -> None:
    load = SlotLoad()
    hot = HashRange(5_000, 5_000)
    keys = [key_in(hot, number) for number in range(2)]
    for key in keys:
        load.add(5_000, 20, key)
    for slot in range(0, RING_SIZE, 1_024):
        load.add(slot, 1, f"other-{slot}")
    found = balance(assign(4), load)
    assert found.hot_key_floor is None, "each of the two keys alone is below the mean"
    assert found.hot_slot_floor == pytest.approx(4 * 40 / 104)
    assert (found.hot_slot, set(found.hot_slot_keys)) == (5_000, set(keys))
    assert found.max_over_mean_after == pytest.approx(4 * 40 / 104, rel=0.05)
    assert "slot 5000" in str(found)


def test_an_even_load_and_no_load_leave_everything_where_it_is() -> None:
    load = SlotLoad()
    assert balance(assign(7), load).assignment == assign(7)
    assert balance(assign(7), load).max_over_mean_after == 1
    for slot in range(0, RING_SIZE, 8):
        load.add(slot)
    found = balance(assign(7), load)
    assert found.assignment == assign(7)
    assert str(found) == "max/mean 1.00 -> 1.00"


def test_balanced_ranges_stay() -> None:
    load = Zipf(0.99, 9).sampled
    once = balance(assign(10), load).assignment
    assert balance(once, load).assignment == once


def test_a_single_owner_keeps_the_ring() -> None:
    load = SlotLoad()
    load.add(3, 100)
    found = balance(assign(1), load)
    assert found.assignment == assign(1)
    assert found.hot_slot_floor is None


def test_two_hot_slots_of_one_owner_get_an_owner_each() -> None:
    load = SlotLoad()
    load.add(100, 1_000)
    load.add(200, 900)
    for part in split_ring(4):
        load.add(part.start + 300, 100)
    found = balance(assign(4), load)
    holders = [
        owner
        for slot in (100, 200)
        for owner, ranges in enumerate(found.assignment)
        if any(slot in part for part in ranges)
    ]
    assert len(set(holders)) == 2
    assert found.max_over_mean_after == pytest.approx(4 * 1_000 / 2_300, rel=0.01)


def test_max_over_mean_is_1_without_load_and_else_that_of_the_busiest_owner() -> None:
    load = SlotLoad()
    assert max_over_mean(assign(3), load) == 1
    load.add(0, 5)
    assert max_over_mean(assign(3), load) == 3
