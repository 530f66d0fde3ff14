"""Contract: the broker hashes keys that were set as bytes without their base64."""

from __future__ import annotations

import random
from base64 import b64encode
from collections import Counter

import pytest

from keyshard.broker.memory import Batching, Message
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.ring.hash_range import split_ring
from keyshard.core.ring.key_slot import bytes_slot, key_slot
from tests.contract.contract_harness import Harness, receive, subscribe
from tests.helpers import present

RANGES = 16
RANDOM = random.Random(21)
KEYS = [RANDOM.randbytes(length % 13 + 1) for length in range(200)]


def set_as_bytes(key: bytes, value: bytes = b"v", ordering_key: str | None = None) -> Message:
    return Message(value, b64encode(key).decode(), ordering_key, key_is_base64=True)


@pytest.mark.parametrize("batching", [Batching.NONE, Batching.BY_KEY])
def test_a_key_of_bytes_is_routed_by_its_bytes(harness: Harness, batching: Batching) -> None:
    where = TopicPartition(harness.create_topic())
    broker = harness.broker()
    consumers = [subscribe(broker, where, hash_range) for hash_range in split_ring(RANGES)]
    sent = [set_as_bytes(key, b"%d" % n) for n, key in enumerate(KEYS) for _ in range(2)]
    harness.publish(where.name, sent, batching)
    received = receive(consumers, len(sent))
    assert Counter(received.values) == Counter(message.value for message in sent)
    known = 0
    for consumer, block in received.deliveries:
        assert consumer is not None
        (number,) = {int(present(value)) for value in block.values}
        key = KEYS[number]
        text = b64encode(key).decode()
        assert set(block.partition_keys) == {text}
        assert key_slot(key) in consumer.hash_range
        assert block.mixed_slots is None
        assert set(block.text_slots) == {key_slot(text)}
        if key_slot(text) in consumer.hash_range and not harness.whole_entries:
            assert block.slot == key_slot(text), "the range leaves open what it was"
        else:
            assert (block.slot, block.keys_of_bytes) == (key_slot(key), True)
            known += 1
    assert known == len(received.blocks) if harness.whole_entries else known > len(KEYS) / 2


def test_a_text_that_is_base64_by_chance_is_routed_by_its_text(harness: Harness) -> None:
    where = TopicPartition(harness.create_topic())
    broker = harness.broker()
    consumers = [subscribe(broker, where, hash_range) for hash_range in split_ring(RANGES)]
    keys = [f"{number:04}" for number in range(200)]
    assert all(bytes_slot(key) is not None for key in keys)
    harness.publish(where.name, [Message(key.encode(), key=key) for key in keys])
    received = receive(consumers, len(keys))
    assert not any(block.keys_of_bytes for block in received.blocks)
    for consumer, block in received.deliveries:
        assert consumer is not None
        assert block.slot == key_slot(present(block.values[0])) in consumer.hash_range


def test_an_ordering_key_is_never_base64(harness: Harness) -> None:
    where = TopicPartition(harness.create_topic())
    broker = harness.broker()
    consumers = [subscribe(broker, where, hash_range) for hash_range in split_ring(RANGES)]
    sent = [set_as_bytes(key, ordering_key="0000") for key in KEYS[:20]]
    harness.publish(where.name, sent)
    received = receive(consumers, len(sent))
    assert {block.slot for block in received.blocks} == {key_slot("0000")}
    assert not any(block.keys_of_bytes for block in received.blocks)


def test_a_reader_reports_the_slot_of_the_text_or_of_known_bytes(
    harness: Harness,
) -> None:
    where = TopicPartition(harness.create_topic())
    harness.publish(where.name, [set_as_bytes(key) for key in KEYS[:20]])
    reader = harness.broker().reader(where, EntryId(0, 0))
    blocks: list[EntryBlock] = []
    while len(blocks) < 20:
        blocks += reader.read(1_000)
    texts = [key_slot(b64encode(key).decode()) for key in KEYS[:20]]
    routed_by = [key_slot(key) for key in KEYS[:20]] if harness.whole_entries else texts
    assert [block.slot for block in blocks] == routed_by
    assert [block.text_slots for block in blocks] == [[slot] for slot in texts]
