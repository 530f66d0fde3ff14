"""Parses the stored bytes of an entry: its metadata, and that of messages in a producer batch.

Stored bytes are untrusted: every length is checked against the available bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import google_crc32c
from google.protobuf.message import DecodeError

from keyshard.broker.framing import KEPT_BYTES_MAX, CutFrame
from keyshard.broker.wire.entries import (
    ENTRY_MEMORY_MAX,
    PROPERTY_BYTES,
    RawEntry,
    UnreadableError,
)
from keyshard.broker.wire.frames import api
from keyshard.columns.content import TIME_MS_MAX
from keyshard.core.metadata_columns import STORED, Kind, MetadataColumn, Origin
from keyshard.core.protobuf import Value, read_varint

_BROKER_METADATA, CHECKED = b"\x0e\x02", b"\x0e\x01"
SIZE = struct.Struct(">I")
_PROPERTIES_MAX = ENTRY_MEMORY_MAX // PROPERTY_BYTES
_FORMAT, _OF_KAFKA = b"entry.format", frozenset({b"kafka", b"mixed_kafka"})
"""Property of an entry that names its format, and the names of Kafka's."""
_NO_FIELDS: dict[int, Value] = {}
"""Shared by all messages of producer batches without a requested field."""


def _signed(value: int) -> int:
    """Convert an unsigned 64-bit number; columns are signed."""
    return value if value < 1 << 63 else (value + (1 << 63)) % (1 << 64) - (1 << 63)


_CONVERT: dict[Kind, Callable[[Any], Any]] = {
    Kind.BYTES: bytes,
    Kind.TEXT: partial(bytes.decode, errors="replace"),
    Kind.NUMBER: _signed,
    Kind.TIME: lambda time_ms: time_ms if 0 < time_ms < TIME_MS_MAX else None,
}


class Source(NamedTuple):
    """Where the value of a metadata column is stored, and how it is converted."""

    field: str
    """Name of the field of an entry's metadata."""
    tag: int
    """Protobuf tag of the field in ``SingleMessageMetadata``; 0 if it is not there."""
    convert: Callable[[Any], Any]

    def value(self, metadata: Any) -> Any:
        """Return the value in the metadata of an entry; ``None`` if the field is not set."""
        if not metadata.HasField(self.field):
            return None
        return self.convert(getattr(metadata, self.field))


def _source(column: MetadataColumn) -> Source:
    kind = api.BrokerEntryMetadata if column.origin is Origin.BROKER else api.MessageMetadata
    tag = column.field_in_batch << 3 | (0 if column.fixed else 2)
    field = kind.DESCRIPTOR.fields_by_number[column.field].name
    return Source(field, tag if column.field_in_batch else 0, _CONVERT[column.kind])


SOURCES = {one.name: _source(one) for one in STORED if one.origin is not Origin.KEY}
"""Where the values of metadata columns are stored, by column."""
_REPEATED = [
    SOURCES[one.name].field for one in STORED if one.origin is Origin.ENTRY and not one.fixed
]
"""Fields of an entry that a column repeats for each message."""


def repeated_bytes(metadata: Any) -> int:
    """Return the bytes of an entry's metadata that columns repeat for each message."""
    size = 0
    for name in _REPEATED:
        size += len(getattr(metadata, name))
    return size


def opened(raw: RawEntry, *, checked: bool = True) -> tuple[Any, bytes, int]:
    """Return the metadata of an entry, its bytes, and the offset of its payload in them."""
    data, position = raw.data, raw.position
    if checked and isinstance(data, CutFrame):
        raise UnreadableError(f"it has {data.size} bytes, more than {KEPT_BYTES_MAX}")
    position = after_broker_metadata(data, position)
    if data[position : position + 2] == CHECKED:
        (checksum,) = SIZE.unpack_from(data, position + 2)
        data, position = data[position + 6 :], 0
        if checked and google_crc32c.value(data) != checksum:
            raise UnreadableError("its checksum is wrong")
    (size,) = SIZE.unpack_from(data, position)
    position += 4 + size
    if position > len(data):
        raise UnreadableError("its metadata ends too early")
    return api.MessageMetadata.FromString(data[position - size : position]), data, position


def after_broker_metadata(data: bytes, position: int) -> int:
    """Return the offset after the metadata that the broker added, if there is any."""
    if data[position : position + 2] == _BROKER_METADATA:
        position += 6 + SIZE.unpack_from(data, position + 2)[0]
    return position


