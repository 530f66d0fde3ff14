"""A query to a topic on two executors, with speculation, whose first attempts are slow.

Run as a process by test_speculation.py. Tasks append JSON lines to the file that
KEYSHARD_TEST_NOTES names.

In batch 0, the first attempt of a Spark partition waits before its first row, and continues when a
second attempt has stored the rows. In batch 1, it stops behind its first entries.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.types import StructType

from keyshard.publishing import batch_part
from spark_adapter import KeyShardDataSource
from spark_adapter.adaptive_execution import ADAPTIVE_STREAMS
from spark_adapter.stream_writer import KeyShardStreamWriter
from spark_adapter.topic_writer import Stored
from tests.spark.spark_process import query_arguments
from tests.support import two_hosts
from tests.support.deadlines import deadline

SETTINGS = {
    ADAPTIVE_STREAMS: "false",
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.minTaskRuntime": "1s",
}
SLOW, SENT_FIRST = 1, 5
"""The Spark partition whose first attempts are slow, and the entries that one sends in batch 1."""
STALL_S = 120.0
BATCHES, ROWS, KEYS = 2, 300, 20


def noted() -> list[dict[str, Any]]:
    """Return what tasks have noted."""
    lines = Path(os.environ["KEYSHARD_TEST_NOTES"]).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def note(**what: Any) -> None:
    """Append a line, in one write."""
    with Path(os.environ["KEYSHARD_TEST_NOTES"]).open("a", encoding="utf-8") as out:
        out.write(json.dumps(what | {"pid": os.getpid()}) + "\n")


class SlowWriter(KeyShardStreamWriter):
    """A writer whose first attempts of a Spark partition are slow."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Any:
        context = TaskContext.get()
        assert context is not None
        batch = int(context.getLocalProperty("streaming.sql.batchId") or -1)
        where = {"batch": batch, "attempt": context.attemptNumber()}
        if context.partitionId() != SLOW:
            return super().write(iterator)
        note(began=True, **where)
        check, sent = batch_part._raise_failures, 0

        def sent_one(futures: Any) -> None:
            nonlocal sent
            check(futures)
            sent += 1
            if sent == SENT_FIRST:
                for one in futures:
                    one.result(deadline(20))
                note(stalls=True, **where)
                time.sleep(STALL_S)

        end_s = time.monotonic() + STALL_S
        while context.attemptNumber() == 0 and batch == 0 and time.monotonic() < end_s:
            if any("stored" in one for one in noted()):
                break
            time.sleep(0.05)
        if context.attemptNumber() == 0 and batch == 1:
            with (
                mock.patch.object(batch_part, "PIECE_BYTES", 1),
                mock.patch.object(batch_part, "_raise_failures", sent_one),
            ):
                return super().write(iterator)
        stored = super().write(iterator)
        assert isinstance(stored, Stored)
        note(stored=stored.report.rows, before=stored.report.already_stored, **where)
        return stored


class SlowSource(KeyShardDataSource):
    """A sink with that writer."""

    @classmethod
    def name(cls) -> str:
        return "slow"

    def streamWriter(  # noqa: N802 - Spark's name
        self,
        schema: StructType,
        overwrite: bool,  # noqa: ARG002
    ) -> SlowWriter:
        return SlowWriter(self._write(schema))


def main() -> None:
    """Write the batches, one file after the other."""
    arguments, options = query_arguments()
    lines = Path(arguments.sink)
    spark = two_hosts.session(SETTINGS, lines.parent / "work")
    spark.dataSource.register(SlowSource)
    lines.mkdir()
    rows = (
        spark.readStream.text(str(lines))
        .selectExpr(
            "value", "split(value, ':')[0] as __key", "cast(split(value, ':')[1] as bigint) as n"
        )
        .repartition(3, "__key")
    )
    for batch in range(BATCHES):
        numbers = range(batch * ROWS, (batch + 1) * ROWS)
        text = "\n".join(f"key-{number % KEYS}:{number}" for number in numbers)
        (lines / f"{batch}.txt").write_text(text)
        writer = rows.writeStream.format("slow").options(**options).option("orderBy", "n")
        writer = writer.option("checkpointLocation", arguments.checkpoint)
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()


if __name__ == "__main__":
    main()
