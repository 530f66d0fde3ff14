"""Entries as they are stored -> blocks with their content in Arrow columns.

What is stored is the network's and the producers': every length is checked against what is there,
nothing is allocated by a number that was only declared, and an entry that cannot be read is an
error that names it. A walk over the bytes in plain Python; no object for a message beyond its
columns. It is the reference for the compiled code of :mod:`keyshard.broker.wire.bulk`, which
decodes what is plain where it is there.
"""

from __future__ import annotations

import struct
import time
from base64 import b64decode
from binascii import Error as NotBase64Error
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import google_crc32c
from google.protobuf.message import DecodeError

from keyshard.arrow.content import METADATA, metadata_in, other_bytes, pack
from keyshard.arrow.metadata import NOT_TEXT, TIME_MS_MAX, readable_times
from keyshard.broker.refused_entries import corrupt_entry, encrypted_entry, of_entry
from keyshard.broker.wire import bulk
from keyshard.broker.wire.entries import (
    ENTRY_MEMORY_MAX,
    ENTRY_MESSAGES_MAX,
    KEPT_BYTES_MAX,
    MESSAGE_BYTES,
    PAYLOAD_AT_ONCE,
    PROPERTY_BYTES,
    CutFrame,
    Decoded,
    RawEntry,
    UnreadableError,
)
from keyshard.broker.wire.frames import api
from keyshard.broker.wire.unpacking import unpacked
from keyshard.core.metadata_columns import BROKER_PUBLISH_TIME, KEY_BYTES, PRODUCER, SEQUENCE_ID
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.ring.key_slot import slots_of
from keyshard.errors import (
    ChunkedMessageError,
    EncryptedMessageError,
    KeyShardError,
)

ENTRIES_AT_ONCE = 40
"""Entries after which other threads are let in, as with the client's messages."""

_BROKER_METADATA, _CHECKED = b"\x0e\x02", b"\x0e\x01"
_SIZE = struct.Struct(">I")
_KEY_VALUE = api.KeyValue.FromString
_PROPERTIES_MAX = ENTRY_MEMORY_MAX // PROPERTY_BYTES
_Pair = tuple[bytes, bytes]
"""Name and value of a property."""
_NONE: dict[str, str] = {}
"""Properties of all messages that have none."""


@dataclass(slots=True)
class _Columns:
    """Content of messages of several entries, one value for each message."""

    keeps_values: bool
    metadata: dict[str, list[Any]]
    """Columns beside the content, where they are wanted."""
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
    """Rows of which something had to be made readable."""
    producer: int = 0
    """Bytes of the name of the producer of the newest entry: a column repeats it."""
    memory: int = 0
    """Memory of the messages of the newest entry, bytes."""

    def count(
        self, value: int, key: bytes | None, ordering_key: bytes | None, pairs: Sequence[_Pair]
    ) -> None:
        """Count the memory of one more message of the newest entry, as ``native/decoder.rs`` does.

        The columns that are wanted do not matter: a consumer and a Reader refuse the same entries.

        Raises:
            UnreadableError: The messages of the entry take too much.
        """
        memory = self.memory + MESSAGE_BYTES + self.producer + value
        if key:
            memory += 2 * len(key)
        if ordering_key:
            memory += 2 * len(ordering_key)
        for name, text in pairs:
            memory += PROPERTY_BYTES + len(name) + len(text)
        self.memory = memory
        if memory > ENTRY_MEMORY_MAX:
            raise _too_much_memory()


class _Row(NamedTuple):
    """An entry whose messages are rows of some columns."""

    raw: RawEntry
    start: int
    batch_size: int
    batched: bool
    indices: Sequence[int]
    schema_version: int | None
    stored_bytes: int
    """Bytes of its messages as they are stored, unpacked."""


