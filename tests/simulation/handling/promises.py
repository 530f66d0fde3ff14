"""The promises that the checkers of histories cannot know of: checkpoints, dead letters, and stops.

Each is judged when it happens, against the durable state at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from keyshard.core.dead_letter import (
    DeadLetter,
    DeadLetterKind,
    DoneMarker,
    DoneUpToMarker,
    RunsAgainNote,
)
from keyshard.core.message import MessageId
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.topic_segments import scalable_topic_of


class Name(NamedTuple):
    """A message as the broker stored it."""

    topic: str
    partition: int
    id: MessageId

    @classmethod
    def of(cls, where: TopicPartition, entry_id: EntryId) -> Name:
        """The first message of an entry."""
        return cls(where.topic, where.partition, MessageId(*entry_id, 0))


class Place(NamedTuple):
    """The scope of the promised order: of a segment, its scalable topic."""

    topic: str
    partition: int
    key: str | None
    deletions: int
    """How often the topic was deleted before: the next one of its name is another topic."""


class Rest(NamedTuple):
    """A parked dead letter that no marker calls replayed."""

    position: EntryId
    seq: int


class Promises:
    """The promises of one program over all its starts; :attr:`broken` is the first broken one.

    Args:
        discarded: Called with name, key and sequence number of each message whose dead letter an
            operator discards.
        commits_in_order: Whether messages of a key are committed in their order. Batches are
            acknowledged in any order.
    """

    def __init__(
        self, discarded: Callable[[Name, str, int], None], *, commits_in_order: bool
    ) -> None:
        self._discarded = discarded
        self._commits_in_order = commits_in_order
        self.broken = ""
        self.finished: set[Name] = set()
        """Messages that a handler completed, or that rest for good as a dead letter."""
        self.kept: dict[EntryId, Name] = {}
        """Dead letters that stay in their topic until another client acknowledges them."""
        self.discarding: set[str] = set()
        """Keys whose dead letters an operator discards now, or did when its process died or the
        broker refused."""
        self._disturbances = 0
        self._handled: dict[Name, int] = {}
        self._of_this_life: set[Name] = set()
        """Messages that the process received and completed; it remembers them."""
        self._resting: dict[str, dict[Name, tuple[Place, Rest]]] = {}
        self._stored: dict[Name, int] = {}
        """Disturbances before the newest dead letter of a message, whose original was received
        then."""
        self._started: dict[Place, dict[Name, int]] = {}
        """Messages that user code got, with their sequence numbers."""
        self._replayed: dict[Place, dict[Name, int]] = {}
        """Messages that were done as dead letters, with their sequence numbers."""
        self._deletions: dict[str, list[int]] = {}
        """Last ledgers before each deletion of a topic."""
        self.saved_checkpoint: Checkpoint | None = None
        """The newest one."""

    def deleted(self, topic: str, last_ledger: int) -> None:
        """A topic is deleted; messages after its last ledger belong to the next one of its name."""
        self._deletions.setdefault(topic, []).append(last_ledger)

    def life_begins(self) -> None:
        """A process begins, and remembers nothing."""
        self._of_this_life.clear()

    def left(self, names: Iterable[Name]) -> None:
        """Excuse that messages come again: their process ended before they were acknowledged."""
        for name in names:
            self._handled.pop(name, None)

    def disturbed(self) -> None:
        """After this event, completed messages may come again."""
        self._disturbances += 1

    def rests(self, name: Name, key: str | None) -> bool:
        """Whether a dead letter of a message waits to be replayed."""
        return key is not None and name in self._resting.get(key, {})

    def started(self, name: Name, key: str | None, seq: int) -> None:
        """User code gets a message."""
        place, text = self._place(name, key), f"{name.topic} {key}:{seq}"
        if name.topic.endswith("-DLQ"):
            self._break(f"{text} lies in a dead-letter topic and was handed out")
        resting = self._resting.get(key or "", {})
        for other, rest in resting.values():
            if other == place and rest.seq < seq:
                self._break(f"{text} was started while {rest.seq} before it rests as a letter")
        if self._handled.get(name) == self._disturbances:
            self._break(f"{text} came again, though nothing was forgotten")
        if name in self._of_this_life and name not in resting:
            self._break(f"{text} came again to the process that had done it")
        if name not in resting:
            self._older_runs(place, seq)
            if self._is_saved(name):
                self._break(f"{text} is done in the checkpoint, and came again")
            self._in_order(name, place, seq, text)

    def completed(self, name: Name) -> None:
        """User code is done with a message."""
        self.finished.add(name)
        self._handled[name] = self._disturbances
        dead_letters = [resting[name] for resting in self._resting.values() if name in resting]
        for place, rest in dead_letters:
            self._replayed.setdefault(place, {})[name] = rest.seq
        if not dead_letters:
            # Resting messages may have come to an earlier process, and not to this one.
            self._of_this_life.add(name)

    def stored(
        self,
        position: EntryId,
        found: DeadLetter | DoneMarker | RunsAgainNote | DoneUpToMarker,
        seq: int,
    ) -> None:
        """Record a message stored in the dead-letter topic."""
        if isinstance(found, RunsAgainNote):
            return
        if not isinstance(found, DeadLetter):
            self._released(found)
            return
        message = found.message
        name = Name(message.topic, message.partition, message.message_id)
        if found.kind is not DeadLetterKind.PARKED:
            if self._handled.get(name) == self._disturbances:
                self._break(f"{name} is a letter again, though nothing was forgotten")
            self.kept[position] = name
            self.completed(name)
            return
        key = found.key
        assert key is not None
        self._of_this_life.add(name)
        self._stored[name] = self._disturbances
        resting = self._resting.setdefault(key, {})
        resting.setdefault(name, (self._place(name, key), Rest(position, seq)))
        self.finished.discard(name)

    def saved(self, text: str) -> None:
        """A checkpoint is stored."""
        self.saved_checkpoint = Checkpoint.from_json(text)

    def unfinished(self) -> list[str]:
        """Keys with resting dead letters."""
        return sorted(key for key, resting in self._resting.items() if resting)

    def _place(self, name: Name, key: str | None) -> Place:
        topic = scalable_topic_of(name.topic)
        deletions = sum(name.id.ledger > last for last in self._deletions.get(topic, ()))
        return Place(topic, name.partition, key, deletions)

    def _in_order(self, name: Name, place: Place, seq: int, text: str) -> None:
        """Check that no newer message of the key is done in the checkpoint, which stays so."""
        if place.key is None or name in self._stored or not self._commits_in_order:
            return
        for other, of in self._started.setdefault(place, {}).items():
            if of > seq and other not in self._stored and self._is_saved(other):
                self._break(f"{text} came after {of}, which is done in the checkpoint")
        self._started[place][name] = seq

    def _older_runs(self, place: Place, seq: int) -> None:
        """Let newer replayed messages run again after this one, if their originals may come."""
        for name, newer in self._replayed.get(place, {}).items():
            if newer > seq and self._stored[name] < self._disturbances:
                self._handled.pop(name, None)

    def _released(self, found: DoneMarker | DoneUpToMarker) -> None:
        resting = self._resting.get(found.key, {})
        for name, (_, rest) in list(resting.items()):
            if isinstance(found, DoneUpToMarker):
                covered = rest.position <= found.up_to
            else:
                where = TopicPartition(name.topic, name.partition)
                covered = (where, name.id) == (found.topic_partition, found.message_id)
            if covered:
                # The discard of a key may have ended early; its messages are replayed later.
                replayed = isinstance(found, DoneMarker) and name in self.finished
                if found.key in self.discarding and not replayed:
                    self.completed(name)
                    self._discarded(name, found.key, rest.seq)
                del resting[name]
                if name not in self.finished:
                    self._break(f"{found.key}:{rest.seq} is called replayed, and was not handled")

    def _is_saved(self, name: Name) -> bool:
        if self.saved_checkpoint is None:
            return False
        where = TopicPartition(name.topic, name.partition)
        of, entry = self.saved_checkpoint.partitions.get(where), EntryId(*name.id[:2])
        if name.id.batch_index in self.saved_checkpoint.handled.get(where, {}).get(entry, ()):
            return True
        return of is not None and of.covers(entry)

    def _break(self, text: str) -> None:
        self.broken = self.broken or text
