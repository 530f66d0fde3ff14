"""Attempts that are made again until they succeed: waits that grow, and threads for each lane."""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable
from dataclasses import dataclass, field

from keyshard.errors import ThreadStartError
from keyshard.threads import begin, owner

FIRST_WAIT_S = 0.05
"""Wait before the second attempt, seconds, where the first is made at once."""
LONGEST_WAIT_S = 5.0
"""Longest wait between two attempts, seconds."""
LANE_THREADS_MAX = 8
"""Attempts that run in one lane at the same time; each ends by its own deadline."""
THREADS_MAX = 256
"""Threads of one retrier."""

Steps = Generator[Hashable, None, bool]
"""An attempt that waits in several places. Before each of them it yields the name of the lane that
it waits in; it returns whether it succeeded."""
Attempt = Callable[[], bool | Steps]
"""Returns whether it succeeded, without waiting for anything; or the steps to go."""


@dataclass(slots=True, eq=False)
class _Job:
    attempt: Attempt
    next_wait_s: float
    steps: Steps | None = None
    """Those of the attempt that has begun."""


@dataclass(slots=True)
class _Lane:
    waiting: deque[_Job] = field(default_factory=deque)
    running: int = 0


class Retrier:
    """Makes attempts again until they succeed.

    A lane is what attempts wait for, such as the address of a broker. Attempts in one lane never
    hold up those in another one.

    Args:
        longest_wait_s: Longest wait between two attempts, seconds; ``None``: the usual one.
        lane_threads_max: Attempts that run in one lane at the same time.
        name: Beginning of the names of its threads.
    """

    def __init__(
        self,
        longest_wait_s: float | None = None,
        lane_threads_max: int = LANE_THREADS_MAX,
        name: str = "keyshard-wire-back",
    ) -> None:
        self._longest_wait_s = longest_wait_s
        self._lane_threads_max = lane_threads_max
        self._name = name
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, _Job]] = []
        self._lanes: dict[Hashable, _Lane] = {}
        self._numbers = itertools.count()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False
        self._owner = owner()

    def until_true(self, attempt: Attempt, wait_s: float = 0.0) -> None:
        """Make an attempt, and make it again until it succeeds; returns at once.

        Args:
            attempt: Is called in a thread of the retrier; what it raises ends the source.
            wait_s: Wait before the first attempt, seconds; jittered, as the others are.
        """
        self._add(_Job(attempt, max(FIRST_WAIT_S, wait_s)), _jittered(wait_s))

    def close(self) -> None:
        """Begin no more attempts; returns at once. Idempotent."""
        with self._changed:
            self._closed = True
            self._due.clear()
            self._lanes.clear()
            self._changed.notify_all()

    def join(self, timeout_s: float) -> None:
        """Wait until the attempts have ended that had begun."""
        end_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))

    def _add(self, job: _Job, wait_s: float) -> None:
        with self._changed:
            if self._closed:
                return
            heapq.heappush(self._due, (time.monotonic() + wait_s, next(self._numbers), job))
            self._hire()
            self._changed.notify()

    def _hire(self) -> None:
        """Start a thread that waits for due jobs, if none waits; under the lock."""
        if not self._idle and len(self._threads) < THREADS_MAX:
            name = f"{self._name}-{len(self._threads)}"
            try:
                self._threads.append(begin(name, self._run, fail=self._owner))
            except ThreadStartError:
                if not self._threads:
                    raise
                return  # Those that run come back for more.
            self._idle += 1

    def _run(self) -> None:
        while True:
            with self._changed:
                found = self._next()
                if found is None:
                    return
                lane, job = found
                self._idle -= 1
                if self._due or any(one.waiting for one in self._lanes.values()):
                    self._hire()
            self._go_on(job)
            with self._changed:
                self._idle += 1
                lane.running -= 1

    def _next(self) -> tuple[_Lane, _Job] | None:
        """The lane and job to run now; ``None`` at the end. Under the lock."""
        while not self._closed:
            now_s = time.monotonic()
            while self._due and self._due[0][0] <= now_s:
                self._lanes.setdefault(None, _Lane()).waiting.append(heapq.heappop(self._due)[2])
            for name, lane in list(self._lanes.items()):
                if lane.waiting and lane.running < self._lane_threads_max:
                    lane.running += 1
                    return lane, lane.waiting.popleft()
                if not lane.waiting and not lane.running:
                    del self._lanes[name]
            self._changed.wait(self._due[0][0] - now_s if self._due else None)
        return None

    def _go_on(self, job: _Job) -> None:
        """Take an attempt to its next step, or to its end."""
        done = False
        try:
            if job.steps is None:
                outcome = job.attempt()
                if isinstance(outcome, bool):
                    done = outcome
                else:
                    job.steps = outcome
            if job.steps is not None:
                self._move(job, next(job.steps))
                return
        except StopIteration as end:
            done = bool(end.value)
        job.steps = None
        if not done:
            wait_s, longest_s = job.next_wait_s, self._longest_wait_s or LONGEST_WAIT_S
            job.next_wait_s = min(longest_s, wait_s * 2)
            self._add(job, _jittered(wait_s))

    def _move(self, job: _Job, name: Hashable) -> None:
        with self._changed:
            if not self._closed:
                self._lanes.setdefault(name, _Lane()).waiting.append(job)
                self._hire()
                self._changed.notify()


def _jittered(wait_s: float) -> float:
    return wait_s * (0.5 + random.random() / 2)
