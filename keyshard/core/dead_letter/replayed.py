"""Which messages were dead letters and are done: when one comes again, it must not run again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush

from keyshard.core.message import MessageId
from keyshard.core.position.checkpoint import PartitionCheckpoint
from keyshard.core.position.entry import EntryId, TopicPartition

DONE_IDS_MAX = 100_000
"""Ids of replayed messages that are remembered, about 35 MB; those of the key that was replayed
longest ago go first, one by one."""


@dataclass(slots=True)
class _Done:
    """Replayed messages of one key in one topic partition."""

    ids: OrderedDict[MessageId, None] = field(default_factory=OrderedDict)
    """In the order in which they were replayed."""
    newest: MessageId | None = None
    """None of them is newer."""


class Replayed:
    """Replayed messages, by key and topic partition, until an older one of the key runs."""

    def __init__(self) -> None:
        self._done: OrderedDict[tuple[str, TopicPartition], _Done] = OrderedDict()
        self._count = 0
        self._letters: list[tuple[EntryId, TopicPartition, MessageId]] = []
        """Heap of letters, the same number of them at most."""

    def __bool__(self) -> bool:
        return bool(self._done)

    def has(self, key: str, where: TopicPartition, message_id: MessageId) -> bool:
        """Whether a message was a letter, is done, and none before it has run since."""
        done = self._done.get((key, where))
        return done is not None and message_id in done.ids

    def behind(self, key: str, where: TopicPartition, message_id: MessageId) -> list[MessageId]:
        """Newer messages that were letters and are done: what :meth:`runs` forgets."""
        done = self._done.get((key, where))
        if done is None or done.newest is None or done.newest < message_id:
            return []
        return [one for one in done.ids if one > message_id]

    def runs(self, key: str, where: TopicPartition, message_id: MessageId) -> None:
        """A handler gets a message of a key that is no letter.

        When it comes again, so do newer ones of its topic partition that were replayed before it,
        and they have to run behind it again. Older ones have not: they would run behind a newer
        one.
        """
        done = self._done.get((key, where))
        if done is None or done.newest is None or done.newest < message_id:
            return
        self._forget(key, where, self.behind(key, where, message_id))
        done.newest = message_id

    def add(self, key: str, where: TopicPartition, message_id: MessageId, letter: EntryId) -> None:
        """The letter of an original, at a position of the dead-letter topic, is done."""
        heappush(self._letters, (letter, where, message_id))
        if len(self._letters) > DONE_IDS_MAX:
            heappop(self._letters)
        done = self._done.setdefault((key, where), _Done())
        self._done.move_to_end((key, where))
        done.ids[message_id] = None
        done.newest = message_id if done.newest is None else max(done.newest, message_id)
        self._count += 1
        while self._count > DONE_IDS_MAX:
            # When one of them comes again it runs, and so do the newer ones, behind it.
            (oldest, of), ids = next((one, found.ids) for one, found in self._done.items())
            self._forget(oldest, of, [next(iter(ids))])

    def discard(self, key: str, where: TopicPartition, message_id: MessageId) -> None:
        """It is a letter again."""
        if self.has(key, where, message_id):
            self._forget(key, where, [message_id])

    def oldest(self, partitions: Mapping[TopicPartition, PartitionCheckpoint]) -> EntryId | None:
        """The oldest of their letters whose original may come again after a start.

        Args:
            partitions: What the checkpoint has that the start begins with, from one to the next
                only more; a topic partition that is missing is gone.
        """
        letters = self._letters
        while letters:
            letter, where, (ledger, entry, _) = letters[0]
            state = partitions.get(where)
            if state is not None and not state.settled(EntryId(ledger, entry)):
                return letter
            heappop(letters)
        return None

    def validate(self) -> None:
        """Assert the invariants; tests call it after every step."""
        assert len(self._letters) <= DONE_IDS_MAX
        assert self._count == sum(len(done.ids) for done in self._done.values())
        for done in self._done.values():
            assert done.newest is not None
            assert done.ids, "nothing is remembered of a key"
            assert max(done.ids) <= done.newest

    def _forget(self, key: str, where: TopicPartition, message_ids: Collection[MessageId]) -> None:
        done = self._done[key, where]
        for message_id in message_ids:
            del done.ids[message_id]
        self._count -= len(message_ids)
        if not done.ids:
            del self._done[key, where]
