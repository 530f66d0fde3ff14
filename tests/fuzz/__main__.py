"""Attacks the public API by seed; ends with 1 when a promise broke, and says how to repeat it.

python -m tests.fuzz --seeds 2000 --seed-start 0
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from tests.fuzz.runner import run_seeds

REPORT_S = 5.0
"""Time between two lines of progress, seconds."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1_000, help="how many (default: 1000)")
    parser.add_argument("--seed-start", type=int, default=0, help="the first one (default: 0)")
    parser.add_argument("--keep-going", action="store_true", help="do not end at the first")
    arguments = parser.parse_args()
    began = reported = time.monotonic()
    processes = len(os.sched_getaffinity(0))
    broken: list[int] = []
    done = 0
    for seed, error in run_seeds(arguments.seed_start, arguments.seeds, processes):
        done += 1
        if error:
            broken.append(seed)
            print(
                f"seed {seed} breaks a promise: {error}\nTo run it again:\n"
                f"    python -m tests.fuzz --seeds 1 --seed-start {seed}\n",
                flush=True,
            )
            if not arguments.keep_going:
                return 1
        if time.monotonic() - reported >= REPORT_S:
            reported = time.monotonic()
            print(f"{done} of {arguments.seeds} attacks", file=sys.stderr, flush=True)
    print(f"{done - len(broken)} of {done} attacks on the public API hold")
    print(f"It took {time.monotonic() - began:.0f} s.", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
