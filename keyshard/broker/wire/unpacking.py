"""Compressed entries -> their payload, never more than a limit."""

from __future__ import annotations

import zlib

import pyarrow as pa

from keyshard.broker.wire.entries import UnreadableError

UNPACKED_BYTES_MAX = 128 * 1024 * 1024
"""Largest content of a compressed entry: what declares more is refused before it is unpacked."""

_CODECS = {1: "lz4_raw", 3: "zstd", 4: "snappy"}
_ZLIB = 2
_PADDED = (1, 4)
"""Compressions whose codec does not tell that there is less than declared: the rest would be
whatever was in memory, such as the messages of another entry."""
_UNPACKING = (OSError, pa.ArrowException, zlib.error, ValueError)


def unpacked(kind: int, size: int, packed: bytes) -> bytes:
    """The payload of a compressed entry.

    Args:
        kind: Its compression, by Pulsar's number.
        size: Bytes that it declares to have unpacked.
        packed: The payload as it is stored.

    Raises:
        UnreadableError: It is too large, or not what it declares.
    """
    if size > UNPACKED_BYTES_MAX:
        raise UnreadableError(f"unpacked it has {size} bytes, more than {UNPACKED_BYTES_MAX}")
    if kind != _ZLIB and kind not in _CODECS:
        raise UnreadableError(f"its compression, number {kind}, is unknown")
    if not packed and not size:
        return b""
    try:
        if kind == _ZLIB:
            found = zlib.decompressobj().decompress(packed, size + 1)
        else:
            found = pa.Codec(_CODECS[kind]).decompress(packed, size, asbytes=True)
        fits = len(found) == size and (
            not size or kind not in _PADDED or not _fits(kind, packed, size - 1)
        )
    except _UNPACKING as exc:
        raise UnreadableError(f"it cannot be unpacked ({exc})") from exc
    if not fits:
        raise UnreadableError(f"unpacked it has not the {size} bytes that it declares")
    return found


def _fits(kind: int, packed: bytes, size: int) -> bool:
    try:
        pa.Codec(_CODECS[kind]).decompress(packed, size)
    except _UNPACKING:
        return False
    return True
