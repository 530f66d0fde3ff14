"""How fast is a bounded read: with plain Readers, split by split, and as a Ray dataset?

The figures are measured in turn, each in a separate process, on one broker. ``splits`` reads in one
process and one thread, as a Reader does. The dataset has two read tasks at a time.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import pulsar
from rich.console import Console

from bench.child import child
from bench.ingest import PARTITIONS, load
from bench.release import PULSAR
from keyshard import KeyShardSource
from keyshard.columns.record_batches import SCHEMA
from keyshard.core.position.split import cut
from keyshard.reading.split_planner import plan_read
from keyshard.reading.split_reader import read_splits
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import Workload

MESSAGES = {4: 100_000, 1_000: 300_000}
"""Messages of a topic, by approximate messages per entry."""
BLOCKS = 10
RUNS = 3

_console = Console(stderr=True)


def run() -> dict[str, float]:
    """Return medians for small and large entries: rows per second, and ratios to plain Readers."""
    figures: dict[str, float] = {}
    with DevBroker(PULSAR) as broker:
        for size, messages in MESSAGES.items():
            topic = f"bounded-{size}"
            keys = 100 if size > 4 else 10_000
            load(broker, topic, Workload(messages, keys=keys, size_bytes=100, entry_messages=size))
            found: dict[str, list[float]] = {}
            for _ in range(RUNS):
                for kind in ("reader", "splits", "splits_keys", "ray"):
                    arguments = {
                        "kind": kind, "topic": topic, "messages": messages,
                        "service_url": broker.service_url, "admin_url": broker.admin_url,
                    }  # fmt: skip
                    rate = child("bench.bounded", json.dumps(arguments))
                    _console.print(f"{size} messages an entry, {kind}: {rate:,.0f} rows/s")
                    found.setdefault(kind, []).append(rate)
            rates = {kind: statistics.median(each) for kind, each in found.items()}
            figures |= {f"entries_{size}_{kind}_rows_per_s": rate for kind, rate in rates.items()}
            figures |= {
                f"entries_{size}_{kind}_over_reader": rate / rates["reader"]
                for kind, rate in rates.items()
                if kind != "reader"
            }
    return figures


def measure(kind: str, topic: str, messages: int, service_url: str, admin_url: str) -> float:
    """Return rows per second of one way to read everything."""
    source = KeyShardSource(topic, service_url=service_url, admin_url=admin_url)
    if kind == "ray":
        return ray_rate(source, messages)
    began = time.perf_counter()
    if kind == "reader":
        rows = read_plainly(service_url, topic)
    else:
        names = SCHEMA.names if kind == "splits" else ["__key"]
        splits = cut(plan_read(source), BLOCKS)
        rows = sum(one.num_rows for one in read_splits(source.how_to_connect(), splits, names))
    rate = rows / (time.perf_counter() - began)
    assert rows == messages, f"{rows} of {messages} rows"
    return float(rate)


def read_plainly(service_url: str, topic: str) -> int:
    """Read the data and metadata of every message, with one Reader after the other."""
    client = pulsar.Client(service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    rows = 0
    for partition in range(PARTITIONS):
        reader = client.create_reader(
            f"persistent://public/default/{topic}-partition-{partition}", pulsar.MessageId.earliest
        )
        while reader.has_message_available():
            message = reader.read_next()
            found = (
                message.data(), message.partition_key(), message.message_id(),
                message.publish_timestamp(), message.event_timestamp(), message.properties(),
            )  # fmt: skip
            rows += len(found) == 6
        reader.close()
    client.close()
    return rows


def ray_rate(source: KeyShardSource, messages: int) -> float:
    """Return rows per second of a dataset, on a running Ray with started workers."""
    import ray  # noqa: PLC0415 - takes seconds

    import ray_adapter  # noqa: PLC0415 - takes seconds

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    # The first run starts Ray's workers.
    ray_adapter.read(source, end="earliest").count()
    ray_adapter.read(source, columns=["__partition"], override_num_blocks=2).take(1)
    began = time.perf_counter()
    rows = ray_adapter.read(source, override_num_blocks=BLOCKS).materialize().count()
    rate = rows / (time.perf_counter() - began)
    ray.shutdown()
    assert rows == messages, f"{rows} of {messages} rows"
    return float(rate)


if __name__ == "__main__":
    print(json.dumps(measure(**json.loads(sys.argv[1]))))
