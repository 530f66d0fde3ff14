"""The public API: a source, and the objects that read it from Python."""

from __future__ import annotations

# Packages that a run loads import this module. It cannot be imported after the main thread ended.
import concurrent.futures.thread
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any, cast

from keyshard.base_error import placed
from keyshard.config.handlers import HandlerConfig
from keyshard.config.sink import SinkConfig, check_sink_of
from keyshard.config.source import SourceConfig
from keyshard.core.metadata_columns import NAME_KEY_BYTES
from keyshard.core.option_checks import (
    check_bool,
    check_integer,
    check_names,
    check_seconds,
    suggesting,
)
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.outputs import check_owner
from keyshard.core.ring.hash_range import RING_SIZE
from keyshard.errors import ConfigError, NotRunningError
from keyshard.source_dead_letters import SourceDeadLetters
from keyshard.source_read import SourceReads
from keyshard.source_stream import SourceStream
from keyshard.threads import owned_by

if TYPE_CHECKING:
    import asyncio

    from typing_extensions import Unpack  # known to type checkers; nothing imports it at run time

    from keyshard.config.handlers import HandlerOptions
    from keyshard.coordinator.coordinator import Coordinator
    from keyshard.coordinator.rescale import Rescaler, RescaleReport
    from keyshard.handlers.batches import Batch, BatchRun
    from keyshard.handlers.handler_call import Handle
    from keyshard.handlers.outcomes import Observer
    from keyshard.handlers.run import HandlerRun
    from keyshard.handlers.taken_messages import TakenIterator
    from keyshard.observe.status_types import Status
    from keyshard.reading.decoder import RowDecoder


def _handling(options: HandlerOptions) -> HandlerConfig:
    check_names("run()", options, {field.name for field in fields(HandlerConfig)})
    return HandlerConfig(**options)


READY_S = 60.0
"""Default longest wait for a source to be ready, seconds."""


