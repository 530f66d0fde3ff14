"""A worker, where it lives: a host behind an Arrow Flight server, on the lease of who asks.

It begins with what :meth:`Setup.packed` gave, says where it listens or why not, and ends when it is
told to, or when nobody has asked it anything for as long as the lease: its consumers may have
successors by then. One that was stopped and goes on finds the lease ended before it does anything
for anybody.

As a process of its own it has the first in a line on its standard input, says the second in a line
on its standard output, and is told to end by the end of its input, too.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pyarrow import flight

from keyshard.broker.connect import connect
from keyshard.broker.hosted.host import Host
from keyshard.broker.hosted.questions import INTRODUCE, Verifier, is_with_token, read_with_token
from keyshard.broker.hosted.wire import told
from keyshard.config.connection import Connection
from keyshard.config.connection_names import fields_of, names_of
from keyshard.errors import BrokerError, ConfigError, KeyShardError, WorkerEnvironmentError
from keyshard.own_process import collect_rarely
from keyshard.redaction import redacted
from keyshard.threads import begin
from keyshard.version import VERSION

LOG_LINES_MAX = 1_000
"""Log records that wait to be told, at most; the oldest go first."""
LOOPBACK = "127.0.0.1"
"""Address that this machine alone reaches."""
LEAVE_S = 8.0
"""Longest time in which a worker gives its ranges back, seconds."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Setup:
    """What a worker has to know."""

    connection: Connection
    lease_s: float
    """Time without a question after which it ends, seconds."""
    level: int
    """Log level from which records are told."""
    keeps: bool = False
    """Whether content stays in the worker, where tasks ask for it."""
    token: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    """Who asks without it is refused."""

    def packed(self) -> tuple[str, str]:
        """Version and JSON for the worker; the version can be read whatever else is different.

        It is data: reading it runs no code of the sender. Secrets are in it.
        """
        facts = {
            "connection": names_of(self.connection), "lease_s": self.lease_s, "level": self.level,
            "keeps": self.keeps, "token": self.token,
        }  # fmt: skip
        return VERSION, json.dumps(facts)

    @classmethod
    def unpacked(cls, text: str) -> Setup:
        """Read the text of :meth:`packed`.

        Raises:
            ConfigError: The text is no setup, or a file that it names is not on this machine.
        """
        try:
            match json.loads(text):
                case {
                    "connection": dict(names),
                    "lease_s": int() | float() as lease_s,
                    "level": int(level),
                    "keeps": bool(keeps),
                    "token": str(token),
                    **rest,
                } if not rest and token and all(type(name) is str for name in names.values()):
                    connection = Connection(**fields_of(names))
                    return cls(connection, lease_s, level, keeps, token)
        except (ValueError, RecursionError):
            pass
        raise ConfigError(
            "The setup of a worker is malformed. Check that a source of keyshard sent it."
        )


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
        setup: Token and lease.
        address: Where to listen.
    """

    def __init__(self, host: Host, setup: Setup, address: str = LOOPBACK) -> None:
        super().__init__(at(address, 0))
        self._verifier = Verifier(setup.token, at(address, self.port))
        self._host = host
        self._setup = setup
        self.reading_token = secrets.token_hex(16)
        """Of those who may ask for content, and for nothing else."""
        self.lease = Lease(setup.lease_s)
        self._refused = False
        self.leaving = threading.Event()
        """It was told to give its ranges back and to end."""
        self._given_back = threading.Event()
        self._commands: dict[str, Callable[..., Any]] = {
            "subscribe": host.subscribe,
            "acknowledge": host.acknowledge,
            "last_entry": host.last_entry,
            "close_consumer": host.close_consumer,
            "ready": lambda: None,
            "leave": self.leaving.set,
            "given_back": lambda: self._given_back.wait(LEAVE_S),
        }
        self.log: deque[tuple[str, int, str]] = deque(maxlen=LOG_LINES_MAX)

    def do_get(self, _context: Any, ticket: flight.Ticket) -> flight.FlightDataStream:
        if is_with_token(ticket.ticket):
            return self._content(ticket.ticket)
        asked, proof = self._read(ticket.ticket, "take")
        taken = {int(number): count for number, count in asked["taken"].items()}
        try:
            answer, content = self._host.take(
                asked["seq"], taken, asked["wait_s"], asked["released"]
            )
        except KeyShardError as exc:
            raise flight.FlightServerError(str(exc)) from exc
        lines = [self.log.popleft() for _ in range(len(self.log))]
        header = json.dumps(answer | {"log": lines, "proof": proof}).encode()
        return flight.GeneratorStream(content.schema, iter([(content, header)]))

    def do_action(self, _context: Any, action: flight.Action) -> list[bytes]:
        if action.type == INTRODUCE:
            return [self._verifier.introduce(action.body)]
        asked, proof = self._read(action.body, action.type)
        answer: dict[str, Any] = {"proof": proof}
        try:
            answer["result"] = self._commands[action.type](**asked["arguments"])
        except KeyShardError as exc:
            answer["error"] = told(exc)
        return [json.dumps(answer).encode()]

    def serve_to_the_end(self) -> bool:
        """Answer until it is told to leave, or the lease ends. The server is to be shut down then.

        Returns:
            Whether it gave its ranges back. If not, nothing more may leave this process: who has
            them now would meet it.
        """
        level, ours = self._setup.level, logging.getLogger("keyshard")
        lines, before = _Told(self.log, level), ours.level
        logging.getLogger().addHandler(lines)
        ours.setLevel(level)
        begin("keyshard-worker", self.serve)
        while not self.leaving.is_set() and self.lease.left_s() > 0:
            self.leaving.wait(min(1.0, max(0.01, self.lease.left_s())))
        if self.lease.left_s() <= 0:
            return False
        try:
            self._host.close()
        except BrokerError as exc:
            _log.debug("the connection ended: %s", exc)
        self._given_back.set()
        logging.getLogger().removeHandler(lines)
        ours.setLevel(before)
        return True

    def _content(self, body: bytes) -> flight.FlightDataStream:
        """For tasks; their questions keep no lease."""
        with self._refusing():
            asked = read_with_token(body, self.reading_token)
        if self.lease.left_s() <= 0:
            raise flight.FlightUnavailableError("The lease of this worker has ended.")
        try:
            content = self._host.content(asked["runs"], asked["columns"])
        except KeyShardError as exc:
            raise flight.FlightServerError(str(exc)) from exc
        return flight.GeneratorStream(content.schema, iter([content]))

    def _read(self, body: Any, command: str) -> tuple[dict[str, Any], str]:
        """A question of the source and the proof for its answer; none when the lease has ended."""
        with self._refusing():
            read = self._verifier.read(body, command)
        if not self.lease.asked():
            raise flight.FlightUnavailableError("The lease of this worker has ended.")
        return read

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Log once that somebody asks without the token."""
        try:
            yield
        except flight.FlightUnauthenticatedError:
            if not self._refused:
                self._refused = True
                _log.warning("a question with another token was refused")
            raise


