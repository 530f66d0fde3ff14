"""The public source: what to consume, and the embedded way to consume it from Python."""

from __future__ import annotations

# A run loads packages that need it, and once the main thread has ended it does not load.
import concurrent.futures.thread  # noqa: F401
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from types import TracebackType
from typing import TYPE_CHECKING, Any

from keyshard.config.handlers import HandlerConfig
from keyshard.config.source import SourceConfig
from keyshard.core.dead_letter.selection import Selection
from keyshard.core.metadata_columns import NAME_KEY_BYTES
from keyshard.core.option_checks import (
    check_bool,
    check_integer,
    check_names,
    check_seconds,
    suggesting,
)
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.ring.hash_range import RING_SIZE
from keyshard.errors import ConfigError, NotRunningError
from keyshard.redaction import shown
from keyshard.threads import begin

if TYPE_CHECKING:
    import pyarrow as pa
    from typing_extensions import Unpack  # known to type checkers; nothing imports it at run time

    from keyshard.config.handlers import HandlerOptions
    from keyshard.coordinator.coordinator import Coordinator
    from keyshard.coordinator.progress import Progress
    from keyshard.coordinator.rescale import Rescaler, RescaleReport
    from keyshard.handlers.batches import Batch, BatchRun
    from keyshard.handlers.calling import Handle
    from keyshard.handlers.observing import Observer
    from keyshard.observe.status_types import Status
    from keyshard.reading.structured import Decoder


def _handling(options: HandlerOptions) -> HandlerConfig:
    check_names("run()", options, {field.name for field in fields(HandlerConfig)})
    return HandlerConfig(**options)


CUT_AGAIN_S = 0.01
"""Pause before rows that no cut took are tried again, seconds."""


