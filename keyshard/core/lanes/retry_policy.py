"""Retry policy of failed messages."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import tenacity

from keyshard.core.lanes.failure import Failure, FailureKind, name_of, seconds_of, text_of
from keyshard.core.lanes.key_queue import KeyQueue
from keyshard.errors import ConfigError
from keyshard.redaction import shown


@cache  # Strategies compare by identity: default policies are equal only if they share them.
def _wait() -> Any:
    return tenacity.wait_exponential(multiplier=0.1, max=30.0) + tenacity.wait_random(0.0, 0.1)


@cache
def _stop() -> Any:
    return tenacity.stop_after_attempt(8) | tenacity.stop_after_delay(300.0)


class Decision(NamedTuple):
    """The decision of a retry policy."""

    delay_s: float | None
    """Time until the next attempt, seconds; ``None`` if there is none."""
    problem: str = ""
    """The reason why the policy could not decide; then the default policy did."""


class FailedAttempt(NamedTuple):
    """A failed attempt, and the decision of the policy."""

    failure: Failure
    decision: Decision


@dataclass(frozen=True)
class RetryPolicy:
    """Wait and stop strategies for the retries of a failed message.

    ::

        RetryPolicy(
            wait=tenacity.wait_random_exponential(multiplier=1, max=60),
            stop=tenacity.stop_after_attempt(10) | tenacity.stop_after_delay(600),
        )
    """

    wait: Any = field(default_factory=_wait)
    """A tenacity wait strategy; default: 0.1 s, doubled up to 30 s, with jitter."""
    stop: Any = field(default_factory=_stop)
    """A tenacity stop strategy; default: after 8 attempts, which take about 13 s, or 300 s."""

    def __post_init__(self) -> None:
        for name in ("wait", "stop"):
            if not callable(getattr(self, name)):
                raise ConfigError(
                    f"{name} of the retry policy is {shown(getattr(self, name))}.",
                    "Write a tenacity strategy, such as tenacity.wait_fixed(1) or "
                    "tenacity.stop_after_attempt(5).",
                )

    def decide(self, attempts: int, elapsed_s: float, failure: Failure) -> Decision:
        """Decide whether and when to retry; never raises.

        Args:
            attempts: Failed attempts so far, this one included.
            elapsed_s: Time since the first attempt began, seconds.
            failure: The failure of this attempt.
        """
        if failure.kind is FailureKind.REJECTED:
            return Decision(None)
        try:
            return Decision(self._delay_s(attempts, elapsed_s, failure))
        except BaseException as exc:  # noqa: BLE001 - strategies are the user's
            problem = f"{name_of(exc)}: {text_of(exc)}"
            return Decision(_DEFAULT._delay_s(attempts, elapsed_s, failure), problem)

    def _delay_s(self, attempts: int, elapsed_s: float, failure: Failure) -> float | None:
        state = tenacity.RetryCallState(tenacity.Retrying(), None, (), {})
        state.attempt_number = attempts
        state.start_time, state.outcome_timestamp = 0.0, elapsed_s
        state.outcome = tenacity.Future.construct(attempts, failure.error, has_exception=True)
        delay_s = failure.after_s
        if delay_s is None:
            waits = self.wait(state)
            delay_s = seconds_of(waits)
            if delay_s is None:
                raise ValueError(f"wait returned {text_of(waits)}, which is not a time in seconds")
        state.upcoming_sleep = delay_s
        return None if self.stop(state) else delay_s


_DEFAULT = RetryPolicy()


# -- Keys that wait for a retry, earliest first ----------------------------------------------------


class DueKeys:
    """A heap by :attr:`KeyQueue.not_before_s`; keys with the same time in order of arrival."""

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, KeyQueue]] = []
        """Public: callers check it for every message, and an attribute is cheaper than a call."""
        self._pushed = 0

    def __iter__(self) -> Iterator[KeyQueue]:
        return (queue for _, _, queue in self.heap)

    @property
    def due_s(self) -> float | None:
        """Time at which the first key may continue; ``None`` if none waits."""
        return self.heap[0][0] if self.heap else None

    def push(self, queue: KeyQueue) -> None:
        """Add a key that waits."""
        self._pushed += 1
        heapq.heappush(self.heap, (queue.not_before_s, self._pushed, queue))

    def pop(self, now_s: float) -> KeyQueue | None:
        """Remove and return a key that is due; ``None`` without one."""
        return heapq.heappop(self.heap)[2] if self.heap and self.heap[0][0] <= now_s else None

    def pop_dead_letters(self) -> list[KeyQueue]:
        """Remove and return keys whose head is a replayed dead letter."""
        dead_letters = [queue for queue in self if queue.work[0].entry is None]
        self.heap = [one for one in self.heap if one[2].work[0].entry is not None]
        heapq.heapify(self.heap)
        return dead_letters
