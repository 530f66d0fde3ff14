"""Handles that lost their connection get it back: a few threads, and waits that grow."""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from collections.abc import Callable

FIRST_WAIT_S = 0.05
"""Wait before the second attempt, seconds, where the first is made at once."""
LONGEST_WAIT_S = 5.0
"""Longest wait between two attempts, seconds."""
THREADS_MAX = 8
"""Threads that try; each attempt ends by its own deadline."""

_random = random.Random()


class Comebacks:
    """Calls again and again what is to come true, until it did.

    Args:
        threads_max: Threads that call; one is enough for what returns at once.
        longest_wait_s: Longest wait between two attempts, seconds; ``None``: the usual one.
    """

    def __init__(self, threads_max: int = THREADS_MAX, longest_wait_s: float | None = None) -> None:
        self._threads_max = threads_max
        self._longest_wait_s = longest_wait_s
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, float, Callable[[], bool]]] = []
        self._numbers = itertools.count()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False

    def until_true(self, attempt: Callable[[], bool], wait_s: float = 0.0) -> None:
        """Call ``attempt`` from a thread of its own, until it says ``True``; it raises nothing.

        Args:
            attempt: What is called.
            wait_s: Wait before the first attempt, seconds; jittered, as the others are.
        """
        self._add(attempt, _jittered(wait_s), max(FIRST_WAIT_S, wait_s))

    def close(self) -> None:
        """Begin no more attempts; returns at once. Idempotent."""
        with self._changed:
            self._closed = True
            self._due.clear()
            self._changed.notify_all()

    def join(self, timeout_s: float) -> None:
        """Wait until the attempts have ended that had begun."""
        end_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))

    def _add(self, attempt: Callable[[], bool], wait_s: float, next_wait_s: float) -> None:
        with self._changed:
            if self._closed:
                return
            at_s = time.monotonic() + wait_s
            heapq.heappush(self._due, (at_s, next(self._numbers), next_wait_s, attempt))
            if self._idle < len(self._due) and len(self._threads) < self._threads_max:
                name = f"keyshard-wire-back-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
                self._threads[-1].start()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (not self._due or self._due[0][0] > time.monotonic()):
                    self._idle += 1
                    first = self._due[0][0] - time.monotonic() if self._due else None
                    self._changed.wait(first)
                    self._idle -= 1
                if self._closed:
                    return
                _, _, wait_s, attempt = heapq.heappop(self._due)
            if not attempt():
                longest_s = self._longest_wait_s or LONGEST_WAIT_S
                self._add(attempt, _jittered(wait_s), min(longest_s, wait_s * 2))


def _jittered(wait_s: float) -> float:
    return wait_s * (0.5 + _random.random() / 2)
