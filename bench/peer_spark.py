"""One turn of keyshard or of the JVM connector in Spark, in a separate process and warm session."""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import psutil
from pyspark.sql.streaming.query import StreamingQuery

from bench.spark_batch import drop
from bench.spark_run import typical_ms, wait_rows
from bench.writers import KEYS, SIZE_BYTES, stored
from examples.parquet_query import session

RANGES = 10
START_ROWS = 1_000
"""Rows of the small topic."""
Costs = dict[str, float]


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two systems, and the broker."""

    form: str
    """Spark's name of the source."""
    jars: str
    """Directory of jars for the class path; none if empty."""
    urls: dict[str, str]
    """Options with the broker's URLs."""
    broker_pid: int

    def __post_init__(self) -> None:
        if self.jars:
            # The session that starts next takes them.
            os.environ["PYSPARK_SUBMIT_ARGS"] = f"--driver-class-path {self.jars}/* pyspark-shell"

    def query(self, options: dict[str, str]) -> StreamingQuery:
        """Start a query from the start of a topic into the noop sink."""
        own = {"startingOffsets": "earliest"}
        if not self.jars:
            own |= {"subscription": f"peer-{uuid.uuid4().hex[:8]}", "parallelism": str(RANGES)}
        rows = session().readStream.format(self.form).options(**self.urls, **options, **own).load()
        return rows.writeStream.format("noop").start()

    def busy_s(self) -> Costs:
        """Return processor seconds so far by kind of process, including ended children.

        ``jvm`` is Spark's. ``python`` is all that Spark started: the stream process, workers, and
        programs that have ended. This process, which only waits, does not count.
        """
        found = {"jvm": 0.0, "python": 0.0, "broker": 0.0}
        for one in psutil.Process().children(recursive=True):
            try:
                name, times = one.name(), one.cpu_times()
            except psutil.NoSuchProcess:
                continue
            found["jvm" if "java" in name else "python"] += times.user + times.system
            found["python"] += times.children_user + times.children_system
        found["broker"] = sum(psutil.Process(self.broker_pid).cpu_times()[:2])
        return found

    def spent(self, work: Callable[[], int]) -> Costs:
        """Return rows, seconds and processor seconds of ``work``, which returns its rows."""
        before, began = self.busy_s(), time.perf_counter()
        rows = work()
        took_s, after = time.perf_counter() - began, self.busy_s()
        return {name: after[name] - before[name] for name in after} | {"rows": rows, "s": took_s}


def per_row(spent: Costs, start: Costs | None = None) -> Costs:
    """Return rows per second, and processor time per row in us.

    ``rest_us`` excludes ``start``, the costs of a query over the small topic.
    """
    rows, client = spent["rows"], spent["jvm"] + spent["python"]
    figures = {f"{name}_us": spent[name] / rows * 1e6 for name in ("jvm", "python", "broker")}
    figures |= {"client_us": client / rows * 1e6, "rows_per_s": rows / spent["s"], "rows": rows}
    if start:
        figures["rest_us"] = (
            (client - start["jvm"] - start["python"]) / (rows - start["rows"]) * 1e6
        )
    return figures


def stream(side: Side, options: dict[str, str], messages: int) -> int:
    """Read a topic by a query, until its last row is committed; return the rows."""
    query = side.query(options)
    rows = sum(int(one["numInputRows"]) for one in wait_rows(query, messages, 150))
    query.stop()
    return rows


def read(
    side: Side, topic: str, messages: int, small_topic: str, streams: dict[str, dict[str, str]]
) -> dict[str, Costs]:
    """Read a topic by a stream with each of some options, and as a batch.

    A stream with the first options and a batch read warm up the session, and do not count. A query
    over a small topic measures the cost of starting a query.
    """
    stream(side, {"topic": topic} | next(iter(streams.values())), messages)
    start = side.spent(lambda: stream(side, {"topic": small_topic}, START_ROWS))
    found: dict[str, Costs] = {"start": {f"{name}_s": start[name] for name in ("jvm", "python")}}
    found["start"]["took_s"] = start["s"]
    for name, options in streams.items():
        asked = {"topic": topic} | options
        spent = side.spent(partial(stream, side, asked, messages))
        found[name] = per_row(spent, start)
    table = session().read.format(side.form).options(**side.urls, topic=topic).load()
    drop(table)
    found["batch"] = per_row(side.spent(lambda: drop(table)))
    return found


def write(side: Side, topics: dict[str, dict[str, str]], rows: int) -> dict[str, Costs]:
    """Write a cached table of two Spark partitions to each topic, with the options of each.

    Each is written twice; the first time warms up.
    """
    made = (
        session()
        .range(0, rows, 1, 2)
        .selectExpr(
            f"concat('k', id % {KEYS}) as __key",
            f"cast(rpad(cast(id as string), {SIZE_BYTES}, 'x') as binary) as value",
        )
        .cache()
    )
    made.count()

    def send(topic: str) -> int:
        options = side.urls | topics[topic] | {"topic": topic}
        made.write.format(side.form).mode("append").options(**options).save()
        return rows

    for topic in topics:
        send(topic)
    found: dict[str, Costs] = {}
    for topic in topics:
        entries = stored(side.urls["admin.url"], topic)
        found[topic] = per_row(side.spent(partial(send, topic)))
        entries = stored(side.urls["admin.url"], topic) - entries
        found[topic]["messages_per_entry"] = rows / entries
    return found


def trigger(side: Side, topic: str, first: int, rows: int) -> Costs:
    """Return the median time of a micro-batch at a low publish rate, and cores in use meanwhile.

    After ``first`` rows, this prints a line, and the parent process then publishes ``rows`` more.
    """
    query = side.query({"topic": topic})
    wait_rows(query, first, 120)
    print("ready", flush=True)
    wait_rows(query, first + rows // 5, 120)
    before, began = side.busy_s(), time.perf_counter()
    progress = wait_rows(query, first + rows, 120)
    took_s, after = time.perf_counter() - began, side.busy_s()
    query.stop()
    cores = {f"{name}_cores": (after[name] - before[name]) / took_s for name in after}
    return cores | {"trigger_ms": typical_ms(progress)}


if __name__ == "__main__":
    tasks: dict[str, Callable[..., Mapping[str, object]]] = {
        "read": read, "write": write, "trigger": trigger,
    }  # fmt: skip
    asked = json.loads(sys.argv[2])
    print(json.dumps(tasks[sys.argv[1]](Side(**asked.pop("side")), **asked)))
