"""The embedded runtime: ranges, window and acknowledgements of one source in one process.

Steps of a batch, whatever the host::

    1. cut       entries received so far -> end checkpoint; the batch is planned
    2. plan      layout of the batch; after a restart its entries are read again first
    3. read      rows of one layout partition, as often as the host likes
    4. release   the host's checkpoint is durable: forget the rows, acknowledge the entries
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import pyarrow as pa

from keyshard.arrow.columns import SCHEMA, record_batches
from keyshard.broker.port import Admin, Broker, StartPosition
from keyshard.config.source import SourceConfig
from keyshard.coordinator.available_now import AvailableNow, last_entries
from keyshard.coordinator.discovery import Discovery
from keyshard.coordinator.load_meter import LoadMeter
from keyshard.coordinator.opening import cluster_of, open_window, start_position
from keyshard.coordinator.rescale import Drainable, Rescaler
from keyshard.coordinator.settler import HolesView, Settler
from keyshard.coordinator.topics import Catalog, look
from keyshard.coordinator.watch import Watch
from keyshard.core.holes.foreign_acks import acked_elsewhere
from keyshard.core.holes.settling import Proofs
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.ring.assignment import Assignment, Rescaled, assign, slot_owners
from keyshard.core.ring.slot_load import SlotLoad
from keyshard.core.window.admission import waits_for_more
from keyshard.core.window.budget import Budget
from keyshard.core.window.partition_window import Receipt
from keyshard.errors import BatchUnknownError, BrokerError, KeyShardError, RuntimeStoppedError
from keyshard.reading.replay import replay
from keyshard.worker.acknowledger import Acknowledger
from keyshard.worker.continuity import Continuity
from keyshard.worker.range_consumers import RangeConsumers
from keyshard.worker.receiver import OwnedRange, RangeConsumer, routing_of
from keyshard.worker.reconnector import Reconnector
from keyshard.worker.subscribe import reopen_range_consumer

LET_GO_S = 1.0
"""Longest wait for the threads that the client's end lets go, seconds."""
COMPARE_AGAIN_S = 0.5
"""Pause of a range of which nothing shows yet that it is what it was, seconds."""

_log = logging.getLogger(__name__)


