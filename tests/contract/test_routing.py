"""Contract: the range of an entry, and the shape of a delivered batch."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from keyshard.broker.memory import Batching, Message
from keyshard.broker.port import Consumer
from keyshard.core.position.entry import EntryBlock, TopicPartition
from keyshard.core.ring.hash_range import range_index, split_ring
from keyshard.core.ring.key_slot import key_slot
from tests.contract.contract_harness import Harness, Received, receive, subscribe
from tests.helpers import event_ms, present

RANGES = 10
KEY_BYTES_MAX = 40
ALPHABET = {1: "aZ09 /-_\x01\x7f", 2: "äßéñж", 3: "€漢字한", 4: "😀𝄞𐍈"}


def key_of_length(random_: random.Random, length: int) -> str:
    """A key of exactly ``length`` bytes in UTF-8, with characters of one to four bytes."""
    parts = []
    while length:
        size = random_.randint(1, min(4, length))
        parts.append(random_.choice(ALPHABET[size]))
        length -= size
    return "".join(parts)


def cover(harness: Harness, where: TopicPartition, ranges: int = RANGES) -> list[Consumer]:
    """One consumer for each range of the split ring."""
    broker = harness.broker()
    return [subscribe(broker, where, hash_range) for hash_range in split_ring(ranges)]


def ranges_by_value(received: Received) -> dict[bytes | None, int]:
    """Index of the range that received each value."""
    return {
        value: range_index(consumer.hash_range.start, RANGES)
        for consumer, block in received.deliveries
        if consumer is not None
        for value in block.values
    }


def key_for_range(index: int) -> str:
    """A key whose slot lies in one of the ten ranges."""
    return next(
        key for key in map(str, range(10_000)) if range_index(key_slot(key), RANGES) == index
    )


def test_every_key_goes_once_to_the_range_its_slot_lies_in(harness: Harness) -> None:
    random_ = random.Random(20_000)
    topic = harness.create_topic(partitions=5)
    broker = harness.broker()
    consumers = [
        subscribe(broker, where, hash_range)
        for where in broker.partitions(topic)
        for hash_range in split_ring(RANGES)
    ]
    keys = [key_of_length(random_, number % (KEY_BYTES_MAX + 1)) for number in range(20_000)]
    harness.publish(topic, [Message(b"%d" % number, key=key) for number, key in enumerate(keys)])
    received = receive(consumers, len(keys))

    arrived = Counter(int(present(value)) for value in received.values)
    assert arrived == Counter(range(len(keys)))
    for consumer, block in received.deliveries:
        assert consumer is not None
        (value,) = block.values
        key = keys[int(present(value))]
        assert key_slot(key) in consumer.hash_range
        is_told = bool(key) or harness.empty_keys
        assert block.partition_keys == [key if is_told else None]
        assert block.slot == (key_slot(key) if is_told else None)
    assert len({id(consumer) for consumer, _ in received.deliveries}) == len(consumers)


def test_the_slot_of_the_empty_key_is_1(harness: Harness) -> None:
    where = TopicPartition(harness.create_topic())
    consumers = cover(harness, where)
    harness.publish(where.name, [Message(b"%d" % number, key="") for number in range(20)])
    assert set(ranges_by_value(receive(consumers, 20)).values()) == {0}
    assert key_slot("") == 1


def test_the_ordering_key_wins_over_the_partition_key(harness: Harness) -> None:
    where = TopicPartition(harness.create_topic())
    consumers = cover(harness, where)
    expected = {b"%d" % index: index for index in range(RANGES)}
    other_key = key_for_range(3)
    harness.publish(
        where.name,
        [
            Message(value, key=other_key, ordering_key=key_for_range(index))
            for value, index in expected.items()
        ],
    )
    received = receive(consumers, RANGES)
    assert ranges_by_value(received) == expected
    for consumer, block in received.deliveries:
        assert consumer is not None
        assert block.partition_keys == [other_key]
        assert block.slot in range(consumer.hash_range.start, consumer.hash_range.end + 1)


def test_keyless_messages_all_arrive_and_spread_over_the_ranges(harness: Harness) -> None:
    where = TopicPartition(harness.create_topic())
    consumers = cover(harness, where)
    values = [b"%d" % number for number in range(500)]
    harness.publish(where.name, [Message(value) for value in values])
    received = receive(consumers, len(values))
    assert Counter(received.values) == Counter(values)
    assert set(ranges_by_value(received).values()) == set(range(RANGES))
    assert {block.slot for block in received.blocks} == {None}


def test_a_keyed_batch_arrives_whole_at_the_range_of_its_key(harness: Harness) -> None:
    where = TopicPartition(harness.create_topic())
    consumers = cover(harness, where)
    messages = [
        Message(b"%d" % number, key=key_for_range(number % RANGES), event_ms=number + 1)
        for number in range(RANGES * 7)
    ]
    harness.publish(where.name, messages, Batching.BY_KEY)
    received = receive(consumers, len(messages))
    assert len(received.blocks) == RANGES
    for consumer, block in received.deliveries:
        assert consumer is not None
        assert (block.batch_size, block.batched, block.whole) == (7, True, True)
        assert list(block.indices) == list(range(7))
        assert block.slot in range(consumer.hash_range.start, consumer.hash_range.end + 1)
        assert [int(present(value)) + 1 for value in block.values] == event_ms([block])
        assert len(set(block.partition_keys)) == 1


def test_a_keyed_batch_is_formed_by_ordering_key_first(harness: Harness) -> None:
    where = TopicPartition(harness.create_topic())
    consumer = subscribe(harness.broker(), where)
    messages = [
        Message(b"%d" % number, key="same", ordering_key="ab"[number % 2]) for number in range(6)
    ]
    harness.publish(where.name, messages, Batching.BY_KEY)
    assert [block.values for block in receive([consumer], 6).blocks] == [
        [b"0", b"2", b"4"],
        [b"1", b"3", b"5"],
    ]


@pytest.mark.parametrize("batching", [Batching.BY_KEY, Batching.MIXED])
def test_a_batch_of_one_message_is_still_a_batch(harness: Harness, batching: Batching) -> None:
    where = TopicPartition(harness.create_topic())
    consumer = subscribe(harness.broker(), where)
    harness.publish(where.name, [Message(b"only", key="k")], batching)
    (block,) = receive([consumer], 1).blocks
    assert (block.batch_size, block.batched, list(block.indices)) == (1, True, [0])


def test_a_batch_larger_than_the_queue_comes_without_gap(harness: Harness) -> None:
    where = TopicPartition(harness.create_topic())
    consumer = subscribe(harness.broker(), where, receiver_queue_size=4)
    harness.publish(
        where.name, [Message(b"%d" % number, key="k") for number in range(10)], Batching.BY_KEY
    )
    blocks: list[EntryBlock] = receive([consumer], 10).blocks
    assert len(blocks) == 1 if harness.whole_entries else len(blocks) > 1
    assert {(block.id, block.batch_size, block.batched) for block in blocks} == {
        (blocks[0].id, 10, True)
    }
    assert [index for block in blocks for index in block.indices] == list(range(10))
    assert [int(present(value)) for block in blocks for value in block.values] == list(range(10))
    assert [block.whole for block in blocks] == [harness.whole_entries] * len(blocks)


def test_a_mixed_batch_goes_whole_to_the_range_of_its_first_key(harness: Harness) -> None:
    where = TopicPartition(harness.create_topic())
    consumers = cover(harness, where)
    for first in (7, 2):
        keys = [key_for_range((first + offset) % RANGES) for offset in range(RANGES)]
        harness.publish(where.name, [Message(b"", key=key) for key in keys], Batching.MIXED)
        ((consumer, block),) = receive(consumers, RANGES).deliveries
        assert consumer is consumers[first]
        assert (block.batch_size, list(block.indices)) == (RANGES, list(range(RANGES)))
        assert block.partition_keys == keys
        assert block.slot == key_slot(keys[0])
        assert block.slots == [key_slot(key) for key in keys]


def test_messages_of_a_key_stay_in_publish_order(harness: Harness) -> None:
    random_ = random.Random(7)
    where = TopicPartition(harness.create_topic())
    consumers = cover(harness, where)
    keys = [f"key-{random_.randrange(50)}" for _ in range(1_000)]
    messages = [Message(b"%d" % number, key=key) for number, key in enumerate(keys)]
    for first in range(0, 1_000, 200):
        batching = Batching.BY_KEY if first % 400 else Batching.NONE
        harness.publish(where.name, messages[first : first + 200], batching)
    for values in receive(consumers, 1_000).by_key().values():
        numbers = [int(present(value)) for value in values]
        assert numbers == sorted(numbers)
