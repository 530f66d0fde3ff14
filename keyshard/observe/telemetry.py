"""Spans and metrics of OpenTelemetry, by its API and its conventions for messaging (1.44).

The package is loaded when a run or a sink has ``telemetry=True``. Without it, nothing is wrapped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from keyshard.base_error import one_line
from keyshard.core.message import Message, MessageId, Produce
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.errors import ConfigError, ThreadStartError
from keyshard.threads import begin
from keyshard.version import VERSION

if TYPE_CHECKING:
    import pyarrow as pa
    from opentelemetry.trace import Span

    from keyshard.config.source import SourceConfig

SYSTEM = "messaging.system"
OPERATION = "messaging.operation.name"
OPERATION_TYPE = "messaging.operation.type"
DESTINATION = "messaging.destination.name"
PARTITION = "messaging.destination.partition.id"
SUBSCRIPTION = "messaging.destination.subscription.name"
MESSAGE_ID = "messaging.message.id"
MESSAGES = "messaging.batch.message_count"
ADDRESS = "server.address"
PORT = "server.port"
ERROR = "error.type"
BATCH_ID = "keyshard.batch.id"
TOPICS = "keyshard.topics"

LINKS_MAX = 128
"""Most rows of a batch whose producers are linked, evenly over the batch. The SDK of OpenTelemetry
keeps as many links by default."""
LOOK_S = 0.1
"""Time after which handlers look for a provider again if there was none, seconds."""
TOPICS_MAX = 20
"""Most topics that a span names."""

Attributes = dict[str, str | int]

_log = logging.getLogger(__name__)


class Telemetry:
    """Makes spans and metrics with the providers that the program has set.

    Args:
        address: Host and port of the service URL; ``None`` if they are not known.

    Raises:
        ConfigError: The package is not installed.
    """

    def __init__(self, address: tuple[str, int] | None) -> None:
        try:
            from opentelemetry import metrics, propagate, trace  # noqa: PLC0415
        except ImportError as exc:
            raise ConfigError(
                "telemetry is on, but the package opentelemetry-api is not installed.",
                "Install keyshard[otel], or leave telemetry out.",
            ) from exc
        self._trace, self._propagate, self._metrics = trace, propagate, metrics
        self._server: Attributes = {}
        if address is not None:
            self._server = {ADDRESS: address[0], PORT: address[1]}
        self._recorded = False
        """Whether the program has set a provider, which is then never replaced."""
        self._look_s = 0.0
        self._tracer = trace.get_tracer("keyshard", VERSION)
        meter = metrics.get_meter("keyshard", VERSION)
        self._consumed = meter.create_counter(
            "messaging.client.consumed.messages", "{message}", "Messages given to handlers."
        )
        self._process_s = meter.create_histogram(
            "messaging.process.duration", "s", "Duration of an attempt of the handler."
        )
        self._sent = meter.create_counter(
            "messaging.client.sent.messages", "{message}", "Messages that were published."
        )
        self._operation_s = meter.create_histogram(
            "messaging.client.operation.duration", "s", "Time until the broker has confirmed."
        )

    # -- messages that handlers get, and what they return -----------------------------------------

    def processed(
        self, handle: Callable[[Message], Any], subscription: str, outputs: str | None
    ) -> Callable[[Message], Any]:
        """Wrap a call of a handler in a span.

        Args:
            handle: Calls it, and returns the messages to publish.
            subscription: Name of the subscription.
            outputs: Topic of its outputs; ``None`` without a sink.
        """

        def call(message: Message) -> Any:
            if self._idle():
                return handle(message)
            with self._processing(message, subscription):
                return self._created(handle(message), outputs)

        return call

    def processed_async(
        self,
        handle: Callable[[Message], Coroutine[Any, Any, Any]],
        subscription: str,
        outputs: str | None,
    ) -> Callable[[Message], Coroutine[Any, Any, Any]]:
        """Do the same as :meth:`processed` for a coroutine function."""

        async def call(message: Message) -> Any:
            if self._idle():
                return await handle(message)
            with self._processing(message, subscription):
                return self._created(await handle(message), outputs)

        return call

    def _idle(self) -> bool:
        """Return whether the program has set no provider, so that nothing is recorded.

        A look for providers takes ten times as long as a call without one. So at most one call
        looks in each :data:`LOOK_S`.
        """
        if self._recorded:
            return False
        now_s = time.monotonic()
        if now_s >= self._look_s:
            self._look_s = now_s + LOOK_S
            self._recorded = _records(self._trace.get_tracer_provider()) or _records(
                self._metrics.get_meter_provider()
            )
        return not self._recorded

    @contextmanager
    def _processing(self, message: Message, subscription: str) -> Iterator[None]:
        common: Attributes = {
            SYSTEM: "pulsar", OPERATION: "process",
            DESTINATION: message.topic, SUBSCRIPTION: subscription, **self._server,
        }  # fmt: skip
        if message.partition >= 0:
            common[PARTITION] = str(message.partition)
        producer = self._trace.get_current_span(
            self._propagate.extract(message.properties)
        ).get_span_context()
        links = [self._trace.Link(producer)] if producer.is_valid else []
        attributes = {**common, OPERATION_TYPE: "process", MESSAGE_ID: str(message.message_id)}
        began_s = time.perf_counter()
        try:
            with self._tracer.start_as_current_span(
                f"process {message.topic}",
                kind=self._trace.SpanKind.CONSUMER, attributes=attributes, links=links,
            ) as span:  # fmt: skip
                try:
                    yield
                except BaseException as exc:
                    common[ERROR] = _name_of(exc)
                    span.set_attribute(ERROR, common[ERROR])
                    raise
        finally:
            self._consumed.add(1, common)
            self._process_s.record(time.perf_counter() - began_s, common)

    def _created(self, outputs: Any, topic: str | None) -> Any:
        if topic is None or not outputs:
            return outputs
        return [self._create(one, one.topic or topic) for one in outputs]

    def _create(self, one: Produce, topic: str) -> Produce:
        span = self._start("create", topic, {})  # A sink may publish it to another cluster.
        span.end()
        return self._with_context(one, span)

    # -- batches -----------------------------------------------------------------------------------

    def batch(
        self,
        topics: Iterable[str],
        subscription: str,
        *,
        batch_id: str = "",
        rows: int = 0,
        properties: pa.Array | None = None,
    ) -> BatchSpan:
        """Begin the span of a batch.

        Args:
            topics: Topics of its rows.
            subscription: Name of the subscription.
            batch_id: Its id, if it has one.
            rows: Number of its rows, if it is known.
            properties: Properties of its rows, from which producers are linked.
        """
        names = sorted(set(topics))
        common: Attributes = {
            SYSTEM: "pulsar", OPERATION: "process", SUBSCRIPTION: subscription, **self._server,
        }  # fmt: skip
        if len(names) == 1:
            common[DESTINATION] = names[0]
        span = self._tracer.start_span(
            f"process {names[0]}" if len(names) == 1 else "process",
            kind=self._trace.SpanKind.CONSUMER,
            attributes={**common, OPERATION_TYPE: "process"},
        )
        # If the span is not recorded, links and more attributes are not needed.
        if span.is_recording():
            if batch_id:
                span.set_attribute(BATCH_ID, batch_id)
            if len(names) > 1:
                span.set_attribute(TOPICS, names[:TOPICS_MAX])
            if properties is not None:
                self._link(span, properties)
        begun = BatchSpan(self, span, common)
        begun.counted(rows)
        return begun

    def processed_rows(
        self, handle: Callable[[pa.RecordBatch], Any], subscription: str
    ) -> Callable[[pa.RecordBatch], Any]:
        """Wrap a call of a handler of Arrow rows in the span of a batch."""

        def call(rows: pa.RecordBatch) -> Any:
            topics = rows.column("__topic").unique().to_pylist()
            begun = self.batch(
                topics, subscription,
                rows=rows.num_rows, properties=rows.column("__properties"),
            )  # fmt: skip
            try:
                with self._trace.use_span(
                    begun.span, record_exception=False, set_status_on_exception=False
                ):
                    result = handle(rows)
            except BaseException as exc:
                begun.end(exc)
                raise
            begun.end()
            return result

        return call

    def _link(self, span: Span, properties: pa.Array) -> None:
        """Link the producers of some rows of a batch, each once."""
        step = -(-len(properties) // LINKS_MAX) or 1
        linked = set()
        for own in properties.take(list(range(0, len(properties), step))).to_pylist():
            if not own:
                continue
            context = self._trace.get_current_span(
                self._propagate.extract(dict(own))
            ).get_span_context()
            if context.is_valid and context.span_id not in linked:
                linked.add(context.span_id)
                span.add_link(context)

    def ended(self, begun: BatchSpan, error: str, seconds: float) -> None:
        """Count the messages of a batch whose span ends."""
        common = {**begun.common, ERROR: error} if error else begun.common
        self._consumed.add(begun.rows, common)
        self._process_s.record(seconds, common)

    def failed(self, span: Span, error: BaseException | str, name: str) -> None:
        """Note an error on a span."""
        span.set_attribute(ERROR, name)
        if isinstance(error, BaseException):
            text = one_line(error)
            span.record_exception(error, {"exception.message": text})
            error = text
        span.set_status(self._trace.StatusCode.ERROR, error)

    def flush(self, timeout_s: float) -> None:
        """Let the providers export their data before this process ends. Never raises.

        A thread exports, because a provider may take longer than the timeout.
        """
        providers = self._trace.get_tracer_provider(), self._metrics.get_meter_provider()
        try:
            flushing = begin("keyshard-telemetry-flush", _flush, providers, timeout_s)
        except ThreadStartError as exc:
            _log.warning("the newest spans and metrics are not exported: %s", exc.summary)
            return
        flushing.join(timeout_s)
        if flushing.is_alive():
            _log.warning(
                "OpenTelemetry has not exported the newest spans and metrics within %g s. Look "
                "for a collector that does not answer.", timeout_s,
            )  # fmt: skip

    # -- messages that a program publishes --------------------------------------------------------

    def send(
        self, one: Produce, topic: str, send: Callable[[Produce], Future[MessageId]]
    ) -> Future[MessageId]:
        """Publish a message in a span that ends when the broker has confirmed it."""
        span = self._start("send", topic, self._server)
        began_s = time.perf_counter()
        try:
            future = send(self._with_context(one, span))
        except BaseException as exc:
            self._end(span, topic, began_s, exc)
            raise

        def confirmed(done: Future[MessageId]) -> None:
            error = CancelledError() if done.cancelled() else done.exception()
            if error is None:
                span.set_attribute(MESSAGE_ID, str(done.result()))
            self._end(span, topic, began_s, error)

        future.add_done_callback(confirmed)
        return future

    @contextmanager
    def sending(self, topic: str, rows: int) -> Iterator[None]:
        """Wrap the publishing of rows in a span."""
        span = self._start("send", topic, self._server)
        span.set_attribute(MESSAGES, rows)
        began_s = time.perf_counter()
        error: BaseException | None = None
        try:
            with self._trace.use_span(span, record_exception=False, set_status_on_exception=False):
                yield
        except BaseException as exc:
            error = exc
            raise
        finally:
            self._end(span, topic, began_s, error, rows)

    def _start(self, operation: str, topic: str, server: Attributes) -> Span:
        return self._tracer.start_span(
            f"{operation} {topic}",
            kind=self._trace.SpanKind.PRODUCER,
            attributes={
                SYSTEM: "pulsar",
                OPERATION: operation,
                OPERATION_TYPE: operation,
                DESTINATION: topic,
                **server,
            },
        )

    def _end(
        self, span: Span, topic: str, began_s: float, error: BaseException | None, count: int = 1
    ) -> None:
        common: Attributes = {
            SYSTEM: "pulsar", OPERATION: "send", DESTINATION: topic, **self._server,
        }  # fmt: skip
        if error is not None:
            common[ERROR] = _name_of(error)
            self.failed(span, error, _name_of(error))
        span.end()
        self._sent.add(count, common)
        self._operation_s.record(time.perf_counter() - began_s, common)

    def _with_context(self, one: Produce, span: Span) -> Produce:
        """Return a message whose properties name the span. Its own properties stay."""
        carrier: dict[str, str] = {}
        self._propagate.inject(carrier, self._trace.set_span_in_context(span))
        if not carrier:
            return one
        return replace(one, properties={**carrier, **(one.properties or {})})


class BatchSpan:
    """The span of a batch, from when it is handed out until it is acknowledged. Thread-safe.

    Args:
        telemetry: Counts the messages of the batch.
        span: The span, which has begun.
        common: Attributes of the metrics.
    """

    def __init__(self, telemetry: Telemetry, span: Span, common: Attributes) -> None:
        self.span = span
        self.common = common
        self.rows = 0
        self._telemetry = telemetry
        self._began_s = time.perf_counter()
        self._ending = threading.Lock()

    def counted(self, rows: int) -> None:
        """Set the number of rows."""
        self.rows = rows
        self.span.set_attribute(MESSAGES, rows)

    def failed(self, error: BaseException) -> None:
        """Note an error after which the batch may still be acknowledged."""
        self.span.record_exception(error)

    def end(self, error: BaseException | None = None) -> None:
        """End the span. Idempotent."""
        self._end("" if error is None else _name_of(error), error)

    def abandon(self) -> None:
        """End the span of a batch that was not acknowledged. Idempotent."""
        self._end("not_acknowledged", "The batch was not acknowledged.")

    def _end(self, name: str, error: BaseException | str | None) -> None:
        if not self._ending.acquire(blocking=False):
            return
        if error is not None:
            self._telemetry.failed(self.span, error, name)
        self.span.end()
        self._telemetry.ended(self, name, time.perf_counter() - self._began_s)


class PlannedSpans:
    """Spans of batches that are committed in the order in which they were planned.

    One thread begins and commits; any thread may close.

    Args:
        source: Its subscription and the host of its service URL are attributes.
    """

    def __init__(self, source: SourceConfig) -> None:
        self.telemetry = Telemetry(source.how_to_connect().address)
        self._subscription = source.subscription
        self._lock = threading.Lock()
        """Held for no call of OpenTelemetry: a signal may interrupt the holder, then close."""
        self._open: deque[tuple[str, BatchSpan]] = deque()
        """By batch; as many as are not committed, which the window limits."""

    def begin(self, end: Checkpoint) -> BatchSpan:
        """Return the span of the batch that ends at a checkpoint. It begins at the first call."""
        with self._lock:
            for batch_id, begun in self._open:
                if batch_id == end.batch_id:
                    return begun
        topics = [where.topic for where, part in end.partitions.items() if part.batch]
        begun = self.telemetry.batch(topics, self._subscription, batch_id=end.batch_id)
        with self._lock:
            self._open.append((end.batch_id, begun))
        return begun

    def committed(self, batch_id: str) -> None:
        """End the spans of a batch and of all batches before it."""
        with self._lock:
            if not any(known == batch_id for known, _ in self._open):
                return
            ended: list[tuple[str, BatchSpan]] = []
            while not ended or ended[-1][0] != batch_id:
                ended.append(self._open.popleft())
        for _, begun in ended:
            begun.end()

    def close(self) -> None:
        """End the spans of batches that were not committed."""
        with self._lock:
            ended = list(self._open)
            self._open.clear()
        for _, begun in ended:
            begun.abandon()


def _records(provider: object) -> bool:
    """Whether a provider is not one of the API's own, which record nothing."""
    return not type(provider).__module__.startswith(
        ("opentelemetry.trace", "opentelemetry.metrics")
    )


def _flush(providers: Iterable[object], timeout_s: float) -> None:
    for provider in providers:
        flush = getattr(provider, "force_flush", None)
        if flush is not None:
            try:
                flush(int(timeout_s * 1000))
            except Exception as exc:  # noqa: BLE001 - the provider is the program's
                _log.warning("OpenTelemetry cannot export the newest spans or metrics: %s", exc)


def _name_of(error: BaseException) -> str:
    kind = type(error)
    prefix = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return prefix + kind.__qualname__
