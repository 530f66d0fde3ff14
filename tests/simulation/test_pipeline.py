"""Rows that a query writes are stored once, whatever dies."""

from __future__ import annotations

import os
from collections import Counter
from functools import partial
from typing import Any

import pytest

from tests.simulation.pipeline.faults import Trouble, untroubled
from tests.simulation.runner import describe, run_seed, run_seeds

SEEDS = {"pipeline": 8, "pipeline-frames": 10}


@pytest.mark.parametrize("world", SEEDS)
def test_the_promises_hold_and_every_fault_hits_tasks(world: str) -> None:
    reached: Counter[Any] = Counter()
    run = partial(run_seed, world=world)
    for outcome in run_seeds(run, 0, SEEDS[world], len(os.sched_getaffinity(0))):
        assert not outcome.error, describe(outcome, world)
        reached.update(outcome.reached)
    print({trouble.value: reached[trouble, None] for trouble in Trouble})
    assert not untroubled(reached)
