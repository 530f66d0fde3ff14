"""What does a micro-batch cost at a low publish rate: of keyshard, and of Spark without keyshard?

In one session, in turn: Spark's own rate source, which runs in the JVM; a stream source in Python
that does nothing but make rows; keyshard. The first is the cost of any micro-batch, the second that
of any source in Python. Each is measured with both checkpoint managers of
``docs/how-to/short-triggers.md``, and with micro-batches back to back and one a second. The whole
benchmark takes 7 minutes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil
from pyspark.sql import DataFrame
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit
from rich.console import Console

from bench.ingest import PARTITIONS
from bench.loads import TRIGGER_RATE
from bench.release import PULSAR
from bench.spark_run import load_stream
from examples.parquet_query import session
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import Workload, create_partitioned_topic, produce

WARM_S, MEASURED_S = 12.0, 20.0
"""Time of a query before its micro-batches count, and while they do, seconds."""
DEADLINE_S = 400.0
MANAGERS = {
    "": "",
    "_fs": "org.apache.spark.sql.execution.streaming.checkpointing."
    "FileSystemBasedCheckpointFileManager",
}
"""Checkpoint managers by the suffix of their figures; empty: Spark's default."""
INTERVALS = {"": "0 seconds", "_1s": "1 second"}
"""Triggers by the suffix of their figures."""
SOURCES = ("rate", "plain", "keyshard")

_console = Console(stderr=True)


def run() -> dict[str, float]:
    """Return times of a micro-batch and of its parts, milliseconds, and cores in use."""
    figures: dict[str, float] = {}
    with DevBroker(PULSAR, optimised=True) as broker:
        for suffix, manager in MANAGERS.items():
            topic = f"triggers{suffix}"
            create_partitioned_topic(broker.admin_url, topic, PARTITIONS)
            found = _session(broker, topic, manager)
            figures |= {f"{name}{suffix}": value for name, value in found.items()}
    return figures


def _session(broker: DevBroker, topic: str, manager: str) -> dict[str, float]:
    """Measure in a session of its own; publish while a query of keyshard runs."""
    arguments = {"service_url": broker.service_url, "topic": topic, "manager": manager}
    found: dict[str, float] = {}
    seconds = WARM_S + MEASURED_S + 5
    live = Workload(int(TRIGGER_RATE * seconds), 100, rate_per_s=TRIGGER_RATE, batching="none")
    with subprocess.Popen(
        [sys.executable, "-m", "bench.triggers", json.dumps(arguments)],
        stdout=subprocess.PIPE, text=True,
    ) as child:  # fmt: skip
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("{"):
                found = json.loads(line)
            else:
                produce(live, broker.service_url, topic)
        child.wait(DEADLINE_S)
    return found


# -- The measured process --------------------------------------------------------------------------


class PlainReader(DataSourceStreamReader):
    """Makes rows at the rate of the other sources."""

    def __init__(self) -> None:
        self._began_s = time.time()

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        return {"row": 0}

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: ARG002, N802
        return {"row": int((time.time() - self._began_s) * TRIGGER_RATE)}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [InputPartition((start["row"], end["row"]))]

    def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
        return ((row,) for row in range(*partition.value))


class PlainSource(DataSource):
    """A stream source in Python that does nothing but make rows."""

    @classmethod
    def name(cls) -> str:
        return "plain"

    def schema(self) -> str:
        return "row long"

    def streamReader(self, schema: Any) -> PlainReader:  # noqa: ARG002, N802
        return PlainReader()


def measure(service_url: str, topic: str, manager: str) -> dict[str, float]:
    """Return the figures of each source, with each trigger."""
    if manager:
        name = "spark.sql.streaming.checkpointFileManagerClass"
        os.environ["PYSPARK_SUBMIT_ARGS"] = f"--conf {name}={manager} pyspark-shell"
    session().dataSource.register(PlainSource)
    figures: dict[str, float] = {}
    for suffix, interval in INTERVALS.items():
        for source in SOURCES:
            live = source == "keyshard"
            if live:
                rows = load_stream(service_url, topic, "latest")
            else:
                made = session().readStream.format(source)
                rows = made.option("rowsPerSecond", int(TRIGGER_RATE)).load()
            for figure, value in _query(rows, interval, live=live).items():
                figures[f"{source}_{figure}{suffix}"] = value
    return figures


def _query(rows: DataFrame, interval: str, *, live: bool) -> dict[str, float]:
    """Run a query, and return medians of its micro-batches and the cores that it takes."""
    query = rows.writeStream.format("noop").trigger(processingTime=interval).start()
    by_batch: dict[int, dict[str, Any]] = {}
    if live:
        while not query.recentProgress and query.isActive:
            time.sleep(0.1)
        print("ready", flush=True)
    time.sleep(WARM_S)
    if query.lastProgress is None:
        sys.exit(f"there is no micro-batch: {query.exception()}")
    first, before, began = query.lastProgress.batchId, _busy(), time.monotonic()
    while time.monotonic() - began < MEASURED_S:
        time.sleep(1.0)  # Spark remembers the newest 100 only
        by_batch |= {one["batchId"]: json.loads(one.json) for one in query.recentProgress}
    spent_s = sum(one - before.get(process, 0.0) for process, one in _busy().items())
    cores = spent_s / (time.monotonic() - began)
    query.stop()
    counted = [
        one["durationMs"] for number, one in by_batch.items()
        if number > first and one["numInputRows"]
    ]  # fmt: skip
    parts = {part for one in counted for part in one}
    figures = {
        f"{part}_ms": float(statistics.median(one.get(part, 0) for one in counted))
        for part in sorted(parts)
    }
    shown = ", ".join(f"{part} {value:.0f}" for part, value in figures.items())
    _console.print(f"{len(counted)} micro-batches, {cores:.2f} cores: {shown}")
    return figures | {"cores": cores, "batches": float(len(counted))}


def _busy() -> dict[int, float]:
    """Return the processor seconds of Spark's JVM and of all processes that it started, by id.

    Those of the JVM include processes that ended, such as those of Hadoop's file system.
    """
    found: dict[int, float] = {}
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = one.cpu_times()
            ended_s = times.children_user + times.children_system if one.name() == "java" else 0.0
            found[one.pid] = times.user + times.system + ended_s
    return found


if __name__ == "__main__":
    print(json.dumps(measure(**json.loads(sys.argv[1]))))