class KeyShardSource(SourceReads, SourceDeadLetters, SourceConfig):
    """Topics of a Pulsar cluster, consumed by ``parallelism`` hash ranges.

    The object is a frozen description. Constructing it connects to nothing::

        source = KeyShardSource("orders", subscription="billing", parallelism=10)

    Args: see the fields of :class:`keyshard.config.source.SourceConfig`.

    Raises:
        ConfigError: A value is missing or outside its limits.
        NonPersistentTopicError: A topic is non-persistent.
    """

    def coordinator(self) -> Coordinator:
        """Make a coordinator that is not started. It connects in the process that starts it.

        Raises:
            ConfigError: The source names no subscription.
        """
        from keyshard.broker.connect import connect_admin  # noqa: PLC0415
        from keyshard.broker.preflight import ANSWER_S  # noqa: PLC0415
        from keyshard.coordinator.coordinator import Coordinator  # noqa: PLC0415
        from keyshard.workers.backends import connect_source  # noqa: PLC0415

        self.check_subscribed()
        connection = self.how_to_connect()
        admin = None if self.admin_url is None else connect_admin(connection, ANSWER_S)
        return Coordinator(self, lambda: connect_source(connection, self.parsed_workers()), admin)

    def run(
        self,
        handle: Handle,
        *,
        observers: Sequence[Observer] = (),
        sink: SinkConfig | None = None,
        **options: Unpack[HandlerOptions],
    ) -> None:
        """Call ``handle`` with every message, in key order, until the run is stopped.

        ::

            source.run(handle, lanes=16, checkpoint="file:///var/lib/app/orders.json")

        An entry is acknowledged after ``handle`` returned for all its messages. On SIGTERM, Ctrl-C
        and :meth:`stop`, running handlers finish, and completed entries are committed.

        Args:
            handle: ``def`` or ``async def``, called with a :class:`keyshard.Message`. It may raise
                :class:`keyshard.RetryLater` or :class:`keyshard.Reject`. After any other exception,
                the retry policy decides. A returned exception counts as raised. With a sink, it
                may return a :class:`keyshard.Produce` or a list of them, or yield them.
            observers: Objects that are called for every attempt: ``started(message)``, then
                ``completed(message, seconds)`` or ``failed(message, seconds, error)``.
            sink: A :class:`keyshard.KeyShardSink` that publishes what ``handle`` produces, before
                the message is acknowledged. The run makes a connection of its own.
            **options: Fields of :class:`keyshard.HandlerConfig`.

        Raises:
            ConfigError: An option is wrong, no subscription is named, or the source runs already.
            KeyShardError: The error that ended the source.
        """
        run = self._handler_run(handle, observers, sink, options)
        with self.running_as(run):
            run.run()

    async def arun(
        self,
        handle: Handle,
        *,
        observers: Sequence[Observer] = (),
        sink: SinkConfig | None = None,
        **options: Unpack[HandlerOptions],
    ) -> None:
        """Do the same as :meth:`run`; an ``async def`` runs in the event loop of the caller.

        ::

            await asyncio.gather(source.arun(handle), serve_http())

        A cancellation, SIGTERM and :meth:`stop` let running handlers finish. A second cancellation
        cancels them, and their messages are delivered again. SIGTERM is left to the program if it
        handles that signal itself.

        Raises:
            ConfigError: As for :meth:`run`.
            KeyShardError: The error that ended the source.
        """
        import asyncio  # noqa: PLC0415 - a program with coroutines has it

        from keyshard.handlers.background import in_background, until_end  # noqa: PLC0415

        loop = asyncio.get_running_loop()
        run = self._handler_run(handle, observers, sink, options, loop)
        await until_end(run, in_background(run, self.running_as(run)))

    @contextmanager
    def running(
        self,
        handle: Handle,
        *,
        observers: Sequence[Observer] = (),
        sink: SinkConfig | None = None,
        ready_timeout_s: float = READY_S,
        **options: Unpack[HandlerOptions],
    ) -> Iterator[KeyShardSource]:
        """Do the same as :meth:`run` during a block, for tests and notebooks.

        ::

            with source.running(handle):
                publish_orders()
                wait_until(lambda: len(handled) == 100)

        The block begins when the source is ready. At its end, running handlers finish.

        Args:
            handle: As for :meth:`run`.
            observers: As for :meth:`run`.
            sink: As for :meth:`run`.
            ready_timeout_s: Longest wait before the block, seconds.
            **options: As for :meth:`run`.

        Raises:
            ConfigError: As for :meth:`run`.
            NotRunningError: The source is not ready in time.
            DrainTimeoutError: The source did not end in time after the block.
            KeyShardError: The error that ended the source, unless the block raises.
        """
        from keyshard.handlers.background import in_background, until_left  # noqa: PLC0415

        check_seconds("ready_timeout_s", ready_timeout_s, 86_400)
        run = self._handler_run(handle, observers, sink, options)
        with until_left(run, in_background(run, self.running_as(run)), ready_timeout_s):
            yield self

    def messages(
        self, *, observers: Sequence[Observer] = (), **options: Unpack[HandlerOptions]
    ) -> TakenIterator:
        """Return an asynchronous iterator over the messages; the program marks each as done.

        ::

            async for message in source.messages(lanes=16):
                await store(message.value)
                await message.done()

        ``async for message in source`` does the same without options. Messages of a key come one
        after the other: the next one comes after :meth:`~keyshard.TakenMessage.done`. So a program
        may start a task for each message; order and limits stay.

        :meth:`stop` ends the iteration after the messages that have started are done. If the
        program leaves the loop, the source ends in the background: messages that are done are
        acknowledged, all others come again. To wait for that end, use ``async with
        source.messages() as messages``.

        Args:
            observers: As for :meth:`run`.
            **options: As for :meth:`run`. ``workers`` is the most messages that are not done.

        Raises:
            ConfigError: An option is wrong, or no subscription is named.
        """
        from keyshard.handlers.background import in_background  # noqa: PLC0415
        from keyshard.handlers.outcomes import checked_observers  # noqa: PLC0415
        from keyshard.handlers.taken_messages import TakenIterator, TakenRun  # noqa: PLC0415

        handling, observing = _handling(options), checked_observers(observers)
        if handling.executor != "auto":
            raise ConfigError(
                f"executor is {handling.executor!r}, but the body of an async for is the handler.",
                "Leave executor out, or use run().",
            )
        if handling.telemetry or self.telemetry:
            raise ConfigError(
                "telemetry makes a span of each call of a handler, and an async for calls none.",
                "Leave telemetry out, or use arun().",
            )
        self.check_subscribed()

        def begin_in(loop: asyncio.AbstractEventLoop) -> TakenRun:
            run = TakenRun(self.coordinator(), self, handling, loop, observing)
            run.outcome = in_background(run, self.running_as(run))
            run.outcome.add_done_callback(lambda _: run.taken.awake())
            return run

        def ending() -> concurrent.futures.Future[None] | None:
            run = self.__dict__.get("_running")
            return run.outcome if isinstance(run, TakenRun) and run.abandoned else None

        return TakenIterator(begin_in, ending)

    def __aiter__(self) -> TakenIterator:
        return self.messages()

    def _handler_run(
        self,
        handle: Handle,
        observers: Sequence[Observer],
        sink: SinkConfig | None,
        options: HandlerOptions,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> HandlerRun:
        from keyshard.handlers.outcomes import checked_observers  # noqa: PLC0415
        from keyshard.handlers.run import HandlerRun  # noqa: PLC0415

        observing, handling = checked_observers(observers), _handling(options)
        check_sink_of("run", sink, handling.checkpoint)
        return HandlerRun(
            self.coordinator(), self, handling, handle, observing, sink=sink, loop=loop
        )

    @suggesting
    def batches(
        self,
        max_rows: int = 5_000,
        max_wait_s: float = 1.0,
        *,
        checkpoint: str | os.PathLike[str] | None = None,
        sink: SinkConfig | None = None,
    ) -> Generator[Batch, None, None]:
        """Yield batches of Arrow rows, for programs that acknowledge each batch themselves.

        ::

            for batch in source.batches(max_rows=5000, max_wait_s=1.0):
                store(batch.records)
                batch.ack()

        Args:
            max_rows: Most rows of a batch, unless one entry has more.
            max_wait_s: Longest wait for more rows after the first, seconds.
            checkpoint: Path or fsspec URL of a checkpoint. With a checkpoint, no acknowledged
                message comes again after a crash. Without one, the most recent ones may come again.
            sink: A :class:`keyshard.KeyShardSink` for the rows that ``batch.write`` gives: with a
                checkpoint exactly once, else at least once.

        Raises:
            ConfigError: An option is wrong, or the source runs already.
            WindowFullError: The window was full of batches that were not acknowledged, for
                ``operation_timeout_ms``.
            KeyShardError: The error that ended the source.
        """
        from keyshard.handlers.batches import BatchRun  # noqa: PLC0415

        check_integer("max_rows", max_rows, 1, 10**9)
        check_seconds("max_wait_s", max_wait_s, 86_400)
        check_sink_of("run", sink, checkpoint)
        run = BatchRun(
            self.coordinator(), self, max_rows, max_wait_s, checkpoint=checkpoint, sink=sink
        )
        return self._batches(run)

    def _batches(self, run: BatchRun) -> Generator[Batch, None, None]:
        with self.running_as(run):
            yield from run.batches()

    def rescale(self, ranges: int | None = None, *, balance: bool = False) -> RescaleReport:
        """Move ranges while :meth:`run` or :meth:`batches` runs in another thread.

        The rescale moves as little of the ring as possible. For each range that moves, running
        handlers end first; then the new owner subscribes. Other keys continue meanwhile. Do not
        call this from a handler: it would wait for itself.

        With a checkpoint, a restart begins with the new ranges, unless the configured
        ``parallelism`` has changed. Without a checkpoint, a restart begins with ``parallelism``.

        Args:
            ranges: New number of ranges, 1 to 65,536.
            balance: Instead of ``ranges``: keep the number, and give all ranges equal loads, as
                measured since the start.

        Raises:
            ConfigError: Both arguments are given, or none, or ``ranges`` is outside its limits.
            NotRunningError: The source does not run.
            DrainTimeoutError: A handler did not end within ``drain_timeout_s``. No range has moved.
            RescaleError: The broker refused the change of ranges.
        """
        check_bool("balance", balance)
        if ranges is not None:
            check_integer("ranges", ranges, 1, RING_SIZE)
        if (ranges is None) != balance:
            raise ConfigError(
                "rescale() needs either a number of ranges or balance=True.", "Give one of them."
            )
        rescaler: Rescaler | None = self._active().rescaler
        if rescaler is None:
            raise NotRunningError("The source is still starting.", "Try again later.")
        return rescaler.balance() if ranges is None else rescaler.rescale(ranges)

    def pause(self) -> None:
        """Receive nothing more while :meth:`run` or :meth:`batches` runs, until :meth:`resume`.

        Consumers stay connected and keep their ranges. Messages that were received are still
        handled and acknowledged. A receive that has begun may take a few more. A rescale and a
        stop work as usual. A restart is not paused. Returns at once, from any thread; idempotent.

        Raises:
            NotRunningError: The source does not run, or is still starting.
        """
        self._active().coordinator.pause()

    def resume(self) -> None:
        """Receive again after :meth:`pause`. Returns at once, from any thread; idempotent.

        Raises:
            NotRunningError: The source does not run, or is still starting.
        """
        self._active().coordinator.resume()

    def stop(self) -> None:
        """End :meth:`run` or :meth:`batches` gracefully. Returns at once, from any thread."""
        self._active().stop()

    def wait_ready(self, timeout_s: float = READY_S) -> None:
        """Wait until the source takes messages from all its topic partitions.

        Another thread runs it, or is about to. A coroutine awaits
        ``asyncio.to_thread(source.wait_ready)``.

        Args:
            timeout_s: Longest wait, seconds.

        Raises:
            NotRunningError: The source is not ready in time; the error says why.
        """
        from keyshard.handlers.background import wait_ready  # noqa: PLC0415

        check_seconds("timeout_s", timeout_s, 86_400)
        wait_ready(lambda: self.__dict__.get("_running"), timeout_s)

    def status(self) -> Status:
        """Return the status of a running source as JSON values; see docs/status.md.

        The status comes from memory, so any thread may ask. Facts from the broker are a few seconds
        old, and ``None`` without ``admin_url``. While the source starts, its ``state`` says so and
        it has no ranges.

        Raises:
            NotRunningError: The source does not run.
        """
        from keyshard.observe.status_table import ShownStatus  # noqa: PLC0415

        return cast("Status", ShownStatus(self._active().status()))

    @contextmanager
    def running_as(self, run: Any) -> Iterator[None]:
        """Pass :meth:`stop`, :meth:`status` and similar calls to ``run``. For adapters.

        Raises:
            ConfigError: The source runs already.
        """
        if self.__dict__.get("_running") is not None:
            raise ConfigError("This source already runs.", "To run twice, create another one.")
        object.__setattr__(self, "_running", run)
        try:
            with placed(self.place):
                yield
        finally:
            object.__setattr__(self, "_running", None)

    def _active(self) -> Any:
        run = self.__dict__.get("_running")
        if run is None:
            raise NotRunningError("The source is not running.", "Call run() or batches() first.")
        return run

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_running"}

    def decoder(self, columns: Sequence[str] | None = None) -> RowDecoder:
        """Make a decoder for the raw rows that :meth:`open` and :meth:`batches` return.

        ::

            decoder = source.decoder()
            for batch in source.batches():
                for rows in decoder.decoded([batch.records]):
                    store(rows)
                batch.ack()

        The schemas of the topics are fetched now. Each field becomes a column. Values that do not
        fit are treated as ``malformed`` says. Handlers use ``message.data`` instead.

        Args:
            columns: Wanted columns, in this order; default: all.

        Raises:
            SchemaError: The topics have different columns, or a schema has a type that no column
                can hold.
            ConfigError: A required package is missing, a column does not exist, or keys are stored
                apart from values and ``metadata_columns`` does not name ``__keyBytes``.
            KeyShardError: The schemas cannot be fetched.
        """
        from keyshard.broker.schemas import first_tries_s, topics_of  # noqa: PLC0415
        from keyshard.columns.codecs import keys_apart  # noqa: PLC0415
        from keyshard.columns.record_batches import columns_of  # noqa: PLC0415
        from keyshard.reading.decoder import RowDecoder  # noqa: PLC0415
        from keyshard.reading.decoding_plan import plan_decoding  # noqa: PLC0415

        connection = self.how_to_connect()
        plan = plan_decoding(
            connection, topics_of(self), self.malformed, self.metadata_columns,
            tries_s=first_tries_s(connection),
        )  # fmt: skip
        made = RowDecoder(plan, plan.columns if columns is None else plan.only(columns))
        apart = any(map(keys_apart, plan.schemas.values()))
        if apart and set(made.raw_columns) - set(columns_of(self.metadata_columns)):
            raise ConfigError(
                "A topic of this source stores keys separately, and a decoder needs their bytes.",
                NAME_KEY_BYTES,
            )
        return made

    def open(self, checkpoint: str | None = None) -> SourceStream:
        """Start consuming in this process.

        Args:
            checkpoint: Text of the checkpoint that was committed last; ``None`` at the first start.

        Raises:
            KeyShardError: See :meth:`keyshard.coordinator.coordinator.Coordinator.start`.
        """
        stored = None if checkpoint is None else Checkpoint.from_json(checkpoint)
        check_owner(None if stored is None else stored.outputs, None)
        from keyshard.handlers.range_owners import observe_stream  # noqa: PLC0415
        from keyshard.observe.telemetry import PlannedSpans  # noqa: PLC0415

        spans = PlannedSpans(self) if self.telemetry else None
        coordinator = self.coordinator()
        with owned_by(coordinator.fail):
            monitor = observe_stream(coordinator, self, "stream")
        try:
            coordinator.start(stored)
        except BaseException:
            monitor.close()
            raise
        return SourceStream(coordinator, monitor, spans)
