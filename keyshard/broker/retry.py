"""Retries of broker requests, each with a time limit."""

from __future__ import annotations

import heapq
import itertools
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable
from dataclasses import dataclass, field
from typing import TypeVar

import tenacity

from keyshard.core.refusal_timer import LIMITED_S
from keyshard.errors import KeyShardError, LimitReachedError, ThreadStartError
from keyshard.threads import begin, owner

FIRST_TRIES_S = 1.5
"""Time for which a first start retries an unreachable broker, seconds. One attempt may take three
seconds more."""

T = TypeVar("T")
_log = logging.getLogger(__name__)


def _is_retriable(exc: BaseException) -> bool:
    return isinstance(exc, KeyShardError) and exc.retriable


class _StaysLimited(tenacity.stop.stop_base):
    """Ends the retries once a limit of the broker stays reached for :data:`LIMITED_S`."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        """When the limit was reached; ``None`` while it is not."""

    def __call__(self, retry_state: tenacity.RetryCallState) -> bool:
        error = retry_state.outcome.exception() if retry_state.outcome is not None else None
        now_s = retry_state.seconds_since_start or 0.0
        if not isinstance(error, LimitReachedError):
            self._since_s = None
            return False
        if self._since_s is None:
            self._since_s = now_s
        return now_s - self._since_s >= LIMITED_S


def retry_until(
    action: Callable[[], T], timeout_s: float, *, stop: threading.Event | None = None
) -> T:
    """Run ``action`` until it succeeds, fails permanently, or the timeout passes.

    Args:
        action: May raise. If a :class:`KeyShardError` is ``retriable``, the action runs again
            after a random wait that grows from 50 ms to 1 s.
        timeout_s: Time after which the last error is raised, seconds; at most :data:`LIMITED_S` if
            that is :class:`LimitReachedError`.
        stop: If set, ends the retries early.

    Raises:
        KeyShardError: The last error, with the traceback of this call and without a cause,
            because its text already includes the cause.
    """
    limit: tenacity.stop.stop_base = tenacity.stop_after_delay(timeout_s) | _StaysLimited()
    sleep: Callable[[float], object] = tenacity.nap.sleep
    if stop is not None:
        limit = limit | tenacity.stop_when_event_set(stop)
        sleep = stop.wait
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(_is_retriable),
        stop=limit,
        wait=tenacity.wait_random_exponential(multiplier=0.05, max=1.0),
        sleep=sleep,  # type: ignore[arg-type]
        before_sleep=tenacity.before_sleep_log(_log, logging.DEBUG),
        reraise=True,
    )
    try:
        return retrying(action)
    except KeyShardError as exc:
        raise exc.with_traceback(None) from None


# -- Background retries: growing waits, and threads per lane ---------------------------------------

FIRST_WAIT_S = 0.05
"""Wait before the second attempt, seconds, if the first runs at once."""
LONGEST_WAIT_S = 5.0
"""Longest wait between two attempts, seconds."""
LANE_THREADS_MAX = 8
"""Maximum number of concurrent attempts in one lane; each has its own deadline."""
THREADS_MAX = 256
"""Maximum number of threads of one retrier."""

Steps = Generator[Hashable, None, bool]
"""An attempt with several waits. Before each wait it yields the name of the lane that it waits in.
It returns whether it succeeded."""
Attempt = Callable[[], bool | Steps]
"""Returns without waiting whether it succeeded, or returns the steps to run."""


@dataclass(slots=True, eq=False)
class _Job:
    attempt: Attempt
    next_wait_s: float
    steps: Steps | None = None
    """The steps of an attempt that has begun."""


@dataclass(slots=True)
class _Lane:
    waiting: deque[_Job] = field(default_factory=deque)
    running: int = 0


class Retrier:
    """Repeats attempts until they succeed.

    A lane names a resource that attempts wait for, such as the address of a broker. Attempts in
    one lane never block those in another.

    Args:
        longest_wait_s: Longest wait between two attempts, seconds; ``None``: the default.
        lane_threads_max: Maximum number of concurrent attempts in one lane.
        name: Prefix of its thread names.
    """

    def __init__(
        self,
        longest_wait_s: float | None = None,
        lane_threads_max: int = LANE_THREADS_MAX,
        name: str = "keyshard-resubscribe",
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
        """Repeat an attempt in the background until it succeeds; return at once.

        Args:
            attempt: Runs in a thread of the retrier. An exception ends the source.
            wait_s: Wait before the first attempt, seconds; jittered like the other waits.
        """
        self._add(_Job(attempt, max(FIRST_WAIT_S, wait_s)), _jittered(wait_s))

    def close(self) -> None:
        """Begin no more attempts; return at once. Idempotent."""
        with self._changed:
            self._closed = True
            self._due.clear()
            self._lanes.clear()
            self._changed.notify_all()

    def join(self, timeout_s: float) -> None:
        """Wait until the running attempts have ended, or the timeout passes."""
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
        """Start a thread for due jobs if no thread is idle. Call it under the lock."""
        if not self._idle and len(self._threads) < THREADS_MAX:
            name = f"{self._name}-{len(self._threads)}"
            try:
                self._threads.append(begin(name, self._run, fail=self._owner))
            except ThreadStartError:
                if not self._threads:
                    raise
                return  # The running threads call this again.
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
        """Return the lane and job to run now; ``None`` at the end. Call it under the lock."""
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
        """Run an attempt until its next step, or until it ends."""
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
