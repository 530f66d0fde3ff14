"""Entries decoded by compiled code, where the install could build it: ``native/decoder.rs``.

It answers for plain entries only. Everything else (damaged, chunked, encrypted, partly
acknowledged, with something that is no text or no time) is left to
:mod:`keyshard.broker.wire.decoding`, the reference, with which it agrees row by row.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, repeat
from operator import add
from pathlib import Path
from typing import Any

import pyarrow as pa

from keyshard.arrow.content import (
    CONTENT,
    METADATA,
    TIME,
    content_with,
    other_bytes,
    properties_of,
)
from keyshard.broker.wire.entries import (
    ENTRY_MEMORY_MAX,
    ENTRY_MESSAGES_MAX,
    MESSAGE_BYTES,
    PAYLOAD_AT_ONCE,
    PROPERTY_BYTES,
    CutFrame,
    Decoded,
    RawEntry,
    UnreadableError,
)
from keyshard.broker.wire.unpacking import unpacked
from keyshard.core.metadata_columns import BROKER_PUBLISH_TIME, KEY_BYTES, PRODUCER, SEQUENCE_ID
from keyshard.core.position.entry import EntryBlock, EntryId

BUILT = Path(__file__).parent / "native" / "_decoder.so"
"""What the install builds."""
VERSION = 7
"""Of the functions of the library; another one is not called."""
LET_OTHERS_BYTES = 256 * 1024
"""Size of what is decoded from which on other threads run meanwhile. Below it, getting the
interpreter back may take longer than decoding."""
FRAMES_MIN = 4
"""Frames that are worth a call."""
_CAME, _OPENED, _DECODED = 5, 7, 5
"""Numbers that the library tells of an entry."""
_LIMITS = (ENTRY_MESSAGES_MAX, ENTRY_MEMORY_MAX, MESSAGE_BYTES, PROPERTY_BYTES)
_INDICES = [range(count) for count in range(1_001)]
"""All entries of one size share the indices of their messages."""
_entry_id = partial(tuple.__new__, EntryId)
_raw_entry = partial(tuple.__new__, RawEntry)
_BUFFERS = (
    "has_value", "value_offsets", "values", "has_key", "key_offsets", "keys", "has_ordering_key",
    "ordering_key_offsets", "ordering_keys", "has_event", "events", "property_offsets",
    "property_key_offsets", "property_keys", "property_value_offsets", "property_values",
    "has_key_bytes", "key_bytes_offsets", "key_bytes", "has_sequence_id", "sequence_ids",
    "producer_offsets", "producers", "has_broker_time", "broker_times",
)  # fmt: skip
_METADATA = {
    KEY_BYTES: (("key_bytes_offsets", "key_bytes"), "key_bytes", "has_key_bytes"),
    SEQUENCE_ID: (("sequence_ids",), "sequence_ids", "has_sequence_id"),
    PRODUCER: (("producer_offsets", "producers"), "producers", ""),
    BROKER_PUBLISH_TIME: (("broker_times",), "broker_times", "has_broker_time"),
}
"""Buffers of a column, its count of values, and which rows have one."""


class _Found(ctypes.Structure):
    _fields_ = (
        ("addresses", ctypes.c_void_p * len(_BUFFERS)),
        ("sizes", ctypes.c_uint64 * len(_BUFFERS)),
        ("values", ctypes.c_uint64),
        ("keys", ctypes.c_uint64),
        ("ordering_keys", ctypes.c_uint64),
        ("events", ctypes.c_uint64),
        ("properties", ctypes.c_uint64),
        ("key_bytes", ctypes.c_uint64),
        ("sequence_ids", ctypes.c_uint64),
        ("producers", ctypes.c_uint64),
        ("broker_times", ctypes.c_uint64),
    )


class _Library:
    """The functions of the library.

    Raises:
        OSError: There is none for this machine.
        AttributeError: It is another one.
    """

    def __init__(self) -> None:
        self._calls = ctypes.PyDLL(str(BUILT)), ctypes.CDLL(str(BUILT))
        for library in self._calls:
            library.keyshard_decoder_version.restype = ctypes.c_uint64
            library.keyshard_came.restype = None
            library.keyshard_open.restype = ctypes.c_bool
            library.keyshard_decode.restype = ctypes.POINTER(_Found)
            library.keyshard_free.argtypes = [ctypes.POINTER(_Found)]
            library.keyshard_free.restype = None
        self.version: int = self._calls[0].keyshard_decoder_version()
        self.free = self._calls[0].keyshard_free

    def calls(self, size: int) -> Any:
        """The functions for entries of some bytes."""
        return self._calls[size >= LET_OTHERS_BYTES]


class _Owner:
    """Keeps what the library found until no column needs it."""

    def __init__(self, library: _Library, found: Any) -> None:
        self._library = library
        self._found = found

    def __del__(self) -> None:
        self._library.free(self._found)


def _load() -> _Library | None:
    with suppress(OSError, AttributeError):
        library = _Library()
        if library.version == VERSION:
            return library
    return None


_library = _load()


def is_there() -> bool:
    """Whether the install built the library."""
    return _library is not None


def came(frames: Sequence[bytes]) -> list[tuple[int, RawEntry] | None]:
    """Entries of frames, behind their sizes, and for whom they are; ``None`` for other frames.

    An entry that is acknowledged in part counts as one of those.
    """
    if _library is None or len(frames) < FRAMES_MIN:
        return [None] * len(frames)
    count = len(frames)
    told = (ctypes.c_uint64 * (_CAME * count))()
    _library.calls(0).keyshard_came(
        ctypes.c_size_t(count),
        (ctypes.c_char_p * count)(*frames),
        (ctypes.c_uint64 * count)(*map(len, frames)),
        told,
    )
    numbers = told[:]
    consumers, ledgers, ids, redelivered, positions = (numbers[at::_CAME] for at in range(_CAME))
    entry_ids = map(_entry_id, zip(ledgers, ids, strict=True))
    entries = map(_raw_entry, zip(entry_ids, map(bool, redelivered), repeat(()), frames, positions))
    return [
        (consumer, entry) if entry.position else None
        for consumer, entry in zip(consumers, entries, strict=True)
    ]


def decode(
    entries: Sequence[RawEntry],
    *,
    keeps_values: bool,
    metadata: tuple[str, ...] = (),
    at_once_bytes: int = PAYLOAD_AT_ONCE,
) -> Decoded | None:
    """As :func:`keyshard.broker.wire.decoding.decode`, of plain entries; ``None`` for others."""
    _, _, ack_sets, frames, positions = zip(*entries, strict=True)
    if _library is None or any(ack_sets) or CutFrame in map(type, frames):
        return None
    count = len(entries)
    numbers = ctypes.c_uint64 * count
    pointers = ctypes.c_char_p * count
    sizes = list(map(len, frames))
    where = (
        ctypes.c_size_t(count), pointers(*frames), numbers(*sizes), numbers(*positions),
    )  # fmt: skip
    calls = _library.calls(sum(sizes))
    told = (ctypes.c_uint64 * (_OPENED * count))()
    if not calls.keyshard_open(*where, told):
        return None
    opened = told[:]
    enough = _enough(sizes, opened, at_once_bytes)
    if enough < count:
        return decode(
            entries[:enough],
            keeps_values=keeps_values,
            metadata=metadata,
            at_once_bytes=at_once_bytes,
        )
    payloads: list[bytes | None] = [None] * count
    if any(opened[3::_OPENED]):
        try:
            payloads = [
                _payload(entry, opened[at : at + _OPENED])
                for entry, at in zip(entries, range(0, len(opened), _OPENED), strict=True)
            ]
        except UnreadableError:
            return None
    slots, rows = ctypes.POINTER(ctypes.c_int32)(), ctypes.POINTER(ctypes.c_int64)()
    found = calls.keyshard_decode(
        *where,
        pointers(*payloads),
        numbers(*[0 if payload is None else len(payload) for payload in payloads]),
        ctypes.c_uint32(_wanted(metadata, keeps_values=keeps_values)),
        (ctypes.c_uint64 * len(_LIMITS))(*_LIMITS),
        ctypes.byref(slots),
        ctypes.byref(rows),
    )
    if not found:
        return None
    owner = _Owner(_library, found)
    decoded = rows[: _DECODED * count]
    count = sum(decoded[::_DECODED])
    content = _content(found.contents, owner, count, metadata, keeps_values=keeps_values)
    return _blocks(entries, opened, decoded, slots, content)


def _wanted(metadata: Sequence[str], *, keeps_values: bool) -> int:
    """Bits of what the library is asked for: values, then what is beside the content."""
    if not metadata:
        return int(keeps_values)
    return keeps_values | sum(1 << i for i, name in enumerate(_METADATA, 1) if name in metadata)


def _enough(sizes: Sequence[int], opened: Sequence[int], at_once_bytes: int) -> int:
    """How many entries hold as much as is decoded at once."""
    payloads = list(map(max, sizes, opened[4::_OPENED]))
    messages = opened[2::_OPENED]
    if sum(payloads) + MESSAGE_BYTES * sum(messages) < at_once_bytes:
        return len(sizes)
    rows = [MESSAGE_BYTES * count for count in messages]
    ends = accumulate(map(add, payloads, rows))
    return next((i for i, size in enumerate(ends, 1) if size >= at_once_bytes), len(sizes))


def _payload(entry: RawEntry, opened: Sequence[int]) -> bytes | None:
    payload, _, _, compression, size, _, _ = opened
    if not compression:
        return None
    return unpacked(compression, size, entry.data[payload:])


def _content(
    found: Any, owner: _Owner, rows: int, metadata: tuple[str, ...], *, keeps_values: bool
) -> pa.RecordBatch:
    """Columns over the buffers that were found, which they keep."""

    def buffer(name: str) -> pa.Buffer:
        at = _BUFFERS.index(name)
        return pa.foreign_buffer(found.addresses[at], found.sizes[at], owner)

    def column(
        kind: pa.DataType, rows: int, names: Sequence[str], valid: int, validity: str = ""
    ) -> pa.Array:
        if not valid and validity:
            return pa.nulls(rows, kind)
        nulls = buffer(validity) if valid < rows else None
        return pa.Array.from_buffers(kind, rows, [nulls, *map(buffer, names)], rows - valid)

    text, pairs = pa.string(), found.properties
    columns = [
        column(pa.binary(), rows, ("value_offsets", "values"), found.values, "has_value")
        if keeps_values
        else pa.nulls(rows, pa.binary()),
        column(text, rows, ("key_offsets", "keys"), found.keys, "has_key"),
        column(
            text, rows, ("ordering_key_offsets", "ordering_keys"),
            found.ordering_keys, "has_ordering_key",
        ),
        column(TIME, rows, ("events",), found.events, "has_event"),
        properties_of(
            column(pa.int32(), rows + 1, ("property_offsets",), rows + 1),
            column(text, pairs, ("property_key_offsets", "property_keys"), pairs),
            column(text, pairs, ("property_value_offsets", "property_values"), pairs),
        ),
    ]  # fmt: skip
    for name in metadata:
        names, valid, validity = _METADATA[name]
        kind = METADATA.field(name).type
        columns.append(column(kind, rows, names, getattr(found, valid), validity))
    return pa.RecordBatch.from_arrays(columns, schema=content_with(metadata))


def _blocks(
    entries: Sequence[RawEntry],
    opened: Sequence[int],
    decoded: Sequence[int],
    slots: Any,
    content: pa.RecordBatch,
) -> Decoded:
    blocks: list[EntryBlock] = []
    start = 0
    numbers = (decoded[at::_DECODED] for at in range(_DECODED))
    said = (opened[at::_OPENED] for at in (0, 1, 3, 4, 5, 6))
    told = zip(entries, *said, *numbers, strict=True)
    named = other_bytes(content, METADATA.names) if len(content.schema) > len(CONTENT) else None
    for (
        entry, payload, batched, compression, unpacked_size, publish_ms, version,
        rows, size, slot, mixed, of_bytes,
    ) in told:  # fmt: skip
        stored = unpacked_size if compression else len(entry.data) - payload
        if not batched:
            # Its keys and properties lie before the payload.
            stored += payload - entry.position
        blocks.append(
            EntryBlock(
                entry.id,
                rows,
                bool(batched),
                _INDICES[rows] if rows < len(_INDICES) else range(rows),
                slot or None,
                [one or None for one in slots[start : start + rows]] if mixed else None,
                publish_ms,
                size,
                content,
                start,
                entry.redelivered,
                bool(of_bytes),
                0,
                version - 1 if version else None,
                stored - size + (named(start, start + rows) if named else 0),
            )
        )
        start += rows
    return Decoded(blocks, None, start, len(entries))
