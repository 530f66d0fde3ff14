"""The batch reader: reads topics between two bounds, as Spark partitions.

Spark plans once for each ``load()``, at the first action on it, and keeps the partitions. That
fixes the entries of the read, also for ``latest``. The read uses no subscription and leaves no
cursor.

If the option ``pushFilters`` is set, a separate reader takes filters from Spark. Spark 4.1 to
4.3 stores the plan of a filtered query in the loaded table. Other queries of the same DataFrame,
with other filters or without one, then read the rows of that plan. See ``docs/adr/0030``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import TYPE_CHECKING, Any

from pyspark.sql import datasource
from pyspark.sql.datasource import DataSourceReader, InputPartition

from keyshard.base_error import placed
from keyshard.core.position.read_bounds import bound_text
from keyshard.core.position.split import Split, cut, grouped
from keyshard.core.position.zones import NO_LIMITS, Limits, Wanted
from keyshard.reading.read_report import ReadReport, SpansByStart
from keyshard.reading.split_planner import plan_read
from keyshard.reading.split_reader import read_splits
from spark_adapter.error_text import as_spark_error
from spark_adapter.option_parsing import BoundedRead
from spark_adapter.python_worker import exempt_imports
from spark_adapter.task_rows import Rows

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import Filter

PARTITION_BYTES = 32 * 1024 * 1024
"""Stored bytes per Spark partition."""


class KeyShardSplits(InputPartition):
    """The splits that one task reads; none if the whole read is empty.

    Most tasks read one split. A task reads several if an index rules out entries between them.
    """

    def __init__(self, splits: Sequence[Split], ends: Mapping[str, str]) -> None:
        super().__init__(tuple(splits))
        self.ends = dict(ends)
        """End of the read by topic partition. Only the first partition has it."""

    @property
    def splits(self) -> tuple[Split, ...]:
        """The splits. A split without spans is not read, and only reports skipped entries."""
        splits: tuple[Split, ...] = self.value
        return splits


class KeyShardBatchReader(DataSourceReader):
    """Reads one loaded table. Spark pickles it into its Python workers.

    Args:
        read: Topics, bounds and limits of the read.
        rows: Columns of the table, and how to make them.
    """

    def __init__(self, read: BoundedRead, rows: Rows) -> None:
        self._read = read
        self._rows = rows
        self._pushed = Pushed(keys=read.keys)

    def partitions(self) -> list[KeyShardSplits]:
        """Plan one Spark partition for each task.

        There is at least one, because ``positions()`` finds the end of the read in the first.
        """
        read, pushed = self._read, self._pushed
        with as_spark_error(**dict(read.names)), placed(read.source.place):
            self._rows.check()
            stretches = plan_read(
                read.source,
                read.start,
                read.end,
                disorder_max_s=read.disorder_max_s,
                published=pushed.published,
                segments=read.segments,
                ledger_index=read.ledger_index,
                wanted=Wanted(keys=pushed.keys, events=pushed.events),
            )
        ends = {
            one.topic_partition.name: bound_text(one.end)
            for one in stretches
            if one.end is not None
        }
        chosen = pushed.of(stretches)
        first, *others = cut_for_tasks(chosen, read) or [[]]
        ruled_out = [one for one in chosen if one.skipped and not one.spans]
        return [
            KeyShardSplits([*ruled_out, *first], ends),
            *(KeyShardSplits(splits, {}) for splits in others),
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a partition, in a Python worker; every run yields the same rows."""
        assert isinstance(partition, KeyShardSplits)
        exempt_imports()
        if partition.splits:
            with as_spark_error(), placed(self._read.source.place):
                yield from self._record_batches(partition.splits)

    def _record_batches(self, splits: Sequence[Split]) -> Iterator[pa.RecordBatch]:
        """Read splits and convert their rows to the columns of the table."""
        source, spans = self._read.source, SpansByStart()
        raw = read_splits(
            source.how_to_connect(),
            splits,
            self._rows.columns,
            keys=self._pushed.keys,
            fail_on_data_loss=source.fail_on_data_loss,
            segments=self._read.segments,
            ledger_index=self._read.ledger_index,
            bytes_in_flight_max=self._read.bytes_in_flight_max,
            report=None if self._read.report_to is None else partial(self._report, spans),
        )
        yield from self._rows.of(raw)

    def _report(self, spans: SpansByStart, report: ReadReport) -> None:
        """Add the report of a split to those of the task."""
        from spark_adapter.reports import report_to  # noqa: PLC0415 - few reads need it

        assert self._read.report_to is not None
        spans.update(report.by_start())
        report_to(self._read.report_to, spans)


