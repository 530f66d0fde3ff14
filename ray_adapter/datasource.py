"""A bounded read of Pulsar topics as a datasource of Ray Data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from keyshard.arrow.columns import SCHEMA, select
from keyshard.config.connection import Connection
from keyshard.core.position.split import Split, cut, grouped
from keyshard.reading.split_reader import read_splits

COUNTED_BY = "__partition"
"""The column that is read where only rows are counted: it costs least."""


class KeyShardDatasource(Datasource):  # type: ignore[misc]  # Ray is untyped here
    """Reads stretches that were planned once, so that every run reads the same.

    Args:
        connection: How the cluster is reached, from every node.
        stretches: What is read of each topic partition.
        columns: Columns of :data:`keyshard.arrow.columns.COLUMNS`; ``None``: the default ones.
        fail_on_data_loss: Whether entries that are no longer stored fail the read.
    """

    def __init__(
        self,
        connection: Connection,
        stretches: Sequence[Split],
        columns: Sequence[str] | None = None,
        *,
        fail_on_data_loss: bool = True,
    ) -> None:
        super().__init__()
        self._connection = connection
        self._stretches = tuple(stretches)
        self._fail_on_data_loss = fail_on_data_loss
        self._projection_map = None if columns is None else {name: name for name in columns}

    def get_name(self) -> str:
        """What the read is called in Ray's plans and progress."""
        return "KeyShard"

    def supports_projection_pushdown(self) -> bool:
        """Columns that nothing selects are not built; an older Ray asks in other words."""
        return hasattr(Datasource, "get_projection_map")

    def apply_projection(self, projection_map: dict[str, str] | None) -> KeyShardDatasource:
        """Only the selected columns, in the order in which they are selected."""
        chosen: KeyShardDatasource = super().apply_projection(projection_map)
        if projection_map is not None:
            names = [name for name in projection_map if name in (chosen._projection_map or ())]
            chosen._projection_map = {name: name for name in names}
        return chosen

    def estimate_inmemory_data_size(self) -> int:
        """Bytes by the ledger list; compressed entries take more in memory."""
        return sum(one.size_bytes for one in self._stretches)

    def get_read_tasks(
        self,
        parallelism: int,
        per_task_row_limit: int | None = None,
        data_context: Any = None,  # noqa: ARG002 - Ray's signature
    ) -> list[ReadTask]:
        """As many tasks as Ray asks for, whatever the number of topic partitions.

        Their number of rows is not told, because Ray takes it for exact: a producer batch is one
        entry of the ledger list.
        """
        chosen = self._projection_map
        names = tuple(SCHEMA.names if chosen is None else chosen) or (COUNTED_BY,)
        schema = select(names)

        def task(read: Callable[[], Iterable[pa.Table]], splits: Sequence[Split]) -> ReadTask:
            metadata = BlockMetadata(
                num_rows=None if splits else 0,
                size_bytes=sum(split.size_bytes for split in splits),
                input_files=None,
                exec_stats=None,
            )
            return ReadTask(read, metadata, schema=schema, per_task_row_limit=per_task_row_limit)

        groups = grouped(cut(self._stretches, parallelism), parallelism)
        if not groups:
            return [task(partial(_nothing, schema), ())]
        facts = self._connection, names, self._fail_on_data_loss
        return [task(partial(_read, splits, *facts), splits) for splits in groups]


def _read(
    splits: Sequence[Split], connection: Connection, names: Sequence[str], fail_on_data_loss: bool
) -> Iterator[pa.Table]:
    """What a task does, in its own process."""
    for batch in read_splits(connection, splits, names, fail_on_data_loss=fail_on_data_loss):
        yield pa.Table.from_batches([batch])


def _nothing(schema: pa.Schema) -> list[pa.Table]:
    """No rows say by their columns what there is none of."""
    return [schema.empty_table()]
