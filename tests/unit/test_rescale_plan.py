"""The dry run of a rescale: moves, fraction against the optimum, ceiling."""

from __future__ import annotations

import pytest

from keyshard.core.ring.assignment import assign, reassign
from keyshard.core.ring.hash_range import RING_SIZE
from keyshard.core.ring.rescale_plan import Ceiling, RescalePlan
from keyshard.errors import ConfigError


@pytest.mark.parametrize(
    ("before", "after", "percent"), [(10, 11, 9.1), (10, 20, 50.0), (10, 9, 10.0), (4, 8, 50.0)]
)
def test_no_more_moves_than_must(before: int, after: int, percent: float) -> None:
    plan = RescalePlan.make(assign(before), after)
    assert plan.optimum_fraction * 100 == pytest.approx(percent, abs=0.05)
    assert plan.moved_fraction == pytest.approx(
        plan.optimum_fraction, abs=max(before, after) / RING_SIZE
    )
    assert sum(len(move.hash_range) for move in plan.moves) == plan.moved_fraction * RING_SIZE


def test_the_moves_lead_from_one_assignment_to_the_other() -> None:
    before = reassign(assign(7), 11)
    plan = RescalePlan.make(before, 5)
    owner = {
        slot: i
        for i, ranges in enumerate(before)
        for r in ranges
        for slot in range(r.start, r.end + 1)
    }
    for move in plan.moves:
        for slot in (move.hash_range.start, move.hash_range.end):
            assert owner[slot] == move.source
        owner |= dict.fromkeys(range(move.hash_range.start, move.hash_range.end + 1), move.target)
    wanted = {
        slot: i
        for i, ranges in enumerate(plan.after)
        for r in ranges
        for slot in range(r.start, r.end + 1)
    }
    assert owner == wanted


def test_the_same_number_moves_nothing() -> None:
    plan = RescalePlan.make(assign(10), 10)
    assert (plan.moves, plan.moved_fraction, plan.optimum_fraction) == ((), 0.0, 0.0)


def test_a_number_that_is_not_possible_is_refused() -> None:
    with pytest.raises(ConfigError):
        RescalePlan.make(assign(10), 0)


def test_the_ceiling_is_that_of_lanes_or_workers() -> None:
    assert Ceiling.of(10, 16, 0.010) == Ceiling(160, pytest.approx(16_000.0), "lanes")
    assert Ceiling.of(10, 16, 0.010, workers=32) == Ceiling(32, pytest.approx(3_200.0), "workers")
    assert Ceiling.of(2, 1, None, workers=32) == Ceiling(2, None, "lanes")
