"""Contract: topics, subscriptions, ranges and handles."""

from __future__ import annotations

import time

import pytest

from keyshard.broker.memory import Message
from keyshard.broker.port import StartPosition, SubscriptionSpec
from keyshard.columns.content import gather
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.ring.hash_range import HashRange
from keyshard.core.ring.key_slot import key_slot
from keyshard.errors import BrokerError, RangeConflictError
from tests.contract.contract_harness import SUBSCRIPTION, Harness, receive, subscribe
from tests.helpers import event_ms, wait_until
from tests.support.deadlines import deadline, in_time


def test_partitions_of_a_partitioned_topic_are_all_named(harness: Harness) -> None:
    topic = harness.create_topic(partitions=12)
    expected = tuple(TopicPartition(topic, number) for number in range(12))
    assert harness.broker().partitions(topic) == expected


def test_a_plain_topic_is_one_partition_without_number(harness: Harness) -> None:
    topic = harness.create_topic()
    assert harness.broker().partitions(topic) == (TopicPartition(topic, -1),)


def test_a_topic_partition_is_found_under_its_name(harness: Harness) -> None:
    topic = harness.create_topic(partitions=2)
    where = TopicPartition(topic, 1)
    consumer = subscribe(harness.broker(), where)
    harness.publish(where.name, [Message(b"here", key="k")])
    assert consumer.topic_partition == where
    assert receive([consumer], 1).values == [b"here"]
    assert harness.backlog(where) == 1


def test_a_new_subscription_at_earliest_gets_earlier_messages(harness: Harness) -> None:
    where = TopicPartition(harness.create_topic())
    harness.publish(where.name, [Message(b"before", key="k")])
    consumer = subscribe(harness.broker(), where, start=StartPosition.EARLIEST)
    harness.publish(where.name, [Message(b"after", key="k")])
    assert receive([consumer], 2).values == [b"before", b"after"]


def test_a_new_subscription_at_latest_gets_only_later_messages(harness: Harness) -> None:
    where = TopicPartition(harness.create_topic())
    harness.publish(where.name, [Message(b"before", key="k")])
    consumer = subscribe(harness.broker(), where, start=StartPosition.LATEST)
    harness.publish(where.name, [Message(b"after", key="k")])
    assert receive([consumer], 1).values == [b"after"]


def test_an_existing_subscription_wins_over_the_start(harness: Harness) -> None:
    where, broker = TopicPartition(harness.create_topic()), harness.broker()
    subscribe(broker, where, start=StartPosition.EARLIEST).close()
    harness.publish(where.name, [Message(b"kept", key="k")])
    consumer = subscribe(broker, where, start=StartPosition.LATEST)
    assert receive([consumer], 1).values == [b"kept"]


def test_subscribing_to_a_missing_topic_creates_it(harness: Harness) -> None:
    where = TopicPartition(harness.create_topic() + "-missing")
    broker = harness.broker()
    assert broker.partitions(where.topic) == (where,)
    consumer = subscribe(broker, where)
    harness.publish(where.name, [Message(b"value", key="k")])
    assert receive([consumer], 1).values == [b"value"]


def test_a_message_arrives_with_everything_it_was_sent_with(harness: Harness) -> None:
    where = TopicPartition(harness.create_topic())
    consumer = subscribe(harness.broker(), where)
    before_ms = time.time_ns() // 1_000_000
    message = Message(b"\x00\xff", "key", "order", {"a": "1", "ü": "ß"}, event_ms=1_700_000_000_123)
    harness.publish(where.name, [message, Message(b"")])
    full, empty = receive([consumer], 2).blocks
    assert (full.batch_size, full.batched, list(full.indices), full.whole) == (1, False, [0], True)
    assert full.values == [b"\x00\xff"]
    assert (full.partition_keys, full.slot) == (["key"], key_slot("order"))
    assert (full.column("__orderingKey"), full.redelivered) == (["order"], False)
    assert dict(gather([full], ["__properties"])["__properties"][0].as_py()) == {"a": "1", "ü": "ß"}
    assert event_ms([full]) == [1_700_000_000_123]
    assert before_ms <= full.publish_ms <= time.time_ns() // 1_000_000
    assert full.payload_bytes == 2
    assert (empty.values, empty.payload_bytes, event_ms([empty])) == ([b""], 0, [None])
    assert (empty.partition_keys, empty.slot) == ([None], None)
    assert gather([empty], ["__properties"])["__properties"].to_pylist() == [[]]
    assert full.id < empty.id


