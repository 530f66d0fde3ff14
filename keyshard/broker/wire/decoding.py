"""Decodes stored entries into blocks: at most one each, with the messages in Arrow columns.

Stored bytes are untrusted: every length is checked against the available bytes, and no declared
number alone causes an allocation. An unreadable entry becomes an error that names it. The decoder
walks the bytes in plain Python, without an object per message. It is the reference for the
compiled code of :mod:`keyshard.broker.wire.native_decoder`, which decodes plain entries if
available.
"""

from __future__ import annotations

import struct
import time
from base64 import b64decode
from binascii import Error as NotBase64Error
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from keyshard.broker.unreadable_entries import (
    corrupt_entry,
    encrypted_entry,
    kafka_entry,
    of_entry,
)
from keyshard.broker.wire import native_decoder
from keyshard.broker.wire.compression import unpacked
from keyshard.broker.wire.entries import (
    ENTRY_MEMORY_MAX,
    ENTRY_MESSAGES_MAX,
    MESSAGE_BYTES,
    PAYLOAD_AT_ONCE,
    PROPERTY_BYTES,
    Decoded,
    RawEntry,
    UnreadableError,
)
from keyshard.broker.wire.frames import api
from keyshard.broker.wire.stored_entry import (
    SIZE,
    SOURCES,
    Source,
    indices_of,
    is_of_kafka,
    messages_in,
    of_broker,
    opened,
    repeated_bytes,
    schema_version_of,
    stated_of,
    too_much_memory,
)
from keyshard.columns.content import (
    METADATA,
    NOT_TEXT,
    TIME_MS_MAX,
    metadata_in,
    other_bytes,
    pack,
    readable_times,
)
from keyshard.core.metadata_columns import STORED, Origin
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.protobuf import NotProtobufError
from keyshard.core.ring.key_slot import slots_of
from keyshard.errors import (
    ChunkedMessageError,
    KeyShardError,
    UnreadableEntryError,
)

ENTRIES_AT_ONCE = 40
"""Entries after which other threads may run, as for the messages of pulsar-client."""

_KEY_VALUE = api.KeyValue.FromString
_Pair = tuple[bytes, bytes]
"""Name and value of a property."""
_NONE: dict[str, str] = {}
"""Shared by all messages without properties."""


@dataclass(slots=True)
class _Columns:
    """Content of the messages of several entries, one value per message."""

    keeps_values: bool
    requested: dict[str, list[Any]]
    """Values of the requested metadata columns."""
    of_entries: tuple[tuple[Source, list[Any]], ...]
    """Those that all messages of an entry share, by an entry's metadata."""
    of_broker: tuple[tuple[Source, list[Any]], ...]
    """Those that the broker added."""
    of_messages: tuple[tuple[Source, list[Any]], ...]
    """Those of each message."""
    key_bytes: list[bytes | None] | None
    """The bytes of each key, if they are requested."""
    values: list[bytes | None] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    partition_keys: list[str | None] = field(default_factory=list)
    ordering_keys: list[str | None] = field(default_factory=list)
    routing_keys: list[bytes | None] = field(default_factory=list)
    of_bytes: list[bool] = field(default_factory=list)
    event_ms: list[int] = field(default_factory=list)
    publish_ms: list[int] = field(default_factory=list)
    properties: list[dict[str, str]] = field(default_factory=list)
    unreadable: dict[int, bool] = field(default_factory=dict)
    """Rows with undecodable bytes that were replaced."""
    repeated: int = 0
    """Bytes of the newest entry that columns repeat for each message."""
    memory: int = 0
    """Memory of the messages of the newest entry, bytes."""

    def count(
        self, value: int, key: bytes | None, ordering_key: bytes | None, pairs: Sequence[_Pair]
    ) -> None:
        """Add the memory of one message of the newest entry, as ``native/decoder.rs`` does.

        The requested columns do not matter, so that consumers and readers refuse the same entries.

        Raises:
            UnreadableError: The messages of the entry exceed the limit.
        """
        memory = self.memory + MESSAGE_BYTES + self.repeated + value
        if key:
            memory += 2 * len(key)
        if ordering_key:
            memory += 2 * len(ordering_key)
        for name, text in pairs:
            memory += PROPERTY_BYTES + len(name) + len(text)
        self.memory = memory
        if memory > ENTRY_MEMORY_MAX:
            raise too_much_memory(ENTRY_MEMORY_MAX)


