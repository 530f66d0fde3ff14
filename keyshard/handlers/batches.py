"""Batches of a source for programs that acknowledge each when they are done with it."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence

import pyarrow as pa

from keyshard.arrow.columns import SCHEMA, columns_of, record_batches
from keyshard.config.source import SourceConfig
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.window.layout import Located
from keyshard.errors import KeyShardError, WindowFullError
from keyshard.handlers.entry_run import EntryRun

BATCH_BYTES_MAX = 512 * 1024 * 1024
"""Memory of its columns at which a batch is full, bytes, unless one entry has more. A column of a
record batch holds at most 2 GiB."""
WAIT_S = 0.1
"""Longest sleep between two looks at whether the run is stopped, seconds."""


class Batch:
    """Rows in publish order per key; acknowledged when the program says so, or never.

    What is left unacknowledged fills the window, and comes again after a restart.
    """

    def __init__(
        self, records: pa.RecordBatch, entries: dict[TopicPartition, list[EntryId]], run: BatchRun
    ) -> None:
        self.records = records
        """Columns of :data:`keyshard.arrow.columns.SCHEMA`, then those that the source names."""
        self._entries = entries
        self._run = run

    def ack(self) -> None:
        """Acknowledge every message of the batch, after its checkpoint is durable. Idempotent.

        Batches may be acknowledged in any order, from any thread.

        Raises:
            KeyShardError: The source ended, or the checkpoint could not be stored. Call it again:
                what it would have acknowledged is not.
        """
        self._run.commit(self._entries)


class BatchRun(EntryRun):
    """One run over one source, in this process.

    Args:
        coordinator: The source, not started.
        config: The source.
        rows_max: Most rows of a batch, unless one entry has more.
        wait_max_s: Longest wait for more rows after the first, seconds.
        checkpoint: Path or fsspec URL of the checkpoint; ``None``: none.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        config: SourceConfig,
        rows_max: int,
        wait_max_s: float,
        *,
        checkpoint: str | os.PathLike[str] | None,
    ) -> None:
        super().__init__(coordinator, config, checkpoint, executor="batches")
        self._rows_max = rows_max
        self._wait_max_s = wait_max_s
        self._full_timeout_s = config.operation_timeout_ms / 1000
        """Time after which a full window that nobody empties is an error, seconds."""
        self._columns = columns_of(config.metadata_columns)
        self._rows: deque[Located] = deque()

    def batches(self) -> Iterator[Batch]:
        """Batches until :meth:`stop`; the ranges are given back when the iteration ends.

        Raises:
            WindowFullError: Nobody acknowledges.
            KeyShardError: What ended the source.
        """
        with self.started():
            while not self._stopping:
                batch = self._next()
                if batch is not None:
                    yield batch

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
            if taken or not self.full:
                full_since_s = now
            elif now - full_since_s > self._full_timeout_s:
                raise WindowFullError(
                    f"Batches that were not acknowledged have filled the window for "
                    f"{self._full_timeout_s:.0f} s, so nothing more can be received. Call ack() on "
                    "each batch, or raise window_rows_max."
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
        return Batch(one_record_batch(blocks, self._columns), entries, self)


def one_record_batch(
    blocks: Sequence[Located], columns: Sequence[str] = tuple(SCHEMA.names)
) -> pa.RecordBatch:
    """All rows of some entries, in one record batch.

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
            f"fit into one record batch: {table.nbytes} bytes. Nothing of them is acknowledged. "
            "Publish smaller producer batches, or consume this topic with a handler."
        )
    return parts[0]