class _Told(logging.Handler):
    """Keeps log records until somebody asks."""

    def __init__(self, lines: deque[tuple[str, int, str]], level: int) -> None:
        super().__init__(level)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append((record.name, record.levelno, redacted(self.format(record))))


def begun(version: str, packed: str, address: str = LOOPBACK) -> tuple[WorkerServer | None, str]:
    """A host and its server, and what who asked for them has to hear: a line of JSON.

    Args:
        version: Of keyshard, where it was packed.
        packed: A :class:`Setup`, packed.
        address: Where to listen.
    """
    try:
        if version != VERSION:
            raise WorkerEnvironmentError(
                f"keyshard is {version} in the process that runs the source, and "
                f"{VERSION} in a worker on {socket.gethostname()} ({sys.executable}). "
                "Install the same version on every machine, then start the source again."
            )
        setup = Setup.unpacked(packed)
        host = Host(connect(setup.connection), keeps=setup.keeps)
        server = WorkerServer(host, setup, address)
    except KeyShardError as exc:
        return None, json.dumps({"error": told(exc)})
    hello = {
        "endpoint": at(address, server.port), "pid": os.getpid(), "host": socket.gethostname(),
        "reading": server.reading_token,
    }  # fmt: skip
    return server, json.dumps(hello)


def at(address: str, port: int) -> str:
    """Where a server listens, as Flight writes it."""
    return f"grpc://[{address}]:{port}" if ":" in address else f"grpc://{address}:{port}"


def main() -> None:
    """Be a worker until the input or the lease ends."""
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)  # The process that asks decides what becomes of it.
    server, hello = begun(*json.loads(sys.stdin.buffer.readline()))
    print(hello, flush=True)
    if server is None:
        return
    begin("keyshard-input", _wait_for_end, server.leaving)
    collect_rarely()
    server.serve_to_the_end()
    os._exit(0)


def _wait_for_end(ended: threading.Event) -> None:
    while sys.stdin.buffer.read(1):
        pass
    ended.set()
