"""A rescale: its plan with moves and ceiling, and its end after each failing step."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest

from keyshard.coordinator.rescale import TRANSITIONS, Step, _walk
from keyshard.core.ring.assignment import Ceiling, RescaleDryRun, assign, reassign
from keyshard.core.ring.hash_range import RING_SIZE
from keyshard.errors import ConfigError


@pytest.mark.parametrize(
    ("before", "after", "percent"), [(10, 11, 9.1), (10, 20, 50.0), (10, 9, 10.0), (4, 8, 50.0)]
)
def test_a_rescale_moves_no_more_than_it_must(before: int, after: int, percent: float) -> None:
    plan = RescaleDryRun.make(assign(before), after)
    assert plan.optimum_fraction * 100 == pytest.approx(percent, abs=0.05)
    assert plan.moved_fraction == pytest.approx(
        plan.optimum_fraction, abs=max(before, after) / RING_SIZE
    )
    assert sum(len(move.hash_range) for move in plan.moves) == plan.moved_fraction * RING_SIZE


def test_the_moves_lead_from_one_assignment_to_the_other() -> None:
    before = reassign(assign(7), 11)
    plan = RescaleDryRun.make(before, 5)
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
    plan = RescaleDryRun.make(assign(10), 10)
    assert (plan.moves, plan.moved_fraction, plan.optimum_fraction) == ((), 0.0, 0.0)


def test_a_number_that_is_not_possible_is_refused() -> None:
    with pytest.raises(ConfigError):
        RescaleDryRun.make(assign(10), 0)


def test_the_ceiling_is_that_of_lanes_or_workers() -> None:
    lanes, workers = Ceiling.of(10, 16, 0.010), Ceiling.of(10, 16, 0.010, workers=32)
    assert (lanes, workers) == (Ceiling(160, 16_000.0, "lanes"), Ceiling(32, 3_200.0, "workers"))
    assert Ceiling.of(2, 1, None, workers=32) == Ceiling(2, None, "lanes")


def walked(failing: Collection[Step]) -> tuple[list[Step], Step]:
    """Return the steps that were taken and the end, if some steps fail."""
    taken: list[Step] = []

    def action(step: Step) -> Callable[[], None]:
        def act() -> None:
            taken.append(step)
            if step in failing:
                raise ConnectionError(step.name)

        return act

    begun: list[Step] = []
    end, errors = _walk({step: action(step) for step in TRANSITIONS}, begun.append)
    assert begun == taken
    assert errors.keys() == set(failing) & set(taken)
    return taken, end


@pytest.mark.parametrize(
    ("failing", "taken", "end"),
    [
        ((), (Step.DRAIN, Step.CLOSE, Step.SUBSCRIBE, Step.ADOPT), Step.MOVED),
        ((Step.DRAIN,), (Step.DRAIN,), Step.KEPT),
        ((Step.CLOSE,), (Step.DRAIN, Step.CLOSE, Step.RESTORE), Step.KEPT),
        (
            (Step.SUBSCRIBE,),
            (Step.DRAIN, Step.CLOSE, Step.SUBSCRIBE, Step.RESTORE),
            Step.KEPT,
        ),
        (
            (Step.SUBSCRIBE, Step.RESTORE),
            (Step.DRAIN, Step.CLOSE, Step.SUBSCRIBE, Step.RESTORE),
            Step.LOST,
        ),
        ((Step.ADOPT,), (Step.DRAIN, Step.CLOSE, Step.SUBSCRIBE, Step.ADOPT), Step.LOST),
    ],
)
def test_a_failed_rescale_moves_keeps_or_reports_the_ring(
    failing: Collection[Step], taken: Collection[Step], end: Step
) -> None:
    assert walked(failing) == (list(taken), end)
