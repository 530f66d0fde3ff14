"""Parked keys: which messages rest in the dead-letter topic, and how a key gets out of it.

A key is parked as long as letters of it rest in the dead-letter topic: letters that no marker
calls replayed. Nothing else is durable, so a restart folds the topic and knows the same
(:class:`Parked`). In a running source a parked key is in one of these states (:class:`Parking`)::

              park                 unpark                 drained
    (handled) -----> PARKED ------------------> DRAINING ---------> REPLAYING --+--> (handled)
                        ^                                               |       | replayed, the last
                        +----------------- failed_again ----------------+       |
                                                                      ^-replayed+

    PARKED, DRAINING   every newer message of the key becomes a letter, one after the other
    REPLAYING          its letters up to the last one run in its lane, newer messages wait behind

Letters and markers of one key are folded in the order in which they lie in the topic. One original
message may lie there twice: who died between a confirmed letter and its acknowledgement sends it
again. The first one counts.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from keyshard.core.entry import EntryId, TopicPartition
from keyshard.core.entry_set import EntrySet
from keyshard.core.message import MessageId
from keyshard.errors import CheckpointError

RELEASED_IDS_MAX = 100_000
"""Ids of replayed messages remembered after their key was released, about 20 MB."""

Ids = dict[TopicPartition, set[MessageId]]


@dataclass(slots=True)
class ParkedKey:
    """Letters of one parked key, since it was parked."""

    start: EntryId
    """Position of the first of them, replayed or not."""
    last: EntryId
    """Position of the last of them, a repeated one included."""
    resting: list[EntryId] = field(default_factory=list)
    """Positions of those that are not replayed, ascending."""
    ids: Ids = field(default_factory=dict)
    """Original ids of all of them."""

    def knows(self, topic_partition: TopicPartition, message_id: MessageId) -> bool:
        """Whether there is a letter of an original message."""
        return message_id in self.ids.get(topic_partition, ())

    def rests(self, position: EntryId) -> bool:
        """Whether a letter that is not replayed lies there."""
        at = bisect_left(self.resting, position)
        return at < len(self.resting) and self.resting[at] == position


class Parked:
    """What the dead-letter topic says: which keys are parked, and which letters of them rest."""

    def __init__(self) -> None:
        self.keys: dict[str, ParkedKey] = {}
        """Parked keys."""
        self._highest: EntryId | None = None
        self._sending: dict[object, EntryId | None] = {}
        self._released: dict[str, Ids] = {}
        self._released_ids = 0

    # -- folding ----------------------------------------------------------------------------------

    def letter(
        self,
        position: EntryId,
        key: str,
        topic_partition: TopicPartition,
        message_id: MessageId,
    ) -> bool:
        """Fold a parked letter; ``False`` when its original has one already."""
        self.passed(position)
        parked = self.keys.get(key)
        if parked is None:
            parked = self.keys[key] = ParkedKey(position, position)
        parked.last = max(parked.last, position)
        if parked.knows(topic_partition, message_id):
            return False
        parked.ids.setdefault(topic_partition, set()).add(message_id)
        parked.resting.append(position)
        return True

    def replayed(self, position: EntryId, key: str, up_to: EntryId) -> None:
        """Fold a marker: letters of a key up to ``up_to`` are done. The last one releases it."""
        self.passed(position)
        parked = self.keys.get(key)
        if parked is None:
            return
        parked.resting = [one for one in parked.resting if one > up_to]
        if not parked.resting:
            self._release(key)

    def passed(self, position: EntryId) -> None:
        """Everything at a position is folded, also when it was nothing of ours."""
        if self._highest is None or position > self._highest:
            self._highest = position

    def trimmed(self, first: EntryId | None) -> None:
        """The topic begins at ``first`` now; ``None``: it is empty.

        Only letters that are finished with are acknowledged, so those before it are.
        """
        for key in list(self.keys):
            parked = self.keys[key]
            parked.resting = [one for one in parked.resting if first and one >= first]
            if not parked.resting:
                self._release(key)

    # -- sending ----------------------------------------------------------------------------------

    def sending(self, what: object) -> None:
        """Something is about to be sent: it will lie behind all that is folded now."""
        self._sending[what] = self._highest

    def sent(self, what: object) -> None:
        """It is confirmed and folded. What fails is never told: it may be stored all the same."""
        del self._sending[what]

    # -- looking ----------------------------------------------------------------------------------

    def is_replayed(self, key: str, topic_partition: TopicPartition, message_id: MessageId) -> bool:
        """Whether a message, delivered once more, was a letter of a key released meanwhile."""
        return message_id in self._released.get(key, {}).get(topic_partition, ())

    @property
    def released(self) -> bool:
        """Whether :meth:`is_replayed` knows any message."""
        return bool(self._released)

    @property
    def folded(self) -> EntryId | None:
        """Everything up to here is folded; ``None``: nothing is."""
        if not self._sending:
            return self._highest
        lowest = self._sending.values()
        return None if None in lowest else min(one for one in lowest if one is not None)

    def validate(self) -> None:
        """Assert the invariants; tests call it after every step."""
        for key, parked in self.keys.items():
            assert parked.resting, f"{key} is parked without a letter"
            assert parked.resting == sorted(set(parked.resting)), "letters are out of order"
            assert parked.start <= parked.resting[0]
            assert parked.resting[-1] <= parked.last
            assert len(parked.resting) <= _count(parked.ids)

    # -- the part of a checkpoint -----------------------------------------------------------------

    def to_dict(self, chars_max: int) -> dict[str, Any]:
        """The parked keys, and up to where they are folded, for a checkpoint: equal ones are equal.

        Args:
            chars_max: When its text would be longer, it says instead to fold from the first letter
                of a key that is parked now; that is short, and comes to the same.
        """
        folded = self.folded
        # What lies behind ``folded`` and is known already is folded again, which changes nothing.
        data = _state(folded, self.keys)
        if len(json.dumps(data, separators=(",", ":"))) > chars_max:
            first = min(parked.start for parked in self.keys.values())
            if folded is not None and folded >= first:
                folded = EntryId(first.ledger, first.entry - 1) if first.entry else None
            data = _state(folded, {})
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Parked:
        """Read :meth:`to_dict`'s form.

        Raises:
            CheckpointError: It is not.
        """
        result = cls()
        try:
            result._highest = None if data["folded"] is None else _parse_id(data["folded"])
            result.keys = {key: _from_dict(value) for key, value in data["keys"].items()}
        except CheckpointError:
            raise
        except (KeyError, ValueError, TypeError, AttributeError) as exc:
            raise CheckpointError(f"The parked keys cannot be read: {exc!r}.") from exc
        return result

    def _release(self, key: str) -> None:
        ids = self.keys.pop(key).ids
        self._released_ids -= _count(self._released.pop(key, {}))
        self._released[key] = ids
        self._released_ids += _count(ids)
        while self._released_ids > RELEASED_IDS_MAX and len(self._released) > 1:
            oldest = next(iter(self._released))
            self._released_ids -= _count(self._released.pop(oldest))


class State(Enum):
    """Of a parked key in a running source."""

    PARKED = auto()
    DRAINING = auto()
    REPLAYING = auto()


class Parking:
    """The parked keys of a running source, and those on their way out.

    Args:
        parked: What the dead-letter topic says.
    """

    def __init__(self, parked: Parked) -> None:
        self.parked = parked
        self._states = dict.fromkeys(parked.keys, State.PARKED)

    def state(self, key: str | None) -> State | None:
        """State of a key; ``None`` when it is not parked."""
        return None if key is None else self._states.get(key)

    def states(self) -> Mapping[str, State]:
        """All keys that are parked."""
        return dict(self._states)

    def park(self, key: str) -> None:
        """A message of the key failed too often: it, and all later ones, become letters."""
        self._states.setdefault(key, State.PARKED)

    def unpark(self, key: str) -> bool:
        """Ask for a key to be let out; ``False`` when it is not parked, or is on its way."""
        if self._states.get(key) is not State.PARKED:
            return False
        self._states[key] = State.DRAINING
        return True

    def drained(self, key: str) -> list[EntryId]:
        """Nothing of a draining key runs and every letter of it is confirmed.

        Returns:
            Positions of the letters to replay, in order; what comes now is no letter any more.
            Empty when there is none, and then the key is released.
        """
        assert self._states[key] is State.DRAINING
        parked = self.parked.keys.get(key)
        if parked is None:
            del self._states[key]
            return []
        self._states[key] = State.REPLAYING
        return list(parked.resting)

    def up_to(self, key: str, position: EntryId) -> EntryId:
        """What the marker of a letter names: with the last one, everything of the key."""
        parked = self.parked.keys[key]
        return parked.last if position == parked.resting[-1] else position

    def replayed(self, position: EntryId, key: str, up_to: EntryId) -> None:
        """A marker is confirmed; the last one releases its key, unless letters are on their way."""
        state = self._states[key]
        assert state is not State.PARKED
        self.parked.replayed(position, key, up_to)
        if key not in self.parked.keys and state is State.REPLAYING:
            del self._states[key]

    def failed_again(self, key: str) -> None:
        """A letter failed too often: the key is parked, this letter and the rest stay."""
        assert self._states[key] is State.REPLAYING
        self._states[key] = State.PARKED

    def validate(self) -> None:
        """Assert the invariants; tests call it after every step."""
        self.parked.validate()
        assert self.parked.keys.keys() <= self._states.keys(), "a key with letters is not parked"


def _count(ids: Ids) -> int:
    return sum(map(len, ids.values()))


def _state(folded: EntryId | None, keys: Mapping[str, ParkedKey]) -> dict[str, Any]:
    return {
        "folded": _id_text(folded),
        "keys": {key: _to_dict(parked) for key, parked in sorted(keys.items())},
    }


def _to_dict(parked: ParkedKey) -> dict[str, Any]:
    return {
        "ids": {where.name: _ids_text(ids) for where, ids in sorted(parked.ids.items())},
        "last": _id_text(parked.last),
        "resting": str(EntrySet.of(parked.resting)),
        "start": _id_text(parked.start),
    }


def _from_dict(data: Mapping[str, Any]) -> ParkedKey:
    result = ParkedKey(
        _parse_id(data["start"]),
        _parse_id(data["last"]),
        list(EntrySet.parse(data["resting"])),
        {TopicPartition.parse(name): set(_parse_ids(ids)) for name, ids in data["ids"].items()},
    )
    if not result.resting:
        raise ValueError("a parked key without a letter")
    return result


def _ids_text(ids: set[MessageId]) -> dict[str, str]:
    """Entries by batch index: most messages are in no batch, or neighbours in one."""
    by_index: dict[int, list[EntryId]] = {}
    for ledger, entry, index in ids:
        by_index.setdefault(index, []).append(EntryId(ledger, entry))
    return {str(index): str(EntrySet.of(found)) for index, found in sorted(by_index.items())}


def _parse_ids(data: Mapping[str, str]) -> Iterator[MessageId]:
    for index, text in data.items():
        for ledger, entry in EntrySet.parse(text):
            yield MessageId(ledger, entry, int(index))


def _id_text(position: EntryId | None) -> str | None:
    return None if position is None else f"{position.ledger}:{position.entry}"


def _parse_id(text: str) -> EntryId:
    ledger, _, entry = text.partition(":")
    return EntryId(int(ledger), int(entry))
