"""Encodes messages as entries: the reference for compiled code.

An entry is stored as its checksum, its metadata and its payload. The payload of several messages
repeats the size of a message's metadata, that metadata, and the value.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import google_crc32c

from keyshard.broker.wire.compression import UNPACKED_BYTES_MAX, packed_if_smaller, unpacked
from keyshard.broker.wire.frames import api
from keyshard.columns.outgoing import OutgoingMessage
from keyshard.core.position.entry import TopicPartition
from keyshard.errors import MessageTooLargeError

COMPRESSED_BYTES_MIN = 4 * 1024
"""Smallest payload that is compressed, bytes; Pulsar's own default in its newer Java client. Less
gains little, and costs as much as all the rest of an entry."""
_SIZE = struct.Struct(">I")
_CHECKED = b"\x0e\x01"
_METADATA_AT = len(_CHECKED) + _SIZE.size
"""Offset of the size of the metadata, after the checksum."""


@dataclass(frozen=True, slots=True)
class EntryHead:
    """The common part of all entries of a producer."""

    producer_name: bytes
    publish_ms: int
    compression: int = 0
    """Pulsar's number of the compression; 0 for none."""
    schema_version: bytes = b""


def check_readable(messages: Sequence[OutgoingMessage], where: TopicPartition) -> None:
    """Check the size of an entry before compression, which the broker does not limit.

    Raises:
        MessageTooLargeError: keyshard could not read the entry.
    """
    alone = len(messages) == 1
    size = len(messages[0].value or b"") if alone else sum(one.size() for one in messages)
    if size > UNPACKED_BYTES_MAX:
        raise MessageTooLargeError(
            f"{len(messages)} message(s) with key {messages[0].key!r} to {where} have {size} bytes "
            f"before compression. keyshard reads entries of at most {UNPACKED_BYTES_MAX}.",
            "Make the value smaller.",
        )


def encoded(messages: Sequence[OutgoingMessage], head: EntryHead, sequence_id: int) -> bytes:
    """Encode messages as one entry.

    Args:
        messages: At least one. Several have one routing key, and the same time of delivery.
        head: The common part of all entries of the producer.
        sequence_id: Sequence id of the first message; the others follow.
    """
    rows = list(messages)
    payload = _batch_payload(rows, sequence_id) if len(rows) > 1 else rows[0].value or b""
    return _finished(payload, rows[0], len(rows), head, sequence_id)


def _batch_payload(messages: Sequence[OutgoingMessage], sequence_id: int) -> bytes:
    """Encode the payload of an entry of several messages, without compression."""
    parts: list[bytes] = []
    for number, one in enumerate(messages, sequence_id):
        value = one.value or b""
        single = api.SingleMessageMetadata(payload_size=len(value), sequence_id=number)
        _describe(single, one)
        _content(single, one)
        data = single.SerializeToString()
        parts += (_SIZE.pack(len(data)), data, value)
    return b"".join(parts)


def _finished(
    payload: bytes, first: OutgoingMessage, count: int, head: EntryHead, sequence_id: int
) -> bytes:
    """Compress the payload of ``count`` messages, and put metadata and checksum before it."""
    metadata = api.MessageMetadata(
        producer_name=head.producer_name, sequence_id=sequence_id, publish_time=head.publish_ms,
        uncompressed_size=len(payload),
    )  # fmt: skip
    _describe(metadata, first)
    if count > 1:
        metadata.highest_sequence_id = sequence_id + count - 1
        metadata.num_messages_in_batch = count
    else:
        _content(metadata, first)
    if head.schema_version:
        metadata.schema_version = head.schema_version
    if first.deliver_at_ms is not None:
        metadata.deliver_at_time = first.deliver_at_ms
    if head.compression and len(payload) >= COMPRESSED_BYTES_MIN:
        smaller = packed_if_smaller(head.compression, payload)
        if len(smaller) < len(payload):
            metadata.compression = head.compression
            payload = bytes(smaller)
    data = metadata.SerializeToString()
    body = b"".join((_SIZE.pack(len(data)), data, payload))
    return b"".join((_CHECKED, _SIZE.pack(google_crc32c.value(body)), body))


def _describe(metadata: Any, message: OutgoingMessage) -> None:
    """Set the partition key and the ordering key in the metadata of a message."""
    if message.key is not None:
        metadata.partition_key = message.key.encode()
        if message.key_is_base64:
            metadata.partition_key_b64_encoded = True
    if message.ordering_key is not None:
        metadata.ordering_key = message.ordering_key.encode()


def _content(metadata: Any, message: OutgoingMessage) -> None:
    """Set the fields that describe one message."""
    if message.value is None:
        metadata.null_value = True
    if message.event_ms is not None:
        metadata.event_time = message.event_ms
    for name, text in (message.properties or {}).items():
        metadata.properties.add(key=name.encode(), value=text.encode())


def decoded(data: bytes) -> list[OutgoingMessage]:
    """Return the messages of an encoded entry.

    Args:
        data: Result of :func:`encoded`.
    """
    view = memoryview(data)
    (size,) = _SIZE.unpack_from(view, _METADATA_AT)
    start = _METADATA_AT + _SIZE.size
    metadata = api.MessageMetadata.FromString(view[start : start + size])
    payload = bytes(view[start + size :])
    if metadata.compression:
        whole = metadata.uncompressed_size
        payload = unpacked(metadata.compression, whole, payload, size_max=whole)
    deliver_at_ms = metadata.deliver_at_time if metadata.HasField("deliver_at_time") else None
    if not metadata.HasField("num_messages_in_batch"):
        return [_message(metadata, payload, deliver_at_ms)]
    found: list[OutgoingMessage] = []
    at = 0
    for _ in range(metadata.num_messages_in_batch):
        (size,) = _SIZE.unpack_from(payload, at)
        at += _SIZE.size + size
        single = api.SingleMessageMetadata.FromString(payload[at - size : at])
        found.append(_message(single, payload[at : at + single.payload_size], deliver_at_ms))
        at += single.payload_size
    return found


def _message(metadata: Any, value: bytes, deliver_at_ms: int | None) -> OutgoingMessage:
    """Return a message that :func:`_describe` and :func:`_content` have described."""

    def text(name: str) -> str | None:
        return getattr(metadata, name).decode() if metadata.HasField(name) else None

    return OutgoingMessage(
        None if metadata.null_value else value,
        text("partition_key"),
        text("ordering_key"),
        {one.key.decode(): one.value.decode() for one in metadata.properties} or None,
        metadata.event_time if metadata.HasField("event_time") else None,
        deliver_at_ms,
        metadata.partition_key_b64_encoded,
    )


class EncodedRows(Sequence[OutgoingMessage]):
    """Messages of an encoded entry, which is decoded on access.

    An entry that waits for its confirmation is kept once: as it is sent. Its messages are needed
    only if the broker may have stored some of them.

    Args:
        data: Result of :func:`encoded`.
        count: Number of the messages.
    """

    __slots__ = ("_count", "_data")

    def __init__(self, data: bytes, count: int) -> None:
        self._data = data
        self._count = count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> OutgoingMessage: ...

    @overload
    def __getitem__(self, at: slice) -> list[OutgoingMessage]: ...

    def __getitem__(self, at: int | slice) -> OutgoingMessage | list[OutgoingMessage]:
        return decoded(self._data)[at]

    def __iter__(self) -> Iterator[OutgoingMessage]:
        return iter(decoded(self._data))
