"""The state of a query in its stream process: the coordinator, its server, and its batches.

:mod:`spark_adapter.stream_reader` makes it with the first offset. Tasks do not import this module.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from keyshard import Checkpoint
from keyshard.config.source import DROPMALFORMED
from keyshard.coordinator.batch_server import BatchServer
from keyshard.errors import AsyncProgressError
from keyshard.handlers.range_owners import observe_stream
from keyshard.threads import owned_by
from keyshard.workers.server import collect_garbage_rarely
from spark_adapter.lifecycle import end_with_host
from spark_adapter.task_rows import Ledgers
from spark_adapter.workers.launcher import keep_content_in_workers

if TYPE_CHECKING:
    from keyshard import KeyShardSource
    from keyshard.coordinator.coordinator import Coordinator
    from keyshard.observe.monitor import Monitor
    from keyshard.observe.telemetry import PlannedSpans
    from spark_adapter.task_rows import Rows

_log = logging.getLogger(__name__)
FLUSH_S = 1.0
"""Longest time to export tracing spans when the query ends, seconds."""
COUNTS_LOGGED = (
    "malformedDropped", "malformedNulls", "unreadable", "corruptSkipped", "encryptedSkipped",
    "entriesNotDue", "entriesLost",
)  # fmt: skip
"""Counts of progress that the end of a query logs: rows that are missing or incomplete."""


class _Parts(NamedTuple):
    coordinator: Coordinator
    server: BatchServer
    monitor: Monitor
    spans: PlannedSpans | None


class StreamRuntime:
    """State of the query that exists only in the stream process.

    Spark commits each batch before it plans the next. With async progress tracking it does not: a
    second ``partitions`` arrives without a ``commit`` in between, and nothing may be acknowledged.
    So before the first ``commit``, a batch is released only if no other batch follows it at once.
    """

    def __init__(
        self,
        source: KeyShardSource,
        rows: Rows,
        parts: _Parts,
        *,
        available_now: bool,
    ) -> None:
        self.coordinator, self.server, self.monitor, self._spans = parts
        self._subscription = source.subscription
        self._rows = rows
        self._available_now = available_now
        self._counts_logged = False
        # Spark allows async progress tracking with a processing-time trigger only.
        self._commits_in_time = available_now
        self._released: dict[str, Any] | None = None
        self._planned: dict[str, Any] | None = None
        self._cut_from: dict[str, Any] | None = None
        self._cut: dict[str, Any] | None = None
        self._end: Checkpoint | None = None
        """``_cut`` as a checkpoint."""
        self.ledgers = Ledgers()

    @classmethod
    def started(
        cls,
        source: KeyShardSource,
        rows: Rows,
        offset: dict[str, Any],
        *,
        planned: bool,
        available_now: bool,
    ) -> StreamRuntime:
        """Connect, and begin to receive.

        Args:
            source: The source to consume.
            rows: Columns of the query.
            offset: Where the query continues.
            planned: Whether the batch that ends there is planned, but not committed.
            available_now: Whether the run is bounded.

        Raises:
            KeyShardError: The start failed.
        """
        checkpoint = Checkpoint.from_dict(offset)
        keep_content_in_workers()
        collect_garbage_rarely()
        spans = None
        if source.telemetry:
            from keyshard.observe.telemetry import PlannedSpans  # noqa: PLC0415 - an extra

            spans = PlannedSpans(source)
        coordinator = source.coordinator()
        with owned_by(coordinator.fail):
            monitor = observe_stream(coordinator, source, "spark")
        _name_free_ports(source, monitor)
        try:
            coordinator.start(
                # The initial offset names no topic partition: the query starts for the first time.
                checkpoint if checkpoint.partitions else None,
                planned=planned,
                available_now=available_now,
            )
            with owned_by(coordinator.fail):
                server = BatchServer(coordinator.batches, source.worker_host)
        except BaseException:
            monitor.close()
            raise
        parts = _Parts(coordinator, server, monitor, spans)
        return cls(source, rows, parts, available_now=available_now)

    def end_with_host(self) -> None:
        """Stop when Spark, its context or its JVM ends."""
        end_with_host(self.stop, _context_files())

    def topics_anew(self, checkpoint: Checkpoint) -> set[str]:
        """Return the topics whose entries are in new ledgers: they may have been created again."""
        return self.ledgers.new({tp: one.batch for tp, one in checkpoint.partitions.items()})

    def latest(self, start: dict[str, Any], rows_max: int | None) -> dict[str, Any] | None:
        """Release the batch that ends at ``start``, then cut the next and return its end.

        This is step 1 of :mod:`spark_adapter.stream_reader`. ``None``: there are no rows.
        """
        if self._commits_in_time:
            self._release(start)
        end = self._next_end(start, rows_max)
        if end is None:
            self._release(start)
            if self._available_now:
                self._log_counts()
        return end

    def progress(self) -> dict[str, Any]:
        """Return the status for ``StreamingQueryProgress``: that of the coordinator, and counts."""
        found, plan = self.server.malformed, self._rows.plan
        drops = plan is not None and plan.mode == DROPMALFORMED
        counts = {"malformedDropped": found * drops, "malformedNulls": found * (not drops)}
        return {**self.coordinator.status(), **counts}

    def _log_counts(self) -> None:
        """Log which rows are missing or incomplete, once, at the end of the query.

        Spark asks for progress before the tasks of a batch run, so the progress of the last batch
        lacks the counts of its tasks.
        """
        if self._counts_logged:
            return
        self._counts_logged = True
        progress = self.progress()
        found = [f"{name} {progress[name]}" for name in COUNTS_LOGGED if progress[name]]
        if found:
            _log.warning(
                "The query of subscription %s ends. Rows missing or incomplete since its start: "
                "%s.",
                self._subscription, ", ".join(found),
            )  # fmt: skip

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
                "acknowledge safely.",
                "Remove option 'asyncProgressTrackingEnabled'.",
            )
        self._planned = end

    def planned(self, checkpoint: Checkpoint) -> list[int]:
        """Plan the batch that ends at a checkpoint, and return its partitions (step 3)."""
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
        """Stop the source, export the newest tracing spans, and log which rows are missing."""
        self.monitor.close()
        if self._spans is not None:
            self._spans.close()
        self.coordinator.stop()
        if self._spans is not None:
            self._spans.telemetry.flush(FLUSH_S)
        self._log_counts()

    def commit(self, end: dict[str, Any]) -> None:
        """Release the batch that ends at ``end``, which is in the commit log (step 6)."""
        if self._planned is None or self._planned == end:
            self._planned = None
            self._commits_in_time = True
        self._release(end)

    def _release(self, start: dict[str, Any]) -> None:
        """Release the batch that ends at ``start``, unless it is released already.

        While there are no rows, Spark asks for the next batch with the same ``start`` every 10 ms.
        """
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


def _name_free_ports(source: KeyShardSource, monitor: Monitor) -> None:
    """Log the ports that option 0 took, as warnings: Spark's processes show nothing less."""
    if source.metrics_port == 0:
        _log.warning("metrics.port is 0: metrics are served on port %s", monitor.metrics_port)
    if source.ui_port == 0:
        _log.warning("ui.port is 0: the page is served on port %s", monitor.page_port)


def _context_files() -> str:
    """Return the directory of ``SparkContext.addFile``; empty outside a context's processes.

    In a stream process, ``SparkFiles`` names a directory within it, which may not exist.
    """
    from pyspark import SparkFiles  # noqa: PLC0415 - a client of Spark Connect does not have it

    told = Path(SparkFiles.getRootDirectory() if SparkFiles._is_running_on_worker else "")
    of_context = (one for one in (told, *told.parents) if one.name.startswith("userFiles-"))
    return str(next(of_context, ""))
