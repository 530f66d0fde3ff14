"""Facts of Pulsar's deduplication that entry producers rely on (ADR 0034), on a real broker.

They are asked of the broker frame by frame, so that no client decides anything.
"""

from __future__ import annotations

import struct
import time
import uuid
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pulsar
import pytest

from keyshard.broker.memory import Message
from keyshard.broker.port import Compression, PublishOptions
from keyshard.broker.wire.broker import WireBroker
from keyshard.columns.outgoing import OutgoingMessage
from keyshard.config.connection import Connection
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.protobuf import Value, fields_of, message
from keyshard.testing.devbroker import DevBroker
from tests.contract.raw_protocol import (
    CLOSE_PRODUCER,
    PRODUCER,
    PRODUCER_SUCCESS,
    RECEIPT,
    SEND,
    RawConnection,
    entry_of,
)
from tests.support.deadlines import deadline, in_time
from tests.support.stored_topic import admin_of, keeping_namespace

pytestmark = pytest.mark.broker
DUPLICATE = (2**64 - 1, 2**64 - 1)
NONE = 2**64 - 1
"""``last_sequence_id`` of an unknown name: -1 as an unsigned number."""
SUCCESS = 13


@pytest.fixture(scope="module")
def topics(dev_broker: DevBroker) -> Iterator[str]:
    """Beginning of the names of topics in a namespace with deduplication that keeps everything."""
    with admin_of(dev_broker) as admin:
        yield f"persistent://{keeping_namespace(admin, 'once')}/"


COMPRESSIONS: tuple[Compression, ...] = ("none", "lz4", "zlib", "zstd", "snappy")


