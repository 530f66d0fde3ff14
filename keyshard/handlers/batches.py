"""Batches of a source for programs that acknowledge each when they are done with it."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

import pyarrow as pa

from keyshard.arrow.columns import SCHEMA, record_batches
from keyshard.config.source import SourceConfig
from keyshard.coordinator.coordinator import Coordinator
from keyshard.coordinator.opening import first_assignment
from keyshard.coordinator.rescale import Rescaler
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.errors import KeyShardError, NotRunningError, WindowFullError
from keyshard.handlers.checkpoint_store import CheckpointStore
from keyshard.handlers.committer import Committer
from keyshard.handlers.range_owners import RangeOwners
from keyshard.observe.monitor import Monitor
from keyshard.observe.status import StatusView, Subject
from keyshard.observe.status_types import Status

BATCH_BYTES_MAX = 512 * 1024 * 1024
"""Payload at which a batch is full, bytes, unless one entry has more. A column of a record batch
holds at most 2 GiB."""
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
        """All columns of :data:`keyshard.arrow.columns.SCHEMA`."""
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


class BatchRun:
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
        self._coordinator = coordinator
        self._config = config
        self._rows_max = rows_max
        self._wait_max_s = wait_max_s
        self._full_timeout_s = config.operation_timeout_ms / 1000
        """Time after which a full window that nobody empties is an error, seconds; also the
        longest wait at the end for an ack in progress."""
        self._store = None if checkpoint is None else CheckpointStore(checkpoint)
        # One thread takes it twice where an iteration that nobody holds ends inside an ack.
        self._lock = threading.RLock()
        self._left: dict[TopicPartition, list[EntryId]] = {}
        self._rows: deque[tuple[TopicPartition, EntryBlock]] = deque()
        self._stopping = self._ended = False
        self._monitor: Monitor | None = None
        self.rescaler: Rescaler | None = None
        """Moves ranges, once the run has started."""
        self._owners = RangeOwners()
        self._subject = Subject(
            config, coordinator, self._owners,
            executor="batches", workers=lambda: 1, workers_max=None,
            stopping=lambda: self._stopping, rescaler=lambda: self.rescaler,
        )  # fmt: skip

    def stop(self) -> None:
        """End the iteration; returns at once."""
        self._stopping = True

    def batches(self) -> Iterator[Batch]:
        """Batches until :meth:`stop`; the ranges are given back when the iteration ends.

        Raises:
            WindowFullError: Nobody acknowledges.
            KeyShardError: What ended the source.
        """
        checkpoint = None if self._store is None else self._store.open()
        try:
            self._monitor = Monitor(self._subject)
            assignment = first_assignment(self._config, checkpoint)
            self._owners.begin(assignment)
            self._coordinator.start(checkpoint, assignment=assignment)
            self._committer = Committer(self._coordinator, self._store, checkpoint)
            self.rescaler = self._coordinator.rescaler(self._owners, drain_timeout_s=0.0)
            while not self._stopping:
                batch = self._next()
                if batch is not None:
                    yield batch
        finally:
            if self._monitor is not None:
                self._monitor.close()
            self._end()

    def status(self) -> Status:
        """What goes on, as plain JSON values; no lane works on anything."""
        view = StatusView(self._subject, None) if self._monitor is None else self._monitor.view
        return view.status()

    def commit(self, entries: dict[TopicPartition, list[EntryId]]) -> None:
        """Commit the entries of a batch, which is emptied, and what was left of others before."""
        try:
            with self._lock:
                completed = {where: list(ids) for where, ids in self._left.items()}
                for topic_partition, ids in entries.items():
                    completed.setdefault(topic_partition, []).extend(ids)
                self._left = self._committer.plan(completed)
                entries.clear()
                self._committer.store()
        finally:
            if self._ended:
                self._let_checkpoint_go()

    def unpark(self, key: str) -> bool:
        """Nothing is parked here.

        Raises:
            NotRunningError: Always.
        """
        raise NotRunningError(
            f"Key {key!r} cannot be unparked: batches() parks no keys. A source that runs a "
            "handler by run() does."
        )

    def _end(self) -> None:
        """An ack that another thread is in ends first; those that follow find the source ended.

        Else it would replace the checkpoint of whoever comes next with its own, or return when
        nobody can acknowledge any more. One that hangs keeps the checkpoint from others.
        """
        alone = self._lock.acquire(timeout=self._full_timeout_s)
        try:
            self._coordinator.stop()
        finally:
            if alone:
                self._lock.release()
            self._ended = True
            self._let_checkpoint_go()

    def _let_checkpoint_go(self) -> None:
        """Unless an ack is in progress, which does it then."""
        if self._store is not None and self._lock.acquire(blocking=False):
            self._store.close()
            self._lock.release()

    def _next(self) -> Batch | None:
        deadline = 0.0
        full_since_s = time.monotonic()
        rows = sum(block.rows for _, block in self._rows)
        size = sum(block.payload_bytes for _, block in self._rows)
        while not self._stopping:
            if self._committer.behind:
                with self._lock:
                    self._committer.store()
            now = time.monotonic()
            full = rows >= self._rows_max or size >= BATCH_BYTES_MAX
            if full or (rows and now >= deadline > 0):
                return self._cut()
            taken = self._coordinator.handed_out.take(
                min(WAIT_S, deadline - now) if deadline else WAIT_S
            )
            self._rows.extend((topic_partition, block) for topic_partition, _, block in taken)
            rows += sum(block.rows for _, _, block in taken)
            size += sum(block.payload_bytes for _, _, block in taken)
            if rows and not deadline:
                deadline = now + self._wait_max_s
            if taken or not self._coordinator.handed_out.full:
                full_since_s = now
            elif now - full_since_s > self._full_timeout_s:
                raise WindowFullError(
                    f"Batches that were not acknowledged have filled the window for "
                    f"{self._full_timeout_s:.0f} s, so nothing more can be received. Call ack() on "
                    "each batch, or raise window_rows_max."
                )
        return None

    def _cut(self) -> Batch:
        blocks: list[tuple[TopicPartition, EntryBlock]] = []
        rows = size = 0
        while self._rows:
            block = self._rows[0][1]
            rows, size = rows + block.rows, size + block.payload_bytes
            if blocks and (rows > self._rows_max or size > BATCH_BYTES_MAX):
                break
            blocks.append(self._rows.popleft())
        entries: dict[TopicPartition, list[EntryId]] = {}
        for topic_partition, block in blocks:
            entries.setdefault(topic_partition, []).append(block.id)
        return Batch(_whole(blocks), entries, self)


def _whole(blocks: Sequence[tuple[TopicPartition, EntryBlock]]) -> pa.RecordBatch:
    """All rows of some entries, in one record batch."""
    table = pa.Table.from_batches(record_batches(blocks, SCHEMA.names))
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
