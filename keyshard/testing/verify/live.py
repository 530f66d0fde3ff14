"""A live check on a user's broker: publish a load, consume it, record a history."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, replace

import pulsar

from keyshard.broker.admin.port import Admin
from keyshard.broker.admin.rest import PulsarAdmin
from keyshard.broker.client.connection import client_of
from keyshard.broker.client.log import close_client
from keyshard.broker.connect import connect
from keyshard.broker.port import Broker
from keyshard.config.connection import Connection
from keyshard.config.source import SourceConfig
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.option_checks import check_integer
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import EntryId, full_topic_name
from keyshard.core.ring.hash_range import RING_SIZE
from keyshard.errors import BrokerUnavailableError, ConfigError
from keyshard.source_stream import SourceBatch
from keyshard.testing.verify.recorder import History, Recorder
from keyshard.testing.verify.workloads import (
    PARTITIONS_MAX,
    ProduceReport,
    Workload,
    create_partitioned_topic,
    produce,
)

BATCHES = 20
"""Approximate number of batches that the load makes."""
PARTITIONS = 5
"""Default number of partitions of a topic that is created."""

_TIMEOUT_MS = 15_000

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LiveCheck:
    """A live check on a user's broker."""

    topic: str
    """Topic name, short or full."""
    connection: Connection
    """Without an admin interface, a missing topic is created without partitions."""
    messages: int = 10_000
    keys: int = 100
    partitions: int | None = None
    """Partitions of a topic that is created; default 5."""
    parallelism: int = 10
    append: bool = False
    """Whether to publish to a topic that holds data."""
    timeout_s: float = 120.0
    """Deadline for the whole check, seconds."""

    def __post_init__(self) -> None:
        if not 1 <= self.timeout_s <= 86_400:
            raise ConfigError(f"timeout_s is {self.timeout_s:g}; it must be from 1 to 86400.")
        if self.partitions is not None:
            check_integer("partitions", self.partitions, 1, PARTITIONS_MAX)
            if self.connection.admin_url is None:
                raise ConfigError(
                    "The number of partitions needs the admin interface.", "Set admin_url."
                )
        self.workload()
        self.source()

    def workload(self) -> Workload:
        """Return the load to publish."""
        return Workload(self.messages, self.keys)

    def source(self) -> SourceConfig:
        """Return the options of the source, with a new subscription that starts at the end."""
        return SourceConfig(
            self.topic,
            subscription=f"keyshard-check-{uuid.uuid4().hex[:8]}",
            connection=self.connection,
            parallelism=self.parallelism,
            starting_position="latest",
            batch_rows_max=max(1, self.messages // BATCHES),
        )

    def prepare(self) -> None:
        """Create a missing topic; refuse one that holds data, unless ``append``.

        Raises:
            ConfigError: It holds data.
            AdminError: It exists with another number of partitions.
            BrokerUnavailableError: The broker or its admin interface cannot be reached.
        """
        topic = full_topic_name(self.topic)
        if self.connection.admin_url is not None:
            with closing(PulsarAdmin(self.connection)) as admin:
                exists = admin.partition_count(topic) is not None
            if not exists or self.partitions is not None:
                create_partitioned_topic(self.connection, topic, self.partitions or PARTITIONS)
        if not self.append:
            with closing(self._connect()) as broker:
                require_empty(broker, topic)

    def run(self, history: History, progress: Progress) -> LiveReport:
        """Publish, consume, and write the history; the subscription is removed at the end.

        Raises:
            KeyShardError: Publishing or consuming failed.
        """
        source = self.source()
        topic = source.topics[0]
        try:
            return consume(
                source,
                self._connect,
                lambda: PulsarAdmin(self.connection) if self.connection.admin_url else None,
                lambda sent: produce(self.workload(), self.connection, topic, sent),
                history,
                timeout_s=self.timeout_s,
                progress=progress,
            )
        finally:
            remove_subscription(self.connection, topic, source.subscription)

    def _connect(self) -> Broker:
        return connect(replace(self.connection, operation_timeout_ms=_TIMEOUT_MS))


def require_empty(broker: Broker, topic: str) -> None:
    """Refuse a topic that holds data.

    Args:
        broker: A connection.
        topic: Full topic name.

    Raises:
        ConfigError: It holds data.
        BrokerError: The broker cannot be reached.
    """
    if broker.missing([topic]):
        return
    for topic_partition in broker.partitions(topic):
        reader = broker.reader(topic_partition, EntryId(0, 0))
        try:
            if not reader.at_end():
                raise ConfigError(
                    f"Topic {topic} contains messages, and its other consumers would receive the "
                    "messages of this check.",
                    "Use a new topic. To publish to this topic anyway, add --append.",
                )
        finally:
            reader.close()


def remove_subscription(connection: Connection, topic: str, subscription: str) -> None:
    """Remove the subscription, so that it leaves no backlog. A failure is only logged."""
    try:
        client = client_of(replace(connection, operation_timeout_ms=_TIMEOUT_MS))
        try:
            client.subscribe(topic, subscription, receiver_queue_size=1).unsubscribe()
        finally:
            close_client(client)
    except pulsar.PulsarException as exc:
        _log.warning("subscription %s of %s could not be removed: %s", subscription, topic, exc)


# -- Consumes a load with two restarts, and records it, on any broker ------------------------------
# 1. The second batch is aborted while it is read: the next start reads it again.
# 2. The third batch is durable and not acknowledged: the next start drops its redeliveries.
#
# Each start uses a different number of ranges.

HOST = "host"
"""Worker name in the history."""
QUIET_S = 2.0
"""Silence after the last row at which no more rows are expected, seconds."""

_WAIT_S = 0.2
_BROKEN_OFF, _NOT_ACKNOWLEDGED = 1, 2

Progress = Callable[[int, int], None]
"""Called from time to time with the number of sent messages and of durable ones."""


@dataclass(frozen=True, slots=True)
class LiveReport:
    """Figures of a live check; the history shows whether it was correct."""

    sent: int
    """Messages that the broker confirmed."""
    rows: int
    """Rows in committed batches."""
    batches: int
    restarts: int
    duplicates_dropped: int
    """Redelivered messages that were recognised."""
    seconds: float
    in_time: bool
    """Whether every row came before the deadline."""

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON values."""
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
    """Subscribe, publish, consume the published messages, and write the history.

    Args:
        source: One topic and a new subscription.
        connect: Makes a connection to the broker.
        make_admin: Makes a handle of the admin interface, or returns ``None``.
        publish: Publishes a workload; gets a callback for its progress.
        history: Destination of the events.
        timeout_s: Deadline for the whole check, seconds.
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
            "sent.",
            "Raise the time limit, or publish fewer messages.",
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
        """Consume until all rows have arrived and no more arrive. Return whether it was in time."""
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
