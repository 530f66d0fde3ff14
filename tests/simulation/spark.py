"""A model of Spark's micro-batch loop around the real stream reader.

What is modelled is Spark: the offset log, tasks that may run twice, a sink that is idempotent by
batch id, the commit log, and what a restart does with them. The reader, the coordinator and all of
its threads are the real ones; only Flight and the signal handlers are left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from random import Random
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from keyshard import KeyShardSource
from keyshard.coordinator.batch_reading import BatchTicket, Chunk, rows_of
from keyshard.coordinator.batches import Batches, Run
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.window import layout, task_costs
from spark_adapter import stream_reader, stream_runtime, task_rows
from spark_adapter.stream_reader import KeyShardPartition
from tests.simulation.primitives import Pool
from tests.simulation.record import Record
from tests.simulation.scheduler import Process, Scheduler

COLUMNS = ("value", "__topic", "__partition", "__messageId")
"""Columns that the query reads."""
TASK_ATTEMPTS = 4
"""Failures of one task after which the query fails."""
TICK_S = 0.05
"""Time between two looks for data, seconds."""

Rows = dict[int, list[dict[str, Any]]]
"""Rows of a batch by its partition."""


class Step(str, Enum):
    """Steps of the loop; each lasts until the next begins. A process may die in any of them."""

    STARTING = "starting"
    """A new process connects and subscribes; nothing is planned."""
    REPLAYING = "replaying"
    """The same, and it plans a batch again that was not committed."""
    IDLE = "idle"
    """There is nothing to cut."""
    CUT = "cut"
    """``latestOffset`` returned an end; only the source knows of the batch."""
    LOGGED = "offset log"
    """The end is in the offset log: from now on the batch must come out as planned."""
    PLANNED = "planned"
    """``commit`` of the batch before and ``partitions`` were called."""
    READING = "reading"
    """Tasks read their partitions."""
    SINKING = "sinking"
    """Some tasks have written their part."""
    SUNK = "sunk"
    """The sink has the whole batch."""
    COMMITTED = "commit log"
    """The batch is in the commit log."""


class UserError(Exception):
    """User code failed on a row, or in the sink."""


@dataclass
class Storage:
    """The state that survives every process: Spark's checkpoint directory, and the sink."""

    offsets: dict[int, str] = field(default_factory=dict)
    """Offset log: end of each batch, as JSON."""
    commits: set[int] = field(default_factory=set)
    """Commit log."""
    sink: dict[int, Rows] = field(default_factory=dict)
    """Rows by batch number; a batch that runs again replaces its rows."""

    @property
    def rows_committed(self) -> int:
        """Rows in batches that are in the commit log."""
        return sum(len(rows) for one in self.commits for rows in self.sink[one].values())


