"""A Ray job: this process receives and acknowledges, actors compute, the caller takes results.

::

    receive   entries -> rows that wait for actors     until the window of the source is full
    feed      rows -> actor -> results                 a thread for each actor, one call at a time
    take      results -> the caller                    at most two calls of each actor untaken
    commit    entries whose results were taken -> checkpoint -> acknowledged
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

from keyshard import KeyShardSource, RetryPolicy
from keyshard.config.sink import SinkConfig, check_sink_of
from keyshard.coordinator.recorded_rescale import Outcome, RecordedRescale
from keyshard.core.lanes.rate_limit import RateLimit
from keyshard.core.metadata_columns import refuse_for_handlers
from keyshard.core.option_checks import check_integer, check_seconds, suggesting
from keyshard.core.rescale_history import Rescale, RescaleEnd
from keyshard.core.ring.assignment import assign, moved_slots
from keyshard.core.ring.hash_range import RING_SIZE
from keyshard.errors import ConfigError, NotRunningError
from keyshard.handlers.entry_run import EntryRun
from keyshard.handlers.outcomes import FailureLog
from keyshard.handlers.stop_signals import stopping_signals
from keyshard.reading.message_decoder import MessageDecoder
from keyshard.redaction import shown
from keyshard.threads import begin
from ray_adapter import cluster
from ray_adapter.actor import Traced, check_handler
from ray_adapter.actor_pool import ActorPool
from ray_adapter.cluster import START_TIMEOUT_S, JobCancelled
from ray_adapter.feeding import ActorFeeder
from ray_adapter.job_state import LOOK_S, VERSION, ActorSlot, Done, JobState, JobStatus
from ray_adapter.options import ACTORS_MAX, JobOptions, Takes
from ray_adapter.results import Results, Taking, take_of

END_S = 10.0
"""Longest wait at the end for the thread of a killed actor, seconds."""


class Job:
    """A running job. Iterate over it once, or call :meth:`wait`. A context manager that ends it.

    The iteration yields the results of the handler that are not ``None``, in order per key. A
    result counts as taken when the caller asks for the next one. Then its entries are stored in the
    checkpoint, if there is one, and acknowledged in the background. If the caller leaves the loop,
    the result that it has just received is not acknowledged, and its message is delivered again.

    Made by :func:`ray_adapter.run`.
    """

    def __init__(
        self,
        source: KeyShardSource,
        handler: object,
        options: JobOptions,
        sink: SinkConfig | None = None,
    ) -> None:
        self._source = source
        self._options = options
        self._iterated = self._ended = False
        self._ending, self._rescaling = threading.Lock(), threading.Lock()
        self._started, self._committed = threading.Event(), threading.Event()
        self._taking: Taking | None = None
        self._all_taken = threading.Event()
        actor_slots = [ActorSlot(index, None) for index in range(options.parallelism)]
        limits = options.max_rows, options.max_wait_s, source.window_bytes_max
        rate = options.rate_limit
        self._exchange = JobState(
            actor_slots, *limits, None if rate is None else RateLimit(rate, options.rate_burst)
        )
        self._published = None if sink is None else Results(self._exchange, sink)
        self._actor_pool = ActorPool(
            handler, options, lambda: self._exchange.stopping, MessageDecoder.of(source),
            take_of(options, sink), traced=_traced(source, options, sink),
        )  # fmt: skip
        self._run = EntryRun(
            source.coordinator(), source, options.checkpoint,
            executor="ray", workers=lambda: len(self._exchange.actor_slots),
            sink=sink, actors=self._exchange,
        )  # fmt: skip
        self._outcomes = FailureLog()
        self._feeders: list[threading.Thread] = []
        self._others: list[threading.Thread] = []
        # atexit runs this before Ray's own hook, because that was registered earlier.
        atexit.register(self._end)
        try:
            self._begin()
        except BaseException:
            self._end()
            raise

    def __iter__(self) -> Iterator[Any]:
        """Yield results until :meth:`stop` or :meth:`drain`. The job ends with the iteration.

        Raises:
            NotRunningError: The job was iterated over before, or has ended.
            HandlerFailedError: A message failed at its last attempt. Neither it nor later messages
                of its key are acknowledged.
            DrainTimeoutError: Actors did not finish before the deadline of a drain.
            KeyShardError: Another error ended the job.
        """
        with self._exchange.changed:
            if self._iterated or self._ended:
                raise NotRunningError(
                    "The results of a job can be read once, and this job was already iterated or "
                    "has ended.",
                    "Keep its iterator, or run another job.",
                )
            self._iterated = True
        return self._results()

    def wait(self) -> None:
        """Discard results until :meth:`stop` or :meth:`drain`; for handlers that store their own.

        In the main thread, SIGTERM or Ctrl-C drains the job, and a second one interrupts it.

        Raises:
            KeyShardError: As in the iteration.
        """
        with stopping_signals(self.drain):
            for _ in self:
                pass

    def stop(self) -> None:
        """End the iteration and drop results not taken. Returns at once, from any thread."""
        self._exchange.stop()

    def drain(self, timeout_s: float | None = None) -> None:
        """Let actors finish their rows, and give them no more.

        Returns at once; callable from any thread. The iteration ends after the results of these
        rows, or with a :class:`keyshard.errors.DrainTimeoutError`.

        Args:
            timeout_s: Longest time to finish, seconds; ``None`` for ``drain_timeout_s`` of the job.
        """
        if timeout_s is None:
            timeout_s = self._options.drain_timeout_s
        check_seconds("timeout_s", timeout_s, 86_400)
        self._exchange.drain(timeout_s)

    def rescale(self, actors: int) -> None:
        """Change the number of actors; callable from any thread.

        New actors start first. Then all actors finish their rows, because parts of the ring move
        between them. State that a handler keeps in memory does not move with a key.

        Args:
            actors: 1 to 10,000.

        Raises:
            NotRunningError: The job is ending, or another thread rescales it.
            DrainTimeoutError: Actors did not finish within ``drain_timeout_s``; nothing has
                changed.
            KeyShardError: New actors could not start; nothing has changed.
        """
        check_integer("actors", actors, 1, ACTORS_MAX)
        if not self._rescaling.acquire(blocking=False):
            raise NotRunningError("Another thread already rescales this job.", "Try again later.")
        try:
            self._rescale(actors)
        finally:
            self._rescaling.release()

    def status(self) -> JobStatus:
        """Return the status of the source and of each actor, as JSON values; see docs/status.md."""
        source = self._run.status()
        return {
            "version": VERSION,
            "state": self._state,
            "actors": source["handlerSlots"],
            "rateLimit": source["rateLimit"],
            "source": source,
            "sink": None if self._published is None else self._published.status(),
        }

    def __repr__(self) -> str:
        topics = self._source.topics_pattern or ", ".join(self._source.topics)
        return (
            f"<Job of {shown(self._source.subscription)} on {shown(topics)}: {self._state}, "
            f"{len(self._exchange.actor_slots)} actors>"
        )

    @property
    def _state(self) -> str:
        return "ended" if self._ended else "stopping" if self._exchange.ending else "running"

    def close(self) -> None:
        """End the job: acknowledge what was taken, end actors and consumers. Idempotent.

        Raises:
            KeyShardError: An error ended the job, or prevented acknowledgement, and was not raised
                before.
        """
        self._end()
        self._exchange.raise_error()

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()
        if kind is None:
            self._exchange.raise_error()

    def _results(self) -> Iterator[Any]:
        done: Done | None = None
        try:
            while (done := self._exchange.next_done()) is not None:
                if self._published is not None:
                    self._published.add(done)
                    done = None
                    continue
                self._taking = taking = Taking(self._exchange, done, self._options.takes)
                for result in done.results:
                    if result is not None:
                        yield result
                    taking.took()
                    if self._exchange.stopping:
                        return
                taking.end()
                done = None
            if self._published is not None:
                self._published.wait()
        finally:
            self._end()
        self._exchange.raise_error()

    def _rescale(self, actors: int) -> None:
        before, began_s = len(self._exchange.actor_slots), time.monotonic()
        coordinator = self._run.coordinator
        pause_ms: float | None = None

        def outcome(error: BaseException | None) -> Outcome:
            if error is not None and self._exchange.error is error:
                return Outcome(RescaleEnd.LOST, coordinator.epoch)
            if error is not None and (
                actors == before or len(self._exchange.actor_slots) != actors
            ):
                return Outcome(RescaleEnd.KEPT, coordinator.epoch)
            return Outcome(
                RescaleEnd.UNCHANGED if actors == before else RescaleEnd.MOVED, coordinator.epoch,
                moved_slots(assign(before), assign(actors)) / RING_SIZE, pause_ms,
            )  # fmt: skip

        with RecordedRescale(
            coordinator.consumers.shared,
            Rescale({"actors": actors}, before, actors, began_s, self._options.drain_timeout_s),
            outcome,
        ) as recorded:
            try:
                pause_ms = self._move(actors, recorded)
            except JobCancelled:
                raise NotRunningError(
                    "The job ends, so it cannot be rescaled.", "Run another job."
                ) from None

    def _move(self, actors: int, recorded: RecordedRescale) -> float:
        """Divide the ring among a number of actors.

        Returns:
            How long actors got no rows, milliseconds.
        """
        old = self._exchange.actor_slots
        recorded.phase("start")
        new = self._actor_pool.start(max(0, actors - len(old)))
        recorded.phase("drain")
        held_s = time.monotonic()
        try:
            self._exchange.hold(self._options.drain_timeout_s)
        except BaseException:
            self._actor_pool.end(new)
            raise
        recorded.phase("adopt")
        added = [ActorSlot(len(old) + number, actor) for number, actor in enumerate(new)]
        self._exchange.go_on([*old[:actors], *added])
        try:
            pause_ms = round(1_000 * (time.monotonic() - held_s), 3)
            self._actor_pool.end([actor_slot.actor for actor_slot in old[actors:]])
            for actor_slot in added:
                self._feed(actor_slot)
        except BaseException as exc:
            # The rows of an actor without a thread would wait for ever.
            self._exchange.fail(exc)
            raise
        return pause_ms

    # -- start and end -----------------------------------------------------------------------------

    def _begin(self) -> None:
        actor_slots = self._exchange.actor_slots
        for actor_slot, actor in zip(
            actor_slots, self._actor_pool.start(len(actor_slots)), strict=True
        ):
            actor_slot.actor = actor
        self._others.append(self._thread("receive", self._receive))
        while not self._started.wait(LOOK_S):
            if self._exchange.error is not None:
                self._exchange.raise_error()
        self._others.append(self._thread("commit", self._commit))
        for actor_slot in actor_slots:
            self._feed(actor_slot)

    def _feed(self, actor_slot: ActorSlot) -> None:
        feeder = ActorFeeder(
            self._exchange, actor_slot, self._actor_pool, self._options, self._outcomes
        )
        self._feeders.append(self._thread(str(actor_slot.index), feeder.run))

    def _thread(self, name: str, work: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                work()
            except JobCancelled:
                pass
            except BaseException as exc:  # noqa: BLE001 - raised where the caller waits
                self._exchange.fail(self._actor_pool.session.named(exc))

        return begin(f"keyshard-ray-{name}", guarded)

    def _end(self) -> None:
        """Stop the handlers, commit what was taken, then end the source, in this order."""
        with self._ending:
            if self._ended:
                return
            self._exchange.stop()
            if self._taking is not None:  # the caller has left within the results of a call
                self._taking.end()
            self._all_taken.set()
            slots = self._exchange.actor_slots
            actors = [actor_slot.actor for actor_slot in slots if actor_slot.actor is not None]
            # In a thread: if the cluster is gone, Ray waits for it.
            self._thread("end", lambda: self._actor_pool.end(actors)).join(END_S)
            commit_s = self._source.operation_timeout_ms / 1000
            for thread in self._feeders:
                thread.join(END_S)
            for thread in self._others[1:]:
                thread.join(commit_s)
            self._committed.set()
            for thread in self._others[:1]:
                thread.join()
            self._ended = True
        atexit.unregister(self._end)

    # -- threads -----------------------------------------------------------------------------------

    def _receive(self) -> None:
        exchange = self._exchange
        with self._source.running_as(self._run), self._run.started():
            self._started.set()
            try:
                while not exchange.ending:
                    if taken := self._run.take(LOOK_S):
                        exchange.push(taken)
                    if self._run.stopping:  # source.stop() was called
                        self.drain()
            except BaseException as exc:  # noqa: BLE001 - raised where the caller waits
                exchange.fail(self._actor_pool.session.named(exc))
            # Results taken so far are committed before the source ends.
            self._committed.wait()

    def _commit(self) -> None:
        if self._published is not None:
            self._published.commit_all(self._run)
            return
        last = False
        while not last:
            # After a stop, results count as taken until the iteration or the job ends.
            last = self._exchange.stopping and self._all_taken.wait(LOOK_S)
            while any(taken := self._exchange.next_to_commit()):
                entries, handled = taken
                self._run.commit(entries, handled=handled)


def _traced(source: KeyShardSource, options: JobOptions, sink: SinkConfig | None) -> Traced | None:
    """Return the settings of the actors' spans; ``None`` if they make none."""
    if not source.telemetry:
        return None
    outputs = None if sink is None else sink.topic
    return Traced(source.subscription, outputs, options.takes, source.how_to_connect().address)


