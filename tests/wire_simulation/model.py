"""The state that the brokers of a run share: entries, subscriptions, and invariants."""

from __future__ import annotations

import random
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import google_crc32c

from keyshard.broker.wire.frames import api
from keyshard.broker.wire.permits import LENT_MAX
from keyshard.core.position.entry import TopicPartition
from keyshard.core.ring.hash_range import HashRange
from keyshard.core.ring.key_slot import key_slot

LEDGER = 7
READER_QUEUE = 1_000
LATE = 1_000_000
"""Number of an entry that is sent to closed consumers only."""
PLAIN, CORRUPT, ENCRYPTED, DECLARING = "plain", "corrupt", "encrypted", "declaring"
DECLARED = (2**31 - 1, 2**30, 1_000_001, -1, -3, -(2**31), -(2**30))
"""Numbers of messages that batches declare which cannot have so many."""

Send = Callable[[str, Any, bytes], None]
"""Sends a command and stored bytes to a client."""


@dataclass(frozen=True, slots=True)
class Stored:
    """An entry."""

    number: int
    slot: int
    kind: str
    messages: int
    """Messages that are still to be delivered; permits count them."""
    ack_set: tuple[int, ...]
    data: bytes


def stored(number: int, draw: random.Random) -> Stored:
    """An entry of some kind."""
    key = f"k{draw.randrange(50)}"
    kind = draw.choices([PLAIN, CORRUPT, ENCRYPTED, DECLARING], [20, 2, 1, 1])[0]
    count, left = draw.choice([0, 0, 1, 3, 7]), 1
    ack_set: tuple[int, ...] = ()
    said = {"producer_name": b"p", "sequence_id": number, "publish_time": 1}
    metadata = api.MessageMetadata(**said, partition_key=key.encode())
    payload = b"%d" % number
    if count:
        metadata.num_messages_in_batch = left = count
        # Each message has the size of its payload (field 3) and its key (field 2).
        one = b"\x18\x02\x12" + bytes([len(key)]) + key.encode()
        payload = (struct.pack(">I", len(one)) + one + b"vv") * count
        if count > 2 and not draw.randrange(3):
            ack_set, left = (0b101,), 2
    if kind == DECLARING:
        ack_set = ()
        metadata.num_messages_in_batch = left = draw.choice(DECLARED)
    if kind == ENCRYPTED:
        metadata.encryption_keys.add(key=b"k")
    head = metadata.SerializeToString()
    body = struct.pack(">I", len(head)) + head + payload
    checksum = google_crc32c.value(body) ^ (kind == CORRUPT)
    data = b"\x0e\x01" + struct.pack(">I", checksum) + body
    return Stored(number, key_slot(key), kind, left, ack_set, data)


@dataclass(eq=False, slots=True)
class Member:
    """A consumer or Reader, as its broker knows it."""

    session: object
    consumer_id: int
    topic: str
    send: Send
    hash_range: HashRange | None
    """``None``: a Reader, of all entries."""
    position: int
    permits: int = 0
    queue: int = 0
    """Most messages that it may be sent."""
    excess: int = 0
    """Permits beyond that, because of a batch that declared a negative number of messages."""
    parked: int = 0
    """Number of events until it is served again."""
    told: frozenset[int] = frozenset()
    """Entries that its application had acknowledged; its client sends these before permits."""


