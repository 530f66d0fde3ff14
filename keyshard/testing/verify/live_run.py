"""Consumes a load with two restarts on the way, and records it all, whatever the broker.

1. The second batch is broken off while it is read: the next start reads it again.
2. The third batch is made durable and not acknowledged: the next start drops what comes again.

Each start takes another number of ranges than the one before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace

from keyshard.broker.port import Admin, Broker
from keyshard.config.source import SourceConfig
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.ring.hash_range import RING_SIZE
from keyshard.errors import BrokerUnavailableError
from keyshard.source import SourceBatch
from keyshard.testing.verify.recorder import History, Recorder
from keyshard.testing.verify.workloads import ProduceReport

HOST = "host"
"""Worker name in the history."""
QUIET_S = 2.0
"""Once every row is here: silence after which no more is expected, seconds."""

_WAIT_S = 0.2
_BROKEN_OFF, _NOT_ACKNOWLEDGED = 1, 2

Progress = Callable[[int, int], None]
"""Told from time to time how many messages were handed to the broker, and how many are durable."""


@dataclass(frozen=True, slots=True)
class LiveReport:
    """What was done; whether it was right says the history."""

    sent: int
    """Messages that the broker confirmed."""
    rows: int
    """Rows in committed batches."""
    batches: int
    restarts: int
    duplicates_dropped: int
    """Messages that the broker delivered again and that were recognised."""
    seconds: float
    in_time: bool
    """Whether every row came before the deadline."""

    def to_dict(self) -> dict[str, object]:
        """Plain JSON values."""
        return asdict(self)


class _GaveUp(Exception):  # noqa: N818 - ends the producer, no error
    pass


def consume(
    source: SourceConfig,
    connect: Callable[[], Broker],
    make_admin: Callable[[], Admin | None],
    publish: Callable[[Callable[[int], None]], ProduceReport],
    history: History,
    *,
    timeout_s: float,
    progress: Progress = lambda _sent, _rows: None,
) -> LiveReport:
    """Subscribe, publish, and consume what is published, writing the history of it.

    Args:
        source: One topic and a subscription of its own.
        connect: Makes a connection to the broker.
        make_admin: Makes a handle of the admin interface, or ``None``.
        publish: Publishes a workload; it is told to whom it should tell its progress.
        history: Where events go.
        timeout_s: Deadline for everything, seconds.
        progress: See :data:`Progress`.

    Raises:
        BrokerUnavailableError: Publishing did not end before the deadline.
        KeyShardError: Publishing or consuming failed.
    """
    run = _Run(source, connect, make_admin, history, progress)
    began = time.monotonic()
    giving_up = threading.Event()

    def published(count: int) -> None:
        if giving_up.is_set():
            raise _GaveUp
        run.published(count)

    run.start(None)
    with ThreadPoolExecutor(1, thread_name_prefix="keyshard-produce") as pool:
        try:
            producing = pool.submit(publish, published)
            in_time = run.until(producing, began + timeout_s)
        finally:
            giving_up.set()
            run.stop()
    if run.sent is None:
        raise BrokerUnavailableError(
            f"Publishing did not end within {timeout_s:g} s; {run.handed_over:,} messages were "
            "handed over. Allow more time, or publish fewer messages."
        )
    return LiveReport(
        sent=run.sent,
        rows=run.rows,
        batches=run.batches,
        restarts=run.restarts,
        duplicates_dropped=run.duplicates_dropped,
        seconds=time.monotonic() - began,
        in_time=in_time,
    )


class _Run:
    def __init__(
        self,
        source: SourceConfig,
        connect: Callable[[], Broker],
        make_admin: Callable[[], Admin | None],
        history: History,
        progress: Progress,
    ) -> None:
        self._source = source
        self._connect = connect
        self._make_admin = make_admin
        self._recorder = Recorder(history, HOST)
        self._progress = progress
        self.handed_over = 0
        self.sent: int | None = None
        self.rows = self.batches = self.restarts = self.duplicates_dropped = 0

    def start(self, checkpoint: Checkpoint | None, *, planned: bool = False) -> None:
        self._coordinator = Coordinator(
            self._source, lambda: self._recorder.broker(self._connect()), self._make_admin()
        )
        self._coordinator.start(checkpoint, planned=planned)

    def stop(self) -> None:
        if self._coordinator.started:
            self.duplicates_dropped += int(self._coordinator.status()["duplicatesDropped"])
        self._coordinator.stop()

    def until(self, producing: Future[ProduceReport], deadline: float) -> bool:
        """Consume until every row is here and nothing more comes; whether that was in time."""
        quiet_since = time.monotonic()
        while time.monotonic() < deadline:
            if self.sent is None and producing.done():
                self._all_sent(producing.result())
            if self._coordinator.batches.wait_for_rows(_WAIT_S):
                end = self._coordinator.batches.cut()
                if end is not None:
                    self._batch(end)
                    quiet_since = time.monotonic()
            elif self._complete() and time.monotonic() > quiet_since + QUIET_S:
                return True
            self._progress(self.handed_over, self.rows)
        return False

    def _complete(self) -> bool:
        return self.sent is not None and self.rows >= self.sent

    def published(self, count: int) -> None:
        self.handed_over += count

    def _all_sent(self, report: ProduceReport) -> None:
        self.sent = report.sent
        self._recorder.sent(self._source.topics[0], report.per_key)
        self._recorder.faults_stopped()

    def _batch(self, end: Checkpoint) -> None:
        if self.batches == _BROKEN_OFF:
            next(self._recorder.rows(SourceBatch(self._coordinator, end)), None)
            self._restart(end, planned=True)
        batch = SourceBatch(self._coordinator, end)
        rows = sum(records.num_rows for records in self._recorder.rows(batch))
        self._recorder.checkpointed(batch)
        if self.batches == _NOT_ACKNOWLEDGED:
            self._restart(end)
        else:
            self._coordinator.batches.release(end)
        self.rows += rows
        self.batches += 1

    def _restart(self, end: Checkpoint, *, planned: bool = False) -> None:
        self.stop()
        self._recorder.crashed()
        ranges = self._source.parallelism
        self._source = replace(
            self._source, parallelism=ranges + 1 if ranges < RING_SIZE else ranges - 1
        )
        self.start(end, planned=planned)
        self.restarts += 1
        if self.sent is not None:
            self._recorder.faults_stopped()