class FilteringBatchReader(KeyShardBatchReader):
    """Reads a query and takes its filters from Spark.

    This is a separate class, because Spark refuses a reader with ``pushFilters`` where filter
    pushdown is off.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:  # noqa: N802 - Spark's name
        """Take the filters that can be decided before rows are made; yield the others back."""
        for one in filters:
            taken = self._pushed.take(one)
            if taken is None:
                self._pushed = self._pushed.noted(one)
                yield one
            else:
                self._pushed = taken


def cut_for_tasks(stretches: Sequence[Split], read: BoundedRead) -> list[list[Split]]:
    """Cut one split for each topic partition into the smaller splits of each task.

    A task reads several splits only if an index rules out entries between them.
    """
    size_bytes = sum(one.size_bytes for one in stretches)
    tasks = max(read.partitions_min, -(-size_bytes // PARTITION_BYTES))
    splits = cut(stretches, tasks)
    if read.rows_max is None:
        return grouped(splits, max(tasks, len({one.topic_partition for one in splits})))
    return [[part] for split in splits for part in _at_most(split, read.rows_max)]


def _at_most(split: Split, entries: int) -> Iterator[Split]:
    """Cut a split into parts of at most ``entries``; :meth:`Split.cut` alone cuts by bytes."""
    if split.entries <= entries:
        yield split
        return
    for part in split.cut(-(-split.entries // entries)):
        yield from _at_most(part, entries)


# -- Filters (``pushFilters``) ---------------------------------------------------------------------
# A filter is taken only if it can be decided exactly before a message becomes a row, because Spark
# does not apply a taken filter again. All other filters stay with Spark. PySpark 4.0 has no classes
# of filters, so they are looked up at their use.

PUBLISH_TIME, EVENT_TIME = "__publishTime", "__eventTime"
_CHOSEN = {"__topic": ("topics", str), "__partition": ("partitions", int), "__key": ("keys", str)}
"""Field of :class:`Pushed` and value type of each column that can be compared."""
_NEVER_NULL = ("__topic", "__partition")
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MS = timedelta(milliseconds=1)


@dataclass(frozen=True)
class Pushed:
    """The rows that the filters keep; ``None`` in a field means no limit."""

    topics: frozenset[str] | None = None
    partitions: frozenset[int] | None = None
    keys: frozenset[str] | None = None
    published: Limits = NO_LIMITS
    """Publish times to keep."""
    events: Limits = NO_LIMITS
    """Event times that Spark keeps. Only an index looks at them."""

    def take(self, one: Filter) -> Pushed | None:
        """Return this with one more filter, or ``None`` if the filter cannot be taken."""
        column = ".".join(getattr(one, "attribute", ()))
        if isinstance(one, datasource.IsNotNull):
            return self if column in _NEVER_NULL else None
        if isinstance(one, datasource.In) and column in _CHOSEN:
            return self._one_of(column, one.value)
        if isinstance(one, datasource.EqualTo) and column in _CHOSEN:
            return self._one_of(column, [one.value])
        if column == PUBLISH_TIME and (limits := _limits(one)) is not None:
            return replace(self, published=_both(self.published, limits))
        return None

    def noted(self, one: Filter) -> Pushed:
        """Return this with the event times of a filter that Spark applies itself.

        An index also uses them, to rule out entries before they are read.
        """
        column = ".".join(getattr(one, "attribute", ()))
        limits = _limits(one) if column == EVENT_TIME else None
        return self if limits is None else replace(self, events=_both(self.events, limits))

    def _one_of(self, column: str, values: Collection[object]) -> Pushed | None:
        name, kind = _CHOSEN[column]
        # In SQL, nothing equals null.
        wanted = frozenset(value for value in values if value is not None)
        if not all(type(value) is kind for value in wanted):
            return None
        before = getattr(self, name)
        left: dict[str, Any] = {name: wanted if before is None else before & wanted}
        return replace(self, **left)

    def of(self, stretches: Iterable[Split]) -> list[Split]:
        """Return the splits that may contain messages to keep."""
        if self.keys is not None and not self.keys:
            return []
        start_ms, end_ms = self.published
        if start_ms is not None and end_ms is not None and start_ms >= end_ms:
            return []
        return [
            one
            for one in stretches
            if (self.topics is None or one.topic_partition.topic in self.topics)
            and (self.partitions is None or one.topic_partition.partition in self.partitions)
        ]


def _limits(one: Filter) -> Limits | None:
    """Return the times that a comparison keeps, or ``None`` if it compares no time."""
    value = getattr(one, "value", None)
    if not isinstance(value, datetime) or value.tzinfo is None:
        return None
    since = value - _EPOCH
    # Times are whole milliseconds: the first one at or after the value, and the first after it.
    not_before, behind = -(-since // _MS), since // _MS + 1
    if isinstance(one, datasource.GreaterThanOrEqual):
        return not_before, None
    if isinstance(one, datasource.GreaterThan):
        return behind, None
    if isinstance(one, datasource.LessThan):
        return None, not_before
    if isinstance(one, datasource.LessThanOrEqual):
        return None, behind
    return (not_before, behind) if isinstance(one, datasource.EqualTo) else None


def _both(one: Limits, other: Limits) -> Limits:
    """Return the times that are within both limits."""
    starts = [ms for ms in (one[0], other[0]) if ms is not None]
    ends = [ms for ms in (one[1], other[1]) if ms is not None]
    return max(starts, default=None), min(ends, default=None)
