"""The worker process: a ``ConsumerHost`` behind an Arrow Flight server, under a lease.

The worker starts from the text of :meth:`WorkerSetup.packed`. It reports the address at which it
listens, or the reason why it cannot start. It ends when its source asks for it, or when it gets no
request for the length of the lease: by then other consumers may own its ranges. If the process was
suspended, it finds its lease ended before it serves any request.

As a separate process it reads the setup from a line of standard input, and writes the report to a
line of standard output. The end of standard input also tells it to end.
"""

from __future__ import annotations

import gc
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
from keyshard.config.connection import Connection
from keyshard.config.connection_names import fields_of, names_of
from keyshard.control import WORKER, ControlServer
from keyshard.errors import (
    BrokerError,
    ConfigError,
    ControlError,
    KeyShardError,
    ThreadStartError,
    WorkerEnvironmentError,
)
from keyshard.redaction import redacted
from keyshard.threads import FirstError, begin, logged_error, owned_by
from keyshard.version import VERSION
from keyshard.workers.authentication import (
    INTRODUCE,
    RequestVerifier,
    is_with_token,
    read_with_token,
)
from keyshard.workers.encoding import encode_error
from keyshard.workers.host import ConsumerHost
from keyshard.workers.status import WorkerStatus

STATUS_VERSION = 1
"""Version of the status. A field that is renamed, removed or changes its meaning raises it."""
LOG_LINES_MAX = 1_000
"""Maximum number of buffered log records; the oldest are dropped first."""
LOOPBACK = "127.0.0.1"
"""Address that only this machine can reach."""
LOOK_S = 1.0
"""Longest time between two looks at the lease, and at its first consumer, seconds."""
LEAVE_S = 8.0
"""Longest time in which a worker gives its ranges back, seconds."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerSetup:
    """Everything that a worker needs to start."""

    connection: Connection
    lease_s: float
    """Time without a request after which it ends, seconds."""
    level: int
    """Lowest log level of the records that it sends to its parent."""
    keeps: bool = False
    """Whether content stays in the worker until tasks fetch it."""
    token: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    """Requests without this token are refused."""
    source_pid: int = field(default_factory=os.getpid)
    """Process of the source."""
    source_host: str = field(default_factory=socket.gethostname)
    """Its machine."""

    def packed(self) -> tuple[str, str]:
        """Return the version, readable by every version, and the setup as JSON.

        The JSON is data: reading it runs no code of the sender. It contains secrets.
        """
        facts = {
            "connection": names_of(self.connection), "lease_s": self.lease_s, "level": self.level,
            "keeps": self.keeps, "token": self.token, "source_pid": self.source_pid,
            "source_host": self.source_host,
        }  # fmt: skip
        return VERSION, json.dumps(facts)

    @classmethod
    def unpacked(cls, text: str) -> WorkerSetup:
        """Parse the text of :meth:`packed`.

        Raises:
            ConfigError: The text is not a setup, or names a file that this machine does not have.
        """
        try:
            match json.loads(text):
                case {
                    "connection": dict(names),
                    "lease_s": int() | float() as lease_s,
                    "level": int(level),
                    "keeps": bool(keeps),
                    "token": str(token),
                    "source_pid": int(pid),
                    "source_host": str(machine),
                    **rest,
                } if not rest and token and all(type(name) is str for name in names.values()):
                    connection = Connection(**fields_of(names))
                    return cls(connection, lease_s, level, keeps, token, pid, machine)
        except (ValueError, RecursionError):
            pass
        raise ConfigError(
            "The setup of a worker is malformed.", "Check that it comes from a source of keyshard."
        )


class Lease:
    """A lease that ends after a time without requests, and then never begins again.

    Args:
        length_s: Length, seconds.
        clock: Monotonic time, seconds.
    """

    def __init__(self, length_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._length_s = length_s
        self._clock = clock
        self._renewed_s = clock()
        self._ended = False

    def renew(self) -> bool:
        """Renew the lease for a request. Return whether it still held."""
        if self.left_s() <= 0:
            return False
        self._renewed_s = self._clock()
        return True

    def left_s(self) -> float:
        """Time until its end, seconds; 0 after it has ended."""
        left_s = self._renewed_s + self._length_s - self._clock()
        self._ended = self._ended or left_s <= 0
        return 0.0 if self._ended else left_s


class WorkerServer(flight.FlightServerBase):  # type: ignore[misc]
    """Serves requests that have the token to a ``ConsumerHost``, while the lease holds.

    Args:
        host: Handles the requests.
        setup: Token and lease.
        address: Address at which it listens.
    """

    def __init__(self, host: ConsumerHost, setup: WorkerSetup, address: str = LOOPBACK) -> None:
        super().__init__(at(address, 0))
        self._verifier = RequestVerifier(setup.token, at(address, self.port))
        self._host = host
        self._setup = setup
        self.reading_token = secrets.token_hex(16)
        """Token that permits only reads of content."""
        self.lease = Lease(setup.lease_s)
        self._refused = False
        self._unlisted = False
        """Whether its control socket could not be opened."""
        self.leaving = threading.Event()
        """Set when the worker is asked to give its ranges back and to end."""
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
        self._began_s = time.monotonic()

    def do_get(self, _context: Any, ticket: flight.Ticket) -> flight.FlightDataStream:
        if is_with_token(ticket.ticket):
            return self._content(ticket.ticket)
        request, proof = self._read(ticket.ticket, "take")
        taken = {int(number): count for number, count in request["taken"].items()}
        try:
            answer, content = self._host.take(
                request["seq"], taken, request["wait_s"], request["released"]
            )
        except Exception as exc:
            error = logged_error("A request for deliveries of a worker", exc)
            raise flight.FlightServerError(error.summary) from exc
        lines = [self.log.popleft() for _ in range(len(self.log))]
        header = json.dumps(answer | {"log": lines, "proof": proof}).encode()
        return flight.GeneratorStream(content.schema, iter([(content, header)]))

    def do_action(self, _context: Any, action: flight.Action) -> list[bytes]:
        if action.type == INTRODUCE:
            return [self._verifier.introduce(action.body)]
        request, proof = self._read(action.body, action.type)
        answer: dict[str, Any] = {"proof": proof}
        try:
            answer["result"] = self._commands[action.type](**request["arguments"])
        except Exception as exc:  # noqa: BLE001 - the source raises it
            answer["error"] = encode_error(logged_error(f"A worker's {action.type}", exc))
        return [json.dumps(answer).encode()]

    def serve_to_the_end(self) -> bool:
        """Serve until the source asks it to end, or the lease ends. Then shut the server down.

        Returns:
            Whether it gave its ranges back. If not, this process must send nothing more: its
            ranges may already have a new owner.
        """
        level, ours = self._setup.level, logging.getLogger("keyshard")
        lines, before = _LogBuffer(self.log, level), ours.level
        logging.getLogger().addHandler(lines)
        ours.setLevel(level)
        control: ControlServer | None = None
        try:
            while not self.leaving.is_set() and self.lease.left_s() > 0:
                if control is None and self._host.subscription:
                    control = self._expose()
                self.leaving.wait(min(LOOK_S, max(0.01, self.lease.left_s())))
            if self.lease.left_s() <= 0:
                return False
            try:
                self._host.close()
            except BrokerError as exc:
                _log.debug("the connection ended: %s", exc.summary)
        finally:
            if control is not None:
                # Without a lease, nothing may hold up the end of this process.
                control.close(0.0 if self.lease.left_s() <= 0 else 1.0)
        self._given_back.set()
        logging.getLogger().removeHandler(lines)
        ours.setLevel(before)
        return True

    def _expose(self) -> ControlServer | None:
        """Open the control socket, by which ``keyshard status`` finds this worker."""
        subscription, url = self._host.subscription, self._setup.connection.service_url
        try:
            return ControlServer(
                subscription, url, "", {"status": lambda _request: self.status()}, kind=WORKER
            )
        except (ControlError, ThreadStartError) as exc:
            # Consumers run without a control socket too.
            if not self._unlisted:
                self._unlisted = True
                _log.warning("keyshard status cannot list a worker: %s", exc.summary)
            return None

    def status(self) -> WorkerStatus:
        """Return the status as plain JSON values; see ``docs/status.md``."""
        setup, found = self._setup, self._host.status()
        return {
            "version": STATUS_VERSION,
            "kind": WORKER,
            "name": found["subscription"],
            "state": "stopping" if self.leaving.is_set() else "running",
            "uptimeSeconds": round(time.monotonic() - self._began_s, 1),
            "serviceUrl": redacted(setup.connection.service_url),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "source": {"pid": setup.source_pid, "host": setup.source_host},
            **found,
        }

    def _content(self, body: bytes) -> flight.FlightDataStream:
        """Serve content to a task. Requests of tasks do not renew the lease."""
        with self._refusing():
            request = read_with_token(body, self.reading_token)
        if self.lease.left_s() <= 0:
            raise flight.FlightUnavailableError("The lease of this worker has ended.")
        try:
            content = self._host.content(request["runs"], request["columns"])
        except KeyShardError as exc:
            raise flight.FlightServerError(exc.summary) from exc
        return flight.GeneratorStream(content.schema, iter([content]))

    def _read(self, body: Any, command: str) -> tuple[dict[str, Any], str]:
        """Verify a request of the source, and return it with the proof for its answer."""
        with self._refusing():
            read = self._verifier.read(body, command)
        if not self.lease.renew():
            raise flight.FlightUnavailableError("The lease of this worker has ended.")
        return read

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Log the first request without a valid token."""
        try:
            yield
        except flight.FlightUnauthenticatedError:
            if not self._refused:
                self._refused = True
                _log.warning("refused a request with another token")
            raise


