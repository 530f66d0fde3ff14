"""Sessions over sockets, and the server that accepts their connections."""

from __future__ import annotations

import socket
import threading
from collections import deque
from contextlib import suppress
from typing import Any, ClassVar

from tests.support.frame_broker.session import FrameSession

READ_BYTES = 1 << 16


class SocketSession(FrameSession):
    """A session over a socket; a thread reads it.

    Args:
        broker: The server that accepted the connection.
        stream: The connection.
    """

    def __init__(self, broker: Any, stream: socket.socket) -> None:
        super().__init__()
        self.broker = broker
        self.stream = stream
        self._sending = threading.Lock()

    def start(self) -> None:
        threading.Thread(target=self._serve, name="frame-session", daemon=True).start()

    def put(self, data: bytes) -> None:
        with suppress(OSError), self._sending:
            self.stream.sendall(data)

    def cut(self) -> None:
        """End the connection."""
        # A socket that is closed instead stays open while a thread receives from it.
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

    def _lookup(self, asked: Any) -> None:
        self.lead_to(asked, self.broker.url)


class QueuedSession(SocketSession):
    """A session whose frames wait for a second thread: commands are read while a socket is full."""

    def __init__(self, broker: Any, stream: socket.socket) -> None:
        super().__init__(broker, stream)
        self.changed = threading.Condition()
        self.unsent: deque[bytes] = deque()
        self.over = False
        """Whether the connection has ended."""

    def start(self) -> None:
        super().start()
        threading.Thread(target=self._send_all, name="frame-sender", daemon=True).start()

    def put(self, data: bytes) -> None:
        with self.changed:
            self.unsent.append(data)
            self.changed.notify()

    def ended(self) -> None:
        with self.changed:
            self.over = True
            self.changed.notify()

    def due(self) -> bool:
        """Return whether there are frames to send; called with :attr:`changed` held."""
        return bool(self.unsent)

    def write(self, data: bytes) -> None:
        """Send a frame."""
        self.stream.sendall(data)

    def _send_all(self) -> None:
        with suppress(OSError):
            while True:
                with self.changed:
                    self.changed.wait_for(lambda: self.over or self.due())
                    if self.over:
                        break
                    frames = list(self.unsent)
                    self.unsent.clear()
                for frame in frames:
                    self.write(frame)
        self.stream.close()


class FrameServer:
    """Listens on loopback and starts a session for each connection.

    Args:
        host: IP address of loopback.
        port: Port; 0: any.
    """

    session: ClassVar[type[SocketSession]]
    """Made for each connection."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.sessions: list[Any] = []
        self._listening = socket.create_server((host, port), backlog=512)
        self.port: int = self._listening.getsockname()[1]
        self.host = f"{host}:{self.port}"
        self.url = f"pulsar://{self.host}"
        threading.Thread(target=self._listen, name="frame-server", daemon=True).start()

    def accept(self, stream: socket.socket) -> None:
        session = self.session(self, stream)
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
