"""The embedded runtime: one source in one process, from its start to its end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

from keyshard.broker.port import Admin, Broker, WorkerFacts
from keyshard.config.source import UNREADABLE, SourceConfig
from keyshard.coordinator.available_now import AvailableNow, last_entries
from keyshard.coordinator.batches import Batches
from keyshard.coordinator.discovery import Discovery
from keyshard.coordinator.evidence import Evidence
from keyshard.coordinator.handed_out import HandedOut
from keyshard.coordinator.opening import cluster_of, open_window, start_position
from keyshard.coordinator.partitions import Partitions
from keyshard.coordinator.progress import Progress, SourceWorker
from keyshard.coordinator.rescale import Drainable, Rescaler
from keyshard.coordinator.settler import Settler
from keyshard.coordinator.starting import begin_subscriptions, begun_inside
from keyshard.coordinator.topics import Catalog, Found, look
from keyshard.coordinator.watch import Watch
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import TopicPartition
from keyshard.core.ring.assignment import Assignment, Rescaled, assign
from keyshard.errors import (
    BrokerError,
    ConfigError,
    KeyShardError,
    RuntimeStoppedError,
    TopicNotFoundError,
)
from keyshard.threads import owned_by, unexpected
from keyshard.worker.intake import Unreadable
from keyshard.worker.receiver import RangeConsumer
from keyshard.worker.shared_window import SharedWindow
from keyshard.worker.worker import Worker

ATTEMPTS = 5
"""Times that topics are looked up at a start, where one goes after it was found."""
LET_GO_S = 1.0
"""Longest wait for the threads that the client's end lets go, seconds."""

_log = logging.getLogger(__name__)


