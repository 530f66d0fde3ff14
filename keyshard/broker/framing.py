"""Frames of Pulsar's protocol: the size, the size of the command, the command, and the rest."""

from __future__ import annotations

import struct

_SIZE = struct.Struct(">I")
_SIZES = struct.Struct(">II")
KEPT_BYTES_MAX = 128 * 1024 * 1024
"""Largest frame that is kept whole, bytes, whatever the broker allows."""
HEAD_BYTES = 64 * 1024
"""Bytes that are kept of a larger frame."""


class CutFrame(bytes):
    """The beginning of a frame that is larger than :data:`KEPT_BYTES_MAX`."""

    size = 0
    """Size of the whole frame, bytes."""


class ProtocolError(Exception):
    """The received bytes are not a frame of Pulsar's protocol."""


def framed(command: bytes, stored: bytes = b"") -> bytes:
    """Return the frame of a command, and of the stored bytes of an entry that follow it."""
    sizes = _SIZES.pack(4 + len(command) + len(stored), len(command))
    return b"".join((sizes, command, stored))


def command_of(frame: bytes) -> bytes:
    """Return the command of a frame without its size.

    Raises:
        ProtocolError: The command is larger than the frame.
    """
    (size,) = _SIZE.unpack_from(frame)
    if size > len(frame) - 4:
        raise ProtocolError(f"a command of {size} bytes in a frame of {len(frame)}")
    return frame[4 : 4 + size]


class FrameReader:
    """Splits received bytes into frames; buffers at most one incomplete frame.

    It keeps only the beginning of a frame larger than :data:`KEPT_BYTES_MAX`.

    Args:
        bytes_max: Largest accepted frame, bytes.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._rest = bytearray()
        self._wanted = 4
        """Bytes that the first frame needs."""
        self._left_out = 0
        """Remaining bytes of a truncated frame."""

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """Accept received bytes, and return the frames that are now complete, without their sizes.

        Raises:
            ProtocolError: A size is invalid.
        """
        missing = self._wanted - len(self._rest)
        if not self._rest or missing >= len(data):
            return self._feed(data)
        # Later bytes are not copied into the buffer of the incomplete frame.
        with memoryview(data) as view:
            return [*self._feed(view[:missing]), *self.feed(view[missing:])]

    def _feed(self, data: bytes | memoryview) -> list[bytes]:
        if self._left_out:
            passed = min(self._left_out, len(data))
            self._left_out -= passed
            data = data[passed:]
        source: bytes | bytearray | memoryview = data
        if self._rest:
            self._rest += data
            if len(self._rest) < self._wanted:
                return []
            source = self._rest
        frames: list[bytes] = []
        position, end = 0, len(source)
        with memoryview(source) as view:
            while end - position >= 4:
                (size,) = _SIZE.unpack_from(view, position)
                if not 4 <= size <= self.bytes_max:
                    raise ProtocolError(f"a frame of {size} bytes")
                kept = size if size <= KEPT_BYTES_MAX else HEAD_BYTES
                stop = position + 4 + kept
                if stop > end:
                    break
                # A slice of bytes is already a copy.
                part = data if source is data else view
                frames.append(bytes(part[position + 4 : stop]))
                position = stop
                if kept < size:
                    frames[-1] = _cut(frames[-1], size)
                    position = min(end, stop + size - kept)
                    self._left_out = stop + size - kept - position
        if source is data:
            self._rest += data[position:]
        else:
            del self._rest[:position]
        self._wanted = 4
        if len(self._rest) >= 4:
            (size,) = _SIZE.unpack_from(self._rest)
            self._wanted += size if size <= KEPT_BYTES_MAX else HEAD_BYTES
        return frames


def _cut(head: bytes, size: int) -> CutFrame:
    frame = CutFrame(head)
    frame.size = size
    return frame
