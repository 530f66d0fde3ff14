"""The first answer of an admin interface has a short deadline, later ones a long one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from keyshard import Connection
from keyshard.broker import schemas
from keyshard.errors import BrokerUnavailableError
from tests.support.deadlines import deadline

SLOW_S = deadline(0.6)
TRIES_S = deadline(5)
"""The first answer may be late on a busy machine, and is asked for again."""


class _Admin(BaseHTTPRequestHandler):
    """Answers ``clusters`` as the test says, and everything else after a while."""

    status = 200

    def do_GET(self) -> None:
        of_clusters = self.path.endswith("/clusters")
        if not of_clusters:
            threading.Event().wait(SLOW_S)
        body = b'{"version": 3, "type": "STRING", "data": "", "properties": {}}'
        with suppress(ConnectionError):  # the client may have given up
            self.send_response(self.status if of_clusters else 200)
            self.end_headers()
            self.wfile.write(
                b'["one"]' if of_clusters else body if "schema" in self.path else b"[]"
            )

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def connection() -> Iterator[Connection]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Admin) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield Connection("pulsar://127.0.0.1:1", f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("status", [200, 403, 404])
def test_a_slow_answer_is_waited_for(
    connection: Connection, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """An interface that reads a schema from a cold disk, or lists many topics, is not away."""
    monkeypatch.setattr(schemas, "ANSWER_S", SLOW_S / 2)
    monkeypatch.setattr(schemas, "FIRST_TRIES_S", TRIES_S)
    monkeypatch.setattr(_Admin, "status", status)
    found = schemas.schema_of(connection, "persistent://public/default/t", tries_s=TRIES_S)
    assert found is not None
    assert found.version == 3
    assert schemas.asked_first(connection, lambda admin: admin.topics("a", "b")) == set()


def test_an_interface_that_cannot_answer_now_is_named(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Admin, "status", 503)
    with pytest.raises(BrokerUnavailableError):
        schemas.schema_of(connection, "persistent://public/default/t", tries_s=0.1)
