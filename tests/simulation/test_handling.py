"""The promises of handlers hold for every seed, and a seed is one course of events."""

from __future__ import annotations

import os
from functools import partial

from tests.simulation.handling.faults import Reached, table
from tests.simulation.handling.world import HandlerWorld
from tests.simulation.runner import describe, run_seed, run_seeds, silent

SEEDS = 100
FEW = 3
"""Seeds that run in this process, as a quick look."""


def test_the_promises_of_handlers_hold() -> None:
    reached = Reached()
    run = partial(run_seed, world="handlers")
    for outcome in run_seeds(run, 0, SEEDS, len(os.sched_getaffinity(0))):
        assert not outcome.error, describe(outcome, "handlers")
        reached.update(outcome.reached)
    print(f"\n{table(reached)}")


def test_keys_keep_their_order_through_retries_and_parking() -> None:
    for seed in range(FEW):
        outcome = run_seed(seed, "handlers")
        assert not outcome.error, describe(outcome, "handlers")


def test_a_seed_gives_the_same_course_of_events_twice_in_one_process() -> None:
    courses = []
    for seed in (5, 5, 6):
        with silent():
            world = HandlerWorld(seed)
            world.run()
        courses.append((world.course(), world.programs[0].record.history()))
    assert courses[0] == courses[1]
    assert courses[0] != courses[2]
