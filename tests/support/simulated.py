"""Runs the body of a test under the scheduler of the simulation.

The threads of the test, of keyshard and of the helpers are simulated: one runs at a time, the seed
decides which, and waits take no time. The same seed gives the same course. Fixtures run outside, so
the body makes all objects with threads, locks or events; only an in-memory cluster may come from a
fixture, because no thread waits while it holds the lock of one. The scheduler ends all threads with
the body.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from random import Random
from typing import Any

from tests.simulation.install import installed, without_outside
from tests.simulation.scheduler import Scheduler

OF_TESTS = ("tests.helpers", "tests.support.", "keyshard.testing.verify.")
"""Modules of tests whose threads and time are simulated, beside that of the test."""
REAL = "tests.support.preemption"
"""Stops threads for a while, in real time, if ``--preempt`` asks for it."""


def run_simulated(test: Callable[..., None], arguments: dict[str, Any], seed: int) -> None:
    """Call a test under the scheduler; the threads that it leaves are ended."""
    random = Random(seed)
    scheduler = Scheduler(random)
    helpers = {name for name in sys.modules if name.startswith(OF_TESTS)} - {REAL}
    with installed(scheduler, random, helpers | {test.__module__}), without_outside():
        scheduler.run(scheduler.process("test"), lambda: test(**arguments))
