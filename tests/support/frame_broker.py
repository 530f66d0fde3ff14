"""Brokers that speak frames: one connection's end, and a server on loopback.

Subclasses decide what a command does. The scripted brokers of unit tests, ``tests.refusals``,
``tests.wire_simulation``, ``tests.memory`` and the simulated ones share this.
"""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress
from typing import Any

from keyshard.broker.wire.frames import NAMES, api, frame_of
from keyshard.core.protobuf import Value, message

STORAGE_FAILS, NOT_READY, NOT_FOUND, CONFLICT = 2, 6, 11, 19
"""Errors that a broker refuses with."""
READ_BYTES = 1 << 16


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
        self.send("error", api.Error(request_id=asked.request_id, error=code, message=text))

    def confirm(self, asked: Any) -> None:
        """Confirm acknowledgements."""
        self.send("ack_response", api.AckResponse(
            consumer_id=asked.consumer_id, request_id=asked.request_id
        ))  # fmt: skip

    def lead_to(self, asked: Any, url: str, *, redirect: bool = False) -> None:
        """Name the owner of a topic, or a broker that knows the owner."""
        self.send("lookup_response", api.LookupResponse(
            request_id=asked.request_id, response=0 if redirect else 1, authoritative=True,
            broker_url=url.encode(),
        ))  # fmt: skip

    def count_partitions(self, asked: Any, count: int) -> None:
        self.send("partitioned_metadata_response", api.PartitionedMetadataResponse(
            request_id=asked.request_id, partitions=count, response=0
        ))  # fmt: skip

    def name_last(self, asked: Any, ledger: int, entry: int) -> None:
        """Name the last entry of a topic; -1 as ``entry`` says that it is empty."""
        self.send("get_last_message_id_response", api.GetLastMessageIdResponse(
            request_id=asked.request_id,
            last_message_id=api.MessageId(ledger=ledger % 2**64, entry=entry % 2**64),
        ))  # fmt: skip

    # -- commands that need no state --------------------------------------------------------------

    def _connect(self, _: Any) -> None:
        # By numbers, with a newer version of the protocol.
        self.put(framed_fields(3, {1: b"test", 2: 21, 3: 5 << 20}))

    def _ping(self, _: Any) -> None:
        self.send("pong", api.Nothing())


class SocketSession(FrameSession):
    """A session over a socket; a thread reads it.

    Args:
        stream: The connection.
    """

    def __init__(self, stream: socket.socket) -> None:
        super().__init__()
        self.stream = stream
        self._sending = threading.Lock()

    def start(self) -> None:
        threading.Thread(target=self._serve, name="frame-session", daemon=True).start()

    def put(self, data: bytes) -> None:
        with suppress(OSError), self._sending:
            self.stream.sendall(data)

    def cut(self) -> None:
        """End the connection."""
        with suppress(OSError):
            self.stream.shutdown(socket.SHUT_RDWR)

    def read(self) -> bytes:
        """The next received bytes; none at the end."""
        return self.stream.recv(READ_BYTES)

    def ended(self) -> None:
        """The connection has ended; called by its thread."""
        self.stream.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while piece := self.read():
                self.feed(piece)
        self.ended()


class FrameServer:
    """Listens on loopback and starts a session for each connection.

    Args:
        host: IP address of loopback.
        port: Port; 0: any.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.sessions: list[Any] = []
        self._listening = socket.create_server((host, port), backlog=512)
        self.port: int = self._listening.getsockname()[1]
        self.host = f"{host}:{self.port}"
        self.url = f"pulsar://{self.host}"
        threading.Thread(target=self._listen, name="frame-server", daemon=True).start()

    def session(self, stream: socket.socket) -> SocketSession:
        """Make the session of a connection."""
        raise NotImplementedError

    def accept(self, stream: socket.socket) -> None:
        session = self.session(stream)
        self.sessions.append(session)  # before its client can know of it
        session.start()

    def cut_all(self) -> None:
        for session in list(self.sessions):
            session.cut()

    def stop_listening(self) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def close(self) -> None:
        self.stop_listening()
        self.cut_all()

    def _listen(self) -> None:
        with suppress(OSError):
            while True:
                stream, _ = self._listening.accept()
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.accept(stream)
