"""An HTTP proxy before the admin interface. It answers wrongly, slowly or not at all."""

from __future__ import annotations

import random
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

import httpx

from tests.chaos.proxy import LOOPBACK

STATUS_500, FOREIGN_404 = "status 500", "another 404"
INSTEAD = {
    STATUS_500: (500, b'{"reason": "drawn"}'), "status 503": (503, b'{"reason": "drawn"}'),
    FOREIGN_404: (404, b"<html><body>404 Not Found</body></html>"), "no JSON": (200, b"<html>"),
    "no object": (200, b"[7]"), "empty": (200, b""),
}  # fmt: skip
"""The body of an invented answer."""
WRONG = (*INSTEAD, "cut", "late")
"""The faults of an answer."""
HANGS, DRIPS = "hangs", "drips"
"""The fault that lets a client wait; a separate one, because it takes so long."""
_LATE_S = 1.5
_HANG_S = 60.0
_DRIP_S = 0.5
_PASSED_ON = ("Content-Type", "Accept")


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error: the client has given up."""


class AdminProxy:
    """A context manager.

    Args:
        target: URL of the admin interface.
    """

    def __init__(self, target: str) -> None:
        self._changed = threading.Condition()
        self._chance = random.Random()
        self._rate, self._kinds = 0.0, WRONG
        self.spoilt = 0
        """Answers that were not passed on as they came."""
        self._spoils = 0
        self._client = httpx.Client(base_url=target, timeout=20, trust_env=False)
        self._server = _Server((LOOPBACK, 0), self._handler())
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        """Its URL."""
        return f"http://{LOOPBACK}:{self._server.server_address[1]}"

    def __enter__(self) -> AdminProxy:
        threading.Thread(target=self._server.serve_forever, name="admin-proxy", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.spoil(0, 0.0)
        self._server.shutdown()
        self._server.server_close()
        self._client.close()

    def spoil(self, seed: object, rate: float, kinds: tuple[str, ...] = WRONG) -> None:
        """Spoil a part of all further answers; send the answers that hang or are late now."""
        with self._changed:
            self._chance, self._rate, self._kinds = random.Random(str(seed)), rate, kinds
            self._spoils += 1
            self._changed.notify_all()

    def _drawn(self) -> str | None:
        with self._changed:
            if self._chance.random() >= self._rate:
                return None
            self.spoilt += 1
            return self._chance.choice(self._kinds)

    def _wait(self, seconds: float) -> None:
        with self._changed:
            before = self._spoils
            self._changed.wait_for(lambda: self._spoils != before, seconds)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                headers = {name: self.headers[name] for name in _PASSED_ON if name in self.headers}
                wrong = proxy._drawn()
                if wrong == HANGS:
                    proxy._wait(_HANG_S)
                if wrong in INSTEAD:
                    self._send(wrong, *INSTEAD[wrong])
                    return
                try:
                    found = proxy._client.request(
                        self.command, self.path, content=sent, headers=headers
                    )
                except httpx.HTTPError:
                    self.close_connection = True
                    return
                self._send(wrong, found.status_code, found.content)

            do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815 - the server's names

            def _send(self, wrong: str | None, status: int, body: bytes) -> None:
                if wrong == "late":
                    proxy._wait(_LATE_S)
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if wrong == "cut":
                    self.wfile.write(body[: len(body) // 2])
                    self.close_connection = True
                elif wrong == DRIPS:
                    self._drip(body)
                else:
                    self.wfile.write(body)

            def _drip(self, body: bytes) -> None:
                end_s = time.monotonic() + _HANG_S
                for byte in body[:-1]:
                    if time.monotonic() > end_s:
                        break
                    self.wfile.write(bytes([byte]))
                    self.wfile.flush()
                    proxy._wait(_DRIP_S)
                self.close_connection = True

            def log_message(self, *_: Any) -> None:
                pass

        return Handler
