"""The stream reader: where Spark's micro-batch loop meets the runtime.

It lives in one long-lived process per query, on the driver. Spark's steps, and what is done here::

    1. latestOffset(start, limit)   start is in Spark's commit log: release it, acknowledge it in
                                    the background; then cut the next batch, from memory only
    2. (Spark writes the offset log)
    3. partitions(start, end)       plan the batch that ends at end: idempotent
    4. read(partition)              in Python workers: a pure replay from the window
    5. (Spark writes the commit log)
    6. commit(end)                  the same release as in 1, idempotent

Step 1 is the acknowledgement point: ``commit`` comes a batch late, and never for the last batch.
Until the first ``commit`` proves that the host commits each batch before it plans the next, step 1
releases only when there is nothing to cut; see :class:`_Runtime`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from keyshard import Checkpoint, KeyShardSource
from keyshard.errors import AsyncProgressError, UnsupportedTriggerError
from keyshard.own_process import collect_rarely
from keyshard.reading.decoding_plan import Ledgers
from keyshard.threads import owned_by
from keyshard.worker.flight import BatchServer, BatchTicket, read_batch, tell_left_out
from spark_adapter.hosting import keep_content
from spark_adapter.lifecycle import end_with_host
from spark_adapter.structure import Rows
from spark_adapter.wording import told_to_spark

if TYPE_CHECKING:
    import pyarrow as pa

    from keyshard.coordinator.coordinator import Coordinator

_log = logging.getLogger(__name__)


class KeyShardPartition(InputPartition):
    """One hash range of one micro-batch, and where a task reads it."""

    def __init__(self, ticket: BatchTicket, ledgers: int = 0) -> None:
        super().__init__(ticket)
        self.ledgers = ledgers
        """See :meth:`Rows.after`."""

    @property
    def ticket(self) -> BatchTicket:
        """What the task needs."""
        ticket: BatchTicket = self.value
        return ticket


class KeyShardStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reader of one query; Spark calls it from one thread, strictly one call after the other.

    Args:
        source: What to consume.
        rows: Columns of the query's schema, and how they are made.
    """

    def __init__(self, source: KeyShardSource, rows: Rows) -> None:
        self._source = source
        self._rows = rows
        self._runtime: _Runtime | None = None
        self._available_now = False

    def __getstate__(self) -> dict[str, Any]:
        # Spark pickles the reader into its Python workers, which only call read().
        return {
            "_source": self._source,
            "_rows": self._rows,
            "_runtime": None,
            "_available_now": self._available_now,
        }

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """The run is bounded. Its targets are taken when it connects, at the next call.

        Only a subscribed consumer can ask for the last entry, and only the next call brings the
        checkpoint that decides how to subscribe.
        """
        self._available_now = True

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """The checkpoint before the first batch. Called twice, the first time before the start.

        Nothing is received yet: when the first batch runs again after a restart, Spark calls this
        and then ``partitions``, whose end must be known before its entries are delivered again.
        """
        return Checkpoint("", self._source.subscription, self._source.parallelism).to_dict()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Rows per batch; never "all", which therefore means Trigger.Once."""
        source = self._source
        return ReadMaxRows(source.batch_rows_max or max(1, source.window_rows_max // 2))

    @told_to_spark()
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Release everything up to ``start``, then cut; ``start`` itself when there are no rows.

        In a bounded run it waits for rows; ``start`` ends the run.
        """
        if isinstance(limit, ReadAllAvailable):
            raise UnsupportedTriggerError(
                "Trigger.Once is not supported: it never tells a source that its only batch was "
                "committed. Use trigger(availableNow=True)."
            )
        runtime = self._runtime or self._start(Checkpoint.from_dict(start))
        rows_max = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        return runtime.latest(start, rows_max) or start

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """What ``StreamingQueryProgress`` shows as the source's latest offset."""
        if self._runtime is None:
            return None
        left_out = self._runtime.server.left_out
        return {**self._runtime.coordinator.status(), "malformedDropped": left_out}

    @told_to_spark()
    def partitions(
        self,
        start: dict[str, Any],  # noqa: ARG002 - the end says all: it names its batch
        end: dict[str, Any],
    ) -> Sequence[InputPartition]:
        """One partition per hash range with data in the batch that ends at ``end``."""
        runtime = self._runtime or self._start(Checkpoint.from_dict(end), planned=True)
        runtime.check_committed_before(end)
        checkpoint = runtime.checkpoint(end)
        self._rows.check(runtime.topics_anew(checkpoint))
        indices, batch_id = runtime.coordinator.batches.plan(checkpoint), checkpoint.batch_id
        return [
            KeyShardPartition(
                runtime.server.ticket(batch_id, index, self._rows.columns),
                runtime.ledgers.followed,
            )
            for index in indices
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Rows of a partition, in a Python worker; may run several times per batch."""
        assert isinstance(partition, KeyShardPartition)
        with told_to_spark():
            ticket = partition.ticket
            rows = self._rows.after(partition.ledgers)
            yield from rows.of(read_batch(ticket), partial(tell_left_out, ticket))

    @told_to_spark()
    def commit(self, end: dict[str, Any]) -> None:
        """``end`` is in Spark's commit log; never raises for a transient failure."""
        if self._runtime:
            self._runtime.commit(end)

    def stop(self) -> None:
        """Give the ranges back; called after an error only."""
        if self._runtime:
            self._runtime.coordinator.stop()

    def _start(self, checkpoint: Checkpoint, *, planned: bool = False) -> _Runtime:
        keep_content()
        collect_rarely()
        coordinator = self._source.coordinator()
        coordinator.start(
            # The initial offset names no topic partition: it is the first start of the query.
            checkpoint if checkpoint.partitions else None,
            planned=planned,
            available_now=self._available_now,
        )
        with owned_by(coordinator.fail):
            server = BatchServer(coordinator.batches, self._source.worker_host)
        self._runtime = _Runtime(coordinator, server, available_now=self._available_now)
        end_with_host(coordinator.stop)
        return self._runtime


class _Runtime:
    """What exists only in the query's stream process.

    Spark commits each batch before it plans the next. Async progress tracking does not: its source
    sees a second ``partitions`` without a ``commit`` between. Then nothing must be acknowledged
    yet, so before the first ``commit`` a batch is released only when no other follows it at once.
    """

    def __init__(
        self, coordinator: Coordinator, server: BatchServer, *, available_now: bool
    ) -> None:
        self.coordinator = coordinator
        self.server = server
        self._available_now = available_now
        # Spark allows async progress with a processing-time trigger only.
        self._commits_in_time = available_now
        self._released: dict[str, Any] | None = None
        self._planned: dict[str, Any] | None = None
        self._cut_from: dict[str, Any] | None = None
        self._cut: dict[str, Any] | None = None
        self._end: Checkpoint | None = None
        """What ``_cut`` says."""
        self.ledgers = Ledgers()

    def topics_anew(self, checkpoint: Checkpoint) -> set[str]:
        """Topics of the batch that may be others than before."""
        return self.ledgers.new({tp: one.batch for tp, one in checkpoint.partitions.items()})

    def latest(self, start: dict[str, Any], rows_max: int | None) -> dict[str, Any] | None:
        """Step 1: release what ends at ``start``, and the next batch's end."""
        if self._commits_in_time:
            self._release(start)
        end = self._next_end(start, rows_max)
        if end is None:
            self._release(start)
        return end

    def checkpoint(self, end: dict[str, Any]) -> Checkpoint:
        """Where a batch ends; nothing is parsed for the one that was just cut."""
        if self._end is not None and end == self._cut:
            return self._end
        return Checkpoint.from_dict(end)

    def check_committed_before(self, end: dict[str, Any]) -> None:
        """Refuse to plan a batch while the one before is not committed.

        Raises:
            AsyncProgressError: Spark has not called ``commit`` for it.
        """
        if self._planned is not None and self._planned != end:
            raise AsyncProgressError(
                "Spark plans a batch before it committed the one before: async progress tracking "
                "is on. It tells a source nothing about what is durable, so keyshard could not "
                "acknowledge safely. Remove option 'asyncProgressTrackingEnabled'."
            )
        self._planned = end

    def commit(self, end: dict[str, Any]) -> None:
        """Step 6: ``end`` is in the commit log."""
        if self._planned is None or self._planned == end:
            self._planned = None
            self._commits_in_time = True
        self._release(end)

    def _release(self, start: dict[str, Any]) -> None:
        """Release what ends at ``start``, once: Spark asks every 10 ms with the same one."""
        if start != self._released:
            self.coordinator.batches.release(self.checkpoint(start))
            self._released = start

    def _next_end(self, start: dict[str, Any], rows_max: int | None) -> dict[str, Any] | None:
        """The next batch's end after ``start``; the same until another is asked for.

        Spark may ask again before it plans, as with several sources in one query.
        """
        if self._cut is not None and self._cut_from == start:
            return self._cut
        batches = self.coordinator.batches
        cut = batches.cut_available if self._available_now else batches.cut
        self._end = cut(rows_max)
        self._cut_from = start
        self._cut = None if self._end is None else self._end.to_dict()
        return self._cut
