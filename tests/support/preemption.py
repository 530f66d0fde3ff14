"""Threads that stop for a while at random calls, as on a machine whose neighbours take its time.

A test that trusts the order or the pace of threads passes nearly always, but not on a busy machine.
``pytest --preempt SEED`` makes such a test fail soon: while a test runs, each thread of its process
stops now and then at a call of code below the checkout: the product, the tests, and packages of a
virtual environment there. The seed fixes when a thread wants to stop, but not the course of the
other threads meanwhile.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

ROOT = str(Path(__file__).parents[2])
TESTS = str(Path(__file__).parents[1])
BETWEEN_S = 0.2
"""Mean time that a thread runs until it stops, seconds."""
STOPS_S, WEIGHTS = (0.005, 0.05, 0.4), (6, 3, 1)
"""How long a thread stops, seconds, and how often of ten each."""
AT_START, AT_CALL_OF_TEST = 0.3, 0.15
"""Share of threads that stop at their first call, and of the first calls made by a test at which it
stops."""
OFTEN = 30
"""Calls made by a test after which it stops at fewer and fewer of them."""


class Preemption(threading.local):
    """Stops the threads that it traces; each thread has a state of its own."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(f"{seed} {threading.current_thread().name}")
        self._next_s = time.monotonic() + self._random.expovariate(1 / BETWEEN_S)
        self._calls = 0
        if threading.current_thread() is not threading.main_thread():
            self._perhaps(AT_START)

    def at_call(self, frame: FrameType, _event: str, _arg: object) -> None:
        """Stop this thread if its time has come; called by Python at each call of a function."""
        if not frame.f_code.co_filename.startswith(ROOT):
            return
        caller = frame.f_back
        if time.monotonic() >= self._next_s:
            self._perhaps(1.0)
        elif caller is not None and caller.f_code.co_filename.startswith(TESTS):
            self._calls += 1
            self._perhaps(AT_CALL_OF_TEST * min(1.0, OFTEN / self._calls))

    def _perhaps(self, share: float) -> None:
        if self._random.random() < share:
            time.sleep(*self._random.choices(STOPS_S, WEIGHTS))
            self._next_s = time.monotonic() + self._random.expovariate(1 / BETWEEN_S)


@contextmanager
def preempted(seed: str) -> Iterator[None]:
    """Threads of this process stop now and then, this one and those that start meanwhile."""
    at_call = Preemption(seed).at_call
    interval_s = sys.getswitchinterval()
    before, before_of_threads = sys.gettrace(), threading.gettrace()
    sys.setswitchinterval(1e-4)
    threading.settrace(at_call)
    sys.settrace(at_call)
    try:
        yield
    finally:
        sys.settrace(before)
        threading.settrace(before_of_threads)  # type: ignore[arg-type]
        sys.setswitchinterval(interval_s)
