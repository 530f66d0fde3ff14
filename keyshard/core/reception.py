"""When a range consumer is received from: its states, as the thread that serves it goes round.

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

    READY     lines up for its turn
    SERVED    it is its turn: what is there is received and handed over
    PAUSED    there is no room; looked at again and again
    RESTING   what it had could not be taken: nothing until a time, and then all of that again,
              from a new consumer
    IDLE      nothing was there, and its client was asked to ring: until then it is not received
              from, unless it has a new consumer

From each of them it is CLOSED. Beside that, its consumer has a connection or not
(:func:`link_of`)::

    CONNECTED --lost--> AWAY --long--> DUE --subscribed--> SUCCEEDED
        ^                 |             |                      |
        +------ back -----+-------------+                      |
        +------- its successor takes its place at its turn ----+
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto


class State(Enum):
    """Of a range consumer in the thread that serves it."""

    READY = auto()
    SERVED = auto()
    PAUSED = auto()
    RESTING = auto()
    IDLE = auto()
    CLOSED = auto()


class Event(Enum):
    """What happens to a range consumer."""

    ROOM = auto()
    """It is looked at, and there is room for what it has."""
    FULL = auto()
    """It is looked at, and there is none."""
    RESTED = auto()
    """It is looked at, its time is over, and there is room."""
    DONE = auto()
    """What it had is handed over; more may be there."""
    NOTHING = auto()
    """Nothing was there."""
    REST = auto()
    """What it had could not be taken; of who is IDLE, or was, half an entry that stays half."""
    RING = auto()
    """Its client has something, or it has a successor to take."""
    ANEW = auto()
    """It has a new consumer, to which everything unacknowledged comes again."""
    CLOSE = auto()
    """Another one, or nobody, owns its range from now on."""


TRANSITIONS: Mapping[Event, Mapping[State, State]] = {
    Event.ROOM: {State.READY: State.SERVED, State.PAUSED: State.SERVED},
    Event.FULL: {State.READY: State.PAUSED, State.PAUSED: State.PAUSED},
    Event.RESTED: {State.RESTING: State.SERVED},
    Event.DONE: {State.SERVED: State.READY},
    Event.NOTHING: {State.SERVED: State.IDLE},
    Event.REST: {
        State.SERVED: State.RESTING,
        State.IDLE: State.RESTING,
        State.READY: State.RESTING,
    },
    Event.RING: {State.IDLE: State.READY},
    Event.ANEW: {
        State.READY: State.READY,
        State.SERVED: State.SERVED,
        State.PAUSED: State.PAUSED,
        State.RESTING: State.RESTING,
        State.IDLE: State.READY,
    },
    Event.CLOSE: {state: State.CLOSED for state in State if state is not State.CLOSED},
}
"""From which state where. What is not here does not happen, but that somebody rings late."""


class Turn(Enum):
    """What the thread does with a range consumer that it looks at."""

    RECEIVE = auto()
    RECEIVE_ANEW = auto()
    """Give it a new consumer first: everything unacknowledged comes again."""
    LOOK_AGAIN = auto()
    """After a pause."""


@dataclass(frozen=True, slots=True)
class Rest:
    """An answer to what was handed over: some of it has to come again, later."""

    until_s: float
    """Time before which nothing is to be taken."""


class Reception:
    """The state of one range consumer. Time comes in as an argument, in seconds of any clock."""

    __slots__ = ("_heard_s", "_looked_s", "_rest_until_s", "_silent_from_s", "may_be_cut", "state")

    def __init__(self) -> None:
        self.state = State.READY
        self._rest_until_s = 0.0
        self._heard_s = 0.0
        self._silent_from_s: float | None = None
        self._looked_s = 0.0
        self.may_be_cut = False
        """Whether it may have reconnected since something came: it was seen without a connection,
        or nobody looked for long."""

    def turn(self, now_s: float, *, room: bool) -> Turn:
        """It is looked at."""
        if self.state is State.RESTING:
            if not room or now_s < self._rest_until_s:
                return Turn.LOOK_AGAIN
            self.tell(Event.RESTED)
            return Turn.RECEIVE_ANEW
        self.tell(Event.ROOM if room else Event.FULL)
        return Turn.RECEIVE if room else Turn.LOOK_AGAIN

    def rest(self, rest: Rest) -> bool:
        """What it had could not be taken; whether it is to be looked at again from now on."""
        self._rest_until_s = rest.until_s
        lines_up = self.state is State.READY
        self.tell(Event.REST)
        return not lines_up

    def rings(self) -> bool:
        """Its client rings; whether it lines up now, because it waited for that."""
        if self.state not in TRANSITIONS[Event.RING]:
            return False
        self.tell(Event.RING)
        return True

    def heard(self, now_s: float) -> None:
        """Something came."""
        self._heard_s = self._looked_s = now_s
        self._silent_from_s = None
        self.may_be_cut = False

    def anew(self) -> bool:
        """It has a new consumer, which was not seen connected yet; whether it lines up now."""
        self._silent_from_s = None
        idle = self.state is State.IDLE
        self.tell(Event.ANEW)
        return idle

    def is_silent(self, now_s: float, quiet_s: float, *, connected: bool) -> bool:
        """Whether nothing has come for a while in which it was seen connected; looked at often.

        The silence counts from when the consumer is seen connected: before that, a reconnect may
        have cut an entry off, and its redelivery is on the way. So it may be after a time in which
        nobody looked (:attr:`may_be_cut`).
        """
        unseen = now_s - self._looked_s > quiet_s
        self._looked_s = now_s
        self.may_be_cut = self.may_be_cut or unseen or not connected
        if not connected:
            self._silent_from_s = None
            return False
        if self._silent_from_s is None or unseen:
            self._silent_from_s = now_s
        return now_s - max(self._silent_from_s, self._heard_s) > quiet_s

    def tell(self, event: Event) -> None:
        """Something happens."""
        leads = TRANSITIONS[event]
        assert self.state in leads, f"{event} of a range consumer that is {self.state}"
        self.state = leads[self.state]


class Link(Enum):
    """Of the consumer of a range: whether it has a connection, and what is done without one."""

    CONNECTED = auto()
    AWAY = auto()
    """Its client tries to reconnect."""
    DUE = auto()
    """That takes long: another consumer is to be subscribed, as soon as the broker answers."""
    SUCCEEDED = auto()
    """Another consumer is there and takes its place at its next turn."""


def link_of(now_s: float, *, connected: bool, successor: bool, due_s: float) -> Link:
    """How it stands with the connection of a range consumer.

    Args:
        now_s: The time.
        connected: Whether its consumer is connected.
        successor: Whether another consumer is there for it.
        due_s: When another one is to be subscribed; 0: it was connected when last seen.
    """
    if successor:
        return Link.SUCCEEDED
    if connected:
        return Link.CONNECTED
    return Link.DUE if due_s and now_s >= due_s else Link.AWAY
