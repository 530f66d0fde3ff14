"""A Spark batch read in a separate process, in a session that has read as much before."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import pulsar
import pyarrow as pa
from pyspark.sql import DataFrame, Observation, SparkSession, functions
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from bench.spark_run import processor_s
from examples.parquet_query import session
from keyshard.columns.record_batches import ROWS_PER_BATCH_MAX, SCHEMA
from spark_adapter.query_columns import schema_of

NEW_MESSAGES = 100
"""Messages after the others, one per key, so that each topic partition has some."""
MINUTE_MS = 60_000
FLOOR_TASKS = 5


class Held(DataSource):
    """A source whose rows cost nothing to read, so that a query measures Spark's own share."""

    @classmethod
    def name(cls) -> str:
        return "held"

    def schema(self) -> StructType:
        return schema_of(None, ())

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002 - Spark's
        return HeldReader(int(self.options["rows"]))


class HeldReader(DataSourceReader):
    """Reads the rows of :class:`Held`: one batch in memory, repeated."""

    def __init__(self, rows: int) -> None:
        self._batches = rows // FLOOR_TASKS // ROWS_PER_BATCH_MAX

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(number) for number in range(FLOOR_TASKS)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        row = {
            "value": b"v" * 100, "__key": "key-1234", "__topic": "persistent://public/default/topic",
            "__partition": partition.value, "__messageId": "1234:12345:1",
            "__publishTime": 1_700_000_000_000_000, "__properties": [], "__slot": 1,
        }  # fmt: skip
        batch = pa.RecordBatch.from_pylist([row] * ROWS_PER_BATCH_MAX, SCHEMA)
        for _ in range(self._batches):
            yield batch


def drop(rows: DataFrame) -> int:
    """Write rows to a sink that drops them; return their number."""
    seen = Observation()
    counted = rows.observe(seen, functions.count(functions.lit(1)).alias("rows"))
    counted.write.format("noop").mode("overwrite").save()
    return int(seen.get["rows"])


def rates(
    topic: str, service_url: str, admin_url: str, messages: int, warm_topic: str
) -> dict[str, float]:
    """Return rows per second, also of Spark alone; CPU us per row; seconds to a first row."""
    spark = session()
    spark.dataSource.register(Held)
    urls = {"service.url": service_url, "admin.url": admin_url}

    def rows(name: str, **options: str) -> DataFrame:
        return spark.read.format("keyshard").options(**urls, topic=name, **options).load()

    drop(rows(warm_topic))
    before, began = processor_s(service_url), time.perf_counter()
    read = drop(rows(topic))
    took_s, after = time.perf_counter() - began, processor_s(service_url)
    assert read >= messages, f"{read} of {messages} rows"
    figures = {"spark_rows_per_s": read / took_s}
    figures |= {
        f"spark_{name}_us": (after[name] - before[name]) / read * 1e6
        for name in ("workers", "jvm", "broker")
    }
    figures |= {"floor_rows_per_s": floor(spark, messages)}
    moment_ms = publish_new(topic, service_url)
    last_minute = str(moment_ms - MINUTE_MS)
    for name, options in {"first_row_s": {"maxTimeDisorder": "1s"}, "first_row_any_s": {}}.items():
        began = time.perf_counter()
        first = rows(topic, startingTime=last_minute, **options).first()
        figures[name] = time.perf_counter() - began
        assert first is not None
        assert bytes(first["value"]).startswith(b"new"), first["value"]
    spark.stop()
    return figures


def floor(spark: SparkSession, messages: int) -> float:
    """Return rows per second of a table whose rows cost nothing to read."""
    held = spark.read.format("held").option("rows", str(messages)).load()
    drop(held)
    began = time.perf_counter()
    return drop(held) / (time.perf_counter() - began)


def publish_new(topic: str, service_url: str) -> int:
    """Publish messages after the others; return the time when they are stored, milliseconds."""
    client = pulsar.Client(service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    producer = client.create_producer(topic)
    for number in range(NEW_MESSAGES):
        producer.send(b"new-%d" % number, partition_key=f"new-{number}")
    client.close()
    return time.time_ns() // 1_000_000


if __name__ == "__main__":
    figures: dict[str, Any] = rates(**json.loads(sys.argv[1]))
    print(json.dumps(figures))
