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
1 releases only if there is no batch to cut; see :mod:`spark_adapter.stream_runtime`.

Spark also pickles the reader into tasks, which only call ``read``. So this module imports only what
tasks need. The stream process imports the rest with its first offset.
"""

from __future__ import annotations

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

from keyshard.coordinator.batch_reading import BatchTicket, read_batch, report_malformed
from keyshard.errors import KeyShardError, UnsupportedTriggerError, WorkerUnreachableError
from spark_adapter.error_text import as_spark_error
from spark_adapter.python_worker import exempt_imports
from spark_adapter.task_rows import Rows

if TYPE_CHECKING:
    import pyarrow as pa

    from keyshard import KeyShardSource
    from spark_adapter.stream_runtime import StreamRuntime
    from spark_adapter.watched_process import EndAddress


class KeyShardPartition(InputPartition):
    """One hash range of one micro-batch."""

    def __init__(
        self, ticket: BatchTicket, ledgers: int = 0, ended_at: EndAddress | None = None
    ) -> None:
        super().__init__(ticket)
        self.ended_at = ended_at
        """Address at which a task asks how the stream process ended."""
        self.ledgers = ledgers
        """Number of ledgers that the stream has moved on to; see :meth:`Rows.after`."""

    @property
    def ticket(self) -> BatchTicket:
        """The ticket with which a task fetches the rows."""
        ticket: BatchTicket = self.value
        return ticket

    def why_unreachable(self, error: WorkerUnreachableError) -> KeyShardError:
        """Return how the stream process ended, as an error; if it did not end, ``error`` itself."""
        return (self.ended_at and self.ended_at.ask()) or error


class KeyShardStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads one query. Spark calls it from one thread, one call at a time.

    Args:
        source: The source to consume.
        rows: Columns of the query, and how to make them.
        ended_at: Address at which tasks ask how the stream process ended.
    """

    def __init__(
        self, source: KeyShardSource, rows: Rows, ended_at: EndAddress | None = None
    ) -> None:
        self._source = source
        self._rows = rows
        self._ended_at = ended_at
        self._runtime: StreamRuntime | None = None
        self._available_now = False

    def __getstate__(self) -> dict[str, Any]:
        # Spark pickles the reader into its Python workers, which only call read().
        return {"_rows": self._rows}

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
        from keyshard import Checkpoint  # noqa: PLC0415 - as in _start

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
                "source.",
                "Use trigger(availableNow=True).",
            )
        runtime = self._runtime or self._start(start)
        rows_max = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        return runtime.latest(start, rows_max) or start

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Return the status that ``StreamingQueryProgress`` shows as the source's latest offset."""
        return None if self._runtime is None else self._runtime.progress()

    @as_spark_error()
    def partitions(
        self,
        start: dict[str, Any],  # noqa: ARG002 - end names the entries of its batch
        end: dict[str, Any],
    ) -> Sequence[InputPartition]:
        """Return one partition per hash range with data in the batch that ends at ``end``."""
        runtime = self._runtime or self._start(end, planned=True)
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
        if self._runtime:
            self._runtime.stop()

    def _start(self, offset: dict[str, Any], *, planned: bool = False) -> StreamRuntime:
        # Tasks also import this module, and need none of what runs here.
        from spark_adapter.stream_runtime import StreamRuntime  # noqa: PLC0415

        self._runtime = StreamRuntime.started(
            self._source, self._rows, offset, planned=planned, available_now=self._available_now
        )
        self._runtime.end_with_host()
        return self._runtime
