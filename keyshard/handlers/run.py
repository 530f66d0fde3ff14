"""Runs a handler over a source: receive, hand out by key, retry in place, commit, acknowledge.

Steps of a message::

    1. take      the coordinator hands out received entries; their messages queue by key
    2. next      a worker takes the oldest message of a key that no other works on
    3. finish    completed, or tried again in its lane, or given up by the failure policy
    4. commit    entries all of whose messages are done: checkpoint, then acknowledge
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from keyshard.config.handlers import WORKERS_MAX, HandlerConfig
from keyshard.config.source import SourceConfig
from keyshard.coordinator.coordinator import Coordinator
from keyshard.coordinator.opening import first_assignment
from keyshard.coordinator.rescale import Rescaler
from keyshard.core.dead_letter.letters import Letter
from keyshard.core.dead_letter.selection import Selection
from keyshard.core.lanes.failure import text_of
from keyshard.core.lanes.lanes import Lanes
from keyshard.core.message import MessageId
from keyshard.core.metadata_columns import refuse_for_handlers
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.ring.assignment import slot_owners
from keyshard.core.ring.hash_range import range_index
from keyshard.dead_letter.opening import open_dead_letters
from keyshard.dead_letter.topic import check_dead_letter_topic, find_dead_letter_topic
from keyshard.errors import (
    ConfigError,
    KeyShardError,
    NotRunningError,
    RuntimeStoppedError,
    ThreadStartError,
)
from keyshard.handlers.calling import Calling, Handle, calling_async, check_fits, is_async
from keyshard.handlers.checkpoint_store import CheckpointStore
from keyshard.handlers.committer import Committer
from keyshard.handlers.executors import AsyncWorkers, ThreadWorkers, Workers
from keyshard.handlers.feeder import Feeder
from keyshard.handlers.lane_desk import LaneDesk
from keyshard.handlers.lane_facts import LaneFacts
from keyshard.handlers.lane_moves import LaneMoves
from keyshard.handlers.observing import Observer, Observers
from keyshard.handlers.outcome_log import OutcomeLog
from keyshard.handlers.parked_lanes import ParkedLanes
from keyshard.handlers.processes import ProcessWorkers
from keyshard.handlers.stop_signals import stopping_signals, stopping_with_program
from keyshard.observe.monitor import Monitor
from keyshard.observe.status import StatusView, Subject
from keyshard.observe.status_types import Status
from keyshard.reading.message_data import MessageData
from keyshard.threads import begin, owned_by, unexpected

COMMIT_INTERVAL_S = 0.05
"""Shortest time between two commits, seconds."""
DRAIN_LOOK_S = 0.005
"""Time between two looks whether all entries that have begun are whole, seconds."""
MOVES_S = 5.0
"""Longest wait of a stop for ranges that move, seconds: the broker may be away, and what is held
meanwhile can be handled only when that has come to an end."""
START_S = 2.0
"""Longest wait of a stop for a start that is under way; then that loses its connection, seconds."""
STOP_S = 10.0
"""Longest time between the end of handlers and the end of a run, seconds."""
COMMIT_BYTES_PER_S = 16 * 1024 * 1024
"""Most bytes of checkpoints that are written in a second: a large one makes the next come later."""
COMMIT_SHARE_MAX = 0.25
"""Most of a processor's time that commits may take: a costly one makes the next come later. Waiting
for the disk does not count: what is not committed yet comes again after a crash."""

_log = logging.getLogger(__name__)


class HandlerRun:
    """One run of one handler over one source, in this process.

    Args:
        coordinator: The source, not started.
        config: The source.
        handling: How the handler is run.
        handle: The handler, ``def`` or ``async def``.
        observers: Who is told about every attempt.

    Raises:
        ConfigError: The handler does not fit its executor, or the source wants columns.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        config: SourceConfig,
        handling: HandlerConfig,
        handle: Handle,
        observers: Sequence[Observer] = (),
    ) -> None:
        refuse_for_handlers(config.metadata_columns)
        self._coordinator = coordinator
        self._config = config
        self._handling = handling
        self._handle = handle
        self._observers = Observers(observers, self._observer_raised)
        self._mode = _mode(handling.executor, handle)
        self._read_data = MessageData.of(config)
        self._calling = Calling(handle, self._read_data)
        self._store = None if handling.checkpoint is None else CheckpointStore(handling.checkpoint)
        ranges = config.parallelism
        self.lanes = Lanes(
            ranges,
            handling.lanes,
            lambda slot: range_index(slot, ranges),
            serialise_keyless=handling.null_keys == "serialise",
        )
        self._outcomes = OutcomeLog()
        self._desk = LaneDesk(self.lanes, handling, self._outcomes)
        self.changed = self._desk.changed
        self._unreadable: dict[tuple[TopicPartition, MessageId], str] = {}
        coordinator.unreadable = self._is_unreadable
        self._feeder = Feeder(coordinator, self.lanes, self.changed, self._desk.wake)
        self._monitor: Monitor | None = None
        self._commit_at_s = 0.0
        self._turned_s = time.monotonic()
        check_dead_letter_topic(config, handling.dead_letter_topic)
        self._parked: ParkedLanes | None = None
        self._made: Workers | None = None
        self._start_ended = threading.Event()
        self._abandoning = False
        self.rescaler: Rescaler | None = None
        """Moves ranges, once the run has started."""
        self._subject = Subject(
            config, coordinator,
            LaneFacts(self.lanes, self._desk.tally, self._desk.circuit, self.changed),
            executor=self._mode,
            workers=lambda: 0 if self._made is None else self._made.count,
            workers_max=self._workers_max,
            stopping=lambda: self._desk.stopping,
            rescaler=lambda: self.rescaler,
            turned_s=lambda: self._turned_s,
            parked=lambda: None if self._parked is None else self._parked.keys,
            unpark=self.unpark,
            discard=self.discard,
            first_letter=self.first_letter,
        )  # fmt: skip

    # -- for the user's thread ------------------------------------------------------------------

    def run(self) -> None:
        """Handle messages until :meth:`stop`, SIGTERM, Ctrl-C, or an error.

        Raises:
            KeyShardError: What ended the source.
        """
        with (
            owned_by(self._coordinator.fail),
            stopping_with_program(self.stop, self._handling.drain_timeout_s + STOP_S),
            stopping_signals(self.stop),
        ):
            self._run()

    def _run(self) -> None:
        handling = self._handling
        port = handling.metrics_port
        try:
            self._monitor = Monitor(
                self._subject, None if port is None else (handling.metrics_host, port)
            )
            if self._started():
                self._work()
        finally:
            self._end_workers(0.0)
            if self._monitor is not None:
                self._monitor.close()
            self._coordinator.stop()
            if self._store is not None:
                self._store.close()
        if self._desk.error is not None:
            raise self._desk.error

    def _started(self) -> bool:
        """Start, unless it is stopped meanwhile; whether it has started."""
        try:
            self._start()
        except KeyShardError as exc:
            if not self._desk.stopping:
                raise
            _log.info("stopped while the source started: %s", exc)
            return False
        finally:
            self._start_ended.set()
        return True

    def _work(self) -> None:
        """Handle messages until it is stopped or fails, then drain."""
        try:
            while not self._desk.stopping:
                self._turn()
        except Exception as exc:  # noqa: BLE001 - it ends the source by name
            self._desk.fail(unexpected("Handling", exc))
        finally:
            self._drain()

    def stop(self) -> None:
        """Begin no entry any more; those that have begun are finished and committed.

        A start that is under way is given up. Returns at once, may be called from any thread and
        from a signal handler.
        """
        self._desk.stopping = True
        if not self._start_ended.is_set() and not self._abandoning:
            self._abandoning = True
            with suppress(ThreadStartError):
                begin("keyshard-abandon", self._abandon)

    def _abandon(self) -> None:
        if not self._start_ended.wait(START_S):
            self._coordinator.abandon_start()

    def unpark(self, selection: Selection) -> int:
        """Let parked keys out; how many are on their way. Returns at once."""
        return self._started_letters.unpark(selection)

    def discard(self, selection: Selection, *, rejected: bool, count_only: bool = False) -> int:
        """Give dead letters up, or only count them; how many."""
        letters = self._started_letters
        return letters.discard(selection, rejected=rejected, count_only=count_only)

    def first_letter(self, key: str, timeout_s: float) -> Letter | None:
        """Read the first dead letter of a parked key."""
        return self._started_letters.letters.peek(key, timeout_s)

    @property
    def _started_letters(self) -> ParkedLanes:
        if self._parked is None:
            raise NotRunningError("The source is starting; its parked keys are not known yet.")
        return self._parked

    def status(self) -> Status:
        """What goes on, as plain JSON values."""
        view = StatusView(self._subject, None) if self._monitor is None else self._monitor.view
        return view.status()

    @property
    def _letters(self) -> ParkedLanes:
        assert self._parked is not None, "handlers run after the dead letters were read"
        return self._parked

    @property
    def _workers(self) -> Workers:
        assert self._made is not None, "what may ask for them comes after they are made"
        return self._made

    # -- told by its parts -------------------------------------------------------------------------

    def _is_unreadable(self, where: TopicPartition, entry_id: EntryId, why: str) -> None:
        self._unreadable[where, MessageId(*entry_id, 0)] = why

    def _observer_raised(self) -> None:
        with self.changed:
            self._desk.tally.observer_errors += 1

    def _moved(self) -> None:
        """Ranges have moved, and there may be more of them; called with ``changed`` held."""
        if self._handling.workers is None:
            self._workers.grow(self._places)
        self._desk.wake()

    # -- the run's own thread ----------------------------------------------------------------------

    def _start(self) -> None:
        checkpoint = None if self._store is None else self._store.open()
        assignment = first_assignment(self._config, checkpoint)
        with self.changed:
            self.lanes.reassign(len(assignment), slot_owners(assignment).__getitem__)
        self._made = self._desk.workers = self._make_workers()
        self._coordinator.start(checkpoint, assignment=assignment)
        coordinator, known = self._coordinator, None if checkpoint is None else checkpoint.parked
        topic, known = find_dead_letter_topic(
            coordinator.broker, coordinator.admin, self._config,
            self._handling.dead_letter_topic, known,
        )  # fmt: skip
        letters = open_dead_letters(
            coordinator.broker,
            topic,
            self._config,
            known,
            checkpointed=self._store is not None,
            fail=coordinator.worker.shared.fail,
        )
        self._committer = Committer(self._coordinator, self._store, checkpoint, letters)
        self._parked = self._desk.parking = ParkedLanes(
            self._desk, letters, self._handling, self._config.subscription, self._outcomes,
            unreadable=self._unreadable,
        )  # fmt: skip
        self.rescaler = self._coordinator.rescaler(
            LaneMoves(self.lanes, self.changed, self._moved), self._handling.drain_timeout_s
        )
        _log.info(
            "handling: %d lanes in each range, %d workers (%s), %s checkpoint",
            self.lanes.lanes, self._workers.count, self._mode,
            "without a" if self._store is None else "with a",
        )  # fmt: skip

    @property
    def _places(self) -> int:
        """Most threads that handlers run in: one for each lane."""
        return min(WORKERS_MAX, self.lanes.ranges * self._handling.lanes)

    @property
    def _workers_max(self) -> int | None:
        """Handlers at the same time, however many lanes there are; ``None``: no limit."""
        if self._mode == "async":
            return self._handling.workers
        return self._handling.workers or (
            os.cpu_count() or 1 if self._mode == "processes" else WORKERS_MAX
        )

    def _make_workers(self) -> Workers:
        handling, observers = self._handling, self._observers
        if self._mode == "async":
            return AsyncWorkers(
                self._desk, observers.observed_async(calling_async(self._handle, self._read_data)),
                handling.workers,
            )  # fmt: skip
        if self._mode == "processes":
            count = handling.workers or os.cpu_count() or 1
            return ProcessWorkers(
                self._desk, count, self._handle, observers.observed, self._read_data
            )
        handle = observers.observed(self._calling)
        return ThreadWorkers(self._desk, handling.workers or self._places, lambda: handle)

    def _turn(self) -> None:
        self._turned_s = time.monotonic()
        is_full = self._feeder.turn()
        with self.changed:
            self._desk.look(is_full=is_full)
            self._desk.wake()
            waits = self.lanes.completed_entries or self._committer.behind
        if waits and time.monotonic() >= self._commit_at_s:
            self._commit()

    def _commit(self) -> None:
        began_s = time.thread_time()
        with self.changed:
            completed = self.lanes.pop_completed()
        left = self._committer.plan(completed)
        if left:
            with self.changed:
                self.lanes.put_back(left)
        self._committer.store()
        spent_s = time.thread_time() - began_s
        self._commit_at_s = time.monotonic() + max(
            COMMIT_INTERVAL_S,
            spent_s / COMMIT_SHARE_MAX,
            self._committer.stored_bytes / COMMIT_BYTES_PER_S,
        )

    def _drain(self) -> None:
        """Let handlers finish the entries that have begun, and commit what they completed."""
        self._desk.stopping = True
        began_s = time.monotonic()
        deadline = began_s + self._handling.drain_timeout_s
        with self.changed:
            running = len(self.lanes.running)
        _log.info(
            "stopping: %d messages are with handlers, which have %.0f s to finish",
            running, self._handling.drain_timeout_s,
        )  # fmt: skip
        moved = min(deadline, began_s + MOVES_S)
        while self._unfinished(deadline, moved) and time.monotonic() < deadline:
            time.sleep(DRAIN_LOOK_S)
        ended = self._end_workers(max(0.0, deadline - time.monotonic()))
        self._letters.close(max(0.1, deadline - time.monotonic()))
        if not ended:
            with self.changed:
                for work in self.lanes.running.values():
                    _log.warning(
                        "the handler of message %s of %s, key %r, did not end within %.0f s: it is "
                        "left behind, and the message comes again",
                        work.message.message_id, work.message.topic, work.queue.key,
                        self._handling.drain_timeout_s,
                    )  # fmt: skip
        try:
            if self.lanes.completed_entries or self._committer.behind:
                self._commit()
        except RuntimeStoppedError:
            pass
        finally:
            self._letters.letters.close()
        counters = self._desk.tally.counters()
        _log.info(
            "drained in %.1f s: %d messages completed since the start, %d attempts failed, %d "
            "messages dead-lettered",
            time.monotonic() - began_s,
            counters["completed"], counters["failedAttempts"], counters["deadLettered"],
        )  # fmt: skip

    def _unfinished(self, deadline_s: float, moved_s: float) -> bool:
        """Whether waiting may complete an entry that has begun; lets workers go on with them."""
        with self.changed:
            self.lanes.drain()
            if not self._desk.circuit.closed:
                # Nothing more can be handled: what has begun comes again.
                return bool(self.lanes.running)
            self._desk.wake()
            # An error has no time for retries.
            until_s = deadline_s if self._desk.error is None else 0.0
            return self.lanes.unfinished(until_s, held=time.monotonic() < moved_s)

    def _end_workers(self, timeout_s: float) -> bool:
        """Hand out nothing more; whether all handlers have ended in time. Idempotent."""
        self._desk.stopping = True
        if self._desk.closed or self._made is None:
            return True
        self._desk.closed = True
        ended = self._workers.close(timeout_s)
        self._calling.close()
        return ended


def _mode(executor: str, handle: Handle) -> str:
    check_fits(handle)
    coroutines = is_async(handle)
    if executor == "auto":
        return "async" if coroutines else "threads"
    if coroutines != (executor == "async"):
        kind = "an async function" if coroutines else "a plain function"
        raise ConfigError(
            f"The handler {text_of(handle)} is {kind}, and executor is {executor!r}. Leave "
            "executor out, or give a handler that fits it."
        )
    return executor
