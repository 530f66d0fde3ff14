"""What lanes are made of: entries, their messages, the queue of each key, and ranges."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from keyshard.core.dead_letter.letters import Resting
from keyshard.core.message import Message
from keyshard.core.position.entry import EntryId, TopicPartition


@dataclass(slots=True, eq=False)
class Entry:
    """An entry whose messages are handled one by one."""

    topic_partition: TopicPartition
    id: EntryId
    waiting: int
    """Messages that are not done yet."""
    published: datetime
    """When its first message was published."""
    owner: int = 0
    """Index of the range that it counts for."""
    begun: bool = False
    """Whether a message of it was started."""


@dataclass(slots=True, eq=False)
class Work:
    """One message, its entry and the queue of its key."""

    message: Message
    entry: Entry | None
    """``None`` for a dead letter that is replayed: its entry is done already."""
    queue: KeyQueue
    number: int = 0
    """Where it stands in the order of receipt; 0 for a dead letter, which goes before."""
    started_s: float = 0.0
    """When the running attempt began."""
    resting: Resting | None = None
    """The dead letter that is replayed."""
    parking: bool = False
    """Whether a letter is being written, so that no handler works on it."""


@dataclass(slots=True, eq=False)
class KeyQueue:
    """Messages of one key that are not done, oldest first; the head may be running."""

    key: str | None
    slot: int | None
    """Where the key lies on the ring; ``None`` for messages without a key."""
    owner: int
    """Index of the range that has it now."""
    work: deque[Work] = field(default_factory=deque)
    running: bool = False
    attempts: int = 0
    """Failed attempts of the head."""
    failing_since_s: float = 0.0
    """When the first attempt of the head began, if one failed."""
    reason: str | None = None
    """Why the newest attempt of the head failed."""
    not_before_s: float = 0.0
    """When the head may be tried again."""
    first_failed_s: float | None = None
    """When an attempt of the head failed first; ``None`` while none did."""
    weather: int = 0
    """After which opening of the circuit its failed attempts were counted."""
    behind: int = 0
    """Number behind which it lines up, though its head is older."""


@dataclass(slots=True, eq=False)
class LaneRange:
    """What waits in one range."""

    ready: list[tuple[int, int, KeyQueue]] = field(default_factory=list)
    """Heap of the keys whose head may be started and did not fail, by the number of the head: a key
    with many messages keeps up with the others, and does not work alone at the end."""
    failed: list[tuple[int, int, KeyQueue]] = field(default_factory=list)
    """The same of the keys whose head failed, and whose time has come."""
    running: int = 0
    listed: bool = False
    """Whether it is among the ranges to look at."""
    waiting: int = 0
    """Messages that are not done and do not run."""
    done: int = 0
    """Messages that are done, since the ranges are as they are."""
    entries: dict[Entry, None] = field(default_factory=dict)
    """Entries that are not completed, in order of receipt."""

    @property
    def startable(self) -> int:
        """Keys whose head may be started."""
        return len(self.ready) + len(self.failed)


class RangeCounts(NamedTuple):
    """What one range holds at one moment; messages, but for ``ready``, which counts keys."""

    ready: int
    running: int
    waiting: int
    done: int
    oldest: datetime | None
    """When the entry that it received first, of those not completed, was published."""
