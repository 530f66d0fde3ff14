"""Runs a handler over a source: receives, dispatches by key, retries, commits, acknowledges.

Steps of a message::

    1. take      the coordinator hands out received entries; their messages queue by key
    2. next      an executor takes the oldest message of a key that no lane works on
    3. finish    completed, retried in its lane, or given up by the failure policy
    4. commit    entries whose messages are all completed: checkpoint, then acknowledge
"""

from __future__ import annotations

import logging
import os
import threading
import time
from asyncio import AbstractEventLoop
from collections.abc import Sequence
from contextlib import suppress

from keyshard.config.handlers import WORKERS_MAX, HandlerConfig
from keyshard.config.sink import SinkConfig
from keyshard.config.source import SourceConfig
from keyshard.coordinator.coordinator import Coordinator
from keyshard.coordinator.rescale import Rescaler
from keyshard.coordinator.startup import first_assignment
from keyshard.core.lanes.lanes import Lanes
from keyshard.core.message import HandlerContext, MessageId
from keyshard.core.metadata_columns import refuse_for_handlers
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.outputs import check_owner
from keyshard.core.ring.assignment import slot_owners
from keyshard.core.ring.hash_range import range_index
from keyshard.dead_letters.startup import (
    check_dead_letter_topic,
    find_dead_letter_topic,
    open_dead_letters,
)
from keyshard.errors import (
    KeyShardError,
    NotRunningError,
    RuntimeStoppedError,
    ThreadStartError,
)
from keyshard.handlers.async_executor import AsyncExecutor
from keyshard.handlers.checkpoint_store import CheckpointStore
from keyshard.handlers.dispatcher import Dispatcher, LanePause
from keyshard.handlers.entry_run import Committer
from keyshard.handlers.executors import Executor, ThreadExecutor
from keyshard.handlers.failed_messages import FailedMessages
from keyshard.handlers.handler_call import (
    Handle,
    HandlerCall,
    calling_async,
    executor_of,
    published,
    unpublished,
)
from keyshard.handlers.lane_facts import LaneFacts
from keyshard.handlers.lane_feeder import LaneFeeder
from keyshard.handlers.logged_outputs import LoggedOutputs
from keyshard.handlers.outcomes import FailureLog, Observer, Observers
from keyshard.handlers.outputs import SentOutputs
from keyshard.handlers.process_executor import ProcessExecutor
from keyshard.handlers.stop_signals import stopping_signals, stopping_with_program
from keyshard.observe.monitor import Monitor
from keyshard.observe.observed_run import ObservedRun
from keyshard.observe.page.options import PageOptions
from keyshard.observe.status import StatusView
from keyshard.observe.status_types import Status
from keyshard.observe.telemetry import Telemetry
from keyshard.reading.message_decoder import MessageDecoder
from keyshard.threads import begin, owned_by, unexpected

COMMIT_INTERVAL_S = 0.05
"""Shortest time between two commits, seconds."""
DRAIN_LOOK_S = 0.005
"""Interval at which a drain checks whether all started entries are completed, seconds."""
MOVES_S = 5.0
"""Longest wait of a stop for ranges that move, seconds. If the broker is unreachable, a move can
take long, and the messages of its keys are handled only after it."""
START_S = 2.0
"""Longest wait of a stop for a start in progress, seconds; then the start is disconnected."""
STOP_S = 10.0
"""Longest time between the end of the handlers and the end of a run, seconds."""
COMMIT_BYTES_PER_S = 16 * 1024 * 1024
"""Maximum size of checkpoints written per second, bytes: a large one delays the next commit."""
COMMIT_SHARE_MAX = 0.25
"""Largest share of a processor's time for commits: an expensive commit delays the next one. Waiting
for the disk does not count. Entries that are not committed are redelivered after a crash."""

_log = logging.getLogger(__name__)


