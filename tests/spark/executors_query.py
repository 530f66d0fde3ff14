"""The parquet query on a cluster of two executors that have its workers too, with bytes counted.

Run as a process by test_executors.py. The stream process adds what crosses it, and tasks what they
read, as JSON lines to the file that KEYSHARD_TEST_NOTES names.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyspark
from pyspark.sql import SparkSession

import spark_adapter
from examples import parquet_query
from keyshard.testing.devbroker import java_home
from keyshard.workers import worker
from keyshard.workers.encoding import RemoteContent, WorkerDelivery, decode_deliveries
from spark_adapter.option_parsing import parse_options
from spark_adapter.stream_reader import KeyShardStreamReader
from spark_adapter.task_rows import Rows


def note(**counted: Any) -> None:
    """Append a line, in one write."""
    with Path(os.environ["KEYSHARD_TEST_NOTES"]).open("a", encoding="utf-8") as out:
        out.write(json.dumps(counted) + "\n")


class CountingReader(KeyShardStreamReader):
    """Notes bytes of what comes from workers, of what it serves, and of what tasks have."""

    def _start(self, offset: Any, *, planned: bool = False) -> Any:
        def counted(
            listed: Sequence[Any], content: pa.RecordBatch, remote: RemoteContent | None = None
        ) -> list[WorkerDelivery]:
            decoded = decode_deliveries(listed, content, remote)
            if remote is not None:
                kept = sum(len(block.indices) for one in decoded for block in one.blocks)
                note(kept=kept, about=len(json.dumps(listed)))
            note(heard=content.nbytes)
            return decoded

        worker.decode_deliveries = counted  # type: ignore[attr-defined]
        runtime = super()._start(offset, planned=planned)
        batches = runtime.coordinator.batches
        read = batches.read

        def served(
            batch_id: str, index: int, columns: Sequence[str] | None = None
        ) -> Iterator[pa.RecordBatch]:
            for rows in read(batch_id, index, columns):
                note(served=rows.nbytes, rows=rows.num_rows)
                yield rows

        batches.read = served  # type: ignore[method-assign]
        return runtime

    def read(self, partition: Any) -> Iterator[Any]:
        for rows in super().read(partition):
            note(task=rows.nbytes, rows=rows.num_rows)
            yield rows


class CountingSource(spark_adapter.KeyShardDataSource):
    """The data source with that reader."""

    def streamReader(self, schema: Any) -> CountingReader:  # noqa: N802 - Spark's name
        return CountingReader(parse_options(self.options), Rows(schema.fieldNames()))


def session() -> SparkSession:
    """Two executors of two slots each, in processes of this machine, with a worker on each."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["JAVA_HOME"] = str(java_home())
    os.environ["SPARK_HOME"] = str(Path(pyspark.__file__).parent)
    spark = (
        SparkSession.builder.master("local-cluster[2,2,1024]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.executor.memory", "512m")
        .config("spark.scheduler.mode", "FAIR")
        .config("spark.sql.session.timeZone", "UTC")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    spark.dataSource.register(CountingSource)
    spark_adapter.start_workers(spark, 2)
    return spark


if __name__ == "__main__":
    parquet_query.session = session
    parquet_query.main()
