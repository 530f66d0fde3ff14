"""The promises hold in the world of worker processes, under every fault."""

from __future__ import annotations

import os
from collections import Counter
from functools import partial
from typing import Any

from tests.simulation.runner import describe, run_seed, run_seeds
from tests.simulation.worker_faults import Trouble, untroubled

SEEDS_MIN, SEEDS_MAX = 16, 64
"""Everything has befallen some worker after a few seeds."""


def test_the_promises_hold_and_every_fault_hits_workers() -> None:
    reached: Counter[Any] = Counter()
    run = partial(run_seed, world="workers")
    outcomes = run_seeds(run, 0, SEEDS_MAX, len(os.sched_getaffinity(0)))
    for number, outcome in enumerate(outcomes, 1):
        assert not outcome.error, describe(outcome, "workers")
        reached.update(outcome.reached)
        if number >= SEEDS_MIN and not untroubled(reached):
            break
    print({trouble.value: reached[trouble, None] for trouble in Trouble})
    assert not untroubled(reached)
