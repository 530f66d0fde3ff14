"""Decodes entries with compiled code (``native/decoder.rs``), if the install could build it.

It handles plain entries only. Entries that are damaged, chunked, encrypted or partly acknowledged,
or that hold invalid text or times, go to :mod:`keyshard.broker.wire.decoding`. That module is the
reference; both produce the same rows.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from itertools import accumulate
from operator import add, attrgetter
from pathlib import Path
from typing import Any

import pyarrow as pa

from keyshard.broker.framing import CutFrame
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
from keyshard.broker.wire.native_library import load
from keyshard.columns.content import (
    CONTENT,
    METADATA,
    content_with,
    other_bytes,
)
from keyshard.core.metadata_columns import STORED
from keyshard.core.position.entry import EntryBlock, entry_id_of

BUILT = Path(__file__).parent / "native" / "_decoder.so"
"""The library that the install builds."""
REASON = BUILT.with_name("_not_compiled.txt")
"""File of an install without the library; it says why."""
VERSION = 9
"""Interface version of the library; a library with another version is not used."""
COPIED_BYTES_MAX = 4096
"""Mean size of frames up to which they are copied into one buffer for a call, bytes."""
FRAMES_MIN = 4
"""Minimum number of frames for which a call is faster."""
_CAME, _OPENED, _DECODED = 5, 7, 5
"""Numbers per entry in the results of the library's functions."""
_LIMITS = (ENTRY_MESSAGES_MAX, ENTRY_MEMORY_MAX, MESSAGE_BYTES, PROPERTY_BYTES)
_INDICES = [range(count) for count in range(1_001)]
"""Message indices by batch size, shared by all entries."""
_ack_set = attrgetter("ack_set")
_data = attrgetter("data")
_position = attrgetter("position")
_ARROW_ARRAY = ctypes.c_uint64 * 10
"""Memory of an ``ArrowArray`` of Arrow's C data interface."""


class _Stored(ctypes.Structure):
    """A metadata column for the library."""

    _fields_ = tuple(
        (name, ctypes.c_uint32) for name in ("kind", "origin", "field", "field_in_batch", "wanted")
    )


_library = load(
    BUILT,
    "keyshard_decoder_version",
    VERSION,
    {
        "keyshard_came": None,
        "keyshard_open": ctypes.c_bool,
        "keyshard_decode": ctypes.c_bool,
    },
)


def is_available() -> bool:
    """Return whether the install built the library."""
    return _library is not None


def why_missing() -> str:
    """Say why there is no library, as a clause."""
    with suppress(OSError):
        return REASON.read_text(encoding="utf-8", errors="replace").strip()
    return "the compiled code of this install does not fit this machine or this version"


def parse_frames(frames: Sequence[bytes]) -> list[tuple[int, RawEntry] | None]:
    """Parse message frames, without their sizes, into consumer ids and entries.

    The result is ``None`` for other frames, and for an entry that is partly acknowledged.
    """
    if _library is None or len(frames) < FRAMES_MIN:
        return [None] * len(frames)
    count = len(frames)
    sizes = list(map(len, frames))
    addresses, _copy = _addresses(frames, sizes)
    output = (ctypes.c_uint64 * (_CAME * count))()
    _library.calls(0).keyshard_came(ctypes.c_size_t(count), addresses, _numbers(sizes), output)
    numbers = _listed(output)
    consumers, ledgers, ids, redelivered, positions = (numbers[at::_CAME] for at in range(_CAME))
    entry_ids = map(entry_id_of, zip(ledgers, ids, strict=True))
    entries = map(RawEntry, entry_ids, frames, positions, map(bool, redelivered))
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
    """Decode entries as :func:`keyshard.broker.wire.decoding.decode` does, by compiled code.

    Returns ``None`` if there is no library, or if it cannot decode every entry.
    """
    frames, positions = list(map(_data, entries)), list(map(_position, entries))
    if _library is None or any(map(_ack_set, entries)) or CutFrame in map(type, frames):
        return None
    count = len(entries)
    sizes = list(map(len, frames))
    addresses, _copy = _addresses(frames, sizes)
    where = ctypes.c_size_t(count), addresses, _numbers(sizes), _numbers(positions)
    calls = _library.calls(sum(sizes))
    output = (ctypes.c_uint64 * (_OPENED * count))()
    if not calls.keyshard_open(*where, output):
        return None
    opened = _listed(output)
    enough = _enough(sizes, opened, at_once_bytes)
    if enough < count:
        return decode(
            entries[:enough],
            keeps_values=keeps_values,
            metadata=metadata,
            at_once_bytes=at_once_bytes,
        )
    unpacked_to, unpacked_sizes = (ctypes.c_char_p * count)(), (ctypes.c_uint64 * count)()
    if any(opened[3::_OPENED]):
        try:
            for at, entry in enumerate(entries):
                payload = _payload(entry, opened[at * _OPENED : (at + 1) * _OPENED])
                if payload is not None:
                    unpacked_to[at], unpacked_sizes[at] = payload, len(payload)
        except UnreadableError:
            return None
    slots, rows = ctypes.POINTER(ctypes.c_int32)(), ctypes.POINTER(ctypes.c_int64)()
    made = _ARROW_ARRAY()
    if not calls.keyshard_decode(
        *where,
        unpacked_to,
        unpacked_sizes,
        ctypes.c_bool(keeps_values),
        ctypes.c_size_t(len(STORED)),
        _stored(metadata),
        (ctypes.c_uint64 * len(_LIMITS))(*_LIMITS),
        ctypes.byref(slots),
        ctypes.byref(rows),
        made,
    ):
        return None
    # The library's memory lives as long as the columns.
    content = pa.RecordBatch._import_from_c(ctypes.addressof(made), content_with(metadata))
    return _blocks(entries, opened, rows[: _DECODED * count], slots, content)


