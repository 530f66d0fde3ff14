"""Deadlines of tests, scaled by how slow this machine is now.

The first process of a test run measures the machine; its children inherit the result. A test states
how long a thing may take on a quiet machine, and waits for :func:`deadline` of that.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
VARIABLE = "KEYSHARD_TEST_FACTOR"
"""Carries the factor, 1 to 10, to child processes; set it to skip the measurement."""
FACTOR_MAX = 10.0
COMPUTE_S, IMPORT_S = 0.20, 0.25
"""Time of each part of the measurement on a quiet core, seconds."""
ROUNDS = 3
MEASURED_WITHIN_S = 60.0
_STEPS = 1_000_000


def _compute() -> None:
    total = 0
    for number in range(_STEPS):
        total += number * number % 7


def _import() -> None:
    subprocess.run([sys.executable, "-c", "import keyshard"], check=True)


def measured() -> float:
    """How many times slower than a quiet core this machine is now.

    It is the larger ratio of two: that of a fixed piece of Python work, and that of a process which
    imports keyshard.
    """
    took_s = {}
    for part in (_compute, _import):
        began_s = time.monotonic()
        for _ in range(ROUNDS):
            part()
        took_s[part] = (time.monotonic() - began_s) / ROUNDS
    slower = max(took_s[_compute] / COMPUTE_S, took_s[_import] / IMPORT_S)
    return round(slower, 1)


def measured_now() -> float:
    """The same measurement by a process of its own: threads of this one do not slow it down."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.deadlines"],
        cwd=ROOT, env=os.environ | {VARIABLE: "1"}, stdout=subprocess.PIPE, text=True, check=True,
        timeout=MEASURED_WITHIN_S,
    )  # fmt: skip
    return float(run.stdout)


def _factor() -> float:
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = str(measured())
    return min(max(float(os.environ[VARIABLE]), 1.0), FACTOR_MAX)


FACTOR = _factor()
"""How many times slower than a quiet core this machine was when the run began."""


def deadline(quiet_s: float) -> float:
    """How long a test waits for what may take ``quiet_s`` on a quiet machine, seconds."""
    return quiet_s * FACTOR


class DeadlineError(AssertionError):
    """A wait of a test passed its deadline."""


def in_time(end_s: float, what: str) -> None:
    """Raise :class:`DeadlineError` with a text once the monotonic clock has passed ``end_s``."""
    if time.monotonic() >= end_s:
        raise DeadlineError(what)


def joined(thread: threading.Thread, within_s: float) -> None:
    """Wait for the end of a thread; raise :class:`DeadlineError` if it runs longer, seconds."""
    thread.join(within_s)
    if thread.is_alive():
        raise DeadlineError(f"the thread {thread.name} did not end within {within_s:.0f} s")


if __name__ == "__main__":
    print(measured())
