"""How many messages a broker may send ahead, and when it is told of more."""

from __future__ import annotations

GRANT_MAX = 2**31 - 1
"""Most messages of one grant: a broker refuses more, and ends the connection."""
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
        """Messages taken that the broker has not been told of; below 0: what it may send beyond
        ``ahead``, because that was lent, has become smaller since, or because a batch declared
        fewer than no messages."""
        self._lent = 0
        """Most of that which was lent."""

    def begin(self) -> int:
        """What a new subscription gets."""
        self._used = self._lent = 0
        return self.ahead

    def use(self, messages: int) -> int:
        """What to grant for messages that were taken; 0 until they are half of the queue.

        Args:
            messages: How many, as the broker counts them.
        """
        # The broker counts in 32 bits with a sign, also what a batch only declares.
        held = (self.held - messages + 2**31) % 2**32 - 2**31
        self._used = self.ahead - held
        if 2 * self._used < self.ahead:
            return 0
        granted, self._used = self._used, 0
        return granted

    @property
    def held(self) -> int:
        """Messages that the broker may still send, as it counts them."""
        return self.ahead - self._used

    def resize(self, ahead: int) -> None:
        """Let so many messages be sent ahead from now on; the next use grants what is more.

        Permits that were granted stay: they are used up first.
        """
        self._used += ahead - self.ahead
        self.ahead = ahead
        self.ahead_max = max(self.ahead_max, ahead)

    def nudge(self) -> int:
        """What to grant a broker that is silent, which may have forgotten to go on; 0 for nothing.

        It minds nothing but a grant: what was used, or where nothing was, one message more, which
        is subtracted from what is used later.
        """
        self._lent = min(self._lent, max(0, -self._used))
        if self._lent >= LENT_MAX:
            return 0
        granted = max(1, self._used)
        if self._used <= 0:
            self._lent += granted
        self._used -= granted
        return granted
