"""Runs all cells; ends with 1 if one is neither survived, nor ended by name, nor in the status.

python -m tests.refusals
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter

from tests.refusals.matrix import CELLS, REAL_TIME, run_cells


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.refusals", description=__doc__)
    parser.add_argument("--only", default="", help="cells whose name has this in it")
    parser.add_argument(
        "--real-time",
        action="store_true",
        help="a share of the cells with the waits of the product",
    )
    arguments = parser.parse_args()
    logging.getLogger("keyshard").setLevel(logging.CRITICAL)
    began_s, wrong = time.monotonic(), 0
    outcomes: Counter[tuple[str, str]] = Counter()
    cells = REAL_TIME if arguments.real_time else CELLS
    chosen = tuple(one for one in cells if arguments.only in str(one))
    for cell, outcome, error in run_cells(chosen, real_time=arguments.real_time):
        outcomes[f"{cell.request} at {cell.moment}", outcome or "WRONG"] += 1
        if error:
            wrong += 1
            print(f"{cell}: {error}")
    for (name, outcome), count in sorted(outcomes.items()):
        print(f"{name}: {count} {outcome}")
    held = sum(outcomes.values()) - wrong
    print(f"{held} cells hold, {wrong} do not, in {time.monotonic() - began_s:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
