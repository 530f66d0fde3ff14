"""Runs seeds and prints the steps that each fault hit; ends with 1 at the first broken promise.

python -m tests.simulation --seeds 10000 --seed-start 0
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from functools import partial
from typing import Any

from tests.simulation import faults, worker_faults
from tests.simulation.handling import faults as handling_faults
from tests.simulation.pipeline import faults as pipeline_faults
from tests.simulation.runner import WORLDS, describe, run_seed, run_seeds, run_verbosely

FAULTS: dict[str, Any] = {
    "spark": faults, "handlers": handling_faults, "workers": worker_faults,
    "pipeline": pipeline_faults, "spark-frames": faults, "handlers-frames": handling_faults,
    "pipeline-frames": pipeline_faults,
}  # fmt: skip
"""Faults of each world."""
REPORT_S = 5.0
"""Time between two lines of progress, seconds."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1_000, help="how many (default: 1000)")
    parser.add_argument("--seed-start", type=int, default=0, help="the first one (default: 0)")
    parser.add_argument("--world", choices=WORLDS, help="only this one (default: one by one)")
    parser.add_argument("--verbose", action="store_true", help="print the trace of every seed")
    arguments = parser.parse_args()
    worlds = [arguments.world] if arguments.world else list(WORLDS)
    return 0 if all(_run(world, arguments) for world in worlds) else 1


def _run(world: str, arguments: argparse.Namespace) -> bool:
    """Run the seeds in one world; whether they hold."""
    began = reported = time.monotonic()
    reached: Counter[Any] = Counter()
    done = rows = lives = 0
    virtual_s = 0.0
    run = partial(run_verbosely if arguments.verbose else run_seed, world=world)
    processes = 1 if arguments.verbose else len(os.sched_getaffinity(0))
    for outcome in run_seeds(run, arguments.seed_start, arguments.seeds, processes):
        if outcome.error:
            print(describe(outcome, world))
            return False
        done += 1
        rows += outcome.rows
        lives += outcome.lives
        virtual_s += outcome.now_s
        reached.update(outcome.reached)
        if time.monotonic() - reported >= REPORT_S:
            reported = time.monotonic()
            print(f"{world}: {done} of {arguments.seeds} seeds hold", file=sys.stderr, flush=True)
    of = FAULTS[world]
    print(f"{world}: how often each fault hit each step:\n{of.table(reached)}")
    print(
        f"{world}: {done} seeds hold: {rows:,} rows in {virtual_s / 3600:.1f} hours of virtual "
        f"time, {of.events(reached):,} faults, {lives - done:,} restarts"
    )
    print(f"It took {time.monotonic() - began:.0f} s.", file=sys.stderr)
    if arguments.seeds >= len(of.CELLS):
        print(f"Never met: {', '.join(of.missing(reached)) or 'none'}.", file=sys.stderr)
    return True


if __name__ == "__main__":
    sys.exit(main())
