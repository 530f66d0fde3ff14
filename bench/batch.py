"""How fast is a Spark batch read, compared with as many plain Readers as it has tasks?

The figures are measured in turn, each in a separate process, on one broker. Readers run in two
processes at once, as Spark's tasks do. Each session first reads a smaller topic of the same shape.
``floor`` is Spark with a Python source whose rows cost nothing to read. ``first_row`` is the time
from ``load()`` to the first row of the topic's last minute, which follows all other rows. It is
measured with ``maxTimeDisorder``, and without it (``any``), where the read looks at everything.
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
from bench.ingest import PARTITIONS, WARM_ROWS, load
from bench.release import PULSAR
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import Workload

TASKS = 2
"""Number of Readers, and of Spark tasks, that run at once."""
SHAPES = {"small": 4, "large": 1_000}
"""Approximate messages per entry."""
CONNECTOR = {"small": 80_000, "large": 296_000}
"""Rows per second of the JVM connector, warm, on two cores shared with the broker."""
RUNS = 3
OLDER_S = 62
"""Time until published messages are older than one minute and the clock disorder, seconds."""

_console = Console(stderr=True)


def run(messages: int) -> dict[str, float]:
    """Return medians for small and large entries: rows per second, ratios, and seconds.

    Args:
        messages: Messages per topic.
    """
    figures: dict[str, float] = {}
    with DevBroker(PULSAR, optimised=True) as broker:
        for shape, entry_messages in SHAPES.items():
            keys = 100 if shape == "large" else 10_000
            topic, warm = f"batch-{shape}", f"warm-{shape}"
            for name, count in ((warm, WARM_ROWS), (topic, messages)):
                load(broker, name, Workload(
                    count, keys=keys, size_bytes=100, entry_messages=entry_messages
                ))  # fmt: skip
            loaded_s = time.monotonic()
            arguments = {
                "topic": topic, "service_url": broker.service_url, "admin_url": broker.admin_url,
                "messages": messages,
            }  # fmt: skip
            found: dict[str, list[float]] = {}
            for turn in range(RUNS):
                measured = {"readers_rows_per_s": readers(arguments)}
                time.sleep(max(0.0, loaded_s + OLDER_S - time.monotonic()))
                measured |= child("bench.spark_batch", json.dumps(arguments | {"warm_topic": warm}))
                for name, value in measured.items():
                    _console.print(f"{topic} run {turn + 1} of {RUNS}: {name} {value:,.2f}")
                    found.setdefault(name, []).append(value)
            medians = {name: statistics.median(values) for name, values in found.items()}
            figures |= {f"{shape}_{name}": value for name, value in medians.items()}
            spark = medians["spark_rows_per_s"]
            figures[f"{shape}_spark_over_readers"] = spark / medians["readers_rows_per_s"]
            figures[f"{shape}_spark_over_connector"] = spark / CONNECTOR[shape]
    return figures


def readers(arguments: dict[str, Any]) -> float:
    """Return rows per second of two processes that share the topic partitions, without startup."""
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.batch", json.dumps({
                "topic": arguments["topic"], "service_url": arguments["service_url"],
                "partitions": list(range(number, PARTITIONS, TASKS)),
            })],
            stdout=subprocess.PIPE, text=True,
        )
        for number in range(TASKS)
    ]  # fmt: skip
    figures = [json.loads(process.communicate()[0].splitlines()[-1]) for process in running]
    rows, wanted = sum(one["rows"] for one in figures), arguments["messages"]
    assert rows >= wanted, f"{rows} of {wanted} rows"
    seconds = max(one["ended"] for one in figures) - min(one["began"] for one in figures)
    return float(rows / seconds)


def read_plainly(topic: str, service_url: str, partitions: list[int]) -> dict[str, float]:
    """Read the data and metadata of every message, with one Reader after the other."""
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


if __name__ == "__main__":
    print(json.dumps(read_plainly(**json.loads(sys.argv[1]))))