def of_broker(raw: RawEntry) -> Any:
    """Return the metadata that the broker added to an entry; empty if there is none to read."""
    data, position = raw.data, raw.position
    if data[position : position + 2] == _BROKER_METADATA:
        position += 6
        end = position + SIZE.unpack_from(data, position - 4)[0]
        with suppress(DecodeError):
            return api.BrokerEntryMetadata.FromString(data[position:end])
    return api.BrokerEntryMetadata()


def is_of_kafka(metadata: Any) -> bool:
    """Whether the payload of an entry is record batches of Kafka, as KoP marks them.

    A producer batch of Pulsar has properties in its messages, and none in the entry's metadata.
    """
    return any(one.key == _FORMAT and one.value in _OF_KAFKA for one in metadata.properties)


def schema_version_of(written: bytes) -> int | None:
    """Decode the broker's form of a schema version; ``None`` if it is invalid."""
    if len(written) != 8 or written[0] > 0x7F:
        return None
    return int.from_bytes(written, "big")


def indices_of(raw: RawEntry, count: int) -> Sequence[int]:
    """Return the indices of the messages of a producer batch that are to be delivered."""
    if not raw.ack_set:
        return range(count)
    bits = 0
    for number, word in enumerate(raw.ack_set):
        bits |= (word & 0xFFFF_FFFF_FFFF_FFFF) << (64 * number)
    bits &= (1 << count) - 1
    if bits == (1 << count) - 1:
        return range(count)
    return [index for index in range(min(count, bits.bit_length())) if bits >> index & 1]


def messages_in(raw: RawEntry) -> int:
    """Return the messages that the broker subtracts from the permits for an entry.

    The broker checks no checksum. An entry with unreadable metadata counts as one message.
    """
    try:
        metadata, _, _ = opened(raw, checked=False)
    except (UnreadableError, DecodeError, struct.error, IndexError):
        return 1
    batched = metadata.HasField("num_messages_in_batch")
    count: int = metadata.num_messages_in_batch if batched else 1
    # The declared count may be any number.
    if count < 1 or not raw.ack_set:
        return count
    return len(indices_of(raw, min(count, 64 * len(raw.ack_set))))


def stated_of(  # noqa: PLR0912 - one loop over the tags
    data: bytes, position: int, stop: int, tags: Collection[int]
) -> tuple[int, bytes | None, bytes | None, int, int, int, Sequence[bytes], dict[int, Value]]:
    """Parse the ``SingleMessageMetadata`` of a message of a producer batch.

    Args:
        data: Bytes with the metadata.
        position: Offset of the metadata.
        stop: End of the metadata, exclusive.
        tags: Protobuf tags of further fields to return.

    Returns:
        Payload size in bytes, partition key, ordering key, whether the key is base64, event time in
        milliseconds, whether the value is null, encoded properties, and the values by tag.
    """
    key = ordering_key = None
    length = event_ms = of_bytes = null = 0
    properties: list[bytes] = []
    stated = _NO_FIELDS
    while position < stop:
        tag = data[position]
        position += 1
        if tag > 0x7F:
            tag, position = read_varint(data, position - 1)
        kind = tag & 7
        if kind in (1, 5):
            position += 8 if kind == 1 else 4
            continue
        value = data[position]
        position += 1
        if value > 0x7F:
            value, position = read_varint(data, position - 1)
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
                    raise too_much_memory(ENTRY_MEMORY_MAX)
            elif tag in tags:
                stated = {**stated, tag: found}
        elif kind:
            raise UnreadableError("the metadata of a message cannot be read")
        elif tag == 0x18:
            length = value + 1
        elif tag == 0x28:
            event_ms = value
        elif tag == 0x30:
            of_bytes = value
        elif tag == 0x48:
            null = value
        elif tag in tags:
            stated = {**stated, tag: value}
    if position != stop or not length:
        raise UnreadableError("the metadata of a message cannot be read")
    return length - 1, key, ordering_key, of_bytes, event_ms, null, properties, stated


def too_much_memory(bytes_max: int) -> UnreadableError:
    """Return the error of an entry whose messages exceed the limit of memory."""
    return UnreadableError(
        f"its messages take more than {bytes_max} bytes of memory, the limit of an entry"
    )
