"""The states of a range consumer, in the thread that receives from it.

::

               ROOM             NOTHING
    READY ------------> SERVED ---------> IDLE
    ^ ^ |               | | ^             | |
    | | | FULL     DONE | | | RESTED      | |
    | +-|---------------+ | |             | |
    |   v            REST v |      REST   | |
    | PAUSED            RESTING <---------+ |
    |   +--ROOM--> SERVED                   |
       +----------------- RING, ANEW ----------+

    READY     waits for its turn
    SERVED    it is its turn: the thread receives from it and hands the entries over
    PAUSED    there is no room; the thread checks again and again
    RESTING   its entries could not be taken; after a time, a new consumer receives
              all of them again
    IDLE      it had no message, and its client was asked to wake it; until then the
              thread does not receive from it, unless it has a new consumer

CLOSED can follow any state. Independently, its consumer is connected or not (:func:`link_of`)::

    CONNECTED --lost--> AWAY --long--> DUE --subscribed--> SUCCEEDED
        ^                 |             |                      |
        +------ back -----+-------------+                      |
        +------- its successor takes its place at its turn ----+
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto


class ReceiveState(Enum):
    """State of a range consumer in the thread that receives from it."""

    READY = auto()
    SERVED = auto()
    PAUSED = auto()
    RESTING = auto()
    IDLE = auto()
    CLOSED = auto()


class ReceiveEvent(Enum):
    """Event of a range consumer."""

    ROOM = auto()
    """It is its turn, and the window has room."""
    FULL = auto()
    """It is its turn, and the window has no room."""
    RESTED = auto()
    """It is its turn, its rest is over, and the window has room."""
    DONE = auto()
    """Its entries are delivered; there may be more."""
    NOTHING = auto()
    """It had no message."""
    REST = auto()
    """Its entries could not be taken; or, if it is or was IDLE, half of an entry stays
    incomplete."""
    RING = auto()
    """Its client or a successor wakes it: there are messages, or a new consumer."""
    ANEW = auto()
    """It has a new consumer, which receives everything unacknowledged again."""
    CLOSE = auto()
    """Its range has another owner, or none."""


TRANSITIONS: Mapping[ReceiveEvent, Mapping[ReceiveState, ReceiveState]] = {
    ReceiveEvent.ROOM: {
        ReceiveState.READY: ReceiveState.SERVED,
        ReceiveState.PAUSED: ReceiveState.SERVED,
    },
    ReceiveEvent.FULL: {
        ReceiveState.READY: ReceiveState.PAUSED,
        ReceiveState.PAUSED: ReceiveState.PAUSED,
    },
    ReceiveEvent.RESTED: {ReceiveState.RESTING: ReceiveState.SERVED},
    ReceiveEvent.DONE: {ReceiveState.SERVED: ReceiveState.READY},
    ReceiveEvent.NOTHING: {ReceiveState.SERVED: ReceiveState.IDLE},
    ReceiveEvent.REST: {
        ReceiveState.SERVED: ReceiveState.RESTING,
        ReceiveState.IDLE: ReceiveState.RESTING,
        ReceiveState.READY: ReceiveState.RESTING,
    },
    ReceiveEvent.RING: {ReceiveState.IDLE: ReceiveState.READY},
    ReceiveEvent.ANEW: {
        ReceiveState.READY: ReceiveState.READY,
        ReceiveState.SERVED: ReceiveState.SERVED,
        ReceiveState.PAUSED: ReceiveState.PAUSED,
        ReceiveState.RESTING: ReceiveState.RESTING,
        ReceiveState.IDLE: ReceiveState.READY,
    },
    ReceiveEvent.CLOSE: {
        state: ReceiveState.CLOSED for state in ReceiveState if state is not ReceiveState.CLOSED
    },
}
"""Next state by state and event. Other pairs do not occur, except for a late RING."""


class Turn(Enum):
    """Action of the thread at the turn of a range consumer."""

    RECEIVE = auto()
    RECEIVE_ANEW = auto()
    """Subscribe a new consumer first: everything unacknowledged is redelivered."""
    LOOK_AGAIN = auto()
    """Check again after a pause."""


@dataclass(frozen=True, slots=True)
class Rest:
    """Answer to handed-over entries: some must be redelivered later."""

    until_s: float
    """Time before which no entry can be taken."""


class Receiving:
    """The state of one range consumer. Time is an argument, in seconds of any clock."""

    __slots__ = (
        "_looked_s",
        "_received_s",
        "_rest_until_s",
        "_silent_from_s",
        "may_be_cut",
        "state",
    )

    def __init__(self) -> None:
        self.state = ReceiveState.READY
        self._rest_until_s = 0.0
        self._received_s = 0.0
        self._silent_from_s: float | None = None
        self._looked_s = 0.0
        self.may_be_cut = False
        """Whether it may have reconnected since the last message: it was seen disconnected, or
        was not checked for long."""

    def turn(self, now_s: float, *, room: bool) -> Turn:
        """Choose the action at its turn."""
        if self.state is ReceiveState.RESTING:
            if not room or now_s < self._rest_until_s:
                return Turn.LOOK_AGAIN
            self.apply(ReceiveEvent.RESTED)
            return Turn.RECEIVE_ANEW
        self.apply(ReceiveEvent.ROOM if room else ReceiveEvent.FULL)
        return Turn.RECEIVE if room else Turn.LOOK_AGAIN

    def rest(self, rest: Rest) -> bool:
        """Record that entries of the range consumer could not be taken.

        Returns:
            Whether the thread must check from now on whether the rest is over. A range consumer
            that was READY has its turn anyway.
        """
        self._rest_until_s = rest.until_s
        lines_up = self.state is ReceiveState.READY
        self.apply(ReceiveEvent.REST)
        return not lines_up

    def rings(self) -> bool:
        """Record a wake-up by the client or a successor; return whether it made this READY."""
        if self.state not in TRANSITIONS[ReceiveEvent.RING]:
            return False
        self.apply(ReceiveEvent.RING)
        return True

    def received(self, now_s: float) -> None:
        """Record that a message came."""
        self._received_s = self._looked_s = now_s
        self._silent_from_s = None
        self.may_be_cut = False

    def anew(self) -> bool:
        """Record a new consumer, not yet seen connected; return whether it is READY now."""
        self._silent_from_s = None
        idle = self.state is ReceiveState.IDLE
        self.apply(ReceiveEvent.ANEW)
        return idle

    def is_silent(self, now_s: float, quiet_s: float, *, connected: bool) -> bool:
        """Return whether no message has come for a while in which it was seen connected.

        The thread calls this often. The silence counts from when the consumer is seen connected.
        Before that, a reconnect may have cut an entry off, and its redelivery is under way. The
        same holds after a time without checks (:attr:`may_be_cut`).
        """
        unseen = now_s - self._looked_s > quiet_s
        self._looked_s = now_s
        self.may_be_cut = self.may_be_cut or unseen or not connected
        if not connected:
            self._silent_from_s = None
            return False
        if self._silent_from_s is None or unseen:
            self._silent_from_s = now_s
        return now_s - max(self._silent_from_s, self._received_s) > quiet_s

    def apply(self, event: ReceiveEvent) -> None:
        """Apply an event."""
        leads = TRANSITIONS[event]
        assert self.state in leads, f"{event} of a range consumer that is {self.state}"
        self.state = leads[self.state]


class Link(Enum):
    """Connection state of a range's consumer, and the reaction to a loss."""

    CONNECTED = auto()
    AWAY = auto()
    """Its client tries to reconnect."""
    DUE = auto()
    """The reconnect takes long: subscribe another consumer as soon as the broker answers."""
    SUCCEEDED = auto()
    """Another consumer is subscribed, and takes over at the next turn."""


def link_of(now_s: float, *, connected: bool, successor: bool, due_s: float) -> Link:
    """Return the connection state of a range consumer.

    Args:
        now_s: The time.
        connected: Whether its consumer is connected.
        successor: Whether another consumer is subscribed for it.
        due_s: Time at which to subscribe another one; 0: it was connected when last checked.
    """
    if successor:
        return Link.SUCCEEDED
    if connected:
        return Link.CONNECTED
    return Link.DUE if due_s and now_s >= due_s else Link.AWAY
