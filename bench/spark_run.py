"""Spark through keyshard, in a process of its own: into a noop sink, or tiny triggers."""

from __future__ import annotations

import json
import statistics
import sys
import time
import uuid
from typing import Any

from pyspark.sql.streaming import StreamingQuery

from examples.parquet_query import session

RANGES = 10
LOOK_S = 0.1
"""Time between two looks at a query's progress: each takes CPU from what is measured, seconds."""


def start(service_url: str, topic: str, offsets: str) -> StreamingQuery:
    """A query into the noop sink."""
    rows = (
        session()
        .readStream.format("keyshard")
        .option("service.url", service_url)
        .option("topic", topic)
        .option("subscription", f"spark-{uuid.uuid4().hex[:8]}")
        .option("parallelism", str(RANGES))
        .option("startingOffsets", offsets)
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


def trigger(service_url: str, topic: str, rows: int) -> float:
    """Median time of a micro-batch while somebody publishes few messages, milliseconds."""
    query = start(service_url, topic, "earliest")
    print("ready", flush=True)
    progress = wait_rows(query, rows, 120)
    query.stop()
    times = [one["durationMs"]["triggerExecution"] for one in progress if one["numInputRows"]]
    return statistics.median(times[2:])


if __name__ == "__main__":
    what = {"ingest": ingest, "trigger": trigger}[sys.argv[1]]
    print(json.dumps(what(**json.loads(sys.argv[2]))))