@pytest.mark.parametrize(
    "overlapping", [HashRange(0, 100), HashRange(100, 200), HashRange(50, 60), HashRange(0, 65535)]
)
def test_an_overlapping_range_conflicts_until_its_holder_closes(
    harness: Harness, overlapping: HashRange
) -> None:
    where = TopicPartition(harness.create_topic())
    holder = subscribe(harness.broker(), where, HashRange(50, 100))
    other = harness.broker()
    with pytest.raises(RangeConflictError):
        subscribe(other, where, overlapping)
    holder.close()
    assert subscribe(other, where, overlapping).is_connected()


def test_neighbouring_ranges_do_not_conflict(harness: Harness) -> None:
    where, broker = TopicPartition(harness.create_topic()), harness.broker()
    ranges = [HashRange(0, 49), HashRange(50, 50), HashRange(51, 65535)]
    consumers = [subscribe(broker, where, hash_range) for hash_range in ranges]
    assert [consumer.hash_range for consumer in consumers] == ranges
    assert all(consumer.is_connected() for consumer in consumers)


def test_a_receive_without_messages_ends_with_nothing_after_its_time(harness: Harness) -> None:
    consumer = subscribe(harness.broker(), TopicPartition(harness.create_topic()))
    started = time.monotonic()
    assert consumer.receive(50) == []
    in_time(started + deadline(5), "a receive of 50 ms lasted longer")


def test_a_closed_consumer_refuses_work_and_closes_again(harness: Harness) -> None:
    consumer = subscribe(harness.broker(), TopicPartition(harness.create_topic()))
    assert consumer.is_connected()
    consumer.close()
    consumer.close()
    assert not consumer.is_connected()
    with pytest.raises(BrokerError):
        consumer.receive(10)
    with pytest.raises(BrokerError):
        consumer.acknowledge([EntryId(0, 0)])


def test_closing_the_broker_closes_its_handles_and_frees_their_ranges(harness: Harness) -> None:
    where, broker = TopicPartition(harness.create_topic()), harness.broker()
    consumer = subscribe(broker, where)
    reader = broker.reader(where, EntryId(0, 0))
    broker.close()
    broker.close()
    assert not consumer.is_connected()
    with pytest.raises(BrokerError):
        consumer.receive(10)
    with pytest.raises(BrokerError):
        reader.read(10)
    with pytest.raises(BrokerError):
        subscribe(broker, where)
    consumer.close()
    reader.close()
    assert subscribe(harness.broker(), where).is_connected()


def test_a_dropped_consumer_is_connected_again(harness: Harness) -> None:
    where = TopicPartition(harness.create_topic())
    consumer = subscribe(harness.broker(), where)
    harness.drop_connections(where)
    wait_until(consumer.is_connected)
    harness.publish(where.name, [Message(b"value", key="k")])
    assert receive([consumer], 1).values == [b"value"]


def test_subscriptions_of_one_topic_do_not_touch_each_other(harness: Harness) -> None:
    where, broker = TopicPartition(harness.create_topic()), harness.broker()
    first = subscribe(broker, where)
    second = broker.subscribe(
        SubscriptionSpec(
            where, "second", first.hash_range, consumer_name="second", receiver_queue_size=10
        ),
        StartPosition.EARLIEST,
    )
    harness.publish(where.name, [Message(b"value", key="k")])
    received = receive([first], 1)
    first.acknowledge(received.ids)
    wait_until(lambda: harness.backlog(where, SUBSCRIPTION) == 0)
    assert harness.backlog(where, "second") == 1
    assert receive([second], 1).values == [b"value"]
