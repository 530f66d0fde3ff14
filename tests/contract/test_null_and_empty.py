"""Contract: a missing and an empty key are distinct, and so are a missing and an empty value."""

from __future__ import annotations

from itertools import product

import pytest

from keyshard.broker.memory import Batching, Message
from keyshard.columns.messages import messages_of
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.ring.hash_range import split_ring
from keyshard.core.ring.key_slot import key_slot
from tests.contract.contract_harness import Harness, receive, subscribe

RANGES = 16
KEYS = (None, "", "k")
SENT = [
    Message(value, key, ordering_key, {"number": str(number)})
    for number, (value, key, ordering_key) in enumerate(
        product((None, b"", b"v"), KEYS, (*KEYS[:2], "o"))
    )
]


def shown(harness: Harness, message: Message) -> Message:
    """A message as a client shows it: pulsar-client has no empty key."""
    if harness.empty_keys:
        return message
    return Message(
        message.value, message.key or None, message.ordering_key or None, message.properties
    )


def check(harness: Harness, where: TopicPartition, blocks: list[EntryBlock]) -> None:
    found = [message for block in blocks for message in messages_of(where, block)]
    found.sort(key=lambda message: int(message.properties["number"]))
    for got, sent in zip(found, SENT, strict=True):
        expected = shown(harness, sent)
        assert (got.value, got.key, got.ordering_key) == (
            expected.value, expected.key, expected.ordering_key,
        )  # fmt: skip
        routing_key = expected.routing_key
        assert got.slot == (None if routing_key is None else key_slot(routing_key))


@pytest.mark.parametrize("batching", list(Batching))
def test_null_and_empty_are_distinct(harness: Harness, batching: Batching) -> None:
    where = TopicPartition(harness.create_topic())
    broker = harness.broker()
    consumers = [subscribe(broker, where, hash_range) for hash_range in split_ring(RANGES)]
    harness.publish(where.name, SENT, batching)
    received = receive(consumers, len(SENT))
    check(harness, where, received.blocks)
    for consumer, block in received.deliveries:
        assert consumer is not None
        first = SENT[int(messages_of(where, block)[0].properties["number"])]
        # The broker distinguishes an empty key from none, too, and an empty ordering key wins.
        routing_key = first.routing_key
        assert routing_key is None or key_slot(routing_key) in consumer.hash_range
        assert block.payload_bytes == sum(len(value or b"") for value in block.values)
    reader, again = broker.reader(where, EntryId(0, 0)), list[EntryBlock]()
    while sum(block.rows for block in again) < len(SENT):
        again += reader.read(1_000)
    reader.close()
    check(harness, where, again)


def test_messages_of_a_producer_are_distinguished(harness: Harness) -> None:
    where = TopicPartition(harness.create_topic())
    broker = harness.broker()
    consumers = [subscribe(broker, where, hash_range) for hash_range in split_ring(RANGES)]
    producer = broker.producer(where, send_timeout_ms=30_000)
    for one in SENT:
        producer.send(
            one.value, key=one.key, ordering_key=one.ordering_key, properties=one.properties
        )
    check(harness, where, receive(consumers, len(SENT)).blocks)
