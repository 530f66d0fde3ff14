"""The public API for publishing: a sink."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from contextvars import copy_context
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from keyshard.base_error import placed
from keyshard.config.sink import EXACTLY_ONCE, SinkConfig
from keyshard.core.message import Produce
from keyshard.core.option_checks import check_integer
from keyshard.core.publishing import BATCH_ID_MAX
from keyshard.errors import (
    BrokerError,
    BrokerUnavailableError,
    ConfigError,
    KeyShardError,
    NotRunningError,
    RuntimeStoppedError,
)
from keyshard.threads import Pool

if TYPE_CHECKING:
    import pyarrow as pa

    from keyshard.broker.port import Broker
    from keyshard.columns.outgoing import Outgoing
    from keyshard.core.message import MessageId
    from keyshard.observe.sink_status import SinkMonitor, SinkStatus
    from keyshard.observe.telemetry import Telemetry
    from keyshard.publishing.batch_writer import WriteReport
    from keyshard.publishing.message_writer import MessageWriter
    from keyshard.publishing.sink_claim import Claim
    from keyshard.publishing.values import Values

T = TypeVar("T")


class KeyShardSink(SinkConfig):
    """A topic of a Pulsar cluster to publish to.

    The object is a description. It connects with the first message, and :meth:`close` disconnects::

        with KeyShardSink("orders", sink_id="billing") as sink:
            sink.send(b"paid", key="order-17")
            sink.write_batch(record_batch, batch_id=7)

    Args: see the fields of :class:`keyshard.config.sink.SinkConfig`.

    Raises:
        ConfigError: A value is missing or outside its limits.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "_open", _Open(self))

    def send(
        self,
        value: bytes | None,
        *,
        key: str | None = None,
        ordering_key: str | None = None,
        properties: Mapping[str, str] | None = None,
        event_time: datetime | None = None,
        deliver_at: datetime | None = None,
    ) -> Future[MessageId]:
        """Publish a message, at least once. Wait while too much is unconfirmed.

        The messages of one thread are stored in the order of its calls per key, except those that
        fail.

        Args:
            value: Payload; ``None`` for a null value.
            key: Partition key; ``None`` for no key.
            ordering_key: Ordering key; ``None`` for none.
            properties: Properties; default none.
            event_time: Event time with a time zone.
            deliver_at: Delivery time with a time zone, for shared subscriptions.

        Returns:
            A future of the message id. It fails with ``BrokerUnavailableError`` if the message is
            not confirmed in time; the message may be stored nevertheless. If a message was found to
            be stored after a lost connection, its ledger is -1.

        Raises:
            ConfigError: An argument has the wrong type, or the connection has transport ``client``.
            MessageTooLargeError: The message exceeds the limit of the broker.
            BrokerError: The broker refuses the producer, or the sink is closed.
        """
        from keyshard.columns.outgoing import OutgoingMessage  # noqa: PLC0415

        one = Produce(
            value, key=key, ordering_key=ordering_key, properties=properties,
            event_time=event_time, deliver_at=deliver_at,
        )  # fmt: skip
        writer, telemetry = self._state.writer(self), self._state.telemetry
        if telemetry is None:
            return writer.send(OutgoingMessage.of(one))
        return telemetry.send(one, self.topic, lambda each: writer.send(OutgoingMessage.of(each)))

    async def asend(
        self,
        value: bytes | None,
        *,
        key: str | None = None,
        ordering_key: str | None = None,
        properties: Mapping[str, str] | None = None,
        event_time: datetime | None = None,
        deliver_at: datetime | None = None,
    ) -> MessageId:
        """Publish a message as :meth:`send` does, and return its id once it is confirmed.

        A thread connects and waits for room, so the event loop goes on. Messages are stored in the
        order in which their coroutines start, per key, except those that fail. A message that waits
        for earlier ones longer than ``send_timeout_ms`` is not sent. A message whose coroutine is
        cancelled may be stored.

        Args: see :meth:`send`.

        Raises:
            KeyShardError: As :meth:`send`, or the error of its future.
        """
        end_s = time.monotonic() + self.send_timeout_ms / 1000

        def send() -> Future[MessageId]:
            if time.monotonic() > end_s:
                raise BrokerUnavailableError(
                    f"A message to {self.topic} waited for earlier ones for more than "
                    f"{self.send_timeout_ms / 1000:g} s, and is not sent.",
                    "Check the health of the broker.",
                )
            return self.send(
                value, key=key, ordering_key=ordering_key, properties=properties,
                event_time=event_time, deliver_at=deliver_at,
            )  # fmt: skip

        call = partial(copy_context().run, send)
        sent = await asyncio.wrap_future(self._state.submit(self, call))
        return await asyncio.wrap_future(sent)

    def flush(self) -> None:
        """Wait until all messages that were sent before are confirmed, or have failed.

        Raises:
            KeyShardError: A message has failed since the last flush.
        """
        self._state.flush()

    def write_batch(
        self, batch: pa.RecordBatch | pa.Table, batch_id: int, partition: int = 0
    ) -> WriteReport:
        """Write rows exactly once. A repeated call with the same rows stores nothing twice.

        The broker has to deduplicate the topic. The rows are distributed by key, and each entry
        has one key. The rows of a key keep their order; a repeated call may have the keys in
        another order. The number of topic partitions and ``hashing_scheme`` must not change between
        a call and its repetition. With ``delivery_guarantee='at-least-once'``, a repeated call
        stores them again.

        Args:
            batch: Columns ``value`` (binary or text), and optionally ``__key`` or ``__keyBytes``,
                ``__orderingKey``, ``__eventTime``, ``__properties`` and ``__deliverAt``. Column
                ``__topic`` names the topic of each row, instead of the topic of the sink. With
                a ``value_format`` other than ``raw``, the other columns are the value.
            batch_id: Id of the batch, 0 to 2,147,483,647. Later batches have higher ids.
            partition: Number of this writer, if several write parts of one batch.

        Returns:
            Rows, entries, and the rows that an earlier attempt had stored.

        Raises:
            ConfigError: The sink has no ``sink_id``, a column does not fit, or a row has no topic.
            SchemaError: A column or a value does not fit the schema. Nothing was sent.
            TopicNotFoundError: A topic does not exist. Nothing of the batch was sent.
            MessageTooLargeError: A row is too large. Nothing of the batch was sent.
            DeduplicationError: The broker does not deduplicate the topic.
            ProducerBusyError: Another program writes with this sink id (retriable).
            ProducerFencedError: Another program wrote a later batch with this sink id.
            BatchMismatchError: An earlier attempt wrote other rows, or distributed them otherwise.
            BrokerUnavailableError: Not everything was confirmed in time (retriable): repeat the
                call.
        """
        return self._write_batch(batch, batch_id, partition, asks_admin=True)

    def _write_batch(
        self,
        batch: pa.RecordBatch | pa.Table,
        batch_id: int,
        partition: int,
        *,
        new: bool = False,
        claim: Claim | None = None,
        asks_admin: bool = False,
        order_by: Collection[str] = (),
    ) -> WriteReport:
        """Write rows exactly once; see :func:`keyshard.publishing.batch_writer.write`.

        Args:
            asks_admin: Whether to ask the admin interface, once for each topic, if the broker
                deduplicates it.
            order_by: Columns that ordered the rows. Those that are neither message columns nor
                fields of the schema of a topic are not written to it.
        """
        from keyshard.publishing.batch_writer import write  # noqa: PLC0415

        if self.sink_id is None and self.delivery_guarantee == EXACTLY_ONCE:
            raise ConfigError(
                "write_batch() needs a sink_id, by which the broker recognises duplicates.",
                "Set it, such as KeyShardSink(..., sink_id='billing').",
            )
        check_integer("batch_id", batch_id, 0, BATCH_ID_MAX)
        check_integer("partition", partition, 0, BATCH_ID_MAX)
        topics = self._outgoing(batch, order_by)
        if asks_admin and self.delivery_guarantee == EXACTLY_ONCE:
            self._state.check_deduplication(self, topics)
        name = f"{self.sink_id}-{partition}"
        broker, telemetry = self._state.broker(self), self._state.telemetry
        counts = self._state.counts
        with placed(self.place), ExitStack() as spans:
            if telemetry is not None:
                for topic, rows in topics.items():
                    spans.enter_context(telemetry.sending(topic, len(rows)))
            try:
                report = write(
                    broker, self, topics, batch_id, name=name, partition=partition, new=new,
                    claim=claim, counts=counts,
                )  # fmt: skip
            except KeyShardError as exc:
                counts.note_error(exc)
                raise
        counts.note_batch(report.already_stored)
        return report

    def _check_batch(
        self, batch: pa.RecordBatch | pa.Table, order_by: Collection[str] = ()
    ) -> None:
        """Check rows as :meth:`_write_batch` does before the first one, and send none."""
        from keyshard.publishing.preflight import check_rows  # noqa: PLC0415

        check_rows(self._state.broker(self), self, self._outgoing(batch, order_by))

    def _outgoing(
        self, batch: pa.RecordBatch | pa.Table, order_by: Collection[str]
    ) -> dict[str, Outgoing]:
        """Return the rows of each topic as messages, by its full name."""
        from keyshard.columns.routing import by_topic  # noqa: PLC0415

        values = self._state.values(self)
        return {
            topic: values.outgoing(topic, rows, order_by)
            for topic, rows in by_topic(batch, self.topic).items()
        }

    def status(self) -> SinkStatus:
        """Return the status of a connected sink as JSON values; see docs/status.md.

        The status comes from memory, so any thread may ask.

        Raises:
            NotRunningError: The sink is not connected: it sent nothing yet, or it is closed.
        """
        return self._state.status(self)

    def close(self) -> None:
        """Wait until all sent messages are confirmed, and disconnect. Idempotent.

        Raises:
            KeyShardError: A message has failed since the last flush.
        """
        self._state.stopping()
        try:
            self.flush()
        finally:
            self._state.close()

    def __enter__(self) -> KeyShardSink:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc is None:
            self.close()
        else:
            self._state.close()

    async def __aenter__(self) -> KeyShardSink:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # A thread waits for the messages, so the event loop goes on. If this coroutine is
        # cancelled, the thread still closes the sink.
        pool = Pool(1, "keyshard-sink-close")
        closing = asyncio.wrap_future(pool.submit(self._aclose, exc))
        pool.shutdown(wait=False)
        await asyncio.shield(closing)

    def _aclose(self, exc: BaseException | None) -> None:
        """Close the sink; without an error, wait for the calls of :meth:`asend` that have begun."""
        if exc is None:
            with suppress(BrokerError):  # another task has closed it
                self._state.submit(self, _nothing).result()
        self.__exit__(None, exc, None)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_open"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self.__dict__["_open"] = _Open(self)

    @property
    def _state(self) -> _Open:
        found: _Open = self.__dict__["_open"]
        return found


