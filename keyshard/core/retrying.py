"""What becomes of a message whose handler failed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import tenacity

from keyshard.errors import ConfigError


class RetryLater(Exception):  # noqa: N818 - a signal of the handler, not an error of keyshard
    """Raised by a handler: try this message again after a time; its key waits until then.

    Args:
        after_s: Time until the next attempt, seconds. The attempt counts, and the limits of the
            retry policy hold.
        reason: Shown where the message blocks its key.
    """

    def __init__(self, after_s: float, reason: str = "") -> None:
        if after_s < 0:
            raise ConfigError(f"RetryLater after {after_s} s: the time must not be negative.")
        super().__init__(after_s, reason)
        self.after_s = after_s
        self.reason = reason or f"retry after {after_s:g} s"


class Reject(Exception):  # noqa: N818 - a signal of the handler, not an error of keyshard
    """Raised by a handler: this message will never succeed. Its key goes on without it.

    Args:
        reason: Kept with the dead letter.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason or "rejected by the handler"


def _wait() -> Any:
    return tenacity.wait_exponential(multiplier=0.1, max=30.0) + tenacity.wait_random(0.0, 0.1)


def _stop() -> Any:
    return tenacity.stop_after_attempt(5) | tenacity.stop_after_delay(300.0)


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
    """A tenacity stop strategy; default: after 5 attempts or 300 s."""

    def __post_init__(self) -> None:
        for name in ("wait", "stop"):
            if not callable(getattr(self, name)):
                raise ConfigError(
                    f"{name} of the retry policy is {getattr(self, name)!r}; give a tenacity "
                    "strategy, such as tenacity.wait_fixed(1) or tenacity.stop_after_attempt(5)."
                )

    def delay_s(self, attempts: int, elapsed_s: float, error: BaseException) -> float | None:
        """Time until the next attempt, seconds; ``None`` when there is none.

        Args:
            attempts: Failed attempts so far, this one included.
            elapsed_s: Time since the first attempt began, seconds.
            error: What the handler raised.
        """
        if isinstance(error, Reject):
            return None
        state = tenacity.RetryCallState(tenacity.Retrying(), None, (), {})
        state.attempt_number = attempts
        state.start_time, state.outcome_timestamp = 0.0, elapsed_s
        state.outcome = tenacity.Future.construct(attempts, error, has_exception=True)
        if isinstance(error, RetryLater):
            state.upcoming_sleep = error.after_s
        else:
            state.upcoming_sleep = float(self.wait(state))
        return None if self.stop(state) else state.upcoming_sleep
