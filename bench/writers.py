"""Writers of rows to a topic, each in a separate process: keyshard's, pulsar-client's, Spark's."""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pulsar
import pyarrow as pa
from pyarrow import compute
from pyspark.sql import DataFrame
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from bench.embedded import busy_s, peak_rss_kb, source
from bench.spark_run import processor_s
from examples.parquet_query import session
from keyshard import KeyShardSink
from keyshard.errors import BrokerUnavailableError

KEYS = 1_000
SIZE_BYTES = 100
PARTITIONS = 5
WARM_ROWS, WARM_KEYS = 1_000, 10
STALLED_BYTES = 1_000
SEND_TIMEOUT_MS = 8_000
BATCH_ROWS = 100_000


def rows_of(count: int, keys: int = KEYS) -> list[tuple[str, bytes]]:
    """Return key and value of each row; all keys take turns, each time in another order."""
    draw, names = random.Random(1), [f"k{number}" for number in range(keys)]
    found: list[tuple[str, bytes]] = []
    while len(found) < count:
        draw.shuffle(names)
        found += ((key, b"%d" % (len(found) + at)) for at, key in enumerate(names))
    return [(key, value.ljust(SIZE_BYTES, b"x")) for key, value in found[:count]]


def batch_of(rows: list[tuple[str, bytes]]) -> pa.RecordBatch:
    """Return rows as columns."""
    keys, values = zip(*rows, strict=True)
    return pa.record_batch({"value": pa.array(values, pa.binary()), "__key": list(keys)})


def stored(admin_url: str, topic: str) -> int:
    """Return the number of entries of a topic."""
    path = f"{admin_url}/admin/v2/persistent/public/default/{topic}/partitioned-internalStats"
    parts = httpx.get(path, timeout=20).raise_for_status().json()["partitions"]
    return sum(one["numberOfEntries"] for one in parts.values())


class Costs:
    """Time, processor time and entries of a write."""

    def __init__(self, admin_url: str, topic: str, broker_pid: int) -> None:
        self._admin_url, self._topic = admin_url, topic
        self._broker = psutil.Process(broker_pid)
        self._entries = stored(admin_url, topic)
        self._broker_s = spent_s(self._broker)
        self._own_s = time.process_time()
        self._began = time.perf_counter()

    def of(self, rows: int) -> dict[str, float]:
        """Return the figures of rows that were written since this object was made."""
        took_s = time.perf_counter() - self._began
        own_s = time.process_time() - self._own_s
        broker_s = spent_s(self._broker) - self._broker_s
        return {
            "rows_per_s": rows / took_s,
            "cpu_us": own_s / rows * 1e6,
            "broker_us": broker_s / rows * 1e6,
            "messages_per_entry": rows / (stored(self._admin_url, self._topic) - self._entries),
        }


def spent_s(process: psutil.Process) -> float:
    """Return the processor time of a process, seconds."""
    return float(sum(process.cpu_times()[:2]))


def batch(
    service_url: str, admin_url: str, broker_pid: int, topic: str, rows: int
) -> dict[str, float]:
    """Write a batch with a sink."""
    columns = batch_of(rows_of(rows))
    with KeyShardSink(topic, sink_id="bench", service_url=service_url) as sink:
        sink.write_batch(batch_of(rows_of(WARM_ROWS, WARM_KEYS)), 0)
        costs = Costs(admin_url, topic, broker_pid)
        sink.write_batch(columns, 1)
        return costs.of(rows)


def send(
    service_url: str, admin_url: str, broker_pid: int, topic: str, rows: int
) -> dict[str, float]:
    """Send messages one by one with a sink."""
    messages = rows_of(rows)
    with KeyShardSink(topic, service_url=service_url) as sink:
        for key, value in rows_of(WARM_ROWS, WARM_KEYS):
            sink.send(value, key=key)
        sink.flush()
        costs = Costs(admin_url, topic, broker_pid)
        for key, value in messages:
            sink.send(value, key=key)
        sink.flush()
        return costs.of(rows)


