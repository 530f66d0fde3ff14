"""Bytes of a connection -> frames; commands -> bytes.

A frame is its size, the size of its command, the command and, for an entry, what is stored.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from keyshard.broker.wire import bulk, pulsar_api_pb2
from keyshard.broker.wire.entries import HEAD_BYTES, KEPT_BYTES_MAX, CutFrame, RawEntry
from keyshard.core.position.entry import EntryId

api: Any = pulsar_api_pb2
"""The generated classes, which no type checker sees."""
_SIZE = struct.Struct(">I")
_SIZES = struct.Struct(">II")
_NUMBERS = {field.name: field.number for field in api.BaseCommand.DESCRIPTOR.fields}
NAMES = {number: name for name, number in _NUMBERS.items()}
"""Name of the field of a command, by its type."""


class ProtocolError(Exception):
    """What came is no frame of Pulsar's protocol."""


class Frame(NamedTuple):
    """One frame that brings no entry, its command read."""

    name: str
    """Of the command; empty for one that is not known here."""
    command: Any
    """The content of the command; ``None`` for one that is not known here."""


Came = tuple[int, RawEntry]
"""An entry, and the id of the consumer that it came for."""


def frame_of(name: str, content: Any) -> bytes:
    """The frame of a command without an entry."""
    command: bytes = api.BaseCommand(type=_NUMBERS[name], **{name: content}).SerializeToString()
    return _SIZES.pack(4 + len(command), len(command)) + command


class FrameReader:
    """Cuts what comes into frames; holds no more than one frame that is not whole yet.

    Of a frame that is larger than :data:`~keyshard.broker.wire.entries.KEPT_BYTES_MAX` only the
    beginning is kept.

    Args:
        bytes_max: Largest frame that is accepted.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._rest = bytearray()
        self._wanted = 4
        """Bytes that the first frame needs."""
        self._left_out = 0
        """Bytes still to come of a frame that was cut."""

    def feed(self, data: bytes) -> list[bytes]:
        """Take what came; the frames that are whole now, without their sizes.

        Raises:
            ProtocolError: A size cannot be one.
        """
        if self._left_out:
            passed = min(self._left_out, len(data))
            self._left_out -= passed
            data = data[passed:]
        source: bytes | bytearray = data
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
                frames.append(bytes(view[position + 4 : stop]))
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


def read_frames(frames: Sequence[bytes]) -> Iterator[Came | Frame]:
    """Read the commands of some frames.

    Raises:
        ProtocolError: One is none; what came before it is handed out.
    """
    for data, entry in zip(frames, bulk.came(frames), strict=True):
        yield _read_frame(data) if entry is None else entry


def _read_frame(data: bytes) -> Came | Frame:
    (size,) = _SIZE.unpack_from(data)
    if size > len(data) - 4:
        raise ProtocolError(f"a command of {size} bytes in a frame of {len(data)}")
    try:
        command = api.BaseCommand.FromString(data[4 : 4 + size])
    except DecodeError as exc:
        raise ProtocolError("a command that cannot be read") from exc
    name = NAMES.get(command.type, "")
    if name and not command.HasField(name) and name not in ("ping", "pong"):
        raise ProtocolError(f"a command {name!r} without content")
    content: Any = getattr(command, name) if name else None
    if name != "message":
        return Frame(name, content)
    where, ack_set = content.message_id, tuple(content.ack_set)
    entry_id = EntryId(where.ledger, where.entry)
    entry = RawEntry(entry_id, content.redelivery_count > 0, ack_set, data, 4 + size)
    return content.consumer_id, entry
