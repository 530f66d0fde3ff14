"""A topic as a datasink of Ray Data: each write task stores its rows once.

Ray repeats a task whose worker or node died, with the same index and the same blocks. The index is
unique within one write. The producer name of a task contains the id of the write and the index of
the task. So a repeated task finds the rows that an earlier attempt stored under this name.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from ray._private.worker import global_worker
from ray.data.block import BlockAccessor
from ray.data.datasource import Datasink, WriteResult

from keyshard.columns.content import PROPERTIES
from keyshard.columns.outgoing import COLUMNS, PROPERTIES_COLUMN, TOPIC, outgoing_of
from keyshard.core.option_checks import did_you_mean
from keyshard.errors import ConfigError, KeyShardError
from keyshard.publishing.preflight import check_topics
from keyshard.sink import KeyShardSink

ATTEMPTS = 5
"""Most attempts of a task while the broker is away or an earlier attempt still has its name."""
PAUSE_S = 1.0
"""Wait after the first attempt, seconds; it doubles with each attempt."""
TASK_BYTES = 32 * 1024 * 1024
"""Bytes of blocks that a task gets at least, unless there are no more."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DatasetReport:
    """Counts of a write of a dataset."""

    received: int = 0
    """Rows that write tasks have received."""
    rows: int = 0
    """Rows that are confirmed. At the end, these are all rows."""
    bytes: int = 0
    """Bytes of these rows, as columns."""
    entries: int = 0
    """Entries that the last attempts of the tasks published."""
    already_stored: int = 0
    """Rows that an earlier attempt of a task had stored."""
    tasks: int = 0
    """Write tasks that have ended."""
    retries: int = 0
    """Attempts that failed within the last run of a task, such as while the broker was away."""

    def __add__(self, other: DatasetReport) -> DatasetReport:
        pairs = ((getattr(one, name) for one in (self, other)) for name in self.__slots__)
        return DatasetReport(*map(sum, pairs))


class Progress:
    """Counts of the write tasks that run. It runs in an actor."""

    def __init__(self) -> None:
        self._tasks: dict[int, DatasetReport] = {}

    def note(self, task: int, report: DatasetReport) -> None:
        """Replace the counts of a task; a repeated task begins again."""
        self._tasks[task] = report

    def total(self) -> DatasetReport:
        """Return the counts of all tasks."""
        return sum(self._tasks.values(), DatasetReport())


