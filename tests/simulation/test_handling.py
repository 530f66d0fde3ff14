"""The promises of handlers hold for every seed."""

from __future__ import annotations

import os
from functools import partial

from tests.simulation.handling.faults import Reached, table
from tests.simulation.runner import describe, run_seed, run_seeds

SEEDS = 100


def test_the_promises_of_handlers_hold() -> None:
    reached = Reached()
    run = partial(run_seed, world="handlers")
    for outcome in run_seeds(run, 0, SEEDS, len(os.sched_getaffinity(0))):
        assert not outcome.error, describe(outcome, "handlers")
        reached.update(outcome.reached)
    print(f"\n{table(reached)}")
