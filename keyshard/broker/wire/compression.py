"""Compresses and decompresses the payload of entries; the latter with a limit on the size."""

from __future__ import annotations

import zlib

import pyarrow as pa

from keyshard.broker.wire.entries import UnreadableError

UNPACKED_BYTES_MAX = 128 * 1024 * 1024
"""Largest decompressed payload, bytes. An entry that declares more is refused before that."""

_CODECS = {1: "lz4_raw", 3: "zstd", 4: "snappy"}
_ZLIB = 2
_PADDED = (1, 4)
"""Compressions whose codec does not report a result shorter than declared. The rest of the buffer
would be other memory, such as the messages of another entry."""
_UNPACKING = (OSError, pa.ArrowException, zlib.error, ValueError)


def packed(kind: int, payload: bytes | memoryview) -> bytes:
    """Compress the payload of an entry.

    Args:
        kind: Pulsar's number of the compression.
        payload: The payload.
    """
    if kind == _ZLIB:
        return zlib.compress(payload)
    found: bytes = pa.Codec(_CODECS[kind]).compress(payload, asbytes=True)
    return found


def packed_if_smaller(kind: int, payload: bytes | memoryview) -> bytes | memoryview:
    """Compress the payload of an entry, or return it as it is if that makes it no smaller.

    So no entry is larger than its messages, whose size is checked before anything is sent.
    """
    found = packed(kind, payload)
    return found if len(found) < len(payload) else payload


def unpacked(kind: int, size: int, packed: bytes, *, size_max: int | None = None) -> bytes:
    """Decompress the payload of an entry.

    Args:
        kind: Pulsar's number of the compression.
        size: Declared size of the decompressed payload, bytes.
        packed: The stored payload.
        size_max: Largest size that is admitted, bytes; default ``UNPACKED_BYTES_MAX``.

    Raises:
        UnreadableError: The payload is too large, or does not match its declared size.
    """
    if size_max is None:
        size_max = UNPACKED_BYTES_MAX
    if size > size_max:
        raise UnreadableError(f"it has {size} bytes when decompressed, more than {size_max}")
    if kind != _ZLIB and kind not in _CODECS:
        raise UnreadableError(f"its compression type {kind} is unknown")
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
        raise UnreadableError(f"it cannot be decompressed ({exc})") from exc
    if not fits:
        raise UnreadableError(f"its decompressed size is not the declared {size} bytes")
    return found


def _fits(kind: int, packed: bytes, size: int) -> bool:
    try:
        pa.Codec(_CODECS[kind]).decompress(packed, size)
    except _UNPACKING:
        return False
    return True
