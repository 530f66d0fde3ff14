"""The writer of ``format("keyshard")``: it stores the rows of a batch write once."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from keyshard.columns.outgoing import TOPIC
from keyshard.config.sink import EXACTLY_ONCE
from keyshard.publishing.batch_writer import WriteReport
from keyshard.publishing.preflight import check_reading
from keyshard.publishing.sink_claim import Claim
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

    def check_reading(self) -> None:
        """Check that the role may read the topic, which the first tasks of a batch write do not do.

        Raises:
            AuthorizationError: It may not.
        """
        sink = self.options.sink
        if sink.delivery_guarantee == EXACTLY_ONCE and TOPIC not in self.options.kept:
            check_reading(sink, sink.topic)

    def columns_of(self, rows: pa.Table) -> pa.Table:
        """Return the rows with keyshard's column names, which they have here already."""
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
        rows: pa.Table | None,
        identity: str,
        batch_id: int,
        partition: int,
        *,
        new: bool = False,
        claim: Claim | None = None,
    ) -> WriteReport:
        """Store the rows of a Spark partition.

        Args:
            rows: The rows in their order; ``None`` if there are none.
            identity: Id of the query or of the write.
            batch_id: Id of the batch.
            partition: Number of the Spark partition.
            new: Whether no earlier attempt wrote any of the rows.
            claim: The query that has the sink id for itself; ``None``: several may have it.
        """
        if rows is None:
            return WriteReport(0, 0, 0, 0)
        with self.options.named(identity) as sink:
            return sink._write_batch(
                rows, batch_id, partition, new=new, claim=claim, order_by=self.options.order_by
            )

    def stage(
        self, batches: Iterator[pa.RecordBatch], identity: str, batch_id: int, context: TaskContext
    ) -> Staged:
        """Stage the rows of a Spark partition.

        Rows that the broker would refuse are refused here. If an earlier attempt has decided which
        rows are published, they are not checked: those rows are published, not these.
        """
        rows = self.rows_of(batches)
        partition, file = context.partitionId(), None
        if rows is not None:
            batch = self.batch(identity, batch_id)
            if not batch.is_decided():
                with self.options.named(identity) as sink:
                    sink._check_batch(rows, self.options.order_by)
            file = batch.stage(rows, partition)
        return Staged(identity, file, context.attemptNumber())

    def publish(self, staged: Sequence[Staged], batch_id: int, *, stream: bool) -> list[Stored]:
        """Publish a staged batch, file by file.

        The first attempt of a batch decides on its files. A later attempt publishes those files,
        not its own.

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
                        batch.read(file),
                        batch_id,
                        file.partition,
                        new=not stream,
                        claim=claim,
                        order_by=self.options.order_by,
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


@dataclass(frozen=True, slots=True)
class WrittenBatch:
    """Counts of a batch that is stored."""

    batch_id: int | None
    """Id of the micro-batch; ``None`` for a batch write, and for a sum."""
    guarantee: str
    """``exactly-once`` or ``at-least-once``."""
    rows: int
    """Rows of the batch."""
    already_stored: int
    """Rows that an earlier attempt had stored."""
    bytes: int
    """Bytes of the messages that were published, before compression."""
    entries: int
    """Entries that were published, all confirmed."""
    tasks: int
    """Spark partitions; with staging, files."""
    retries: int
    """Attempts of tasks that failed before."""
    slowest: str
    """Topic partition that was confirmed last; empty if nothing was published."""
    slowest_s: float
    """Time until it was confirmed, seconds."""

    @property
    def entry_messages(self) -> float:
        """Messages of an entry, on average."""
        return (self.rows - self.already_stored) / max(1, self.entries)

    @classmethod
    def of(cls, guarantee: str, batch_id: int | None, stored: Sequence[Stored]) -> WrittenBatch:
        """Return the counts of a batch, given the messages of its tasks."""
        parts = [
            cls(None, guarantee, one.report.rows, one.report.already_stored, one.report.bytes,
                one.report.entries, 1, one.retries, one.report.slowest, one.report.slowest_s)
            for one in stored
        ]  # fmt: skip
        empty = cls(None, guarantee, 0, 0, 0, 0, 0, 0, "", 0.0)
        return replace(cls.sum([empty, *parts]), batch_id=batch_id)

    @classmethod
    def sum(cls, batches: Sequence[WrittenBatch]) -> WrittenBatch:
        """Return the sum of batches, at least one, with the guarantee of the last."""
        slowest = max(batches, key=lambda one: one.slowest_s)
        return cls(
            None,
            batches[-1].guarantee,
            rows=sum(one.rows for one in batches),
            already_stored=sum(one.already_stored for one in batches),
            bytes=sum(one.bytes for one in batches),
            entries=sum(one.entries for one in batches),
            tasks=sum(one.tasks for one in batches),
            retries=sum(one.retries for one in batches),
            slowest=slowest.slowest,
            slowest_s=slowest.slowest_s,
        )


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
        self._write_id = uuid.uuid4().hex  # Without hyphens, unlike the ids of queries.
        self._began_s = time.time()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Stored | Staged:
        """Store or stage the rows of a Spark partition. It runs in a task."""
        with concise_errors():
            context = task_context()
            if self._write.options.staging is not None:
                return self._write.stage(iterator, self._write_id, 0, context)
            # This may run the query of the task for long, so the age is taken after it.
            rows = self._write.rows_of(iterator)
            # A repeated stage counts its attempts from 0 again, so the age decides, too.
            age_s = time.time() - self._began_s
            new = context.attemptNumber() == 0 and 0 <= age_s < NAMES_KEPT_S
            found = self._write.store(rows, self._write_id, 0, context.partitionId(), new=new)
            return Stored(found, context.attemptNumber())

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Publish the staged rows, and log the counts of the write. It runs at the driver."""
        with concise_errors():
            staged = [one for one in messages if isinstance(one, Staged)]
            stored = self._write.publish(staged, 0, stream=False) if staged else messages
            if staged:
                self._write.batch(self._write_id, 0).remove()
        report(self._write.options, None, stored)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:  # noqa: ARG002
        """Remove the staged rows: another write has another id. It runs at the driver."""
        if self._write.options.staging is not None:
            self._write.batch(self._write_id, 0).remove()


