"""Data of the lanes: entries, their messages, the queue of each key, and ranges."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from keyshard.core.dead_letter import StoredDeadLetter
from keyshard.core.message import Message
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.ring.hash_range import RING_SIZE, HashRange


class Arrival(NamedTuple):
    """A received entry whose messages are in no lane."""

    topic_partition: TopicPartition
    range_index: int
    """Index of the range that received it."""
    entry_id: EntryId
    messages: Sequence[Message]
    """In the order of their indices."""


@dataclass(slots=True, eq=False)
class Entry:
    """An entry whose messages are handled one by one."""

    topic_partition: TopicPartition
    id: EntryId
    waiting: int
    """Messages that are not done yet."""
    published: datetime
    """Publish time of its first message."""
    owner: int = 0
    """Index of the range that counts it."""
    started: bool = False
    """Whether one of its messages was started."""
    has_keys: bool = False
    """Whether it has messages of several keys."""


@dataclass(slots=True, eq=False)
class Work:
    """One message, its entry and the queue of its key."""

    message: Message
    entry: Entry | None
    """``None`` for a replayed dead letter: its entry is done already."""
    queue: KeyQueue
    number: int = 0
    """Number in the order of receipt; 0 for a dead letter, which comes first."""
    started_s: float = 0.0
    """Start of the running attempt."""
    resting: StoredDeadLetter | None = None
    """The dead letter that is replayed."""
    parking: bool = False
    """Whether a dead letter is being written; then no handler works on it."""
    publishing: bool = False
    """Whether its outputs are being published; then no handler works on it."""


@dataclass(slots=True, eq=False)
class KeyQueue:
    """Messages of one key that are not done, oldest first; the head may be running."""

    key: str | None
    slot: int | None
    """Slot of the key on the ring; ``None`` for messages without a key."""
    owner: int
    """Index of the range that owns it now."""
    work: deque[Work] = field(default_factory=deque)
    running: bool = False
    attempts: int = 0
    """Failed attempts of the head."""
    failing_since_s: float = 0.0
    """Start of the first attempt of the head, if one failed."""
    reason: str | None = None
    """Error of the newest attempt of the head."""
    not_before_s: float = 0.0
    """Earliest time of the next attempt of the head."""
    first_failed_s: float | None = None
    """Time of the first failure of the head; ``None`` without one."""
    outage: int = 0
    """Number of the circuit's opening after which the failed attempts were counted."""
    behind: int = 0
    """Number behind which it queues, though its head is older."""


@dataclass(slots=True, eq=False)
class LaneRange:
    """Waiting messages of one range."""

    ready: list[tuple[int, int, KeyQueue]] = field(default_factory=list)
    """Heap of keys whose head may start and did not fail, by the number of the head. So a key
    with many messages progresses with the others, and does not run alone at the end."""
    failed: list[tuple[int, int, KeyQueue]] = field(default_factory=list)
    """Heap of keys whose head failed and may be retried now."""
    running: int = 0
    listed: bool = False
    """Whether it is in the list of ranges to check."""
    waiting: int = 0
    """Messages that are not done and do not run."""
    done: int = 0
    """Messages done since the last change of ranges."""
    replays: int = 0
    """Keys whose head is a replayed dead letter."""
    entries: dict[Entry, None] = field(default_factory=dict)
    """Entries that are not completed, in order of receipt."""

    @property
    def startable(self) -> int:
        """Keys whose head may start."""
        return len(self.ready) + len(self.failed)

    def counts(self) -> RangeCounts:
        """Return the present counts."""
        oldest = next(iter(self.entries), None)
        published = None if oldest is None else oldest.published
        return RangeCounts(self.startable, self.running, self.waiting, self.done, published)


class HeldSlots:
    """Slots whose keys start no message."""

    def __init__(self) -> None:
        self.ranges: tuple[HashRange, ...] = ()
        self._flags = bytearray(RING_SIZE)

    def add(self, slots: Sequence[HashRange]) -> None:
        """Hold more slots."""
        self.ranges += tuple(slots)
        for hash_range in slots:
            self._flags[hash_range.start : hash_range.end + 1] = b"\1" * len(hash_range)

    def __contains__(self, slot: int | None) -> bool:
        return slot is not None and bool(self._flags[slot])


class RangeCounts(NamedTuple):
    """Counts of one range at one moment: messages, except ``ready``, which counts keys."""

    ready: int
    running: int
    waiting: int
    done: int
    oldest: datetime | None
    """Publish time of the uncompleted entry that it received first."""


def without(heap: list[tuple[int, int, KeyQueue]], queue: KeyQueue) -> bool:
    """Remove a key from a heap; return whether it was there."""
    others = [one for one in heap if one[2] is not queue]
    if len(others) == len(heap):
        return False
    heapq.heapify(others)
    heap[:] = others
    return True
