"""Encodes and decodes the commands of frames. The bytes of an entry follow its command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from keyshard.broker.framing import ProtocolError, command_of, framed
from keyshard.broker.wire import native_decoder, pulsar_api_pb2
from keyshard.broker.wire.entries import RawEntry
from keyshard.core.position.entry import EntryId

api: Any = pulsar_api_pb2
"""The generated classes, untyped because type checkers do not see them."""
_NUMBERS = {field.name: field.number for field in api.BaseCommand.DESCRIPTOR.fields}
NAMES = {number: name for name, number in _NUMBERS.items()}
"""Field name of a command, by its type."""


class Frame(NamedTuple):
    """A parsed frame without an entry."""

    name: str
    """Name of the command; empty if it is unknown."""
    command: Any
    """Content of the command; ``None`` if it is unknown."""


Came = tuple[int, RawEntry]
"""The consumer id and the entry of a message frame."""


def frame_of(name: str, content: Any) -> bytes:
    """Encode a command without an entry as a frame."""
    return framed(api.BaseCommand(type=_NUMBERS[name], **{name: content}).SerializeToString())


def send_frame(producer_id: int, sequence_id: int, count: int, stored: bytes) -> bytes:
    """Encode the command that publishes an entry, with the entry, as a frame.

    Args:
        producer_id: Id of the producer at its connection.
        sequence_id: Sequence id of the first message.
        count: Number of messages.
        stored: The encoded entry.
    """
    content = api.Send(producer_id=producer_id, sequence_id=sequence_id)
    if count > 1:
        content.num_messages = count
        content.highest_sequence_id = sequence_id + count - 1
    command = api.BaseCommand(type=_NUMBERS["send"], send=content).SerializeToString()
    return framed(command, stored)


def read_frames(frames: Sequence[bytes]) -> Iterator[Came | Frame]:
    """Parse the commands of frames.

    Raises:
        ProtocolError: A frame is malformed. Earlier frames are yielded first.
    """
    for data, entry in zip(frames, native_decoder.parse_frames(frames), strict=True):
        yield _read_frame(data) if entry is None else entry


def _read_frame(data: bytes) -> Came | Frame:
    written = command_of(data)
    try:
        command = api.BaseCommand.FromString(written)
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
    entry = RawEntry(entry_id, data, 4 + len(written), content.redelivery_count > 0, ack_set)
    return content.consumer_id, entry
