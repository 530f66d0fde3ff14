"""Runs seeds and prints what each fault hit; ends with 1 at the first seed that breaks a promise.

python -m tests.simulation --seeds 10000 --seed-start 0
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from tests.simulation.faults import CELLS, Reached, events, missing, table
from tests.simulation.runner import describe, run_seed, run_seeds, run_verbosely

REPORT_S = 5.0
"""Time between two lines of progress, seconds."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1_000, help="how many (default: 1000)")
    parser.add_argument("--seed-start", type=int, default=0, help="the first one (default: 0)")
    parser.add_argument("--verbose", action="store_true", help="print the trace of every seed")
    arguments = parser.parse_args()
    began = reported = time.monotonic()
    reached = Reached()
    done = rows = lives = 0
    virtual_s = 0.0
    run = run_verbosely if arguments.verbose else run_seed
    processes = 1 if arguments.verbose else len(os.sched_getaffinity(0))
    for outcome in run_seeds(run, arguments.seed_start, arguments.seeds, processes):
        if outcome.error:
            print(describe(outcome))
            return 1
        done += 1
        rows += outcome.rows
        lives += outcome.lives
        virtual_s += outcome.now_s
        reached.update(outcome.reached)
        if time.monotonic() - reported >= REPORT_S:
            reported = time.monotonic()
            print(f"{done} of {arguments.seeds} seeds hold", file=sys.stderr, flush=True)
    print(f"How often each fault hit each step of the loop:\n{table(reached)}")
    print(
        f"{done} seeds hold: {rows:,} rows in {virtual_s / 3600:.1f} hours of virtual time, "
        f"{events(reached):,} faults, {lives - done:,} restarts"
    )
    print(f"It took {time.monotonic() - began:.0f} s.", file=sys.stderr)
    if arguments.seeds >= len(CELLS):
        print(f"Never met: {', '.join(missing(reached)) or 'none'}.", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
