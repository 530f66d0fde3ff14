"""How fast is a batch read of Spark, against plain Readers of pulsar-client as many as its tasks?

Every figure is measured in a process of its own against one broker, in turn; Readers run in two
processes at once, as Spark's tasks do. Before each Spark figure a read of another topic has started
the Python workers. ``first`` is the time from ``load()`` to the first row of what was published
after the rest, found by its publish time.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from typing import Any

import pulsar
from rich.console import Console

from bench.child import child
from bench.ingest import PARTITIONS, load
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import Workload

MESSAGES = 400_000
TASKS = 2
"""Readers, and Spark's tasks, at a time."""
SHAPES = {"small": 4, "large": 1_000}
"""Messages of one entry, about."""
RUNS = 3

_console = Console(stderr=True)


def run() -> dict[str, float]:
    """Medians for small and for large entries: rows a second, their ratio, and seconds."""
    figures: dict[str, float] = {}
    with DevBroker(optimised=True) as broker:
        load(broker, "warm", Workload(1_000, keys=100, size_bytes=100, entry_messages=4))
        for shape, entry_messages in SHAPES.items():
            topic = f"batch-{shape}"
            keys = 100 if shape == "large" else 10_000
            load(broker, topic, Workload(
                MESSAGES, keys=keys, size_bytes=100, entry_messages=entry_messages
            ))  # fmt: skip
            found: dict[str, list[float]] = {}
            for turn in range(RUNS):
                arguments = {
                    "topic": topic, "service_url": broker.service_url,
                    "admin_url": broker.admin_url,
                }  # fmt: skip
                measured = {"readers_rows_per_s": readers(arguments)}
                measured |= child("bench.batch", "spark", json.dumps(arguments))
                for name, value in measured.items():
                    _console.print(f"{topic} run {turn + 1} of {RUNS}: {name} {value:,.2f}")
                for name, value in measured.items():
                    found.setdefault(name, []).append(value)
            medians = {name: statistics.median(values) for name, values in found.items()}
            figures |= {f"{shape}_{name}": value for name, value in medians.items()}
            figures[f"{shape}_spark_over_readers"] = (
                medians["spark_rows_per_s"] / medians["readers_rows_per_s"]
            )
    return figures


def readers(arguments: dict[str, Any]) -> float:
    """Rows a second of two processes, which share the topic partitions; without their start."""
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.batch", "readers",
             json.dumps(arguments | {"partitions": list(range(number, PARTITIONS, TASKS))})],
            stdout=subprocess.PIPE, text=True,
        )
        for number in range(TASKS)
    ]  # fmt: skip
    told = [json.loads(process.communicate()[0].splitlines()[-1]) for process in running]
    rows = sum(one["rows"] for one in told)
    assert rows >= MESSAGES, f"{rows} of {MESSAGES} rows"
    return rows / (max(one["ended"] for one in told) - min(one["began"] for one in told))


def read_plainly(
    topic: str,
    service_url: str,
    admin_url: str,  # noqa: ARG001 - Spark's part has the same arguments
    partitions: list[int],
) -> dict[str, float]:
    """Look at what a message says of itself, with one Reader after the other."""
    client = pulsar.Client(service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    rows, began = 0, time.time()
    for partition in partitions:
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
    ended = time.time()
    client.close()
    return {"rows": rows, "began": began, "ended": ended}


def spark_rates(topic: str, service_url: str, admin_url: str) -> dict[str, float]:
    """Rows a second into a sink that drops them, and seconds to a first row by time."""
    from pyspark.sql import Observation, functions  # noqa: PLC0415 - takes seconds

    from examples.parquet_query import session  # noqa: PLC0415 - so does it

    spark = session()

    def rows(name: str, **options: str) -> Any:
        urls = {"service.url": service_url, "admin.url": admin_url, "topic": name}
        return spark.read.format("keyshard").options(**urls, **options).load()

    def drop(what: Any) -> int:
        seen = Observation()
        what.observe(seen, functions.count(functions.lit(1)).alias("rows")).write.format(
            "noop"
        ).mode("overwrite").save()
        return int(seen.get["rows"])

    drop(rows("warm", minPartitions="8"))
    began = time.perf_counter()
    read = drop(rows(topic, minPartitions="10"))
    rate = read / (time.perf_counter() - began)
    assert read >= MESSAGES, f"{read} of {MESSAGES} rows"

    newest_ms = publish_one(topic, service_url)
    began = time.perf_counter()
    newest = rows(topic, startingTime=str(newest_ms), maxTimeDisorder="1s").first()
    first_s = time.perf_counter() - began
    assert bytes(newest["value"]) == b"newest"
    spark.stop()
    return {"spark_rows_per_s": rate, "first_s": first_s}


def publish_one(topic: str, service_url: str) -> int:
    """Publish a message behind the others; a moment before it, milliseconds."""
    time.sleep(2)  # those others are older than what the read allows for
    moment_ms = time.time_ns() // 1_000_000
    client = pulsar.Client(service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    client.create_producer(topic).send(b"newest", partition_key="newest")
    client.close()
    return moment_ms


if __name__ == "__main__":
    KINDS = {"readers": read_plainly, "spark": spark_rates}
    print(json.dumps(KINDS[sys.argv[1]](**json.loads(sys.argv[2]))))
