"""Commands in frames, and a session's end at the broker."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

from keyshard.broker.wire.frames import NAMES, api, frame_of
from keyshard.core.protobuf import Value, fields_of, message
from keyshard.core.ring.hash_range import HashRange

STORAGE_FAILS, NOT_READY, NOT_FOUND, CONFLICT = 2, 6, 11, 19
"""Errors that a broker refuses with."""
NO_REQUEST = 2**64 - 1
"""Request id with which a broker refuses the connection itself."""


def framed(name: str, content: Any, stored: bytes = b"") -> bytes:
    """A frame of a command, with the stored bytes of an entry."""
    frame = frame_of(name, content)
    if not stored:
        return frame
    return struct.pack(">I", len(frame) - 4 + len(stored)) + frame[4:] + stored


def framed_fields(kind: int, fields: dict[int, Value], stored: bytes = b"") -> bytes:
    """A frame of a command by its numbers, independent of the generated classes."""
    command = message({1: kind, kind: message(fields)})
    return struct.pack(">II", 4 + len(command) + len(stored), len(command)) + command + stored


def command_fields(data: bytes) -> tuple[int, dict[int, Value]]:
    """The number and the fields of a command, independent of the generated classes."""
    command = fields_of(data)
    kind = command[1]
    assert isinstance(kind, int)
    content = command.get(kind, b"")
    assert isinstance(content, bytes)
    return kind, fields_of(content)


def range_of(asked: Any) -> HashRange | None:
    """The range that a consumer subscribes to; ``None`` for a Reader."""
    ranges = asked.key_shared.hash_ranges
    if asked.HasField("start_message_id") or not ranges:
        return None
    return HashRange(ranges[0].start, ranges[0].end)


class FrameSession:
    """The broker's end of one connection: bytes in, commands by name, frames out.

    The command ``name`` goes to the method ``_name``, if it exists. The answers here are those of a
    healthy broker.
    """

    def __init__(self) -> None:
        self.carried = b""
        """Bytes behind the newest command in its frame."""
        self._came = bytearray()

    def put(self, data: bytes) -> None:
        """Send bytes."""
        raise NotImplementedError

    def feed(self, piece: bytes) -> None:
        """Accept received bytes, and handle the commands that are now complete."""
        self._came += piece
        while len(self._came) >= 4:
            (size,) = struct.unpack_from(">I", self._came)
            if len(self._came) < 4 + size:
                break
            frame = bytes(self._came[4 : 4 + size])
            del self._came[: 4 + size]
            (length,) = struct.unpack_from(">I", frame)
            self.carried = frame[4 + length :]
            self.received(frame[4 : 4 + length])

    def received(self, data: bytes) -> None:
        """Parse a command and handle it."""
        command = api.BaseCommand.FromString(data)
        name = NAMES[command.type]
        self.handle(name, getattr(command, name))

    def handle(self, name: str, command: Any) -> None:
        getattr(self, f"_{name}", lambda _: None)(command)

    def send(self, name: str, content: Any, stored: bytes = b"") -> None:
        self.put(framed(name, content, stored))

    # -- answers ----------------------------------------------------------------------------------

    def succeed(self, asked: Any) -> None:
        self.send("success", api.Success(request_id=asked.request_id))

    def refuse(self, asked: Any, code: int, text: bytes = b"refused") -> None:
        request_id = getattr(asked, "request_id", NO_REQUEST)
        self.send("error", api.Error(request_id=request_id, error=code, message=text))

    def confirm(self, asked: Any, **refused: Any) -> None:
        """Confirm acknowledgements, or refuse them with ``error`` and ``message``."""
        self.send("ack_response", api.AckResponse(
            consumer_id=asked.consumer_id, request_id=asked.request_id, **refused
        ))  # fmt: skip

    def lead_to(self, asked: Any, url: str, *, redirect: bool = False) -> None:
        """Name the owner of a topic, or a broker that knows the owner."""
        self.send("lookup_response", api.LookupResponse(
            request_id=asked.request_id, response=0 if redirect else 1, authoritative=True,
            broker_url=url.encode(),
        ))  # fmt: skip

    def count_partitions(self, asked: Any, count: int) -> None:
        self.send("partitioned_metadata_response", api.PartitionedMetadataResponse(
            request_id=asked.request_id, partitions=count
        ))  # fmt: skip

    def name_last(self, asked: Any, ledger: int, entry: int) -> None:
        """Name the last entry of a topic; -1 as ``entry`` says that it is empty."""
        self.send("get_last_message_id_response", api.GetLastMessageIdResponse(
            request_id=asked.request_id,
            last_message_id=api.MessageId(ledger=ledger % 2**64, entry=entry % 2**64),
        ))  # fmt: skip

    def open_producer(self, asked: Any, name: bytes, last: int) -> None:
        """Say that a producer is open, and the last sequence id that is stored under its name."""
        self.send("producer_success", api.ProducerSuccess(
            request_id=asked.request_id, producer_name=name, last_sequence_id=last
        ))  # fmt: skip

    def receipt(self, producer_id: int, sequence_id: int, ledger: int, entry: int) -> None:
        """Confirm an entry of a producer."""
        self.send("send_receipt", api.SendReceipt(
            producer_id=producer_id, sequence_id=sequence_id,
            message_id=api.MessageId(ledger=ledger, entry=entry),
        ))  # fmt: skip

    # -- without a request ------------------------------------------------------------------------

    def deliver(
        self, consumer_id: int, ledger: int, entry: int, stored: bytes, ack_set: Iterable[int] = ()
    ) -> None:
        """Send an entry to a consumer or Reader."""
        where = api.MessageId(ledger=ledger, entry=entry)
        content = api.Message(consumer_id=consumer_id, message_id=where, ack_set=ack_set)
        self.send("message", content, stored)

    def end_consumer(self, consumer_id: int) -> None:
        """Tell a consumer or Reader that it has ended."""
        self.send("close_consumer", api.CloseConsumer(consumer_id=consumer_id, request_id=0))

    # -- commands that need no state --------------------------------------------------------------

    def _connect(self, _: Any) -> None:
        # By numbers, with a newer version of the protocol.
        self.put(framed_fields(3, {1: b"test", 2: 21, 3: 5 << 20}))

    def _ping(self, _: Any) -> None:
        self.send("pong", api.Nothing())
