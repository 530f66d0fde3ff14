"""Contract: one range without a ready owner stops all ranges of its topic partition."""

from __future__ import annotations

from collections import Counter

from keyshard.broker.memory import Message
from keyshard.broker.port import Consumer
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.ring.hash_range import HashRange, split_ring
from keyshard.core.ring.key_slot import key_slot
from tests.contract.contract_harness import (
    Harness,
    Received,
    read_to_end,
    receive_until_idle,
    subscribe,
)
from tests.helpers import wait_until


def publish_many(harness: Harness, where: TopicPartition, limit: int) -> list[str]:
    """Publish four times the look-ahead limit, each message with its own key."""
    keys = [f"key-{number}" for number in range(4 * limit)]
    harness.publish(where.name, [Message(key.encode(), key=key) for key in keys])
    return keys


def keys_in(keys: list[str], *ranges: HashRange) -> Counter[bytes]:
    """Values of the keys whose slots lie in one of the ranges."""
    return Counter(
        key.encode() for key in keys if any(key_slot(key) in hash_range for hash_range in ranges)
    )


def acknowledge_and_finish(
    harness: Harness, where: TopicPartition, consumers: list[Consumer], received: Received
) -> None:
    """Acknowledge all messages until the backlog is empty."""
    consumers[0].acknowledge(received.ids)

    def done() -> bool:
        while True:
            known = len(received.deliveries)
            if not received.take(consumers):
                return harness.backlog(where) == 0
            consumers[0].acknowledge([block.id for block in received.blocks[known:]])

    wait_until(done)


def test_an_uncovered_range_stops_its_partition_until_it_is_covered(harness: Harness) -> None:
    where, broker = TopicPartition(harness.create_topic()), harness.broker()
    limit = 2 * harness.look_ahead_per_consumer
    first, second, *missing = split_ring(4)
    consumers = [subscribe(broker, where, hash_range) for hash_range in (first, second)]
    keys = publish_many(harness, where, limit)
    received = Received()
    receive_until_idle(consumers, received, harness.idle_s, at_least=limit // 2)
    covered = keys_in(keys, first, second)
    # About as many entries went by for the covered half as wait for the other.
    assert len(received.values) < 1.5 * limit < sum(covered.values())
    assert Counter(received.values) <= covered

    consumers += [subscribe(broker, where, hash_range) for hash_range in missing]
    acknowledge_and_finish(harness, where, consumers, received)
    assert Counter(received.values) == keys_in(keys, *split_ring(1))


def test_a_range_that_does_not_receive_stops_its_partition_until_it_does(harness: Harness) -> None:
    where, broker = TopicPartition(harness.create_topic()), harness.broker()
    limit = 2 * harness.look_ahead_per_consumer
    ranges, queue = split_ring(2), limit // 8
    idle, busy = (
        subscribe(broker, where, hash_range, receiver_queue_size=queue) for hash_range in ranges
    )
    keys = publish_many(harness, where, limit)
    received = Received()
    receive_until_idle([busy], received, harness.idle_s, at_least=limit // 2)
    assert len(received.values) < 1.5 * limit < sum(keys_in(keys, busy.hash_range).values())

    acknowledge_and_finish(harness, where, [idle, busy], received)
    assert Counter(received.values) == keys_in(keys, *ranges)


def test_acknowledging_waiting_entries_ends_a_stall_at_the_mark_delete(
    harness: Harness,
) -> None:
    """In newer releases, only a consumer for the waiting entries ends it."""
    where, broker = TopicPartition(harness.create_topic()), harness.broker()
    low, high = split_ring(2)
    consumer = subscribe(broker, where, low)
    limit = harness.look_ahead_per_consumer
    keys = publish_many(harness, where, limit)
    received = Received()
    receive_until_idle([consumer], received, harness.idle_s, at_least=limit // 2)
    stalled = len(received.values)
    everything = read_to_end(broker.reader(where, EntryId(0, 0))).blocks
    foreign = [block.id for block in everything if block.slot is not None and block.slot in high]
    # Behind the first unacknowledged entry, so that the mark-delete cannot move.
    waiting = [entry_id for entry_id in foreign if entry_id > received.ids[0]]
    consumer.acknowledge(waiting)
    wait_until(lambda: harness.backlog(where) == len(keys) - len(waiting))
    receive_until_idle([consumer], received, harness.idle_s)
    assert len(received.values) == stalled < sum(keys_in(keys, low).values())

    consumer.acknowledge(foreign)
    consumers = [consumer]
    if harness.release.acknowledged_wait:
        consumer.acknowledge(received.ids)
        wait_until(lambda: harness.backlog(where) == len(keys) - len(foreign) - stalled)
        known = len(received.values)
        receive_until_idle(consumers, received, harness.idle_s)
        assert len(received.values) == known < sum(keys_in(keys, low).values())
        consumers.append(subscribe(broker, where, high))
    acknowledge_and_finish(harness, where, consumers, received)
    assert Counter(received.values) == keys_in(keys, low)