class HandlerRun:
    """One run of one handler over one source, in this process.

    Args:
        coordinator: Coordinator of the source, not started.
        config: Options of the source.
        handling: Options of the handler.
        handle: The handler, ``def`` or ``async def``.
        observers: Called on every attempt.
        sink: Publishes the messages that the handler produces; ``None``: there are none.
        loop: Runs coroutines; ``None``: an event loop in a thread of its own.

    Raises:
        ConfigError: The handler does not fit its executor, or the source selects columns.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        config: SourceConfig,
        handling: HandlerConfig,
        handle: Handle,
        observers: Sequence[Observer] = (),
        *,
        sink: SinkConfig | None = None,
        loop: AbstractEventLoop | None = None,
    ) -> None:
        refuse_for_handlers(config.metadata_columns)
        self.coordinator = coordinator
        self._config = config
        self._handling = handling
        self._handle = handle
        self._loop = loop
        self.drain_timeout_s = handling.drain_timeout_s
        """Longest wait for running handlers at a stop, seconds; 0 once it is abandoned."""
        self.abandoned = False
        """Whether the run no longer waits for running handlers."""
        self._observers = Observers(observers, self._observer_raised)
        followed = handling.telemetry or config.telemetry
        self._telemetry = Telemetry(config.how_to_connect().address) if followed else None
        self._outputs_topic = None if sink is None else sink.topic
        self._take = unpublished if sink is None else published
        self._mode = executor_of(handle, handling.executor, self._take)
        self._store = None if handling.checkpoint is None else CheckpointStore(handling.checkpoint)
        ranges = config.parallelism
        self.lanes = Lanes(
            ranges, handling.lanes, lambda slot: range_index(slot, ranges),
            serialise_keyless=handling.null_keys == "serialise",
        )  # fmt: skip
        self._outcomes = FailureLog()
        self._dispatcher = Dispatcher(self.lanes, handling, self._outcomes)
        self._context = HandlerContext(MessageDecoder.of(config), self._dispatcher.notes.take)
        self._calling = HandlerCall(handle, self._context, self._take)
        self._sent = self._logged = None
        if sink is not None and handling.checkpoint is None:
            self._dispatcher.outputs = self._sent = SentOutputs(self._dispatcher, sink)
        elif sink is not None:
            self._dispatcher.outputs = self._logged = LoggedOutputs(self._dispatcher, sink)
        self.changed = self._dispatcher.changed
        self._unreadable: dict[tuple[TopicPartition, MessageId], str] = {}
        coordinator.unreadable = self._is_unreadable
        self._feeder = LaneFeeder(coordinator, self._dispatcher)
        self._monitor: Monitor | None = None
        self._commit_at_s = 0.0
        self._turned_s = time.monotonic()
        check_dead_letter_topic(config, handling.dead_letter_topic)
        self._parked: FailedMessages | None = None
        self._executor: Executor | None = None
        self._start_ended = threading.Event()
        self._abandoning = False
        self.rescaler: Rescaler | None = None
        """Moves ranges; set once the run has started."""
        self._subject = ObservedRun(
            config, coordinator,
            LaneFacts(self._dispatcher),
            executor=self._mode,
            workers=lambda: 0 if self._executor is None else self._executor.count,
            workers_max=self._workers_max,
            stopping=lambda: self._dispatcher.stopping,
            rescaler=lambda: self.rescaler,
            turned_s=lambda: self._turned_s,
            parked=lambda: None if self._parked is None else self._parked.keys,
            dead_letters=self.dead_letters,
        )  # fmt: skip

    # -- for the user's thread ------------------------------------------------------------------

    def run(self) -> None:
        """Handle messages until :meth:`stop`, SIGTERM, Ctrl-C, or an error.

        Raises:
            KeyShardError: The error that ended the source.
        """
        with (
            owned_by(self.coordinator.fail),
            stopping_with_program(self.stop, self._handling.drain_timeout_s + STOP_S),
            stopping_signals(self.stop),
        ):
            self._run()

    def _run(self) -> None:
        handling = self._handling
        port = handling.metrics_port
        try:
            self._monitor = Monitor(
                self._subject,
                None if port is None else (handling.metrics_host, port),
                None
                if handling.ui_port is None
                else PageOptions(handling.ui_host, handling.ui_port, handling.ui_token),
            )
            if self._started():
                self._work()
        finally:
            self._end_executor(0.0)
            if self._dispatcher.outputs is not None:
                self._dispatcher.outputs.close()
            if self._monitor is not None:
                self._monitor.close()
            self.coordinator.stop()
            if self._store is not None:
                self._store.close()
        if self._dispatcher.error is not None:
            raise self._dispatcher.error

    def _started(self) -> bool:
        """Start the source; ``False`` if it was stopped meanwhile."""
        try:
            self._start()
        except KeyShardError as exc:
            if not self._dispatcher.stopping:
                self.coordinator.check()
                raise
            _log.info("stopped during the start of the source: %s", exc.summary)
            return False
        finally:
            self._start_ended.set()
        return True

    def _work(self) -> None:
        """Handle messages until a stop or an error, then drain."""
        try:
            while not self._dispatcher.stopping:
                self._turn()
        except Exception as exc:  # noqa: BLE001 - the error ends the source
            self._dispatcher.fail(unexpected("Handling", exc))
        finally:
            self._drain()

    def stop(self) -> None:
        """Begin no new entry; finish and commit the entries that have started.

        A start in progress is abandoned. Returns at once. Any thread or signal handler may call
        it.
        """
        self._dispatcher.stopping = True
        if not self._start_ended.is_set() and not self._abandoning:
            self._abandoning = True
            with suppress(ThreadStartError):
                begin("keyshard-abandon", self._abandon)

    def abandon(self) -> None:
        """Stop, without waiting for running handlers: their messages are redelivered."""
        self.abandoned, self.drain_timeout_s = True, 0.0
        self.stop()

    def _abandon(self) -> None:
        if not self._start_ended.wait(START_S):
            if self._dispatcher.outputs is not None:
                self._dispatcher.outputs.abandon()
            self.coordinator.abandon_start()

    def dead_letters(self) -> FailedMessages:
        """Return the dead letters of the started run.

        Raises:
            NotRunningError: The source is starting.
        """
        if self._parked is None:
            raise NotRunningError(
                "The source is starting, and its parked keys are not known yet.", "Try again later."
            )
        return self._parked

    def status(self) -> Status:
        """Return the status as plain JSON values."""
        view = StatusView(self._subject, None) if self._monitor is None else self._monitor.view
        return view.status()

    def not_ready(self) -> str:
        """Return why the source does not take messages; empty if it does."""
        return (
            "The source is starting." if self._monitor is None else self._monitor.view.not_ready()
        )

    @property
    def _dead_letters(self) -> FailedMessages:
        assert self._parked is not None, "handlers run after the dead letters were read"
        return self._parked

    @property
    def _started_executor(self) -> Executor:
        assert self._executor is not None, "what may ask for them comes after they are made"
        return self._executor

    # -- called by its parts -----------------------------------------------------------------------

    def _is_unreadable(self, where: TopicPartition, entry_id: EntryId, why: str) -> None:
        self._unreadable[where, MessageId(*entry_id, 0)] = why

    def _observer_raised(self) -> None:
        with self.changed:
            self._dispatcher.tally.observer_errors += 1

    def _moved(self) -> None:
        """Adapt to moved ranges, whose number may have grown; called with ``changed`` held."""
        if self._handling.workers is None:
            self._started_executor.grow(self._lane_count)
        self._dispatcher.wake()

    # -- the run's own thread ----------------------------------------------------------------------

    def _start(self) -> None:
        checkpoint = None if self._store is None else self._store.open()
        assignment = first_assignment(self._config, checkpoint)
        if self._sent is not None:
            self._sent.open()
        if self._logged is not None:
            self._logged.open(checkpoint)
            self._feeder.handled = self._logged.log.handled
        else:
            check_owner(None if checkpoint is None else checkpoint.outputs, None)
        with self.changed:
            self.lanes.reassign(len(assignment), slot_owners(assignment).__getitem__)
        self._executor = self._dispatcher.executor = self._make_executor()
        coordinator = self.coordinator
        coordinator.measures_load = True
        coordinator.start(checkpoint, assignment=assignment)
        known = None if checkpoint is None else checkpoint.parked
        topic, known = find_dead_letter_topic(
            coordinator.broker, coordinator.admin, self._config,
            self._handling.dead_letter_topic, known, check=coordinator.check,
        )  # fmt: skip
        dead_letters = open_dead_letters(
            coordinator.broker, topic, self._config, known,
            checkpointed=self._store is not None,
            needed=self._handling.writes_dead_letters or bool(self._config.parked),
            admin=coordinator.admin,
            fail=coordinator.consumers.shared.fail, check=coordinator.check,
        )  # fmt: skip
        self._committer = Committer(coordinator, self._store, checkpoint, dead_letters)
        if self._logged is None:
            self._feeder.handled = self._committer.handled
        self._parked = self._dispatcher.parking = FailedMessages(
            self._dispatcher, dead_letters, self._handling, self._config.subscription,
            self._outcomes, unreadable=self._unreadable,
        )  # fmt: skip
        self.rescaler = coordinator.rescaler(
            LanePause(self._dispatcher, self._moved), self._handling.drain_timeout_s
        )
        _log.info(
            "started: %d lanes in each range, %d concurrent handlers (%s), %s checkpoint",
            self.lanes.lanes, self._started_executor.count, self._mode,
            "without a" if self._store is None else "with a",
        )  # fmt: skip

    @property
    def _lane_count(self) -> int:
        """Maximum number of threads that can run handlers: one for each lane."""
        return min(WORKERS_MAX, self.lanes.ranges * self._handling.lanes)

    @property
    def _workers_max(self) -> int | None:
        """Maximum number of concurrent handlers, for any number of lanes; ``None``: no limit."""
        if self._mode == "async":
            return self._handling.workers
        return self._handling.workers or (
            os.cpu_count() or 1 if self._mode == "processes" else WORKERS_MAX
        )

    def _make_executor(self) -> Executor:
        handling = self._handling
        if self._mode == "async":
            call = calling_async(self._handle, self._context, self._take)
            if self._telemetry is not None:
                call = self._telemetry.processed_async(
                    call, self._config.subscription, self._outputs_topic
                )
            call = self._observers.observed_async(call)
            return AsyncExecutor(self._dispatcher, call, handling.workers, self._loop)
        if self._mode == "processes":
            count = handling.workers or os.cpu_count() or 1
            return ProcessExecutor(
                self._dispatcher, count, self._handle, self._observed, self._context,
                take=self._take,
            )  # fmt: skip
        handle = self._observed(self._calling)
        return ThreadExecutor(
            self._dispatcher, handling.workers or self._lane_count, lambda: handle
        )

    def _observed(self, handle: Handle) -> Handle:
        """Wrap a call of the handler in its span, and in the calls of observers."""
        if self._telemetry is not None:
            handle = self._telemetry.processed(
                handle, self._config.subscription, self._outputs_topic
            )
        return self._observers.observed(handle)

    def _turn(self) -> None:
        self._turned_s = time.monotonic()
        if not self._started_executor.look():
            raise RuntimeStoppedError(
                "The event loop that runs the handlers was closed, so the source stops. Messages "
                "that were not done are delivered again.",
                "Let the coroutine that consumes the source end before the event loop.",
            )
        is_full = self._feeder.turn()
        with self.changed:
            self._dispatcher.look(is_full=is_full)
            self._dispatcher.wake()
        if self._waits and time.monotonic() >= self._commit_at_s:
            self._commit()

    @property
    def _waits(self) -> bool:
        """Whether there is a commit to make. First releases one whose outputs are confirmed."""
        logged = self._logged
        if logged is not None and logged.settled():
            self._committer.release()
        with self.changed:
            waits = bool(self.lanes.completed_entries) or self._committer.behind
            if logged is None:
                return waits or bool(self.lanes.done_apart)
            return not logged.busy and (waits or logged.waiting or logged.log.unsaved)

    def _commit(self, *, last: bool = False) -> None:
        began_s = time.thread_time()
        with self.changed:
            completed = self.lanes.pop_completed()
            done_apart, self.lanes.done_apart = self.lanes.done_apart, []
            if self._logged is not None:
                self._logged.begin()
        if self._logged is None:
            self._committer.note(done_apart)
        if left := self._committer.plan(completed, last=last):
            with self.changed:
                self.lanes.put_back(left)
        if self._logged is None:
            self._committer.store()
        else:
            planned = {at: set(ids) - set(left.get(at, ())) for at, ids in completed.items()}
            self._committer.save(self._logged.prepared(planned, done_apart))
            self._logged.publish()
        spent_s = time.thread_time() - began_s
        self._commit_at_s = time.monotonic() + max(
            COMMIT_INTERVAL_S,
            spent_s / COMMIT_SHARE_MAX,
            self._committer.stored_bytes / COMMIT_BYTES_PER_S,
        )

    def _drain(self) -> None:
        """Let handlers finish the entries that have started, and commit the completed ones."""
        self._dispatcher.stopping = True
        began_s = time.monotonic()
        with self.changed:
            self._dispatcher.drain()
            running = len(self.lanes.running)
        _log.info(
            "stopping: %d handlers are running, and have %g s to finish",
            running, self.drain_timeout_s,
        )  # fmt: skip
        while True:
            deadline = began_s + self.drain_timeout_s
            if time.monotonic() >= deadline or not self._unfinished(deadline, began_s + MOVES_S):
                break
            try:
                if self._logged is not None and self._waits:
                    self._commit()
            except Exception as exc:  # noqa: BLE001 - handlers that run have to end nevertheless
                self._dispatcher.fail(unexpected("Handling", exc))
            time.sleep(DRAIN_LOOK_S)
        ended = self._end_executor(max(0.0, deadline - time.monotonic()))
        self._dead_letters.close(max(0.1, deadline - time.monotonic()))
        if not ended:
            with self.changed:
                for work in self.lanes.running.values():
                    _log.warning(
                        "the handler of message %s of %s, key %r, did not return within %g s: "
                        "keyshard abandons it, and the message is delivered again",
                        work.message.message_id, work.message.topic, work.queue.key,
                        self.drain_timeout_s,
                    )  # fmt: skip
        try:
            with suppress(RuntimeStoppedError):
                self._commit_rest(deadline)
        finally:
            self._dead_letters.dead_letters.close()
        tally = self._dispatcher.tally
        _log.info(
            "drained in %.1f s: %d messages completed since the start, %d attempts failed, %d "
            "messages dead-lettered",
            time.monotonic() - began_s, tally.completed, tally.failed_attempts, tally.dead_lettered,
        )  # fmt: skip

    def _commit_rest(self, deadline_s: float) -> None:
        """Commit all completed entries, and wait for the confirmations of their outputs."""
        while True:
            if self._waits:
                self._commit(last=True)
            if self._logged is None or not (self._logged.busy or self._waits):
                return
            if self._dispatcher.error is not None or time.monotonic() >= deadline_s:
                _log.warning("the last outputs are not confirmed; they follow after the next start")
                return
            time.sleep(DRAIN_LOOK_S)

    def _unfinished(self, deadline_s: float, moved_s: float) -> bool:
        """Whether waiting may complete a started entry; also wakes executors for such entries."""
        if not self._started_executor.look():
            return False
        with self.changed:
            self._dispatcher.drain()
            stuck = self._logged is not None and self._logged.stuck
            if stuck or not self._dispatcher.circuit.closed:
                # No handler starts, or no entry is committed: started entries are redelivered.
                return any(not (stuck and work.publishing) for work in self.lanes.running.values())
            self._dispatcher.wake()
            # After an error there is no time for retries.
            until_s = deadline_s if self._dispatcher.error is None else 0.0
            return self.lanes.unfinished(until_s, held=time.monotonic() < moved_s)

    def _end_executor(self, timeout_s: float) -> bool:
        """Close the dispatcher. Return whether all handlers have ended in time. Idempotent."""
        self._dispatcher.stopping = True
        if self._dispatcher.closed or self._executor is None:
            return True
        self._dispatcher.closed = True
        ended = self._started_executor.close(timeout_s)
        self._calling.close()
        return ended
