"""Limits the retries of a refused request: a lasting refusal ends the source."""

from __future__ import annotations

import re

from keyshard.errors import AuthenticationError, KeyShardError, TopicNotFoundError

REFUSED_S = 5.0
"""Time limit for refusals whose reason does not pass by itself, seconds."""
UNAUTHENTICATED_S = 30.0
"""Time limit for refused credentials, seconds: a token may be renewed meanwhile."""
LIMITED_S = 5.0
"""Time for which a start retries when a limit of the broker is reached, seconds: consumers and
producers of a program that just ended may still count."""


_NUMBERS = re.compile(r"\d+")


def without_numbers(text: str) -> str:
    """Return a sentence without its numbers, which may change with each attempt."""
    return _NUMBERS.sub("", text)


class RefusalTimer:
    """Outcome of the attempts of one request.

    Time is an argument, from any monotonic clock. Two errors never end the source: a retriable one,
    and a topic that does not exist, which discovery removes.
    """

    def __init__(self) -> None:
        self.error: KeyShardError | None = None
        """Error of the last attempt; ``None`` after a success."""
        self._since_s: float | None = None

    def failed(self, error: KeyShardError, now_s: float) -> bool:
        """Record a failed attempt; return whether it ends the source."""
        self.error = error
        if error.retriable or isinstance(error, TopicNotFoundError):
            self._since_s = None
            return False
        # Read once: another thread may record a success meanwhile.
        since_s = self._since_s
        if since_s is None:
            since_s = self._since_s = now_s
        patience_s = UNAUTHENTICATED_S if isinstance(error, AuthenticationError) else REFUSED_S
        return now_s - since_s >= patience_s

    def succeeded(self) -> None:
        """Record a successful attempt."""
        self.error = self._since_s = None
