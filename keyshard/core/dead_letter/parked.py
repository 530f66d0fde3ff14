"""What the dead-letter topic says: which keys are parked, and which letters of them rest.

A key is parked as long as letters of it rest in the dead-letter topic: letters that no marker
calls done. Nothing else is durable, so a restart folds the topic and knows the same. A marker names
an original, so it covers every copy of its letter that was stored before: one without confirmation
is sent again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from heapq import heappop, heappush
from typing import Any

from keyshard.core.dead_letter.parked_key import ParkedKey
from keyshard.core.dead_letter.replayed import Replayed
from keyshard.core.message import MessageId
from keyshard.core.position.checkpoint import PartitionCheckpoint
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.errors import CheckpointError


class Parked:
    """What the dead-letter topic says: which keys are parked, and which letters of them rest.

    Args:
        begin: Everything before it is folded, and nothing of it rests; ``None``: nothing is folded.
        claimed: A letter that rested when that was said.
    """

    def __init__(self, begin: EntryId | None = None, claimed: EntryId | None = None) -> None:
        self.keys: dict[str, ParkedKey] = {}
        """Parked keys, in the order in which they were parked."""
        self.done = Replayed()
        """Letters that rest no more, because a handler got them done."""
        self.parts: dict[EntryId, EntrySet] = {}
        """Where the parts of letters lie that have some, by the position of the letter."""
        self.malformed: dict[EntryId, str] = {}
        """Messages that should be letters or markers and cannot be read, and why."""
        self.claimed = claimed
        """A letter that rested when the newest checkpoint or message was written."""
        self._begin = self._next = begin
        self._sending: dict[object, EntryId | None] = {}
        self._claims: dict[object, EntryId] = {}
        self._positions: list[EntryId] = []
        self._not_resting: set[EntryId] = set()
        self._marking: set[EntryId] = set()
        self._swept: dict[str, EntryId] = {}

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
        self.done.discard(key, where, message_id)
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
        self.done.add(key, where, message_id, found)
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
        self.done.runs(key, where, message_id)

    def claim(self, oldest: EntryId | None) -> None:
        """A message names the oldest letter that rested when it was written.

        A letter before :attr:`begin` is a copy of one that is folded, or is done: another process
        may know it that folded the whole topic. It need not be stored any more.
        """
        if oldest is None or self._begin is None or oldest >= self._begin:
            self.claimed = oldest

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
        self.done.validate()

    # -- the part of a checkpoint -----------------------------------------------------------------

    def to_dict(self, partitions: Mapping[TopicPartition, PartitionCheckpoint]) -> dict[str, Any]:
        """From where to fold, for a checkpoint: its size and cost do not depend on the keys.

        Args:
            partitions: What else the checkpoint has of each topic partition that is not gone. A
                letter that is done is folded again as long as that lacks its original: it comes
                again after a start, and must be known then.
        """
        begin, done = self.begin, self.done.oldest(partitions)
        if begin is not None and done is not None:
            begin = min(begin, done)
        return {"from": _id_text(begin), "oldest": _id_text(self._oldest(()))}

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
            self.done.add(key, where, message_id, found)
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


def _id_text(position: EntryId | None) -> str | None:
    return None if position is None else f"{position.ledger}:{position.entry}"


def _parse_id(text: str | None) -> EntryId | None:
    if text is None:
        return None
    ledger, _, entry = text.partition(":")
    return EntryId(int(ledger), int(entry))
