"""Messages to publish, as Arrow columns."""

from __future__ import annotations

import difflib
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple, overload

import pyarrow as pa
from pyarrow import compute

from keyshard.columns.content import PROPERTIES
from keyshard.core.message import Produce
from keyshard.core.metadata_columns import DELIVER_AT, KEY_BYTES, ORDERING_KEY
from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import ConfigError
from keyshard.redaction import shown

VALUE, KEY, EVENT_TIME, PROPERTIES_COLUMN = "value", "__key", "__eventTime", "__properties"
TOPIC = "__topic"
COLUMNS = (VALUE, KEY, KEY_BYTES, ORDERING_KEY, EVENT_TIME, PROPERTIES_COLUMN, DELIVER_AT, TOPIC)
"""Columns that a batch of rows to publish may have; ``value`` is required."""
_TYPES: Mapping[str, str] = {
    VALUE: "text or binary", KEY: "text", KEY_BYTES: "binary", ORDERING_KEY: "text",
    EVENT_TIME: "a timestamp", PROPERTIES_COLUMN: "a map of text to text",
    DELIVER_AT: "a timestamp", TOPIC: "text",
}  # fmt: skip
MESSAGE_OVERHEAD = 64
"""Largest size of the metadata of a message beside its content, bytes."""
PROPERTY_OVERHEAD = 16
"""Largest size of a property beside its name and value, bytes."""


class OutgoingMessage(NamedTuple):
    """One message to publish."""

    value: bytes | None
    """Payload; ``None`` for a null value."""
    key: str | None = None
    ordering_key: str | None = None
    properties: Mapping[str, str] | None = None
    event_ms: int | None = None
    """Event time, milliseconds since the epoch; ``None`` if unset."""
    deliver_at_ms: int | None = None
    """Time of delivery, milliseconds since the epoch; ``None`` for immediate delivery."""
    key_is_base64: bool = False
    """Whether the partition key is bytes, and ``key`` their base64."""

    @classmethod
    def of(cls, one: Produce) -> OutgoingMessage:
        """Return the message for a ``Produce`` of a handler, with its times in milliseconds."""
        return cls(
            one.value, one.key, one.ordering_key, one.properties or None,
            _milliseconds(one.event_time), _milliseconds(one.deliver_at),
        )  # fmt: skip

    @property
    def routing_key(self) -> str | None:
        """The key that the broker routes by: the ordering key, else the partition key."""
        return self.key if self.ordering_key is None else self.ordering_key

    def size(self) -> int:
        """Return an upper bound of its stored size without compression, bytes."""
        found = len(self.value or b"") + MESSAGE_OVERHEAD
        for text in (self.key, self.ordering_key):
            if text:
                found += len(text.encode())
        for name, text in (self.properties or {}).items():
            found += len(name.encode()) + len(text.encode()) + PROPERTY_OVERHEAD
        return found


