"""A bounded read as a datasource of Ray Data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from keyshard.columns.record_batches import SCHEMA, select
from keyshard.config.connection import Connection
from keyshard.config.segments import BROKER, BYTES_IN_FLIGHT, Segments
from keyshard.core.position.split import Split, divided
from keyshard.reading.read_report import planned
from keyshard.reading.split_reader import read_splits
from ray_adapter.read_reports import ReadReports

COUNTED_BY = "__partition"
"""Column to read if only rows are counted; the cheapest one."""


class KeyShardDatasource(Datasource):  # type: ignore[misc]  # Ray is untyped here
    """Reads splits that were planned once, so that every run reads the same.

    Args:
        connection: Connection to the cluster, from every node.
        stretches: All entries to read: one split for each topic partition.
        columns: Names in :data:`keyshard.columns.record_batches.COLUMNS`; ``None`` for the default.
        keys: Partition keys whose messages are wanted; ``None``: all.
        fail_on_data_loss: Whether entries that are no longer stored fail the read.
        segments: Where closed ledgers are read; ``None``: by the broker.
        ledger_index: Path or fsspec URL of the index of closed ledgers; ``None``: there is none.
        bytes_in_flight_max: Most bytes of entries that a task receives ahead.
        reports: Collects the reports of the tasks; ``None``: the tasks report nothing.
    """

    def __init__(
        self,
        connection: Connection,
        stretches: Sequence[Split],
        columns: Sequence[str] | None = None,
        *,
        keys: Collection[str] | None = None,
        fail_on_data_loss: bool = True,
        segments: Segments | None = None,
        ledger_index: str | None = None,
        bytes_in_flight_max: int = BYTES_IN_FLIGHT,
        reports: ReadReports | None = None,
    ) -> None:
        super().__init__()
        self._connection = connection
        self._stretches = tuple(stretches)
        self._keys = keys
        self._fail_on_data_loss = fail_on_data_loss
        self._segments = segments
        self._ledger_index = ledger_index
        self._bytes_in_flight_max = bytes_in_flight_max
        self._reports = reports
        self._projection_map = None if columns is None else {name: name for name in columns}

    def get_name(self) -> str:
        """Return the name of the read in Ray's plans and progress.

        If ``segments`` allow it, the name also says how many ledgers are planned to be read from
        bookies or offloads.
        """
        if self._segments is None or self._segments.by_broker_only:
            return "KeyShard"
        spans = planned(self._stretches).spans
        origins = ["bookies"] if self._segments.source != BROKER else []
        origins += ["offloads"] if self._segments.offloads is not None else []
        stored = sum(not one.why for one in spans)
        return f"KeyShard[{stored}/{len(spans)} ledgers from {' and '.join(origins)}]"

    def supports_projection_pushdown(self) -> bool:
        """Whether Ray may select columns. An older Ray has another interface for that."""
        return hasattr(Datasource, "get_projection_map")

    def apply_projection(self, projection_map: dict[str, str] | None) -> KeyShardDatasource:
        """Return the read with only the selected columns, in the order of the selection."""
        chosen: KeyShardDatasource = super().apply_projection(projection_map)
        if projection_map is not None:
            names = [name for name in projection_map if name in (chosen._projection_map or ())]
            chosen._projection_map = {name: name for name in names}
        return chosen

    def estimate_inmemory_data_size(self) -> int:
        """Return the stored bytes. Compressed entries take more memory."""
        return sum(one.size_bytes for one in self._stretches)

    def get_read_tasks(
        self,
        parallelism: int,
        per_task_row_limit: int | None = None,
        data_context: Any = None,  # noqa: ARG002 - Ray's signature
    ) -> list[ReadTask]:
        """Return as many tasks as Ray asks for, independent of the number of topic partitions.

        The tasks do not state their number of rows, because Ray takes it as exact. The ledger list
        counts entries, and a producer batch is one entry.
        """
        chosen = self._projection_map
        names = tuple(SCHEMA.names if chosen is None else chosen) or (COUNTED_BY,)
        schema = select(names)

        def task(read: Callable[[], Iterable[pa.Table]], splits: Sequence[Split]) -> ReadTask:
            metadata = BlockMetadata(
                num_rows=None if any(split.spans for split in splits) else 0,
                size_bytes=sum(split.size_bytes for split in splits),
                input_files=None,
                exec_stats=None,
            )
            return ReadTask(read, metadata, schema=schema, per_task_row_limit=per_task_row_limit)

        read = partial(
            read_splits,
            self._connection,
            names=names,
            keys=self._keys,
            fail_on_data_loss=self._fail_on_data_loss,
            segments=self._segments,
            ledger_index=self._ledger_index,
            bytes_in_flight_max=self._bytes_in_flight_max,
            report=None if self._reports is None else self._reports.note,
        )
        return [
            task(partial(_tables, read, splits, schema), splits)
            for splits in divided(self._stretches, parallelism)
        ]


def _tables(
    read: Callable[[Sequence[Split]], Iterator[pa.RecordBatch]],
    splits: Sequence[Split],
    schema: pa.Schema,
) -> Iterator[pa.Table]:
    """Read the splits of a task, in the task's process."""
    for batch in read(splits):
        yield pa.Table.from_batches([batch])
    if not any(split.spans for split in splits):
        # It tells Ray the columns of an empty read.
        yield schema.empty_table()