def decode(
    entries: Sequence[RawEntry],
    where: TopicPartition,
    columns: Collection[str] | None = None,
    *,
    at_once_bytes: int = PAYLOAD_AT_ONCE,
) -> Decoded:
    """Decode entries, in delivery order; not all of them where they hold much.

    Args:
        entries: As they came.
        where: Their topic partition.
        columns: Columns of the content that are wanted; ``None``: all of
            :data:`~keyshard.arrow.content.CONTENT`.
        at_once_bytes: Memory of what is decoded after which no more entries are, bytes.
    """
    keeps_values = columns is None or "value" in columns
    metadata = metadata_in(columns)
    plain = bulk.decode(
        entries, keeps_values=keeps_values, metadata=metadata, at_once_bytes=at_once_bytes
    )
    if plain is not None:
        return plain
    into = _Columns(keeps_values, {name: [] for name in metadata})
    rows: list[_Row] = []
    refused: KeyShardError | None = None
    messages = number = size = 0
    for number, raw in enumerate(entries, 1):
        start = len(into.sizes)
        try:
            row = _take(raw, where, into)
        except UnreadableError as exc:
            refused = corrupt_entry(where, raw.id, str(exc), raw.data[raw.position :])
            messages += messages_in(raw)
        except (DecodeError, struct.error, IndexError) as exc:
            why = f"it ends too early ({exc})"
            refused = corrupt_entry(where, raw.id, why, raw.data[raw.position :])
            messages += messages_in(raw)
        except EncryptedMessageError as exc:
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


def messages_in(raw: RawEntry) -> int:
    """Messages that the broker counts against the permits of whom it sent an entry.

    The broker looks at no checksum. An entry whose metadata cannot be read counts as one.
    """
    try:
        metadata, _, _ = _opened(raw, checked=False)
    except (UnreadableError, DecodeError, struct.error, IndexError):
        return 1
    batched = metadata.HasField("num_messages_in_batch")
    count: int = metadata.num_messages_in_batch if batched else 1
    # What is declared may be any number.
    if count < 1 or not raw.ack_set:
        return count
    return len(_indices(raw, min(count, 64 * len(raw.ack_set))))


