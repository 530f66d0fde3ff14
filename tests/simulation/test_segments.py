"""Each message comes once, in order per key, while the segments of a scalable topic change."""

from __future__ import annotations

import os
from functools import partial

import pytest

from tests.simulation.runner import describe, run_seed, run_seeds, silent
from tests.simulation.scalable import ScalableWorld

SEEDS = {"spark-segments": 100, "handlers-segments": 40, "workers-segments": 30}
IN_ORDER = (3, 4, 5, 7, 11, 15, 34)
"""In each of them, another mistake with parents breaks the order."""
FOUND = {"spark-segments": (9, 15), "handlers-segments": (9, 46, 90, 228, 596, 626)}
"""They found faults, which other tests show now: a start or a rescale ended because a segment was
deleted meanwhile; segments of the checkpoint counted as deleted; a dead letter of a parent was
replayed after one of its child; a segment whose only entries are unreadable was not acknowledged
after a restart, so its children waited for ever. Two more found faults of the simulation: poison
keys filled the window of a segment, because drained segments had a share of it; owners of a deleted
segment counted for the segment of its name in a topic that was created again."""
DELETED = {"spark-segments": (33, 48, 83), "handlers-segments": (40, 194)}
"""Their topic is deleted and created again."""


@pytest.mark.parametrize("world", SEEDS)
def test_the_promises_hold_for_scalable_topics(world: str) -> None:
    run = partial(run_seed, world=world)
    for outcome in run_seeds(run, 0, SEEDS[world], len(os.sched_getaffinity(0))):
        assert not outcome.error, describe(outcome, world)


def test_keys_keep_their_order_from_parents_to_children() -> None:
    for seed in IN_ORDER:
        outcome = run_seed(seed, "spark-segments")
        assert not outcome.error, describe(outcome, "spark-segments")


@pytest.mark.parametrize("world", DELETED)
def test_a_topic_that_is_created_again_is_consumed_from_its_beginning(world: str) -> None:
    for seed in DELETED[world]:
        outcome = run_seed(seed, world)
        assert not outcome.error, describe(outcome, world)
        deletions = [count for (kind, _), count in outcome.reached.items() if kind.name == "GOES"]
        assert deletions == [1]


@pytest.mark.parametrize("world", FOUND)
def test_faults_found_by_seeds_stay_fixed(world: str) -> None:
    for seed in FOUND[world]:
        outcome = run_seed(seed, world)
        assert not outcome.error, describe(outcome, world)


def test_a_seed_gives_the_same_course_of_events_twice_in_one_process() -> None:
    courses = []
    for seed in (5, 5, 6):
        with silent():
            world = ScalableWorld(seed)
            world.run()
        courses.append((world.course(), world.record.history()))
    assert courses[0] == courses[1]
    assert courses[0] != courses[2]
