"""How many messages a broker may send ahead, and when it is told of more."""

from __future__ import annotations

LENT_MAX = 8
"""Messages beyond its queue that a silent broker may be given: it may need more than one word."""


class Permits:
    """Those of one subscription; counted in messages, as the broker counts them.

    Args:
        ahead: Messages that may be sent ahead.
    """

    def __init__(self, ahead: int) -> None:
        self.ahead = self.ahead_max = ahead
        self._used = 0
        """Messages taken that the broker has not been told of; below 0: what was lent."""

    def begin(self) -> int:
        """What a new subscription gets."""
        self._used = 0
        return self.ahead

    def use(self, messages: int, ahead: int | None = None) -> int:
        """What to grant for messages that were taken; 0 until they are half of the queue.

        Args:
            messages: How many.
            ahead: Messages that may be sent ahead from now on; ``None``: as many as before.
        """
        self._used += messages
        if ahead is not None:
            # What was asked for stays asked for: it is used up first.
            self._used += ahead - self.ahead
            self._set(ahead)
        if 2 * self._used < self.ahead:
            return 0
        granted, self._used = self._used, 0
        return granted

    def grow(self, ahead: int) -> int:
        """What to grant so that so many more may be sent ahead."""
        more = ahead - self.ahead
        self._set(ahead)
        return more

    def nudge(self) -> int:
        """What to grant a broker that is silent, which may have forgotten to go on; 0 for nothing.

        It minds nothing but a grant: what was used, or where nothing was, one message more, which
        is subtracted from what is used later.
        """
        if -self._used >= LENT_MAX:
            return 0
        granted = max(1, self._used)
        self._used -= granted
        return granted

    def _set(self, ahead: int) -> None:
        self.ahead = ahead
        self.ahead_max = max(self.ahead_max, ahead)
