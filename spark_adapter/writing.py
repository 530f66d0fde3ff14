"""Writes DataFrames to a topic exactly once, as batches of ``foreachBatch``."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import TaskContext

from keyshard import KeyShardSink
from keyshard.config.sink import EXACTLY_ONCE
from keyshard.core.option_checks import check_integer, check_text, did_you_mean
from keyshard.core.publishing import BATCH_ID_MAX
from keyshard.errors import ConfigError
from keyshard.publishing.batch_writer import WriteReport
from spark_adapter.adaptive_execution import check_rows
from spark_adapter.preflight import is_remote
from spark_adapter.python_worker import exempt_imports
from spark_adapter.write_options import QUERY_ID, WriteOptions, check_length, fitted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from keyshard.publishing.sink_claim import Claim

_REPORT = "rows bigint, entries bigint, already_stored bigint, topic_partitions bigint"


def write_batch(
    df: DataFrame,
    batch_id: int,
    *,
    topic: str,
    sink_id: str,
    order_by: str | Sequence[str] = (),
    **options: Any,
) -> WriteReport:
    """Write a DataFrame to a topic exactly once. Call it from ``foreachBatch``.

    ::

        def store(rows, batch_id):
            spark_adapter.write_batch(rows, batch_id, topic="totals", sink_id="totals-query")

        rows.writeStream.foreachBatch(store).option("checkpointLocation", "totals").start()

    Each task writes its partition. If a task or the whole batch runs again, the broker drops the
    rows that it has. So a repeated batch must have the same rows in each Spark partition, and the
    rows of a key in the same order. Rows that keyshard reads meet this condition until a shuffle.
    After a shuffle, repartition by key to a fixed number, and give ``order_by``.

    The producer names contain the sink id and the query id, which the query's checkpoint stores.
    Spark provides the query id only in the thread that calls the ``foreachBatch`` function, and
    not with Spark Connect. Without a query id, the sink id alone identifies the rows.

    Args:
        df: Columns as for :meth:`keyshard.KeyShardSink.write_batch`.
        batch_id: Id that ``foreachBatch`` gives.
        topic: Name of the topic; the broker has to deduplicate it.
        sink_id: Name of this query at the topic. A query with a new checkpoint needs a new one:
            it is refused while rows of the former query are near the end of a topic. With Spark
            Connect, a batch of the same number counts as stored if its rows are distributed alike.
        order_by: Columns that order the rows of each key. Other columns than those of ``df`` above
            only order the rows, and are not written.
        **options: Options of :class:`keyshard.KeyShardSink`. Tasks serve no metrics, so
            ``metrics_port`` has no effect.

    Returns:
        Rows, entries, and the rows that an earlier attempt had stored.

    Raises:
        ConfigError: An option or a column does not fit, or a repeated batch may have other rows in
            its Spark partitions. Nothing was written.
        PySparkException: A task failed; its text has the error of
            :meth:`keyshard.KeyShardSink.write_batch`, or ``KEYSHARD_SINK_ID_IN_USE``: another query
            has stored rows with the sink id.
    """
    check_integer("batch_id", batch_id, 0, BATCH_ID_MAX)
    check_text("sink_id", sink_id, "Name this query at the topic.")
    check_length("sink_id", sink_id)
    # The tasks of a machine cannot share a port.
    sink = replace(KeyShardSink(topic, sink_id=sink_id, **options), metrics_port=None)
    order = [order_by] if isinstance(order_by, str) else list(order_by)
    for name in order:
        if name not in df.columns:
            hint = did_you_mean(name, df.columns, f"It has: {', '.join(df.columns)}.")
            raise ConfigError(f"order_by names {name}, which the rows do not have.", hint)
    write, query = _fitted(sink, df, order), _query_of(df)
    rows = df.sortWithinPartitions(*order) if order else df
    task = partial(
        _write,
        write.named(query) if query else write.sink,
        write.claim(query) if query else None,
        batch_id,
        write.order_by,
    )
    with warnings.catch_warnings():
        # mapInArrow() does not use pandas, but PySpark warns about the version of pandas here.
        warnings.simplefilter("ignore", FutureWarning)
        reporting = rows.select(*write.kept).mapInArrow(task, _REPORT)
    if sink.delivery_guarantee == EXACTLY_ONCE:
        check_rows(reporting, in_stream=query is not None)
    reports = reporting.collect()
    found = [WriteReport(*map(int, one[:4])) for one in reports]  # type: ignore[arg-type]
    return WriteReport(
        sum(one.rows for one in found),
        sum(one.entries for one in found),
        sum(one.already_stored for one in found),
        max((one.topic_partitions for one in found), default=0),
    )


def _fitted(sink: KeyShardSink, df: DataFrame, order: Sequence[str]) -> WriteOptions:
    """Check columns and topic before a task begins."""
    found = fitted(sink, df.schema, tuple(order))
    return found._replace(exclusive=True)


def _query_of(df: DataFrame) -> str | None:
    """Return the id of the query that writes the batch; ``None`` if Spark does not provide it."""
    if is_remote(df):
        return None
    found = df.sparkSession.sparkContext.getLocalProperty(QUERY_ID)
    return str(found) if found else None


def _write(
    sink: KeyShardSink,
    claim: Claim | None,
    batch_id: int,
    order_by: Sequence[str],
    batches: Iterable[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    exempt_imports()
    context = TaskContext.get()
    assert context is not None, "a task has a context"
    parts = list(batches)
    if not parts:
        return
    with sink:
        report = sink._write_batch(
            pa.Table.from_batches(parts), batch_id, context.partitionId(), claim=claim,
            order_by=order_by,
        )  # fmt: skip
    yield pa.RecordBatch.from_pylist(
        [
            {
                "rows": report.rows,
                "entries": report.entries,
                "already_stored": report.already_stored,
                "topic_partitions": report.topic_partitions,
            }
        ]
    )