class _Row(NamedTuple):
    """An entry whose messages are rows of the columns."""

    raw: RawEntry
    start: int
    batch_size: int
    batched: bool
    indices: Sequence[int]
    schema_version: int | None
    stored_bytes: int
    """Stored bytes of its messages, decompressed."""


def decode(
    entries: Sequence[RawEntry],
    where: TopicPartition,
    columns: Collection[str] | None = None,
    *,
    at_once_bytes: int = PAYLOAD_AT_ONCE,
) -> Decoded:
    """Decode entries, in delivery order, up to the limit of one decoding step.

    Args:
        entries: The received entries.
        where: Their topic partition.
        columns: Columns of the content to decode; ``None``: all of
            :data:`~keyshard.columns.content.CONTENT`.
        at_once_bytes: Memory of decoded messages that ends the step, bytes.
    """
    keeps_values = columns is None or "value" in columns
    metadata = metadata_in(columns)
    plain = native_decoder.decode(
        entries, keeps_values=keeps_values, metadata=metadata, at_once_bytes=at_once_bytes
    )
    if plain is not None:
        return plain
    into = _columns(metadata, keeps_values=keeps_values)
    rows: list[_Row] = []
    refused: KeyShardError | None = None
    messages = number = size = 0
    for number, raw in enumerate(entries, 1):
        start = len(into.sizes)
        try:
            row = _take(raw, where, into)
        except (UnreadableError, NotProtobufError) as exc:
            refused = corrupt_entry(where, raw.id, str(exc), raw.data[raw.position :])
            messages += messages_in(raw)
        except (DecodeError, struct.error, IndexError) as exc:
            why = f"it ends too early ({exc})"
            refused = corrupt_entry(where, raw.id, why, raw.data[raw.position :])
            messages += messages_in(raw)
        except UnreadableEntryError as exc:
            refused = exc
            messages += messages_in(raw)
        except ChunkedMessageError as exc:
            refused = exc
        if refused is not None:
            _cut(into, start)
            break
        if row is not None:
            rows.append(row)
            messages += len(row.indices)
            size += into.memory
        if size >= at_once_bytes:
            break
        if not number % ENTRIES_AT_ONCE:
            time.sleep(0)
    blocks = _blocks(rows, into) if rows else []
    return Decoded(blocks, refused, messages, number)


def _columns(metadata: Collection[str], *, keeps_values: bool) -> _Columns:
    """Return empty columns, with the requested metadata columns."""
    requested = {one: list[Any]() for one in STORED if one.name in metadata}

    def of(origin: Origin) -> tuple[tuple[Source, list[Any]], ...]:
        return tuple(
            (SOURCES[one.name], values) for one, values in requested.items() if one.origin is origin
        )

    return _Columns(
        keeps_values,
        {one.name: values for one, values in requested.items()},
        of(Origin.ENTRY),
        of(Origin.BROKER),
        of(Origin.MESSAGE),
        next((values for one, values in requested.items() if one.origin is Origin.KEY), None),
    )


