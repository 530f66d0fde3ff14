"""Brokers that speak frames, share entries, and answer requests by a script."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from keyshard.broker.wire.frames import api
from keyshard.core.protobuf import message
from keyshard.core.ring.hash_range import HashRange
from keyshard.core.ring.key_slot import key_slot
from tests.support.frame_broker import (
    CONFLICT,
    FrameServer,
    SocketSession,
    framed,
)

LEDGER, DEAD_LETTER_LEDGER = 7, 8
LETTERS = "-DLQ"
"""End of the name of the dead-letter topic; its messages are not delivered."""
STRING_SCHEMA = 1
"""Number of the type of a schema."""
SAID = b"said by the script"
"""Text of each refusal."""
Script = Callable[["Session", str, Any], bool]
"""Answers a command of a connection; returns whether it was answered."""


def entry(key: str, number: int) -> bytes:
    """A message of one key, as it is stored, without a checksum."""
    metadata = message({1: b"p", 2: number, 3: 1, 6: key.encode()})
    return struct.pack(">I", len(metadata)) + metadata + b"%d" % number


@dataclass(eq=False)
class Member:
    """A consumer or Reader."""

    session: Session
    consumer_id: int
    topic: str
    hash_range: HashRange | None
    """``None``: a Reader."""
    position: int
    permits: int = 0


@dataclass(eq=False)
class Cluster:
    """State that its brokers share; ``lock`` is held while any of it changes."""

    brokers: list[ScriptedBroker] = field(default_factory=list)
    partitions: int = 0
    keys: list[str] = field(default_factory=list)
    """Key of each entry, by number. The number modulo the partitions gives the partition."""
    acked: set[int] = field(default_factory=set)
    dead_letters: list[int] = field(default_factory=list)
    """Entries whose messages were stored as dead letters."""
    members: list[Member] = field(default_factory=list)
    owner_of: Callable[[str], int] = lambda _: 0
    lock: threading.RLock = field(default_factory=threading.RLock)

    def broker(self, host: str = "127.0.0.1", port: int = 0) -> ScriptedBroker:
        self.brokers.append(ScriptedBroker(self, host, port))
        return self.brokers[-1]

    def publish(self, count: int) -> None:
        with self.lock:
            for _ in range(count):
                self.keys.append(f"k{len(self.keys)}")
            self.dispatch()

    def dispatch(self) -> None:
        for member in self.members:
            while member.permits > 0 and member.position < len(self.keys):
                number = member.position
                member.position += 1
                mine = member.hash_range
                elsewhere = member.topic.endswith(LETTERS) or (
                    self.partitions
                    and not member.topic.endswith(f"-partition-{number % self.partitions}")
                )
                if elsewhere or (
                    mine is not None
                    and (number in self.acked or key_slot(self.keys[number]) not in mine)
                ):
                    continue
                member.permits -= 1
                where = api.MessageId(ledger=LEDGER, entry=number)
                output = api.Message(consumer_id=member.consumer_id, message_id=where)
                member.session.send("message", output, entry(self.keys[number], number))

    def close(self) -> None:
        for broker in self.brokers:
            broker.close()


class Session(SocketSession):
    """One connection."""

    def __init__(self, broker: ScriptedBroker, stream: socket.socket) -> None:
        super().__init__(stream)
        self.broker, self.cluster = broker, broker.cluster

    def put(self, data: bytes) -> None:
        if not self.broker.frozen:
            super().put(data)

    def send_half(self) -> None:
        """Send the first half of a frame, and nothing behind it."""
        self.put(framed("success", api.Success(request_id=0))[:7])

    def refuse_command(self, name: str, command: Any, code: int) -> None:
        """Answer a command as a broker does that refuses it."""
        said: dict[str, Any] = {"error": code, "message": SAID}
        if name == "connect":
            self.send("error", api.Error(request_id=2**64 - 1, **said))
        elif name == "send":
            self.send("send_error", api.SendError(
                producer_id=command.producer_id, sequence_id=command.sequence_id, **said
            ))  # fmt: skip
        elif name in ("lookup", "partitioned_metadata"):
            failed = {"lookup": 2, "partitioned_metadata": 1}[name]
            answer = {"lookup": api.LookupResponse,
                      "partitioned_metadata": api.PartitionedMetadataResponse}[name]  # fmt: skip
            output = answer(request_id=command.request_id, response=failed, **said)
            self.send(f"{name}_response", output)
        elif name == "ack":
            self.send("ack_response", api.AckResponse(
                consumer_id=command.consumer_id, request_id=command.request_id, **said
            ))  # fmt: skip
        elif name == "get_schema":
            self.send("get_schema_response", api.GetSchemaResponse(
                request_id=command.request_id, **said
            ))  # fmt: skip
        else:
            self.refuse(command, code, SAID)

    def handle(self, name: str, command: Any) -> None:
        self.broker.thawed.wait()
        with self.cluster.lock:
            self.broker.asked.append(name)
            if not self.broker.script(self, name, command):
                super().handle(name, command)

    def ended(self) -> None:
        with self.cluster.lock:
            self._leave(None)
        super().ended()

    def _leave(self, consumer_id: int | None) -> None:
        self.cluster.members = [
            one for one in self.cluster.members
            if one.session is not self or consumer_id not in (None, one.consumer_id)
        ]  # fmt: skip

    # -- one command each, with the lock held -----------------------------------------------------

    def _partitioned_metadata(self, asked: Any) -> None:
        self.count_partitions(asked, self.cluster.partitions)

    def _lookup(self, asked: Any) -> None:
        self.lead_to(asked, self.cluster.brokers[self.cluster.owner_of(asked.topic.decode())].url)

    def _subscribe(self, asked: Any) -> None:
        reads = asked.HasField("start_message_id")
        ranges = asked.key_shared.hash_ranges
        mine = None if reads or not ranges else HashRange(ranges[0].start, ranges[0].end)
        topic = asked.topic.decode()
        taken = mine is not None and any(
            one.topic == topic and one.hash_range is not None and one.hash_range.start <= mine.end
            and mine.start <= one.hash_range.end
            for one in self.cluster.members
        )  # fmt: skip
        if taken:
            self.refuse(asked, CONFLICT, SAID)
            return
        start = asked.start_message_id
        first = start.entry if reads and start.ledger == LEDGER else 0
        self.cluster.members.append(Member(self, asked.consumer_id, topic, mine, first))
        self.succeed(asked)

    def _flow(self, given: Any) -> None:
        for one in self.cluster.members:
            if one.session is self and one.consumer_id == given.consumer_id:
                one.permits += given.permits
        self.cluster.dispatch()

    def _ack(self, given: Any) -> None:
        self.cluster.acked.update(one.entry for one in given.message_id if one.ledger == LEDGER)
        self.confirm(given)

    def _close_consumer(self, asked: Any) -> None:
        self._leave(asked.consumer_id)
        self.succeed(asked)

    def _get_last_message_id(self, asked: Any) -> None:
        of_dead_letters = any(
            one.session is self and one.consumer_id == asked.consumer_id
            for one in self.cluster.members if one.topic.endswith(LETTERS)
        )  # fmt: skip
        count = 0 if of_dead_letters else len(self.cluster.keys)
        self.name_last(asked, LEDGER, count - 1)

    def _get_schema(self, asked: Any) -> None:
        schema = api.Schema(name=b"t", data=b"", type=STRING_SCHEMA)
        self.send("get_schema_response", api.GetSchemaResponse(
            request_id=asked.request_id, schema=schema, version=bytes(8)
        ))  # fmt: skip

    def _producer(self, asked: Any) -> None:
        self.send("producer_success", api.ProducerSuccess(
            request_id=asked.request_id, producer_name=b"scripted-producer",
            last_sequence_id=-1, schema_version=b"",
        ))  # fmt: skip

    def _send(self, sent: Any) -> None:
        # A frame has the magic number, the checksum, the length of the metadata, the metadata, and
        # the value. The value of a dead letter is that of its message: the number of its entry.
        (length,) = struct.unpack_from(">I", self.carried, 6)
        self.cluster.dead_letters.append(int(self.carried[10 + length :]))
        where = api.MessageId(ledger=DEAD_LETTER_LEDGER, entry=len(self.cluster.dead_letters) - 1)
        self.send("send_receipt", api.SendReceipt(
            producer_id=sent.producer_id, sequence_id=sent.sequence_id, message_id=where
        ))  # fmt: skip

    def _close_producer(self, asked: Any) -> None:
        self.succeed(asked)


class ScriptedBroker(FrameServer):
    """Answers as a broker in good health, except for the commands that its script answers."""

    def __init__(self, cluster: Cluster, host: str, port: int) -> None:
        self.cluster = cluster
        self.script: Script = lambda *_: False
        self.asked: list[str] = []
        """Names of all commands that came."""
        self.thawed = threading.Event()
        self.thawed.set()
        self.accepts = True
        """Whether accepted connections are served."""
        self._idle: list[socket.socket] = []
        super().__init__(host, port)

    @property
    def frozen(self) -> bool:
        return not self.thawed.is_set()

    def session(self, stream: socket.socket) -> Session:
        return Session(self, stream)

    def accept(self, stream: socket.socket) -> None:
        if self.accepts:
            super().accept(stream)
        else:
            self._idle.append(stream)

    def refuses(self, name: str, code: int) -> None:
        """Refuse every command of a name from now on."""

        def script(session: Session, asked: str, command: Any) -> bool:
            if asked != name:
                return False
            session.refuse_command(name, command, code)
            return True

        self.script = script

    def is_well(self) -> None:
        """Answer everything from now on."""
        self.script = lambda *_: False
        self.accepts = True
        self.thawed.set()

    def freeze(self) -> None:
        """Accept bytes and answer nothing; connections stay open."""
        self.thawed.clear()

    def half_a_frame(self) -> None:
        for session in self.sessions:
            session.send_half()

    def cut_all(self) -> None:
        with self.cluster.lock:
            for session in self.sessions:
                session._leave(None)
                session.cut()
            self.sessions.clear()

    def end_consumers(self) -> None:
        """Close the consumers, as an unload does."""
        with self.cluster.lock:
            for one in [one for one in self.cluster.members if one.session.broker is self]:
                closing = api.CloseConsumer(consumer_id=one.consumer_id, request_id=0)
                one.session._leave(one.consumer_id)
                one.session.send("close_consumer", closing)

    def close(self) -> None:
        self.thawed.set()
        super().close()
        for stream in self._idle:
            stream.close()
