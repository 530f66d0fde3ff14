"""Spark through keyshard into a noop sink, in a separate process."""

from __future__ import annotations

import json
import statistics
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from examples.parquet_query import session

RANGES = 10
LOOK_S = 0.1
"""Polling interval of a query's progress, seconds. Each poll takes CPU from the measurement."""


def load_stream(service_url: str, topic: str, offsets: str, **options: str) -> DataFrame:
    """Return the rows of a topic as a stream."""
    return (
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


def start(service_url: str, topic: str, offsets: str, **options: str) -> StreamingQuery:
    """Start a query into the noop sink."""
    return load_stream(service_url, topic, offsets, **options).writeStream.format("noop").start()


def wait_rows(query: StreamingQuery, rows: int, timeout_s: float) -> list[dict[str, Any]]:
    """Wait until the query has committed the rows; return its progress."""
    deadline = time.monotonic() + timeout_s
    by_batch: dict[int, dict[str, Any]] = {}
    """Spark remembers the newest 100 only, fewer than tiny triggers make of the rows."""
    while True:
        for one in query.recentProgress:
            progress = json.loads(one.json)
            if progress["numInputRows"]:
                by_batch[progress["batchId"]] = progress
        if sum(one["numInputRows"] for one in by_batch.values()) >= rows:
            return list(by_batch.values())
        if query.exception() or time.monotonic() > deadline:
            sys.exit(f"received fewer than {rows} rows: {query.exception()}")
        time.sleep(LOOK_S)


def ingest(service_url: str, topic: str, warm_topic: str, warm: int, messages: int) -> float:
    """Return rows per second from a query's start to its last commit, in a warm session."""
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
    """Return rows per second and processor time per row, microseconds, by process.

    The measurement starts with the first committed batch, when the processes and the JVM are warm.
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
    """Return processor seconds so far of this process and its children, by kind."""
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


def typical_ms(progress: list[dict[str, Any]]) -> float:
    """Return the median time of micro-batches with rows, milliseconds, without the first two."""
    times = [one["durationMs"]["triggerExecution"] for one in progress if one["numInputRows"]]
    return float(statistics.median(times[2:]))


if __name__ == "__main__":
    tasks: dict[str, Callable[..., Any]] = {"ingest": ingest, "cpu": cpu}
    print(json.dumps(tasks[sys.argv[1]](**json.loads(sys.argv[2]))))
