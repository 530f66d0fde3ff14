"""A broker of a few lines with a backlog that has no end; it minds permits as Pulsar's does.

It sends in rounds of at most 100 entries and 5 MiB to each consumer that has permits. Permits count
messages and may go below zero. The next subscription gets unacknowledged messages again.
"""

from __future__ import annotations

import itertools
import socket
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from keyshard.broker.wire.frames import api
from keyshard.core.ring.hash_range import HashRange
from keyshard.core.ring.key_slot import key_slot
from tests.memory.shape import Shape
from tests.support.frame_broker import FrameServer, SocketSession, framed

LEDGER = 7
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


class Session(SocketSession):
    """A connection: a thread that reads, and one that sends."""

    def __init__(self, broker: BacklogBroker, stream: socket.socket) -> None:
        super().__init__(stream)
        self._broker = broker
        self._changed = threading.Condition()
        self._answers: deque[bytes] = deque()
        self._members: dict[int, Member] = {}
        self._ended = False

    def start(self) -> None:
        super().start()
        threading.Thread(target=self._write, name="served", daemon=True).start()

    def put(self, data: bytes) -> None:
        self._answers.append(data)

    def handle(self, name: str, command: Any) -> None:
        with self._changed:
            super().handle(name, command)
            self._changed.notify()

    def ended(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()

    def _write(self) -> None:
        with suppress(OSError):
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._ended or self._answers or self._due())
                    if self._ended:
                        break
                    sending = list(self._answers)
                    self._answers.clear()
                    for member in self._due():
                        sending += self._round(member)
                for data in sending:
                    self.stream.sendall(data)
        self.stream.close()

    def _due(self) -> list[Member]:
        return [one for one in self._members.values() if one.permits > 0]

    def _round(self, member: Member) -> list[bytes]:
        backlog, frames, size = member.backlog, [], 0
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
                    number, backlog.sent = self._broker.next_entry(member.topic), backlog.sent + 1
                    backlog.unacknowledged[number] = stored
            data, messages = stored
            member.permits -= messages
            where = api.MessageId(ledger=LEDGER, entry=number)
            content = api.Message(consumer_id=member.number, message_id=where)
            frames.append(framed("message", content, data))
            size += len(data)
            if size >= ROUND_BYTES:
                break
        return frames

    # -- commands ---------------------------------------------------------------------------------

    def _partitioned_metadata(self, asked: Any) -> None:
        self.count_partitions(asked, self._broker.shape.partitions)

    def _lookup(self, asked: Any) -> None:
        self.lead_to(asked, self._broker.url)

    def _subscribe(self, asked: Any) -> None:
        reads = asked.HasField("start_message_id")
        ring = HashRange(0, 65_535)
        if not reads:
            where = asked.key_shared.hash_ranges[0]
            ring = HashRange(where.start, where.end)
        topic = asked.topic.decode()
        backlog = self._broker.backlog(topic, ring)
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
            self._broker.acknowledge(member.topic, one.entry)
        self.confirm(given)

    def _get_last_message_id(self, asked: Any) -> None:
        self.name_last(asked, LEDGER, 1 << 40)

    def _close_consumer(self, asked: Any) -> None:
        self._members.pop(asked.consumer_id, None)
        if asked.request_id:
            self.succeed(asked)


class BacklogBroker(FrameServer):
    """The broker; listens until it is closed."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._lock = threading.Lock()
        self._numbers: dict[str, itertools.count[int]] = {}
        self._backlogs: dict[tuple[str, HashRange], Backlog] = {}
        super().__init__()

    def session(self, stream: socket.socket) -> Session:
        return Session(self, stream)

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
