"""When a silent broker is asked whether it is there, counts as unresponsive, and is given up."""

from __future__ import annotations

from enum import Enum, auto

KEEP_ALIVE_S = 30.0
"""The connection ends after twice as much silence, seconds."""
PING_AFTER_S = 3.0
"""Silence after which the broker is sent a ping, seconds."""
UNRESPONSIVE_S = 5.0
"""Time without an answer to that after which the broker counts as unresponsive, seconds."""


class Act(Enum):
    """Reaction to the silence of a broker."""

    NOTHING = auto()
    PING = auto()
    UNRESPONSIVE = auto()
    """Say so; the connection stays, for the broker may answer yet."""
    GIVE_UP = auto()


class KeepAlive:
    """Silence of one broker. Time is an argument, from any monotonic clock.

    Args:
        now_s: When the connection began.
    """

    def __init__(self, now_s: float) -> None:
        self.heard_s = now_s
        """When the broker was heard last."""
        self.pinged_s: float | None = None
        """When a ping was sent that has no answer yet."""
        self.responds = True

    def heard(self, now_s: float) -> None:
        """Something came, whatever it is."""
        self.heard_s, self.pinged_s, self.responds = now_s, None, True

    def due_s(self) -> float:
        """When :meth:`look` is to be called, if nothing comes before."""
        end_s = self.heard_s + 2 * KEEP_ALIVE_S
        if self.pinged_s is None:
            return self.heard_s + min(PING_AFTER_S, KEEP_ALIVE_S)
        return min(self.pinged_s + UNRESPONSIVE_S, end_s) if self.responds else end_s

    def look(self, now_s: float) -> Act:
        """The act that is due now; it counts as done from here on."""
        if now_s - self.heard_s >= 2 * KEEP_ALIVE_S:
            return Act.GIVE_UP
        if self.pinged_s is None:
            if now_s - self.heard_s < min(PING_AFTER_S, KEEP_ALIVE_S):
                return Act.NOTHING
            self.pinged_s = now_s
            return Act.PING
        if not self.responds or now_s - self.pinged_s < UNRESPONSIVE_S:
            return Act.NOTHING
        self.responds = False
        return Act.UNRESPONSIVE
