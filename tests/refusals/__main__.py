"""Runs all cells; ends with 1 if one is neither survived, nor ended by name, nor in the status.

python -m tests.refusals
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter

from tests.refusals.matrix import CELLS, run_cells


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.refusals", description=__doc__)
    parser.add_argument("--only", default="", help="cells whose name has this in it")
    arguments = parser.parse_args()
    logging.getLogger("keyshard").setLevel(logging.CRITICAL)
    began_s, wrong = time.monotonic(), 0
    outcomes: Counter[tuple[str, str]] = Counter()
    for cell, outcome, error in run_cells(
        tuple(one for one in CELLS if arguments.only in str(one))
    ):
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
