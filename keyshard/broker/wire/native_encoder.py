"""Encodes columns as entries and entries as frames, in bulk.

It uses compiled code (``native/encoder.rs``) if the install built it. The references are
:mod:`keyshard.broker.wire.encoding` and :func:`keyshard.broker.wire.frames.send_frame`; both give
the same bytes.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa

from keyshard.broker.unconfirmed import Pending
from keyshard.broker.wire.compression import packed_if_smaller
from keyshard.broker.wire.encoding import COMPRESSED_BYTES_MIN, EncodedRows, EntryHead, encoded
from keyshard.broker.wire.frames import send_frame
from keyshard.broker.wire.native_library import NativeLibrary, load
from keyshard.columns.outgoing import (
    MESSAGE_OVERHEAD,
    PROPERTY_OVERHEAD,
    Outgoing,
    OutgoingSlice,
)

BUILT = Path(__file__).parent / "native" / "_encoder.so"
"""The library that the install builds."""
VERSION = 3
"""Interface version of the library; a library with another version is not used."""
AT_ONCE_BYTES = 2 * 1024 * 1024
"""Bytes of content after which a call of the library ends; one entry may exceed it."""
FRAMES_MIN = 3
"""Minimum number of frames for which a call is faster."""
_ENTRY_OVERHEAD = 160
"""Largest size of the metadata of an entry beside keys, properties and head fields, bytes."""
_FRAME_OVERHEAD = 64
"""Largest size of a frame beside its entry, bytes."""


class _Binary(ctypes.Structure):
    _fields_ = (
        ("validity", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("data", ctypes.c_void_p),
        ("data_size", ctypes.c_uint64),
        ("start", ctypes.c_uint64),
        ("rows", ctypes.c_uint64),
    )


class _Numbers(ctypes.Structure):
    _fields_ = (
        ("validity", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("start", ctypes.c_uint64),
        ("rows", ctypes.c_uint64),
    )


class _Maps(ctypes.Structure):
    _fields_ = (
        ("validity", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("start", ctypes.c_uint64),
        ("rows", ctypes.c_uint64),
        ("names", _Binary),
        ("texts", _Binary),
    )


class _Messages(ctypes.Structure):
    _fields_ = (
        ("values", _Binary),
        ("keys", _Binary),
        ("ordering_keys", _Binary),
        ("events", _Numbers),
        ("properties", _Maps),
        ("deliver_ats", _Numbers),
        ("keys_of_bytes", ctypes.c_uint64),
    )


class _Head(ctypes.Structure):
    _fields_ = (
        ("producer_name", ctypes.c_char_p),
        ("producer_name_size", ctypes.c_uint64),
        ("schema_version", ctypes.c_char_p),
        ("schema_version_size", ctypes.c_uint64),
        ("publish_ms", ctypes.c_uint64),
        ("compression", ctypes.c_uint64),
    )


_library = load(
    BUILT,
    "keyshard_encoder_version",
    VERSION,
    {
        "keyshard_payloads": ctypes.c_bool,
        "keyshard_entries": ctypes.c_bool,
        "keyshard_frames": ctypes.c_uint64,
    },
)


def is_available() -> bool:
    """Return whether the install built the library."""
    return _library is not None


def encode_all(
    columns: Outgoing, ends: Sequence[int], head: EntryHead, sequence_id: int
) -> Iterator[list[Pending]]:
    """Encode messages as entries, some at a time.

    Args:
        columns: The messages.
        ends: End of each entry, exclusive.
        head: The common part of all entries of the producer.
        sequence_id: Sequence id of the first message.
    """
    library = _library
    bulk = _Bulk(library, columns, sequence_id) if library is not None and len(columns) else None
    start = first = 0
    while first < len(ends):
        last = first + 1 if bulk is None else bulk.last(start, ends, first)
        part = ends[first:last]
        entries = None if bulk is None else bulk.entries(start, part, head)
        found: list[Pending] = []
        for number, (begin, stop) in enumerate(pairwise([start, *part])):
            sequence = sequence_id + begin
            if entries is None:
                data = encoded(OutgoingSlice(columns, begin, stop), head, sequence)
            else:
                data = entries[number]
            found.append(Pending(EncodedRows(data, stop - begin), sequence, data))
        yield found
        start, first = ends[last - 1], last


def frames(producer_id: int, entries: Sequence[Pending]) -> bytes | bytearray:
    """Return the frames of entries, one after the other.

    Args:
        producer_id: Id of the producer at its connection.
        entries: The encoded entries.
    """
    library, count = _library, len(entries)
    if library is not None and count >= FRAMES_MIN:
        stored = [one.data for one in entries]
        sizes = list(map(len, stored))
        size = sum(sizes) + _FRAME_OVERHEAD * count
        room = bytearray(size)
        numbers = ctypes.c_uint64 * count
        written: int = library.calls(size).keyshard_frames(
            ctypes.c_uint64(producer_id),
            ctypes.c_uint64(count),
            (ctypes.c_char_p * count)(*stored),
            numbers(*sizes),
            numbers(*[one.first for one in entries]),
            numbers(*[len(one.rows) for one in entries]),
            (ctypes.c_char * size).from_buffer(room),
            ctypes.c_uint64(size),
        )
        if written:
            del room[written:]
            return room
    return b"".join(send_frame(producer_id, one.first, len(one.rows), one.data) for one in entries)


class _Bulk:
    """Columns, as the library takes them."""

    def __init__(self, library: NativeLibrary, columns: Outgoing, sequence_id: int) -> None:
        self._library = library
        self._sequence_id = sequence_id
        keys = columns.key_texts()
        self._columns = (columns, keys)
        """Keeps the buffers alive."""
        self._texts = [
            _binary(one) for one in (columns.values, keys, columns.ordering_keys)
        ]  # fmt: skip
        self._maps = _maps(columns.properties)
        self._messages = _Messages(
            *self._texts, _numbers(columns.event_ms), self._maps,
            _numbers(columns.deliver_at_ms), int(columns.keys_of_bytes),
        )  # fmt: skip

    def last(self, start: int, ends: Sequence[int], first: int) -> int:
        """Return the end of the entries that are encoded together, exclusive.

        Args:
            start: First row.
            ends: End of each entry, exclusive.
            first: The first entry.
        """
        size = partial(self.content, start)
        if size(ends[-1]) <= AT_ONCE_BYTES:
            return len(ends)
        return max(first + 1, bisect_right(ends, AT_ONCE_BYTES, first, key=size))

    def content(self, start: int, stop: int) -> int:
        """Return an upper bound of the size of messages, bytes."""
        total = MESSAGE_OVERHEAD * (stop - start)
        for one in self._texts:
            total += _size(one, start, stop)
        maps = self._maps
        if maps.offsets:
            offsets = ctypes.cast(maps.offsets, ctypes.POINTER(ctypes.c_int32))
            first, end = (offsets[maps.start + row] for row in (start, stop))
            total += PROPERTY_OVERHEAD * (end - first)
            total += _size(maps.names, first, end) + _size(maps.texts, first, end)
        return total

    def entries(self, start: int, ends: Sequence[int], head: EntryHead) -> list[bytes] | None:
        """Encode entries; ``None`` if the library declines."""
        count, content = len(ends), self.content(start, ends[-1])
        calls = self._library.calls(content)
        numbers = ctypes.c_uint64 * count
        rows = (
            ctypes.byref(self._messages), ctypes.c_uint64(start), numbers(*ends),
            ctypes.c_uint64(count), ctypes.c_uint64(self._sequence_id),
        )  # fmt: skip
        payloads, payload_ends = bytearray(content), numbers()
        if not calls.keyshard_payloads(*rows, *_room(payloads), payload_ends):
            return None
        unpacked = [stop - begin for begin, stop in pairwise([0, *payload_ends])]
        if head.compression and max(unpacked) >= COMPRESSED_BYTES_MIN:
            view = memoryview(payloads)
            parts: list[bytes | memoryview] = [
                view[stop - size : stop]
                if size < COMPRESSED_BYTES_MIN
                else packed_if_smaller(head.compression, view[stop - size : stop])
                for size, stop in zip(unpacked, payload_ends, strict=True)
            ]
            payloads = bytearray().join(parts)
            payload_ends = numbers(*accumulate(map(len, parts)))
        common = _Head(
            head.producer_name, len(head.producer_name), head.schema_version,
            len(head.schema_version), head.publish_ms, head.compression,
        )  # fmt: skip
        overhead = _ENTRY_OVERHEAD + len(head.producer_name) + len(head.schema_version)
        described = content - _size(self._texts[0], start, ends[-1])
        found = bytearray(payload_ends[-1] + described + count * overhead)
        entry_ends = numbers()
        written = calls.keyshard_entries(
            *rows, ctypes.byref(common), _room(payloads)[0], payload_ends, numbers(*unpacked),
            *_room(found), entry_ends,
        )  # fmt: skip
        if not written:
            return None
        # Copies, so that an entry does not keep the memory of its neighbours.
        whole = memoryview(found)
        return [bytes(whole[begin:stop]) for begin, stop in pairwise([0, *entry_ends])]


def _room(data: bytearray) -> tuple[Any, Any]:
    """Return bytes and their size as arguments of the library."""
    return (ctypes.c_char * len(data)).from_buffer(data), ctypes.c_uint64(len(data))


def _binary(column: pa.Array | None) -> _Binary:
    if column is None:
        return _Binary()
    validity, offsets, data = column.buffers()
    if offsets is None:
        return _Binary()
    return _Binary(
        _address(validity), offsets.address, _address(data), 0 if data is None else data.size,
        column.offset, len(column),
    )  # fmt: skip


def _numbers(column: pa.Array | None) -> _Numbers:
    if column is None:
        return _Numbers()
    validity, values = column.buffers()
    return _Numbers(_address(validity), values.address, column.offset, len(column))


def _maps(column: pa.Array | None) -> _Maps:
    if column is None:
        return _Maps()
    validity, offsets = column.buffers()[:2]
    # ``keys`` and ``items`` ignore the slice of a column, and so do the offsets.
    names, texts = column.keys, column.items
    return _Maps(
        _address(validity), offsets.address, column.offset, len(column), _binary(names),
        _binary(texts),
    )  # fmt: skip


def _address(buffer: pa.Buffer | None) -> int | None:
    return None if buffer is None else int(buffer.address)


def _size(column: _Binary, start: int, stop: int) -> int:
    """Return the size of rows, bytes."""
    if not column.offsets:
        return 0
    offsets = ctypes.cast(column.offsets, ctypes.POINTER(ctypes.c_int32))
    first: int = offsets[column.start + start]
    end: int = offsets[column.start + stop]
    return end - first
