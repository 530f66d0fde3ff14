"""Contract: messages left unacknowledged stop a consumer, or the topic partition."""

from __future__ import annotations

from keyshard.broker.memory import Batching, Message
from keyshard.broker.port import Consumer
from keyshard.core.position.entry import TopicPartition
from keyshard.core.ring.hash_range import split_ring
from keyshard.core.ring.key_slot import key_slot
from tests.contract.contract_harness import Harness, Received, receive_until_idle, subscribe

LOW, HIGH = split_ring(2)
LOW_KEY = next(key for key in map(str, range(100)) if key_slot(key) in LOW)
HIGH_KEY = next(key for key in map(str, range(100)) if key_slot(key) in HIGH)
LIMIT = 40


def singles(key: str, count: int) -> list[Message]:
    return [Message(b"%d" % number, key=key) for number in range(count)]


def take(harness: Harness, consumers: list[Consumer], at_least: int) -> Received:
    """Messages until none arrives any more."""
    received = Received()
    # Twice the time that a client groups acknowledgements, and more.
    receive_until_idle(consumers, received, harness.idle_s / 2, at_least)
    return received


def test_a_lone_consumer_at_its_limit_gets_more_only_once_half_is_acknowledged(
    harness: Harness,
) -> None:
    harness.limit_unacked(LIMIT, 0)
    where = TopicPartition(harness.create_topic())
    consumer = subscribe(harness.broker(), where)
    harness.publish(where.name, singles("k", 3 * LIMIT))
    first = take(harness, [consumer], LIMIT).ids
    assert len(first) == LIMIT
    consumer.acknowledge(first[: LIMIT // 2 - 1])
    assert take(harness, [consumer], 0).ids == []
    consumer.acknowledge(first[LIMIT // 2 - 1 : LIMIT // 2])
    assert len(take(harness, [consumer], LIMIT // 2).ids) == LIMIT // 2


def test_beside_another_a_consumer_at_its_limit_gets_as_many_as_it_acknowledges(
    harness: Harness,
) -> None:
    harness.limit_unacked(LIMIT, 0)
    where, broker = TopicPartition(harness.create_topic()), harness.broker()
    low, high = subscribe(broker, where, LOW), subscribe(broker, where, HIGH)
    harness.publish(where.name, singles(LOW_KEY, 2 * LIMIT))
    first = take(harness, [low, high], LIMIT).ids
    assert len(first) == LIMIT
    low.acknowledge(first[:3])
    may_wait = harness.release.blocked_until_half
    more = take(harness, [low, high], 0 if may_wait else 3).ids
    assert len(more) == 3 or may_wait
    harness.publish(where.name, singles(HIGH_KEY, 5))
    assert len(take(harness, [high], 5).ids) == 5
    # At most half are unacknowledged then, whether the three have come by now or not.
    low.acknowledge(first[3 : LIMIT // 2 + 3])
    late = LIMIT // 2 + 3 - len(more)
    assert len(take(harness, [low, high], late).ids) == late


def test_the_limit_of_a_consumer_counts_messages_and_an_entry_may_pass_it(harness: Harness) -> None:
    harness.limit_unacked(LIMIT, 0)
    where = TopicPartition(harness.create_topic())
    consumer = subscribe(harness.broker(), where, receiver_queue_size=LIMIT)
    for _ in range(4):
        harness.publish(where.name, singles("k", LIMIT - 10), Batching.BY_KEY)
    received = take(harness, [consumer], 2 * (LIMIT - 10))
    assert len(received.values) == 2 * (LIMIT - 10)


def test_at_the_limit_of_a_subscription_nothing_new_is_sent_until_below_the_half(
    harness: Harness,
) -> None:
    harness.limit_unacked(0, LIMIT)
    where, broker = TopicPartition(harness.create_topic()), harness.broker()
    low, high = subscribe(broker, where, LOW), subscribe(broker, where, HIGH)
    harness.publish(where.name, singles(LOW_KEY, LIMIT))
    first = take(harness, [low], LIMIT).ids
    harness.publish(where.name, singles(HIGH_KEY, 5))
    assert take(harness, [low, high], 0).ids == []
    low.acknowledge(first[: LIMIT // 2])
    assert take(harness, [high], 0).ids == []
    low.acknowledge(first[LIMIT // 2 : LIMIT // 2 + 1])
    assert len(take(harness, [high], 5).ids) == 5


def test_the_admin_interface_reports_the_limits(harness: Harness) -> None:
    assert harness.admin().unacknowledged_limits(harness.create_topic()) == (50_000, 200_000)
    harness.limit_unacked(LIMIT, 0)
    assert harness.admin().unacknowledged_limits(harness.create_topic()) == (LIMIT, 0)
