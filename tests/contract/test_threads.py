"""Contract: ranges are consumed in threads while others publish."""

from __future__ import annotations

import threading
import time

from keyshard.broker.memory import Batching, Message
from keyshard.broker.port import Consumer
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.ring.hash_range import split_ring
from tests.contract.contract_harness import DEADLINE_S, Harness, Received, subscribe
from tests.helpers import wait_until
from tests.support.deadlines import joined

KEYS = 40
ROUNDS = 50


def test_ranges_in_threads_get_every_message_in_order_per_key(harness: Harness) -> None:
    where, broker = TopicPartition(harness.create_topic()), harness.broker()
    consumers = [
        subscribe(broker, where, hash_range, receiver_queue_size=10) for hash_range in split_ring(4)
    ]
    results = [Received() for _ in consumers]
    done = threading.Event()

    def consume(consumer: Consumer, received: Received) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not done.is_set() and time.monotonic() < deadline:
            known = len(received.deliveries)
            if received.take([consumer]):
                consumer.acknowledge([block.id for block in received.blocks[known:]])

    threads = [
        threading.Thread(target=consume, args=pair, daemon=True)
        for pair in zip(consumers, results, strict=True)
    ]
    for thread in threads:
        thread.start()
    for number in range(ROUNDS):
        batching = Batching.BY_KEY if number % 2 else Batching.NONE
        harness.publish(
            where.name, [Message(b"%d" % number, key=str(key)) for key in range(KEYS)], batching
        )
    wait_until(lambda: sum(len(set(received.ids)) for received in results) == KEYS * ROUNDS)
    wait_until(lambda: harness.backlog(where) == 0)
    done.set()
    for thread in threads:
        joined(thread, DEADLINE_S)
    first = [first_deliveries(received) for received in results]
    by_key = {key: values for received in first for key, values in received.by_key().items()}
    assert by_key == {str(key): [b"%d" % n for n in range(ROUNDS)] for key in range(KEYS)}
    assert sum(len(received.values) for received in first) == KEYS * ROUNDS
    repeated = sum(len(received.blocks) for received in results) - KEYS * ROUNDS
    assert harness.may_repeat or not repeated


def first_deliveries(received: Received) -> Received:
    """Received entries, each once for a consumer."""
    first, known = Received(), set[EntryId]()
    for consumer, block in received.deliveries:
        if block.id not in known:
            known.add(block.id)
            first.deliveries.append((consumer, block))
    return first