def _show_counts() -> None:
    if _log.level == logging.NOTSET:
        # Spark collects the logs of its Python processes, but leaves the level at WARNING.
        _log.setLevel(logging.INFO)


def report(
    options: WriteOptions, batch_id: int | None, messages: Iterable[WriterCommitMessage | None]
) -> None:
    """Log the counts of a finished write, and report them if the options ask for it.

    Args:
        options: The options of the write.
        batch_id: Id of the micro-batch; ``None`` for a batch write.
        messages: The messages of its tasks.
    """
    stored = [one for one in messages if isinstance(one, Stored)]
    batch = WrittenBatch.of(options.sink.delivery_guarantee, batch_id, stored)
    _show_counts()
    _log.info(
        "%s is stored (%s): %d rows in %d tasks, of which %d were stored before; %d bytes in %d "
        "entries (%.1f messages each), all confirmed; %d retries; slowest: %s, %.0f ms",
        "a batch write" if batch_id is None else f"batch {batch_id}", batch.guarantee, batch.rows,
        batch.tasks, batch.already_stored, batch.bytes, batch.entries, batch.entry_messages,
        batch.retries, batch.slowest or "none", 1000 * batch.slowest_s,
    )  # fmt: skip
    if options.report_to is not None:
        from spark_adapter.reports import report_written  # noqa: PLC0415 - few writes need it

        report_written(options.report_to, batch)


def task_context() -> TaskContext:
    exempt_imports()
    context = TaskContext.get()
    assert context is not None, "a task has a context"
    return context
