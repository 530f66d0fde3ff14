"""The client alone: a bare loop over 10 sticky consumers, in a separate process."""

from __future__ import annotations

import json
import sys
import threading
import time
import uuid
from typing import Any

import pulsar

from keyshard.core.ring.hash_range import split_ring

RANGES, THREADS = 10, 4


def consumers(client: pulsar.Client, topic: str, partitions: int) -> list[Any]:
    """Subscribe one consumer per range and topic partition, as keyshard does."""
    subscription = f"bare-{uuid.uuid4().hex[:8]}"
    return [
        client.subscribe(
            f"persistent://public/default/{topic}-partition-{partition}",
            subscription,
            consumer_type=pulsar.ConsumerType.KeyShared,
            initial_position=pulsar.InitialPosition.Earliest,
            key_shared_policy=pulsar.ConsumerKeySharedPolicy(
                pulsar.KeySharedMode.Sticky, sticky_ranges=[(hash_range.start, hash_range.end)]
            ),
            batch_receive_policy=pulsar.ConsumerBatchReceivePolicy(1000, -1, 10),
        )._consumer
        for hash_range in split_ring(RANGES)
        for partition in range(partitions)
    ]


def touch(messages: list[Any], into: list[Any]) -> None:
    """Read data, key, id and publish time of each message."""
    for message in messages:
        message_id = message.message_id()
        into.append((
            message_id.ledger_id(), message_id.entry_id(), message_id.batch_index(),
            message.data(), message.partition_key(), message.publish_timestamp(),
        ))  # fmt: skip


def run(service_url: str, topic: str, partitions: int, messages: int, *, touching: bool) -> float:
    """Receive and acknowledge everything; return rows per second."""
    client = pulsar.Client(service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    handles = consumers(client, topic, partitions)
    counts = [0] * THREADS
    done = threading.Event()

    def loop(thread: int) -> None:
        while not done.is_set():
            for consumer in handles[thread::THREADS]:
                received = consumer.batch_receive()
                rows: list[Any] = []
                if touching:
                    touch(received, rows)
                for message in received:
                    consumer.acknowledge(message)
                counts[thread] += len(received)
            if sum(counts) >= messages:
                done.set()

    began = time.perf_counter()
    threads = [threading.Thread(target=loop, args=(i,), daemon=True) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    if not done.wait(300):
        sys.exit(f"received only {sum(counts)} of {messages} messages within 300 s")
    rate = messages / (time.perf_counter() - began)
    for thread in threads:
        thread.join()
    client.close()
    return rate


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    print(json.dumps(run(**arguments)))
