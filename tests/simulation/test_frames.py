"""The promises hold over frames as well; few seeds here, more by ``tests.proofs simulation``."""

from __future__ import annotations

import os
from functools import partial

import pytest

from tests.simulation.frames.worlds import FramedWorld
from tests.simulation.runner import describe, run_seed, run_seeds, silent

SEEDS = {"spark-frames": 12, "handlers-frames": 6}
FOUND = (244, 398, 11222905)
"""Their faults: a wiped cluster got acknowledgements of the one before, and unconfirmed
acknowledgements of a replaced consumer were lost."""


@pytest.mark.parametrize("world", SEEDS)
def test_the_promises_hold_over_frames(world: str) -> None:
    run = partial(run_seed, world=world)
    for outcome in run_seeds(run, 0, SEEDS[world], len(os.sched_getaffinity(0))):
        assert not outcome.error, describe(outcome, world)


def test_faults_found_by_seeds_stay_fixed() -> None:
    for seed in FOUND:
        outcome = run_seed(seed, "spark-frames")
        assert not outcome.error, describe(outcome, "spark-frames")


def test_a_seed_gives_the_same_course_of_events_twice_in_one_process() -> None:
    courses = []
    for seed in (5, 5, 6):
        with silent():
            world = FramedWorld(seed)
            world.run()
        courses.append((world.course(), world.record.history()))
    assert courses[0] == courses[1]
    assert courses[0] != courses[2]
