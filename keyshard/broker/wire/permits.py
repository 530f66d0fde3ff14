"""Counts permits: how many messages a broker may send ahead, and when to grant more."""

from __future__ import annotations

GRANT_MAX = 2**31 - 1
"""Maximum permits of one grant. A broker refuses more, and ends the connection."""
LENT_MAX = 8
"""Permits beyond its queue that a silent broker may get; one nudge may not be enough."""


class Permits:
    """The permits of one subscription, in messages as the broker counts them.

    Args:
        ahead: Messages that the broker may send ahead.
    """

    def __init__(self, ahead: int) -> None:
        self.ahead = self.ahead_max = ahead
        self._used = 0
        """Taken messages whose permits were not granted again. Negative: messages that the broker
        may send beyond ``ahead``, because permits were lent, because ``ahead`` shrank, or because a
        producer batch declared a negative count."""
        self._lent = 0
        """Maximum number of such messages whose permits were lent."""

    def begin(self) -> int:
        """Reset for a new subscription, and return its first grant."""
        self._used = self._lent = 0
        return self.ahead

    def use(self, messages: int) -> int:
        """Return the permits to grant for taken messages; 0 until they are half of the queue.

        Args:
            messages: Their number, as the broker counts them.
        """
        # The broker counts in signed 32 bits, and trusts the counts that producer batches declare.
        held = (self.held - messages + 2**31) % 2**32 - 2**31
        self._used = self.ahead - held
        if 2 * self._used < self.ahead:
            return 0
        granted, self._used = self._used, 0
        return granted

    @property
    def held(self) -> int:
        """Permits that the broker still has, by its own count."""
        return self.ahead - self._used

    def resize(self, ahead: int) -> None:
        """Set how many messages may be sent ahead. The next use grants an increase.

        Permits cannot be revoked; a decrease takes effect as they are used.
        """
        self._used += ahead - self.ahead
        self.ahead = ahead
        self.ahead_max = max(self.ahead_max, ahead)

    def nudge(self) -> int:
        """Return the permits to grant to a silent broker, which may have stopped dispatching.

        Only a grant wakes the dispatcher. If no permits are owed, one is lent, and subtracted from
        later grants. Returns 0 if nothing may be lent.
        """
        self._lent = min(self._lent, max(0, -self._used))
        if self._lent >= LENT_MAX:
            return 0
        granted = max(1, self._used)
        if self._used <= 0:
            self._lent += granted
        self._used -= granted
        return granted