class Query:
    """One life of one query: a process that runs until it is killed, fails or is stopped.

    Args:
        scheduler: Runs it.
        random: Decides which calls Spark makes twice.
        process: Dies with it.
        source: The consumed source.
        storage: Survives it.
        record: Gets the events.
        at: Called when a step begins; may kill the process, or raise :class:`UserError`.
        poisoned: Called for every row that a task reads; may raise :class:`UserError`.
        check: Called between the steps with the runtime; asserts what always holds.
        bounded: Whether it ends with the messages published before its start.
        metadata: Metadata columns that it reads.
        write: Called by the task of each Spark partition with the batch, its number and its rows;
            may raise :class:`UserError`.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        random: Random,
        process: Process,
        source: KeyShardSource,
        storage: Storage,
        record: Record,
        at: Callable[[Query, Step], None],
        poisoned: Callable[[bytes], None],
        check: Callable[[Coordinator], None],
        bounded: bool,
        metadata: Sequence[str] = (),
        write: Callable[[int, int, list[dict[str, Any]]], None] = lambda *_: None,
    ) -> None:
        self._scheduler = scheduler
        self._random = random
        self.process = process
        self._storage = storage
        self._record = record
        self._at = at
        self._poisoned = poisoned
        self.reader = stream_reader.KeyShardStreamReader(
            source, task_rows.Rows((*COLUMNS, *metadata))
        )
        self._check_runtime = check
        self._write = write
        self._loss_accepted = not source.fail_on_data_loss
        self._bounded = bounded
        if bounded:
            self.reader.prepareForTriggerAvailableNow()
        self.step = Step.STARTING
        self.rows: list[bytes] = []
        """Values of the rows of the batch that is read now."""
        self.stopping = False

    @property
    def coordinator(self) -> Coordinator | None:
        """The runtime, once it is started."""
        runtime = self.reader._runtime
        return None if runtime is None else runtime.coordinator

    def run(self) -> None:
        """Live until :attr:`stopping` is set, or to the end of a bounded run.

        Raises:
            KeyShardError: What the reader raised; Spark stops the query then.
            UserError: A task failed too often, or the sink did.
        """
        logged = max(self._storage.offsets, default=-1)
        committed = max(self._storage.commits, default=-1)
        start = self._end_of(committed)
        batch = committed + 1
        if logged > committed:
            self._enter(Step.REPLAYING)
            if committed < 0:
                start = self._initial()
            start = self._execute(batch, start, self._end_of(logged))
            batch += 1
        else:
            self._enter(Step.STARTING)
            if committed < 0:
                self._initial()
                start = self._initial()
        while not self.stopping:
            end = self.reader.latestOffset(start, self.reader.getDefaultReadLimit())
            self._check()
            if _text(end) == _text(start):
                if self._bounded:
                    return
                self._enter(Step.IDLE)
                self._scheduler.sleep(TICK_S)
                continue
            self._enter(Step.CUT)
            self._storage.offsets[batch] = _text(end)
            self._enter(Step.LOGGED)
            if batch > 0:
                self.reader.commit(self._end_of(batch - 1))
            start = self._execute(batch, start, end)
            batch += 1

    def stop(self) -> None:
        """Give the ranges back, as after an error."""
        self.reader.stop()

    def _initial(self) -> dict[str, Any]:
        return _stored(self.reader.initialOffset())

    def _end_of(self, batch: int) -> dict[str, Any]:
        return json.loads(self._storage.offsets[batch]) if batch >= 0 else {}

    def _enter(self, step: Step) -> None:
        if step is not Step.IDLE or self.step is not step:
            self._record.note(f"step: {step.value}")
        self.step = step
        self._at(self, step)
        self._scheduler.point()

    def _check(self) -> None:
        if self.coordinator is not None:
            self._check_runtime(self.coordinator)

    def _execute(self, batch: int, start: dict[str, Any], end: dict[str, Any]) -> dict[str, Any]:
        partitions = self.reader.partitions(start, end)
        if self._random.random() < 0.2:
            again = self.reader.partitions(start, end)
            assert tickets(again) == tickets(partitions)
        self._enter(Step.PLANNED)
        self._check()
        batch_id = Checkpoint.from_dict(end).batch_id
        self._record.add("started", batch=batch_id, worker=self.process.name)
        self._storage.sink[batch] = self._run_tasks(batch, batch_id, partitions)
        self._record.add("completed", batch=batch_id, worker=self.process.name)
        self._enter(Step.SUNK)
        self._storage.commits.add(batch)
        self._record.add("checkpointed", batch=batch_id, worker=self.process.name)
        self._enter(Step.COMMITTED)
        return end

    def _run_tasks(self, batch: int, batch_id: str, partitions: Sequence[InputPartition]) -> Rows:
        """Two tasks at a time, each retried; the rows of a partition are the same every time."""
        self.rows = []
        rows: Rows = {}

        def task(partition: InputPartition) -> None:
            (ticket,) = tickets([partition])
            index = ticket.index
            for attempt in range(1, TASK_ATTEMPTS + 1):
                found: list[dict[str, Any]] = []
                for part in self.reader.read(partition):
                    found += part.to_pylist()
                    self._scheduler.point()
                # If the worker that kept the content is gone, its entries are read again. By
                # then, all of them may be deleted.
                assert found or self._loss_accepted, "a partition of the host without rows"
                assert rows.setdefault(index, found) == found, "reading again gave other rows"
                if attempt == 1:
                    self._record.rows(batch_id, index, self.process.name, found)
                    self.rows += [row["value"] for row in found]
                    self._enter(Step.READING)
                try:
                    for row in found:
                        self._poisoned(row["value"])
                    break
                except UserError:
                    if attempt == TASK_ATTEMPTS:
                        raise
                    self._record.note(f"task {index} fails, attempt {attempt}")
                    self._scheduler.sleep(0.01)
            self._write(batch, index, found)
            self._enter(Step.SINKING)

        with Pool(self._scheduler, 2, "task") as pool:
            futures = [pool.submit(task, partition) for partition in partitions]
            for future in futures:
                future.result()
        return rows


def tickets(partitions: Iterable[InputPartition]) -> list[BatchTicket]:
    """Tickets with which tasks fetch the rows of partitions."""
    found = []
    for one in partitions:
        assert isinstance(one, KeyShardPartition)
        found.append(one.ticket)
    return found


@dataclass(frozen=True)
class _Ticket:
    """Replaces a Flight ticket."""

    batches: Batches
    batch_id: str
    index: int
    columns: tuple[str, ...]


class _Server:
    """Replaces the Flight server."""

    malformed = 0

    def __init__(self, batches: Batches, _host: str) -> None:
        self._batches = batches

    def ticket(self, batch_id: str, index: int, columns: Sequence[str]) -> _Ticket:
        return _Ticket(self._batches, batch_id, index, tuple(columns))


def _read(ticket: _Ticket) -> Iterator[pa.RecordBatch]:
    wanted = ticket.batch_id, ticket.index, ticket.columns

    def ask(*, direct: bool) -> Iterator[Chunk]:
        elsewhere = ticket.batches.direct(*wanted) if direct else None
        if elsewhere is not None:
            yield from elsewhere
            return
        for rows in ticket.batches.read(*wanted):
            yield rows, None

    def fetch(place: Any, runs: Sequence[Run], columns: Sequence[str]) -> pa.RecordBatch:
        worker, _token = place
        return worker.fetch(runs, columns)

    return rows_of(ask, fetch, ticket.columns)


class NoMonitor:
    """Replaces the monitor of a query or a sink; the handlers' world has monitors."""

    def stopping(self) -> None:
        """Nothing shows it."""

    def close(self) -> None:
        """Nothing is open."""


