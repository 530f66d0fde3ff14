"""A worker process: a host behind an Arrow Flight server, on the lease of the process that asks.

It begins with a pickled :class:`Setup` on its standard input, answers with a line of JSON on its
standard output, and ends when its input ends, or when nobody has asked it anything for as long as
the lease: its consumers may have successors by then. A process that was stopped and goes on finds
the lease ended before it does anything for anybody.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import secrets
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pyarrow import flight

from keyshard.arrow.content import CONTENT
from keyshard.broker.connect import connect
from keyshard.broker.hosted.host import Host
from keyshard.broker.hosted.wire import told
from keyshard.config.connection import Connection
from keyshard.errors import BrokerError, KeyShardError

LOG_LINES_MAX = 1_000
"""Log records that wait to be told, at most; the oldest go first."""


@dataclass(frozen=True)
class Setup:
    """What a worker process has to know."""

    connection: Connection
    lease_s: float
    """Time without a question after which it ends, seconds."""
    level: int
    """Log level from which records are told."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    token: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    """Who asks without it is refused."""


class Lease:
    """Ends when nobody has asked for a while; then it never begins again.

    Args:
        length_s: How long, seconds.
        clock: Monotonic time, seconds.
    """

    def __init__(self, length_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._length_s = length_s
        self._clock = clock
        self._asked_s = clock()
        self._ended = False

    def asked(self) -> bool:
        """Somebody asks; whether the lease still holds, and then it begins anew."""
        if self.left_s() <= 0:
            return False
        self._asked_s = self._clock()
        return True

    def left_s(self) -> float:
        """Time until its end, seconds; 0 from then on."""
        left_s = self._asked_s + self._length_s - self._clock()
        self._ended = self._ended or left_s <= 0
        return 0.0 if self._ended else left_s


class WorkerServer(flight.FlightServerBase):  # type: ignore[misc]
    """Answers questions to a host that have the token, while the lease holds.

    Args:
        host: What is asked.
        setup: Token, address and lease.
    """

    def __init__(self, host: Host, setup: Setup) -> None:
        super().__init__(f"grpc://{setup.host}:0")
        self._host = host
        self._token = setup.token
        self.lease = Lease(setup.lease_s)
        self._refused = False
        self._commands: dict[str, Callable[..., Any]] = {
            "subscribe": host.subscribe,
            "acknowledge": host.acknowledge,
            "last_entry": host.last_entry,
            "close_consumer": host.close_consumer,
        }
        self.log: deque[tuple[str, int, str]] = deque(maxlen=LOG_LINES_MAX)

    def do_get(self, _context: Any, ticket: flight.Ticket) -> flight.FlightDataStream:
        asked = self._asked(ticket.ticket)
        taken = {int(number): count for number, count in asked["taken"].items()}
        try:
            answer, content = self._host.take(asked["seq"], taken, asked["wait_s"])
        except KeyShardError as exc:
            raise flight.FlightServerError(str(exc)) from exc
        lines = [self.log.popleft() for _ in range(len(self.log))]
        header = json.dumps(answer | {"log": lines}).encode()
        return flight.GeneratorStream(CONTENT, iter([(content, header)]))

    def do_action(self, _context: Any, action: flight.Action) -> list[bytes]:
        asked = self._asked(action.body.to_pybytes())
        answer: dict[str, Any] = {}
        try:
            answer["result"] = self._commands[action.type](**asked["arguments"])
        except KeyShardError as exc:
            answer["error"] = told(exc)
        return [json.dumps(answer).encode()]

    def _asked(self, body: bytes) -> dict[str, Any]:
        """What is asked by somebody who may."""
        try:
            asked: dict[str, Any] = json.loads(body)
            token = str(asked["token"])
        except (ValueError, KeyError, TypeError, RecursionError):
            asked, token = {}, ""
        if not secrets.compare_digest(token.encode(errors="replace"), self._token.encode()):
            if not self._refused:
                self._refused = True
                logging.getLogger(__name__).warning("a question with another token was refused")
            raise flight.FlightUnauthenticatedError("The token is of another run.")
        if not self.lease.asked():
            raise flight.FlightUnavailableError("The lease of this worker has ended.")
        return asked


class _Told(logging.Handler):
    """Keeps log records until somebody asks."""

    def __init__(self, lines: deque[tuple[str, int, str]], level: int) -> None:
        super().__init__(level)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append((record.name, record.levelno, self.format(record)))


def main() -> None:
    """Host consumers until the input or the lease ends."""
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)  # The process that asks decides what becomes of it.
    setup: Setup = pickle.load(sys.stdin.buffer)
    try:
        host = Host(connect(setup.connection))
    except KeyShardError as exc:
        print(json.dumps({"error": told(exc)}), flush=True)
        return
    server = WorkerServer(host, setup)
    logging.basicConfig(level=setup.level, handlers=[_Told(server.log, setup.level)])
    threading.Thread(target=server.serve, name="keyshard-worker", daemon=True).start()
    print(json.dumps({"port": server.port}), flush=True)
    ended = threading.Event()
    threading.Thread(
        target=_wait_for_end, args=(ended,), name="keyshard-input", daemon=True
    ).start()
    while not ended.is_set() and server.lease.left_s() > 0:
        ended.wait(min(1.0, max(0.01, server.lease.left_s())))
    if server.lease.left_s() > 0:
        try:
            host.close()
        except BrokerError as exc:
            logging.getLogger(__name__).debug("the connection ended: %s", exc)
    # Nothing more may leave this process: who has its ranges now would meet it.
    os._exit(0)


def _wait_for_end(ended: threading.Event) -> None:
    while sys.stdin.buffer.read(1):
        pass
    ended.set()
