"""Brokers that speak frames, share entries, and answer requests by a script."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from keyshard.broker.wire.frames import api
from keyshard.core.ring.key_slot import key_slot
from tests.stored_entries import plain, single
from tests.support.frame_broker.server import FrameServer
from tests.support.frame_broker.session import framed
from tests.support.frame_broker.topics import LEDGER, Entry, Topics, TopicSession

DEAD_LETTER_LEDGER = LEDGER + 1
LETTERS = "-DLQ"
"""End of the name of the dead-letter topic; its messages are not delivered."""
STRING_SCHEMA = 1
"""Number of the type of a schema."""
SAID = b"said by the script"
"""Text of each refusal."""
Script = Callable[["Session", str, Any], bool]
"""Answers a command of a connection; returns whether it was answered."""


def entry(number: int) -> Entry:
    """A message with a key of its own."""
    key = f"k{number}"
    return Entry(number, key_slot(key), single(plain(b"%d" % number, key)))


@dataclass(eq=False)
class Cluster(Topics):
    """State that its brokers share. Every topic has the same entries."""

    partitions: int = 0
    """Partitions of a topic; the number of an entry modulo that gives its partition."""
    brokers: list[ScriptedBroker] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    dead_letters: list[int] = field(default_factory=list)
    """Entries whose messages were stored as dead letters."""
    owner_of: Callable[[str], int] = lambda _: 0

    def broker(self, host: str = "127.0.0.1", port: int = 0) -> ScriptedBroker:
        self.brokers.append(ScriptedBroker(self, host, port))
        return self.brokers[-1]

    def publish(self, count: int) -> None:
        with self.lock:
            for _ in range(count):
                self.entries.append(entry(len(self.entries)))
            for member in self.members.values():
                self.dispatch(member)

    def log(self, topic: str) -> Sequence[Entry]:
        if topic.endswith(LETTERS):
            return ()
        _, _, partition = topic.rpartition("-partition-")
        return self.entries[int(partition) :: self.partitions] if self.partitions else self.entries

    def acknowledged(self) -> set[int]:
        """Return the entries that were acknowledged, of all topics with messages."""
        with self.lock:
            acked = [of for topic, of in self.acked.items() if not topic.endswith(LETTERS)]
            return set[int]().union(*acked)

    def close(self) -> None:
        for broker in self.brokers:
            broker.close()


class Session(TopicSession):
    """One connection."""

    broker: ScriptedBroker

    def put(self, data: bytes) -> None:
        if not self.broker.frozen:
            super().put(data)

    def send_half(self) -> None:
        """Send the first half of a frame, and nothing behind it."""
        self.put(framed("success", api.Success(request_id=0))[:7])

    def refuse_command(self, name: str, command: Any, code: int) -> None:
        """Answer a command as a broker does that refuses it."""
        said: dict[str, Any] = {"error": code, "message": SAID}
        if name == "send":
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
            self.confirm(command, **said)
        elif name == "get_schema":
            self.send("get_schema_response", api.GetSchemaResponse(
                request_id=command.request_id, **said
            ))  # fmt: skip
        else:
            self.refuse(command, code, SAID)

    def handle(self, name: str, command: Any) -> None:
        self.broker.thawed.wait()
        with self.topics.lock:
            self.broker.asked.append(name)
            if not self.broker.script(self, name, command):
                super().handle(name, command)

    # -- one command each, with the lock held -----------------------------------------------------

    def _partitioned_metadata(self, asked: Any) -> None:
        self.count_partitions(asked, self.broker.topics.partitions)

    def _lookup(self, asked: Any) -> None:
        topics = self.broker.topics
        self.lead_to(asked, topics.brokers[topics.owner_of(asked.topic.decode())].url)

    def _get_schema(self, asked: Any) -> None:
        schema = api.Schema(name=b"t", data=b"", type=STRING_SCHEMA)
        self.send("get_schema_response", api.GetSchemaResponse(
            request_id=asked.request_id, schema=schema, version=bytes(8)
        ))  # fmt: skip

    def _producer(self, asked: Any) -> None:
        self.open_producer(asked, b"scripted-producer", -1)

    def _send(self, sent: Any) -> None:
        # A frame has the magic number, the checksum, the length of the metadata, the metadata, and
        # the value. The value of a dead letter is that of its message: the number of its entry.
        (length,) = struct.unpack_from(">I", self.carried, 6)
        letters = self.broker.topics.dead_letters
        letters.append(int(self.carried[10 + length :]))
        self.receipt(sent.producer_id, sent.sequence_id, DEAD_LETTER_LEDGER, len(letters) - 1)

    def _close_producer(self, asked: Any) -> None:
        self.succeed(asked)


class ScriptedBroker(FrameServer):
    """Answers as a broker in good health, except for the commands that its script answers."""

    session = Session

    def __init__(self, topics: Cluster, host: str, port: int) -> None:
        self.topics = topics
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
        with self.topics.lock:
            super().cut_all()
            self.sessions.clear()

    def end_consumers(self) -> None:
        """Close the consumers, as an unload does."""
        with self.topics.lock:
            for session, consumer_id in list(self.topics.members):
                if session in self.sessions:
                    self.topics.leave(session, consumer_id)
                    session.end_consumer(consumer_id)

    def close(self) -> None:
        self.thawed.set()
        super().close()
        for stream in self._idle:
            stream.close()
