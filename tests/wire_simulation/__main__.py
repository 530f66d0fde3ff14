"""Runs seeds; ends with 1 at the first that breaks a promise.

python -m tests.wire_simulation --seeds 1000 --seed-start 0
"""

from __future__ import annotations

import argparse
import logging
import sys
import time

from tests.wire_simulation.run import run

REPORT_S = 10.0
"""Time between two lines of progress, seconds."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.wire_simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many (default: 200)")
    parser.add_argument("--seed-start", type=int, default=0, help="the first one (default: 0)")
    arguments = parser.parse_args()
    logging.getLogger("keyshard").setLevel(logging.ERROR)
    began = reported = time.monotonic()
    entries = troubles = losses = 0
    for done in range(arguments.seeds):
        outcome = run(arguments.seed_start + done)
        if outcome.error:
            print(f"seed {outcome.seed}: {outcome.error}")
            return 1
        entries += outcome.entries
        troubles += outcome.troubles
        losses += outcome.losses
        if time.monotonic() - reported >= REPORT_S:
            reported = time.monotonic()
            print(f"{done + 1} of {arguments.seeds} seeds hold", file=sys.stderr, flush=True)
    print(
        f"{arguments.seeds} seeds hold: {entries:,} entries, {troubles:,} connections and answers "
        f"broken, {losses:,} subscriptions lost, in {time.monotonic() - began:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
