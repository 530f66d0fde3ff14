"""Rate limit of handlers: a token bucket.

A call of the handler takes a token. Tokens come at a fixed rate, and at most a burst of them is
kept. In any time of ``t`` seconds, at most ``burst + rate * t`` calls begin. Retries are an
exception: retried Arrow rows, or the rows of a dead actor, begin together when one token is there.
They owe the other tokens, and later calls wait for these. Time is an argument, in seconds of any
clock. The owner calls the limit under one lock.
"""

from __future__ import annotations

from typing import TypedDict

BURST_S = 0.1
"""Time whose tokens are kept by default, seconds."""


class RateLimitStatus(TypedDict):
    """Status of a rate limit as JSON values."""

    perSecond: float
    burst: int
    holdsBack: bool
    heldBackSeconds: float


class RateLimit:
    """Decides how many calls of a handler may begin.

    Args:
        per_s: Tokens per second, more than 0.
        burst: Most tokens that are kept; ``None``: as many as come in ``BURST_S``, at least one.
    """

    def __init__(self, per_s: float, burst: int | None = None) -> None:
        self.per_s = per_s
        self.burst = max(1, int(per_s * BURST_S)) if burst is None else burst
        self._tokens = float(self.burst)
        self._filled_s: float | None = None
        self._refused_s: float | None = None
        """Time since which a message waits for a token."""
        self._held_back_s = 0.0

    def available(self, now_s: float) -> int:
        """Return how many calls may begin now."""
        self._fill(now_s)
        return int(self._tokens)

    def started(self, now_s: float, calls: int = 1) -> None:
        """Take a token for each call that begins. At least one must be :meth:`available`.

        Missing tokens are owed: no other call begins until they have come.
        """
        self._fill(now_s)
        assert self._tokens >= 1, "a call without a token"
        self._tokens -= calls
        self._note(now_s)

    def not_started(self, calls: int) -> None:
        """Give back the tokens of calls that did not begin."""
        self._tokens = min(float(self.burst), self._tokens + calls)

    def refused(self, now_s: float) -> None:
        """Note that a call could begin if there were a token."""
        if self._refused_s is None:
            self._refused_s = now_s

    def rested(self, now_s: float) -> None:
        """Note that no call waits for a token, because no message can start."""
        self._note(now_s)

    def status(self, now_s: float) -> RateLimitStatus:
        """Return the status."""
        since_s = now_s if self._refused_s is None else self._refused_s
        return {
            "perSecond": self.per_s,
            "burst": self.burst,
            "holdsBack": self._refused_s is not None,
            "heldBackSeconds": round(self._held_back_s + max(0.0, now_s - since_s), 3),
        }

    def _fill(self, now_s: float) -> None:
        if self._filled_s is not None and now_s > self._filled_s:
            came = (now_s - self._filled_s) * self.per_s
            self._tokens = min(float(self.burst), self._tokens + came)
        if self._filled_s is None or now_s > self._filled_s:
            self._filled_s = now_s

    def _note(self, now_s: float) -> None:
        if self._refused_s is not None:
            self._held_back_s += max(0.0, now_s - self._refused_s)
            self._refused_s = None
