"""What do many idle consumers cost: latency of 10 ranges x 100 partitions, CPU of 50 x 20?"""

from __future__ import annotations

import statistics
import time
import uuid

import pulsar

from bench.release import PULSAR
from keyshard import KeyShardSource
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import create_partitioned_topic

MESSAGES = 100
PAUSE_S, SETTLE_S, IDLE_S = 0.05, 2.0, 10.0
SHAPES = ((10, 100), (50, 20))


def measure(broker: DevBroker, ranges: int, partitions: int) -> dict[str, float]:
    """Measure one source over mostly idle partitions; milliseconds, and percent of one core."""
    topic = f"idle-{uuid.uuid4().hex[:6]}"
    create_partitioned_topic(broker.admin_url, topic, partitions)
    source = KeyShardSource(
        topic,
        subscription="idle",
        service_url=broker.service_url,
        parallelism=ranges,
        starting_position="earliest",
        subscribe_timeout_ms=120_000,
        receiver_queue_size=100,
    )
    client = pulsar.Client(
        broker.service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
    )
    producer = client.create_producer(topic)
    latencies = []
    began = time.perf_counter()
    with source.open() as stream:
        opened_s = time.perf_counter() - began
        for number in range(MESSAGES):
            time.sleep(PAUSE_S)
            sent = time.perf_counter()
            producer.send(b"x", partition_key=f"k{number}")
            batch = stream.next_batch(30)
            assert batch is not None, "received no message within 30 s"
            latencies.append(time.perf_counter() - sent)
            stream.commit(batch)
        time.sleep(SETTLE_S)
        cpu, wall = time.process_time(), time.perf_counter()
        time.sleep(IDLE_S)
        busy = (time.process_time() - cpu) / (time.perf_counter() - wall)
    client.close()
    name = f"{ranges}x{partitions}"
    return {
        f"open_s_{name}": opened_s,
        f"latency_p50_ms_{name}": statistics.median(latencies) * 1e3,
        f"latency_p99_ms_{name}": statistics.quantiles(latencies, n=100)[98] * 1e3,
        f"idle_cpu_percent_{name}": busy * 100,
    }


def run() -> dict[str, float]:
    """Return all figures."""
    figures: dict[str, float] = {}
    with DevBroker(PULSAR) as broker:
        for ranges, partitions in SHAPES:
            figures |= measure(broker, ranges, partitions)
    return figures
