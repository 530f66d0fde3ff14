"""A TCP proxy on loopback that cuts and stalls connections."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Protocol

LOOPBACK = "127.0.0.1"
_CONNECT_TIMEOUT_S = 5.0
_CHUNK = 64 * 1024
_LOOK_S = 0.01
"""How often a client is looked at while nothing passes, seconds."""


class Proxied(Protocol):
    """Connections that can be cut and stalled."""

    @property
    def connections(self) -> int: ...

    def cut(self) -> int: ...

    def stall(self) -> None: ...

    def resume(self) -> None: ...


class Proxies:
    """Several proxies that are cut and stalled together; a context manager."""

    def __init__(self, proxies: Sequence[TcpProxy]) -> None:
        self._proxies = proxies
        self._stack = ExitStack()

    def __enter__(self) -> Proxies:
        for proxy in self._proxies:
            self._stack.enter_context(proxy)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def connections(self) -> int:
        """Connections that are open now."""
        return sum(proxy.connections for proxy in self._proxies)

    def cut(self) -> int:
        """Close every connection at once; returns how many."""
        return sum(proxy.cut() for proxy in self._proxies)

    def stall(self) -> None:
        """Pass nothing on until :meth:`resume`."""
        for proxy in self._proxies:
            proxy.stall()

    def resume(self) -> None:
        """Forward withheld bytes, in order, and all later ones."""
        for proxy in self._proxies:
            proxy.resume()


class TcpProxy:
    """Passes bytes on between its own port and another one; a context manager.

    Args:
        port: Where it listens.
        target: Port on loopback that it connects to, for each connection anew; or a function that
            chooses it for each.
    """

    def __init__(self, port: int, target: int | Callable[[], int]) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._flows = threading.Event()
        self._flows.set()
        self._held = bytearray()
        """Bytes of clients since :meth:`stall`."""
        self._server = socket.create_server((LOOPBACK, port), backlog=64)
        self._closed = False
        self._left: int | None = None
        """Bytes of the target that still pass before the connections are cut."""

    def __enter__(self) -> TcpProxy:
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        with suppress(OSError):  # Wakes accept(), where the system knows that.
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.resume()
        self.cut()

    @property
    def connections(self) -> int:
        """Connections that are open now."""
        with self._lock:
            return len(self._pairs)

    def cut(self) -> int:
        """Close every connection at once; returns how many."""
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            self._end(pair)
        return len(pairs)

    def cut_behind(self, size: int) -> None:
        """Cut all connections after so many more bytes of the target, even inside a command."""
        with self._lock:
            self._left = size

    def stall(self) -> None:
        """Pass nothing on until :meth:`resume`; connections stay open, and new ones are taken."""
        with self._lock:
            self._held.clear()
        self._flows.clear()

    def holds(self, what: bytes) -> bool:
        """Whether a client has sent certain bytes since :meth:`stall`, whatever came before."""
        with self._lock:
            return what in self._held

    def resume(self) -> None:
        """Forward withheld bytes, in order, and all later ones."""
        self._flows.set()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            try:
                target = self._target() if callable(self._target) else self._target
                broker = socket.create_connection((LOOPBACK, target), _CONNECT_TIMEOUT_S)
            except OSError:
                client.close()
                continue
            broker.settimeout(None)
            pair = (client, broker)
            with self._lock:
                self._pairs.add(pair)
            for source, sink in (pair, pair[::-1]):
                threading.Thread(
                    target=self._pump, args=(pair, source, sink), name="proxy-pump", daemon=True
                ).start()

    def _pump(
        self, pair: tuple[socket.socket, socket.socket], source: socket.socket, sink: socket.socket
    ) -> None:
        # A socket that `_end` closed meanwhile is an OSError for recv, a ValueError for select.
        with suppress(OSError, ValueError):
            while data := source.recv(_CHUNK):
                if source is pair[0]:
                    data += self._hold(source, data)
                self._flows.wait()
                if source is pair[1] and (left := self._count(len(data))) is not None:
                    sink.sendall(data[:left])
                    self.cut()
                    break
                sink.sendall(data)
        # An end is held back like everything else.
        self._flows.wait()
        self._end(pair)

    def _hold(self, client: socket.socket, data: bytes) -> bytes:
        """Note what a client sent, and take what it sends while nothing passes."""
        more = b""
        while not self._flows.is_set():
            with self._lock:
                self._held += data
            if not select.select([client], [], [], _LOOK_S)[0]:
                data = b""
            elif data := client.recv(_CHUNK):
                more += data
            else:
                break
        return more

    def _count(self, size: int) -> int | None:
        """Return how many of these bytes pass before the cut; ``None`` if no cut is due."""
        with self._lock:
            if self._left is None:
                return None
            left, self._left = self._left, self._left - size
            if left > size:
                return None
            self._left = None
            return left

    def _end(self, pair: tuple[socket.socket, socket.socket]) -> None:
        with self._lock:
            if pair not in self._pairs:
                return
            self._pairs.remove(pair)
        for end in pair:
            with suppress(OSError):  # The other side may have gone first.
                end.shutdown(socket.SHUT_RDWR)
            end.close()
