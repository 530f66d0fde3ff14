"""The code in an actor, and its input. It calls one handler with a message or batch at a time.

Actors import this module. The handler arrives pickled by cloudpickle: by module and name if it can
be imported, by value from ``__main__``, notebooks and closures.
"""

from __future__ import annotations

import inspect
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

import keyshard
from keyshard.columns.content import content_with, gather, metadata_in, names_in
from keyshard.columns.messages import messages_of_each
from keyshard.columns.outgoing import outgoing_of
from keyshard.core.lanes.failure import text_of
from keyshard.core.lanes.lane_status import LatencyHistogram
from keyshard.core.message import HandlerContext, Message
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.errors import ConfigError
from keyshard.handlers.handler_call import HandlerCall, Take, as_returned, check_fits, published
from keyshard.handlers.process_executor import Reply
from keyshard.reading.message_decoder import MessageDecoder

if TYPE_CHECKING:
    from keyshard.observe.telemetry import Telemetry
    from ray_adapter.options import Takes
    from ray_adapter.row_slices import RowSlice
SLICE_S = 1.0
"""Time after which an actor returns its results, at the end of an entry, seconds."""


class Loaded(NamedTuple):
    """The result of loading the handler."""

    pid: int
    host: str
    missing: Reply | None = None
    """Error if the handler cannot be imported."""
    broken: Reply | None = None
    """Error if the handler's class raised."""

    @classmethod
    def here(cls, missing: Reply | None = None, broken: Reply | None = None) -> Loaded:
        """Return the result of this process."""
        return cls(os.getpid(), socket.gethostname(), missing, broken)


class CallResult(NamedTuple):
    """The result of a call with rows."""

    done: int
    """Number of rows handled, from the first row of the rows on."""
    results: list[Any]
    """Results of the rows handled in this call: one for each row, or one for all."""
    timings: LatencyHistogram
    """Durations of the calls of the handler, also of one that raised."""
    failed: Reply | None = None
    """Error of the handler for the next row."""


class Traced(NamedTuple):
    """Settings of an actor's OpenTelemetry spans."""

    subscription: str
    outputs: str | None
    """Topic of the sink; ``None`` without a sink."""
    takes: Takes
    address: tuple[str, int] | None
    """Host and port of the service URL of the source; ``None`` if they are not known."""


