"""The state that the brokers of a run share, and its invariants."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from keyshard.broker.wire.frames import api
from keyshard.broker.wire.permits import LENT_MAX
from keyshard.core.position.entry import TopicPartition
from keyshard.core.ring.key_slot import key_slot
from tests.stored_entries import batch_payload, plain, stored
from tests.support.frame_broker.topics import Entry, Member, Topics, int32

READER_QUEUE = 1_000
LATE = 1_000_000
"""Number of an entry that is sent to closed consumers only."""
PLAIN, CORRUPT, ENCRYPTED, DECLARING = "plain", "corrupt", "encrypted", "declaring"
DECLARED = (2**31 - 1, 2**30, 1_000_001, -1, -3, -(2**31), -(2**30))
"""Numbers of messages that batches declare which cannot have so many."""


def drawn(number: int, draw: random.Random) -> Entry:
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
        payload = batch_payload([plain(b"vv", key)] * count)
        if count > 2 and not draw.randrange(3):
            ack_set, left = (0b101,), 2
    if kind == DECLARING:
        ack_set = ()
        metadata.num_messages_in_batch = left = draw.choice(DECLARED)
    if kind == ENCRYPTED:
        metadata.encryption_keys.add(key=b"k")
    data = stored(metadata.SerializeToString(), payload)
    if kind == CORRUPT:
        data = data[:-1] + bytes([data[-1] ^ 1])
    return Entry(number, key_slot(key), data, left, ack_set)


@dataclass(eq=False)
class JudgedMember(Member):
    """A consumer or Reader, with the limits of what its client may do."""

    queue: int = 0
    """Most messages that it may be sent."""
    excess: int = 0
    """Permits beyond that, because of a batch that declared a negative number of messages."""
    told: frozenset[int] = frozenset()
    """Entries that its application had acknowledged; its client sends these before permits."""


class Model(Topics):
    """Topic partitions, each with a subscription; called with the lock held."""

    def __init__(self, draw: random.Random, topics: list[TopicPartition]) -> None:
        super().__init__()
        self.draw = draw
        self.queue_max = 1_000
        """Most messages that a consumer lets be sent ahead."""
        self.parks = 0.0
        """Chance that a consumer is parked, between two entries that it is sent."""
        names = [where.name for where in topics]
        self.written: dict[str, set[int]] = {name: set() for name in names}
        """Acknowledgements that a restart keeps."""
        self.taken: set[tuple[str, int]] = set()
        """All that was ever acknowledged."""
        self.done: dict[str, set[int]] = {name: set() for name in names}
        """Entries that the application has acknowledged, except refused or forgotten ones."""
        self.handed_out: set[tuple[str, int]] = set()
        """Entries that the application has received."""
        self.owner = {name: draw.randrange(2) for name in names}
        self.broken: list[str] = []
        """Promises that were."""

    def publish(self, name: str) -> None:
        log = self.logs[name]
        log.append(drawn(len(log), self.draw))
        self.stir(name)

    def join(self, member: Member) -> bool:
        assert isinstance(member, JudgedMember)
        if member.hash_range is not None:
            member.told = frozenset(self.done[member.topic])
        return super().join(member)

    def grant(self, member: Member, permits: int) -> None:
        assert isinstance(member, JudgedMember)
        if not 0 < permits < 2**31:
            self.broken.append(f"a broker refuses to grant {permits}")
        member.queue = READER_QUEUE if member.hash_range is None else self.queue_max
        if int32(member.permits + permits) > member.queue + LENT_MAX + member.excess:
            self.broken.append(f"{member.permits} and {permits} permits, queue of {member.queue}")
        super().grant(member, permits)

    def deliver(self, member: Member, entry: Entry) -> None:
        assert isinstance(member, JudgedMember)
        if entry.number in member.told & self.done[member.topic]:
            self.broken.append(f"{entry.number} was acknowledged before, and comes again")
        member.excess += max(0, -entry.messages)
        super().deliver(member, entry)
        if member.hash_range is not None and self.draw.random() < self.parks:
            member.parked = self.draw.choice([1, 1, 1, 2])

    def acknowledge(self, member: Member, numbers: Iterable[int]) -> None:
        for number in numbers:
            if (member.topic, number) not in self.handed_out:
                self.broken.append(f"entry {number} is acknowledged, and nobody has it")
            self.taken.add((member.topic, number))
            self.acked[member.topic].add(number)
        self.stir(member.topic)

    def unload(self, name: str) -> list[Member]:
        """Move a topic partition to another broker; returns its former members."""
        gone = [one for one in self.members.values() if one.topic == name]
        for one in gone:
            self.leave(one.session, one.consumer_id)
        self.owner[name] = 1 - self.owner[name]
        return gone

    def crash(self) -> None:
        """Forget unwritten acknowledgements."""
        for name, done in self.done.items():
            done.clear()
            kept = {number for number in self.acked[name] if self.draw.random() < 0.5}
            self.acked[name] = self.written[name] | kept
            self.written[name] = set(self.acked[name])

    def to_come(self, name: str) -> set[int]:
        """Entries that are not acknowledged."""
        return {one.number for one in self.logs[name]} - self.acked[name]
