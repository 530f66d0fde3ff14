"""The batches of an open source, for a program that is its own host."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

from keyshard.core.option_checks import (
    check_integer,
    check_seconds,
)
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.errors import ConfigError, NotRunningError
from keyshard.redaction import shown
from keyshard.threads import begin

if TYPE_CHECKING:
    import pyarrow as pa

    from keyshard.coordinator.coordinator import Coordinator
    from keyshard.coordinator.progress import Progress
    from keyshard.observe.monitor import Monitor
    from keyshard.observe.telemetry import PlannedSpans


CUT_AGAIN_S = 0.01
"""Pause before the next try when no cut took the rows that are there, seconds."""


class SourceStream:
    """A running source for programs without a host engine; a context manager.

    Store the rows and the checkpoint of a batch together, then :meth:`commit`::

        with source.open(load_checkpoint()) as stream:
            while batch := stream.next_batch(timeout_s=60):
                for rows in batch:
                    store(rows)
                save_checkpoint(batch.checkpoint)
                stream.commit(batch)
    """

    def __init__(
        self,
        coordinator: Coordinator,
        monitor: Monitor | None = None,
        spans: PlannedSpans | None = None,
    ) -> None:
        self._coordinator = coordinator
        self._monitor = monitor
        self._spans = spans
        self._closed = False
        self._pid = os.getpid()

    def __del__(self) -> None:
        """Close a stream without references, in a thread: the collector may hold any lock.

        A forked child holds only a copy of the stream, so it does not close it.
        """
        if self._closed or self._pid != os.getpid() or sys.is_finalizing():
            return
        warnings.warn("A SourceStream was not closed.", ResourceWarning, source=self, stacklevel=2)
        begin("keyshard-close-stream", _close, self._monitor, self._coordinator, self._spans)

    def next_batch(self, timeout_s: float, rows_max: int | None = None) -> SourceBatch | None:
        """Return the next batch; ``None`` if no row came in time.

        Args:
            timeout_s: Longest wait for the first row, seconds.
            rows_max: Most rows; default ``batch_rows_max`` of the source.

        Raises:
            KeyShardError: The error that ended the source.
        """
        check_seconds("timeout_s", timeout_s, 86_400)
        if rows_max is not None:
            check_integer("rows_max", rows_max, 1, 10**9)
        deadline = time.monotonic() + timeout_s
        while self._coordinator.batches.wait_for_rows(max(0.0, deadline - time.monotonic())):
            checkpoint = self._coordinator.batches.cut(rows_max)
            if checkpoint is not None:
                if self._spans is not None:
                    rows = self._coordinator.batches.rows(checkpoint.batch_id)
                    self._spans.begin(checkpoint).counted(rows)
                return SourceBatch(self._coordinator, checkpoint, self)
            # There are rows, but fewer than batch_rows_min, or the checkpoint has no room for them.
            if time.monotonic() + CUT_AGAIN_S >= deadline:
                return None
            time.sleep(CUT_AGAIN_S)
        return None

    def commit(self, batch: SourceBatch) -> None:
        """Acknowledge a batch, whose checkpoint must be durable, and all batches before it.

        Raises:
            ConfigError: The batch is of another stream, or no batch. Nothing is acknowledged.
        """
        if not isinstance(batch, SourceBatch) or not batch.is_of(self):
            raise ConfigError(
                f"commit got {shown(batch)}, which is no batch of this stream.",
                "Commit a batch at the stream whose next_batch returned it.",
            )
        self._coordinator.batches.release(batch.end)
        if self._spans is not None:
            self._spans.committed(batch.end.batch_id)

    def status(self) -> Progress:
        """Return counts since the start, as JSON values."""
        return self._coordinator.status()

    def pause(self) -> None:
        """Receive nothing more until :meth:`resume`; as :meth:`KeyShardSource.pause`.

        Rows that were received still come in batches; then :meth:`next_batch` returns ``None``.

        Raises:
            NotRunningError: The stream is closed.
        """
        self._open().pause()

    def resume(self) -> None:
        """Receive again after :meth:`pause`. Returns at once, from any thread; idempotent.

        Raises:
            NotRunningError: The stream is closed.
        """
        self._open().resume()

    def _open(self) -> Coordinator:
        if self._closed:
            raise NotRunningError("The stream is closed.", "Open the source again.")
        return self._coordinator

    def close(self) -> None:
        """Stop receiving, flush acknowledgements and give the ranges back. Idempotent."""
        self._closed = True
        _close(self._monitor, self._coordinator, self._spans)

    def __enter__(self) -> SourceStream:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def _close(monitor: Monitor | None, coordinator: Coordinator, spans: PlannedSpans | None) -> None:
    if spans is not None:
        spans.close()
    if monitor is not None:
        monitor.close()
    coordinator.stop()


class SourceBatch:
    """A planned batch: Arrow record batches, one layout partition after the other.

    A layout partition has the rows of one hash range, or of several neighbouring ones. All rows of
    a key are in one layout partition, in publish order per topic partition.
    """

    def __init__(
        self, coordinator: Coordinator, end: Checkpoint, stream: SourceStream | None = None
    ) -> None:
        self._coordinator = coordinator
        self._stream = stream
        """Keeps the stream alive: a stream without references closes the coordinator."""
        self.end = end

    def is_of(self, stream: SourceStream) -> bool:
        """Return whether a stream has returned this batch."""
        return self._stream is stream

    @property
    def checkpoint(self) -> str:
        """Text to store. :meth:`KeyShardSource.open` continues after this batch."""
        return self.end.to_json()

    @property
    def partitions(self) -> list[int]:
        """Layout partitions that have rows in this batch, ascending."""
        return self._coordinator.batches.plan(self.end)

    def read(self, partition: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a layout partition; repeatable until :meth:`SourceStream.commit`."""
        return self._coordinator.batches.read(self.end.batch_id, partition)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for partition in self.partitions:
            yield from self.read(partition)
