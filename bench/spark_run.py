"""Spark through keyshard, in a process of its own: into a noop sink, or tiny triggers."""

from __future__ import annotations

import json
import statistics
import sys
import time
import uuid
from contextlib import suppress
from typing import Any

import psutil
from pyspark.sql.streaming import StreamingQuery

from examples.parquet_query import session

RANGES = 10
LOOK_S = 0.1
"""Time between two looks at a query's progress: each takes CPU from what is measured, seconds."""


def start(service_url: str, topic: str, offsets: str, **options: str) -> StreamingQuery:
    """A query into the noop sink."""
    rows = (
        session()
        .readStream.format("keyshard")
        .option("service.url", service_url)
        .option("topic", topic)
        .option("subscription", f"spark-{uuid.uuid4().hex[:8]}")
        .option("parallelism", str(RANGES))
        .option("startingOffsets", offsets)
        .options(**options)
        .load()
    )
    return rows.writeStream.format("noop").start()


def wait_rows(query: StreamingQuery, rows: int, timeout_s: float) -> list[dict[str, Any]]:
    """Wait until the query committed the rows; its progress."""
    deadline = time.monotonic() + timeout_s
    while True:
        progress = [json.loads(one.json) for one in query.recentProgress]
        if sum(one["numInputRows"] for one in progress) >= rows:
            return progress
        if query.exception() or time.monotonic() > deadline:
            sys.exit(f"{rows} rows did not come: {query.exception()}")
        time.sleep(LOOK_S)


def ingest(service_url: str, topic: str, warm_topic: str, warm: int, messages: int) -> float:
    """Rows per second from the start of a query to its last commit, in a warm session."""
    query = start(service_url, warm_topic, "earliest")
    wait_rows(query, warm, 120)
    query.stop()
    began = time.perf_counter()
    query = start(service_url, topic, "earliest")
    wait_rows(query, messages, 300)
    rate = messages / (time.perf_counter() - began)
    query.stop()
    return rate


def cpu(service_url: str, topic: str, messages: int, transport: str) -> dict[str, float]:
    """Rows per second and processor time per row, microseconds, by process.

    Measured from the first committed batch on: processes and the JVM are warm then.
    """
    query = start(service_url, topic, "earliest", transport=transport)
    first = sum(one["numInputRows"] for one in wait_rows(query, 1, 120))
    began, before = time.perf_counter(), processor_s(service_url)
    rows = sum(one["numInputRows"] for one in wait_rows(query, messages, 300)) - first
    after, took_s = processor_s(service_url), time.perf_counter() - began
    query.stop()
    figures = {f"{name}_us": (after[name] - before.get(name, 0)) / rows * 1e6 for name in after}
    return figures | {"rows_per_s": rows / took_s}


def processor_s(service_url: str) -> dict[str, float]:
    """Processor time so far, seconds: of this process and its children, by what they are."""
    found: dict[str, float] = dict.fromkeys(("jvm", "stream", "workers", "broker"), 0.0)
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            line = " ".join(one.cmdline())
            name = (
                "jvm" if "java" in one.name()
                else "stream" if "streaming_source_runner" in line
                else "workers"
            )  # fmt: skip
            found[name] += sum(one.cpu_times()[:2])
    port = int(service_url.rpartition(":")[2])
    for connection in psutil.net_connections("tcp"):
        if connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
            found["broker"] = sum(psutil.Process(connection.pid).cpu_times()[:2])
    return found


def trigger(service_url: str, topic: str, rows: int, rate_per_s: int) -> dict[str, float]:
    """Median time of a micro-batch while somebody publishes few messages, milliseconds.

    And that of Spark's own rate source, afterwards in the same session: what a batch takes anyway.
    """
    query = start(service_url, topic, "earliest")
    print("ready", flush=True)
    ours = wait_rows(query, rows, 120)
    query.stop()
    rate = session().readStream.format("rate").option("rowsPerSecond", str(rate_per_s)).load()
    query = rate.writeStream.format("noop").start()
    theirs = wait_rows(query, rows, 120)
    query.stop()
    return {"keyshard_ms": _typical_ms(ours), "rate_ms": _typical_ms(theirs)}


def _typical_ms(progress: list[dict[str, Any]]) -> float:
    times = [one["durationMs"]["triggerExecution"] for one in progress if one["numInputRows"]]
    return statistics.median(times[2:])


if __name__ == "__main__":
    what = {"ingest": ingest, "trigger": trigger, "cpu": cpu}[sys.argv[1]]
    print(json.dumps(what(**json.loads(sys.argv[2]))))