@suggesting
def run(
    source: KeyShardSource,
    handler: object,
    *,
    parallelism: int | None = None,
    takes: Takes = "messages",
    max_rows: int = 1_000,
    max_wait_s: float = 0.02,
    checkpoint: str | os.PathLike[str] | None = None,
    sink: SinkConfig | None = None,
    retry: RetryPolicy | None = None,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    resources: Mapping[str, float] | None = None,
    scheduling_strategy: Any = None,
    runtime_env: Mapping[str, Any] | None = None,
    start_timeout_s: float = START_TIMEOUT_S,
    drain_timeout_s: float = 30.0,
    rate_limit: float | None = None,
    rate_burst: int | None = None,
) -> Job:
    """Run a handler over the messages of a source, in actors of Ray, in order per key.

    ::

        with ray_adapter.run(source, partial(Score, "model.bin"), parallelism=10) as job:
            for score in job:
                store(score)

    This process receives and acknowledges. Each actor owns an equal part of the ring and handles
    one message at a time. If an actor or a node dies, no message and no order is lost: its messages
    are handled again before later ones. So a handler may see a message twice, although its result
    appears once. If this process dies without a checkpoint, messages that were not acknowledged are
    handled again, and the last acknowledged ones too. With a checkpoint, no acknowledged message is
    handled again.

    If the program is not connected to Ray, this connects as ``ray.init()`` does, and stays
    connected.

    Args:
        source: The source to consume.
        handler: A function, or a class with ``__call__`` of which each actor makes one object;
            ``functools.partial`` gives it arguments. Actors import it by module and name. From
            ``__main__``, notebooks and closures it is sent by value, as in Ray. It is called with
            what ``takes`` says, may be ``async def``, and may raise :class:`keyshard.RetryLater`.
            :class:`keyshard.Reject` ends the job, because it has no dead-letter topic. A returned
            exception counts as raised.
        parallelism: Number of actors; ``None`` for the number of ranges of the source.
        takes: ``messages``: the handler gets one :class:`keyshard.Message` and returns a result.
            ``arrow``: it gets a ``pyarrow.RecordBatch`` of
            :data:`keyshard.columns.record_batches.SCHEMA`.
        max_rows: Most rows of one call of an actor, unless one entry has more.
        max_wait_s: Longest wait of an idle actor for more rows after the first, seconds.
        checkpoint: Path or fsspec URL of a checkpoint.
        sink: A :class:`keyshard.KeyShardSink`, which publishes what the handler returns: a
            :class:`keyshard.Produce` or a list of them, or what it yields. With ``takes="arrow"``,
            it may also return Arrow rows with the columns of ``write_batch``. The iteration then
            has no results: call :meth:`Job.wait`. A message is acknowledged after its outputs are
            confirmed. With a checkpoint, each output is stored exactly once, and the sink needs a
            ``sink_id``; without one, at least once.
        retry: When to retry a failed message or Arrow batch in place, and when to give up, which
            ends the job; ``None`` for the default :class:`keyshard.RetryPolicy`. The death of an
            actor counts as a failure of the rows that it had.
        num_cpus: Ray's option for each actor; ``None`` for Ray's default.
        num_gpus: See Ray.
        resources: See Ray.
        scheduling_strategy: See Ray.
        runtime_env: See Ray.
        start_timeout_s: Longest wait until actors are placed and have loaded the handler, seconds.
            If it is not above the default, and no node has the resources of an actor, the wait is
            5 s.
        drain_timeout_s: Longest wait for actors to finish their rows at a drain or rescale,
            seconds.
        rate_limit: Most messages per second that actors get, over all of them; 0.001 to 1,000,000.
            Retries count. ``None``: no limit.
        rate_burst: Most messages that they get at once after a pause; ``None``: those of 0.1 s, at
            least 1.

    Raises:
        ConfigError: An option is wrong, the handler is not usable, or the source runs already.
        ClusterError: There is no cluster, or it cannot place the actors.
        WorkerEnvironmentError: Nodes lack keyshard, or have another version of it.
        UnfitHandlerError: Actors cannot import the handler, or its class raises there.
        KeyShardError: The source does not start.
    """
    if not isinstance(source, KeyShardSource):
        raise ConfigError(f"source is {shown(source)}; it must be a keyshard.KeyShardSource.")
    source.check_subscribed()
    refuse_for_handlers(source.metadata_columns)
    options = JobOptions(
        parallelism=source.parallelism if parallelism is None else parallelism,
        takes=takes, max_rows=max_rows, max_wait_s=max_wait_s, checkpoint=checkpoint,
        retry=RetryPolicy() if retry is None else retry,
        num_cpus=num_cpus, num_gpus=num_gpus, resources=resources,
        scheduling_strategy=scheduling_strategy, runtime_env=runtime_env,
        start_timeout_s=start_timeout_s, drain_timeout_s=drain_timeout_s,
        rate_limit=rate_limit, rate_burst=rate_burst,
    )  # fmt: skip
    check_sink_of("job", sink, checkpoint)
    check_handler(handler, take_of(options, sink))
    cluster.connect()
    return Job(source, handler, options, sink)
