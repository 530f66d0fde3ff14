"""A broker of a few lines with a backlog that has no end; it minds permits as Pulsar's does.

It sends in rounds of at most 100 entries and 5 MiB to each consumer that has permits. Permits count
messages and may go below zero. The next subscription gets unacknowledged messages again.
"""

from __future__ import annotations

import itertools
import socket
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from keyshard.core.ring.hash_range import RING_SIZE, HashRange
from keyshard.core.ring.key_slot import key_slot
from tests.memory.shape import Shape
from tests.support.frame_broker.server import FrameServer, QueuedSession
from tests.support.frame_broker.session import range_of
from tests.support.frame_broker.topics import LEDGER

ROUND_ENTRIES, ROUND_BYTES = 100, 5 << 20


@dataclass(slots=True)
class Backlog:
    """Entries of one range of a topic partition, in their order."""

    small: tuple[bytes, int]
    large: tuple[bytes, int]
    small_first: int
    sent: int = 0
    unacknowledged: dict[int, tuple[bytes, int]] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Member:
    """A consumer, or a Reader."""

    number: int
    topic: str
    backlog: Backlog
    again: deque[int]
    reads: bool
    next_entry: int
    permits: int = 0


class Session(QueuedSession):
    """A connection."""

    broker: BacklogBroker

    def __init__(self, broker: BacklogBroker, stream: socket.socket) -> None:
        super().__init__(broker, stream)
        self._members: dict[int, Member] = {}

    def handle(self, name: str, command: Any) -> None:
        with self.changed:
            super().handle(name, command)
            self.changed.notify()

    def due(self) -> bool:
        while not self.unsent and any(one.permits > 0 for one in self._members.values()):
            for member in self._members.values():
                self._round(member)
        return super().due()

    def _round(self, member: Member) -> None:
        backlog, size = member.backlog, 0
        for _ in range(min(ROUND_ENTRIES, member.permits)):
            if member.again:
                number = member.again.popleft()
                stored = backlog.unacknowledged.get(number)
                if stored is None:
                    continue  # acknowledged by who had it before
            else:
                small = (member.next_entry if member.reads else backlog.sent) < backlog.small_first
                stored = backlog.small if small else backlog.large
                if member.reads:
                    number, member.next_entry = member.next_entry, member.next_entry + 1
                else:
                    number, backlog.sent = self.broker.next_entry(member.topic), backlog.sent + 1
                    backlog.unacknowledged[number] = stored
            data, messages = stored
            member.permits -= messages
            self.deliver(member.number, LEDGER, number, data)
            size += len(data)
            if size >= ROUND_BYTES:
                break

    # -- commands ---------------------------------------------------------------------------------

    def _partitioned_metadata(self, asked: Any) -> None:
        self.count_partitions(asked, self.broker.shape.partitions)

    def _subscribe(self, asked: Any) -> None:
        hash_range = range_of(asked)
        reads = hash_range is None
        topic = asked.topic.decode()
        backlog = self.broker.backlog(topic, hash_range or HashRange(0, RING_SIZE - 1))
        again = deque() if reads else deque(sorted(backlog.unacknowledged))
        start = asked.start_message_id.entry if reads else 0
        self._members[asked.consumer_id] = Member(
            asked.consumer_id, topic, backlog, again, reads, start
        )
        self.succeed(asked)

    def _flow(self, given: Any) -> None:
        member = self._members.get(given.consumer_id)
        if member is not None:
            member.permits += given.permits

    def _ack(self, given: Any) -> None:
        member = self._members.get(given.consumer_id)
        if member is None:
            return
        for one in given.message_id:
            self.broker.acknowledge(member.topic, one.entry)
        self.confirm(given)

    def _get_last_message_id(self, asked: Any) -> None:
        self.name_last(asked, LEDGER, 1 << 40)

    def _close_consumer(self, asked: Any) -> None:
        self._members.pop(asked.consumer_id, None)
        if asked.request_id:
            self.succeed(asked)


class BacklogBroker(FrameServer):
    """The broker; listens until it is closed."""

    session = Session

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._lock = threading.Lock()
        self._numbers: dict[str, itertools.count[int]] = {}
        self._backlogs: dict[tuple[str, HashRange], Backlog] = {}
        super().__init__()

    def next_entry(self, topic: str) -> int:
        """The number of an entry that is sent for the first time."""
        with self._lock:
            return next(self._numbers.setdefault(topic, itertools.count()))

    def backlog(self, topic: str, ring: HashRange) -> Backlog:
        """Backlog of a range of a topic partition."""
        shape = self.shape
        with self._lock:
            found = self._backlogs.get((topic, ring))
            if found is None:
                key = next(
                    key
                    for i in itertools.count()
                    if key_slot(key := f"k{i}".ljust(shape.key_bytes, "-")) in ring
                )
                found = self._backlogs[topic, ring] = Backlog(
                    shape.entry(key, small=True), shape.entry(key, small=False), shape.small_first
                )
            return found

    def acknowledge(self, topic: str, number: int) -> None:
        """An entry of a topic partition comes no more."""
        with self._lock:
            for (where, _), backlog in self._backlogs.items():
                if where == topic:
                    backlog.unacknowledged.pop(number, None)
