"""A broker whose answers a test replaces, and consumers of the wire transport on it."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import Any

from keyshard.broker.port import StartPosition, SubscriptionSpec
from keyshard.broker.wire.broker import WireBroker
from keyshard.broker.wire.consumer import WireConsumer
from keyshard.core.position.entry import EntryBlock, TopicPartition
from keyshard.core.protobuf import Value, message
from keyshard.core.ring.hash_range import split_ring
from keyshard.errors import CorruptEntryError
from tests.support.deadlines import deadline
from tests.support.frame_broker.server import FrameServer, SocketSession
from tests.support.frame_broker.session import command_fields, framed_fields

CONNECT, CONNECTED, SUBSCRIBE, MESSAGE, ACK, FLOW, SUCCESS, ERROR = 2, 3, 4, 9, 10, 11, 13, 14
CLOSE_CONSUMER, PING, PONG, LOOKUP, LOOKUP_RESPONSE = 16, 18, 19, 23, 24
LAST_ID, LAST_ID_RESPONSE, CHALLENGE, RESPONSE, ACK_RESPONSE = 29, 30, 36, 37, 38
METADATA, METADATA_RESPONSE, TOPIC_MIGRATED = 21, 22, 68
DEADLINE_S = deadline(10)
TOPIC = TopicPartition("persistent://public/default/t")
Fields = dict[int, Value]


def entry(number: int, payload: bytes = b"v") -> bytes:
    """A message without a checksum."""
    metadata = message({1: b"p", 2: number, 3: 1, 6: b"k"})
    return struct.pack(">I", len(metadata)) + metadata + payload


class Session(SocketSession):
    """One connection; commands are fields by number, independent of the generated classes."""

    broker: ScriptedBroker

    def __init__(self, broker: ScriptedBroker, stream: socket.socket) -> None:
        super().__init__(broker, stream)
        self.consumers: list[int] = []

    def reply(self, kind: int, fields: Fields, stored: bytes = b"") -> None:
        self.put(framed_fields(kind, fields, stored))

    def send_entry(self, number: int, stored: bytes | None = None, consumer: int = -1) -> None:
        where = message({1: 7, 2: number})
        stored = entry(number) if stored is None else stored
        self.reply(MESSAGE, {1: self.consumers[consumer], 2: where}, stored)

    def end_consumers(self) -> None:
        """End all consumers, as a broker does that loses its topic."""
        for number in self.consumers:
            self.reply(CLOSE_CONSUMER, {1: number, 2: 0})

    def received(self, data: bytes) -> None:
        kind, fields = command_fields(data)
        self.broker.asked.append((kind, fields))
        self.broker.answers.get(kind, Session.answer)(self, kind, fields)

    def answer(self, kind: int, fields: Fields) -> None:
        """Answer as the owner of the topic."""
        if kind == CONNECT:
            self.reply(CONNECTED, {1: b"told", 2: 21, 3: 1_000_000})
        elif kind == PING:
            self.reply(PONG, {})
        elif kind == LOOKUP:
            self.reply(LOOKUP_RESPONSE, {1: self.broker.url.encode(), 3: 1, 4: fields[2], 5: 1})
        elif kind == SUBSCRIBE:
            number = fields[4]
            assert isinstance(number, int)
            self.consumers.append(number)
            self.reply(SUCCESS, {1: fields[5]})
        elif kind == ACK:
            self.reply(ACK_RESPONSE, {1: fields[1], 6: fields[8]})
        elif kind == CLOSE_CONSUMER:
            self.reply(SUCCESS, {1: fields[2]})
        elif kind == LAST_ID:
            self.reply(LAST_ID_RESPONSE, {1: message({1: 7, 2: 3}), 2: fields[2]})


class ScriptedBroker(FrameServer):
    """Answers with :attr:`answers`, else as a broker in good health."""

    session = Session

    def __init__(self) -> None:
        self.answers: dict[int, Callable[[Session, int, Fields], Any]] = {}
        self.asked: list[tuple[int, Fields]] = []
        super().__init__()

    def asked_for(self, kind: int) -> list[Fields]:
        return [fields for one, fields in self.asked if one == kind]


def subscribed(broker: WireBroker, queue: int = 10, queue_bytes: int | None = None) -> WireConsumer:
    return broker.subscribe(
        SubscriptionSpec(
            TOPIC,
            "s",
            split_ring(1)[0],
            consumer_name="c",
            receiver_queue_size=queue,
            receiver_queue_bytes=queue_bytes,
        ),
        StartPosition.LATEST,
    )


def next_of(take: Callable[[int], list[EntryBlock]]) -> int | str:
    """Return the number of the next entry, or its id as text if it cannot be read."""
    try:
        (block,) = take(5_000)
    except CorruptEntryError as exc:
        return str(exc.message.split()[1])
    return block.id.entry
