"""The batch reader: what topics hold between two bounds, as Spark partitions.

Spark plans once for each ``load()``, at the first action on it, and keeps the partitions: so what
is read is fixed then, also for ``latest``. No subscription is used, and no cursor is left behind.

Filters are taken from Spark where the option ``pushFilters`` says so, by a reader of its own: Spark
4.3 keeps what it planned for one filter beside the loaded table, and reads that for every other
filter of the same DataFrame, and without one. See ``docs/adr/0030``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from keyshard.coordinator.bounded import plan_read
from keyshard.core.position.bounds import bound_text
from keyshard.core.position.split import Split, cut
from keyshard.reading.split_reader import read_splits
from spark_adapter.bounded_options import BoundedRead
from spark_adapter.pushed_filters import Pushed
from spark_adapter.structure import Rows
from spark_adapter.wording import told_to_spark

if TYPE_CHECKING:
    import pyarrow as pa

PARTITION_BYTES = 32 * 1024 * 1024
"""Stored bytes for which there is a Spark partition of its own."""


class KeyShardSplit(InputPartition):
    """What one task reads; ``None``: nothing, because nothing is read at all."""

    def __init__(self, split: Split | None, ends: Mapping[str, str]) -> None:
        super().__init__(split)
        self.ends = dict(ends)
        """Of the first partition: where the whole read ends, by topic partition."""

    @property
    def split(self) -> Split | None:
        """Entries of one topic partition."""
        split: Split | None = self.value
        return split


class KeyShardBatchReader(DataSourceReader):
    """Reader of one loaded table; Spark pickles it into its Python workers.

    Args:
        read: What is read.
        rows: Columns of the table's schema, and how they are made.
    """

    def __init__(self, read: BoundedRead, rows: Rows) -> None:
        self._read = read
        self._rows = rows
        self._pushed = Pushed(keys=read.keys)

    def partitions(self) -> list[InputPartition]:
        """Splits by the ledger lists, one each; at least one partition, which knows the ends."""
        read, pushed = self._read, self._pushed
        with told_to_spark(**dict(read.names)):
            self._rows.check()
            stretches = plan_read(
                read.source,
                read.start,
                read.end,
                disorder_max_s=read.disorder_max_s,
                published=(pushed.start_ms, pushed.end_ms),
            )
        ends = {
            one.topic_partition.name: bound_text(one.end)
            for one in stretches
            if one.end is not None
        }
        splits = cut_for_tasks(pushed.of(stretches), read)
        return [
            KeyShardSplit(splits[0] if splits else None, ends),
            *(KeyShardSplit(split, {}) for split in splits[1:]),
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Rows of a partition, in a Python worker; the same ones however often it runs."""
        assert isinstance(partition, KeyShardSplit)
        if partition.split is not None:
            with told_to_spark():
                yield from self._record_batches(partition.split)

    def _record_batches(self, split: Split) -> Iterator[pa.RecordBatch]:
        """All that is read goes out through here, with the columns of the table's schema."""
        source = self._read.source
        raw = read_splits(
            source.how_to_connect(),
            [split],
            self._rows.columns,
            keys=self._pushed.keys,
            fail_on_data_loss=source.fail_on_data_loss,
        )
        yield from self._rows.of(raw)


class FilteringBatchReader(KeyShardBatchReader):
    """The reader of a query whose filters are taken: Spark refuses every read where it pushes none
    to a reader that takes them, so this is another class."""

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:  # noqa: N802 - Spark's name
        """Take those that are decided before rows are made; gives back the others."""
        for one in filters:
            taken = self._pushed.take(one)
            if taken is None:
                yield one
            else:
                self._pushed = taken


def cut_for_tasks(stretches: Sequence[Split], read: BoundedRead) -> list[Split]:
    """As many parts as are wanted, whatever the number of topic partitions."""
    size_bytes = sum(one.size_bytes for one in stretches)
    splits = cut(stretches, max(read.partitions_min, -(-size_bytes // PARTITION_BYTES)))
    if read.rows_max is None:
        return splits
    return [part for split in splits for part in _at_most(split, read.rows_max)]


def _at_most(split: Split, entries: int) -> Iterator[Split]:
    """Parts of a split with at most so many entries; :meth:`Split.cut` goes by bytes."""
    if split.entries <= entries:
        yield split
        return
    for part in split.cut(-(-split.entries // entries)):
        yield from _at_most(part, entries)
