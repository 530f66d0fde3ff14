"""Groups messages of pulsar-client into entries.

This client's ids are unhashable and compare inconsistently, so they are converted to plain integers
on arrival.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import _pulsar

from keyshard.broker.unreadable_entries import encrypted_entry, of_entry
from keyshard.columns.content import (
    NOT_TEXT,
    TIME_MS_MAX,
    metadata_in,
    other_bytes,
    pack,
    readable_times,
)
from keyshard.core.metadata_columns import PRODUCER
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.protobuf import read_varint
from keyshard.core.ring.hash_range import HashRange
from keyshard.core.ring.key_slot import slots_of
from keyshard.errors import ChunkedMessageError, EncryptedMessageError, KeyShardError

ENTRIES_AT_ONCE = 40
"""Entries after which the thread yields to others. Otherwise a thread that waits for the
interpreter, such as a handler after a sleep, waits for the switch interval of 5 ms. If several
receive threads yield more often, that only costs time."""

_Message = _pulsar.Message
_BATCH_SIZE_TAG = 6 << 3
"""Tag byte of field 6, ``batch_size``, a varint."""
_FIRST_CHUNK_TAG = 7 << 3 | 2
"""Tag byte of field 7, ``first_chunk_message_id``, a message."""


class _IdFacts(NamedTuple):
    batch_size: int
    chunked: bool


def _id_facts(data: bytes) -> _IdFacts:
    """Parse the facts that a message id shows only in serialized form (``MessageIdData``).

    The preceding fields are varints (ledger 1, entry 2, partition 3, batch_index 4) and packed or
    single varints of the ack set (5).
    """
    if data[-2] == _BATCH_SIZE_TAG and data[-1] < 0x80 and _FIRST_CHUNK_TAG not in data:
        # The value is one byte, because the byte before it is not part of a longer varint.
        return _IdFacts(max(1, data[-1]), chunked=False)
    batch_size, position, end = 1, 0, len(data)
    while position < end:
        field, wire = data[position] >> 3, data[position] & 7
        position += 1
        if field == _FIRST_CHUNK_TAG >> 3:
            return _IdFacts(batch_size, chunked=True)
        value, position = read_varint(data, position)
        if wire == 2:
            position += value
        elif field == _BATCH_SIZE_TAG >> 3:
            batch_size = max(1, value)
    return _IdFacts(batch_size, chunked=False)


class Decrypted:
    """Returns the messages of one handle, and raises an error in place of an encrypted one.

    Args:
        where: Topic partition of the handle.
    """

    def __init__(self, where: TopicPartition) -> None:
        self._where = where
        self._refused: EncryptedMessageError | None = None
        self._behind: Sequence[Any] = ()

    @property
    def waits(self) -> bool:
        """Whether :meth:`next` has a result without asking the client."""
        return self._refused is not None or bool(self._behind)

    def next(self, from_client: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        """Return the next messages, up to an encrypted one.

        Args:
            from_client: Takes messages from the client.

        Raises:
            EncryptedMessageError: The next message is encrypted. The next call continues after it.
        """
        refused, self._refused = self._refused, None
        if refused is not None:
            raise refused
        messages, self._behind = self._behind or from_client(), ()
        # The client returns an encrypted entry as one message, even if it is a batch.
        if not any(map(_Message.encryption_context, messages)):
            return messages
        at, first = next(
            (i, one) for i, one in enumerate(messages) if one.encryption_context() is not None
        )
        entry_id = EntryId(first.message_id().ledger_id(), first.message_id().entry_id())
        self._behind = messages[at + 1 :]
        error = encrypted_entry(self._where, entry_id, first.data())
        if not at:
            raise error
        self._refused = error
        return messages[:at]


def readable_before(messages: Sequence[Any], refused: KeyShardError) -> Sequence[Any]:
    """Return the messages before the refused one."""
    at = refused.facts["ledger"], refused.facts["entry"]
    ids = (message.message_id() for message in messages)
    first = next(i for i, one in enumerate(ids) if (one.ledger_id(), one.entry_id()) == at)
    return messages[:first]


def to_blocks(
    messages: Sequence[Any],
    where: TopicPartition,
    came_to: HashRange | None = None,
    columns: Collection[str] | None = None,
) -> list[EntryBlock]:
    """Group messages, in delivery order, into blocks of adjacent messages of one entry.

    Messages are objects of the C extension, because the Python wrapper of each costs as much as
    all its getters together.

    Args:
        messages: Messages of a consumer or Reader.
        where: Its topic partition.
        came_to: The consumer's range; ``None`` for a Reader.
        columns: As in :class:`~keyshard.broker.port.ReadOptions`.
    """
    if not messages:
        return []
    wanted = columns is None or "value" in columns
    values = _values(messages) if wanted else None
    partition_keys, ordering_keys, routing_keys, event_ms, publish_ms, properties, unreadable = (
        _metadata(messages)
    )
    content = pack(
        values,
        [key or None for key in partition_keys] if "" in partition_keys else partition_keys,
        [key or None for key in ordering_keys],
        event_ms,
        properties,
        # The extension does not provide the other metadata columns.
        metadata={
            name: _producers(messages) if name == PRODUCER else [None] * len(messages)
            for name in metadata_in(columns)
        },
    )
    sizes = list(map(_Message.length, messages) if values is None else map(_size, values))
    others = other_bytes(content)
    blocks: list[EntryBlock] = []
    position, end = 0, len(messages)
    while position < end:
        first = messages[position]
        first_id = first.message_id()
        facts = _id_facts(first_id.serialize())
        entry_id = EntryId(first_id.ledger_id(), first_id.entry_id())
        if facts.chunked:
            raise _chunked(where, entry_id)
        index = first_id.batch_index()
        indices: Sequence[int] = range(1)
        if index >= 0:
            indices = _indices(messages, position, entry_id, index, facts.batch_size)
        stop = position + len(indices)
        slot, mixed_slots, keys_of_bytes = slots_of(
            routing_keys[position:stop], None if ordering_keys[position] else came_to
        )
        blocks.append(
            EntryBlock(
                entry_id,
                facts.batch_size,
                index >= 0,
                indices,
                slot,
                mixed_slots,
                publish_ms[position],
                sum(sizes[position:stop]),
                content,
                position,
                first.redelivery_count() > 0,
                keys_of_bytes,
                sum(unreadable[position:stop]) if unreadable else 0,
                None if (version := first.int_schema_version()) < 0 else version,
                others(position, stop),
                len(indices) == facts.batch_size,
            )
        )
        position = stop
        if not len(blocks) % ENTRIES_AT_ONCE:
            time.sleep(0)
    return blocks


def _values(messages: Sequence[Any]) -> Sequence[bytes | None]:
    """Return the payloads; ``None`` for null values, which the client shows as empty."""
    values: list[bytes | None] = list(map(_Message.data, messages))
    if b"" in values:
        return [value or (None if one.has_null_value() else value)
                for value, one in zip(values, messages, strict=True)]  # fmt: skip
    return values


def _producers(messages: Sequence[Any]) -> list[str]:
    try:
        return list(map(_Message.producer_name, messages))
    except UnicodeDecodeError:
        return [_readable(_Message.producer_name, message)[0] for message in messages]


def _size(value: bytes | None) -> int:
    return 0 if value is None else len(value)


class _Metadata(NamedTuple):
    """Metadata of several messages, one value per message."""

    partition_keys: list[str]
    """Empty for no key; the same for ordering keys."""
    ordering_keys: list[str]
    routing_keys: list[str | bytes | None]
    """The keys that the broker hashes; bytes if an ordering key is not text."""
    event_ms: list[int]
    publish_ms: list[int]
    properties: list[dict[str, str]]
    unreadable: list[bool]
    """Whether broken bytes were replaced; empty if there were none."""


def _metadata(messages: Sequence[Any]) -> _Metadata:
    """Read the metadata of messages, and replace broken bytes."""
    unreadable: list[bool] = []
    try:
        partition_keys = list(map(_Message.partition_key, messages))
        ordering_keys = list(map(_Message.ordering_key, messages))
        properties = list(map(_Message.properties, messages))
        routing_keys: list[str | bytes | None] = [
            ordering or partition or None
            for ordering, partition in zip(ordering_keys, partition_keys, strict=True)
        ]
    except UnicodeDecodeError:
        found = [
            [_readable(getter, message) for message in messages]
            for getter in (_Message.partition_key, _Message.ordering_key, _Message.properties)
        ]
        partition_keys, ordering_keys, properties = ([value for value, _ in one] for one in found)
        routing_keys = [
            ordering_bytes or ordering or partition or None
            for (ordering, ordering_bytes), partition in zip(found[1], partition_keys, strict=True)
        ]
        unreadable = [any(wrong for _, wrong in row) for row in zip(*found, strict=True)]
    event_ms = list(map(_Message.event_timestamp, messages))
    publish_ms = list(map(_Message.publish_timestamp, messages))
    if max(event_ms) >= TIME_MS_MAX or max(publish_ms) >= TIME_MS_MAX:
        event_ms, publish_ms, properties, wrong = readable_times(event_ms, publish_ms, properties)
        unreadable = [a or b for a, b in zip(wrong, unreadable or wrong, strict=True)]
    return _Metadata(
        partition_keys, ordering_keys, routing_keys, event_ms, publish_ms, properties, unreadable
    )


def _readable(getter: Callable[[Any], Any], message: Any) -> tuple[Any, bytes]:
    """Return a getter's text, and its bytes if they were not valid text.

    Broken bytes are replaced, as the broker does before it hashes a partition key.
    """
    try:
        return getter(message), b""
    except UnicodeDecodeError as exc:
        text = exc.object.decode(errors="replace")
        return {NOT_TEXT: text} if getter is _Message.properties else text, exc.object


def _indices(
    messages: Sequence[Any], position: int, entry_id: EntryId, index: int, batch_size: int
) -> Sequence[int]:
    """Return the ascending batch indices of the messages from ``position`` on of one entry.

    The client returns an entry in one piece. If the message at the expected end has the expected
    index, all messages between belong to the entry, so only two ids are checked.
    """
    length = min(batch_size - index, len(messages) - position)
    if length == 1:
        return range(index, index + 1)
    last = messages[position + length - 1].message_id()
    if (
        last.batch_index() == index + length - 1
        and last.entry_id() == entry_id.entry
        and last.ledger_id() == entry_id.ledger
    ):
        return range(index, index + length)
    indices = [index]
    for message in messages[position + 1 : position + batch_size]:
        other = message.message_id()
        same = other.entry_id() == entry_id.entry and other.ledger_id() == entry_id.ledger
        if not same or other.batch_index() <= indices[-1]:
            break
        indices.append(other.batch_index())
    return indices


def _chunked(where: TopicPartition, entry_id: EntryId) -> ChunkedMessageError:
    return of_entry(
        ChunkedMessageError,
        where,
        entry_id,
        f"Message {entry_id.ledger}:{entry_id.entry} of {where} is chunked. A chunked message "
        "has several entries, which keyshard does not support. Nothing of it was acknowledged.",
        "Disable chunking at the producer, or raise the broker's maxMessageSize.",
    )
