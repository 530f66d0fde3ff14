"""Decides when a silent broker is pinged, counts as unresponsive, and is given up."""

from __future__ import annotations

from enum import Enum, auto

KEEP_ALIVE_S = 30.0
"""Half of the silence after which the connection ends, seconds."""
PING_AFTER_S = 3.0
"""Silence after which the broker is sent a ping, seconds."""
UNRESPONSIVE_S = 5.0
"""Time without an answer to a ping after which the broker counts as unresponsive, seconds."""


class Act(Enum):
    """Reaction to the silence of a broker."""

    NOTHING = auto()
    PING = auto()
    UNRESPONSIVE = auto()
    """Report it. The connection stays open, because the broker may still answer."""
    GIVE_UP = auto()


class KeepAlive:
    """Tracks the silence of one broker. Time is an argument, from any monotonic clock.

    Args:
        now_s: When the connection began.
    """

    def __init__(self, now_s: float) -> None:
        self.received_s = now_s
        """When data last arrived."""
        self.pinged_s: float | None = None
        """When the unanswered ping was sent; ``None`` if there is none."""
        self.responds = True

    def received(self, now_s: float) -> None:
        """Record that data arrived."""
        self.received_s, self.pinged_s, self.responds = now_s, None, True

    def unanswered_s(self, now_s: float) -> float:
        """Return for how long an unresponsive broker has not answered a ping; 0 if it answers."""
        pinged_s = self.pinged_s
        return 0.0 if self.responds or pinged_s is None else now_s - pinged_s

    def due_s(self) -> float:
        """Return the latest time for the next call of :meth:`look` if no data arrives."""
        end_s = self.received_s + 2 * KEEP_ALIVE_S
        if self.pinged_s is None:
            return self.received_s + min(PING_AFTER_S, KEEP_ALIVE_S)
        return min(self.pinged_s + UNRESPONSIVE_S, end_s) if self.responds else end_s

    def look(self, now_s: float) -> Act:
        """Return the due act, and count it as done."""
        if now_s - self.received_s >= 2 * KEEP_ALIVE_S:
            return Act.GIVE_UP
        if self.pinged_s is None:
            if now_s - self.received_s < min(PING_AFTER_S, KEEP_ALIVE_S):
                return Act.NOTHING
            self.pinged_s = now_s
            return Act.PING
        if not self.responds or now_s - self.pinged_s < UNRESPONSIVE_S:
            return Act.NOTHING
        self.responds = False
        return Act.UNRESPONSIVE
