"""The stream reader: connects Spark's micro-batch loop to the coordinator.

The reader lives on the driver, in one long-lived process per query. Steps of a micro-batch::

    1. latestOffset(start, limit)   start is in Spark's commit log: release it and acknowledge it
                                    in the background; then cut the next batch, from memory only
    2. (Spark writes the offset log)
    3. partitions(start, end)       plan the batch that ends at end; idempotent
    4. read(partition)              in Python workers: read the planned entries from the window
    5. (Spark writes the commit log)
    6. commit(end)                  release end; idempotent

Step 1 acknowledges, because Spark calls ``commit`` one batch late, and never for the last batch.
The first ``commit`` proves that Spark commits each batch before it plans the next. Before it, step
1 releases only if there is no batch to cut; see :class:`_Runtime`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from keyshard import Checkpoint, KeyShardSource
from keyshard.coordinator.batch_server import BatchServer, BatchTicket, read_batch, report_malformed
from keyshard.errors import (
    AsyncProgressError,
    KeyShardError,
    UnsupportedTriggerError,
    WorkerUnreachableError,
)
from keyshard.handlers.range_owners import observe_stream
from keyshard.reading.decoding_plan import DROPMALFORMED, Ledgers
from keyshard.threads import owned_by
from keyshard.workers.server import collect_garbage_rarely
from spark_adapter.error_text import as_spark_error
from spark_adapter.lifecycle import end_with_host
from spark_adapter.python_worker import exempt_imports
from spark_adapter.task_rows import Rows
from spark_adapter.watched_process import EndAddress
from spark_adapter.workers.launcher import keep_content_in_workers

if TYPE_CHECKING:
    import pyarrow as pa

    from keyshard.coordinator.coordinator import Coordinator
    from keyshard.observe.monitor import Monitor
    from keyshard.observe.telemetry import PlannedSpans


_log = logging.getLogger(__name__)
FLUSH_S = 1.0
"""Longest time to export spans when the query ends, seconds."""
COUNTS_LOGGED = (
    "malformedDropped", "malformedNulls", "unreadable", "corruptSkipped", "encryptedSkipped",
    "entriesNotDue", "entriesLost",
)  # fmt: skip
"""Counts of progress that the end of a query logs: rows that are missing or incomplete."""


class KeyShardPartition(InputPartition):
    """One hash range of one micro-batch."""

    def __init__(
        self, ticket: BatchTicket, ledgers: int = 0, ended_at: EndAddress | None = None
    ) -> None:
        super().__init__(ticket)
        self.ended_at = ended_at
        """Where a task asks how the stream process ended."""
        self.ledgers = ledgers
        """Number of ledgers that the stream has moved on to; see :meth:`Rows.after`."""

    @property
    def ticket(self) -> BatchTicket:
        """The ticket with which a task fetches the rows."""
        ticket: BatchTicket = self.value
        return ticket

    def why_unreachable(self, error: WorkerUnreachableError) -> KeyShardError:
        """Return the error of a task that lost the stream process: how that ended, if it did."""
        return (self.ended_at and self.ended_at.ask()) or error


class KeyShardStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads one query. Spark calls it from one thread, one call at a time.

    Args:
        source: What to consume.
        rows: Columns of the query, and how to make them.
        ended_at: Where tasks ask how the stream process ended.
    """

    def __init__(
        self, source: KeyShardSource, rows: Rows, ended_at: EndAddress | None = None
    ) -> None:
        self._source = source
        self._rows = rows
        self._ended_at = ended_at
        self._runtime: _Runtime | None = None
        self._monitor: Monitor | None = None
        self._available_now = False
        self._counts_logged = False

    def __getstate__(self) -> dict[str, Any]:
        # Spark pickles the reader into its Python workers, which only call read().
        return {
            "_source": self._source,
            "_rows": self._rows,
            "_ended_at": None,
            "_runtime": None,
            "_monitor": None,
            "_available_now": self._available_now,
            "_counts_logged": False,
        }

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Make the run bounded. Its targets are set at the next call, which connects.

        Only a subscribed consumer can ask for the last entry. Only the next call brings the
        checkpoint that decides how to subscribe.
        """
        self._available_now = True

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return the empty checkpoint of a new query, without a connection.

        Spark calls this twice; the first time is before the stream starts. After a restart Spark
        calls ``partitions`` next, to run the first batch again. The end of that batch must be known
        before the broker redelivers its entries, so nothing may be received here.
        """
        return Checkpoint("", self._source.subscription, self._source.parallelism).to_dict()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Limit the rows per batch. With this limit, "all" can only mean Trigger.Once."""
        source = self._source
        return ReadMaxRows(source.batch_rows_max or max(1, source.window_rows_max // 2))

    @as_spark_error()
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Release everything up to ``start``, then cut the next batch.

        In a bounded run, wait for rows.

        Returns:
            The end of the batch, or ``start`` if there are no rows. In a bounded run, ``start``
            ends the run.
        """
        if isinstance(limit, ReadAllAvailable):
            raise UnsupportedTriggerError(
                "Trigger.Once is not supported, because it never commits its only batch at the "
                "source. Use trigger(availableNow=True)."
            )
        runtime = self._runtime or self._start(Checkpoint.from_dict(start))
        rows_max = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        end = runtime.latest(start, rows_max)
        if end is None and self._available_now:
            self._log_counts()
        return end or start

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Return the source's entry in ``StreamingQueryProgress``."""
        return None if self._runtime is None else self._progress(self._runtime)

    def _progress(self, runtime: _Runtime) -> dict[str, Any]:
        found, plan = runtime.server.malformed, self._rows.plan
        drops = plan is not None and plan.mode == DROPMALFORMED
        counts = {"malformedDropped": found * drops, "malformedNulls": found * (not drops)}
        return {**runtime.coordinator.status(), **counts}

    def _log_counts(self) -> None:
        """Log which rows are missing or incomplete, once, at the end of the query.

        Spark asks for progress before the tasks of a batch run, so the progress of the last batch
        lacks what its tasks found.
        """
        if self._runtime is None or self._counts_logged:
            return
        self._counts_logged = True
        progress = self._progress(self._runtime)
        found = [f"{name} {progress[name]}" for name in COUNTS_LOGGED if progress[name]]
        if found:
            _log.warning(
                "The query of subscription %s ends. Rows missing or incomplete since its start: "
                "%s.",
                self._source.subscription, ", ".join(found),
            )  # fmt: skip

    @as_spark_error()
    def partitions(
        self,
        start: dict[str, Any],  # noqa: ARG002 - end names the entries of its batch
        end: dict[str, Any],
    ) -> Sequence[InputPartition]:
        """Return one partition per hash range with data in the batch that ends at ``end``."""
        runtime = self._runtime or self._start(Checkpoint.from_dict(end), planned=True)
        runtime.check_committed_before(end)
        checkpoint = runtime.checkpoint(end)
        self._rows.check(runtime.topics_anew(checkpoint))
        indices, batch_id = runtime.planned(checkpoint), checkpoint.batch_id
        return [
            KeyShardPartition(
                runtime.server.ticket(batch_id, index, self._rows.columns),
                runtime.ledgers.followed,
                self._ended_at,
            )
            for index in indices
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a partition, in a Python worker. May run several times per batch."""
        assert isinstance(partition, KeyShardPartition)
        exempt_imports()
        with as_spark_error():
            ticket = partition.ticket
            rows = self._rows.after(partition.ledgers)
            try:
                yield from rows.of(read_batch(ticket), partial(report_malformed, ticket))
            except WorkerUnreachableError as exc:
                raise partition.why_unreachable(exc) from exc

    @as_spark_error()
    def commit(self, end: dict[str, Any]) -> None:
        """Release the batch that ends at ``end``, which is in Spark's commit log.

        Never raises for a transient failure.
        """
        if self._runtime:
            self._runtime.commit(end)

    def stop(self) -> None:
        """Stop the source. Spark calls this only after an error."""
        if self._monitor:
            self._monitor.close()
        if self._runtime:
            self._runtime.stop()
            self._log_counts()

    def _start(self, checkpoint: Checkpoint, *, planned: bool = False) -> _Runtime:
        keep_content_in_workers()
        collect_garbage_rarely()
        spans = None
        if self._source.telemetry:
            from keyshard.observe.telemetry import PlannedSpans  # noqa: PLC0415 - an extra

            spans = PlannedSpans(self._source.subscription)
        coordinator = self._source.coordinator()
        with owned_by(coordinator.fail):
            self._monitor = observe_stream(coordinator, self._source, "spark")
        try:
            return self._started(coordinator, checkpoint, spans, planned=planned)
        except BaseException:
            self._monitor.close()
            raise

    def _started(
        self,
        coordinator: Coordinator,
        checkpoint: Checkpoint,
        spans: PlannedSpans | None,
        *,
        planned: bool,
    ) -> _Runtime:
        coordinator.start(
            # The initial offset names no topic partition: it means the first start of the query.
            checkpoint if checkpoint.partitions else None,
            planned=planned,
            available_now=self._available_now,
        )
        with owned_by(coordinator.fail):
            server = BatchServer(coordinator.batches, self._source.worker_host)
        self._runtime = _Runtime(coordinator, server, spans, available_now=self._available_now)
        end_with_host(self.stop, _context_files())
        return self._runtime


def _context_files() -> str:
    """Return the directory of ``SparkContext.addFile``; empty outside a context's processes.

    A stream process is told of a directory within it, which Spark may not have made.
    """
    from pyspark import SparkFiles  # noqa: PLC0415 - a client of Spark Connect does not have it

    told = Path(SparkFiles.getRootDirectory() if SparkFiles._is_running_on_worker else "")
    of_context = (one for one in (told, *told.parents) if one.name.startswith("userFiles-"))
    return str(next(of_context, ""))


class _Runtime:
    """State of the query that exists only in the stream process.

    Spark commits each batch before it plans the next. With async progress tracking it does not: a
    second ``partitions`` arrives without a ``commit`` in between, and nothing may be acknowledged.
    So before the first ``commit``, a batch is released only if no other batch follows it at once.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        server: BatchServer,
        spans: PlannedSpans | None,
        *,
        available_now: bool,
    ) -> None:
        self.coordinator = coordinator
        self.server = server
        self._spans = spans
        self._available_now = available_now
        # Spark allows async progress tracking with a processing-time trigger only.
        self._commits_in_time = available_now
        self._released: dict[str, Any] | None = None
        self._planned: dict[str, Any] | None = None
        self._cut_from: dict[str, Any] | None = None
        self._cut: dict[str, Any] | None = None
        self._end: Checkpoint | None = None
        """``_cut`` as a checkpoint."""
        self.ledgers = Ledgers()

    def topics_anew(self, checkpoint: Checkpoint) -> set[str]:
        """Return the topics whose entries are in new ledgers: they may have been created again."""
        return self.ledgers.new({tp: one.batch for tp, one in checkpoint.partitions.items()})

    def latest(self, start: dict[str, Any], rows_max: int | None) -> dict[str, Any] | None:
        """Do step 1: release the batch that ends at ``start``, return the end of the next."""
        if self._commits_in_time:
            self._release(start)
        end = self._next_end(start, rows_max)
        if end is None:
            self._release(start)
        return end

    def checkpoint(self, end: dict[str, Any]) -> Checkpoint:
        """Return the checkpoint at ``end``. The checkpoint of the last cut needs no parsing."""
        if self._end is not None and end == self._cut:
            return self._end
        return Checkpoint.from_dict(end)

    def check_committed_before(self, end: dict[str, Any]) -> None:
        """Refuse to plan a batch before the previous batch is committed.

        Raises:
            AsyncProgressError: Spark has not called ``commit`` for the previous batch.
        """
        if self._planned is not None and self._planned != end:
            raise AsyncProgressError(
                "Async progress tracking is on: Spark plans a batch before it commits the "
                "previous one. It does not report durable batches, so keyshard could not "
                "acknowledge safely. Remove option 'asyncProgressTrackingEnabled'."
            )
        self._planned = end

    def planned(self, checkpoint: Checkpoint) -> list[int]:
        """Do step 3: plan the batch that ends at a checkpoint, and return its partitions."""
        batches = self.coordinator.batches
        if self._spans is None:
            return batches.plan(checkpoint)
        span = self._spans.begin(checkpoint)
        try:
            indices = batches.plan(checkpoint)
            span.counted(batches.rows(checkpoint.batch_id))
        except BaseException as exc:
            span.end(exc)
            raise
        return indices

    def stop(self) -> None:
        """Stop the source, then export the newest spans."""
        if self._spans is not None:
            self._spans.close()
        self.coordinator.stop()
        if self._spans is not None:
            self._spans.telemetry.flush(FLUSH_S)

    def commit(self, end: dict[str, Any]) -> None:
        """Do step 6: release ``end``, which is in the commit log."""
        if self._planned is None or self._planned == end:
            self._planned = None
            self._commits_in_time = True
        self._release(end)

    def _release(self, start: dict[str, Any]) -> None:
        """Release the batch that ends at ``start``, once: Spark repeats it every 10 ms."""
        if start != self._released:
            checkpoint = self.checkpoint(start)
            self.coordinator.batches.release(checkpoint)
            if self._spans is not None:
                self._spans.committed(checkpoint.batch_id)
            self._released = start

    def _next_end(self, start: dict[str, Any], rows_max: int | None) -> dict[str, Any] | None:
        """Return the end of the next batch after ``start``; the same for the same ``start``.

        If a query has several sources, Spark may ask again before it plans.
        """
        if self._cut is not None and self._cut_from == start:
            return self._cut
        batches = self.coordinator.batches
        cut = batches.cut_available if self._available_now else batches.cut
        self._end = cut(rows_max)
        self._cut_from = start
        self._cut = None if self._end is None else self._end.to_dict()
        return self._cut