class _Open:
    """The connection of a sink, and the objects that use it."""

    def __init__(self, config: SinkConfig) -> None:
        self.telemetry: Telemetry | None = None
        if config.telemetry:
            from keyshard.observe.telemetry import Telemetry  # noqa: PLC0415

            self.telemetry = Telemetry(config.how_to_connect().address)
        from keyshard.publishing.counts import SinkCounts  # noqa: PLC0415

        self.counts = SinkCounts()
        self._lock = threading.Lock()
        self._broker: Broker | None = None
        self._values: Values | None = None
        self._writer: MessageWriter | None = None
        self._monitor: SinkMonitor | None = None
        self._deduplicated: set[str] = set()
        """Topics that the broker deduplicates, as its admin interface says."""
        self._async_calls = Pool(1, "keyshard-sink-async")
        """One thread: it keeps the order of coroutines."""
        self._closed = False

    def broker(self, config: SinkConfig) -> Broker:
        """Return the connection; the first call opens it."""
        with self._lock:
            return self._connect(config)

    def values(self, config: SinkConfig) -> Values:
        """Return the object that makes messages from rows; the first call makes it."""
        from keyshard.publishing.values import Values  # noqa: PLC0415

        with self._lock:
            if self._values is None:
                self._values = Values(config)
            return self._values

    def check_deduplication(self, config: SinkConfig, topics: Collection[str]) -> None:
        """Check with the admin interface, if there is one, that the broker deduplicates topics."""
        if config.how_to_connect().admin_url is None:
            return
        from keyshard.publishing.preflight import check_deduplication  # noqa: PLC0415

        asked = [topic for topic in topics if topic not in self._deduplicated]
        if asked:
            check_deduplication(config, asked)
            self._deduplicated.update(asked)

    def writer(self, config: SinkConfig) -> MessageWriter:
        """Return the writer of single messages; the first call makes it."""
        if (found := self._writer) is not None:
            return found
        from keyshard.publishing.message_writer import MessageWriter  # noqa: PLC0415

        with self._lock:
            if self._writer is None:
                self._writer = MessageWriter(self._connect(config), config, self.counts)
                self.counts.collected = self._writer.collected
            return self._writer

    def submit(self, config: SinkConfig, action: Callable[[], T]) -> Future[T]:
        """Let a thread call an action, after those that were submitted before."""
        try:
            return self._async_calls.submit(action)
        except RuntimeStoppedError:
            raise _closed(config) from None

    def flush(self) -> None:
        """Wait for single messages."""
        with self._lock:
            writer = self._writer
        if writer is not None:
            writer.flush()

    def status(self, config: SinkConfig) -> SinkStatus:
        # Without the lock, which is held while the sink connects.
        monitor = self._monitor
        if monitor is None:
            if self._closed:
                raise NotRunningError(f"The sink of {config.topic} is closed.", "Make a new one.")
            raise NotRunningError(
                f"The sink of {config.topic} is not connected: it connects with its first message.",
                "Ask again after that.",
            )
        return monitor.status()

    def stopping(self) -> None:
        """Show the sink as stopping."""
        monitor = self._monitor
        if monitor is not None:
            monitor.stopping()

    def close(self) -> None:
        """Disconnect. Idempotent."""
        with self._lock:
            self._closed = True
            writer, broker, monitor = self._writer, self._broker, self._monitor
            self._writer = self._broker = self._monitor = None
        self._async_calls.shutdown(wait=False)
        try:
            if writer is not None:
                writer.close()
        finally:
            try:
                if broker is not None:
                    with suppress(BrokerError):
                        broker.close()
            finally:
                if monitor is not None:
                    monitor.close()

    def _connect(self, config: SinkConfig) -> Broker:
        from keyshard.broker.connect import connect  # noqa: PLC0415
        from keyshard.observe.sink_status import SinkMonitor  # noqa: PLC0415

        if self._closed:
            raise _closed(config)
        if self._broker is None:
            broker = connect(config.how_to_connect())
            try:
                self._monitor = SinkMonitor(config, self.counts)
            except BaseException:
                broker.close()
                raise
            self._broker = broker
        return self._broker


def _closed(config: SinkConfig) -> BrokerError:
    return BrokerError(f"The sink of {config.topic} is closed.", "Make a new one to publish more.")


def _nothing() -> None:
    """Do nothing: its future shows that all earlier calls of the thread have ended."""