@cache
def _stored(metadata: tuple[str, ...]) -> Any:
    """Encode the metadata columns, and whether they are requested, for the library."""
    return (_Stored * len(STORED))(
        *(
            _Stored(one.kind, one.origin, one.field, one.field_in_batch, one.name in metadata)
            for one in STORED
        )
    )


def _numbers(values: Sequence[int]) -> Any:
    """Return numbers as an argument of the library."""
    # An array of ctypes takes ten times as long to convert them.
    return (ctypes.c_uint64 * len(values)).from_buffer(array("Q", values))


def _listed(numbers: Any) -> list[int]:
    return memoryview(numbers).cast("B").cast("Q").tolist()


def _addresses(frames: Sequence[bytes], sizes: Sequence[int]) -> tuple[Any, Any]:
    """Return the address of each frame, and an object that must live as long as they are used."""
    if sum(sizes) > COPIED_BYTES_MAX * len(frames):
        return (ctypes.c_char_p * len(frames))(*frames), frames
    # One copy of small frames costs less than the address of each of them.
    copy = bytearray().join(frames)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(copy)) if copy else 0
    return _numbers(list(accumulate(sizes[:-1], initial=begin))), copy


def _enough(sizes: Sequence[int], opened: Sequence[int], at_once_bytes: int) -> int:
    """Return the number of leading entries that fill one decoding step."""
    unpacked_sizes, messages = opened[4::_OPENED], opened[2::_OPENED]
    if sum(sizes) + sum(unpacked_sizes) + MESSAGE_BYTES * sum(messages) < at_once_bytes:
        return len(sizes)
    payloads = list(map(max, sizes, unpacked_sizes))
    rows = [MESSAGE_BYTES * count for count in messages]
    ends = accumulate(map(add, payloads, rows))
    return next((i for i, size in enumerate(ends, 1) if size >= at_once_bytes), len(sizes))


def _payload(entry: RawEntry, opened: Sequence[int]) -> bytes | None:
    payload, _, _, compression, size, _, _ = opened
    if not compression:
        return None
    return unpacked(compression, size, entry.data[payload:])


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
    columns = zip(entries, *said, *numbers, strict=True)
    named = other_bytes(content, METADATA.names) if len(content.schema) > len(CONTENT) else None
    for (
        entry, payload, batched, compression, unpacked_size, publish_ms, version,
        rows, size, slot, mixed, of_bytes,
    ) in columns:  # fmt: skip
        stored = unpacked_size if compression else len(entry.data) - payload
        if not batched:
            # The keys and properties of an unbatched entry precede its payload.
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
                True,  # noqa: FBT003 - complete; by name, it costs a tenth of the block
            )
        )
        start += rows
    return Decoded(blocks, None, start, len(entries))
