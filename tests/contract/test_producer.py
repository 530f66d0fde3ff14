"""Contract: publishing with confirmation."""

from __future__ import annotations

import threading
import time

import pytest

from keyshard.broker.port import Producer
from keyshard.columns.content import gather
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.ring.key_slot import key_slot
from keyshard.errors import BrokerError, BrokerUnavailableError
from tests.contract.contract_harness import (
    DEADLINE_S,
    BreakableHarness,
    Harness,
    Received,
    read_to_end,
    receive,
    subscribe,
)
from tests.helpers import event_ms, present, wait_until
from tests.support.deadlines import deadline, in_time, joined

FIRST = EntryId(0, 0)
TIMEOUT_MS = 10_000


def properties(received: Received) -> list[dict[str, str]]:
    column = gather(received.blocks, ["__properties"])["__properties"]
    return [dict(pairs or ()) for pairs in column.to_pylist()]


@pytest.mark.parametrize("partitions", [0, 2])
def test_sent_messages_are_stored_in_order_each_as_one_entry(
    harness: Harness, partitions: int
) -> None:
    where = TopicPartition(harness.create_topic(partitions), 1 if partitions else -1)
    broker = harness.broker()
    producer = broker.producer(where, send_timeout_ms=TIMEOUT_MS)
    sent = [producer.send(b"%d" % number, key=f"k{number % 3}") for number in range(20)]
    stored = read_to_end(broker.reader(where, FIRST))
    assert stored.ids == sent == sorted(set(sent))
    assert stored.values == [b"%d" % number for number in range(20)]
    assert not any(block.batched for block in stored.blocks)


def test_a_confirmed_message_is_stored_already(harness: Harness) -> None:
    where, broker = TopicPartition(harness.create_topic()), harness.broker()
    reader = broker.reader(where, FIRST)
    producer = broker.producer(where, send_timeout_ms=TIMEOUT_MS)
    for _ in range(5):
        assert reader.at_end()
        sent = producer.send(b"x")
        assert read_to_end(reader).ids == [sent]


def test_keys_properties_and_event_time_arrive(harness: Harness) -> None:
    where, broker = TopicPartition(harness.create_topic()), harness.broker()
    consumer = subscribe(broker, where)
    producer = broker.producer(where, send_timeout_ms=TIMEOUT_MS)
    producer.send(b"\x00\xff", key="k", ordering_key="o", properties={"a": "1", "b": ""})
    producer.send(b"", key="k", event_ms=1_700_000_000_123)
    producer.send(b"keyless")
    received = receive([consumer], 3)
    values = [present(value) for value in received.values]
    assert sorted(values) == [b"", b"\x00\xff", b"keyless"]
    by_value = sorted(zip(values, received.blocks, strict=True), key=lambda pair: pair[0])
    received.deliveries = [(consumer, block) for _, block in by_value]
    assert [block.partition_keys for block in received.blocks] == [["k"], ["k"], [None]]
    assert [block.slot for block in received.blocks] == [key_slot("k"), key_slot("o"), None]
    assert properties(received) == [{}, {"a": "1", "b": ""}, {}]
    assert event_ms(received.blocks) == [1_700_000_000_123, None, None]


def test_several_threads_send_and_each_keeps_its_order(harness: Harness) -> None:
    where, broker = TopicPartition(harness.create_topic()), harness.broker()
    producer = broker.producer(where, send_timeout_ms=TIMEOUT_MS)

    def send(key: str) -> None:
        for number in range(30):
            producer.send(b"%d" % number, key=key)

    threads = [threading.Thread(target=send, args=(f"k{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        joined(thread, DEADLINE_S)
    stored = read_to_end(broker.reader(where, FIRST)).by_key()
    assert stored == {f"k{i}": [b"%d" % number for number in range(30)] for i in range(4)}


def test_a_producer_of_a_missing_topic_creates_it(harness: Harness) -> None:
    where, broker = TopicPartition(harness.create_topic() + "-DLQ"), harness.broker()
    sent = broker.producer(where, send_timeout_ms=TIMEOUT_MS).send(b"x")
    assert read_to_end(broker.reader(where, FIRST)).ids == [sent]


def test_a_send_without_a_broker_fails_at_the_deadline_and_the_next_ones_arrive(
    breakable: BreakableHarness,
) -> None:
    where, broker = TopicPartition(breakable.create_topic()), breakable.broker()
    producer = broker.producer(where, send_timeout_ms=1_000)
    producer.send(b"before", key="k")
    with breakable.away():
        began = time.monotonic()
        with pytest.raises(BrokerUnavailableError, match=where.topic) as caught:
            producer.send(b"away", key="k")
        assert time.monotonic() - began > 0.5
        in_time(began + deadline(20), "the send timeout is 1 s")
        assert caught.value.retriable
    wait_until(lambda: sends(producer))
    values = read_to_end(breakable.broker().reader(where, FIRST)).values
    assert values[0] == b"before"
    assert values[-1] == b"after"


def sends(producer: Producer) -> bool:
    """Whether the broker takes a message."""
    try:
        producer.send(b"after", key="k")
    except BrokerUnavailableError:
        return False
    return True


def test_a_send_that_begins_without_a_broker_is_confirmed_when_it_is_back(
    breakable: BreakableHarness,
) -> None:
    where, broker = TopicPartition(breakable.create_topic()), breakable.broker()
    producer = broker.producer(where, send_timeout_ms=60_000)
    sent: list[EntryId] = [producer.send(b"before", key="k")]
    waiting = threading.Thread(target=lambda: sent.append(producer.send(b"away", key="k")))
    with breakable.away():
        waiting.start()
    joined(waiting, deadline(60))
    assert len(sent) == 2
    assert read_to_end(breakable.broker().reader(where, FIRST)).ids == sent


def test_a_closed_producer_refuses_work_and_closes_again(harness: Harness) -> None:
    where = TopicPartition(harness.create_topic())
    producer = harness.broker().producer(where, send_timeout_ms=TIMEOUT_MS)
    producer.close()
    producer.close()
    with pytest.raises(BrokerError):
        producer.send(b"x")
