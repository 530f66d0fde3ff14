"""Batches of a source whose host has a checkpoint.

Steps of a batch, for every host::

    1. cut       entries received so far -> end checkpoint; the batch is planned
    2. plan      layout of the batch; after a restart its entries are read again first
    3. read      rows of one layout partition, any number of times; if workers keep the content,
                 tasks learn where it is
    4. release   the host's checkpoint is durable: forget the rows, acknowledge the entries
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

import pyarrow as pa

from keyshard.broker.port import Broker
from keyshard.columns.content import content_columns, runs_of
from keyshard.columns.entry_rows import picked
from keyshard.columns.record_batches import columns_of, described, record_batches
from keyshard.config.source import SourceConfig
from keyshard.consumers.consumers import Consumers
from keyshard.coordinator.available_now import AvailableNow
from keyshard.coordinator.partition_lifecycle import PartitionLifecycle
from keyshard.coordinator.progress import PaceMonitor
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import EntryBlock, Part, TopicPartition
from keyshard.core.window.admission import waits_for_more
from keyshard.core.window.layout import Located, own
from keyshard.errors import BatchUnknownError, KeyShardError
from keyshard.reading.replay import replay
from keyshard.threads import unexpected

_log = logging.getLogger(__name__)


ContentEndpoint = tuple[str, str]
"""Address of a worker that serves content, and its token."""
Run = tuple[int, int, int]
"""Number under which a worker keeps content, the first row in it, and the number of rows."""


class ContentLocation(NamedTuple):
    """Location of the content of some rows, as plain JSON values."""

    endpoints: Sequence[ContentEndpoint]
    runs: Sequence[tuple[int, Run]]
    """In the order of the rows; each begins with the index of its endpoint."""

    @classmethod
    def of(cls, parts: Iterable[Part]) -> ContentLocation:
        """Return the location of the content of some parts; workers keep all of it."""
        endpoints: dict[ContentEndpoint, int] = {}
        runs = [
            (
                endpoints.setdefault(part.remote.endpoint, len(endpoints)),
                (part.remote.number, part.start, part.rows),
            )
            for part in parts
        ]
        return cls(list(endpoints), runs)


class Batches:
    """Plans, reads and releases batches.

    Args:
        consumers: Has the window.
        broker: Connection for replays.
        config: The source.
        partitions: Knows which topic partitions are gone.
        watch: Notified of every cut.
        bounded: The targets of a bounded run; ``None`` for an unbounded one.
    """

    def __init__(
        self, consumers: Consumers, broker: Broker, config: SourceConfig, *,
        partitions: PartitionLifecycle,
        watch: PaceMonitor, bounded: AvailableNow | None,
    ) -> None:  # fmt: skip
        self._consumers = consumers
        self._shared = consumers.shared
        self._window = consumers.shared.window
        self._broker = broker
        self._config = config
        self._partitions = partitions
        self._watch = watch
        self._bounded = bounded
        self._restoring = threading.Lock()
        self._began_s: dict[str, dict[int, float]] = {}
        """Monotonic time of the first read of each layout partition, by planned batch."""
        self._cut_ms: dict[str, int] = {}
        """Time at which each batch was cut that has not ended, milliseconds since the epoch."""

    def cut(self, rows_max: int | None = None) -> Checkpoint | None:
        """Plan a batch of the entries received so far; ``None`` without rows. Uses memory only.

        Args:
            rows_max: Most rows; default ``batch_rows_max``.

        Raises:
            KeyShardError: The error that ended receiving or acknowledging.
        """
        config = self._config
        with self._shared.lock:
            self._shared.check()
            rows = self._window.received_rows
            if not rows:
                # Hosts call this every few milliseconds, so an idle cut must be cheap.
                return None
            waited_s = self._watch.since_cut_s()
            # A bounded run may get no further rows.
            at_once = self._bounded is not None or self._window.pauses.any_full
            if not at_once and waits_for_more(
                rows, config.batch_rows_min or 0, waited_s, config.batch_delay_max_ms / 1000
            ):
                return None
            checkpoint = self._window.cut(rows_max or config.batch_rows_max, config.batch_bytes_max)
            self._shared.look_for_room()
            if checkpoint is not None:
                self._cut_ms[checkpoint.batch_id] = int(time.time() * 1000)
                full = self._window.pauses.any_full
                self._watch.cut(full_since_s=self._shared.full_since_s if full else None)
            return checkpoint

    def cut_available(self, rows_max: int | None = None) -> Checkpoint | None:
        """Wait for rows in a bounded run, then plan a batch of them as :meth:`cut` does.

        ``batch_rows_min`` does not count: there may be no further rows.

        Returns:
            The end checkpoint. ``None``: all entries up to the targets are delivered and
            acknowledged, and the consumers are closed.

        Raises:
            AvailableNowTimeoutError: Neither a row nor the end came in time, or the checkpoint had
                no room for received rows.
        """
        bounded = self._bounded
        assert bounded is not None
        without_room_s: float | None = None
        while bounded.wait_for_rows(rows_max):
            if (checkpoint := self.cut(rows_max)) is not None:
                return checkpoint
            without_room_s = without_room_s or time.monotonic()
            bounded.wait_for_room(without_room_s)
        bounded.finish(self._consumers.acknowledger, self._consumers.range_consumers.receivers)
        return None

    def wait_for_rows(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` seconds for rows to cut; return whether there are any."""
        with self._shared.lock:
            return self._shared.wait_for_rows(timeout_s)

    def plan(self, checkpoint: Checkpoint) -> list[int]:
        """Return the layout partitions of the batch that ends at ``checkpoint``, ascending.

        Idempotent. A batch that was planned before a restart is read again first.

        Raises:
            BatchReleasedError: The batch was released.
            DataLossTrimmedError: The broker no longer stores all of it.
            UnexpectedError: Reading it again failed because of a defect.
        """
        batch_id = checkpoint.batch_id
        with self._shared.lock:
            self._shared.check()
            with suppress(BatchUnknownError):
                return list(self._window.batches[batch_id].layout)
        try:
            entries = self._replayed(checkpoint)
        except KeyShardError:
            raise
        except Exception as exc:
            raise unexpected("Reading a batch again", exc) from exc
        with self._shared.lock:
            self._window.plan(checkpoint, entries)
            return list(self._window.batches[batch_id].layout)

    def rows(self, batch_id: str) -> int:
        """Return the number of rows of a planned batch.

        Raises:
            BatchReleasedError: The batch was released.
            BatchUnknownError: The batch was never planned here.
        """
        with self._shared.lock:
            return self._window.batches[batch_id].rows

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
    ) -> Iterator[tuple[pa.RecordBatch, ContentLocation]] | None:
        """Return the rows of a layout partition without content, and the location of the content.

        Works only if workers keep all of the content.

        Returns:
            Pairs of the other columns and the location; ``None`` if some content is not kept, or
            the worker that kept it is gone.

        Raises:
            BatchReleasedError: The batch was released.
            BatchUnknownError: The batch was never planned here, or has no such partition.
        """
        located = self._partition(batch_id, index)
        remote = [run.remote for run in runs_of([block for _, block in located])]
        if not remote or any(one is None or one.lost for one in remote):
            return None
        return ((others, ContentLocation.of(runs)) for others, runs in described(located, columns))

    def read(
        self, batch_id: str, index: int, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Return the rows of one layout partition of a planned batch: the same at every call.

        If workers keep content of the batch, it is read again from the broker first: tasks ask here
        when they cannot get the content from a worker.

        Args:
            batch_id: The batch.
            index: The layout partition.
            columns: Columns wanted, in their order; default: those of the source.

        Raises:
            BatchReleasedError: The batch was released.
            BatchUnknownError: The batch was never planned here, or has no such partition.
            DataLossTrimmedError: The broker no longer stores all of it.
        """
        located = self._partition(batch_id, index)
        if _keeps_any(located):
            with self._restoring:  # once for all tasks that ask
                located = self._partition(batch_id, index)
                if _keeps_any(located):
                    self._restore(batch_id)
                    located = self._partition(batch_id, index)
        return record_batches(located, columns or columns_of(self._config.metadata_columns))

    def _restore(self, batch_id: str) -> None:
        with self._shared.lock:
            self._shared.check()
            checkpoint = self._window.batches[batch_id].checkpoint
        _log.warning(
            "reading batch %s again, because a worker that held its rows is unavailable", batch_id
        )
        entries = self._replayed(checkpoint)
        with self._shared.lock:
            lost = self._window.batches.restore(batch_id, entries)
            self._window.counters.entries_lost += lost

    def _partition(self, batch_id: str, index: int) -> list[Located]:
        """Return the entries of a layout partition, with only the messages that it has."""
        with self._shared.lock:
            located = self._window.batches.partition(batch_id, index)
            end = self._window.batches[batch_id].checkpoint
            self._began_s.setdefault(batch_id, {}).setdefault(index, time.monotonic())
        found: list[Located] = []
        for one in located:
            rows = own(one, index, end.ranges, end.merged)
            found.append(one if rows is None else (one[0], picked(one[1], rows)))
        return found

    def release(self, checkpoint: Checkpoint) -> None:
        """Acknowledge everything up to ``checkpoint``, which is durable at the host. Idempotent."""
        with self._shared.lock:
            self._learn(checkpoint.batch_id)
            released = self._window.release(checkpoint)
            self._forget_times()
            self._shared.history.committed(time.monotonic(), sum(map(len, released.values())))
        self._consumers.acknowledge(released)

    def _forget_times(self) -> None:
        """Forget the times of released batches; a release includes all older ones."""
        planned = set(self._window.batches)
        self._began_s = {one: at for one, at in self._began_s.items() if one in planned}
        self._cut_ms = {one: at for one, at in self._cut_ms.items() if one in planned}

    def _learn(self, batch_id: str) -> None:
        """Learn the cost of rows from the times at which the tasks of a batch began to read.

        Called at the end of the batch.
        """
        began, cut_ms = self._began_s.get(batch_id), self._cut_ms.get(batch_id)
        if began is None or cut_ms is None:
            return
        first_s, batch = min(began.values()), self._window.batches[batch_id]
        self._window.task_costs.learn(
            batch.rows,
            [at - first_s for at in began.values()],
            time.monotonic() - first_s,
            (cut_ms, int(time.time() * 1000)),
        )


def _keeps_any(located: Sequence[Located]) -> bool:
    """Whether a worker keeps content of some of the entries."""
    blocks = [block for _, block in located]
    later = chain.from_iterable(map(_later_parts, blocks))
    return any(map(_remote, blocks)) or any(map(_remote, later))


_later_parts = attrgetter("later_parts")
_remote = attrgetter("remote")
