"""The promises hold for every seed, and a seed is one course of events."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.simulation.faults import CELLS, Reached, missing, table
from tests.simulation.install import installed, real_ones
from tests.simulation.runner import WORLDS, describe, run_seed, run_seeds, silent
from tests.simulation.scheduler import Scheduler
from tests.simulation.world import World
from tests.support.deadlines import deadline

ROOT = Path(__file__).parents[2]
SEEDS = 3 * len(CELLS)
"""Each fault is planned for each step three times, and more by chance."""


def test_the_promises_hold_and_every_fault_hits_every_step() -> None:
    reached = Reached()
    for outcome in run_seeds(run_seed, 0, SEEDS, len(os.sched_getaffinity(0))):
        assert not outcome.error, describe(outcome)
        reached.update(outcome.reached)
    print(f"\n{table(reached)}")
    assert not missing(reached)


def test_a_seed_gives_the_same_course_of_events_in_every_process() -> None:
    seeds = ["--seed-start", "9", "--seeds", "6"]  # in 14, workers wait and connect again
    command = [sys.executable, "-m", "tests.proofs", "simulation", *seeds, "--verbose"]
    courses = {
        subprocess.run(
            command, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed}, check=True,
            capture_output=True, timeout=deadline(240),
        ).stdout.rpartition(b", in ")[0]  # without its time
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(courses) == 1
    assert courses.pop().count(b"course") == 6 * len(WORLDS)


def test_a_seed_gives_the_same_course_of_events_twice_in_one_process() -> None:
    courses = []
    for seed in (5, 5, 6):
        with silent():
            world = World(seed)
            world.run()
        courses.append((world.course(), world.record.history()))
    assert courses[0] == courses[1]
    assert courses[0] != courses[2]


def test_simulated_code_uses_no_real_thread_or_time() -> None:
    from random import Random  # noqa: PLC0415

    before = real_ones()
    assert ("keyshard.coordinator.coordinator", "threading") in before
    assert ("keyshard.consumers.receiver", "Drop._dflt_done") in {
        (module, name.replace("__dataclass_dflt_done__", "_dflt_done")) for module, name in before
    }
    with installed(Scheduler(Random(0)), Random(0)):
        assert real_ones() == []
    assert real_ones() == before