class HandlerActor:
    """Hosts one handler. Ray calls one method at a time, in the order of the calls.

    Args:
        handler: The pickled handler.
        read_data: Decodes the handler's messages.
        take: Checks and converts a result of the handler, such as into messages to publish.
        traced: Settings of spans; ``None``: the actor makes none.
    """

    def __init__(
        self,
        handler: bytes,
        read_data: MessageDecoder,
        take: Take = as_returned,
        traced: Traced | None = None,
    ) -> None:
        self._pickled = handler
        self._traced = traced
        self._telemetry: Telemetry | None = None
        self._read_data = read_data
        self._take = take
        self._handle: Callable[[Any], Any] | None = None
        self._results: list[Any] = []

    def version(self) -> str:
        """Return the version of keyshard in the actor."""
        return keyshard.__version__

    def load(self) -> Loaded:
        """Load the handler, once."""
        if self._handle is not None:
            return Loaded.here()
        try:
            if self._traced is not None:
                from keyshard.observe.telemetry import Telemetry  # noqa: PLC0415 - an extra

                self._telemetry = Telemetry(self._traced.address)
            handler = pickle.loads(self._pickled)
        except BaseException as exc:  # noqa: BLE001 - importing runs the user's code
            raise_if_ended_by_ray(exc)
            return Loaded.here(missing=Reply.of(exc))
        try:
            if is_class(handler):
                handler = handler()
                check_fits(handler, self._take)
            context = HandlerContext(self._read_data)
            self._handle = self._followed(HandlerCall(handler, context, self._take))
        except BaseException as exc:  # noqa: BLE001 - the user's code
            raise_if_ended_by_ray(exc)
            return Loaded.here(broken=Reply.of(exc))
        return Loaded.here()

    def _followed(self, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap calls of the handler in spans."""
        if self._telemetry is None or self._traced is None:
            return call
        subscription, outputs, takes, _ = self._traced
        if takes == "arrow":
            return self._telemetry.processed_rows(call, subscription)
        return self._telemetry.processed(call, subscription, outputs)

    def flush(self, timeout_s: float) -> None:
        """Export spans before the actor is killed."""
        if self._telemetry is not None:
            self._telemetry.flush(timeout_s)

    def handle_messages(self, rows: MessageRows, start: int) -> CallResult:
        """Call the handler with each message from row ``start`` on, for about a second."""
        assert self._handle is not None
        handle = self._handle
        results: list[Any] = []
        self._results = results
        durations_s: list[float] = []
        deadline_s = time.monotonic() + SLICE_S
        row = 0
        for entry in messages(rows):
            if row > start and time.monotonic() > deadline_s:
                break
            began_s = time.monotonic()
            for message in entry:
                if row >= start:
                    try:
                        results.append(handle(message))
                    except BaseException as exc:  # noqa: BLE001 - a handler may raise any error
                        raise_if_ended_by_ray(exc)
                        durations_s.append(time.monotonic() - began_s)
                        return CallResult(row, results, timings_of(durations_s), Reply.of(exc))
                    ended_s = time.monotonic()
                    durations_s.append(ended_s - began_s)
                    began_s = ended_s
                row += 1
        return CallResult(row, results, timings_of(durations_s))

    def handle_arrow(self, rows: pa.RecordBatch, start: int) -> CallResult:
        """Call the handler with all rows."""
        assert self._handle is not None
        assert start == 0
        self._results = []
        began_s = time.monotonic()
        try:
            self._results.append(self._handle(rows))
        except BaseException as exc:  # noqa: BLE001 - a handler may raise any error
            raise_if_ended_by_ray(exc)
            return CallResult(0, [], timings_of([time.monotonic() - began_s]), Reply.of(exc))
        timings = timings_of([time.monotonic() - began_s])
        return CallResult(rows.num_rows, self._results, timings)

    def unsendable(self) -> tuple[int, str] | None:
        """Return index and reason of the first result that cannot be sent, or ``None``."""
        from ray import cloudpickle  # noqa: PLC0415 - the process that checks handlers needs no ray

        for index, result in enumerate(self._results):
            try:
                cloudpickle.dumps(result)
            except BaseException as exc:  # noqa: BLE001, PERF203 - a class of the user's
                raise_if_ended_by_ray(exc)
                return index, text_of(exc)
        return None


def timings_of(durations_s: Sequence[float]) -> LatencyHistogram:
    """Return a histogram of durations, seconds. Its size does not depend on their number."""
    timings = LatencyHistogram()
    timings.add_each(durations_s)
    return timings


def raise_if_ended_by_ray(error: BaseException) -> None:
    """Raise the error again if Ray raised it to end the process; it is no failure of a handler.

    At SIGTERM, Ray raises such an error in the code of the handler.
    """
    if isinstance(error, SystemExit) and hasattr(error, "ray_terminate_msg"):
        raise error


def is_class(handler: object) -> bool:
    """Whether the handler is a class, or a partial of one, that each actor instantiates."""
    return inspect.isclass(handler.func if isinstance(handler, partial) else handler)


def published_rows(handle: object, result: Any) -> Any:
    """Return the messages to publish. Arrow rows are checked and remain Arrow rows."""
    if isinstance(result, pa.RecordBatch | pa.Table):
        outgoing_of(result)
        return result
    return published(handle, result)


def check_handler(handler: object, take: Take = as_returned) -> None:
    """Refuse a handler that is visibly wrong, before anything starts.

    Raises:
        ConfigError: The handler does not take one argument or makes generators, or is a class that
            cannot be created with its arguments.
    """
    if not is_class(handler):
        check_fits(handler, take)
        return
    made: Any = handler.func if isinstance(handler, partial) else handler
    call = next((vars(kind)["__call__"] for kind in made.__mro__ if "__call__" in vars(kind)), None)
    if call is None:
        raise ConfigError(
            f"The handler {made.__qualname__} is a class whose objects cannot be called.",
            "Add a method __call__(self, message).",
        )
    check_fits(partial(call, None), take)
    given = handler if isinstance(handler, partial) else partial(made)
    try:
        inspect.signature(made).bind(*given.args, **given.keywords)
    except TypeError as exc:
        raise ConfigError(
            f"The handler {made.__qualname__} cannot be created: {exc}.",
            f"Pass its arguments with functools.partial({made.__qualname__}, ...).",
        ) from exc
    except ValueError:
        return  # some classes have no signature


# -- Rows that are sent to an actor ----------------------------------------------------------------
# Columns pass through Ray's object store without a copy. If entries have several messages, nothing
# is pickled per message.


class MessageRows(NamedTuple):
    """The content of messages, and the metadata of the entries that hold them."""

    content: pa.RecordBatch
    entries: list[tuple[Any, ...]]


def message_rows(pieces: Sequence[RowSlice]) -> MessageRows:
    """Encode pieces for handlers of messages."""
    blocks = [piece.block for piece in pieces]
    names = names_in(blocks)
    content = pa.RecordBatch.from_arrays(
        list(gather(blocks, names).values()), schema=content_with(metadata_in(names))
    )
    return MessageRows(content, [_to_wire(*piece[:2]) for piece in pieces])


def arrow_rows(pieces: Sequence[RowSlice]) -> pa.RecordBatch:
    """Encode pieces for handlers of Arrow: default columns and those of the source."""
    # Imported here, because actors do not need these modules.
    from keyshard.columns.record_batches import columns_of  # noqa: PLC0415
    from keyshard.handlers.batches import one_record_batch  # noqa: PLC0415

    located = [(piece.where, piece.block) for piece in pieces]
    metadata = metadata_in(names_in([piece.block for piece in pieces]))
    return one_record_batch(located, columns_of(metadata))


def messages(rows: MessageRows) -> Iterator[list[Message]]:
    """Yield the messages of each entry, in order."""
    start = 0
    located: list[tuple[TopicPartition, EntryBlock]] = []
    for wire in rows.entries:
        located.append(_from_wire(wire, rows.content, start))
        start += located[-1][1].rows
    return messages_of_each(located)


def _to_wire(where: TopicPartition, block: EntryBlock) -> tuple[Any, ...]:
    return (
        where.topic, where.partition, *block.id, block.indices, block.slot, block.mixed_slots,
        block.publish_ms, block.redelivered, block.schema_version,
    )  # fmt: skip


def _from_wire(
    wire: tuple[Any, ...], content: pa.RecordBatch, start: int
) -> tuple[TopicPartition, EntryBlock]:
    (
        topic, partition, ledger, entry, indices, slot, mixed_slots, publish_ms, redelivered,
        schema_version,
    ) = wire  # fmt: skip
    rows = len(indices)
    block = EntryBlock(
        EntryId(ledger, entry), batch_size=rows, batched=True, indices=indices, slot=slot,
        mixed_slots=mixed_slots, publish_ms=publish_ms, payload_bytes=0,
        content=content, start=start, redelivered=redelivered,
        schema_version=schema_version,
    )  # fmt: skip
    return TopicPartition(topic, partition), block
