"""When a message whose handler failed is tried again, and when no more."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import tenacity

from keyshard.core.lanes.failure import Failure, FailureKind, name_of, seconds_of, text_of
from keyshard.errors import ConfigError
from keyshard.redaction import shown


@cache  # so that default policies are equal
def _wait() -> Any:
    return tenacity.wait_exponential(multiplier=0.1, max=30.0) + tenacity.wait_random(0.0, 0.1)


@cache
def _stop() -> Any:
    return tenacity.stop_after_attempt(8) | tenacity.stop_after_delay(300.0)


class Decision(NamedTuple):
    """What a retry policy says."""

    delay_s: float | None
    """Time until the next attempt, seconds; ``None`` when there is none."""
    problem: str = ""
    """Why the policy could not decide, and the default one did."""


class Setback(NamedTuple):
    """A failed attempt, and what the policy says."""

    failure: Failure
    decision: Decision


@dataclass(frozen=True)
class RetryPolicy:
    """When a failed message is tried again, and when no more.

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
                    f"{name} of the retry policy is {shown(getattr(self, name))}; give a tenacity "
                    "strategy, such as tenacity.wait_fixed(1) or tenacity.stop_after_attempt(5)."
                )

    def decide(self, attempts: int, elapsed_s: float, failure: Failure) -> Decision:
        """Whether and when there is another attempt; never raises.

        Args:
            attempts: Failed attempts so far, this one included.
            elapsed_s: Time since the first attempt began, seconds.
            failure: What the handler raised.
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
                raise ValueError(f"wait gave {text_of(waits)}, which is no time in seconds")
        state.upcoming_sleep = delay_s
        return None if self.stop(state) else delay_s


_DEFAULT = RetryPolicy()