@contextmanager
def without_processes(*, rows_per_partition_min: int) -> Iterator[None]:
    """The stream reader without Flight, signal handlers and a status.

    Args:
        rows_per_partition_min: Rows that are worth a partition; few, so that batches have several.
    """
    stand_ins = (
        (stream_runtime, "BatchServer", _Server),
        (stream_runtime, "end_with_host", lambda *_: None),
        (stream_runtime, "observe_stream", lambda *_: NoMonitor()),
        (stream_reader, "read_batch", _read),
    )
    before = [(module, name, getattr(module, name)) for module, name, _ in stand_ins]
    rows_before = layout.ROWS_PER_PARTITION_MIN
    costs_before = task_costs.TASK_COST_S, task_costs.BATCH_COST_S
    for module, name, value in stand_ins:
        setattr(module, name, value)
    layout.ROWS_PER_PARTITION_MIN = rows_per_partition_min
    # Batches of simulated hosts are short. With these costs, many have several tasks, and the
    # number of tasks changes.
    task_costs.TASK_COST_S, task_costs.BATCH_COST_S = rows_per_partition_min * 1e-4, 0.0
    try:
        yield
    finally:
        layout.ROWS_PER_PARTITION_MIN = rows_before
        task_costs.TASK_COST_S, task_costs.BATCH_COST_S = costs_before
        for module, name, value in before:
            setattr(module, name, value)


def _text(offset: dict[str, Any]) -> str:
    """An offset as Spark stores and compares it."""
    return json.dumps(offset)


def _stored(offset: dict[str, Any]) -> dict[str, Any]:
    """An offset as Spark gives it back."""
    result: dict[str, Any] = json.loads(_text(offset))
    return result
