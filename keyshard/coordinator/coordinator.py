"""Runs one source in one process, from start to stop."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

from keyshard.base_error import placed
from keyshard.broker.admin.port import Admin
from keyshard.broker.port import Broker, StartPosition
from keyshard.broker.reports import WorkerFacts
from keyshard.broker.retry import FIRST_TRIES_S, retry_until
from keyshard.broker.topics import Catalog, Found, look
from keyshard.config.source import UNREADABLE, SourceConfig
from keyshard.consumers.consumers import Consumers
from keyshard.consumers.intake import Unreadable
from keyshard.consumers.receiver import RangeConsumer
from keyshard.consumers.shared_window import SharedWindow
from keyshard.coordinator.available_now import AvailableNow, last_entries
from keyshard.coordinator.batches import Batches
from keyshard.coordinator.consumer_limits import check_consumer_limits
from keyshard.coordinator.discovery import Discovery
from keyshard.coordinator.gap_resolver import GapResolver
from keyshard.coordinator.in_flight import InFlightEntries
from keyshard.coordinator.partition_lifecycle import BoundedSegments, PartitionLifecycle
from keyshard.coordinator.progress import PaceMonitor, Progress, SourceWorker
from keyshard.coordinator.rescale import Drainable, Rescaler
from keyshard.coordinator.start_positions import create_subscriptions, read_first_messages
from keyshard.coordinator.startup import (
    cluster_of,
    open_window,
    prove_beginnings,
    start_position,
)
from keyshard.coordinator.subscription_ids import SubscriptionIds, read_properties
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import TopicPartition
from keyshard.core.recent_history import HistoryStatus
from keyshard.core.ring.assignment import Assignment, Rescaled, assign
from keyshard.core.topic_segments import consumers_each
from keyshard.errors import (
    BrokerError,
    ConfigError,
    KeyShardError,
    NotRunningError,
    RuntimeStoppedError,
    TopicNotFoundError,
)
from keyshard.threads import owned_by, unexpected

ATTEMPTS = 5
"""Most look-ups of topics at a start: a topic may be deleted after it was found."""
LET_GO_S = 1.0
"""Longest wait for threads that end only when the client closes, seconds."""
_log = logging.getLogger(__name__)


class Coordinator:
    """Starts and stops one source, and owns its parts. Methods may be called from any thread.

    After :meth:`start`, ``consumers`` receive the ranges, ``batches`` plans batches for hosts that
    have a checkpoint, ``in_flight`` serves handlers, and ``discovery`` looks for topics.

    Args:
        config: The source.
        connect: Connects to the broker. The process that uses the connection calls it.
        admin: Admin REST interface; ``None`` without ``admin_url``.
    """

    def __init__(
        self, config: SourceConfig, connect: Callable[[], Broker], admin: Admin | None = None
    ) -> None:
        self._config = config
        self._connect = connect
        self._admin = admin
        self._stopping = threading.Event()
        self._remembered: tuple[Assignment, Rescaled | None] | None = None
        self._watch = PaceMonitor()
        self._abandoned = self._bounded = False
        self._failure: KeyShardError | None = None
        """The first error that a thread of the source raised."""
        self.ahead_rows_max: int | None = None
        """Receiving pauses at this number of rows received and not yet taken; ``None``: never. Set
        it before the start."""
        self.unreadable: Unreadable | None = None
        """Called with unreadable entries, if the source delivers them. Set it before the
        start."""
        self.measures_load = False
        """Whether all messages count in the load, which a balance needs; otherwise it is sampled.
        Set it before the start."""
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
            planned: Whether the checkpoint's batch is not committed yet. ``batches`` then reads it
                again.
            available_now: Whether the source consumes only messages published before this call.
                Then use ``batches.cut_available`` instead of ``cut``.
            assignment: The owner of each range; default: ``parallelism`` ranges.

        Raises:
            ConfigError: An option does not fit this use of the source.
            CheckpointMismatchError: The checkpoint belongs to another subscription or cluster.
            SubscriptionInUseError: Another consumer held a range until the deadline.
            LimitReachedError: The broker has no room for all consumers.
            BrokerError: The broker cannot be reached, or a topic does not exist.
        """
        assert not self.started, "a coordinator is started once"
        with placed(self._config.place), owned_by(self.fail):
            try:
                self._start(checkpoint, assignment, planned=planned, available_now=available_now)
            except Exception as exc:
                # If a thread failed, its error is the cause, that of the start a consequence.
                error = self._failure or unexpected("The start of the source", exc)
                if error is exc:
                    raise
                raise error from exc
        if self._failure is not None:
            self.consumers.shared.fail(self._failure)

    def _start(
        self, checkpoint: Checkpoint | None, assignment: Assignment | None, *, planned: bool,
        available_now: bool,
    ) -> None:  # fmt: skip
        config = self._config
        if config.parked and self.unreadable is None:
            name = next(name for name, kind in UNREADABLE.items() if kind in config.parked)
            raise ConfigError(
                f"{name} is 'park', which only source.run() supports.", "Write 'fail' or 'skip'."
            )
        assignment = assignment or assign(config.parallelism)
        with ExitStack() as on_failure:
            if self._admin:
                on_failure.callback(self._admin.close)
            cluster = cluster_of(self._admin, config, checkpoint)
            self._broker = self._connect()
            on_failure.callback(self._broker.close)
            if self._abandoned:
                raise RuntimeStoppedError("The source was stopped during its start.")
            catalog = Catalog(self._broker, self._admin, config)
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    found, opened = self._open(
                        catalog, checkpoint, cluster, planned=planned, assignment=assignment
                    )
                    break
                except TopicNotFoundError as exc:
                    # A topic that matches a pattern may be deleted while the others are subscribed.
                    if not catalog.by_pattern or attempt == ATTEMPTS:
                        raise
                    _log.info("looking up the topics again: %s", exc.summary)
            partitions = PartitionLifecycle(
                self.consumers, checkpoint, planned=planned, gone=found.gone
            )
            bounded: AvailableNow | None = None
            if available_now:
                bounded = AvailableNow(
                    last_entries(opened, config.operation_timeout_ms / 1000), opened,
                    config=config, broker=self._broker, admin=self._admin,
                    shared=self.consumers.shared,
                    segments=BoundedSegments(
                        catalog.scalable, partitions, found.consumed if config.is_scalable else ()
                    ),
                )  # fmt: skip
                self._bounded = True
            if self._failure is not None:
                raise self._failure
            on_failure.pop_all()
        self.batches = Batches(
            self.consumers, self._broker, config,
            partitions=partitions, watch=self._watch, bounded=bounded,
        )  # fmt: skip
        self.in_flight = InFlightEntries(self.consumers)
        self.discovery = Discovery(
            catalog, self._admin, partitions, config.subscription, self._ids,
            interval_s=config.discovery_interval_ms / 1000,
        )  # fmt: skip
        self._gap_resolver = GapResolver(self._broker, self._admin, config, self.consumers)
        self.consumers.start(
            opened, bounded.admit if bounded else None, self.ahead_rows_max, self.unreadable,
            measures_load=self.measures_load,
        )  # fmt: skip
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
        """Look topics up, and subscribe every range of them."""
        config = self._config
        timeout_s = config.operation_timeout_ms / 1000
        found = look(catalog, checkpoint, timeout_s)
        consumers = consumers_each(found.consumed, assignment)
        check_consumer_limits(self._admin, found.consumed, consumers, timeout_s)
        if checkpoint is None:
            create_subscriptions(
                self._broker, self._admin, config, found.consumed, catalog.scalable.topic_of
            )
        properties = read_properties(self._admin, config, found.consumed)
        first_messages = read_first_messages(self._admin, config, properties, starts=True)
        self._ids = SubscriptionIds(
            self._admin, config.subscription, checkpoint, properties, found.gone
        )
        window = open_window(
            self._broker, self._admin, config, checkpoint, found,
            cluster=cluster, planned=planned, assignment=assignment, first_messages=first_messages,
            same=self._ids.same,
        )  # fmt: skip
        shared = SharedWindow(window, self._stopping, self._failed, config.place)
        ending = _batch_of(checkpoint) if checkpoint and planned else frozenset()
        self.consumers = Consumers(
            self._broker, self._admin, config, shared, assignment, first_messages=first_messages
        )
        window.order.parents = catalog.scalable.parents()
        start = start_position(self._admin, config, checkpoint, found)
        # To register creates the subscription at the beginning of open segments. Later than that,
        # the broker may delete a sealed segment.
        if start is StartPosition.EARLIEST:
            retry_until(lambda: catalog.scalable.register(found.consumed), timeout_s)
        opened = self.consumers.open(found.consumed, start, found.kept & ending)
        if start is StartPosition.LATEST:
            retry_until(lambda: catalog.scalable.register(found.consumed), timeout_s)
        prove_beginnings(self._admin, config, checkpoint, window)
        self._ids.set_in(found.consumed, FIRST_TRIES_S)
        window.identify(self._ids.of(found.consumed))
        return found, opened

    def stop(self, timeout_s: float = 5.0) -> None:
        """Hand over waiting acknowledgements, close the consumers and disconnect. Idempotent.

        Args:
            timeout_s: Longest wait for acknowledgements and threads, seconds.
        """
        if self._stopping.is_set():
            return
        deadline = time.monotonic() + timeout_s
        if not self.started:
            self._stopping.set()
            return
        # Acknowledgements need consumers, and a running rescale may have closed them.
        changing, lock = self.consumers.changing, self.consumers.shared.lock
        if changing.acquire(timeout=timeout_s / 2):
            changing.release()
        self._stopping.set()
        # Wakes threads that wait for rows. A signal may have interrupted a call that holds the
        # lock.
        if lock.acquire(timeout=0.1):
            lock.notify_all()
            lock.release()
        self.discovery.stop()
        self._gap_resolver.stop()
        self.consumers.stop(deadline)
        self._join(deadline)
        try:
            self._broker.close()
        except BrokerError as exc:
            # All acknowledgements are handed over, so an outage now is no error of this run.
            _log.warning("the source did not end cleanly: %s", exc.summary)
        # Closing the client ends calls that still waited in it.
        self._join(time.monotonic() + LET_GO_S)
        if self._admin:
            self._admin.close()

    def _join(self, deadline_s: float) -> None:
        self.consumers.join(deadline_s)
        for thread in (self.discovery, self._gap_resolver):
            thread.join(max(0.1, deadline_s - time.monotonic()))

    @property
    def stopping(self) -> bool:
        """Whether :meth:`stop` was called."""
        return self._stopping.is_set()

    def abandon_start(self) -> None:
        """Make a running start fail soon by closing its connection. Idempotent."""
        self._abandoned = True
        broker: Broker | None = getattr(self, "_broker", None)
        with suppress(BrokerError):
            if broker is not None:
                broker.close()

    def fail(self, error: KeyShardError) -> None:
        """End the source with an error. A start that still runs raises it."""
        self._failure = self._failure or error
        if self.started:
            self.consumers.shared.fail(error)

    def _failed(self) -> None:
        """Stop receiving and discovery, after the source ended with an error."""
        self.consumers.range_consumers.pause()
        self.discovery.stop()

    def check(self) -> None:
        """Raise the error that ended the started source, if there was one."""
        if self.started:
            self.consumers.shared.check()

    @property
    def broker(self) -> Broker:
        """The connection of the started source; :meth:`stop` closes it."""
        return self._broker

    @property
    def admin(self) -> Admin | None:
        """The admin interface; ``None`` without ``admin_url``."""
        return self._admin

    @property
    def newest(self) -> Checkpoint:
        """The checkpoint of the last cut or commit, or of the start."""
        with self.consumers.shared.lock:
            return self.consumers.shared.window.newest

    @property
    def epoch(self) -> int:
        """Number of the assignment; each rescale increases it."""
        return self.consumers.range_consumers.epoch

    @property
    def rescaled(self) -> Rescaled | None:
        """The assignment that the next start needs to begin with the same ranges."""
        assignment = self.consumers.range_consumers.assignment
        if self._remembered is None or self._remembered[0] is not assignment:
            rescaled = Rescaled.of(self._config.parallelism, assignment)
            self._remembered = assignment, rescaled
        return self._remembered[1]

    def rescaler(self, work: Drainable, drain_timeout_s: float) -> Rescaler:
        """Create a rescaler. For a balance, :attr:`measures_load` was set before the start.

        Args:
            work: Runs the handlers of the keys that move.
            drain_timeout_s: Longest wait for handlers, seconds.
        """
        return Rescaler(
            self.consumers, self._config, self._admin, work=work, drain_timeout_s=drain_timeout_s
        )

    @property
    def paused(self) -> bool:
        """Whether the started source receives nothing until :meth:`resume`."""
        return self.started and self.consumers.intake.paused

    def pause(self) -> None:
        """Receive nothing more; consumers stay connected. Idempotent, and returns at once.

        Raises:
            NotRunningError: The source is still starting.
            ConfigError: The run is bounded.
        """
        self._set_paused(paused=True)

    def resume(self) -> None:
        """Receive again after :meth:`pause`. Idempotent.

        Raises:
            NotRunningError: The source is still starting.
        """
        self._set_paused(paused=False)

    def _set_paused(self, *, paused: bool) -> None:
        if not self.started:
            raise NotRunningError("The source is still starting.", "Try again later.")
        if paused and self._bounded:
            raise ConfigError(
                "A bounded run (availableNow) ends by itself, so it cannot be paused.",
                "Stop it; the next run continues after its last checkpoint.",
            )
        if paused != self.paused:
            self.consumers.intake.paused = paused
            _log.info("receiving is %s", "paused" if paused else "resumed")

    def saved(self, checkpoint_bytes: int) -> None:
        """Note that a checkpoint of some bytes was stored."""
        with self.consumers.shared.lock:
            self.consumers.shared.history.saved(time.monotonic(), checkpoint_bytes)

    def history(self) -> HistoryStatus:
        """Return commits and rescales of the last minutes."""
        with self.consumers.shared.lock:
            return self.consumers.shared.history.status(time.monotonic())

    def oldest_ms(self) -> dict[TopicPartition, int]:
        """Return the age of the oldest row that each topic partition holds, milliseconds."""
        with self.consumers.shared.lock:
            return self._watch.oldest_ms(self.consumers.shared.window)

    def status(self) -> Progress:
        """Return the status as plain JSON values, from memory. Counts are since the start."""
        consumers = self.consumers
        problems = consumers.problems()
        # Of a segment, the admin interface shows no cursor.
        blind = self._admin is None or self._config.is_scalable
        # Only the broker's count tells pulsar-client which entries are delayed.
        sees_delays = not (blind and self._bounded and self._config.how_to_connect().by_client)
        with consumers.shared.lock:
            window = consumers.shared.window
            counters = window.counters
            return {
                "ranges": len(consumers.range_consumers.assignment),
                **self._watch.status(window),
                "rangesPaused": window.pauses.for_checkpoint,
                "checkpointBytes": window.checkpoint_bytes,
                "partitionsWithoutRoom": len(window.tight),
                "withoutRoomMillis": int(consumers.shared.without_room_s * 1000),
                "connectionError": min(problems.items())[1] if problems else "",
                "gapResolverError": self._gap_resolver.error,
                "entriesNotDue": counters.entries_not_due if sees_delays else None,
                # Without the cursor, only entries of a planned batch are missed.
                "entriesLost": counters.entries_lost or (None if blind else 0),
                "entriesAcknowledged": consumers.acknowledger.acknowledged,
                "entriesToAcknowledge": consumers.acknowledger.waiting,
                **self.discovery.status(),
                "sourceWorkers": list(map(_worker_status, self._broker.workers())),
            }


def _worker_status(facts: WorkerFacts) -> SourceWorker:
    return {
        "kind": facts.kind,
        "pid": facts.pid,
        "host": facts.host,
        "consumers": facts.consumers,
        "forSeconds": round(time.monotonic() - facts.since_s, 1),
        "restarts": facts.restarts,
    }


def _batch_of(checkpoint: Checkpoint) -> frozenset[TopicPartition]:
    """Return the topic partitions that have entries in the batch of a checkpoint."""
    return frozenset(tp for tp, state in checkpoint.partitions.items() if state.batch)
