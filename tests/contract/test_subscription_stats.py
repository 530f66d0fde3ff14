"""Subscriptions in the admin interface, in memory and on a real broker."""

from __future__ import annotations

import time

from keyshard.broker.admin.port import Admin
from keyshard.broker.memory import Message
from keyshard.core.position.entry import TopicPartition
from keyshard.core.releases import release_of
from keyshard.core.ring.hash_range import HashRange
from keyshard.core.ring.key_slot import key_slot
from keyshard.core.subscription_state import BrokerLimits, SubscriptionState
from tests.contract.contract_harness import SUBSCRIPTION, Harness, receive, subscribe
from tests.helpers import present, wait_until


def state_of(admin: Admin, where: TopicPartition) -> SubscriptionState:
    return SubscriptionState.from_stats(admin.subscriptions(where)[SUBSCRIPTION])


def test_type_consumers_and_gaps_are_reported(harness: Harness) -> None:
    where = TopicPartition(harness.create_topic())
    broker, admin = harness.broker(), harness.admin()
    subscribe(broker, where, HashRange(0, 99))
    later = subscribe(broker, where, HashRange(200, 65_535))
    state = state_of(admin, where)
    assert (state.kind, state.sticky, state.out_of_order) == ("Key_Shared", True, False)
    assert state.durable
    assert {consumer.name for consumer in state.consumers} == {"range-0-99", "range-200-65535"}
    assert state.gaps == (HashRange(100, 199),)
    later.close()
    assert state_of(admin, where).gaps == (HashRange(100, 65_535),)


def test_the_doctor_reports_backlog_ack_gaps_and_entries_that_wait_for_their_owner(
    harness: Harness,
) -> None:
    where = TopicPartition(harness.create_topic())
    admin = harness.admin()
    slot = key_slot("covered")
    consumer = subscribe(harness.broker(), where, HashRange(slot, slot))
    messages = [Message(b"%d" % i, key="covered") for i in range(6)]
    harness.publish(where.name, [*messages, Message(b"m", key="other")])
    received = receive([consumer], 6)
    consumer.acknowledge([received.ids[1], received.ids[2], received.ids[4]])
    wait_until(lambda: state_of(admin, where).backlog == 4)
    state = state_of(admin, where)
    assert state.ack_gaps == 2
    assert state.in_replay == 1
    assert not state.blocked
    wait_until(lambda: state_of(admin, where).consumers[0].unacknowledged == 3)
    state = state_of(admin, where)
    (owner,) = state.consumers
    assert not owner.blocked
    assert owner.permits > 0
    assert (state.delivered, state.delayed) == (6, 0)


def test_the_publish_time_of_the_oldest_entry_is_reported_on_request(harness: Harness) -> None:
    where = TopicPartition(harness.create_topic())
    admin = harness.admin()
    consumer = subscribe(harness.broker(), where, HashRange(0, 65_535))

    def oldest_ms() -> int | None:
        found = present(admin.subscription(where, SUBSCRIPTION, oldest=True))
        return SubscriptionState.from_stats(found).oldest_ms

    assert oldest_ms() is None
    began_ms = time.time_ns() // 1_000_000
    harness.publish(where.name, [Message(b"first", key="k")])
    between_ms = time.time_ns() // 1_000_000
    wait_until(lambda: time.time_ns() // 1_000_000 > between_ms)
    harness.publish(where.name, [Message(b"second", key="k")])
    assert began_ms <= present(oldest_ms()) <= between_ms
    assert state_of(admin, where).oldest_ms is None
    received = receive([consumer], 2)
    consumer.acknowledge(received.ids[1:])
    wait_until(lambda: state_of(admin, where).backlog == 1)
    assert began_ms <= present(oldest_ms()) <= between_ms
    consumer.acknowledge(received.ids[:1])
    wait_until(lambda: oldest_ms() is None)


def test_a_topic_that_is_not_there_has_no_subscription(harness: Harness) -> None:
    assert harness.admin().subscriptions(TopicPartition(f"{harness.create_topic()}-no")) == {}


def test_version_and_limits_are_reported(harness: Harness) -> None:
    admin = harness.admin()
    assert release_of(admin.version()) == harness.release
    limits = BrokerLimits().with_settings(admin.settings())
    assert limits.replay_per_consumer == harness.look_ahead_per_consumer
    assert limits.unacked_per_consumer == BrokerLimits().unacked_per_consumer