class Coordinator:
    """Starts and stops one source, and has its parts. Methods may be called from any thread.

    Once it is started: ``worker`` hosts the ranges, ``batches`` plans batches for hosts with a
    checkpoint of their own, ``handed_out`` serves handlers, ``discovery`` looks for topics.

    Args:
        config: The source.
        connect: Makes the connection to the broker, in the process that uses it.
        admin: Admin REST interface, where there is one.
    """

    def __init__(
        self, config: SourceConfig, connect: Callable[[], Broker], admin: Admin | None = None
    ) -> None:
        self._config = config
        self._connect = connect
        self._admin = admin
        self._stopping = threading.Event()
        self._remembered: tuple[Assignment, Rescaled | None] | None = None
        self._watch = Watch()
        self._abandoned = False
        self._failure: KeyShardError | None = None
        """The first error that a thread of the source raised."""
        self.ahead_rows_max: int | None = None
        """Rows received and not yet taken at which receiving pauses; ``None``: never. To be set
        before the start."""
        self.unreadable: Unreadable | None = None
        """Is told of entries that cannot be read, where those are handed out; before the start."""
        self.started = False

    def start(
        self,
        checkpoint: Checkpoint | None = None,
        *,
        planned: bool = False,
        available_now: bool = False,
        assignment: Assignment | None = None,
    ) -> None:
        """Connect, own every range of every topic partition, and begin to receive.

        Args:
            checkpoint: Where to continue; ``None`` for the first start of a source.
            planned: Whether the checkpoint's batch is not committed yet; then ``batches`` reads
                it again.
            available_now: Whether only what is published before this call is consumed; then
                ``batches.cut_available`` takes the place of ``cut``.
            assignment: Who owns which ranges; default: one range for each of ``parallelism``.

        Raises:
            ConfigError: An option does not go with this use of the source.
            CheckpointMismatchError: It belongs to another subscription or cluster.
            SubscriptionInUseError: Somebody else held a range until the deadline.
            BrokerError: The broker cannot be reached, or a topic does not exist.
        """
        assert not self.started, "a coordinator is started once"
        try:
            with owned_by(self.fail):
                self._start(checkpoint, assignment, planned=planned, available_now=available_now)
        except KeyShardError:
            raise
        except Exception as exc:
            raise unexpected("The start of the source", exc) from exc
        if self._failure is not None:
            self.worker.shared.fail(self._failure)

    def _start(
        self, checkpoint: Checkpoint | None, assignment: Assignment | None, *, planned: bool,
        available_now: bool,
    ) -> None:  # fmt: skip
        config = self._config
        if config.parked and self.unreadable is None:
            name = next(name for name, kind in UNREADABLE.items() if kind in config.parked)
            raise ConfigError(
                f"{name} is 'park', and only source.run keeps dead letters. Write 'fail' or 'skip'."
            )
        assignment = assignment or assign(config.parallelism)
        with ExitStack() as on_failure:
            if self._admin:
                on_failure.callback(self._admin.close)
            cluster = cluster_of(self._admin, config, checkpoint)
            self._broker = self._connect()
            on_failure.callback(self._broker.close)
            if self._abandoned:
                raise RuntimeStoppedError("The source was stopped while it started.")
            catalog = Catalog(self._broker, self._admin, config)
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    found, opened = self._open(
                        catalog, checkpoint, cluster, planned=planned, assignment=assignment
                    )
                    break
                except TopicNotFoundError as exc:
                    # Of those that match a pattern one may go while the others are subscribed to.
                    if not catalog.by_pattern or attempt == ATTEMPTS:
                        raise
                    _log.info("topics are looked up again: %s", exc)
            bounded: AvailableNow | None = None
            if available_now:
                bounded = AvailableNow(
                    last_entries(opened, config.operation_timeout_ms / 1000), opened,
                    config=config, broker=self._broker, admin=self._admin,
                    shared=self.worker.shared,
                )  # fmt: skip
            if self._failure is not None:
                raise self._failure
            on_failure.pop_all()
        partitions = Partitions(self.worker, checkpoint, planned=planned, gone=found.gone)
        self.batches = Batches(
            self.worker, self._broker, config,
            partitions=partitions, watch=self._watch, bounded=bounded,
        )  # fmt: skip
        self.handed_out = HandedOut(self.worker)
        self.discovery = Discovery(
            catalog, self._admin, partitions, config.subscription,
            config.discovery_interval_ms / 1000,
        )  # fmt: skip
        self._settler = Settler(self._broker, self._admin, config, Evidence(self.worker, config))
        self.worker.begin(
            opened, bounded.admit if bounded else None, self.ahead_rows_max, self.unreadable
        )
        if not available_now:
            self.discovery.start(found.consumed, found.gone)
        self.started = True
        _log.info(
            "started: %d ranges over %d topic partitions of %s as subscription %r",
            len(assignment), len(found.consumed),
            config.topics_pattern or ", ".join(config.topics), config.subscription,
        )  # fmt: skip

    def _open(
        self, catalog: Catalog, checkpoint: Checkpoint | None, cluster: str,
        *, planned: bool, assignment: Assignment,
    ) -> tuple[Found, list[RangeConsumer]]:  # fmt: skip
        """Look topics up, and own every range of them."""
        config = self._config
        found = look(catalog, checkpoint, config.operation_timeout_ms / 1000)
        if checkpoint is None:
            begin_subscriptions(self._admin, config, found.consumed)
        begins = begun_inside(self._admin, config, found.consumed, starts=True)
        window = open_window(
            self._broker, self._admin, config, checkpoint, found,
            cluster=cluster, planned=planned, assignment=assignment, begins=begins,
        )  # fmt: skip
        shared = SharedWindow(window, self._stopping, self._failed)
        ending = _batch_of(checkpoint) if checkpoint and planned else frozenset()
        self.worker = Worker(self._broker, self._admin, config, shared, assignment, begins=begins)
        opened = self.worker.open(
            found.consumed,
            start_position(self._admin, config, checkpoint, found),
            found.kept & ending,
        )
        return found, opened

    def stop(self, timeout_s: float = 5.0) -> None:
        """Hand over waiting acknowledgements, give the ranges back and disconnect. Idempotent."""
        if self._stopping.is_set():
            return
        deadline = time.monotonic() + timeout_s
        if not self.started:
            self._stopping.set()
            return
        # Acknowledgements need consumers, and a rescale may just have none.
        changing, lock = self.worker.changing, self.worker.shared.lock
        if changing.acquire(timeout=timeout_s / 2):
            changing.release()
        self._stopping.set()
        # Wakes who waits for rows. A signal may have interrupted a call that holds the lock.
        if lock.acquire(timeout=0.1):
            lock.notify_all()
            lock.release()
        self.discovery.stop()
        self._settler.stop()
        self.worker.stop(deadline)
        self._join(deadline)
        try:
            self._broker.close()
        except BrokerError as exc:
            # All that was to be handed over is; an outage at the end is no error of this run.
            _log.warning("the end was not in order: %s", exc)
        # The client's end lets go who still waited in it.
        self._join(time.monotonic() + LET_GO_S)
        if self._admin:
            self._admin.close()

    def _join(self, deadline_s: float) -> None:
        self.worker.join(deadline_s)
        for thread in (self.discovery, self._settler):
            thread.join(max(0.1, deadline_s - time.monotonic()))

    def abandon_start(self) -> None:
        """Make a start that is under way fail soon: it loses its connection. Idempotent."""
        self._abandoned = True
        broker: Broker | None = getattr(self, "_broker", None)
        with suppress(BrokerError):
            if broker is not None:
                broker.close()

    def fail(self, error: KeyShardError) -> None:
        """End the source by an error, from any thread. A start that goes on raises it."""
        self._failure = self._failure or error
        if self.started:
            self.worker.shared.fail(error)

    def _failed(self) -> None:
        """The source ended with an error: nothing more is received or looked for."""
        self.worker.range_consumers.pause()
        self.discovery.stop()

    def check(self) -> None:
        """Raise the error that ended the source, if there was one."""
        self.worker.shared.check()

    @property
    def broker(self) -> Broker:
        """The connection of the started source; :meth:`stop` closes it."""
        return self._broker

    @property
    def admin(self) -> Admin | None:
        """The admin interface, where there is one."""
        return self._admin

    @property
    def newest(self) -> Checkpoint:
        """The newest checkpoint: of the last cut or commit, else of the start."""
        with self.worker.shared.lock:
            return self.worker.shared.window.newest

    @property
    def epoch(self) -> int:
        """Number of the assignment generation; grows with every rescale."""
        return self.worker.range_consumers.epoch

    @property
    def rescaled(self) -> Rescaled | None:
        """What the next start has to know of the ranges, to begin with these."""
        assignment = self.worker.range_consumers.assignment
        if self._remembered is None or self._remembered[0] is not assignment:
            rescaled = Rescaled.of(self._config.parallelism, assignment)
            self._remembered = assignment, rescaled
        return self._remembered[1]

    def rescaler(self, work: Drainable, drain_timeout_s: float) -> Rescaler:
        """Who moves ranges while the source runs; from now on the load is measured."""
        self.worker.measure_load()
        return Rescaler(
            self.worker, self._config, self._admin, work=work, drain_timeout_s=drain_timeout_s
        )

    def status(self) -> Progress:
        """What goes on, from memory: plain JSON values. All counts are since the start."""
        worker = self.worker
        troubles = worker.troubles()
        with worker.shared.lock:
            return {
                "ranges": len(worker.range_consumers.assignment),
                **self._watch.status(worker.shared.window),
                "rangesPaused": worker.shared.window.pauses.for_checkpoint,
                "connectionError": min(troubles.items())[1] if troubles else "",
                "settlingError": self._settler.error,
                "entriesAcknowledged": worker.acknowledger.acknowledged,
                "entriesToAcknowledge": worker.acknowledger.waiting,
                **self.discovery.status(),
                "sourceWorkers": list(map(_told, self._broker.workers())),
            }


def _told(facts: WorkerFacts) -> SourceWorker:
    """What the status says of a worker."""
    return {
        "kind": facts.kind,
        "pid": facts.pid,
        "host": facts.host,
        "consumers": facts.consumers,
        "forSeconds": round(time.monotonic() - facts.since_s, 1),
        "restarts": facts.restarts,
    }


def _batch_of(checkpoint: Checkpoint) -> frozenset[TopicPartition]:
    """Topic partitions that have a part in the batch of a checkpoint."""
    return frozenset(tp for tp, state in checkpoint.partitions.items() if state.batch)