_FIELDS = ("values", "keys", "ordering_keys", "event_ms", "properties", "deliver_at_ms")


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Messages to publish as columns. All columns have the same length."""

    values: pa.Array
    """Payloads, binary; null for a null value."""
    keys: pa.Array
    """Partition keys as their UTF-8 or bytes; null without a key."""
    keys_of_bytes: bool = False
    """Whether the partition keys are bytes, which consumers get as base64."""
    ordering_keys: pa.Array | None = None
    """Ordering keys as their UTF-8; null without one."""
    event_ms: pa.Array | None = None
    """Event times, milliseconds since the epoch; null if unset."""
    properties: pa.Array | None = None
    """Maps of text to text; null without properties."""
    deliver_at_ms: pa.Array | None = None
    """Times of delivery, milliseconds since the epoch; null for immediate delivery."""
    schema: TopicSchema | None = None
    """Schema that the values are encoded by; ``None`` for payloads of the caller."""

    @classmethod
    def of(cls, messages: Sequence[OutgoingMessage]) -> Outgoing:
        """Return messages with keys of text as columns."""

        def column(values: list[int | None]) -> pa.Array | None:
            return pa.array(values, pa.int64()) if any(values) else None

        def texts(values: list[str | None]) -> pa.Array | None:
            found = [None if one is None else one.encode() for one in values]
            column = pa.array(found, pa.binary())
            return None if column.null_count == len(column) else column

        keys = texts([one.key for one in messages])
        pairs = [None if one.properties is None else [*one.properties.items()] for one in messages]
        return cls(
            pa.array([one.value for one in messages], pa.binary()),
            pa.nulls(len(messages), pa.binary()) if keys is None else keys,
            ordering_keys=texts([one.ordering_key for one in messages]),
            event_ms=column([one.event_ms for one in messages]),
            properties=pa.array(pairs, PROPERTIES) if any(pairs) else None,
            deliver_at_ms=column([one.deliver_at_ms for one in messages]),
        )

    def to_bytes(self) -> bytes:
        """Return the messages as a compressed stream of Arrow."""
        given = {name: column for name, column in self._columns() if column is not None}
        batch = pa.record_batch(given, metadata={"keys_of_bytes": str(int(self.keys_of_bytes))})
        out = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        with pa.ipc.new_stream(out, batch.schema, options=options) as stream:
            stream.write_batch(batch)
        found: bytes = out.getvalue().to_pybytes()
        return found

    @classmethod
    def from_bytes(cls, data: bytes) -> Outgoing:
        """Return the messages of :meth:`to_bytes`.

        Raises:
            ValueError: The bytes have another form.
        """
        with pa.ipc.open_stream(data) as stream:
            batch = next(iter(stream), None)
        if batch is None:
            raise ValueError("there are no messages")
        of_bytes = (batch.schema.metadata or {}).get(b"keys_of_bytes") == b"1"
        if not {"values", "keys"} <= set(batch.schema.names) <= set(_FIELDS):
            raise ValueError(f"the columns are {batch.schema.names}")
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        return cls(keys_of_bytes=of_bytes, **columns)

    @classmethod
    def joined(cls, parts: Sequence[Outgoing]) -> Outgoing:
        """Return the messages of several parts, at least one, in their order.

        Raises:
            ConfigError: Only some of them have keys of bytes.
        """
        if len(parts) == 1:
            return parts[0]
        if len({part.keys_of_bytes for part in parts}) > 1:
            raise ConfigError(
                f"Rows with column {KEY} and rows with column {KEY_BYTES} are in one batch.",
                "Use the same column for all rows of a topic.",
            )
        tables = [
            pa.table({name: column for name, column in part._columns() if column is not None})
            for part in parts
        ]
        found = pa.concat_tables(tables, promote_options="default").combine_chunks()
        columns = {name: found.column(name).combine_chunks() for name in found.schema.names}
        return cls(keys_of_bytes=parts[0].keys_of_bytes, **columns)

    def _columns(self) -> list[tuple[str, pa.Array | None]]:
        return [(name, getattr(self, name)) for name in _FIELDS]

    def __len__(self) -> int:
        return len(self.values)

    def slice(self, start: int, stop: int) -> Outgoing:
        """Return the messages from ``start`` to ``stop``, exclusive."""
        return self._each(lambda column: column.slice(start, stop - start))

    def take(self, rows: pa.Array) -> Outgoing:
        """Return the messages at the given rows, in their order."""
        return self._each(lambda column: column.take(rows))

    def _each(self, change: Callable[[pa.Array], pa.Array]) -> Outgoing:
        found = {name: getattr(self, name) for name in _FIELDS}
        return replace(
            self, **{name: change(one) for name, one in found.items() if one is not None}
        )

    @property
    def routing_keys(self) -> pa.Array:
        """The keys that the broker routes by: the ordering key, else the partition key."""
        if self.ordering_keys is None:
            return self.keys
        return compute.coalesce(self.ordering_keys, self.keys)

    def key_texts(self) -> pa.Array:
        """Return the partition keys as they are stored; keys of bytes as base64."""
        if not self.keys_of_bytes:
            return self.keys
        keys = self.keys.dictionary_encode()
        texts = [self.key_text(key).encode() for key in keys.dictionary.to_pylist()]
        return pa.array(texts, pa.binary()).take(keys.indices)

    def key_text(self, key: bytes) -> str:
        """Return a partition key as consumers get it."""
        return (b64encode(key) if self.keys_of_bytes else key).decode()

    def messages(self, start: int, stop: int) -> list[OutgoingMessage]:
        """Return the messages from ``start`` to ``stop``, exclusive."""
        part, count = self.slice(start, stop), stop - start

        def column(values: pa.Array | None) -> list[Any]:
            found: list[Any] = [None] * count if values is None else values.to_pylist()
            return found

        return [
            OutgoingMessage(
                value,
                None if key is None else part.key_text(key),
                None if ordering_key is None else ordering_key.decode(),
                dict(pairs) if pairs else None,
                event_ms,
                deliver_at_ms,
                part.keys_of_bytes and key is not None,
            )
            for value, key, ordering_key, pairs, event_ms, deliver_at_ms in zip(
                column(part.values), column(part.keys), column(part.ordering_keys),
                column(part.properties), column(part.event_ms), column(part.deliver_at_ms),
                strict=True,
            )
        ]  # fmt: skip

    def keys_bytes_max(self) -> int:
        """Return an upper bound of the size of the keys of any message, bytes."""
        found = 0
        for column, times in ((self.keys, self._key_factor), (self.ordering_keys, 1)):
            if column is not None:
                found += times * (compute.max(compute.binary_length(column)).as_py() or 0)
        return found

    @property
    def _key_factor(self) -> int:
        return 2 if self.keys_of_bytes else 1

    def sizes(self) -> list[int]:
        """Return for each message an upper bound of its stored size without compression, bytes."""
        total = pa.repeat(pa.scalar(MESSAGE_OVERHEAD, pa.int64()), len(self))
        for column, times in (
            (self.values, 1),
            (self.keys, self._key_factor),
            (self.ordering_keys, 1),
        ):
            if column is not None:
                lengths = compute.fill_null(compute.binary_length(column), 0)
                total = compute.add(total, compute.multiply(lengths.cast(pa.int64()), times))
        found: list[int] = total.to_pylist()
        if self.properties is not None:
            for row, pairs in enumerate(self.properties.to_pylist()):
                for name, text in pairs or ():
                    found[row] += PROPERTY_OVERHEAD + len(name.encode()) + len(text.encode())
        return found


class OutgoingSlice(Sequence[OutgoingMessage]):
    """Some rows of columns as messages, created on access."""

    __slots__ = ("_columns", "_start", "_stop")

    def __init__(self, columns: Outgoing, start: int, stop: int) -> None:
        self._columns = columns
        self._start = start
        self._stop = stop

    def __len__(self) -> int:
        return self._stop - self._start

    @overload
    def __getitem__(self, at: int) -> OutgoingMessage: ...

    @overload
    def __getitem__(self, at: slice) -> OutgoingSlice: ...

    def __getitem__(self, at: int | slice) -> OutgoingMessage | OutgoingSlice:
        if isinstance(at, slice):
            start, stop, _ = at.indices(len(self))
            return OutgoingSlice(self._columns, self._start + start, self._start + stop)
        row = range(self._start, self._stop)[at]
        return self._columns.messages(row, row + 1)[0]

    def __iter__(self) -> Iterator[OutgoingMessage]:
        return iter(self._columns.messages(self._start, self._stop))


def outgoing_from(messages: Sequence[OutgoingMessage]) -> Outgoing:
    """Return messages as columns.

    Args:
        messages: At least one; their keys are texts.
    """
    values, keys, ordering_keys, properties, events, deliver_ats, _ = zip(*messages, strict=True)

    def column(found: tuple[Any, ...], kind: pa.DataType) -> pa.Array | None:
        return None if found.count(None) == len(found) else pa.array(found, kind)

    pairs = [None if one is None else list(one.items()) for one in properties]
    return Outgoing(
        pa.array(values, pa.binary()),
        pa.array(keys, pa.binary()),
        ordering_keys=column(ordering_keys, pa.binary()),
        event_ms=column(events, pa.int64()),
        properties=column(tuple(pairs), PROPERTIES),
        deliver_at_ms=column(deliver_ats, pa.int64()),
    )


def outgoing_of(batch: pa.RecordBatch | pa.Table) -> Outgoing:
    """Return rows as messages to publish.

    Args:
        batch: Columns of :data:`COLUMNS`. ``value`` is binary or text, and null for a null value.
            ``__key`` is text, ``__keyBytes`` binary; at most one of them is there. ``__topic`` is
            not part of a message; see :func:`keyshard.columns.routing.by_topic`.

    Raises:
        ConfigError: A column is unknown, missing, or of another type.
    """
    names = batch.schema.names
    for name in names:
        if name not in COLUMNS:
            near = difflib.get_close_matches(name, COLUMNS, 1)
            hint = f"Did you mean {near[0]}? " if near else ""
            raise ConfigError(
                f"Column {name} is not a column of a message.",
                f"{hint}The columns are {', '.join(COLUMNS)}.",
            )
        if names.count(name) > 1:
            raise ConfigError(f"Column {name} appears twice.", "Name each column once.")
    if VALUE not in names:
        raise ConfigError(
            f"Column {VALUE} is missing. The columns are {', '.join(names)}.", "Add it."
        )
    if KEY in names and KEY_BYTES in names:
        raise ConfigError(
            f"Columns {KEY} and {KEY_BYTES} are both given.", "Give only one of them."
        )
    check_types(batch.schema)
    batch = one_batch(batch)
    of_bytes = KEY_BYTES in names
    keys = _binary(batch, KEY_BYTES if of_bytes else KEY)
    return Outgoing(
        _binary(batch, VALUE),
        pa.nulls(batch.num_rows, pa.binary()) if keys is None else keys,
        keys_of_bytes=of_bytes,
        ordering_keys=_binary(batch, ORDERING_KEY),
        event_ms=_times(batch, EVENT_TIME),
        properties=_properties(batch),
        deliver_at_ms=_times(batch, DELIVER_AT),
    )


def one_batch(rows: pa.RecordBatch | pa.Table) -> pa.RecordBatch:
    """Return rows as one record batch.

    Raises:
        ConfigError: They do not fit into one.
    """
    if isinstance(rows, pa.RecordBatch):
        return rows
    whole = rows.combine_chunks().to_batches()
    if len(whole) > 1:
        # A column of more than 2 GiB stays in several chunks.
        raise ConfigError(
            f"The {rows.num_rows} rows have {rows.nbytes:,} bytes, and a column of more than 2 "
            "GiB cannot be written at once.",
            "Write fewer rows at a time.",
        )
    return whole[0] if whole else pa.RecordBatch.from_pylist([], schema=rows.schema)


def _column(batch: pa.RecordBatch, name: str) -> pa.Array | None:
    if name not in batch.schema.names:
        return None
    column = batch.column(name)
    return None if name != VALUE and column.null_count == len(column) else column


def check_types(columns: pa.Schema) -> None:
    """Check the types of the columns of a message, also if all their values are null.

    Raises:
        ConfigError: A type does not fit. The error names the column.
    """
    for field in columns:
        wanted = _TYPES.get(field.name)
        if wanted is not None and not _fits(field.type, wanted):
            raise ConfigError(
                f"Column {field.name} has the type {field.type}; it must be {wanted}.", "Cast it."
            )


def _fits(kind: pa.DataType, wanted: str) -> bool:
    types = pa.types
    if types.is_null(kind):
        return True
    if wanted == "a timestamp":
        return bool(types.is_timestamp(kind))
    if wanted == "a map of text to text":
        return types.is_map(kind) and all(
            _fits(one, "text") for one in (kind.key_type, kind.item_type)
        )
    is_text = types.is_string(kind) or types.is_large_string(kind)
    is_binary = types.is_binary(kind) or types.is_large_binary(kind)
    return ("text" in wanted and is_text) or ("binary" in wanted and is_binary)


def _binary(batch: pa.RecordBatch, name: str) -> pa.Array | None:
    column = _column(batch, name)
    if column is not None and name != VALUE:
        _check_text(name, column)
    return None if column is None else column.cast(pa.binary())


def _check_text(name: str, column: pa.Array) -> None:
    """Check that texts are UTF-8, which Arrow does not do by itself."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as exc:
        raise ConfigError(
            f"Column {name} has text that is not UTF-8: {exc}.",
            f"Encode it again, or use {KEY_BYTES} for keys of bytes.",
        ) from None


