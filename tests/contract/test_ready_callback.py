"""Contract: an idle consumer calls back once when something comes, and loses nothing by it."""

from __future__ import annotations

import threading

from keyshard.broker.memory import Batching, Message
from keyshard.core.position.entry import TopicPartition
from tests.contract.contract_harness import Harness, Received, subscribe
from tests.helpers import wait_until


def test_a_consumer_calls_back_when_something_comes_and_gives_all_in_order(
    harness: Harness,
) -> None:
    where = TopicPartition(harness.create_topic())
    consumer = subscribe(harness.broker(), where)
    assert consumer.receive(10) == []
    rung = threading.Event()
    consumer.when_ready(rung.set)
    assert not rung.is_set()
    messages = [Message(b"%d" % number, key="k") for number in range(20)]
    harness.publish(where.name, messages, Batching.BY_KEY)
    wait_until(rung.is_set)
    received = Received()
    wait_until(lambda: received.take([consumer]) >= 0 and len(received.values) >= 20)
    assert received.values == [message.value for message in messages]


def test_a_consumer_that_has_something_calls_back_at_once(harness: Harness) -> None:
    where = TopicPartition(harness.create_topic())
    consumer = subscribe(harness.broker(), where)
    harness.publish(where.name, [Message(b"first", key="k")], Batching.NONE)
    rung = threading.Event()
    consumer.when_ready(rung.set)
    wait_until(rung.is_set)
    received = Received()
    wait_until(lambda: received.take([consumer]) >= 0 and bool(received.values))
    assert received.values == [b"first"]


def test_announced_and_unreceived_entries_go_to_the_next_owner(harness: Harness) -> None:
    where = TopicPartition(harness.create_topic())
    broker = harness.broker()
    consumer = subscribe(broker, where)
    rung = threading.Event()
    consumer.when_ready(rung.set)
    harness.publish(where.name, [Message(b"first", key="k")], Batching.NONE)
    wait_until(rung.is_set)
    consumer.close()
    following = subscribe(broker, where)
    received = Received()
    wait_until(lambda: received.take([following]) >= 0 and bool(received.values))
    assert received.values == [b"first"]


def test_after_a_reconnect_announced_entries_come_from_their_first_index(
    harness: Harness,
) -> None:
    where = TopicPartition(harness.create_topic())
    consumer = subscribe(harness.broker(), where)
    rung = threading.Event()
    consumer.when_ready(rung.set)
    messages = [Message(b"%d" % number, key="k") for number in range(5)]
    harness.publish(where.name, messages, Batching.BY_KEY)
    wait_until(rung.is_set)
    harness.drop_connections(where)
    received = Received()
    wait_until(
        lambda: (
            received.take([consumer]) >= 0
            and received.values[-5:] == [message.value for message in messages]
        )
    )