class KeyShardSource(SourceConfig):
    """Topics of a Pulsar cluster, consumed by ``parallelism`` hash ranges.

    A frozen description; nothing connects before :meth:`open`, or before a host engine starts it::

        source = KeyShardSource("orders", subscription="billing", parallelism=10)

    Args: see the fields of :class:`keyshard.config.source.SourceConfig`.

    Raises:
        ConfigError: A value is missing or outside its limits.
        NonPersistentTopicError: A topic is non-persistent.
    """

    def coordinator(self) -> Coordinator:
        """An unstarted runtime for this source; connects in the process that starts it.

        Raises:
            ConfigError: The source names no subscription.
        """
        from keyshard.broker.connect import connect, connect_admin  # noqa: PLC0415
        from keyshard.broker.pulsar.first_question import ANSWER_S  # noqa: PLC0415
        from keyshard.coordinator.coordinator import Coordinator  # noqa: PLC0415

        self.check_subscribed()
        connection = self.how_to_connect()
        admin = None if self.admin_url is None else connect_admin(connection, ANSWER_S)
        return Coordinator(self, lambda: connect(connection, self.hosting()), admin)

    def run(
        self,
        handle: Handle,
        *,
        observers: Sequence[Observer] = (),
        **options: Unpack[HandlerOptions],
    ) -> None:
        """Call ``handle`` with every message, in key order, until it is stopped.

        ::

            source.run(handle, lanes=16, checkpoint="file:///var/lib/app/orders.json")

        A message is acknowledged after ``handle`` returned for all messages of its entry. SIGTERM,
        Ctrl-C and :meth:`stop` end the run gracefully: running handlers finish, and what they
        completed is committed.

        Args:
            handle: ``def`` or ``async def``, called with a :class:`keyshard.Message`. It may raise
                :class:`keyshard.RetryLater` or :class:`keyshard.Reject`. After any other
                exception, the retry policy decides. A returned exception counts as raised.
            observers: Who is told about every attempt.
            **options: Fields of :class:`keyshard.HandlerConfig`.

        Raises:
            ConfigError: An option is wrong, no subscription is named, or the source runs already.
            KeyShardError: What ended the source.
        """
        from keyshard.handlers.run import HandlerRun  # noqa: PLC0415

        if not isinstance(observers, Sequence):
            raise ConfigError(f"observers is {shown(observers)}; give a list of observers.")
        run = HandlerRun(self.coordinator(), self, _handling(options), handle, observers)
        with self.running_as(run):
            run.run()

    @suggesting
    def batches(
        self,
        max_rows: int = 5_000,
        max_wait_s: float = 1.0,
        *,
        checkpoint: str | os.PathLike[str] | None = None,
    ) -> Iterator[Batch]:
        """Batches of Arrow rows, for programs that acknowledge each when they are done with it.

        ::

            for batch in source.batches(max_rows=5000, max_wait_s=1.0):
                store(batch.records)
                batch.ack()

        Args:
            max_rows: Most rows of a batch, unless one entry has more.
            max_wait_s: Longest wait for more rows after the first, seconds.
            checkpoint: Path or fsspec URL of a checkpoint; with it nothing acknowledged comes again
                after a crash, without it the last moments may.

        Raises:
            ConfigError: An option is wrong, or the source runs already.
            WindowFullError: Nobody acknowledges.
            KeyShardError: What ended the source.
        """
        from keyshard.handlers.batches import BatchRun  # noqa: PLC0415

        check_integer("max_rows", max_rows, 1, 10**9)
        check_seconds("max_wait_s", max_wait_s, 86_400)
        return self._batches(
            BatchRun(self.coordinator(), self, max_rows, max_wait_s, checkpoint=checkpoint)
        )

    def _batches(self, run: BatchRun) -> Iterator[Batch]:
        with self.running_as(run):
            yield from run.batches()

    def rescale(self, ranges: int | None = None, *, balance: bool = False) -> RescaleReport:
        """Move ranges while :meth:`run` or :meth:`batches` goes on, in another thread.

        As little of the ring as possible changes hands. Handlers that work on keys of it end
        first, then their range is subscribed by its new owner; other keys go on meanwhile. Not
        from a handler, which would wait for itself.

        With a checkpoint, which has it within moments, a restart goes on with these ranges, until
        ``parallelism`` is configured to be another one. Without, it begins with ``parallelism``.

        Args:
            ranges: Number of ranges from now on, 1 to 65,536.
            balance: Instead: give the ranges there are equal loads, as measured since the start.

        Raises:
            ConfigError: Both are given, or none, or ``ranges`` is outside its limits.
            NotRunningError: The source does not run.
            DrainTimeoutError: A handler did not end within ``drain_timeout_s``; nothing has moved.
            RescaleError: The broker did not let the ranges change hands.
        """
        check_bool("balance", balance)
        if ranges is not None:
            check_integer("ranges", ranges, 1, RING_SIZE)
        if (ranges is None) != balance:
            raise ConfigError("Give rescale() either a number of ranges or balance=True.")
        rescaler: Rescaler | None = self._active().rescaler
        if rescaler is None:
            raise NotRunningError("The source is still starting. Try again in a moment.")
        return rescaler.balance() if ranges is None else rescaler.rescale(ranges)

    def stop(self) -> None:
        """End :meth:`run` or :meth:`batches` gracefully; returns at once, from any thread."""
        self._active().stop()

    def unpark(
        self,
        key: str | None = None,
        *,
        all: bool = False,  # noqa: A002 - named as on the command line
        topic: str | None = None,
        older_than_s: float | None = None,
    ) -> int:
        """Let parked keys out: their dead letters are replayed in order, then newer messages pass.

        Returns at once. The keys come out a few at a time, so that other keys do not wait for them.
        A dead letter that fails again parks its key again.

        Args:
            key: The routing key: the ordering key, else the partition key.
            all: Instead: every key that is parked.
            topic: Instead: keys with dead letters of this topic.
            older_than_s: Instead, or together with ``topic``: keys parked for longer, seconds.

        Returns:
            How many keys are parked that are meant, or were and are on their way out.

        Raises:
            ConfigError: It does not say which keys.
            NotRunningError: :meth:`run` does not run.
        """
        selection = Selection(key, all, topic, older_than_s)
        count: int = self._parking().unpark(selection)
        return count

    def discard(
        self,
        key: str | None = None,
        *,
        all: bool = False,  # noqa: A002 - named as on the command line
        topic: str | None = None,
        older_than_s: float | None = None,
        rejected: bool = False,
    ) -> int:
        """Give dead letters up for good; keys without any left are parked no more.

        Keys that are on their way out are left to it.

        Args:
            key: As for :meth:`unpark`, as the three that follow.
            all: Every one.
            topic: Those of messages of this topic.
            older_than_s: Those that have been there for longer, seconds.
            rejected: Rejected ones, and those that went without their key, instead of those of
                parked keys; every one where nothing else is given. Letters that were given up
                before and are still stored count again.

        Returns:
            How many dead letters.

        Raises:
            ConfigError: It does not say which.
            NotRunningError: :meth:`run` does not run.
            BrokerError: The broker cannot be reached, or refused.
        """
        selection = Selection.for_discard(key, all, topic, older_than_s, rejected=rejected)
        count: int = self._parking().discard(selection, rejected=rejected)
        return count

    def _parking(self) -> Any:
        run = self._active()
        if not hasattr(run, "unpark"):
            raise NotRunningError("batches() parks no keys, nor does a Ray job; only run() does.")
        return run

    def status(self) -> Status:
        """What a running source does, range by range, as plain JSON values; see docs/status.md.

        From memory, from any thread. What the broker says is a few seconds old, and ``None``
        without ``admin_url``. While the source starts, its ``state`` says so and it has no ranges.

        Raises:
            NotRunningError: It does not run.
        """
        status: Status = self._active().status()
        return status

    @contextmanager
    def running_as(self, run: Any) -> Iterator[None]:
        """Inside, :meth:`stop`, :meth:`status` and the like ask ``run``; for adapters.

        Raises:
            ConfigError: The source runs already.
        """
        if self.__dict__.get("_running") is not None:
            raise ConfigError("This source runs already. Make another KeyShardSource to run twice.")
        object.__setattr__(self, "_running", run)
        try:
            yield
        finally:
            object.__setattr__(self, "_running", None)

    def _active(self) -> Any:
        run = self.__dict__.get("_running")
        if run is None:
            raise NotRunningError("The source does not run. Call run() or batches() first.")
        return run

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_running"}

    def decoder(self, columns: Sequence[str] | None = None) -> Decoder:
        """What makes decoded rows of the raw ones that :meth:`open` and :meth:`batches` hand out.

        ::

            decoder = source.decoder()
            for batch in source.batches():
                for rows in decoder.decoded([batch.records]):
                    store(rows)
                batch.ack()

        The schemas of the topics are asked for now. Fields are columns, and values that do not fit
        are treated as ``malformed`` says; handlers have ``message.data``.

        Args:
            columns: Those that are wanted, in their order; default all.

        Raises:
            SchemaError: The topics have different columns, or one has what no column can hold.
            ConfigError: A package that is needed is missing, there is no such column, or keys
                stand apart from values and ``metadata_columns`` does not name ``__keyBytes``.
            KeyShardError: The schemas cannot be asked for.
        """
        from keyshard.arrow.columns import columns_of  # noqa: PLC0415
        from keyshard.broker.schemas import first_tries_s, topics_of  # noqa: PLC0415
        from keyshard.reading.decoding_plan import plan_decoding  # noqa: PLC0415
        from keyshard.reading.structured import Decoder  # noqa: PLC0415
        from keyshard.schemas.codecs import keys_apart  # noqa: PLC0415

        connection = self.how_to_connect()
        plan = plan_decoding(
            connection, topics_of(self), self.malformed, self.metadata_columns,
            tries_s=first_tries_s(connection),
        )  # fmt: skip
        made = Decoder(plan, plan.columns if columns is None else plan.only(columns))
        apart = any(map(keys_apart, plan.schemas.values()))
        if apart and set(made.raw_columns) - set(columns_of(self.metadata_columns)):
            raise ConfigError(
                "Keys of a topic of this source stand apart from their values, and a decoder needs "
                f"the bytes that they were set as: {NAME_KEY_BYTES}"
            )
        return made

    def open(self, checkpoint: str | None = None) -> SourceStream:
        """Start consuming in this process.

        Args:
            checkpoint: Text of the checkpoint that was committed last; ``None`` at first start.

        Raises:
            KeyShardError: See :meth:`keyshard.coordinator.coordinator.Coordinator.start`.
        """
        coordinator = self.coordinator()
        coordinator.start(None if checkpoint is None else Checkpoint.from_json(checkpoint))
        return SourceStream(coordinator)


