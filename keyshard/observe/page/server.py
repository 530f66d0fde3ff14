"""Serves the page in a thread.

The number of connections is limited, requests have deadlines, and the end waits for no client.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from keyshard.errors import ConfigError, KeyShardError
from keyshard.observe.page.app import PageApp
from keyshard.observe.page.guard import Guard
from keyshard.observe.page.status_watcher import Sockets
from keyshard.threads import begin, owned_by

CONNECTIONS_MAX = 256
"""Maximum number of connections; further ones are closed at once."""
REQUEST_S = 10.0
"""Longest time that a connection may take for its next request, seconds; then it is closed."""
SWEEP_S = 1.0
"""Interval at which connections are checked, seconds."""
HEADER_BYTES_MAX = 16 * 1024
"""Longest head of a request, bytes."""
_STOP_S = 5.0

_log = logging.getLogger(__name__)


class PageServer:
    """Serves the page until :meth:`close`.

    Args:
        host: Address to bind.
        port: Port; 0 for a free one, which is then :attr:`port`.
        guard: Decides which requests are served.
        sockets: Returns the control sockets of the sources, sinks and workers that it shows.

    Raises:
        ConfigError: The address cannot be used.
    """

    def __init__(self, host: str, port: int, guard: Guard, sockets: Sockets) -> None:
        try:
            self._socket = _bound(host, port)
        except (OSError, OverflowError, UnicodeError) as exc:
            raise ConfigError(
                f"The page cannot be served on {host}, port {port}: {exc}.",
                "Set another port (ui_port, or keyshard ui --port) or address.",
            ) from exc
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        self._connections = _Connections()
        self._error: KeyShardError | None = None
        with owned_by(self._failed):
            self._app = PageApp(sockets, guard, self._connections.cut)
        protocol = type("_Protocol", (_Protocol,), {"open": self._connections})
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._app.asgi, http=protocol, ws="none", lifespan="off", loop="asyncio",
                interface="asgi3", log_config=None, access_log=False, server_header=False,
                proxy_headers=False, timeout_keep_alive=5, timeout_graceful_shutdown=1,
                h11_max_incomplete_event_size=HEADER_BYTES_MAX,
            )
        )  # fmt: skip
        self._thread = begin("keyshard-page", self._run, fail=self._failed)

    def wait(self, timeout_s: float) -> None:
        """Wait until the server has ended.

        Raises:
            KeyShardError: The error that ended it.
        """
        self._thread.join(timeout_s)
        if self._error is not None:
            raise self._error

    @property
    def serving(self) -> bool:
        """Whether it has not ended."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._server.should_exit = True
        self._thread.join(_STOP_S)
        self._app.close()
        self._socket.close()

    def _failed(self, error: KeyShardError) -> None:
        """Take the error of a thread: it ends the page, and not the source that the page shows."""
        self._error = self._error or error
        self._server.should_exit = True
        _log.warning("the page at %s has ended: %s", self.url, error.summary)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._app.begin()
        sweeping = asyncio.ensure_future(self._sweep())
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            sweeping.cancel()

    async def _sweep(self) -> None:
        """Close connections that do not send their request, and end streams at the end."""
        while not self._server.should_exit:
            await asyncio.sleep(SWEEP_S / 10)
            self._connections.sweep(time.monotonic())
        self._app.end()


class _Connections:
    """The open connections; used in the event loop only."""

    def __init__(self) -> None:
        self._open: dict[_Protocol, float] = {}
        """Time since which each waits for a request; ``inf`` while it answers one."""

    def opened(self, protocol: _Protocol) -> bool:
        """Take a connection; ``False`` if there are too many."""
        if len(self._open) >= CONNECTIONS_MAX:
            return False
        self._open[protocol] = time.monotonic()
        return True

    def closed(self, protocol: _Protocol) -> None:
        self._open.pop(protocol, None)

    def cut(self, client: object) -> None:
        """Close the connections of a client at once. Data that it has not read is lost."""
        for protocol in [one for one in self._open if one.client == client]:
            protocol.transport.abort()

    def sweep(self, now_s: float) -> None:
        for protocol, since_s in list(self._open.items()):
            if protocol.answers:
                self._open[protocol] = float("inf")
            elif since_s == float("inf"):
                self._open[protocol] = now_s
            elif now_s - since_s > REQUEST_S:
                protocol.transport.abort()


class _Protocol(H11Protocol):
    """One connection."""

    open: _Connections

    @property
    def answers(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if not self.open.opened(self):
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.open.closed(self)
        super().connection_lost(exc)


def _bound(host: str, port: int) -> socket.socket:
    family, *_, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(CONNECTIONS_MAX)
    except BaseException:
        made.close()
        raise
    return made
