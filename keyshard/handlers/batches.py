"""Batches of a source, for programs that acknowledge each batch when it is completed."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from keyshard.columns.outgoing import outgoing_of
from keyshard.columns.record_batches import SCHEMA, columns_of, record_batches
from keyshard.columns.routing import by_topic
from keyshard.config.sink import SinkConfig
from keyshard.config.source import SourceConfig
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.window.layout import Located
from keyshard.errors import ConfigError, KeyShardError, WindowFullError
from keyshard.handlers.entry_run import EntryRun, RowsByTopic
from keyshard.observe.telemetry import BatchSpan, Telemetry

if TYPE_CHECKING:
    from opentelemetry.trace import Span

WRITTEN_BYTES_MAX = 256 * 1024 * 1024
"""Maximum size of the rows that are written for a batch, bytes."""
BATCH_BYTES_MAX = 512 * 1024 * 1024
"""Memory of the columns at which a batch is full, bytes; one larger entry still is a batch. A
column of a record batch holds at most 2 GiB."""
WAIT_S = 0.1
"""Interval at which a stop of the run is checked, seconds."""


class Batch:
    """Rows in publish order per key; acknowledged only by :meth:`ack`.

    Batches that are not acknowledged fill the window. After a restart, they are redelivered.
    """

    def __init__(
        self,
        records: pa.RecordBatch,
        entries: dict[TopicPartition, list[EntryId]],
        messages: Sequence[tuple[TopicPartition, EntryId, Sequence[int]]],
        run: BatchRun,
        span: BatchSpan | None = None,
    ) -> None:
        self.records = records
        """Columns of :data:`keyshard.columns.record_batches.SCHEMA`, then the metadata columns."""
        self.span: Span | None = None if span is None else span.span
        """Span of OpenTelemetry, which :meth:`ack` ends; ``None`` without ``telemetry``."""
        self._span = span
        self._entries = entries
        self._run = run
        self._messages = messages
        self._rows: RowsByTopic = {}
        self._bytes = 0

    def write(self, rows: pa.RecordBatch | pa.Table) -> None:
        """Add rows, which :meth:`ack` publishes. May be called several times.

        With a checkpoint, each row is stored once. Without a call of :meth:`ack`, none is stored.

        Args:
            rows: Columns as for :meth:`keyshard.KeyShardSink.write_batch`.

        Raises:
            ConfigError: ``batches()`` has no sink, a column does not fit, or all rows of the batch
                are too many.
            MessageTooLargeError: A row is too large.
            KeyShardError: A topic cannot be opened.
        """
        sink = self._run.sink
        if sink is None:
            raise ConfigError(
                "batches() has no sink to publish to.",
                "Give one, such as source.batches(sink=KeyShardSink(...)).",
            )
        if not self._entries:
            raise ConfigError("The batch is acknowledged.", "Call write() before ack().")
        found = {topic: outgoing_of(part) for topic, part in by_topic(rows, sink.topic).items()}
        size = self._bytes + rows.nbytes
        if size > WRITTEN_BYTES_MAX:
            raise ConfigError(
                f"The rows that are written for this batch have {size:,} bytes, more than the "
                f"{WRITTEN_BYTES_MAX:,} that a checkpoint may hold.",
                "Make the batches smaller with max_rows.",
            )
        for topic, columns in found.items():
            self._run.checked(topic, columns)
        self._bytes = size
        for topic, columns in found.items():
            if len(columns):
                self._rows.setdefault(topic, []).append(columns)

    def ack(self) -> None:
        """Publish the written rows, and acknowledge every message of the batch. Idempotent.

        The checkpoint is durable before rows are published, and these are confirmed before messages
        are acknowledged. Batches may be acknowledged in any order, from any thread. The rows of a
        key have the order of these calls.

        Raises:
            KeyShardError: The source ended, the checkpoint could not be stored, or the rows are not
                confirmed. Nothing of the batch is acknowledged; call it again.
        """
        # The checkpoint has the rows of an entry even if it has no room for the entry.
        handled = [
            (where, entry, index)
            for where, entry, indices in (self._messages if self._rows else ())
            for index in indices
        ]
        try:
            self._run.commit(self._entries, self._rows, handled)
        except KeyShardError as exc:
            if self._span is not None:
                self._span.failed(exc)
            raise
        if self._span is not None:
            self._run.acknowledged(self._span)


class BatchRun(EntryRun):
    """One run over one source, in this process.

    Args:
        coordinator: Coordinator of the source, not started.
        config: Options of the source.
        rows_max: Maximum number of rows of a batch, unless one entry has more.
        wait_max_s: Longest wait for more rows after the first, seconds.
        checkpoint: Path or fsspec URL of the checkpoint; ``None``: none.
        sink: Publishes the rows that are written for batches; ``None``: there are none.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        config: SourceConfig,
        rows_max: int,
        wait_max_s: float,
        *,
        checkpoint: str | os.PathLike[str] | None,
        sink: SinkConfig | None = None,
    ) -> None:
        super().__init__(coordinator, config, checkpoint, executor="batches", sink=sink)
        self.sink = sink
        address = config.how_to_connect().address
        self._telemetry = Telemetry(address) if config.telemetry else None
        self._spans: set[BatchSpan] = set()
        """Spans of batches that are not acknowledged."""
        self._rows_max = rows_max
        self._wait_max_s = wait_max_s
        self._full_timeout_s = config.operation_timeout_ms / 1000
        """Time after which a full window without acknowledgements is an error, seconds."""
        self._columns = columns_of(config.metadata_columns)
        self._rows: deque[Located] = deque()

    def batches(self) -> Iterator[Batch]:
        """Yield batches until :meth:`stop`; the ranges are given back when the iteration ends.

        Raises:
            WindowFullError: The window stays full, because batches are not acknowledged.
            KeyShardError: The error that ended the source.
        """
        try:
            with self.started():
                while not self._stopping:
                    batch = self._next()
                    if batch is not None:
                        yield batch
        finally:
            for span in list(self._spans):
                span.abandon()

    def acknowledged(self, span: BatchSpan) -> None:
        """End the OpenTelemetry span of an acknowledged batch."""
        span.end()
        self._spans.discard(span)

    def _next(self) -> Batch | None:
        deadline = 0.0
        full_since_s = time.monotonic()
        rows = sum(block.rows for _, block in self._rows)
        size = sum(block.column_bytes for _, block in self._rows)
        while not self._stopping:
            now = time.monotonic()
            full = rows >= self._rows_max or size >= BATCH_BYTES_MAX
            if full or (rows and now >= deadline > 0):
                return self._cut()
            taken = self.take(min(WAIT_S, deadline - now) if deadline else WAIT_S)
            self._rows.extend(taken)
            rows += sum(block.rows for _, block in taken)
            size += sum(block.column_bytes for _, block in taken)
            if rows and not deadline:
                deadline = now + self._wait_max_s
            entries = self.coordinator.in_flight
            if taken or not entries.full or entries.without_room:
                full_since_s = now
            elif now - full_since_s > self._full_timeout_s:
                raise WindowFullError(
                    "The window has been full of unacknowledged batches for "
                    f"{self._full_timeout_s:.0f} s, so nothing can be received.",
                    "Call ack() on each batch. To hold more of them, raise window_bytes_max, "
                    "window_rows_max and the broker's limits on unacknowledged messages.",
                )
        return None

    def _cut(self) -> Batch:
        blocks: list[Located] = []
        rows = size = 0
        while self._rows:
            block = self._rows[0][1]
            rows, size = rows + block.rows, size + block.column_bytes
            if blocks and (rows > self._rows_max or size > BATCH_BYTES_MAX):
                break
            blocks.append(self._rows.popleft())
        entries: dict[TopicPartition, list[EntryId]] = {}
        for topic_partition, block in blocks:
            entries.setdefault(topic_partition, []).append(block.id)
        messages = [(where, block.id, block.indices) for where, block in blocks]
        records = one_record_batch(blocks, self._columns)
        return Batch(records, entries, messages, self, self._begun(records, entries))

    def _begun(
        self, records: pa.RecordBatch, entries: dict[TopicPartition, list[EntryId]]
    ) -> BatchSpan | None:
        if self._telemetry is None:
            return None
        span = self._telemetry.batch(
            (where.topic for where in entries), self._config.subscription,
            rows=records.num_rows, properties=records.column("__properties"),
        )  # fmt: skip
        self._spans.add(span)
        return span


def one_record_batch(
    blocks: Sequence[Located], columns: Sequence[str] = tuple(SCHEMA.names)
) -> pa.RecordBatch:
    """Put all rows of some entries into one record batch.

    Raises:
        KeyShardError: They do not fit into one.
    """
    table = pa.Table.from_batches(record_batches(blocks, columns))
    parts = table.combine_chunks().to_batches()
    rows = sum(block.rows for _, block in blocks)
    if len(parts) != 1 or parts[0].num_rows != rows:
        # A column of more than 2 GiB stays in several chunks.
        where, first = blocks[0]
        raise KeyShardError(
            f"The {rows} rows from entry {first.id.ledger}:{first.id.entry} of {where} on do not "
            f"fit into one record batch: {table.nbytes} bytes. None of them is acknowledged.",
            "Publish smaller producer batches, or consume this topic with a handler.",
        )
    return parts[0]
