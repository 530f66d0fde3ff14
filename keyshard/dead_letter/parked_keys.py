"""The parked keys of a source, for many threads: memory only, nothing here waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from keyshard.core.dead_letter.parked import Parked
from keyshard.core.dead_letter.parking import Course, Parking, State
from keyshard.core.dead_letter.selection import Selection
from keyshard.core.message import MessageId
from keyshard.core.position.entry import EntryId, TopicPartition

LOOKED_AT_ONCE = 1_000
"""Keys that are looked at while the lock is held."""


class ParkedKeys:
    """Which keys are parked and how they get out, under one lock.

    Args:
        parked: What the dead-letter topic says.
    """

    def __init__(self, parked: Parked) -> None:
        self.parking = Parking(parked)
        self.lock = threading.Condition()
        """Guards :attr:`parking`; told when something is confirmed."""

    def __len__(self) -> int:
        return len(self.parking)

    @property
    def malformed(self) -> int:
        """Messages that the start found malformed: they should be letters or markers. Without the
        lock."""
        return len(self.parking.parked.malformed)

    @property
    def matter(self) -> bool:
        """Whether a message may be of a parked key, or a dead letter that is done: else every one
        is handled. Without the lock."""
        return bool(len(self.parking) or self.parking.parked.done)

    def state(self, key: str) -> State | None:
        """State of a key; ``None`` when it is not parked. Without the lock."""
        return self.parking.state(key)

    def some(self, count_max: int) -> list[tuple[str, int]]:
        """Keys that have been parked longest, and how many letters of each rest."""
        with self.lock:
            return self.parking.some(count_max)

    def course(self, key: str, where: TopicPartition, message_id: MessageId) -> Course:
        """What to do with a message of a key that was received."""
        with self.lock:
            return self.parking.course(key, where, message_id)

    def begins(self, key: str, where: TopicPartition, message_id: MessageId) -> Course:
        """The same, for a message that is begun now."""
        with self.lock:
            return self.parking.begins(key, where, message_id)

    def selected(self, selection: Selection) -> list[str]:
        """Parked keys that are meant; the lock is not held for long, however many there are."""
        now_ms = round(time.time() * 1000)
        with self.lock:
            if selection.key is not None:
                return [selection.key] if self.parking.state(selection.key) else []
            keys = list(self.parking.states())
        found: list[str] = []
        for at in range(0, len(keys), LOOKED_AT_ONCE):
            with self.lock:
                found += self.parking.matching(
                    keys[at : at + LOOKED_AT_ONCE],
                    lambda key, parked: selection.selects(
                        key, parked.topics, now_ms - parked.since_ms
                    ),
                )
        return found

    def resting(self, keys: Iterable[str]) -> int:
        """Letters of those of some keys that are parked and not on their way out."""
        with self.lock:
            return sum(
                self.parking.parked.keys[key].count
                for key in keys
                if self.parking.state(key) is State.PARKED and key in self.parking.parked.keys
            )

    def unpark(self, key: str) -> bool:
        """Ask for a key to be let out; ``False`` when it is not parked, or is on its way."""
        with self.lock:
            return self.parking.unpark(key)

    def emptied(self, key: str) -> None:
        """No letter of a key is on its way; without one that rests it is let out."""
        with self.lock:
            self.parking.emptied(key)

    def is_first(self, key: str, position: EntryId) -> bool:
        """Whether a key is draining, and its first resting letter lies there."""
        with self.lock:
            parked = self.parking.parked.keys.get(key)
            draining = self.parking.state(key) is State.DRAINING
            return draining and parked is not None and parked.first_in_order() == position

    def first_position(self, key: str) -> EntryId | None:
        """Where the first resting letter of a key lies; ``None`` while none is confirmed."""
        with self.lock:
            parked = self.parking.parked.keys.get(key)
            return None if parked is None else parked.first_in_order()

    def since(self, key: str) -> tuple[int, int] | None:
        """Number of a key's dead letters, and time of the first, milliseconds since the epoch;
        ``None`` while none is confirmed."""
        with self.lock:
            parked = self.parking.parked.keys.get(key)
            return None if parked is None else (parked.count, parked.since_ms)

    def drained(self, key: str) -> list[EntryId]:
        """Positions of the letters of a draining key, in order.

        Nothing of the key runs and no letter of it is on its way; from now on none is written.
        """
        with self.lock:
            return self.parking.drained(key)

    def released(self, key: str) -> None:
        """Let a draining key out that has no letter."""
        with self.lock:
            if self.parking.state(key) is State.DRAINING and key not in self.parking.parked.keys:
                self.parking.drained(key)

    def failed_again(self, key: str) -> None:
        """A letter failed too often: its key stays parked, with this letter and the rest."""
        with self.lock:
            self.parking.failed_again(key)