def _times(batch: pa.RecordBatch, name: str) -> pa.Array | None:
    column = _column(batch, name)
    if column is None:
        return None
    try:
        # Check a cast of seconds for overflow. A cast of smaller units may drop digits.
        exact = column.type.unit == "s"
        found = column.cast(pa.timestamp("ms", tz=column.type.tz), safe=exact).cast(pa.int64())
    except pa.ArrowInvalid as exc:
        raise ConfigError(
            f"Column {name} has a time that is too late to be stored: {exc}.", "Correct the time."
        ) from None
    least = compute.min(found).as_py()
    if least is not None and least <= 0:
        row = _row(batch, found.index(least).as_py())
        raise ConfigError(
            f"Column {name} has a time at or before 1970-01-01 in {row}, which Pulsar cannot "
            "store.",
            "Correct the time.",
        )
    return found


def _properties(batch: pa.RecordBatch) -> pa.Array | None:
    column = _column(batch, PROPERTIES_COLUMN)
    if column is None:
        return None
    _check_text(PROPERTIES_COLUMN, column)
    found = column.cast(PROPERTIES)
    if compute.any(compute.is_null(found.items)).as_py():
        for row, pairs in enumerate(found.to_pylist()):
            for name, text in pairs or ():
                if text is None:
                    raise ConfigError(
                        f"Column {PROPERTIES_COLUMN} has no text for {shown(name)} in "
                        f"{_row(batch, row)}.",
                        "Remove the pair.",
                    )
    return found


def _row(batch: pa.RecordBatch, number: int) -> str:
    """Return the number of a row, from 0, and its key."""
    for name in (KEY, KEY_BYTES):
        if name in batch.schema.names:
            return f"row {number} with key {shown(batch.column(name)[number].as_py())}"
    return f"row {number}"


def _milliseconds(time: datetime | None) -> int | None:
    return None if time is None else int(time.timestamp() * 1000)