class _LogBuffer(logging.Handler):
    """Buffers log records until the parent fetches them."""

    def __init__(self, lines: deque[tuple[str, int, str]], level: int) -> None:
        super().__init__(level)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append((record.name, record.levelno, redacted(self.format(record))))


def start_server(
    version: str, packed: str, address: str = LOOPBACK
) -> tuple[WorkerServer | None, str]:
    """Start a ``ConsumerHost`` and its server. Return the server and its first line of output.

    Args:
        version: The keyshard version that packed the setup.
        packed: A packed :class:`WorkerSetup`.
        address: Address at which it listens.
    """
    try:
        if version != VERSION:
            raise WorkerEnvironmentError(
                f"keyshard is {version} in the process of the source, but {VERSION} in a worker "
                f"on {socket.gethostname()} ({sys.executable}).",
                "Install the same version on every machine, then start the source again.",
            )
        setup = WorkerSetup.unpacked(packed)
        failed = FirstError()
        with owned_by(failed):
            host = ConsumerHost(connect(setup.connection), keeps=setup.keeps, failed=failed)
        server = WorkerServer(host, setup, address)
    except KeyShardError as exc:
        return None, json.dumps({"error": encode_error(exc)})
    hello = {
        "endpoint": at(address, server.port), "pid": os.getpid(), "host": socket.gethostname(),
        "reading": server.reading_token,
    }  # fmt: skip
    return server, json.dumps(hello)


