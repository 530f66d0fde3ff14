"""Reports of reads and writes, for the program of the driver.

- :func:`read_plan`: how many entries a batch read will take from bookies and from the broker.
- :class:`ReadReports`: how many entries its tasks took from each.
- :class:`WriteReports`: counts of each batch that was written.

Spark shows none of them. The description, the metadata and the metrics of the scan of a Python data
source are fixed in its JVM (``docs/adr/0038``), and its writers have no metrics. So the plan is
read from the planned partitions, and tasks and commits report by an accumulator.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pyspark.accumulators import Accumulator, AccumulatorParam

from keyshard.core.position.split import Split
from keyshard.errors import ConfigError
from keyshard.reading.read_report import ReadReport, SpansByStart, planned
from keyshard.redaction import shown
from spark_adapter.batch_reader import KeyShardSplits
from spark_adapter.data_source import KeyShardDataSource
from spark_adapter.end_positions import tables
from spark_adapter.error_text import as_spark_error
from spark_adapter.preflight import REPORTS, check_has, is_remote
from spark_adapter.pulsar.source import register_pulsar
from spark_adapter.topic_writer import WrittenBatch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_Value = TypeVar("_Value")
BATCHES_MAX = 100
"""Most batches that a :class:`WriteReports` keeps."""


def read_plan(rows: DataFrame) -> ReadReport:
    """Return which ledgers a batch read takes from bookies, which from the broker, and why.

    It plans the read if it is not planned yet, and so fixes its range.

    Args:
        rows: A ``DataFrame`` over batch reads, with any transformations.

    Raises:
        ConfigError: It has no batch read, or its session uses Spark Connect.
        BrokerError: The broker cannot be reached, or refuses.
    """
    given: Any = rows
    with as_spark_error():
        remote = is_remote(given)
        if remote or getattr(given, "_jdf", None) is None or given.isStreaming:
            raise ConfigError(
                f"read_plan() got {shown(rows)}.",
                "Pass the DataFrame of a batch read, from a session without Spark Connect.",
            )
        relations = list(tables(given._jdf.queryExecution().analyzed()))
        if not relations:
            raise ConfigError(
                "The DataFrame has no batch read of format('keyshard').", "Pass one that has."
            )
        return planned(chain.from_iterable(map(_splits_of, relations)))


def _splits_of(relation: Any) -> Iterator[Split]:
    # Spark keeps this plan with the loaded table.
    batch = relation.table().newScanBuilder(relation.options()).build().toBatch()
    for one in batch.planInputPartitions():
        part = pickle.loads(bytes(one.pickedPartition()))
        assert isinstance(part, KeyShardSplits)
        yield from part.splits


class ReadReports:
    """Collects the reports of the tasks of batch reads, in the driver.

    ::

        reports = spark_adapter.ReadReports(spark)
        rows = spark.read.format("keyshard").options(**options, readReports=reports.id).load()
        rows.write.parquet("visits/history")
        print(reports.total.by_bookies, reports.total.by_broker, reports.total.reasons)

    A task reports when it has read all its entries.

    Args:
        spark: The session, without Spark Connect. It registers ``format("keyshard")`` and
            ``format("pulsar")`` again: Spark drops the accumulators of data sources that it found
            itself.

    Raises:
        ConfigError: The session uses Spark Connect, or PySpark is 4.0, which does not register a
            source again.
    """

    def __init__(self, spark: SparkSession) -> None:
        self._spans = _accumulator(spark, "ReadReports", {}, _Spans())

    @property
    def id(self) -> int:
        """Value of the option ``readReports``."""
        return self._spans.aid

    @property
    def total(self) -> ReadReport:
        """Sum of the reports of the tasks that have ended."""
        return ReadReport.of(self._spans.value)


def _accumulator(
    spark: SparkSession, name: str, empty: _Value, how: AccumulatorParam[_Value]
) -> Accumulator[_Value]:
    with as_spark_error():
        if getattr(spark, "_jsparkSession", None) is None:
            raise ConfigError(f"{name} needs a session without Spark Connect.")
        check_has(REPORTS)
    spark.dataSource.register(KeyShardDataSource)
    register_pulsar(spark)
    return spark.sparkContext.accumulator(empty, how)


class _Spans(AccumulatorParam[SpansByStart]):
    """Collects the spans of reports."""

    def zero(self, value: SpansByStart) -> SpansByStart:  # noqa: ARG002 - Spark's signature
        return {}

    def addInPlace(self, value1: SpansByStart, value2: SpansByStart) -> SpansByStart:  # noqa: N802
        value1.update(value2)
        return value1


def report_to(accumulator: int, spans: SpansByStart) -> None:
    """Add the spans that a task has read so far to an accumulator of the driver.

    A later report of the task replaces an earlier one.

    Args:
        accumulator: Id of the accumulator.
        spans: All spans of the task.
    """
    Accumulator(accumulator, {}, _Spans()).add(spans)


# -- Writes ----------------------------------------------------------------------------------------


class _Written(NamedTuple):
    newest: tuple[WrittenBatch, ...] = ()
    """At most :data:`BATCHES_MAX`, in the order of their commits."""
    total: WrittenBatch | None = None
    """Sum of all."""


class WriteReports:
    """Collects the counts of the batches that ``format("keyshard")`` writes, in the driver.

    ::

        reports = spark_adapter.WriteReports(spark)
        query = rows.writeStream.format("keyshard").options(**options, writeReports=reports.id) \\
            .start()
        ...
        print(reports.batches[-1].rows, reports.total.retries)

    A batch is reported when Spark has committed it to the sink, staged or not. Several queries may
    share one object, which then mixes their batches.

    Args:
        spark: As for :class:`ReadReports`.

    Raises:
        ConfigError: As for :class:`ReadReports`.
    """

    def __init__(self, spark: SparkSession) -> None:
        self._written = _accumulator(spark, "WriteReports", _Written(), _Batches())

    @property
    def id(self) -> int:
        """Value of the option ``writeReports``."""
        return self._written.aid

    @property
    def batches(self) -> tuple[WrittenBatch, ...]:
        """Counts of the newest 100 batches, in the order of their commits."""
        return self._written.value.newest

    @property
    def total(self) -> WrittenBatch | None:
        """Sum of all batches; its ``batch_id`` is None. ``None`` before the first batch."""
        return self._written.value.total


class _Batches(AccumulatorParam[_Written]):
    """Collects the counts of batches."""

    def zero(self, value: _Written) -> _Written:  # noqa: ARG002 - Spark's signature
        return _Written()

    def addInPlace(self, value1: _Written, value2: _Written) -> _Written:  # noqa: N802
        totals = [one.total for one in (value1, value2) if one.total is not None]
        newest = (value1.newest + value2.newest)[-BATCHES_MAX:]
        return _Written(newest, WrittenBatch.sum(totals) if totals else None)


def report_written(accumulator: int, batch: WrittenBatch) -> None:
    """Add a committed batch to the accumulator of the driver that has an id."""
    one = _Written((batch,), WrittenBatch.sum([batch]))
    Accumulator(accumulator, _Written(), _Batches()).add(one)
