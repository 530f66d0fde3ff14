"""How a key gets out of the dead-letter topic: the states of parked keys in a running source.

::

               PARK               UNPARK               DRAINED                RELEASED
    (handled) ------> PARKED ---------------> DRAINING ---------> REPLAYING ------------> (handled)
                         ^                                            |
                         +---------------- FAILED_AGAIN --------------+

    PARKED, DRAINING   newer messages of the key become letters, one after the other;
                       older ones than its first letter pass before it (:class:`Course`)
    REPLAYING          its letters run in its lane, newer messages wait behind

From PARKED and DRAINING, too, a key is RELEASED: when its letters were given up, or lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from itertools import islice

from keyshard.core.dead_letter.parked import Parked
from keyshard.core.dead_letter.parked_key import ParkedKey
from keyshard.core.message import MessageId
from keyshard.core.position.entry import EntryId, TopicPartition


class State(Enum):
    """Of a parked key in a running source."""

    PARKED = auto()
    DRAINING = auto()
    REPLAYING = auto()


class Event(Enum):
    """What happens to a key."""

    PARK = auto()
    """A message of it failed too often, or waits behind one: it becomes a letter."""
    UNPARK = auto()
    """Somebody lets it out."""
    DRAINED = auto()
    """Nothing of it runs, and every letter of it is confirmed."""
    FAILED_AGAIN = auto()
    """A letter failed too often: it and the rest stay."""
    RELEASED = auto()
    """No letter of it rests, and none is on its way."""


TRANSITIONS: Mapping[Event, Mapping[State | None, State | None]] = {
    Event.PARK: {
        None: State.PARKED,
        State.PARKED: State.PARKED,
        State.DRAINING: State.DRAINING,
        State.REPLAYING: State.REPLAYING,
    },
    Event.UNPARK: {State.PARKED: State.DRAINING},
    Event.DRAINED: {State.DRAINING: State.REPLAYING},
    Event.FAILED_AGAIN: {State.REPLAYING: State.PARKED},
    Event.RELEASED: {State.PARKED: None, State.DRAINING: None, State.REPLAYING: None},
}
"""From which state where; ``None``: the key is not parked. What is not here does not happen."""


class Course(Enum):
    """What to do with a message."""

    HANDLE = auto()
    """Its key is not parked, or it is older than the first letter of its topic partition."""
    HANDLE_AGAIN = auto()
    """The same, and newer letters of its key are done: they run again behind it, if they come
    again, and that must be written down first."""
    LETTER = auto()
    """It waits behind a letter, so it becomes one."""
    DONE = auto()
    """It is a letter, or was one and is done."""


class Parking:
    """The parked keys of a running source, and those on their way out.

    Args:
        parked: What the dead-letter topic says.
    """

    def __init__(self, parked: Parked) -> None:
        self.parked = parked
        self._states = dict.fromkeys(parked.keys, State.PARKED)

    def __len__(self) -> int:
        return len(self._states)

    def state(self, key: str | None) -> State | None:
        """State of a key; ``None`` when it is not parked."""
        return None if key is None else self._states.get(key)

    def states(self) -> Mapping[str, State]:
        """All keys that are parked."""
        return dict(self._states)

    def some(self, count_max: int) -> list[tuple[str, int]]:
        """Keys that have been parked longest, and how many letters of each rest."""
        keys = self.parked.keys
        return [
            (key, keys[key].count if key in keys else 0)
            for key in islice(self._states, count_max)
        ]  # fmt: skip

    def matching(self, among: Sequence[str], wanted: Callable[[str, ParkedKey], bool]) -> list[str]:
        """Those of some keys that are parked and meant; keys on their way out are left to it."""
        keys, states = self.parked.keys, self._states
        return [
            key
            for key in among
            if states.get(key) is State.PARKED and key in keys and wanted(key, keys[key])
        ]

    def course(self, key: str, where: TopicPartition, message_id: MessageId) -> Course:
        """What to do with a message of a key that was received."""
        if self.parked.done.has(key, where, message_id):
            return Course.DONE
        if key not in self._states:
            return Course.HANDLE
        parked = self.parked.keys.get(key)
        if parked is None:
            return Course.LETTER
        if parked.position(where, message_id) is not None:
            return Course.DONE
        first = parked.first(where)
        return Course.HANDLE if first is not None and message_id < first else Course.LETTER

    def begins(self, key: str, where: TopicPartition, message_id: MessageId) -> Course:
        """The same, for a message that is begun now."""
        course, done = self.course(key, where, message_id), self.parked.done
        if course is not Course.HANDLE:
            return course
        if done.behind(key, where, message_id):
            return Course.HANDLE_AGAIN
        done.runs(key, where, message_id)
        return Course.HANDLE

    def park(self, key: str) -> None:
        """A message of the key failed too often: it, and all later ones, become letters."""
        self._tell(key, Event.PARK)

    def unpark(self, key: str) -> bool:
        """Ask for a key to be let out; ``False`` when it is not parked, or is on its way."""
        if self.state(key) not in TRANSITIONS[Event.UNPARK]:
            return False
        self._tell(key, Event.UNPARK)
        return True

    def drained(self, key: str) -> list[EntryId]:
        """Nothing of a draining key runs and every letter of it is confirmed.

        Returns:
            Positions of the letters to replay, in order; what comes now is no letter any more.
            Empty when there is none, and then the key is released.
        """
        parked = self.parked.keys.get(key)
        assert self.state(key) in TRANSITIONS[Event.DRAINED]
        self._tell(key, Event.RELEASED if parked is None else Event.DRAINED)
        return [] if parked is None else parked.in_order()

    def replayed(
        self, position: EntryId, key: str, where: TopicPartition, message_id: MessageId
    ) -> None:
        """A marker is confirmed; the last one releases its key, unless letters are on their way."""
        state = self._states[key]
        assert state is not State.PARKED
        self.parked.replayed(position, key, where, message_id)
        if key not in self.parked.keys and state is State.REPLAYING:
            self._tell(key, Event.RELEASED)

    def emptied(self, key: str) -> None:
        """No letter of a key is on its way; without one that rests it is released."""
        if self._states.get(key) is State.PARKED and key not in self.parked.keys:
            self._tell(key, Event.RELEASED)

    def failed_again(self, key: str) -> None:
        """A letter failed too often: the key is parked, this letter and the rest stay."""
        self._tell(key, Event.FAILED_AGAIN)

    def validate(self) -> None:
        """Assert the invariants; tests call it after every step."""
        self.parked.validate()
        assert self.parked.keys.keys() <= self._states.keys(), "a key with letters is not parked"

    def _tell(self, key: str, event: Event) -> None:
        before, leads = self._states.get(key), TRANSITIONS[event]
        assert before in leads, f"{event} of a key that is {before}"
        after = leads[before]
        if after is not None:
            self._states[key] = after
        else:
            del self._states[key]