class Coordinator:
    """Runs one source. Methods may be called from any thread.

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
        self._lock = threading.Condition()
        self._stopping = threading.Event()
        self._error: KeyShardError | None = None
        self._load_meter: LoadMeter | None = None
        self._remembered: tuple[Assignment, Rescaled | None] | None = None
        self.changing = threading.Lock()
        """Held while consumers come and go: by discovery, and by who rescales."""
        self._gone: set[TopicPartition] = set()
        self._before: frozenset[TopicPartition] = frozenset()
        """Topic partitions of the checkpoint of the start: only its batch may be read again."""
        self._available_now: AvailableNow | None = None
        self.ahead_rows_max: int | None = None
        """Rows received and not yet taken at which receiving pauses; ``None``: never."""
        self._rows_ahead = 0
        self._ending: Checkpoint | None = None
        """A batch that was planned before the start; some of its topics may be dropped since."""
        self._watch = Watch(fail_on_misrouted=config.on_misrouted == "fail")
        self.started = False

    # -- life cycle -------------------------------------------------------------------------

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
            planned: Whether the checkpoint's batch is not committed yet; then :meth:`plan` reads
                it again.
            available_now: Whether only what is published before this call is consumed; then
                :meth:`cut_available` takes the place of :meth:`cut`.
            assignment: Who owns which ranges; default: one range for each of ``parallelism``.

        Raises:
            CheckpointMismatchError: It belongs to another subscription or cluster.
            SubscriptionInUseError: Somebody else held a range until the deadline.
            BrokerError: The broker cannot be reached, or a topic does not exist.
        """
        assert not self.started, "a coordinator is started once"
        config = self._config
        assignment = assignment or assign(config.parallelism)
        with ExitStack() as on_failure:
            if self._admin:
                on_failure.callback(self._admin.close)
            cluster = cluster_of(self._admin, config, checkpoint)
            self._broker = self._connect()
            on_failure.callback(self._broker.close)
            catalog = Catalog(self._broker, self._admin, config)
            found = look(catalog, checkpoint, config.operation_timeout_ms / 1000)
            self._gone.update(found.gone)
            self._before = frozenset(() if checkpoint is None else checkpoint.partitions)
            self._window = open_window(
                self._broker, self._admin, config, checkpoint, found,
                cluster=cluster, planned=planned, assignment=assignment,
            )  # fmt: skip
            self._range_consumers = RangeConsumers(
                self._broker, self._admin, config, self, assignment
            )
            self._range_consumers.queue_max = self._window.budget.queue_max
            self._owners = slot_owners(assignment)
            start = start_position(self._admin, config, checkpoint, found)
            range_consumers = self._range_consumers.open(found.consumed, start)
            if checkpoint is not None and planned:
                self._ending = checkpoint
                self._range_consumers.hold(
                    tp for tp in found.kept if checkpoint.partitions[tp].batch
                )
            if available_now:
                self._available_now = AvailableNow(
                    last_entries(range_consumers, config.operation_timeout_ms / 1000),
                    range_consumers, config=config, broker=self._broker, admin=self._admin,
                    lock=self._lock, window=self._window, check=self.check,
                )  # fmt: skip
            on_failure.pop_all()
        self.discovery = Discovery(
            catalog, self._admin, self, config.subscription, config.discovery_interval_ms / 1000
        )
        self._continuity = Continuity(self._broker, self._range_consumers, self._lock, self._window)
        self._acknowledger = Acknowledger(
            self._range_consumers.consumer_of, self._continuity.acknowledgeable,
            config.acknowledge_timeout_ms / 1000, self.fail,
        )  # fmt: skip
        self._settler = Settler(self._broker, self._admin, config, self)
        self._reconnector = Reconnector(
            self._broker, self._range_consumers, config, self.changing, self._continuity
        )
        self._range_consumers.serve(range_consumers)
        if not available_now:
            self.discovery.start(found.consumed, found.gone)
        self.started = True
        _log.info(
            "started: %d ranges over %d topic partitions of %s as subscription %r",
            len(assignment), len(found.consumed),
            config.topics_pattern or ", ".join(config.topics), config.subscription,
        )  # fmt: skip

    def stop(self, timeout_s: float = 5.0) -> None:
        """Hand over waiting acknowledgements, give the ranges back and disconnect. Idempotent."""
        if self._stopping.is_set():
            return
        deadline = time.monotonic() + timeout_s
        # Acknowledgements need consumers, and a rescale may just have none.
        if self.changing.acquire(timeout=timeout_s / 2):
            self.changing.release()
        self._stopping.set()
        # Wakes who waits for rows. A signal may have interrupted a call that holds the lock.
        if self._lock.acquire(timeout=0.1):
            self._lock.notify_all()
            self._lock.release()
        if not self.started:
            return
        self.discovery.stop()
        self._range_consumers.stop()
        self._settler.stop()
        self._reconnector.stop()
        self._acknowledger.stop(max(0.1, (deadline - time.monotonic()) / 2))
        self._range_consumers.join(deadline)
        threads = (self.discovery, self._settler, self._reconnector, self._acknowledger)
        for thread in threads:
            thread.join(max(0.1, deadline - time.monotonic()))
        try:
            self._broker.close()
        except BrokerError as exc:
            # All that was to be handed over is; an outage at the end is no error of this run.
            _log.warning("the end was not in order: %s", exc)
        # The client's end lets go who still waited in it.
        deadline = time.monotonic() + LET_GO_S
        self._range_consumers.join(deadline)
        for thread in threads:
            thread.join(max(0.1, deadline - time.monotonic()))
        if self._admin:
            self._admin.close()

    @property
    def broker(self) -> Broker:
        """The connection of the started source; :meth:`stop` closes it."""
        return self._broker

    @property
    def admin(self) -> Admin | None:
        """The admin interface, where there is one."""
        return self._admin

    # -- what hosts call ----------------------------------------------------------------------

    @property
    def newest(self) -> Checkpoint:
        """The newest checkpoint: of the last cut or commit, else of the start."""
        with self._lock:
            return self._window.newest

    @property
    def full(self) -> bool:
        """Whether a topic partition has no room in the window."""
        return self._window.pauses.any_full

    def cut(self, rows_max: int | None = None) -> Checkpoint | None:
        """Plan a batch of the entries received so far; ``None`` without rows. Memory only.

        Args:
            rows_max: Most rows; default ``batch_rows_max``.

        Raises:
            KeyShardError: The error that ended receiving or acknowledging, if there was one.
        """
        config = self._config
        with self._lock:
            self.check()
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
                self._watch.cut(full=self._window.pauses.any_full)
            return checkpoint

    def cut_available(self, rows_max: int | None = None) -> Checkpoint | None:
        """As :meth:`cut` in a bounded run, but waits for rows.

        ``None`` means that everything up to the targets is delivered and acknowledged; the ranges
        are given back then.

        Raises:
            AvailableNowTimeoutError: There was neither a row nor the end in time.
        """
        bounded = self._available_now
        assert bounded is not None
        if bounded.wait_for_rows(rows_max):
            return self.cut(rows_max)
        bounded.finish(self._acknowledger, self._range_consumers.receivers)
        return None

    def wait_for_rows(self, timeout_s: float) -> bool:
        """Wait until something can be cut; whether it can."""
        with self._lock:
            self._wait_for_rows(timeout_s)
            return bool(self._window.received_rows)

    def _wait_for_rows(self, timeout_s: float) -> None:
        """Wait, with the lock held, for rows or the end; raises what ended the source."""
        self._lock.wait_for(
            lambda: (
                self._window.received_rows or self._error is not None or self._stopping.is_set()
            ),
            timeout_s,
        )
        self.check()

    def take(
        self, timeout_s: float, rows_max: int | None = None
    ) -> list[tuple[TopicPartition, int, EntryBlock]]:
        """Hand out received entries to handlers; ``[]`` when nothing came in time.

        Args:
            timeout_s: Longest wait for rows, seconds.
            rows_max: About how many rows, the same of each topic partition; default: all.

        Returns:
            (topic partition, index of the range that received it, entry), in order of receipt per
            topic partition. They count against the window until :meth:`release`.

        Raises:
            KeyShardError: The error that ended the source.
        """
        with self._lock:
            self._wait_for_rows(timeout_s)
            taken = self._window.take(rows_max)
            self._rows_ahead = self._window.received_rows
            return taken

    def plan_completed(
        self, completed: Mapping[TopicPartition, Collection[EntryId]]
    ) -> dict[TopicPartition, list[EntryId]]:
        """Put entries that :meth:`take` handed out into :attr:`newest`.

        Raises:
            KeyShardError: The error that ended the source.
        """
        with self._lock:
            self.check()
            return self._window.plan_completed(completed)

    @property
    def completed(self) -> bool:
        """Whether :attr:`newest` has entries that are not acknowledged yet."""
        return bool(self._window.completed)

    def release_completed(self) -> None:
        """:attr:`newest` is durable, or there is to be no checkpoint: acknowledge its entries."""
        with self._lock:
            released = self._window.release_completed()
        self._acknowledge(released)

    def plan(self, checkpoint: Checkpoint) -> list[int]:
        """Layout partitions of the batch that ends at ``checkpoint``, ascending. Idempotent.

        A batch that was planned before a restart is read again first.

        Raises:
            BatchReleasedError: It was released.
            DataLossTrimmedError: The broker no longer stores all of it.
        """
        batch_id = checkpoint.batch_id
        with self._lock:
            self.check()
            with suppress(BatchUnknownError):
                return list(self._window.batches[batch_id].layout)
        began = time.monotonic()
        config = self._config
        entries = replay(
            self._broker,
            checkpoint,
            config.replay_timeout_ms / 1000,
            self._gone,
            fail_on_data_loss=config.fail_on_data_loss,
        )
        with self._lock:
            self._window.plan(checkpoint, entries)
            partitions = list(self._window.batches[batch_id].layout)
        _log.info("batch %s read again in %.1f s", batch_id, time.monotonic() - began)
        return partitions

    def read(
        self, batch_id: str, index: int, columns: Sequence[str] = tuple(SCHEMA.names)
    ) -> Iterator[pa.RecordBatch]:
        """Rows of one layout partition of a planned batch: the same at every call.

        Raises:
            BatchReleasedError: The batch was released.
            BatchUnknownError: It was never planned here, or has no such partition.
        """
        with self._lock:
            located = self._window.batches.partition(batch_id, index)
        return record_batches(located, columns)

    def release(self, checkpoint: Checkpoint) -> None:
        """Everything up to ``checkpoint`` is durable at the host: acknowledge it. Idempotent."""
        with self._lock:
            released = self._window.release(checkpoint)
        self._acknowledge(released)

    def _acknowledge(self, released: Mapping[TopicPartition, Sequence[EntryId]]) -> None:
        for topic_partition, entries in released.items():
            self._acknowledger.submit(topic_partition, entries)

    def status(self) -> dict[str, Any]:
        """What goes on, from memory: plain JSON values. All counts are since the start."""
        with self._lock:
            return {
                "ranges": len(self._range_consumers.assignment),
                **self._watch.status(self._window),
                "rangesPaused": self._window.pauses.for_checkpoint,
                "settlingError": self._settler.error,
                "entriesAcknowledged": self._acknowledger.acknowledged,
                "entriesToAcknowledge": self._acknowledger.waiting,
                **self.discovery.status(),
            }

    def owned_ranges(self) -> list[tuple[OwnedRange, bool, bool]]:
        """Every owned range, whether its consumer is connected, and whether it has no room."""
        return [
            (owned_range, connected, self._has_no_room(owned_range))
            for owned_range, connected in self._range_consumers.connected()
        ]

    def check(self) -> None:
        """Raise the error that ended the source, if there was one."""
        if self._error is not None:
            raise self._error
        if self._stopping.is_set():
            raise RuntimeStoppedError("The source is stopped.")

    # -- called by the receive threads ----------------------------------------------------------

    def is_paused(self, owned_range: OwnedRange) -> bool:
        return (
            (self.ahead_rows_max is not None and self._rows_ahead >= self.ahead_rows_max)
            or self._range_consumers.suspends(owned_range)
            or self._has_no_room(owned_range)
        )

    def _has_no_room(self, owned_range: OwnedRange) -> bool:
        return self._window.pauses.include(owned_range.topic_partition, owned_range.range_index)

    def deliver(self, range_consumer: RangeConsumer, entries: Sequence[EntryBlock]) -> None:
        entries = self._admitted(range_consumer, entries)
        if not entries:
            return
        owned_range = range_consumer.owned_range
        again: list[EntryId] = []
        misrouted = keyless = unreadable = 0
        for block in entries:
            outside, without_key = routing_of(block, range_consumer)
            misrouted += outside
            keyless += without_key
            if block.unreadable:
                unreadable += block.unreadable
                self._watch.unreadable(owned_range, block)
        if misrouted:
            self._watch.misrouted(owned_range, misrouted)
        with self._lock:
            if not self._range_consumers.owns(owned_range):
                return  # it is delivered again, to who owns it now
            accepted: list[EntryBlock] = []
            for block in entries:
                receipt = self._window.receive(
                    owned_range.topic_partition, owned_range.range_index, block
                )
                if receipt is Receipt.COMMITTED:
                    again.append(block.id)
                elif receipt is Receipt.ACCEPTED:
                    accepted.append(block)
            if self._load_meter is not None:
                self._load_meter.add(accepted)
            self._window.counters.misrouted += misrouted
            self._window.counters.keyless += keyless
            self._window.counters.unreadable += unreadable
            self._rows_ahead = self._window.received_rows
            was_full = self._window.pauses.any_full
            self._window.pauses.received(owned_range.topic_partition)
            if self._window.pauses.any_full and not was_full:
                self._watch.full()
            self._lock.notify_all()
        if again:
            self._acknowledger.submit(owned_range.topic_partition, again)

    def _admitted(
        self, range_consumer: RangeConsumer, entries: Sequence[EntryBlock]
    ) -> Sequence[EntryBlock]:
        """Those of some entries that are to be taken now."""
        if not self._continuity.may_receive(range_consumer.owned_range.topic_partition, entries):
            # Everything comes again to the consumer that is subscribed then.
            range_consumer.rest_until_s = time.monotonic() + COMPARE_AGAIN_S
            return ()
        if self._available_now is None:
            return entries
        return self._available_now.admit(range_consumer, entries)

    def reopen(self, range_consumer: RangeConsumer) -> None:
        reopen_range_consumer(self._broker, self._config, range_consumer, self._stopping)

    def fail(self, error: KeyShardError) -> None:
        with self._lock:
            if self._error is None and not self._stopping.is_set():
                self._error = error
            self._lock.notify_all()
        self._range_consumers.pause()
        self.discovery.stop()

    # -- called by the discovery thread ----------------------------------------------------------

    def grow(self, found: Collection[TopicPartition]) -> None:
        with self.changing:
            range_consumers = self._range_consumers.open(found, StartPosition.EARLIEST)
            with self._lock:
                for topic_partition in found:
                    self._window.add_partition(topic_partition)
                self._window.pauses.shared_anew()
                self._gone.difference_update(found)
            self._range_consumers.serve(range_consumers)

    def shrink(self, gone: Collection[TopicPartition], *, again: bool) -> None:
        with self.changing:
            self._range_consumers.drop(gone, for_others=again)
            with self._lock:
                for topic_partition in gone:
                    self._window.drop_partition(topic_partition, gone=False)
                self._window.pauses.shared_anew()
                self._gone.update(self._before.intersection(gone))

    def forget(self, gone: TopicPartition) -> None:
        with self._lock:
            self._window.drop_partition(gone, gone=True)

    def tidy(self) -> None:
        with self._lock:
            ended = self._ending is not None and self._window.batches.is_released(
                self._ending.batch_id
            )
        if ended and not self._acknowledger.waiting:
            assert self._ending is not None
            self._range_consumers.let_go(
                self._ending.partitions.keys() - set(self._window.partitions)
            )
            self._ending = None

    @property
    def epoch(self) -> int:
        """Number of the assignment generation; grows with every rescale."""
        return self._range_consumers.epoch

    # -- called by who rescales --------------------------------------------------------------------

    def rescaler(self, work: Drainable, drain_timeout_s: float) -> Rescaler:
        """Who moves ranges while the source runs; from now on the load is measured."""
        self._load_meter = LoadMeter()
        return Rescaler(
            self, self._range_consumers, self._config, self._admin,
            work=work, drain_timeout_s=drain_timeout_s,
        )  # fmt: skip

    @property
    def rescaled(self) -> Rescaled | None:
        """What the next start has to know of the ranges, to begin with these."""
        assignment = self._range_consumers.assignment
        if self._remembered is None or self._remembered[0] is not assignment:
            rescaled = Rescaled.of(self._config.parallelism, assignment)
            self._remembered = assignment, rescaled
        return self._remembered[1]

    def load(self) -> SlotLoad:
        with self._lock:
            return SlotLoad() if self._load_meter is None else self._load_meter.load()

    def adopt(self, assignment: Assignment, budget: Budget) -> list[int]:
        with self._lock:
            self._owners = slot_owners(assignment)
            self._window.reassign(self._owners, budget)
            return self._owners

    # -- called by the settler's thread ------------------------------------------------------------

    def holes_views(self) -> dict[TopicPartition, HolesView]:
        with self._lock:
            parts = {tp: self._window.known[tp] for tp in self._window.partitions}
            return {
                tp: HolesView(part.state, set(part.held), part.tight)
                for tp, part in parts.items()
                if part.holes
            }

    def prove(self, topic_partition: TopicPartition, proofs: Proofs, owed: frozenset[int]) -> None:
        with self._lock:
            owners = frozenset(map(self._owners.__getitem__, owed))
            self._window.prove(topic_partition, proofs, owners)
            self._lock.notify_all()

    def lost(self, topic_partition: TopicPartition, entries: EntrySet) -> None:
        error = acked_elsewhere(topic_partition, self._config.subscription, entries)
        if self._config.fail_on_data_loss:
            self.fail(error)
            return
        _log.warning("%s Settled, because fail_on_data_loss is false.", error)
        with self._lock:
            self._window.counters.entries_lost += len(entries)
