"""Time for which a refused request is retried, before the refusal ends the source."""

from __future__ import annotations

import re

from keyshard.errors import AuthenticationError, KeyShardError, TopicNotFoundError

REFUSED_S = 5.0
"""Time for which the broker refuses, without a reason that passes by itself, seconds."""
UNAUTHENTICATED_S = 30.0
"""The same where it does not accept the credentials, seconds: a token may be renewed meanwhile."""


_NUMBERS = re.compile(r"\d+")


def words_of(text: str) -> str:
    """A sentence without its numbers, which may change with each attempt."""
    return _NUMBERS.sub("", text)


class Refusals:
    """Outcome of the attempts of one request.

    Time is an argument, from any monotonic clock. An error that is retriable never ends anything,
    nor does a topic that does not exist: discovery lets go of it.
    """

    def __init__(self) -> None:
        self.error: KeyShardError | None = None
        """Why the last attempt failed; ``None`` after one that succeeded."""
        self._since_s: float | None = None

    def failed(self, error: KeyShardError, now_s: float) -> bool:
        """An attempt failed; whether that ends the source."""
        self.error = error
        if error.retriable or isinstance(error, TopicNotFoundError):
            self._since_s = None
            return False
        # Read once: another thread may tell of a success meanwhile.
        since_s = self._since_s
        if since_s is None:
            since_s = self._since_s = now_s
        patience_s = UNAUTHENTICATED_S if isinstance(error, AuthenticationError) else REFUSED_S
        return now_s - since_s >= patience_s

    def succeeded(self) -> None:
        """An attempt succeeded."""
        self.error = self._since_s = None
