"""Runs seeds and prints what each fault hit; ends with 1 at the first seed that breaks a promise.

python -m tests.simulation --seeds 10000 --seed-start 0
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.simulation.faults import CELLS, Reached, events, missing, table
from tests.simulation.world import Outcome, World

REPORT_S = 5.0
"""Time between two lines of progress, seconds."""
CHUNK = 8
"""Seeds that a worker process takes at once."""


def run_seed(seed: int) -> Outcome:
    """Run one seed."""
    with silent():
        return World(seed).run()


def run_verbosely(seed: int) -> Outcome:
    """Run one seed and print what happened, line by line, and a name of its course of events."""
    with silent():
        world = World(seed, trace_max=None)
        outcome = world.run()
    print("\n".join(outcome.trace))
    print(f"seed {seed}: {outcome.rows} rows committed, course {world.course()}")
    return outcome


@contextmanager
def silent() -> Iterator[None]:
    """Nothing of what keyshard logs."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def run_seeds(
    run: Callable[[int], Outcome], first: int, count: int, processes: int
) -> Iterator[Outcome]:
    """Run seeds in their order, in several processes; ends them when it is closed."""
    seeds = range(first, first + count)
    if processes == 1 or count == 1:
        yield from map(run, seeds)
        return
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        yield from pool.imap(run, seeds, CHUNK)


def describe(outcome: Outcome) -> str:
    """All that is needed to look into a run that failed."""
    faults = "\n".join(f"    {fault}" for fault in outcome.faults)
    trace = "\n".join(outcome.trace)
    return (
        f"seed {outcome.seed} breaks a promise: {outcome.error}\n\n"
        f"{outcome.details}\n"
        f"  {outcome.shape}\n  faults:\n{faults}\n  the end of its trace:\n{trace}\n\n"
        f"seed {outcome.seed} breaks a promise. To run it again, with its whole trace:\n"
        f"    make simulate SEEDS=1 SEED_START={outcome.seed} VERBOSE=1\n"
    )


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
    processes = 1 if arguments.verbose else len(os.sched_getaffinity(0))
    run = run_verbosely if arguments.verbose else run_seed
    for outcome in run_seeds(run, arguments.seed_start, arguments.seeds, processes):
        done += 1
        rows += outcome.rows
        lives += outcome.lives
        virtual_s += outcome.now_s
        reached.update(outcome.reached)
        if outcome.error:
            print(describe(outcome))
            return 1
        if time.monotonic() - reported >= REPORT_S:
            reported = time.monotonic()
            print(f"{done} of {arguments.seeds} seeds hold", file=sys.stderr, flush=True)
    print(table(reached))
    if not arguments.verbose:
        print(
            f"{done} seeds hold: {rows:,} rows in {virtual_s / 3600:.1f} hours of virtual time, "
            f"{lives - done:,} restarts, {events(reached):,} faults, "
            f"{time.monotonic() - began:.0f} s"
        )
    if arguments.seeds >= len(CELLS):
        print(f"never met: {', '.join(missing(reached)) or 'none'}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
