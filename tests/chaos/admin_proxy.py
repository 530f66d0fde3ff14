"""An HTTP proxy before the admin interface, which answers wrongly, slowly or not at all."""

from __future__ import annotations

import random
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

import httpx

from tests.chaos.proxy import LOOPBACK

WRONG = ("status 500", "status 503", "another 404", "no JSON", "no object", "empty", "cut", "late")
"""What may become of an answer."""
HANGS, DRIPS = "hangs", "drips"
"""What keeps who asked waiting; not among the others, because it takes so long."""
_LATE_S = 1.5
_HANG_S = 60.0
_DRIP_S = 0.5
_PAGE = b"<html><body>404 Not Found</body></html>"


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who asked has given up."""


class AdminProxy:
    """A context manager.

    Args:
        target: URL of the admin interface.
    """

    def __init__(self, target: str) -> None:
        self._lock = threading.Lock()
        self._chance = random.Random()
        self._rate, self._kinds = 0.0, WRONG
        self.spoilt = 0
        """Answers that were not passed on as they came."""
        self._closed = threading.Event()
        self._client = httpx.Client(base_url=target, timeout=20, trust_env=False)
        self._server = _Server((LOOPBACK, 0), self._handler())
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        """Where it listens."""
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
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()
        self._client.close()

    def spoil(self, seed: object, rate: float, kinds: tuple[str, ...] = WRONG) -> None:
        """From now on a part of all answers is spoilt."""
        with self._lock:
            self._chance, self._rate, self._kinds = random.Random(str(seed)), rate, kinds

    def _drawn(self) -> str | None:
        with self._lock:
            if self._chance.random() >= self._rate:
                return None
            self.spoilt += 1
            return self._chance.choice(self._kinds)

    def _answer(self, path: str) -> tuple[int, bytes]:
        found = self._client.get(path)
        return found.status_code, found.content

    def _wait(self, seconds: float) -> None:
        self._closed.wait(seconds)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                try:
                    status, body = proxy._answer(self.path)
                except httpx.HTTPError:
                    self.close_connection = True
                    return
                self._send(proxy._drawn(), status, body)

            def _send(self, wrong: str | None, status: int, body: bytes) -> None:
                if wrong == HANGS:
                    proxy._wait(_HANG_S)
                if wrong == "late":
                    proxy._wait(_LATE_S)
                if wrong in ("status 500", "status 503"):
                    status, body = int(wrong[-3:]), b'{"reason": "drawn"}'
                if wrong == "another 404":
                    status, body = 404, _PAGE
                if wrong in ("no JSON", "no object", "empty"):
                    status, body = 200, {"no JSON": b"<html>", "no object": b"[7]"}.get(wrong, b"")
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
