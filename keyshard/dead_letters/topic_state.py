"""State of the dead-letter topic: the parked keys, and their resting dead letters.

::

    original   the message that became a dead letter
    marker     a message of the topic that says that a dead letter is done
    to rest    a dead letter rests until a marker says that it is done
    to fold    to apply a message of the topic to this state; messages are folded in their order
    to claim   a written message claims (names) the dead letter that is the oldest resting one

A key is parked while dead letters of it rest. This state is not stored: a restart folds the topic
and gets the same state. An unconfirmed dead letter is sent again, so it may have copies. A marker
names the original, so it covers every earlier copy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from keyshard.core.message import MessageId
from keyshard.core.position.checkpoint import PartitionCheckpoint
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.topic_segments import place_in_order
from keyshard.dead_letters.parked_key import ParkedKey
from keyshard.errors import CheckpointError


class TopicState:
    """State of the dead-letter topic: the parked keys, and their resting dead letters.

    Args:
        begin: Everything before it is folded, and nothing of it rests; ``None``: nothing is folded.
        claimed: The oldest resting dead letter according to the checkpoint.
    """

    def __init__(self, begin: EntryId | None = None, claimed: EntryId | None = None) -> None:
        self.keys: dict[str, ParkedKey] = {}
        """Parked keys, in the order in which they were parked."""
        self.done = ReplayedIds()
        """Dead letters that no longer rest, because a handler completed them."""
        self.parts: dict[EntryId, EntrySet] = {}
        """Entries of the parts of dead letters in parts, by the position of the dead letter."""
        self.malformed: dict[EntryId, str] = {}
        """Messages that should be dead letters or markers and cannot be read, and the reason."""
        self.claimed = claimed
        """The dead letter that the newest folded message claims, or else the checkpoint."""
        self._begin = self._next = begin
        self._sending: dict[object, EntryId | None] = {}
        self._claims: dict[object, EntryId] = {}
        self._positions: list[EntryId] = []
        """Heap of dead letters; it may contain some that no longer rest."""
        self._marked: list[EntryId] = []
        """Heap of others, whose markers were in flight when a message was sent."""
        self._not_resting: set[EntryId] = set()
        self._marking: set[EntryId] = set()
        self._swept: dict[str, EntryId] = {}

    # -- folding ----------------------------------------------------------------------------------

    def dead_letter(
        self,
        position: EntryId,
        key: str,
        where: TopicPartition,
        message_id: MessageId,
        written_ms: int = 0,
    ) -> bool:
        """Fold a parked dead letter; ``False`` if a dead letter of its original rests already."""
        self.passed(position)
        parked = self.keys.get(key)
        if parked is None:
            parked = self.keys[key] = ParkedKey(position, written_ms)
        parked.last = max(parked.last, position)
        if parked.position(where, message_id) is not None:
            return False
        parked.add(where, message_id, position)
        heappush(self._positions, position)
        self.done.discard(key, where, message_id)
        return True

    def replayed(
        self, position: EntryId, key: str, where: TopicPartition, message_id: MessageId
    ) -> None:
        """Fold a marker: the dead letter of an original is done. The last one releases its key."""
        self.passed(position)
        self._apply_sweep(key)
        parked = self.keys.get(key)
        found = None if parked is None else parked.remove(where, message_id)
        if parked is None or found is None:
            return
        self._not_resting.add(found)
        self.done.add(key, where, message_id, found)
        if not parked.count:
            del self.keys[key]

    def swept(self, position: EntryId, key: str, up_to: EntryId) -> None:
        """Fold a marker of all dead letters of a key up to a position."""
        self.passed(position)
        parked = self.keys.get(key)
        if parked is None:
            return
        self._swept[key] = max(up_to, self._swept.get(key, up_to))
        # Versions before 1.0 wrote one sweep for each dead letter, and a key may have 100,000. So
        # all but the last are applied only when the key is looked up.
        if up_to >= parked.last:
            self._apply_sweep(key)

    def run_again(
        self, position: EntryId, key: str, where: TopicPartition, message_id: MessageId
    ) -> None:
        """Fold a note that a message older than done dead letters of its key runs."""
        self.passed(position)
        self._apply_sweep(key)
        self.done.runs(key, where, message_id)

    def claim(self, oldest: EntryId | None) -> None:
        """Note which dead letter a folded message claims.

        A claimed dead letter before the start of the fold is ignored: it is done, or a copy of a
        folded one. It may be gone, but another process that folded the whole topic may claim it.
        """
        if oldest is None or self._begin is None or oldest >= self._begin:
            self.claimed = oldest

    def apply_sweeps(self) -> None:
        """Apply the sweeps that :meth:`swept` postponed; called at the end of the topic."""
        for key in list(self._swept):
            self._apply_sweep(key)

    def passed(self, position: EntryId) -> None:
        """Note that a position is folded, even if its message belongs to another subscription."""
        if self._next is None or position >= self._next:
            self._next = EntryId(position.ledger, position.entry + 1)

    # -- sending ----------------------------------------------------------------------------------

    def marking(self, dead_letters: Collection[EntryId]) -> None:
        """Note dead letters whose markers will be sent now. Later messages claim none of them."""
        self._marking.update(dead_letters)

    def claims(self, dead_letters: Collection[EntryId]) -> bool:
        """Whether a message in flight claims that one of some dead letters rests.

        Its claim must not be stored after the marker of that dead letter: the topic would seem to
        have lost the dead letter.
        """
        return any(claimed in dead_letters for claimed in self._claims.values())

    def sending(self, what: object) -> EntryId | None:
        """Note that a message is about to be sent; it will be stored after all that is folded now.

        Args:
            what: Identifies the message for :meth:`sent`.

        Returns:
            The oldest resting dead letter without a marker in flight; the message claims it.
        """
        self._sending[what] = self._next
        # A discard may mark very many. Each is set aside once, not looked at by each message.
        while (claimed := self._first_of(self._positions)) in self._marking:
            heappush(self._marked, heappop(self._positions))
        if claimed is not None:
            self._claims[what] = claimed
        return claimed

    def sent(self, what: object, marks: Collection[EntryId] = ()) -> None:
        """Note a confirmed and folded message. Not called for a failed one: it may be stored."""
        del self._sending[what]
        self._claims.pop(what, None)
        self._marking.difference_update(marks)
        while self._marked and not self._marking:
            heappush(self._positions, self._marked.pop())

    # -- looking ----------------------------------------------------------------------------------

    @property
    def folded(self) -> EntryId | None:
        """Position before which everything is folded, in flight or not; ``None``: nothing is."""
        starts = [one for one in [self._next, *self._sending.values()] if one is not None]
        return min(starts) if len(starts) == 1 + len(self._sending) else None

    @property
    def last(self) -> EntryId | None:
        """Position of the last folded message; ``None``: nothing is folded."""
        return None if self._next is None else EntryId(self._next.ledger, self._next.entry - 1)

    @property
    def begin(self) -> EntryId | None:
        """Where to fold from to get the same state; ``None``: from the first stored message."""
        folded, oldest = self.folded, self.oldest
        return folded if folded is None or oldest is None else min(folded, oldest)

    @property
    def oldest(self) -> EntryId | None:
        """Position of the oldest resting dead letter; ``None`` if none rests."""
        each = self._first_of(self._positions), self._first_of(self._marked)
        return min((one for one in each if one is not None), default=None)

    def rests(self, key: str, where: TopicPartition, message_id: MessageId) -> bool:
        """Whether a dead letter of an original rests."""
        parked = self.keys.get(key)
        return parked is not None and parked.position(where, message_id) is not None

    def validate(self) -> None:
        """Assert the invariants; tests call it after every step."""
        resting = []
        for key, parked in self.keys.items():
            found = [position for _, _, position in parked.dead_letters()]
            assert found, f"{key} is parked without a dead letter"
            assert len(found) == parked.count, f"dead letters of {key} are counted wrong"
            assert max(found) <= parked.last
            assert sorted(found) == sorted(parked.in_order())
            assert parked.in_order()[0] == parked.first_in_order()
            resting += found
        assert self.oldest == min(resting, default=None)
        known = len(self._positions) + len(self._marked)
        assert known == len(resting) + len(self._not_resting)
        self.done.validate()

    # -- the part of a checkpoint -----------------------------------------------------------------

    def to_dict(self, partitions: Mapping[TopicPartition, PartitionCheckpoint]) -> dict[str, Any]:
        """Return the position to fold from, for a checkpoint.

        Its size and cost do not depend on the number of keys.

        Args:
            partitions: State of each topic partition in the checkpoint, without deleted ones. If it
                does not cover the original of a done dead letter, a start folds that dead letter
                again: the original is redelivered, and must be recognised as done.
        """
        begin, done = self.begin, self.done.oldest(partitions)
        if begin is not None and done is not None:
            begin = min(begin, done)
        return {"from": _id_text(begin), "oldest": _id_text(self.oldest)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TopicState:
        """Read the form of :meth:`to_dict`, or of older checkpoints with all parked keys.

        Raises:
            CheckpointError: The data has neither form.
        """
        try:
            if "keys" not in data:
                return cls(_parse_id(data["from"]), _parse_id(data["oldest"]))
            starts = [_parse_id(one["start"]) for one in data["keys"].values()]
            folded = _parse_id(data["folded"])
            after = None if folded is None else EntryId(folded.ledger, folded.entry + 1)
            folds = [after, *starts]
            return cls(None if None in folds else min(one for one in folds if one is not None))
        except (KeyError, ValueError, TypeError, AttributeError) as exc:
            raise CheckpointError(
                f"The parked keys of the checkpoint cannot be read: {exc!r}.",
                "Restore the checkpoint, or start with a new one.",
            ) from exc

    def _apply_sweep(self, key: str) -> None:
        up_to, parked = self._swept.pop(key, None), self.keys.get(key)
        if up_to is None or parked is None:
            return
        for where, message_id, found in [one for one in parked.dead_letters() if one[2] <= up_to]:
            parked.remove(where, message_id)
            self._not_resting.add(found)
            self.done.add(key, where, message_id, found)
        if not parked.count:
            del self.keys[key]

    def _first_of(self, heap: list[EntryId]) -> EntryId | None:
        """Return the oldest resting dead letter of a heap."""
        while heap and heap[0] in self._not_resting:
            self._not_resting.discard(heappop(heap))
        return heap[0] if heap else None


def _id_text(position: EntryId | None) -> str | None:
    return None if position is None else f"{position.ledger}:{position.entry}"


def _parse_id(text: str | None) -> EntryId | None:
    return None if text is None else EntryId.parse(text)


# -- Done dead letters: if their original is redelivered, it must not run again --------------------

DONE_IDS_MAX = 100_000
"""Maximum number of remembered ids of replayed messages, about 35 MB. Above it, ids of the key that
was replayed longest ago are forgotten first, one by one."""


_Place = tuple[int, MessageId]
"""Place of a message in the order of its key: the number of its segment, or 0, and its id."""


@dataclass(slots=True)
class _Done:
    """Replayed messages of one key in one topic partition or scalable topic."""

    places: OrderedDict[_Place, None] = field(default_factory=OrderedDict)
    """In the order in which they were replayed."""
    newest: _Place | None = None
    """None of them is newer."""


class ReplayedIds:
    """Replayed messages, until an older message of their key and topic partition runs.

    The segments of a scalable topic count as one topic partition.
    """

    def __init__(self) -> None:
        self._done: OrderedDict[tuple[str, str], _Done] = OrderedDict()
        """By key, and name of the topic partition or scalable topic."""
        self._count = 0
        self._dead_letters: list[tuple[EntryId, TopicPartition, MessageId]] = []
        """Heap of their dead letters; its length is limited to ``DONE_IDS_MAX`` too."""

    def __bool__(self) -> bool:
        return bool(self._done)

    def has(self, key: str, where: TopicPartition, message_id: MessageId) -> bool:
        """Whether the dead letter of a message is done, and no earlier message has run since."""
        name, number = place_in_order(where)
        done = self._done.get((key, name))
        return done is not None and (number, message_id) in done.places

    def behind(self, key: str, where: TopicPartition, message_id: MessageId) -> list[_Place]:
        """Return newer messages whose dead letters are done; :meth:`runs` forgets them."""
        name, number = place_in_order(where)
        done, place = self._done.get((key, name)), (number, message_id)
        if done is None or done.newest is None or done.newest < place:
            return []
        return [one for one in done.places if one > place]

    def runs(self, key: str, where: TopicPartition, message_id: MessageId) -> None:
        """Note that a handler gets a message that has no dead letter; forget newer replayed ones.

        If the message is redelivered, so are the newer messages of its topic partition, or of later
        segments, that were replayed before it. Handlers must get those again, after it. They must
        not get older replayed messages again: those would run after a newer one.
        """
        name, number = place_in_order(where)
        done, place = self._done.get((key, name)), (number, message_id)
        if done is None or done.newest is None or done.newest < place:
            return
        self._forget(key, name, self.behind(key, where, message_id))
        done.newest = place

    def add(
        self, key: str, where: TopicPartition, message_id: MessageId, dead_letter: EntryId
    ) -> None:
        """Note that the dead letter of an original is done.

        Args:
            key: Key of the message.
            where: Topic partition of the original.
            message_id: Id of the original.
            dead_letter: Position in the dead-letter topic.
        """
        heappush(self._dead_letters, (dead_letter, where, message_id))
        if len(self._dead_letters) > DONE_IDS_MAX:
            heappop(self._dead_letters)
        name, number = place_in_order(where)
        done, place = self._done.setdefault((key, name), _Done()), (number, message_id)
        self._done.move_to_end((key, name))
        done.places[place] = None
        done.newest = place if done.newest is None else max(done.newest, place)
        self._count += 1
        while self._count > DONE_IDS_MAX:
            # A forgotten message runs again if it is redelivered, and the newer ones run after it.
            (oldest, of), found = next(iter(self._done.items()))
            self._forget(oldest, of, [next(iter(found.places))])

    def discard(self, key: str, where: TopicPartition, message_id: MessageId) -> None:
        """Forget a message that is a dead letter again."""
        if self.has(key, where, message_id):
            name, number = place_in_order(where)
            self._forget(key, name, [(number, message_id)])

    def oldest(self, partitions: Mapping[TopicPartition, PartitionCheckpoint]) -> EntryId | None:
        """Return the oldest done dead letter whose original may be redelivered after a start.

        Args:
            partitions: State of each topic partition in the checkpoint of the start. It only grows
                from one call to the next; a missing topic partition was deleted.
        """
        dead_letters = self._dead_letters
        while dead_letters:
            dead_letter, where, (ledger, entry, _) = dead_letters[0]
            state = partitions.get(where)
            if state is not None and not state.covers(EntryId(ledger, entry)):
                return dead_letter
            heappop(dead_letters)
        return None

    def validate(self) -> None:
        """Assert the invariants; tests call it after every step."""
        assert len(self._dead_letters) <= DONE_IDS_MAX
        assert self._count == sum(len(done.places) for done in self._done.values())
        for done in self._done.values():
            assert done.newest is not None
            assert done.places, "nothing is remembered of a key"
            assert max(done.places) <= done.newest

    def _forget(self, key: str, name: str, places: Collection[_Place]) -> None:
        done = self._done[key, name]
        for place in places:
            del done.places[place]
        self._count -= len(places)
        if not done.places:
            del self._done[key, name]
