"""Parked keys: which messages rest in the dead-letter topic, and how a key gets out of it.

A key is parked as long as letters of it rest in the dead-letter topic: letters that no marker
calls done. Nothing else is durable, so a restart folds the topic and knows the same
(:class:`Parked`). In a running source a parked key is in one of these states (:class:`Parking`)::

              park                 unpark                 drained
    (handled) -----> PARKED ------------------> DRAINING ---------> REPLAYING --+--> (handled)
                        ^                                               |       | replayed, the last
                        +----------------- failed_again ----------------+       |
                                                                      ^-replayed+

    PARKED, DRAINING   newer messages of the key become letters, one after the other;
                       older ones than its first letter pass before it (:class:`Course`)
    REPLAYING          its letters run in its lane, newer messages wait behind

Letters of a key are replayed in the order of their originals, per topic partition: one that was
delivered again may become a letter long after a newer one. A marker names an original, so it
covers every copy of its letter that was stored before: one without confirmation is sent again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from heapq import heappop, heappush
from itertools import islice
from typing import Any

from keyshard.core.message import MessageId
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.errors import CheckpointError

DONE_IDS_MAX = 100_000
"""Ids of replayed messages that are remembered, about 20 MB; those of the key that was replayed
longest ago go first, one by one."""


@dataclass(slots=True)
class _Originals:
    """Resting letters of one key in one topic partition."""

    positions: dict[MessageId, EntryId] = field(default_factory=dict)
    order: list[MessageId] = field(default_factory=list)
    """Heap of their originals, and of some that rest no more."""

    def first(self) -> MessageId:
        while self.order[0] not in self.positions:
            heappop(self.order)
        return self.order[0]


@dataclass(slots=True)
class _Done:
    """Replayed messages of one key in one topic partition."""

    ids: OrderedDict[MessageId, None] = field(default_factory=OrderedDict)
    """In the order in which they were replayed."""
    newest: MessageId | None = None
    """None of them is newer."""


@dataclass(slots=True)
class ParkedKey:
    """Letters of one parked key that are not done."""

    last: EntryId
    """Position of the newest one since it was parked, a repeated one included."""
    since_ms: int
    """When the first of them was written, milliseconds since the epoch; 0 when unknown."""
    count: int = 0
    """How many rest."""
    _letters: dict[TopicPartition, _Originals] = field(default_factory=dict)

    def position(self, where: TopicPartition, message_id: MessageId) -> EntryId | None:
        """Where the letter of an original lies; ``None`` when none rests."""
        originals = self._letters.get(where)
        return None if originals is None else originals.positions.get(message_id)

    def first(self, where: TopicPartition) -> MessageId | None:
        """Lowest original of a topic partition that rests."""
        originals = self._letters.get(where)
        return None if originals is None else originals.first()

    def add(self, where: TopicPartition, message_id: MessageId, position: EntryId) -> None:
        """A letter rests."""
        originals = self._letters.setdefault(where, _Originals())
        originals.positions[message_id] = position
        heappush(originals.order, message_id)
        self.count += 1

    def remove(self, where: TopicPartition, message_id: MessageId) -> EntryId | None:
        """A letter is done; where it lay, ``None`` when it did not rest."""
        originals = self._letters.get(where)
        position = None if originals is None else originals.positions.pop(message_id, None)
        if originals is not None and position is not None:
            self.count -= 1
            if not originals.positions:
                del self._letters[where]
        return position

    def letters(self) -> Iterator[tuple[TopicPartition, MessageId, EntryId]]:
        """Those that rest, in no order."""
        for where, originals in self._letters.items():
            for message_id, position in originals.positions.items():
                yield where, message_id, position

    @property
    def topics(self) -> set[str]:
        """Topics of the originals."""
        return {where.topic for where in self._letters}

    def in_order(self) -> list[EntryId]:
        """Positions in the order of a replay.

        That of the originals per topic partition; between topic partitions as they were written.
        """
        sorted_ids = {where: iter(sorted(one.positions)) for where, one in self._letters.items()}
        written = sorted((position, where) for where, _, position in self.letters())
        return [self._letters[where].positions[next(sorted_ids[where])] for _, where in written]

    def first_in_order(self) -> EntryId:
        """The first of :meth:`in_order`."""
        where = next(iter(self._letters))
        if len(self._letters) > 1:
            _, where = min((position, where) for where, _, position in self.letters())
        return self._letters[where].positions[self._letters[where].first()]


class Parked:
    """What the dead-letter topic says: which keys are parked, and which letters of them rest.

    Args:
        begin: Everything before it is folded, and nothing of it rests; ``None``: nothing is folded.
        claimed: A letter that rested when that was said.
    """

    def __init__(self, begin: EntryId | None = None, claimed: EntryId | None = None) -> None:
        self.keys: dict[str, ParkedKey] = {}
        """Parked keys, in the order in which they were parked."""
        self.parts: dict[EntryId, EntrySet] = {}
        """Where the parts of letters lie that have some, by the position of the letter."""
        self.claimed = claimed
        """A letter that rested when the newest checkpoint or message was written."""
        self._next = begin
        self._sending: dict[object, EntryId | None] = {}
        self._claims: dict[object, EntryId] = {}
        self._positions: list[EntryId] = []
        self._not_resting: set[EntryId] = set()
        self._marking: set[EntryId] = set()
        self._swept: dict[str, EntryId] = {}
        self._done: OrderedDict[tuple[str, TopicPartition], _Done] = OrderedDict()
        self._done_ids = 0

    # -- folding ----------------------------------------------------------------------------------

    def letter(
        self,
        position: EntryId,
        key: str,
        where: TopicPartition,
        message_id: MessageId,
        written_ms: int = 0,
    ) -> bool:
        """Fold a parked letter; ``False`` when one of its original rests already."""
        self.passed(position)
        parked = self.keys.get(key)
        if parked is None:
            parked = self.keys[key] = ParkedKey(position, written_ms)
        parked.last = max(parked.last, position)
        if parked.position(where, message_id) is not None:
            return False
        parked.add(where, message_id, position)
        heappush(self._positions, position)
        if self.was_replayed(key, where, message_id):
            self._forget(key, where, [message_id])
        return True

    def replayed(
        self, position: EntryId, key: str, where: TopicPartition, message_id: MessageId
    ) -> None:
        """Fold a marker: the letter of an original is done. The last one releases its key."""
        self.passed(position)
        self._settle(key)
        parked = self.keys.get(key)
        found = None if parked is None else parked.remove(where, message_id)
        if parked is None or found is None:
            return
        self._not_resting.add(found)
        self._remember(key, where, message_id)
        if not parked.count:
            del self.keys[key]

    def swept(self, position: EntryId, key: str, up_to: EntryId) -> None:
        """Fold a marker of all letters of a key up to a position."""
        self.passed(position)
        parked = self.keys.get(key)
        if parked is None:
            return
        self._swept[key] = max(up_to, self._swept.get(key, up_to))
        # Those before version 1.0 wrote one for each letter, and a key may have 100,000: all but
        # the last wait until somebody looks.
        if up_to >= parked.last:
            self._settle(key)

    def run_again(
        self, position: EntryId, key: str, where: TopicPartition, message_id: MessageId
    ) -> None:
        """Fold that a message runs which is older than done letters of its key."""
        self.passed(position)
        self._settle(key)
        self.runs(key, where, message_id)

    def settle(self) -> None:
        """The topic is folded to its end: look at what :meth:`swept` left for later."""
        for key in list(self._swept):
            self._settle(key)

    def passed(self, position: EntryId) -> None:
        """Everything at a position is folded, also when it was nothing of ours."""
        if self._next is None or position >= self._next:
            self._next = EntryId(position.ledger, position.entry + 1)

    # -- sending ----------------------------------------------------------------------------------

    def marking(self, letters: Collection[EntryId]) -> None:
        """Markers of letters are about to be sent: what is sent from now on claims none of them."""
        self._marking.update(letters)

    def claims(self, letters: Collection[EntryId]) -> bool:
        """Whether something on its way claims that one of some letters rests.

        It must not lie behind the marker of that letter, or the topic would seem to have lost it.
        """
        return any(claimed in letters for claimed in self._claims.values())

    def sending(self, what: object) -> EntryId | None:
        """Something is about to be sent: it will lie behind all that is folded now.

        Args:
            what: Names it for :meth:`sent`.

        Returns:
            The oldest letter that rests and has no marker on its way: what is sent claims that.
        """
        self._sending[what] = self._next
        claimed = self._oldest(self._marking)
        if claimed is not None:
            self._claims[what] = claimed
        return claimed

    def sent(self, what: object, marks: Collection[EntryId] = ()) -> None:
        """It is confirmed and folded. What fails is never told: it may be stored all the same."""
        del self._sending[what]
        self._claims.pop(what, None)
        self._marking.difference_update(marks)

    # -- looking ----------------------------------------------------------------------------------

    def was_replayed(self, key: str, where: TopicPartition, message_id: MessageId) -> bool:
        """Whether a message was a letter, is done, and none before it has run since."""
        done = self._done.get((key, where))
        return done is not None and message_id in done.ids

    def runs(self, key: str, where: TopicPartition, message_id: MessageId) -> None:
        """A handler gets a message of a key that is no letter.

        When it comes again, so do newer ones of its topic partition that were replayed before it,
        and they have to run behind it again. Older ones have not: they would run behind a newer
        one.
        """
        done = self._done.get((key, where))
        if done is None or done.newest is None or done.newest < message_id:
            return
        self._forget(key, where, self.done_behind(key, where, message_id))
        done.newest = message_id

    def done_behind(
        self, key: str, where: TopicPartition, message_id: MessageId
    ) -> list[MessageId]:
        """Newer messages that were letters and are done: what :meth:`runs` forgets."""
        done = self._done.get((key, where))
        if done is None or done.newest is None or done.newest < message_id:
            return []
        return [one for one in done.ids if one > message_id]

    @property
    def remembers(self) -> bool:
        """Whether :meth:`was_replayed` knows any message."""
        return bool(self._done)

    @property
    def folded(self) -> EntryId | None:
        """Everything before it is folded, also what is on its way; ``None``: nothing is."""
        begins = [one for one in [self._next, *self._sending.values()] if one is not None]
        return min(begins) if len(begins) == 1 + len(self._sending) else None

    @property
    def begin(self) -> EntryId | None:
        """From where to fold to know the same; ``None``: from the first message that is stored."""
        folded, oldest = self.folded, self._oldest(())
        return folded if folded is None or oldest is None else min(folded, oldest)

    def rests(self, key: str, where: TopicPartition, message_id: MessageId) -> bool:
        """Whether a letter of an original rests."""
        parked = self.keys.get(key)
        return parked is not None and parked.position(where, message_id) is not None

    def validate(self) -> None:
        """Assert the invariants; tests call it after every step."""
        resting = []
        for key, parked in self.keys.items():
            found = [position for _, _, position in parked.letters()]
            assert found, f"{key} is parked without a letter"
            assert len(found) == parked.count, f"letters of {key} are counted wrong"
            assert max(found) <= parked.last
            assert sorted(found) == sorted(parked.in_order())
            assert parked.in_order()[0] == parked.first_in_order()
            resting += found
        assert self._oldest(()) == min(resting, default=None)
        assert len(self._positions) == len(resting) + len(self._not_resting)
        assert self._done_ids == sum(len(done.ids) for done in self._done.values())
        for done in self._done.values():
            assert done.newest is not None
            assert done.ids, "nothing is remembered of a key"
            assert max(done.ids) <= done.newest

    # -- the part of a checkpoint -----------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """From where to fold, for a checkpoint: its size and cost do not depend on the keys."""
        return {"from": _id_text(self.begin), "oldest": _id_text(self._oldest(()))}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Parked:
        """Read :meth:`to_dict`'s form, or that of checkpoints that held all parked keys.

        Raises:
            CheckpointError: It is neither.
        """
        try:
            if "keys" not in data:
                return cls(_parse_id(data["from"]), _parse_id(data["oldest"]))
            starts = [_parse_id(one["start"]) for one in data["keys"].values()]
            folded = _parse_id(data["folded"])
            after = None if folded is None else EntryId(folded.ledger, folded.entry + 1)
            begins = [after, *starts]
            return cls(None if None in begins else min(one for one in begins if one is not None))
        except (KeyError, ValueError, TypeError, AttributeError) as exc:
            raise CheckpointError(f"The parked keys cannot be read: {exc!r}.") from exc

    def _settle(self, key: str) -> None:
        up_to, parked = self._swept.pop(key, None), self.keys.get(key)
        if up_to is None or parked is None:
            return
        for where, message_id, found in [one for one in parked.letters() if one[2] <= up_to]:
            parked.remove(where, message_id)
            self._not_resting.add(found)
            self._remember(key, where, message_id)
        if not parked.count:
            del self.keys[key]

    def _oldest(self, besides: Collection[EntryId]) -> EntryId | None:
        """Position of the oldest resting letter, besides some few."""
        heap, aside = self._positions, []
        while heap and (heap[0] in self._not_resting or heap[0] in besides):
            position = heappop(heap)
            if position in self._not_resting:
                self._not_resting.discard(position)
            else:
                aside.append(position)
        found = heap[0] if heap else None
        for position in aside:
            heappush(heap, position)
        return found

    def _remember(self, key: str, where: TopicPartition, message_id: MessageId) -> None:
        done = self._done.setdefault((key, where), _Done())
        self._done.move_to_end((key, where))
        done.ids[message_id] = None
        done.newest = message_id if done.newest is None else max(done.newest, message_id)
        self._done_ids += 1
        while self._done_ids > DONE_IDS_MAX:
            # When one of them comes again it runs, and so do the newer ones, behind it.
            (oldest, of), ids = next((one, found.ids) for one, found in self._done.items())
            self._forget(oldest, of, [next(iter(ids))])

    def _forget(self, key: str, where: TopicPartition, message_ids: Collection[MessageId]) -> None:
        done = self._done[key, where]
        for message_id in message_ids:
            del done.ids[message_id]
        self._done_ids -= len(message_ids)
        if not done.ids:
            del self._done[key, where]


class State(Enum):
    """Of a parked key in a running source."""

    PARKED = auto()
    DRAINING = auto()
    REPLAYING = auto()


class Course(Enum):
    """What to do with a message."""

    HANDLE = auto()
    """Its key is not parked, or it is older than the first letter of its topic partition."""
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

    def matching(self, wanted: Callable[[str, ParkedKey], bool]) -> list[str]:
        """Parked keys whose letters are meant; those on their way out are left to it."""
        keys = self.parked.keys
        return [
            key
            for key, state in self._states.items()
            if state is State.PARKED and key in keys and wanted(key, keys[key])
        ]

    def course(self, key: str, where: TopicPartition, message_id: MessageId) -> Course:
        """What to do with a message of a key that was received."""
        if self.parked.was_replayed(key, where, message_id):
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
        return parked.in_order()

    def replayed(
        self, position: EntryId, key: str, where: TopicPartition, message_id: MessageId
    ) -> None:
        """A marker is confirmed; the last one releases its key, unless letters are on their way."""
        state = self._states[key]
        assert state is not State.PARKED
        self.parked.replayed(position, key, where, message_id)
        if key not in self.parked.keys and state is State.REPLAYING:
            del self._states[key]

    def emptied(self, key: str) -> None:
        """No letter of a key is on its way; without one that rests it is released."""
        if self._states.get(key) is State.PARKED and key not in self.parked.keys:
            del self._states[key]

    def failed_again(self, key: str) -> None:
        """A letter failed too often: the key is parked, this letter and the rest stay."""
        self._states[key] = State.PARKED

    def validate(self) -> None:
        """Assert the invariants; tests call it after every step."""
        self.parked.validate()
        assert self.parked.keys.keys() <= self._states.keys(), "a key with letters is not parked"


def _id_text(position: EntryId | None) -> str | None:
    return None if position is None else f"{position.ledger}:{position.entry}"


def _parse_id(text: str | None) -> EntryId | None:
    if text is None:
        return None
    ledger, _, entry = text.partition(":")
    return EntryId(int(ledger), int(entry))
