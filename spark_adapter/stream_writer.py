"""The writer of a stream: it stores the rows of every micro-batch once."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from keyshard.config.sink import EXACTLY_ONCE
from keyshard.errors import ConfigError
from spark_adapter.adaptive_execution import check_task
from spark_adapter.error_text import concise_errors
from spark_adapter.topic_writer import Staged, Stored, TopicWrite, report, task_context
from spark_adapter.write_options import QUERY_ID


class KeyShardStreamWriter(DataSourceStreamArrowWriter):
    """Writes the micro-batches of a stream.

    The checkpoint contains the query id, so a restarted query finds the rows that it stored.
    """

    def __init__(self, write: TopicWrite) -> None:
        self._write = write

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Stored | Staged:
        """Store or stage the rows of a Spark partition. It runs in a task."""
        with concise_errors():
            context = task_context()
            query = _property(context, QUERY_ID)
            batch_id = int(_property(context, "streaming.sql.batchId"))
            if self._write.options.staging is not None:
                return self._write.stage(iterator, query, batch_id, context)
            if self._write.options.sink.delivery_guarantee == EXACTLY_ONCE:
                check_task(context)
            partition, claim = context.partitionId(), self._write.options.claim(query)
            rows = self._write.rows_of(iterator)
            found = self._write.store(rows, query, batch_id, partition, claim=claim)
            return Stored(found, context.attemptNumber())

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Publish the staged rows, and log the counts of the batch. It runs at the driver.

        If it fails, the staged rows stay: the repeated batch publishes them.
        """
        with concise_errors():
            staged = [one for one in messages if isinstance(one, Staged)]
            stored = self._write.publish(staged, batchId, stream=True) if staged else messages
        report(self._write.options, batchId, stored)


def _property(context: TaskContext, name: str) -> str:
    found = context.getLocalProperty(name)
    if found is None:
        raise ConfigError(
            f"Spark does not tell {name} to the tasks of this query, which identifies rows after "
            "a failure.",
            "Write with spark_adapter.write_batch in foreachBatch.",
        )
    return found
