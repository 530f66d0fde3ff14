"""How much memory does a source use over the wire if its sink takes nothing?

Each shape of messages and entries is read in a separate process on one broker. The limit is twice
``window_bytes_max`` plus 200 MB.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import NamedTuple

import pulsar
from rich.console import Console

from bench.child import child
from bench.release import PULSAR
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import create_partitioned_topic

PARTITIONS = 5
KEYS = 200
WINDOW_MB = 64
ROWS_MAX = 10_000_000
"""So many rows that only ``window_bytes_max`` limits the window."""

_console = Console(stderr=True)


class Shape(NamedTuple):
    """A shape of messages and of the entries that hold them."""

    messages: int
    size_bytes: int
    entry_messages: int
    compressible: bool


SHAPES = {
    "100b_small": Shape(1_000_000, 100, 4, compressible=False),
    "100b_large": Shape(1_500_000, 100, 1_000, compressible=False),
    "100b_compressible": Shape(2_000_000, 100, 1_000, compressible=True),
    "100kb": Shape(4_000, 100_000, 1, compressible=False),
    "100kb_compressible": Shape(20_000, 100_000, 10, compressible=True),
}


def run() -> dict[str, float]:
    """Return the peak memory of each shape, MB."""
    figures: dict[str, float] = {}
    with DevBroker(PULSAR) as broker:
        for name, shape in SHAPES.items():
            create_partitioned_topic(broker.admin_url, name, PARTITIONS)
            publish(broker.service_url, name, shape)
            found = child("bench.embedded", "stalled", json.dumps({
                "service_url": broker.service_url, "topic": name, "transport": "wire",
                "messages": shape.messages, "window_bytes_max": WINDOW_MB << 20,
                "window_rows_max": ROWS_MAX,
            }))  # fmt: skip
            figures[f"peak_mb_{name}"] = found["peak_mb"]
            _console.print(
                f"{name}: {found['peak_mb']:,.0f} MB of {2 * WINDOW_MB + 200}, "
                f"{found['window_rows']:,} rows"
            )
    return figures


def publish(service_url: str, topic: str, shape: Shape) -> None:
    """Publish a shape to a topic, in runs of one key per entry."""
    client = pulsar.Client(service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    try:
        kind = pulsar.CompressionType
        producer = client.create_producer(
            topic, block_if_queue_full=True, max_pending_messages=2_000,
            compression_type=kind.ZSTD if shape.compressible else kind.NONE,
            batching_enabled=shape.entry_messages > 1,
            batching_type=pulsar.BatchingType.KeyBased,
            batching_max_messages=max(2, shape.entry_messages),
            batching_max_allowed_size_in_bytes=4 << 20, batching_max_publish_delay_ms=1_000,
        )  # fmt: skip
        failed: list[object] = []
        for number, value in enumerate(values(shape)):
            key = f"k{number // shape.entry_messages % KEYS}"
            producer.send_async(
                value,
                lambda result, _: None if result == pulsar.Result.Ok else failed.append(result),
                partition_key=key,
            )
        producer.flush()
        if failed:
            raise RuntimeError(f"publishing to {topic} failed with {failed[0]}")
    finally:
        client.close()


def values(shape: Shape) -> Iterator[bytes]:
    draw = random.Random(shape.size_bytes)
    some = [draw.randbytes(shape.size_bytes) for _ in range(100)]
    for number in range(shape.messages):
        yield bytes(shape.size_bytes) if shape.compressible else some[number % len(some)]
