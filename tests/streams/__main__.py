"""``python -m tests.streams``: Spark streams with everything on at once, seed by seed.

Each case has two or three queries in one session, with formats, schemas, modes, columns and limits
drawn from its seed, and faults between any two steps. Judged: each message once by batch id, order
per key, values, batches that run again, the backlog, and that errors are sentences of keyshard.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.streams.cluster import Broker
from tests.streams.run import Case


def main() -> int:
    """Run cases; 0: every promise holds."""
    parser = argparse.ArgumentParser(prog="python -m tests.streams", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="no case begins after that")
    parser.add_argument("--seed", type=int, help="the only case; default: others each time")
    given = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="keyshard-streams-"))
    print(f"files in {directory}", flush=True)
    end = time.monotonic() + 60 * given.minutes
    bad: list[int] = []
    cases = 0
    with Broker(directory / "broker") as broker:
        while not cases or (given.seed is None and time.monotonic() < end):
            seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
            folder = directory / f"case-{cases}"
            folder.mkdir()
            cases += 1
            began = time.monotonic()
            print(f"seed {seed}", flush=True)
            case = Case(broker, seed, folder, lambda text: print(text, flush=True))
            try:
                case.run()
            except Exception:  # noqa: BLE001 - the next case is another one
                case.problems.append(traceback.format_exc())
            for problem in case.problems[:20]:
                print("BAD", problem[:2500], flush=True)
            if case.problems:
                bad.append(seed)
                print(f"again: python -m tests.streams --seed {seed}", flush=True)
            print(
                f"seed {seed}: {len(case.problems)} problems, {len(case.errors)} errors of queries,"
                f" {time.monotonic() - began:.0f} s",
                flush=True,
            )
    print(f"{cases} cases, {len(bad)} with problems: {bad}")
    if not bad:
        shutil.rmtree(directory)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