class Producer:
    """A producer with a name, one frame after the other."""

    def __init__(self, dev_broker: DevBroker, topic: str, name: bytes = b"name") -> None:
        with httpx.Client(base_url=dev_broker.admin_url, follow_redirects=True) as admin:
            found = admin.get(f"/lookup/v2/topic/{topic.replace('://', '/')}").raise_for_status()
        url = urlsplit(found.json()["brokerUrl"])
        self.connection = RawConnection(url.hostname or "", url.port or 0)
        asked: dict[int, Value] = {1: topic.encode(), 2: 7, 3: 4, 4: name}
        opened = self.connection._request(PRODUCER, PRODUCER_SUCCESS, asked)
        self.last_sequence_id = opened.get(3, NONE)
        self._name = name

    def send(self, first: int, count: int = 1) -> tuple[object, object]:
        """Publish an entry; the id in its receipt."""
        messages = [Message(b"%d" % number, "k") for number in range(first, first + count)]
        fields, payload = entry_of(messages, batched=count > 1)
        last = first + count - 1
        told: dict[int, Value] = {1: self._name, 2: first, 3: time.time_ns() // 1_000_000, 24: last}
        metadata = message(told | fields)
        framed = struct.pack(">I", len(metadata)) + metadata + payload
        command: dict[int, Value] = {1: 7, 2: first, 3: count, 6: last}
        receipt = self.connection._request(SEND, RECEIPT, command, framed)
        stored = receipt[3]
        assert isinstance(stored, bytes)
        found = fields_of(stored)
        return found.get(1, 0), found.get(2, 0)

    def close(self) -> None:
        self.connection._request(CLOSE_PRODUCER, SUCCESS, {1: 7, 2: 9})
        self.connection.__exit__()


def values(dev_broker: DevBroker, topic: str) -> list[bytes | None]:
    broker = WireBroker(Connection(dev_broker.service_url))
    try:
        reader = broker.reader(TopicPartition.parse(topic), EntryId(0, 0))
        found: list[bytes | None] = []
        end_s = time.monotonic() + deadline(30)
        while not reader.at_end():
            in_time(end_s, "the reader did not reach the end")
            found += [value for block in reader.read(100) for value in block.values]
        return found
    finally:
        broker.close()


def test_a_duplicate_gets_a_receipt_without_an_id(dev_broker: DevBroker, topics: str) -> None:
    topic = topics + uuid.uuid4().hex
    producer = Producer(dev_broker, topic)
    assert producer.last_sequence_id == NONE
    assert producer.send(0, 10) != DUPLICATE
    assert producer.send(0, 10) == DUPLICATE
    # A single message in the midst of a batch is known as well: a probe of one row works.
    assert producer.send(4) == DUPLICATE
    assert producer.send(9) == DUPLICATE
    producer.close()
    assert values(dev_broker, topic) == [b"%d" % number for number in range(10)]


def test_an_entry_of_old_and_new_messages_is_dropped_whole(
    dev_broker: DevBroker, topics: str
) -> None:
    topic = topics + uuid.uuid4().hex
    producer = Producer(dev_broker, topic)
    producer.send(0, 10)
    # The broker compares the first id only: 10 to 14 are new, and lost.
    assert producer.send(5, 10) == DUPLICATE
    producer.close()
    again = Producer(dev_broker, topic)
    assert again.last_sequence_id == 9
    again.send(10, 5)
    again.close()
    assert values(dev_broker, topic) == [b"%d" % number for number in range(15)]


def test_ids_may_have_gaps_and_the_high_half_of_an_integer(
    dev_broker: DevBroker, topics: str
) -> None:
    topic = topics + uuid.uuid4().hex
    producer = Producer(dev_broker, topic)
    high = (2**31 - 1) << 32
    for first in (0, 1 << 32, high):
        assert producer.send(first) != DUPLICATE
        assert producer.send(first) == DUPLICATE
    producer.close()
    again = Producer(dev_broker, topic)
    assert again.last_sequence_id == high
    again.close()


def test_an_unload_keeps_the_known_sequence_ids(dev_broker: DevBroker, topics: str) -> None:
    topic = topics + uuid.uuid4().hex
    producer = Producer(dev_broker, topic)
    producer.send(0, 10)
    producer.send(10, 10)
    producer.close()
    with admin_of(dev_broker) as admin:
        admin.put(f"/{topic.replace('://', '/')}/unload").raise_for_status()
    again = Producer(dev_broker, topic)
    assert again.last_sequence_id == 19
    assert again.send(19) == DUPLICATE
    assert again.send(20) != DUPLICATE
    again.close()


def test_a_name_without_its_highest_id_lets_half_of_a_batch_come_again(
    dev_broker: DevBroker, topics: str
) -> None:
    """Write a batch as pulsar-client does: the broker knows only its first id."""
    topic = topics + uuid.uuid4().hex
    producer = Producer(dev_broker, topic)
    messages = [Message(b"%d" % number, "k") for number in range(10)]
    fields, payload = entry_of(messages, batched=True)
    told: dict[int, Value] = {1: b"name", 2: 0, 3: time.time_ns() // 1_000_000}
    metadata = message(told | fields)
    framed = struct.pack(">I", len(metadata)) + metadata + payload
    producer.connection._request(SEND, RECEIPT, {1: 7, 2: 0, 3: 10}, framed)
    # The message was stored within the batch, and is stored again.
    assert producer.send(5) != DUPLICATE
    producer.close()


def test_pulsar_client_reads_the_entries(dev_broker: DevBroker, topics: str) -> None:
    topic = topics + uuid.uuid4().hex
    client = pulsar.Client(
        dev_broker.service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
    )
    broker = WireBroker(Connection(dev_broker.service_url))
    try:
        for number, compression in enumerate(COMPRESSIONS):
            producer = broker.entry_producer(
                TopicPartition.parse(topic), PublishOptions(f"n{number}", compression=compression)
            )
            sent = [  # smaller entries would not be compressed
                OutgoingMessage(b"%2000d" % row, "k", properties={"c": compression})
                for row in range(3)
            ]
            producer.publish(sent, 0)
            producer.flush()
        reader = client.create_reader(topic, pulsar.MessageId.earliest)
        for compression in ("none", "lz4", "zlib", "zstd", "snappy"):
            for row in range(3):
                got = reader.read_next(20_000)
                assert (got.data(), got.partition_key()) == (b"%2000d" % row, "k")
                assert got.properties() == {"c": compression}
        assert not reader.has_message_available()
    finally:
        broker.close()
        client.close()
