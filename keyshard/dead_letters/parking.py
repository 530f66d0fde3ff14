"""States of parked keys in a running source.

::

               PARK               UNPARK               DRAINED                RELEASED
    (handled) ------> PARKED ---------------> DRAINING ---------> REPLAYING ------------> (handled)
                         ^                                            |
                         +---------------- FAILED_AGAIN --------------+

    PARKED, DRAINING   newer messages of the key become dead letters, one after the other;
                       messages older than its first dead letter are handled (:class:`Action`)
    REPLAYING          its dead letters run in its lane; newer messages wait until they are done

A key is also RELEASED from PARKED and DRAINING, when its dead letters were discarded or lost.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from enum import Enum, auto
from itertools import islice

from keyshard.core.dead_letter_filter import DeadLetterFilter
from keyshard.core.message import MessageId
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.dead_letters.parked_key import ParkedKey
from keyshard.dead_letters.topic_state import TopicState


class ParkingState(Enum):
    """State of a parked key in a running source."""

    PARKED = auto()
    DRAINING = auto()
    REPLAYING = auto()


class ParkingEvent(Enum):
    """An event that changes the state of a key."""

    PARK = auto()
    """A message of the key becomes a dead letter: it failed too often, or comes after one."""
    UNPARK = auto()
    """A user unparks the key."""
    DRAINED = auto()
    """No message of the key runs, and every dead letter of it is confirmed."""
    FAILED_AGAIN = auto()
    """A dead letter failed too often in its replay. It and the later ones rest."""
    RELEASED = auto()
    """No dead letter of the key rests, and none is in flight."""


TRANSITIONS: Mapping[ParkingEvent, Mapping[ParkingState | None, ParkingState | None]] = {
    ParkingEvent.PARK: {
        None: ParkingState.PARKED,
        ParkingState.PARKED: ParkingState.PARKED,
        ParkingState.DRAINING: ParkingState.DRAINING,
        ParkingState.REPLAYING: ParkingState.REPLAYING,
    },
    ParkingEvent.UNPARK: {ParkingState.PARKED: ParkingState.DRAINING},
    ParkingEvent.DRAINED: {ParkingState.DRAINING: ParkingState.REPLAYING},
    ParkingEvent.FAILED_AGAIN: {ParkingState.REPLAYING: ParkingState.PARKED},
    ParkingEvent.RELEASED: {
        ParkingState.PARKED: None,
        ParkingState.DRAINING: None,
        ParkingState.REPLAYING: None,
    },
}
"""State after each event, by the state before; ``None``: not parked. Others are impossible."""


class Action(Enum):
    """The next step of a message."""

    HANDLE = auto()
    """Its key is not parked, or it is older than the first dead letter of its topic partition or
    scalable topic."""
    HANDLE_AGAIN = auto()
    """As HANDLE, but newer dead letters of its key are done. If their originals are redelivered,
    handlers must get them again after this message. First a note of that must be written."""
    DEAD_LETTER = auto()
    """It comes after a dead letter of its key, so it becomes one."""
    DONE = auto()
    """Its dead letter rests or is done, so no handler may get it."""


class Parking:
    """The parked keys of a running source, and keys that are being unparked.

    Args:
        parked: State of the dead-letter topic.
    """

    def __init__(self, parked: TopicState) -> None:
        self.parked = parked
        self._states = dict.fromkeys(parked.keys, ParkingState.PARKED)

    def __len__(self) -> int:
        return len(self._states)

    def state(self, key: str | None) -> ParkingState | None:
        """Return the state of a key; ``None`` if it is not parked."""
        return None if key is None else self._states.get(key)

    def states(self) -> Mapping[str, ParkingState]:
        """Return the states of all parked keys."""
        return dict(self._states)

    def some(self, count_max: int) -> list[tuple[str, int]]:
        """Return the keys parked longest, with the number of their resting dead letters."""
        keys = self.parked.keys
        return [
            (key, keys[key].count if key in keys else 0)
            for key in islice(self._states, count_max)
        ]  # fmt: skip

    def resting(self, among: Iterable[str]) -> dict[str, ParkedKey]:
        """Return those of some keys that are parked and not being unparked."""
        keys, states = self.parked.keys, self._states
        return {
            key: keys[key]
            for key in among
            if states.get(key) is ParkingState.PARKED and key in keys
        }

    def action(self, key: str, where: TopicPartition, message_id: MessageId) -> Action:
        """Decide what to do with a received message of a key."""
        if self.parked.done.has(key, where, message_id):
            return Action.DONE
        if key not in self._states:
            return Action.HANDLE
        parked = self.parked.keys.get(key)
        if parked is None:
            return Action.DEAD_LETTER
        if parked.position(where, message_id) is not None:
            return Action.DONE
        return Action.HANDLE if parked.begins_after(where, message_id) else Action.DEAD_LETTER

    def start(self, key: str, where: TopicPartition, message_id: MessageId) -> Action:
        """Decide as :meth:`action`, for a message that a handler gets next if it may.

        If the action is HANDLE, note that the message runs. If newer dead letters of its key are
        done, return HANDLE_AGAIN instead.
        """
        action, done = self.action(key, where, message_id), self.parked.done
        if action is not Action.HANDLE:
            return action
        if done.behind(key, where, message_id):
            return Action.HANDLE_AGAIN
        done.runs(key, where, message_id)
        return Action.HANDLE

    def park(self, key: str) -> None:
        """Park a key: a failed message of it, and all later ones, become dead letters."""
        self._apply(key, ParkingEvent.PARK)

    def unpark(self, key: str) -> bool:
        """Start to unpark a key; ``False`` if it is not parked, or is being unparked already."""
        if self.state(key) not in TRANSITIONS[ParkingEvent.UNPARK]:
            return False
        self._apply(key, ParkingEvent.UNPARK)
        return True

    def drained(self, key: str) -> list[EntryId]:
        """Start the replay of a draining key, whose messages now become no more dead letters.

        The caller ensures that no message of the key runs, and that its dead letters are confirmed.

        Returns:
            Positions of the dead letters to replay, in order. If there are none, the key is
            released.
        """
        parked = self.parked.keys.get(key)
        assert self.state(key) in TRANSITIONS[ParkingEvent.DRAINED]
        self._apply(key, ParkingEvent.RELEASED if parked is None else ParkingEvent.DRAINED)
        return [] if parked is None else parked.in_order()

    def replayed(
        self, position: EntryId, key: str, where: TopicPartition, message_id: MessageId
    ) -> None:
        """Note a confirmed marker; the last one releases its key if no dead letter is pending."""
        state = self._states[key]
        assert state is not ParkingState.PARKED
        self.parked.replayed(position, key, where, message_id)
        if key not in self.parked.keys and state is ParkingState.REPLAYING:
            self._apply(key, ParkingEvent.RELEASED)

    def emptied(self, key: str) -> None:
        """Release a parked key if no dead letter of it rests; none may be in flight."""
        if self._states.get(key) is ParkingState.PARKED and key not in self.parked.keys:
            self._apply(key, ParkingEvent.RELEASED)

    def failed_again(self, key: str) -> None:
        """Park a key again after a dead letter failed too often. It and the later ones rest."""
        self._apply(key, ParkingEvent.FAILED_AGAIN)

    def validate(self) -> None:
        """Assert the invariants; tests call it after every step."""
        self.parked.validate()
        assert self.parked.keys.keys() <= self._states.keys(), "a dead letter has no parked key"

    def _apply(self, key: str, event: ParkingEvent) -> None:
        before, leads = self._states.get(key), TRANSITIONS[event]
        assert before in leads, f"{event} of a key that is {before}"
        after = leads[before]
        if after is not None:
            self._states[key] = after
        else:
            del self._states[key]


# -- The parked keys, for many threads: memory only, without waits ---------------------------------

LOOKED_AT_ONCE = 1_000
"""Keys that are examined while the lock is held."""


class ParkedKeys:
    """The parked keys and their states, under one lock.

    Args:
        parked: State of the dead-letter topic.
    """

    def __init__(self, parked: TopicState) -> None:
        self.parking = Parking(parked)
        self.lock = threading.Condition()
        """Guards :attr:`parking`; notified when something is confirmed."""

    def __len__(self) -> int:
        return len(self.parking)

    @property
    def malformed(self) -> int:
        """Number of malformed dead letters and markers found at the start. Takes no lock."""
        return len(self.parking.parked.malformed)

    @property
    def matter(self) -> bool:
        """Whether a key is parked or a dead letter done. If not, every message is handled.

        Takes no lock.
        """
        return bool(len(self.parking) or self.parking.parked.done)

    def state(self, key: str) -> ParkingState | None:
        """Return the state of a key; ``None`` if it is not parked. Takes no lock."""
        return self.parking.state(key)

    def some(self, count_max: int) -> list[tuple[str, int]]:
        """Return the keys parked longest, with the number of their resting dead letters."""
        with self.lock:
            return self.parking.some(count_max)

    def action(self, key: str, where: TopicPartition, message_id: MessageId) -> Action:
        """Decide what to do with a received message of a key."""
        with self.lock:
            return self.parking.action(key, where, message_id)

    def start(self, key: str, where: TopicPartition, message_id: MessageId) -> Action:
        """Decide as :meth:`Parking.start`, for a message that a handler gets next if it may."""
        with self.lock:
            return self.parking.start(key, where, message_id)

    def matching(self, wanted: DeadLetterFilter) -> dict[str, list[EntryId]]:
        """Return the positions of the dead letters of matching keys and topics, by parked key.

        Keys that are being unparked are left out. The lock is held only briefly, even for many
        keys.
        """
        with self.lock:
            keys = list(self.parking.states()) if wanted.key is None else [wanted.key]
        found: dict[str, list[EntryId]] = {}
        for at in range(0, len(keys), LOOKED_AT_ONCE):
            with self.lock:
                for key, parked in self.parking.resting(keys[at : at + LOOKED_AT_ONCE]).items():
                    positions = [
                        position
                        for where, _, position in parked.dead_letters()
                        if wanted.matches_place(key, where.topic)
                    ]
                    if positions:
                        found[key] = positions
        return found

    def counts(self, keys: Iterable[str]) -> dict[str, int]:
        """Count the dead letters of those keys that are parked and not being unparked."""
        with self.lock:
            return {key: one.count for key, one in self.parking.resting(keys).items()}

    def position(self, key: str, where: TopicPartition, message_id: MessageId) -> EntryId | None:
        """Return the position of the dead letter of an original; ``None`` if none rests."""
        with self.lock:
            parked = self.parking.parked.keys.get(key)
            return None if parked is None else parked.position(where, message_id)

    def positions_of(self, message_id: MessageId) -> list[EntryId]:
        """Return the positions of the dead letters of originals with this id, in any topic."""
        with self.lock:
            return [
                position
                for parked in self.parking.parked.keys.values()
                for position in parked.positions_of(message_id)
            ]

    def span(self, key: str | None) -> tuple[EntryId, EntryId | None] | None:
        """Return the first position of resting dead letters, and the last; ``None``: none rests.

        Args:
            key: Only of this key. Without a key, the last position is not known, so it is ``None``.
        """
        with self.lock:
            if key is None:
                oldest = self.parking.parked.oldest
                return None if oldest is None else (oldest, None)
            parked = self.parking.parked.keys.get(key)
            if parked is None:
                return None
            return min(position for _, _, position in parked.dead_letters()), parked.last

    def unpark(self, key: str) -> bool:
        """Start to unpark a key; ``False`` if it is not parked, or is being unparked already."""
        with self.lock:
            return self.parking.unpark(key)

    def emptied(self, key: str) -> None:
        """Release a parked key if no dead letter of it rests; none may be in flight."""
        with self.lock:
            self.parking.emptied(key)

    def is_first(self, key: str, position: EntryId) -> bool:
        """Whether a key is draining and a position is that of its first resting dead letter."""
        with self.lock:
            parked = self.parking.parked.keys.get(key)
            draining = self.parking.state(key) is ParkingState.DRAINING
            return draining and parked is not None and parked.first_in_order() == position

    def first_position(self, key: str) -> EntryId | None:
        """Return the position of a key's first resting dead letter; ``None``: none is confirmed."""
        with self.lock:
            parked = self.parking.parked.keys.get(key)
            return None if parked is None else parked.first_in_order()

    def since(self, key: str) -> tuple[int, int] | None:
        """Return the number of a key's dead letters and the time of the first.

        The time is in milliseconds since the epoch. ``None`` while none is confirmed.
        """
        with self.lock:
            parked = self.parking.parked.keys.get(key)
            return None if parked is None else (parked.count, parked.since_ms)

    def drained(self, key: str) -> list[EntryId]:
        """Start the replay of a draining key, as :meth:`Parking.drained`."""
        with self.lock:
            return self.parking.drained(key)

    def released(self, key: str) -> None:
        """Release a draining key without dead letters."""
        with self.lock:
            if (
                self.parking.state(key) is ParkingState.DRAINING
                and key not in self.parking.parked.keys
            ):
                self.parking.drained(key)

    def failed_again(self, key: str) -> None:
        """Park a key again after a dead letter failed too often. It and the later ones rest."""
        with self.lock:
            self.parking.failed_again(key)
