"""Batches of a source whose host has a checkpoint of its own.

Steps of a batch, whatever the host::

    1. cut       entries received so far -> end checkpoint; the batch is planned
    2. plan      layout of the batch; after a restart its entries are read again first
    3. read      rows of one layout partition, as often as the host likes; where workers keep their
                 content, tasks are told what is where
    4. release   the host's checkpoint is durable: forget the rows, acknowledge the entries
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

import pyarrow as pa

from keyshard.arrow.columns import described
from keyshard.arrow.content import content_columns, runs_of
from keyshard.broker.port import Broker
from keyshard.config.source import SourceConfig
from keyshard.coordinator.available_now import AvailableNow
from keyshard.coordinator.partitions import Partitions
from keyshard.coordinator.watch import Watch
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import EntryBlock, TopicPartition
from keyshard.core.window.admission import waits_for_more
from keyshard.core.window.layout import Located
from keyshard.errors import BatchUnknownError
from keyshard.reading.replay import replay
from keyshard.worker.elsewhere import Elsewhere
from keyshard.worker.worker import Worker

_log = logging.getLogger(__name__)


class Batches:
    """Plans batches, has them read, and releases them.

    Args:
        worker: Has the window.
        broker: Connection to read a batch again through.
        config: The source.
        partitions: Knows which topic partitions are gone.
        watch: Told of every cut.
        bounded: The targets of a bounded run; ``None``: it goes on for ever.
    """

    def __init__(
        self, worker: Worker, broker: Broker, config: SourceConfig, *, partitions: Partitions,
        watch: Watch, bounded: AvailableNow | None,
    ) -> None:  # fmt: skip
        self._worker = worker
        self._shared = worker.shared
        self._window = worker.shared.window
        self._broker = broker
        self._config = config
        self._partitions = partitions
        self._watch = watch
        self._bounded = bounded
        self._restoring = threading.Lock()

    def cut(self, rows_max: int | None = None) -> Checkpoint | None:
        """Plan a batch of the entries received so far; ``None`` without rows. Memory only.

        Args:
            rows_max: Most rows; default ``batch_rows_max``.

        Raises:
            KeyShardError: The error that ended receiving or acknowledging, if there was one.
        """
        config = self._config
        with self._shared.lock:
            self._shared.check()
            rows = self._window.received_rows
            if not rows:
                # Hosts ask every few milliseconds: an idle cut must cost next to nothing.
                return None
            waited_s = self._watch.since_cut_s()
            if not self._window.pauses.any_full and waits_for_more(
                rows, config.batch_rows_min or 0, waited_s, config.batch_delay_max_ms / 1000
            ):
                return None
            checkpoint = self._window.cut(rows_max or config.batch_rows_max, config.batch_bytes_max)
            if checkpoint is not None:
                full = self._window.pauses.any_full
                self._watch.cut(full_since_s=self._shared.full_since_s if full else None)
            return checkpoint

    def cut_available(self, rows_max: int | None = None) -> Checkpoint | None:
        """As :meth:`cut` in a bounded run, but waits for rows.

        ``None`` means that everything up to the targets is delivered and acknowledged; the ranges
        are given back then.

        Raises:
            AvailableNowTimeoutError: There was neither a row nor the end in time.
        """
        bounded = self._bounded
        assert bounded is not None
        if bounded.wait_for_rows(rows_max):
            return self.cut(rows_max)
        bounded.finish(self._worker.acknowledger, self._worker.range_consumers.receivers)
        return None

    def wait_for_rows(self, timeout_s: float) -> bool:
        """Wait until something can be cut; whether it can."""
        with self._shared.lock:
            return self._shared.wait_for_rows(timeout_s)

    def plan(self, checkpoint: Checkpoint) -> list[int]:
        """Layout partitions of the batch that ends at ``checkpoint``, ascending. Idempotent.

        A batch that was planned before a restart is read again first.

        Raises:
            BatchReleasedError: It was released.
            DataLossTrimmedError: The broker no longer stores all of it.
        """
        batch_id = checkpoint.batch_id
        with self._shared.lock:
            self._shared.check()
            with suppress(BatchUnknownError):
                return list(self._window.batches[batch_id].layout)
        entries = self._replayed(checkpoint)
        with self._shared.lock:
            self._window.plan(checkpoint, entries)
            return list(self._window.batches[batch_id].layout)

    def _replayed(self, checkpoint: Checkpoint) -> dict[TopicPartition, list[EntryBlock]]:
        began, config = time.monotonic(), self._config
        entries = replay(
            self._broker,
            checkpoint,
            config.replay_timeout_ms / 1000,
            self._partitions.gone,
            fail_on_data_loss=config.fail_on_data_loss,
            columns=content_columns(config.metadata_columns),
        )
        _log.info("batch %s read again in %.1f s", checkpoint.batch_id, time.monotonic() - began)
        return entries

    def direct(
        self, batch_id: str, index: int, columns: Sequence[str]
    ) -> Iterator[tuple[pa.RecordBatch, Elsewhere]] | None:
        """As :meth:`read`, where workers keep all of the content: the other columns, and what is
        where. ``None``: not all of it is kept, or a worker that did is gone.

        Raises:
            BatchReleasedError: The batch was released.
            BatchUnknownError: It was never planned here, or has no such partition.
        """
        located = self._partition(batch_id, index)
        kept = [run.kept for run in runs_of([block for _, block in located])]
        if not kept or any(one is None or one.lost for one in kept):
            return None
        return ((others, Elsewhere.of(runs)) for others, runs in described(located, columns))

    def read(self, batch_id: str, index: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Rows of one layout partition of a planned batch: the same at every call.

        Content that workers keep is read again first: whoever asks could not get it from them.

        Raises:
            BatchReleasedError: The batch was released.
            BatchUnknownError: It was never planned here, or has no such partition.
            DataLossTrimmedError: The broker no longer stores all of it.
        """
        if _keeps_any(self._partition(batch_id, index)):
            with self._restoring:  # for all tasks that ask
                if _keeps_any(self._partition(batch_id, index)):
                    self._restore(batch_id)
        return self._worker.read(batch_id, index, columns)

    def _restore(self, batch_id: str) -> None:
        with self._shared.lock:
            self._shared.check()
            checkpoint = self._window.batches[batch_id].checkpoint
        _log.warning("batch %s is read again: a worker that kept its rows is away", batch_id)
        entries = self._replayed(checkpoint)
        with self._shared.lock:
            self._window.batches.restore(batch_id, entries)

    def _partition(self, batch_id: str, index: int) -> list[Located]:
        with self._shared.lock:
            return self._window.batches.partition(batch_id, index)

    def release(self, checkpoint: Checkpoint) -> None:
        """Everything up to ``checkpoint`` is durable at the host: acknowledge it. Idempotent."""
        with self._shared.lock:
            released = self._window.release(checkpoint)
        self._worker.acknowledge(released)


def _keeps_any(located: Sequence[Located]) -> bool:
    """Whether content of some entries is kept elsewhere."""
    return any(run.kept is not None for run in runs_of([block for _, block in located]))
