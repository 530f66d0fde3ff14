"""A job: this process receives and acknowledges, actors compute, the caller takes the results.

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
from keyshard.core.metadata_columns import refuse_for_handlers
from keyshard.core.option_checks import check_integer, check_seconds, suggesting
from keyshard.core.ring.hash_range import split_ring
from keyshard.errors import ConfigError, NotRunningError
from keyshard.handlers.entry_run import EntryRun
from keyshard.handlers.outcome_log import OutcomeLog
from keyshard.handlers.stop_signals import stopping_signals
from keyshard.reading.message_data import MessageData
from keyshard.redaction import shown
from keyshard.threads import begin
from ray_adapter import cluster
from ray_adapter.actor import check_handler
from ray_adapter.cluster import START_TIMEOUT_S
from ray_adapter.crew import Crew
from ray_adapter.exchange import LOOK_S, Done, Exchange, Seat
from ray_adapter.feeding import Feeder
from ray_adapter.options import ACTORS_MAX, JobOptions, Takes
from ray_adapter.portions import rows_of, whole_pieces
from ray_adapter.session import GivenUp

END_S = 10.0
"""Longest wait at the end for the thread of an actor that was killed, seconds."""


class Job:
    """A running job; iterate over it once, or :meth:`wait`. A context manager that ends it.

    The iteration gives what the handler returned, where that is not ``None``, in order per key.
    Results count as taken when the caller asks for the next one: then what they were computed from
    is acknowledged, in the background, and with a checkpoint stored there before. What the caller
    has in hand when it leaves the loop is not acknowledged, and comes again.

    Made by :func:`ray_adapter.run`.
    """

    def __init__(self, source: KeyShardSource, handler: object, options: JobOptions) -> None:
        self._source = source
        self._options = options
        self._iterated = self._ended = False
        self._ending, self._rescaling = threading.Lock(), threading.Lock()
        self._started, self._committed = threading.Event(), threading.Event()
        seats = [Seat(index, None) for index in range(options.parallelism)]
        limits = options.max_rows, options.max_wait_s, source.window_bytes_max
        self._exchange = Exchange(seats, *limits)
        self._crew = Crew(handler, options, lambda: self._exchange.stopping, MessageData.of(source))
        self._run = EntryRun(
            source.coordinator(), source, options.checkpoint,
            executor="ray", workers=lambda: len(self._exchange.seats),
        )  # fmt: skip
        self._outcomes = OutcomeLog()
        self._feeders: list[threading.Thread] = []
        self._others: list[threading.Thread] = []
        # Runs before what Ray does at the end of the interpreter, which was registered before.
        atexit.register(self._end)
        try:
            self._begin()
        except BaseException:
            self._end()
            raise

    def __iter__(self) -> Iterator[Any]:
        """Results until :meth:`stop` or :meth:`drain`; the job ends with the iteration.

        Raises:
            NotRunningError: It was iterated over before, or has ended.
            HandlerFailedError: A message failed at its last attempt. Neither it nor what lies
                behind it in its key is acknowledged.
            DrainTimeoutError: Actors did not end in time at a drain.
            KeyShardError: What else ended the job.
        """
        with self._exchange.changed:
            if self._iterated or self._ended:
                raise NotRunningError(
                    "A job gives its results once, and this one was iterated over or has ended. "
                    "Keep its iterator, or run another job."
                )
            self._iterated = True
        return self._results()

    def wait(self) -> None:
        """Drop results until :meth:`stop` or :meth:`drain`; for handlers that store theirs.

        In the main thread, SIGTERM and Ctrl-C drain; a second one interrupts.

        Raises:
            KeyShardError: As the iteration.
        """
        with stopping_signals(self.drain):
            for _ in self:
                pass

    def stop(self) -> None:
        """End the iteration, and give up what was not taken; returns at once, from any thread."""
        self._exchange.stop()

    def drain(self, timeout_s: float | None = None) -> None:
        """Let actors end what they work on, and give them nothing more.

        Returns at once, from any thread. The iteration ends with the last of these results, or
        with a :class:`keyshard.errors.DrainTimeoutError`.

        Args:
            timeout_s: Longest time for that, seconds; ``None``: ``drain_timeout_s`` of the job.
        """
        if timeout_s is None:
            timeout_s = self._options.drain_timeout_s
        check_seconds("timeout_s", timeout_s, 86_400)
        self._exchange.drain(timeout_s)

    def rescale(self, actors: int) -> None:
        """Go on with another number of actors; from any thread.

        New ones start first. Then all end what they work on, because parts of the ring move
        between them. What a handler keeps in memory does not move with a key.

        Args:
            actors: 1 to 10,000.

        Raises:
            NotRunningError: The job ends, or another thread rescales it.
            DrainTimeoutError: Actors did not end within ``drain_timeout_s``; nothing has changed.
            KeyShardError: New actors cannot be had; nothing has changed.
        """
        check_integer("actors", actors, 1, ACTORS_MAX)
        if not self._rescaling.acquire(blocking=False):
            raise NotRunningError("Another thread rescales this job. Try again when it is done.")
        try:
            self._rescale(actors)
        except GivenUp:
            raise NotRunningError("The job ends, so it is not rescaled.") from None
        finally:
            self._rescaling.release()

    def status(self) -> dict[str, Any]:
        """What goes on, as plain JSON values: of the source, and of each actor."""
        exchange = self._exchange
        with exchange.changed:
            now_s = time.monotonic()
            actors = [
                {
                    "slots": str(hash_range),
                    "rows": seat.rows,
                    "waitingRows": exchange.waiting.rows[seat.index],
                    "workingRows": rows_of(seat.pieces),
                    "workingS": round(now_s - seat.since_s, 3) if seat.pieces else 0.0,
                    "untakenCalls": seat.untaken,
                    "deaths": seat.deaths,
                }
                for seat, hash_range in zip(
                    exchange.seats, split_ring(len(exchange.seats)), strict=True
                )
            ]
            state = self._state
        return {"state": state, "actors": actors, "source": self._run.status()}

    def __repr__(self) -> str:
        topics = self._source.topics_pattern or ", ".join(self._source.topics)
        return (
            f"<Job of {shown(self._source.subscription)} on {shown(topics)}: {self._state}, "
            f"{len(self._exchange.seats)} actors>"
        )

    @property
    def _state(self) -> str:
        return "ended" if self._ended else "ending" if self._exchange.ending else "running"

    def close(self) -> None:
        """End the job: what was taken is acknowledged, actors and consumers go. Idempotent.

        Raises:
            KeyShardError: What ended the job, or kept it from acknowledging, where nobody was told.
        """
        self._end()
        self._exchange.tell()

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
            self._exchange.tell()

    def _results(self) -> Iterator[Any]:
        done: Done | None = None
        taken = 0
        try:
            while (done := self._exchange.next_done()) is not None:
                taken = 0
                for result in done.results:
                    if result is not None:
                        yield result
                    taken += 1
                    if self._exchange.stopping:
                        return
                self._exchange.taken(done, done.pieces)
                done = None
        finally:
            if done is not None and self._options.takes == "messages":
                # The caller left in the middle; what lies before is taken.
                whole = whole_pieces(done.pieces, taken)
                self._exchange.taken(done, done.pieces[:whole])
            self._end()
        self._exchange.tell()

    def _rescale(self, actors: int) -> None:
        old = self._exchange.seats
        new = self._crew.start(max(0, actors - len(old)))
        try:
            self._exchange.hold(self._options.drain_timeout_s)
        except BaseException:
            self._crew.end(new)
            raise
        added = [Seat(len(old) + number, actor) for number, actor in enumerate(new)]
        self._exchange.go_on([*old[:actors], *added])
        self._crew.end([seat.actor for seat in old[actors:]])
        for seat in added:
            self._feed(seat)

    # -- begin and end -----------------------------------------------------------------------------

    def _begin(self) -> None:
        seats = self._exchange.seats
        for seat, actor in zip(seats, self._crew.start(len(seats)), strict=True):
            seat.actor = actor
        self._others.append(self._thread("receive", self._receive))
        while not self._started.wait(LOOK_S):
            if self._exchange.error is not None:
                self._exchange.tell()
        self._others.append(self._thread("commit", self._commit))
        for seat in seats:
            self._feed(seat)

    def _feed(self, seat: Seat) -> None:
        feeder = Feeder(self._exchange, seat, self._crew, self._options, self._outcomes)
        self._feeders.append(self._thread(str(seat.index), feeder.run))

    def _thread(self, name: str, work: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                work()
            except GivenUp:
                pass
            except BaseException as exc:  # noqa: BLE001 - raised where the caller waits
                self._exchange.fail(self._crew.session.named(exc))

        return begin(f"keyshard-ray-{name}", guarded)

    def _end(self) -> None:
        """In this order: nothing more is handled, what was taken is committed, the source ends."""
        with self._ending:
            if self._ended:
                return
            self._exchange.stop()
            actors = [seat.actor for seat in self._exchange.seats if seat.actor is not None]
            # In a thread: where the cluster is gone, Ray waits for it.
            self._thread("end", lambda: self._crew.end(actors)).join(END_S)
            commit_s = self._source.operation_timeout_ms / 1000
            for threads, timeout_s in (
                (self._feeders, END_S), (self._others[1:], commit_s), (self._others[:1], None)
            ):  # fmt: skip
                for thread in threads:
                    thread.join(timeout_s)
                if timeout_s == commit_s:
                    self._committed.set()
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
                    if self._run.stopping:  # by source.stop()
                        self.drain()
            except BaseException as exc:  # noqa: BLE001 - raised where the caller waits
                exchange.fail(exc)
            # What was taken until now is committed before the source ends.
            self._committed.wait()

    def _commit(self) -> None:
        while entries := self._exchange.next_to_commit():
            self._run.commit(entries)


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
    retry: RetryPolicy | None = None,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    resources: Mapping[str, float] | None = None,
    scheduling_strategy: Any = None,
    runtime_env: Mapping[str, Any] | None = None,
    start_timeout_s: float = START_TIMEOUT_S,
    drain_timeout_s: float = 30.0,
) -> Job:
    """Have the messages of a source handled by actors of Ray, in order per key.

    ::

        with ray_adapter.run(source, partial(Score, "model.bin"), parallelism=10) as job:
            for score in job:
                store(score)

    This process receives and acknowledges; each actor computes for an equal part of the ring, one
    message after the other. An actor or node that dies costs no message and no order: what it
    worked on is handled again before anything behind it, so handlers see messages again that their
    results do not show. Without a checkpoint, a death of this process repeats what was not
    acknowledged; with one, nothing that was acknowledged comes again.

    Where the program is not connected to Ray, it is as by ``ray.init()``, and remains so.

    Args:
        source: What to consume.
        handler: A function, or a class whose objects are called like one and that is made once in
            each actor; ``functools.partial`` gives it arguments. Actors import it by its module and
            name; from ``__main__``, notebooks and closures it travels by value, as in Ray. It is
            called with what ``takes`` says, may be ``async def``, and may raise
            :class:`keyshard.RetryLater`. :class:`keyshard.Reject` ends the job, which has no
            dead-letter topic. A returned exception counts as raised.
        parallelism: Actors; ``None``: as many as the source has ranges.
        takes: ``messages``: each :class:`keyshard.Message`; what it returns is a result. ``arrow``:
            a ``pyarrow.RecordBatch`` with all columns of :data:`keyshard.arrow.columns.SCHEMA`.
        max_rows: Most rows that an actor is given at once, unless one entry has more.
        max_wait_s: Longest wait of an idle actor for more rows after the first, seconds.
        checkpoint: Path or fsspec URL of a checkpoint.
        retry: When a failed message, or Arrow batch, is tried again in its place, and when no more,
            which ends the job; ``None``: the default :class:`keyshard.RetryPolicy`. A death of the
            actor counts as a failure of what it worked on.
        num_cpus: Ray's option for each actor, as those that follow; ``None``: Ray's default.
        num_gpus: See Ray.
        resources: See Ray.
        scheduling_strategy: See Ray.
        runtime_env: See Ray.
        start_timeout_s: Longest wait until actors have found a place and loaded the handler,
            seconds. Unless it is above the default, 5 s where no node has what an actor asks for.
        drain_timeout_s: Longest wait for what actors work on, at a drain or rescale, seconds.

    Raises:
        ConfigError: An option is wrong, the handler cannot be one, or the source runs already.
        ClusterError: There is no cluster, or it has no place for the actors.
        WorkerEnvironmentError: Nodes lack keyshard, or have another version of it.
        UnfitHandlerError: Actors cannot import the handler, or its class raises there.
        KeyShardError: The source does not start.
    """
    if not isinstance(source, KeyShardSource):
        raise ConfigError(f"source is {shown(source)}; give a keyshard.KeyShardSource.")
    source.check_subscribed()
    refuse_for_handlers(source.metadata_columns)
    options = JobOptions(
        parallelism=source.parallelism if parallelism is None else parallelism,
        takes=takes, max_rows=max_rows, max_wait_s=max_wait_s, checkpoint=checkpoint,
        retry=RetryPolicy() if retry is None else retry,
        num_cpus=num_cpus, num_gpus=num_gpus, resources=resources,
        scheduling_strategy=scheduling_strategy, runtime_env=runtime_env,
        start_timeout_s=start_timeout_s, drain_timeout_s=drain_timeout_s,
    )  # fmt: skip
    check_handler(handler)
    cluster.connect()
    return Job(source, handler, options)