def client(
    service_url: str, admin_url: str, broker_pid: int, topic: str, rows: int
) -> dict[str, float]:
    """Send messages one by one with pulsar-client, in batches of one key."""
    messages = rows_of(rows)
    connected = pulsar.Client(service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    answers: Counter[object] = Counter()

    def confirmed(result: object, _message_id: object) -> None:
        answers[result] += 1

    producer = connected.create_producer(
        topic, batching_enabled=True, batching_type=pulsar.BatchingType.KeyBased,
        compression_type=pulsar.CompressionType.LZ4, block_if_queue_full=True,
        max_pending_messages=20_000, max_pending_messages_across_partitions=100_000,
    )  # fmt: skip
    for key, value in rows_of(WARM_ROWS, WARM_KEYS):
        producer.send_async(value, confirmed, partition_key=key)
    producer.flush()
    costs = Costs(admin_url, topic, broker_pid)
    for key, value in messages:
        producer.send_async(value, confirmed, partition_key=key)
    producer.flush()
    figures = costs.of(rows)
    connected.close()
    if set(answers) != {pulsar.Result.Ok}:
        raise RuntimeError(f"publishing to {topic} failed with {dict(answers)}")
    return figures


class DropWriter(DataSourceArrowWriter):
    """Takes rows and drops them: Spark's own share of a write."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()


class Drop(DataSource):
    """A sink whose writers drop the rows."""

    @classmethod
    def name(cls) -> str:
        return "drop"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:  # noqa: ARG002 - Spark's
        return DropWriter()


def spark(
    service_url: str, admin_url: str, broker_pid: int, topic: str, rows: int
) -> dict[str, float]:
    """Write a DataFrame, in a session that has written before; also to a sink that drops it."""
    session().dataSource.register(Drop)
    drawn = session().range(0, rows, 1, 2)
    made = drawn.selectExpr(
        f"concat('k', id % {KEYS}) as __key",
        f"cast(rpad(cast(id as string), {SIZE_BYTES}, 'x') as binary) as value",
    ).cache()
    made.count()
    options = {"service.url": service_url, "topic": topic}

    def write(written: DataFrame, to: str) -> None:
        written.write.format(to).mode("append").options(**options).save()

    # Rows of all Spark partitions, so that all workers are warm.
    some = made.where("__key = 'k0'")
    write(some, "drop")
    began = time.perf_counter()
    write(made, "drop")
    floor_s = time.perf_counter() - began
    write(some, "keyshard")
    costs, before = Costs(admin_url, topic, broker_pid), processor_s(service_url)
    write(made, "keyshard")
    figures, after = costs.of(rows), processor_s(service_url)
    for name in ("workers", "jvm"):
        figures[f"{name}_us"] = (after[name] - before[name]) / rows * 1e6
    return figures | {"floor_rows_per_s": rows / floor_s}


def copy(
    service_url: str, broker_pid: int, topic: str, rows: int, to: str = ""
) -> dict[str, float]:
    """Read all rows of a topic, and write them changed to another; without one, only read them."""
    sink = KeyShardSink(to or "none", sink_id="copy", service_url=service_url)
    sizes = {
        "batch_rows_min": BATCH_ROWS // 2, "batch_rows_max": BATCH_ROWS, "batch_delay_max_ms": 500,
    }  # fmt: skip
    with source(service_url, topic, **sizes).open() as stream, sink:
        began, busy, workers_s = time.perf_counter(), time.process_time(), busy_s(stream)
        broker = psutil.Process(broker_pid)
        broker_s = spent_s(broker)
        read = number = 0
        while read < rows:
            taken = stream.next_batch(60)
            if taken is None:
                sys.exit(f"received only {read} of {rows} rows")
            table = pa.Table.from_batches(taken)
            read += table.num_rows
            if to and table.num_rows:
                changed = compute.binary_replace_slice(table["value"], 0, 1, b"#")
                outgoing = pa.table({"value": changed, "__key": table["__key"]})
                sink.write_batch(outgoing, number)
                number += 1
            stream.commit(taken)
        return {
            "rows_per_s": read / (time.perf_counter() - began),
            "cpu_us": (time.process_time() - busy + busy_s(stream) - workers_s) / read * 1e6,
            "broker_us": (spent_s(broker) - broker_s) / read * 1e6,
        }


def stalled(service_url: str, topic: str, megabytes: int, kind: str) -> dict[str, float]:
    """Return the memory that a sink adds while its broker takes nothing, MB.

    This prints a line when it begins to write, and :mod:`bench.sink` then stops the broker. The
    figure does not include the rows.
    """
    value = b"x" * STALLED_BYTES
    count = (megabytes << 20) // STALLED_BYTES
    columns = pa.record_batch({
        "value": pa.repeat(pa.scalar(value, pa.binary()), count),
        "__key": [f"k{number % KEYS}" for number in range(count)],
    })  # fmt: skip
    sink = KeyShardSink(
        topic, sink_id="stalled", service_url=service_url, send_timeout_ms=SEND_TIMEOUT_MS,
        compression="none",
    )  # fmt: skip
    sink.write_batch(columns.slice(0, KEYS), 0)
    for number in range(KEYS):
        sink.send(value, key=f"k{number}")
    sink.flush()
    # Reset the peak memory of this process: the preparation does not count.
    Path("/proc/self/clear_refs").write_text("5\n")
    before_kb = peak_rss_kb()
    print("ready", flush=True)
    with suppress(BrokerUnavailableError):
        if kind == "batch":
            sink.write_batch(columns, 1)
        else:
            for number in range(count):
                sink.send(b"%d" % number + value, key=f"k{number % KEYS}")
    added = (peak_rss_kb() - before_kb) / 1024
    with suppress(BrokerUnavailableError):
        sink.close()
    return {"added_mb": added, "rows_mb": columns.nbytes / 2**20}


if __name__ == "__main__":
    tasks: dict[str, Callable[..., Any]] = {
        "batch": batch, "send": send, "client": client, "spark": spark, "copy": copy,
        "stalled": stalled,
    }  # fmt: skip
    print(json.dumps(tasks[sys.argv[1]](**json.loads(sys.argv[2]))))