def _take(raw: RawEntry, where: TopicPartition, into: _Columns) -> _Row | None:
    """Append the messages of an entry; ``None`` when none of them is to be delivered."""
    metadata, data, position = _opened(raw)
    if metadata.num_chunks_from_msg > 1:
        raise _chunked(where, raw.id)
    if metadata.encryption_keys:
        raise encrypted_entry(where, raw.id, raw.data[raw.position :])
    batched = metadata.HasField("num_messages_in_batch")
    # The keys and properties of an entry that is no batch lie before its payload.
    before = 0 if batched else len(raw.data) - raw.position - (len(data) - position)
    count = metadata.num_messages_in_batch if batched else 1
    if count > ENTRY_MESSAGES_MAX:
        raise UnreadableError(
            f"it cannot hold {count} messages, because an entry has at most {ENTRY_MESSAGES_MAX}"
        )
    if metadata.compression:
        data = unpacked(metadata.compression, metadata.uncompressed_size, data[position:])
        position = 0
    stored = before + len(data) - position
    start = len(into.sizes)
    into.producer, into.memory = len(metadata.producer_name), 0
    if count < 1 or count > (len(data) - position) // 4 + 1:
        raise UnreadableError(f"it cannot hold {count} messages")
    indices = _indices(raw, count) if batched else range(1)
    if batched:
        skipped = set(range(count)).difference(indices) if len(indices) < count else ()
        _walk(data, position, count, skipped, into)
    else:
        _append_single(metadata, data[position:], into)
    if not indices:
        return None
    into.publish_ms.extend([metadata.publish_time] * len(indices))
    if PRODUCER in into.metadata:
        name = metadata.producer_name.decode(errors="replace")
        into.metadata[PRODUCER].extend([name] * len(indices))
    if BROKER_PUBLISH_TIME in into.metadata:
        into.metadata[BROKER_PUBLISH_TIME].extend([_broker_ms(raw)] * len(indices))
    version = schema_version_of(metadata.schema_version)
    return _Row(raw, start, count, batched, indices, version, stored * len(indices) // count)


def _opened(raw: RawEntry, *, checked: bool = True) -> tuple[Any, bytes, int]:
    """Metadata of an entry, and where its payload begins in which bytes."""
    data, position = raw.data, raw.position
    if checked and isinstance(data, CutFrame):
        raise UnreadableError(f"it has {data.size} bytes, more than {KEPT_BYTES_MAX}")
    if data[position : position + 2] == _BROKER_METADATA:
        position += 6 + _SIZE.unpack_from(data, position + 2)[0]
    if data[position : position + 2] == _CHECKED:
        (checksum,) = _SIZE.unpack_from(data, position + 2)
        data, position = data[position + 6 :], 0
        if checked and google_crc32c.value(data) != checksum:
            raise UnreadableError("its checksum is wrong")
    (size,) = _SIZE.unpack_from(data, position)
    position += 4 + size
    if position > len(data):
        raise UnreadableError("its metadata ends too early")
    return api.MessageMetadata.FromString(data[position - size : position]), data, position


def _broker_ms(raw: RawEntry) -> int | None:
    """When the broker stored an entry; ``None`` where it says nothing that is a time."""
    data, position = raw.data, raw.position
    if data[position : position + 2] != _BROKER_METADATA:
        return None
    position += 6
    end = position + _SIZE.unpack_from(data, position - 4)[0]
    try:
        time_ms: int = api.BrokerEntryMetadata.FromString(data[position:end]).broker_timestamp
    except DecodeError:
        return None
    return time_ms if 0 < time_ms < TIME_MS_MAX else None


def schema_version_of(written: bytes) -> int | None:
    """The version of a schema as the broker names it; ``None`` for what is none."""
    if len(written) != 8 or written[0] > 0x7F:
        return None
    return int.from_bytes(written, "big")


def _indices(raw: RawEntry, count: int) -> Sequence[int]:
    """Which messages of a batch are to be delivered."""
    if not raw.ack_set:
        return range(count)
    bits = 0
    for number, word in enumerate(raw.ack_set):
        bits |= (word & 0xFFFF_FFFF_FFFF_FFFF) << (64 * number)
    bits &= (1 << count) - 1
    if bits == (1 << count) - 1:
        return range(count)
    return [index for index in range(min(count, bits.bit_length())) if bits >> index & 1]


def _walk(data: bytes, position: int, count: int, skipped: Collection[int], into: _Columns) -> None:
    """Append the messages of a batch."""
    end = len(data)
    unpack, keeps_values = _SIZE.unpack_from, into.keeps_values
    for index in range(count):
        (size,) = unpack(data, position)
        start = position + 4 + size
        said = _said(data, position + 4, start)
        length, key, ordering_key, of_bytes, event_ms, null, properties, sequence_id = said
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
        if into.metadata:
            _append_metadata(into, key, bool(of_bytes), sequence_id)
    if position != end:
        raise UnreadableError(f"behind its {count} messages are {end - position} bytes more")


def _said(  # noqa: PLR0912 - one loop over the tags
    data: bytes, position: int, stop: int
) -> tuple[int, bytes | None, bytes | None, int, int, int, Sequence[bytes], int | None]:
    """What is said of a message of a batch: ``SingleMessageMetadata``, by its tags."""
    key = ordering_key = sequence_id = None
    length = event_ms = of_bytes = null = 0
    properties: list[bytes] = []
    while position < stop:
        tag = data[position]
        position += 1
        if tag > 0x7F:
            tag, position = _varint(data, position - 1)
        kind = tag & 7
        if kind in (1, 5):
            position += 8 if kind == 1 else 4
            continue
        value = data[position]
        position += 1
        if value > 0x7F:
            value, position = _varint(data, position - 1)
        if kind == 2:
            found = data[position : position + value]
            position += value
            if tag == 0x12:
                key = found
            elif tag == 0x3A:
                ordering_key = found
            elif tag == 0x0A:
                properties.append(found)
                if len(properties) > _PROPERTIES_MAX:
                    raise _too_much_memory()
        elif kind:
            raise UnreadableError("what is said of a message cannot be read")
        elif tag == 0x18:
            length = value + 1
        elif tag == 0x28:
            event_ms = value
        elif tag == 0x30:
            of_bytes = value
        elif tag == 0x40:
            sequence_id = value
        elif tag == 0x48:
            null = value
    if position != stop or not length:
        raise UnreadableError("what is said of a message cannot be read")
    return length - 1, key, ordering_key, of_bytes, event_ms, null, properties, sequence_id


def _append_single(metadata: Any, value: bytes, into: _Columns) -> None:
    """Append the message of an entry that is no batch."""
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
    if into.metadata:
        _append_metadata(into, key, metadata.partition_key_b64_encoded, metadata.sequence_id)


def _append_keys(
    into: _Columns, key: bytes | None, ordering_key: bytes | None, of_bytes: bool
) -> None:
    """The keys of one more message, and what of them the broker hashes, also where it is empty."""
    routing_key = ordering_key
    if key is not None:
        try:
            text = key.decode()
        except UnicodeDecodeError:
            # As the broker does before it hashes it.
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


def _append_metadata(
    into: _Columns, key: bytes | None, of_bytes: bool, sequence_id: int | None
) -> None:
    """What is wanted beside the content, of one more message."""
    if KEY_BYTES in into.metadata:
        into.metadata[KEY_BYTES].append(key if key is None or not of_bytes else _decoded(key))
    if SEQUENCE_ID in into.metadata:
        if sequence_id is not None:
            # 64 bits, of which a column shows the first as a sign.
            sequence_id = (sequence_id + (1 << 63)) % (1 << 64) - (1 << 63)
        into.metadata[SEQUENCE_ID].append(sequence_id)


def _decoded(key: bytes) -> bytes:
    """The bytes that a key was set as."""
    try:
        return b64decode(key, validate=True)
    except NotBase64Error:
        return key


def _pairs(found: Iterable[Any]) -> list[_Pair]:
    return [(pair.key, pair.value) for pair in found]


def _properties(pairs: Iterable[_Pair], into: _Columns) -> dict[str, str]:
    """Properties of the newest message; one in place of all where one is no text."""
    try:
        return {key.decode(): value.decode() for key, value in pairs}
    except UnicodeDecodeError as exc:
        into.unreadable[len(into.sizes) - 1] = True
        return {NOT_TEXT: exc.object.decode(errors="replace")}


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise UnreadableError("a number in it does not end")


def _cut(into: _Columns, rows: int) -> None:
    """Take back what was appended of an entry that is refused."""
    for name in _Columns.__slots__:
        column = getattr(into, name)
        if isinstance(column, list):
            del column[rows:]
    for column in into.metadata.values():
        del column[rows:]
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
        metadata=into.metadata,
    )
    blocks: list[EntryBlock] = []
    named = other_bytes(content, METADATA.names) if into.metadata else None
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
                into.of_bytes[start],
                sum(row in unreadable for row in range(start, stop)) if unreadable else 0,
                schema_version,
                max(0, stored - payload) + (named(start, stop) if named else 0),
            )
        )
    return blocks


def _too_much_memory() -> UnreadableError:
    return UnreadableError(
        f"its messages take more than {ENTRY_MEMORY_MAX} bytes of memory, the most of an entry"
    )


def _chunked(where: TopicPartition, entry_id: EntryId) -> ChunkedMessageError:
    return of_entry(
        ChunkedMessageError,
        f"Entry {entry_id.ledger}:{entry_id.entry} of {where} is a part of a chunked message. "
        "keyshard commits whole entries and a chunked message is several; nothing of it was "
        "acknowledged. Switch chunking off at the producer or raise the broker's maxMessageSize.",
        where,
        entry_id,
    )
