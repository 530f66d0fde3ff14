"""The writer of ``format("keyshard")``: it stores the rows of a batch write once."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from keyshard import KeyShardSink
from keyshard.publishing.batch_writer import WriteReport
from keyshard.publishing.claim import Claim
from keyshard.publishing.staging import StagedBatch, StagedFile, Staging
from spark_adapter.error_text import concise_errors
from spark_adapter.python_worker import exempt_imports
from spark_adapter.write_options import WriteOptions

NAMES_KEPT_S = 60.0
"""Age of a write in which no broker forgets a name: the shortest setting is a minute, seconds."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TopicWrite:
    """The sink of a task, and the order of its rows."""

    options: WriteOptions

    def columns_of(self, rows: pa.Table) -> pa.Table:
        """Return the rows with the columns that the options are for."""
        return rows

    def rows_of(self, batches: Iterator[pa.RecordBatch]) -> pa.Table | None:
        """Return the rows of a Spark partition in their order; ``None`` if there are none."""
        parts = [batch for batch in batches if batch.num_rows]
        if not parts:
            return None
        rows = self.columns_of(pa.Table.from_batches(parts))
        if self.options.order_by:
            rows = rows.sort_by([(name, "ascending") for name in self.options.order_by])
        return rows.select(list(self.options.kept))

    def store(
        self,
        batches: Iterator[pa.RecordBatch],
        identity: str,
        batch_id: int,
        partition: int,
        *,
        new: bool = False,
        claim: Claim | None = None,
    ) -> WriteReport:
        """Store the rows of a Spark partition.

        Args:
            batches: The rows.
            identity: Id of the query or of the write.
            batch_id: Id of the batch.
            partition: Number of the Spark partition.
            new: Whether no earlier attempt wrote any of the rows.
            claim: The query that has the sink id for itself; ``None``: several may have it.
        """
        rows = self.rows_of(batches)
        if rows is None:
            return WriteReport(0, 0, 0, 0)
        with self.options.named(identity) as sink:
            return sink._write_batch(rows, batch_id, partition, new=new, claim=claim)

    def stage(
        self, batches: Iterator[pa.RecordBatch], identity: str, batch_id: int, context: TaskContext
    ) -> Staged:
        """Stage the rows of a Spark partition.

        Rows that the broker would refuse are refused here, unless an earlier attempt has decided
        which rows are published: a batch is not computed again after that.
        """
        rows = self.rows_of(batches)
        partition, file = context.partitionId(), None
        if rows is not None:
            batch = self.batch(identity, batch_id)
            if not batch.is_decided():
                with self.options.named(identity) as sink:
                    sink._check_batch(rows)
            file = batch.stage(rows, partition)
        return Staged(identity, file, context.attemptNumber())

    def publish(self, staged: Sequence[Staged], batch_id: int, *, stream: bool) -> list[Stored]:
        """Publish a staged batch, file by file. An attempt that decided earlier is followed.

        Args:
            staged: The messages of all tasks.
            batch_id: Id of the batch.
            stream: Whether it is of a stream, whose earlier attempts may have published rows.
        """
        identity = staged[0].identity
        claim = self.options.claim(identity) if stream else None
        batch = self.batch(identity, batch_id)
        mine = [one.file for one in staged if one.file is not None]
        files = batch.decide(mine)
        if {*files} != {*mine}:
            _show_counts()
            _log.info(
                "batch %d has %d rows, as it was first staged; this attempt has %d",
                batch_id, sum(one.rows for one in files), sum(one.rows for one in mine),
            )  # fmt: skip
        if batch.is_done():
            rows = sum(one.rows for one in files)
            reports = [WriteReport(rows, 0, rows, 0)]
        else:
            with self.options.named(identity) as sink:
                reports = [
                    sink._write_batch(
                        batch.read(file), batch_id, file.partition, new=not stream, claim=claim
                    )
                    for file in files
                ]
        batch.finish()
        retries = sum(one.retries for one in staged)
        return [Stored(one, 0 if at else retries) for at, one in enumerate(reports)]

    def batch(self, identity: str, batch_id: int) -> StagedBatch:
        """Return the staged rows of a batch."""
        assert self.options.staging is not None, "the write has option staging"
        owner = f"{self.options.sink.sink_id}-{identity}"
        return StagedBatch(Staging(self.options.staging), owner, batch_id)


@dataclass
class Stored(WriterCommitMessage):
    """The message of a task whose rows are confirmed and whose producers are closed."""

    report: WriteReport
    retries: int = 0
    """Attempts of the task that failed before."""


@dataclass
class Staged(WriterCommitMessage):
    """The message of a task whose rows are staged."""

    identity: str
    """Id of the query or of the write, which a commit of a stream does not know otherwise."""
    file: StagedFile | None
    """The rows; ``None`` if there are none."""
    retries: int
    """Attempts of the task that failed before."""


class KeyShardBatchWriter(DataSourceArrowWriter):
    """Writes a DataFrame. All attempts of its tasks have the id that is made here."""

    def __init__(self, write: TopicWrite) -> None:
        self._write = write
        self._write_id = uuid.uuid4().hex  # in contrast to query ids, without hyphens
        self._began_s = time.time()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Stored | Staged:
        """Store or stage the rows of a Spark partition. It runs in a task."""
        with concise_errors():
            context = task_context()
            if self._write.options.staging is not None:
                return self._write.stage(iterator, self._write_id, 0, context)
            partition = context.partitionId()
            # A repeated stage counts its attempts from 0 again, so the time decides, too.
            age_s = time.time() - self._began_s
            new = context.attemptNumber() == 0 and 0 <= age_s < NAMES_KEPT_S
            report = self._write.store(iterator, self._write_id, 0, partition, new=new)
            return Stored(report, context.attemptNumber())

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Publish what is staged, and log what was written. It runs at the driver."""
        with concise_errors():
            staged = [one for one in messages if isinstance(one, Staged)]
            stored = self._write.publish(staged, 0, stream=False) if staged else messages
            if staged:
                self._write.batch(self._write_id, 0).remove()
        log_counts(self._write.options.sink, "a batch write", stored)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:  # noqa: ARG002
        """Remove what is staged: another write has another id. It runs at the driver."""
        if self._write.options.staging is not None:
            self._write.batch(self._write_id, 0).remove()


def _show_counts() -> None:
    if _log.level == logging.NOTSET:
        # Spark collects what its Python processes log, but leaves the level at WARNING.
        _log.setLevel(logging.INFO)


def log_counts(
    sink: KeyShardSink, what: str, messages: Iterable[WriterCommitMessage | None]
) -> None:
    """Log the counts of a finished write."""
    _show_counts()
    stored = [one for one in messages if isinstance(one, Stored)]
    reports = [one.report for one in stored]
    entries, rows = sum(one.entries for one in reports), sum(one.rows for one in reports)
    known = sum(one.already_stored for one in reports)
    slowest = max(reports, key=lambda one: one.slowest_s, default=None)
    _log.info(
        "%s is stored (%s): %d rows in %d tasks, of which %d were stored before; %d bytes in %d "
        "entries (%.1f messages each), all confirmed; %d retries; slowest: %s, %.0f ms",
        what, sink.delivery_guarantee, rows, len(stored), known,
        sum(one.bytes for one in reports), entries, (rows - known) / max(1, entries),
        sum(one.retries for one in stored),
        (slowest and slowest.slowest) or "none", 1000 * (slowest.slowest_s if slowest else 0.0),
    )  # fmt: skip


def task_context() -> TaskContext:
    exempt_imports()
    context = TaskContext.get()
    assert context is not None, "a task has a context"
    return context