class KeyShardDatasink(Datasink[DatasetReport]):  # type: ignore[misc]  # Ray is untyped here
    """Writes the rows of a dataset to a topic.

    Args:
        sink: The topic. The write appends an id of its own to the sink id.
        order_by: Columns that order the rows of each key in a task.
        progress: Actor of :class:`Progress`; ``None`` for none.
    """

    def __init__(
        self, sink: KeyShardSink, order_by: Sequence[str] = (), progress: Any = None
    ) -> None:
        name = f"{sink.sink_id or SINK_ID}-{uuid.uuid4().hex}"
        # The tasks of a machine cannot share a port.
        self._sink = replace(sink, sink_id=name, metrics_port=None)
        self._order_by = tuple(order_by)
        self._progress = progress
        self.report = DatasetReport()
        """Counts of the finished write."""

    def get_name(self) -> str:
        """Return the name of the write in Ray's plans and progress."""
        return "KeyShard"

    @property
    def min_bytes_per_write(self) -> int:
        """Bytes of blocks for a task.

        It also keeps the write a stage of its own, so that a repeated task reads the blocks that
        its first attempt read, and does not run the code that made them again.
        """
        return TASK_BYTES

    def on_write_start(self, schema: pa.Schema | None = None) -> None:
        """Check topic and columns at the driver, before the first task.

        Raises:
            KeyShardError: The topic cannot be written, or a column does not fit.
        """
        names: Sequence[str] = ()
        if isinstance(schema, pa.Schema):
            rows = self._ordered(_with_maps(schema.empty_table()))
            outgoing_of(rows)
            names = rows.schema.names
        if TOPIC not in names:  # otherwise each task checks the topics of its rows
            check_topics(self._sink, [self._sink.topic])

    def write(self, blocks: Iterable[Any], ctx: Any) -> DatasetReport:
        """Store the rows of a task. It runs in a worker."""
        tables = [BlockAccessor.for_block(block).to_arrow() for block in blocks]
        tables = [_with_maps(table) for table in tables if table.num_rows]
        if not tables:
            return DatasetReport(tasks=1)
        rows = self._ordered(_joined(tables))
        self._note(ctx.task_idx, DatasetReport(received=len(rows)))
        for attempt in range(ATTEMPTS):
            try:
                with replace(self._sink) as sink:
                    new = not attempt and _is_first_run()
                    report = sink._write_batch(rows, 0, ctx.task_idx, new=new)
            except KeyShardError as exc:  # noqa: PERF203 - each attempt may fail
                if not exc.retriable or attempt == ATTEMPTS - 1:
                    raise
                _log.warning("a write task tries again: %s", exc.summary)
                time.sleep(PAUSE_S * 2**attempt)
            else:
                found = DatasetReport(
                    len(rows), report.rows, rows.nbytes, report.entries, report.already_stored,
                    tasks=1, retries=attempt,
                )  # fmt: skip
                self._note(ctx.task_idx, found)
                return found
        raise AssertionError("the last attempt returns or raises")

    def on_write_complete(self, write_result: WriteResult[DatasetReport]) -> None:
        """Add up the counts of the tasks."""
        self.report = sum(write_result.write_returns, DatasetReport())

    def _note(self, task: int, report: DatasetReport) -> None:
        if self._progress is not None:
            self._progress.note.remote(task, report)

    def _ordered(self, rows: pa.Table) -> pa.Table:
        """Order the rows; leave out the columns that only order them."""
        if self._order_by:
            for name in self._order_by:
                if name not in rows.schema.names:
                    hint = did_you_mean(name, rows.schema.names)
                    raise ConfigError(f"order_by names {name}, which the rows do not have.", hint)
                kind = rows.schema.field(name).type
                if pa.types.is_nested(kind):
                    raise ConfigError(
                        f"order_by names {name}, whose type {kind} has no order.",
                        "Name a column of numbers, times, text or bytes.",
                    )
            rows = rows.sort_by([(name, "ascending") for name in self._order_by])
            only_order = set(self._order_by) - set(COLUMNS)
            rows = rows.select([name for name in rows.schema.names if name not in only_order])
        return rows


SINK_ID = "ray"
"""First part of producer names if the sink has no id. The id of the write makes them unique."""


def _is_first_run() -> bool:
    """Whether Ray runs this task for the first time. Then no row of it is stored."""
    found: int = global_worker.core_worker.get_current_task_attempt_number()
    return found == 0


def _joined(tables: Sequence[pa.Table]) -> pa.Table:
    """Return the rows of several blocks, whose columns may differ in the size of their offsets."""
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as exc:
        raise ConfigError(
            f"The blocks of the dataset do not have the same types: {exc}.",
            "Cast the column to one type before the write.",
        ) from None


def _with_maps(rows: pa.Table) -> pa.Table:
    """Return the rows with properties as maps. Ray makes structs of the dicts of Python."""
    names = rows.schema.names
    if PROPERTIES_COLUMN not in names:
        return rows
    kind = rows.schema.field(PROPERTIES_COLUMN).type
    if not pa.types.is_struct(kind):
        return rows
    maps = [
        None if pairs is None else [pair for pair in pairs.items() if pair[1] is not None]
        for pairs in rows.column(PROPERTIES_COLUMN).to_pylist()
    ]
    try:
        column = pa.array(maps, PROPERTIES)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return rows  # outgoing_of() refuses the column, and names its type
    return rows.set_column(names.index(PROPERTIES_COLUMN), PROPERTIES_COLUMN, column)