def at(address: str, port: int) -> str:
    """Format an address and a port as Flight's location."""
    return f"grpc://[{address}]:{port}" if ":" in address else f"grpc://{address}:{port}"


def main() -> None:
    """Run a worker until its standard input or its lease ends."""
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)  # The parent decides how its workers end.
    server, hello = start_server(*json.loads(sys.stdin.buffer.readline()))
    print(hello, flush=True)
    if server is None:
        return
    begin("keyshard-input", _wait_for_end, server.leaving)
    collect_garbage_rarely()
    server.serve_to_the_end()
    os._exit(0)


def _wait_for_end(ended: threading.Event) -> None:
    while sys.stdin.buffer.read(1):
        pass
    ended.set()


# -- Settings for processes that keyshard owns -----------------------------------------------------

YOUNG = 50_000
"""Allocations that trigger a collection of the youngest generation. Python's default is 700 to
2,000."""
OLDER = 20
"""Collections of a generation that trigger one of the next older. Python's default is 10."""


def collect_garbage_rarely() -> None:
    """Make Python's garbage collector run rarely, and never over imported modules.

    A window holds several objects per entry. All are alive and none is in a cycle, so scanning them
    is wasted work: it took a fifth of the cost of a row.
    """
    gc.freeze()
    gc.set_threshold(YOUNG, OLDER, OLDER)