class SourceStream:
    """A running source, for programs that are their own host; a context manager.

    Store the rows and the checkpoint of a batch together, then :meth:`commit`::

        with source.open(load_checkpoint()) as stream:
            while batch := stream.next_batch(timeout_s=60):
                for rows in batch:
                    store(rows)
                save_checkpoint(batch.checkpoint)
                stream.commit(batch)
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._closed = False
        self._pid = os.getpid()

    def __del__(self) -> None:
        """Close a stream without references, in a thread: the collector may hold any lock.

        A forked child has only a copy, and leaves it to its parent.
        """
        if self._closed or self._pid != os.getpid() or sys.is_finalizing():
            return
        warnings.warn("A SourceStream was not closed.", ResourceWarning, source=self, stacklevel=2)
        begin("keyshard-close-stream", self._coordinator.stop)

    def next_batch(self, timeout_s: float, rows_max: int | None = None) -> SourceBatch | None:
        """The next batch; ``None`` when nothing came in time.

        Args:
            timeout_s: Longest wait for the first row, seconds.
            rows_max: Most rows; default ``batch_rows_max`` of the source.

        Raises:
            KeyShardError: What ended the source.
        """
        check_seconds("timeout_s", timeout_s, 86_400)
        if rows_max is not None:
            check_integer("rows_max", rows_max, 1, 10**9)
        deadline = time.monotonic() + timeout_s
        while self._coordinator.batches.wait_for_rows(max(0.0, deadline - time.monotonic())):
            checkpoint = self._coordinator.batches.cut(rows_max)
            if checkpoint is not None:
                return SourceBatch(self._coordinator, checkpoint, self)
            # There are rows, but fewer than batch_rows_min, or the checkpoint has no room for them.
            if time.monotonic() + CUT_AGAIN_S >= deadline:
                return None
            time.sleep(CUT_AGAIN_S)
        return None

    def commit(self, batch: SourceBatch) -> None:
        """The batch's checkpoint is durable: acknowledge it, and all batches before it."""
        self._coordinator.batches.release(batch.end)

    def status(self) -> Progress:
        """Counts since the start, as plain JSON values."""
        return self._coordinator.status()

    def close(self) -> None:
        """Stop receiving, flush acknowledgements and give the ranges back. Idempotent."""
        self._closed = True
        self._coordinator.stop()

    def __enter__(self) -> SourceStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class SourceBatch:
    """A planned batch: Arrow record batches, one layout partition after the other.

    The rows of one key lie in one layout partition, in publish order per topic partition.
    """

    def __init__(
        self, coordinator: Coordinator, end: Checkpoint, stream: SourceStream | None = None
    ) -> None:
        self._coordinator = coordinator
        self._stream = stream
        """Closes the coordinator if it is dropped without ``close()``."""
        self.end = end

    @property
    def checkpoint(self) -> str:
        """Text to store; :meth:`KeyShardSource.open` continues after this batch."""
        return self.end.to_json()

    @property
    def partitions(self) -> list[int]:
        """Indices of the hash ranges that have rows in this batch."""
        return self._coordinator.batches.plan(self.end)

    def read(self, partition: int) -> Iterator[pa.RecordBatch]:
        """Rows of one hash range, the same at every call until :meth:`SourceStream.commit`."""
        return self._coordinator.worker.read(self.end.batch_id, partition)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for partition in self.partitions:
            yield from self.read(partition)