@dataclass(eq=False)
class Model:
    """Topic partitions, each with a subscription; called with the lock held."""

    draw: random.Random
    topics: list[TopicPartition]
    lock: threading.RLock = field(default_factory=threading.RLock)
    queue_max: int = 1_000
    """Most messages that a consumer lets be sent ahead."""
    parks: float = 0.0
    """Chance that a consumer is parked, between two entries that it is sent."""

    def __post_init__(self) -> None:
        names = [where.name for where in self.topics]
        self.logs: dict[str, list[Stored]] = {name: [] for name in names}
        self.acked: dict[str, set[int]] = {name: set() for name in names}
        self.written: dict[str, set[int]] = {name: set() for name in names}
        """Acknowledgements that a restart keeps."""
        self.taken: set[tuple[str, int]] = set()
        """All that was ever acknowledged."""
        self.done: dict[str, set[int]] = {name: set() for name in names}
        """Entries that the application has acknowledged, except refused or forgotten ones."""
        self.handed_out: set[tuple[str, int]] = set()
        """Entries that the application has received."""
        self.owner = {name: self.draw.randrange(2) for name in names}
        self.members: dict[tuple[object, int], Member] = {}
        self.broken: list[str] = []
        """Promises that were."""

    def publish(self, name: str) -> None:
        log = self.logs[name]
        log.append(stored(len(log), self.draw))
        self.stir(name)

    def stir(self, name: str) -> None:
        """Count an event of a topic partition for its parked members, and serve all others."""
        for member in list(self.members.values()):
            if member.topic == name:
                member.parked = max(0, member.parked - 1)
                self.dispatch(member)

    def subscribe(self, member: Member) -> bool:
        """Returns whether its range was free."""
        mine = member.hash_range
        others = [one for one in self.members.values() if one.topic == member.topic]
        if mine is not None and any(one.hash_range == mine for one in others):
            return False
        member.told = frozenset(self.done[member.topic]) if mine is not None else frozenset()
        self.members[member.session, member.consumer_id] = member
        return True

    def leave(self, session: object, consumer_id: int | None = None) -> None:
        for key in list(self.members):
            if key[0] is session and consumer_id in (None, key[1]):
                del self.members[key]

    def flow(self, session: object, consumer_id: int, permits: int) -> None:
        member = self.members.get((session, consumer_id))
        if member is None:
            return
        if not 0 < permits < 2**31:
            self.broken.append(f"a broker refuses to grant {permits}")
        member.queue = READER_QUEUE if member.hash_range is None else self.queue_max
        member.permits = int32(member.permits + permits)
        if member.permits > member.queue + LENT_MAX + member.excess:
            self.broken.append(f"{member.permits} permits of a queue of {member.queue}")
        self.stir(member.topic)

    def dispatch(self, member: Member) -> None:
        log, acked = self.logs[member.topic], self.acked[member.topic]
        while member.permits > 0 and member.position < len(log) and not member.parked:
            one = log[member.position]
            member.position += 1
            if member.hash_range is not None and (
                one.slot not in member.hash_range or one.number in acked
            ):
                continue
            if one.number in member.told & self.done[member.topic]:
                self.broken.append(f"{one.number} was acknowledged before, and comes again")
            member.permits = int32(member.permits - one.messages)
            member.excess += max(0, -one.messages)
            member.send("message", message(member.consumer_id, one.number, one.ack_set), one.data)
            if member.hash_range is not None and self.draw.random() < self.parks:
                member.parked = self.draw.choice([1, 1, 1, 2])

    def acknowledge(self, session: object, consumer_id: int, numbers: list[int]) -> bool:
        """Returns whether the consumer is there; a closed one gets no answer."""
        member = self.members.get((session, consumer_id))
        if member is None:
            return False
        for number in numbers:
            if (member.topic, number) not in self.handed_out:
                self.broken.append(f"entry {number} is acknowledged, and nobody has it")
            self.acked[member.topic].add(number)
            self.taken.add((member.topic, number))
        self.stir(member.topic)
        return True

    def unload(self, name: str) -> list[Member]:
        """Move a topic partition to another broker; returns its former members."""
        gone = [one for one in self.members.values() if one.topic == name]
        for one in gone:
            del self.members[one.session, one.consumer_id]
        self.owner[name] = 1 - self.owner[name]
        return gone

    def crash(self) -> None:
        """Forget unwritten acknowledgements."""
        for name, acked in self.acked.items():
            self.done[name].clear()
            kept = {number for number in acked if self.draw.random() < 0.5}
            self.acked[name] = self.written[name] | kept
            self.written[name] = set(self.acked[name])

    def to_come(self, name: str) -> set[int]:
        """Entries that are not acknowledged."""
        return {one.number for one in self.logs[name]} - self.acked[name]


def int32(number: int) -> int:
    """Return a number as a broker counts it: in 32 bits, with wrap-around."""
    return (number + 2**31) % 2**32 - 2**31


def message(consumer_id: int, number: int, ack_set: tuple[int, ...] = ()) -> Any:
    where = api.MessageId(ledger=LEDGER, entry=number)
    return api.Message(consumer_id=consumer_id, message_id=where, ack_set=ack_set)