def _take(raw: RawEntry, where: TopicPartition, into: _Columns) -> _Row | None:
    """Append the messages of an entry; ``None`` if none of them is to be delivered."""
    metadata, data, position = opened(raw)
    if metadata.num_chunks_from_msg > 1:
        raise _chunked(where, raw.id)
    if metadata.encryption_keys:
        raise encrypted_entry(where, raw.id, raw.data[raw.position :])
    batched = metadata.HasField("num_messages_in_batch")
    if batched and is_of_kafka(metadata):
        raise kafka_entry(where, raw.id, raw.data[raw.position :])
    # The keys and properties of an unbatched entry precede its payload.
    before = 0 if batched else len(raw.data) - raw.position - (len(data) - position)
    count = metadata.num_messages_in_batch if batched else 1
    if count > ENTRY_MESSAGES_MAX:
        raise UnreadableError(
            f"it declares {count} messages, more than {ENTRY_MESSAGES_MAX}, the limit of an entry"
        )
    if metadata.compression:
        data = unpacked(metadata.compression, metadata.uncompressed_size, data[position:])
        position = 0
    stored = before + len(data) - position
    start = len(into.sizes)
    into.repeated, into.memory = repeated_bytes(metadata), 0
    if count < 1 or count > (len(data) - position) // 4 + 1:
        raise UnreadableError(f"it is too short for the declared {count} messages")
    indices = indices_of(raw, count) if batched else range(1)
    if batched:
        skipped = set(range(count)).difference(indices) if len(indices) < count else ()
        _walk(data, position, count, skipped, into)
    else:
        _append_single(metadata, data[position:], into)
    if not indices:
        return None
    into.publish_ms.extend([metadata.publish_time] * len(indices))
    for source, values in into.of_entries:
        values.extend([source.value(metadata)] * len(indices))
    for source, values in into.of_broker:
        values.extend([source.value(of_broker(raw))] * len(indices))
    version = schema_version_of(metadata.schema_version)
    return _Row(raw, start, count, batched, indices, version, stored * len(indices) // count)


def _walk(data: bytes, position: int, count: int, skipped: Collection[int], into: _Columns) -> None:
    """Append the messages of a producer batch."""
    end = len(data)
    unpack, keeps_values = SIZE.unpack_from, into.keeps_values
    of_messages, key_bytes = into.of_messages, into.key_bytes
    tags = [source.tag for source, _ in of_messages]
    for index in range(count):
        (size,) = unpack(data, position)
        start = position + 4 + size
        said = stated_of(data, position + 4, start, tags)
        length, key, ordering_key, of_bytes, event_ms, null, properties, stated = said
        position = start + length
        if position > end:
            raise UnreadableError(f"message {index} ends too early")
        pairs = _pairs(map(_KEY_VALUE, properties)) if properties else ()
        into.count(length, key, ordering_key, pairs)
        if index in skipped:
            continue
        if keeps_values:
            into.values.append(None if null else data[start:position])
        into.sizes.append(length)
        into.event_ms.append(event_ms)
        into.properties.append(_properties(pairs, into) if pairs else _NONE)
        _append_keys(into, key, ordering_key, bool(of_bytes))
        for (_, tag, convert), values in of_messages:
            value = stated.get(tag)
            values.append(None if value is None else convert(value))
        if key_bytes is not None:
            key_bytes.append(_decoded(key) if of_bytes and key is not None else key)
    if position != end:
        raise UnreadableError(f"it has {end - position} bytes after its {count} messages")


def _append_single(metadata: Any, value: bytes, into: _Columns) -> None:
    """Append the message of an unbatched entry."""
    properties = metadata.properties
    pairs = _pairs(properties) if properties else ()
    into.count(len(value), metadata.partition_key, metadata.ordering_key, pairs)
    if into.keeps_values:
        into.values.append(None if metadata.null_value else value)
    into.sizes.append(len(value))
    into.event_ms.append(metadata.event_time)
    into.properties.append(_properties(pairs, into) if pairs else _NONE)
    key = metadata.partition_key if metadata.HasField("partition_key") else None
    ordering_key = metadata.ordering_key if metadata.HasField("ordering_key") else None
    _append_keys(into, key, ordering_key, metadata.partition_key_b64_encoded)
    for source, values in into.of_messages:
        values.append(source.value(metadata))
    if into.key_bytes is not None:
        of_bytes = metadata.partition_key_b64_encoded
        into.key_bytes.append(_decoded(key) if of_bytes and key is not None else key)


def _append_keys(
    into: _Columns, key: bytes | None, ordering_key: bytes | None, of_bytes: bool
) -> None:
    """Append the keys of a message and the bytes that the broker hashes; they may be empty."""
    routing_key = ordering_key
    if key is not None:
        try:
            text = key.decode()
        except UnicodeDecodeError:
            # The broker also replaces broken bytes before it hashes the key.
            text = key.decode(errors="replace")
            key = text.encode()
            into.unreadable[len(into.sizes) - 1] = True
        into.partition_keys.append(text)
        of_bytes = of_bytes and routing_key is None
        if routing_key is None:
            routing_key = _decoded(key) if of_bytes else key
    else:
        of_bytes = False
        into.partition_keys.append(None)
    into.of_bytes.append(of_bytes)
    into.routing_keys.append(routing_key)
    if ordering_key is None:
        into.ordering_keys.append(None)
        return
    try:
        into.ordering_keys.append(ordering_key.decode())
    except UnicodeDecodeError:
        into.ordering_keys.append(ordering_key.decode(errors="replace"))
        into.unreadable[len(into.sizes) - 1] = True


def _decoded(key: bytes) -> bytes:
    """Return the key bytes that the producer set."""
    try:
        return b64decode(key, validate=True)
    except NotBase64Error:
        return key


def _pairs(found: Iterable[Any]) -> list[_Pair]:
    return [(pair.key, pair.value) for pair in found]


def _properties(pairs: Iterable[_Pair], into: _Columns) -> dict[str, str]:
    """Return the properties of the newest message; only :data:`NOT_TEXT` if one is not UTF-8."""
    try:
        return {key.decode(): value.decode() for key, value in pairs}
    except UnicodeDecodeError as exc:
        into.unreadable[len(into.sizes) - 1] = True
        return {NOT_TEXT: exc.object.decode(errors="replace")}


def _cut(into: _Columns, rows: int) -> None:
    """Remove the appended rows of a refused entry."""
    for name in _Columns.__slots__:
        column = getattr(into, name)
        if isinstance(column, list):
            del column[rows:]
    for values in into.requested.values():
        del values[rows:]
    for row in [row for row in into.unreadable if row >= rows]:
        del into.unreadable[row]


def _blocks(rows: Sequence[_Row], into: _Columns) -> list[EntryBlock]:
    event_ms, publish_ms, properties = into.event_ms, into.publish_ms, into.properties
    unreadable = into.unreadable
    if max(event_ms) >= TIME_MS_MAX or max(publish_ms) >= TIME_MS_MAX:
        event_ms, publish_ms, properties, wrong = readable_times(event_ms, publish_ms, properties)
        unreadable = unreadable | {row: True for row, is_wrong in enumerate(wrong) if is_wrong}
    content = pack(
        into.values if into.keeps_values else None,
        into.partition_keys,
        into.ordering_keys,
        event_ms,
        properties,
        metadata=into.requested,
    )
    blocks: list[EntryBlock] = []
    named = other_bytes(content, METADATA.names) if into.requested else None
    for raw, start, batch_size, batched, indices, schema_version, stored in rows:
        stop = start + len(indices)
        payload = sum(into.sizes[start:stop])
        slot, mixed_slots, _ = slots_of(into.routing_keys[start:stop])
        blocks.append(
            EntryBlock(
                raw.id,
                batch_size,
                batched,
                indices,
                slot,
                mixed_slots,
                publish_ms[start],
                payload,
                content,
                start,
                raw.redelivered,
                True in into.of_bytes[start:stop],
                sum(row in unreadable for row in range(start, stop)) if unreadable else 0,
                schema_version,
                max(0, stored - payload) + (named(start, stop) if named else 0),
                True,  # noqa: FBT003 - complete; by name, it costs a tenth of the block
            )
        )
    return blocks


def _chunked(where: TopicPartition, entry_id: EntryId) -> ChunkedMessageError:
    return of_entry(
        ChunkedMessageError,
        where,
        entry_id,
        f"Entry {entry_id.ledger}:{entry_id.entry} of {where} is a part of a chunked message. A "
        "chunked message has several entries, which keyshard does not support. Nothing of it "
        "was acknowledged.",
        "Disable chunking at the producer, or raise the broker's maxMessageSize.",
    )
