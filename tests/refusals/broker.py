"""Brokers that speak frames, hold entries in common, and do to a request what a script says."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from keyshard.broker.wire.frames import NAMES, api, frame_of
from keyshard.core.protobuf import fields_of, message
from keyshard.core.ring.hash_range import HashRange
from keyshard.core.ring.key_slot import key_slot
from tests.helpers import exactly

LEDGER, LETTER_LEDGER = 7, 8
LETTERS = "-DLQ"
"""How the name of the dead-letter topic ends; nothing in it is delivered."""
SAID = b"said by the script"
"""Text of each refusal."""
_PRODUCER, _SEND, _CLOSE_PRODUCER = 5, 6, 15
_RAW = {_PRODUCER: "producer", _SEND: "send", _CLOSE_PRODUCER: "close_producer"}
"""Commands that the transport does not speak itself, by their numbers."""

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
    """Key of each entry; a topic partition has those whose number it is, modulo the partitions."""
    acked: set[int] = field(default_factory=set)
    letters: list[int] = field(default_factory=list)
    """Entries whose messages were stored as dead letters."""
    members: list[Member] = field(default_factory=list)
    owner_of: Callable[[str], int] = lambda _: 0
    lock: threading.RLock = field(default_factory=threading.RLock)

    def broker(self) -> ScriptedBroker:
        self.brokers.append(ScriptedBroker(self))
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
                told = api.Message(consumer_id=member.consumer_id, message_id=where)
                member.session.send("message", told, entry(self.keys[number], number))

    def close(self) -> None:
        for broker in self.brokers:
            broker.close()


class Session:
    """One connection that came."""

    def __init__(self, broker: ScriptedBroker, stream: socket.socket) -> None:
        self.broker, self.cluster, self.stream = broker, broker.cluster, stream
        self.carried = b""
        """What came behind the newest command."""
        self._sending = threading.Lock()
        broker.sessions.append(self)  # before a client can know of it
        threading.Thread(target=self._serve, name="scripted", daemon=True).start()

    def send(self, name: str, content: Any, stored: bytes = b"") -> None:
        frame = frame_of(name, content)
        if stored:
            frame = struct.pack(">I", len(frame) - 4 + len(stored)) + frame[4:] + stored
        self._put(frame)

    def send_raw(self, kind: int, fields: dict[int, int | bytes]) -> None:
        command = message({1: kind, kind: message(fields)})
        self._put(struct.pack(">II", 4 + len(command), len(command)) + command)

    def send_half(self) -> None:
        """The first half of a frame, and nothing behind it."""
        self._put(frame_of("success", api.Success(request_id=0))[:7])

    def _put(self, data: bytes) -> None:
        if self.broker.frozen:
            return
        with suppress(OSError), self._sending:
            self.stream.sendall(data)

    def cut(self) -> None:
        with suppress(OSError):
            self.stream.shutdown(socket.SHUT_RDWR)

    def refuse(self, name: str, command: Any, code: int) -> None:
        """Answer a command as a broker does that refuses it."""
        said: dict[str, Any] = {"error": code, "message": SAID}
        if name == "connect":
            self.send("error", api.Error(request_id=2**64 - 1, **said))
        elif name == "send":
            self.send_raw(8, {1: command[1], 2: command[2], 3: code, 4: SAID})
        elif name == "producer":
            self.send_raw(14, {1: command[3], 2: code, 3: SAID})
        elif name in ("lookup", "partitioned_metadata"):
            failed = {"lookup": 2, "partitioned_metadata": 1}[name]
            answer = {"lookup": api.LookupResponse,
                      "partitioned_metadata": api.PartitionedMetadataResponse}[name]  # fmt: skip
            told = answer(request_id=command.request_id, response=failed, **said)
            self.send(f"{name}_response", told)
        elif name == "ack":
            told = api.AckResponse(
                consumer_id=command.consumer_id, request_id=command.request_id, **said
            )
            self.send("ack_response", told)
        else:
            self.send("error", api.Error(request_id=command.request_id, **said))

    def _serve(self) -> None:
        with suppress(OSError, ConnectionError):
            while True:
                (size,) = struct.unpack(">I", exactly(self.stream, 4))
                frame = exactly(self.stream, size)
                self.broker.thawed.wait()
                (length,) = struct.unpack_from(">I", frame)
                data = frame[4 : 4 + length]
                self.carried = frame[4 + length :]
                (kind,) = {fields_of(data)[1]}
                name, content = NAMES.get(kind, ""), None  # type: ignore[arg-type]
                if kind in _RAW:
                    name, content = _RAW[kind], fields_of(fields_of(data)[kind])  # type: ignore[index, arg-type]
                elif name:
                    content = getattr(api.BaseCommand.FromString(data), name)
                with self.cluster.lock:
                    self.broker.asked.append(name)
                    if not self.broker.script(self, name, content):
                        getattr(self, f"_{name}", lambda _: None)(content)
        with self.cluster.lock:
            self._leave(None)
        self.stream.close()

    def _leave(self, consumer_id: int | None) -> None:
        self.cluster.members = [
            one for one in self.cluster.members
            if one.session is not self or consumer_id not in (None, one.consumer_id)
        ]  # fmt: skip

    # -- one command each, with the lock held -----------------------------------------------------

    def _connect(self, _: Any) -> None:
        # By numbers: with the newest version of the protocol, and the largest message.
        self.send_raw(3, {1: b"scripted", 2: 21, 3: 1 << 20})

    def _ping(self, _: Any) -> None:
        self.send("pong", api.Nothing())

    def _partitioned_metadata(self, asked: Any) -> None:
        told = api.PartitionedMetadataResponse(
            request_id=asked.request_id, partitions=self.cluster.partitions, response=0
        )
        self.send("partitioned_metadata_response", told)

    def _lookup(self, asked: Any) -> None:
        self.lead_to(asked, self.cluster.brokers[self.cluster.owner_of(asked.topic.decode())].url)

    def lead_to(self, asked: Any, url: str) -> None:
        """Name an owner of a topic."""
        self.send("lookup_response", api.LookupResponse(
            request_id=asked.request_id, response=1, authoritative=True, broker_url=url.encode()
        ))  # fmt: skip

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
            self.refuse("subscribe", asked, 19)
            return
        start = asked.start_message_id
        first = start.entry if reads and start.ledger == LEDGER else 0
        self.cluster.members.append(Member(self, asked.consumer_id, topic, mine, first))
        self.send("success", api.Success(request_id=asked.request_id))

    def _flow(self, given: Any) -> None:
        for one in self.cluster.members:
            if one.session is self and one.consumer_id == given.consumer_id:
                one.permits += given.permits
        self.cluster.dispatch()

    def _ack(self, given: Any) -> None:
        self.cluster.acked.update(one.entry for one in given.message_id if one.ledger == LEDGER)
        told = api.AckResponse(consumer_id=given.consumer_id, request_id=given.request_id)
        self.send("ack_response", told)

    def _close_consumer(self, asked: Any) -> None:
        self._leave(asked.consumer_id)
        self.send("success", api.Success(request_id=asked.request_id))

    def _get_last_message_id(self, asked: Any) -> None:
        of_letters = any(
            one.session is self and one.consumer_id == asked.consumer_id
            for one in self.cluster.members if one.topic.endswith(LETTERS)
        )  # fmt: skip
        count = 0 if of_letters else len(self.cluster.keys)
        last = api.MessageId(ledger=LEDGER, entry=(count - 1) % 2**64)
        self.send("get_last_message_id_response", api.GetLastMessageIdResponse(
            request_id=asked.request_id, last_message_id=last
        ))  # fmt: skip

    def _producer(self, asked: Any) -> None:
        self.send_raw(17, {1: asked[3], 2: b"scripted-producer", 3: (1 << 64) - 1, 4: b""})

    def _send(self, sent: Any) -> None:
        # Magic number, checksum, length of the metadata, metadata, and the value of a letter: the
        # number of its entry, which is the value of the message.
        (length,) = struct.unpack_from(">I", self.carried, 6)
        self.cluster.letters.append(int(self.carried[10 + length :]))
        where = message({1: LETTER_LEDGER, 2: len(self.cluster.letters) - 1})
        self.send_raw(7, {1: sent[1], 2: sent[2], 3: where})

    def _close_producer(self, asked: Any) -> None:
        self.send_raw(13, {1: asked[2]})


class ScriptedBroker:
    """Listens; answers as a broker that is well, where its script does nothing else."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.script: Script = lambda *_: False
        self.asked: list[str] = []
        """Names of all commands that came."""
        self.thawed = threading.Event()
        self.thawed.set()
        self.accepts = True
        """Whether connections are taken and served, and not only taken."""
        self.sessions: list[Session] = []
        self._idle: list[socket.socket] = []
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.host = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.url = f"pulsar://{self.host}"
        threading.Thread(target=self._listen, name="scripted", daemon=True).start()

    @property
    def frozen(self) -> bool:
        return not self.thawed.is_set()

    def _listen(self) -> None:
        with suppress(OSError):
            while True:
                stream, _ = self._listening.accept()
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self.accepts:
                    Session(self, stream)
                else:
                    self._idle.append(stream)

    def refuses(self, name: str, code: int) -> None:
        """Refuse every command of a name from now on."""

        def script(session: Session, asked: str, command: Any) -> bool:
            if asked != name:
                return False
            session.refuse(name, command, code)
            return True

        self.script = script

    def is_well(self) -> None:
        """Answer everything from now on."""
        self.script = lambda *_: False
        self.accepts = True
        self.thawed.set()

    def freeze(self) -> None:
        """Take what comes and answer nothing; connections stand."""
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
        """As when topics are unloaded."""
        with self.cluster.lock:
            for one in [one for one in self.cluster.members if one.session.broker is self]:
                closing = api.CloseConsumer(consumer_id=one.consumer_id, request_id=0)
                one.session._leave(one.consumer_id)
                one.session.send("close_consumer", closing)

    def close(self) -> None:
        self.thawed.set()
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.cut_all()
        for stream in self._idle:
            stream.close()
