"""The handle of a worker in the process that started it: start, request, end."""

from __future__ import annotations

import json
import logging
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pyarrow as pa
from pyarrow import flight

from keyshard.base_error import first_line
from keyshard.config.connection import Connection
from keyshard.core.process_end import ending, no_start, remedy
from keyshard.errors import UnexpectedError, WorkerUnreachableError
from keyshard.redaction import shown
from keyshard.workers.authentication import INTRODUCE, RequestSigner
from keyshard.workers.encoding import (
    DeliveredTotals,
    RemoteContent,
    WorkerDelivery,
    decode_deliveries,
    decode_error,
)
from keyshard.workers.flight_client import flight_client
from keyshard.workers.server import LOOPBACK, WorkerSetup

LEASE_S = 4.0
"""Longest time between two requests to a worker, and longest wait for its answer, seconds."""
TAKE_WAIT_S = 1.0
"""Longest wait of a worker for something to deliver, seconds."""
START_TIMEOUT_S = 60.0
"""Longest wait until a worker process has started, seconds."""

ENDED_S = 0.2
"""Longest wait for the exit status of a process that no longer answers, seconds."""
START_LOOK_S = 0.1
"""Time between two checks whether the start was cancelled, seconds."""
REACH_S = 10.0
"""Longest wait for the first contact with a worker that has started, seconds."""
LEAVE_REQUEST_S = 1.0
"""Longest time of the request that tells a worker to end, seconds."""

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from keyshard.workers.server import main; main()"
)
_log = logging.getLogger(__name__)


class AuthenticatedClient:
    """Sends requests to a server that has first proved that it knows the token.

    Args:
        endpoint: Address of the server: ``grpc://host:port``.
        token: Shared secret. Both sides prove that they know it; neither sends it.
        name: Name of the server in messages.
    """

    def __init__(self, endpoint: str, token: str, name: str) -> None:
        self._client = flight_client(endpoint)
        self._endpoint = endpoint
        self._prover = RequestSigner(token, endpoint)
        self._authenticated = False
        self._authenticating = threading.Lock()
        self.name = name

    def close(self) -> None:
        """Close the client: send no more requests."""
        self._client.close()

    def request(self, command: str, timeout_s: float, **arguments: Any) -> Any:
        """Send a request, and return its result.

        Args:
            command: Name of the command at the server.
            timeout_s: Longest wait for the answer, seconds.
            **arguments: Plain JSON values.

        Raises:
            WorkerUnreachableError: No answer; whether the command ran is unknown.
            KeyShardError: The error that the server raised.
        """
        self._authenticate(timeout_s)
        number, body = self._prover.request(command, {"arguments": arguments})
        answer = self._read(self._send(command, body, timeout_s), number)
        if "error" in answer:
            raise decode_error(answer["error"])
        return answer["result"]

    def _send(self, command: str, body: bytes, timeout_s: float) -> bytes:
        try:
            (result,) = self._client.do_action(
                flight.Action(command, body), flight.FlightCallOptions(timeout=timeout_s)
            )
        except (pa.ArrowException, OSError, ValueError) as exc:
            raise WorkerUnreachableError(
                f"The {self.name} did not answer: {first_line(exc)}.",
                "Check that it is running, and that the network allows connections to it.",
            ) from exc
        answer: bytes = result.body.to_pybytes()
        return answer

    def _authenticate(self, timeout_s: float) -> None:
        """Let the server prove that it knows the token, before any other request."""
        with self._authenticating:
            if not self._authenticated:
                introduction = self._prover.introduction()
                self._authenticated = self._prover.meet(
                    self._send(INTRODUCE, introduction, timeout_s)
                )
            if not self._authenticated:
                raise self._unauthenticated()

    def _read(self, text: bytes, number: int) -> dict[str, Any]:
        """Decode an answer, after a check that its server knows the token."""
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict) or not self._prover.is_answer(number, answer.get("proof")):
            raise self._unauthenticated()
        return answer

    def _unauthenticated(self) -> WorkerUnreachableError:
        return WorkerUnreachableError(
            f"The program at {self._endpoint} does not know the token of the {self.name}, and got "
            "no request. It is another program, or belongs to another run or release of keyshard.",
            "Install the same release everywhere, and start the source again.",
        )


class Worker(AuthenticatedClient):
    """Client of one worker. Subclasses start the worker, and can end it.

    Args:
        hello: First output of the worker: a line of JSON.
        token: Secret of this run.
        kind: Kind of worker in messages: ``worker process``.

    Raises:
        KeyShardError: The worker reported that it cannot start.
        WorkerUnreachableError: It cannot be reached at the address that it reported.
    """

    keeps_content = False
    """Whether it keeps the content of messages, with their keys, until that is released."""

    def __init__(self, hello: str | bytes, token: str, kind: str) -> None:
        try:
            facts = json.loads(hello)
        except (ValueError, RecursionError):
            facts = None
        if not isinstance(facts, dict) or not facts.keys() & {"error", "endpoint"}:
            raise WorkerUnreachableError(
                f"A {kind} printed {shown(hello)} at its start, which is not the output of a "
                "worker.",
                "Check the code that its interpreter runs before keyshard.",
            )
        if "error" in facts:
            raise decode_error(facts["error"])
        self._seq = 0
        self.kind = kind
        self.lost = False
        self.released: deque[int] = deque()
        self.content_endpoint = (facts["endpoint"], facts.get("reading", ""))
        self.pid: int = facts["pid"]
        self.machine: str = facts["host"]
        super().__init__(facts["endpoint"], token, f"{kind} {self.pid} on {self.machine}")
        try:
            self.request("ready", REACH_S)
        except WorkerUnreachableError as exc:
            self._client.close()
            raise WorkerUnreachableError(
                f"The {self.name} cannot be reached at {facts['endpoint']} within {REACH_S:.0f} "
                f"s: {first_line(exc.__cause__ or exc)}. The process of the source connects to "
                "every worker, on a port that the system chooses.",
                "Allow these connections in the firewall, or run the source in the network of "
                "the workers.",
            ) from exc

    def kill(self) -> None:
        """Close the client, so that pending requests fail.

        The worker then gets no requests, and ends with its lease. Subclasses may end it at once.
        """
        self._client.close()

    def leave(self) -> None:
        """Tell it to give its ranges back and to end; return soon. Idempotent."""
        with suppress(WorkerUnreachableError):  # It is gone, or ends with its lease.
            self.request("leave", LEAVE_REQUEST_S)

    def exit_status(self) -> int | None:
        """Return the exit status of its process, or the negative number of a signal.

        ``None``: it runs, or its status is not known here.
        """
        return None

    def end(self, timeout_s: float) -> None:
        """Let it give its ranges back, then end it. End it at the timeout anyway. Idempotent.

        Args:
            timeout_s: Longest wait for its orderly end, seconds; 0 ends it at once.
        """
        if timeout_s:
            self.leave()
            with suppress(WorkerUnreachableError):  # If it is gone, its ranges are free.
                self.request("given_back", timeout_s)
        self.kill()

    def take(self, taken: Mapping[int, DeliveredTotals]) -> list[WorkerDelivery]:
        """Return the deliveries and connection changes of its consumers, in order.

        Args:
            taken: Per consumer, the messages and bytes taken since it began.

        Raises:
            WorkerUnreachableError: It does not answer in time.
        """
        released = [self.released.popleft() for _ in range(len(self.released))]
        arguments = {
            "seq": self._seq + 1, "taken": taken, "wait_s": TAKE_WAIT_S, "released": released,
        }  # fmt: skip
        number, request = self._prover.request("take", arguments)
        try:
            (chunk,) = self._client.do_get(
                flight.Ticket(request), flight.FlightCallOptions(timeout=LEASE_S)
            )
        except (pa.ArrowException, OSError, ValueError) as exc:
            if f"[{UnexpectedError.code}]" in str(exc):
                raise UnexpectedError(f"The {self.name} failed: {first_line(exc)}.") from exc
            raise WorkerUnreachableError(
                f"The {self.name} does not answer: {first_line(exc)}.", "Check that it is running."
            ) from exc
        metadata = chunk.app_metadata
        header = self._read(b"" if metadata is None else metadata.to_pybytes(), number)
        self._seq += 1
        for name, level, line in header["log"]:
            logging.getLogger(name).log(level, "%s (%s)", line, self.name)
        remote = RemoteContent(self, self._seq) if header["kept"] else None
        return decode_deliveries(header["deliveries"], chunk.data, remote)


def setup_of(connection: Connection, *, keeps: bool = False) -> WorkerSetup:
    """Create the setup of another worker of this process."""
    return WorkerSetup(
        connection, LEASE_S, logging.getLogger("keyshard").getEffectiveLevel(), keeps
    )


def start_process(
    packed: tuple[str, str], stop: threading.Event | None = None, address: str = LOOPBACK
) -> tuple[subprocess.Popen[bytes], bytes]:
    """Start a worker process.

    Args:
        packed: The result of :meth:`WorkerSetup.packed`.
        stop: Ends the wait when it is set.
        address: Address at which it listens.

    Returns:
        The process, and its first output.

    Raises:
        WorkerUnreachableError: It does not start.
    """
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C in a terminal must reach only the parent, which decides how its workers end.
            start_new_session=True,
        )
    except OSError as exc:
        raise WorkerUnreachableError(*no_start("worker", exc)) from exc
    to, out = process.stdin, process.stdout
    assert to is not None
    assert out is not None
    hello = b""
    broken: OSError | None = None
    try:
        to.write(json.dumps([*packed, address]).encode() + b"\n")
        to.flush()
        end_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < end_s and not (stop and stop.is_set()):
            if select.select([out], [], [], START_LOOK_S)[0]:
                hello = out.readline()
                break
    except OSError as exc:
        broken = exc
    if not hello.endswith(b"\n"):
        status = _exit_status(process)
        end_process(process)
        if status is None:
            raise WorkerUnreachableError(
                f"A worker process was not ready within {START_TIMEOUT_S:.0f} s.",
                "Look for the step that delays its start.",
            ) from broken
        raise WorkerUnreachableError(
            f"A worker process did not start: it {ending(status)}. The output above this error is "
            "its log.",
            remedy(status),
        ) from broken
    return process, hello


def _exit_status(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit status of a process that no longer answers; ``None`` if it runs."""
    try:
        return process.wait(ENDED_S)
    except subprocess.TimeoutExpired:
        return None


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Kill a worker process, unless it has ended."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):  # Unread input is discarded.
            if pipe is not None:
                pipe.close()


class WorkerProcess(Worker):
    """A worker process on this machine, reached over loopback.

    Args:
        connection: How it reaches the cluster.
        stop: Ends the wait for its start when it is set.

    Raises:
        KeyShardError: The broker refuses it.
        WorkerUnreachableError: It does not start.
    """

    def __init__(self, connection: Connection, stop: threading.Event) -> None:
        setup = setup_of(connection)
        self._process, hello = start_process(setup.packed(), stop)
        try:
            super().__init__(hello, setup.token, "worker process")
        except BaseException:
            self.end(0.0)
            raise

    def kill(self) -> None:
        self._process.kill()

    def exit_status(self) -> int | None:
        return _exit_status(self._process)

    def leave(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def end(self, timeout_s: float) -> None:
        if timeout_s:
            self.leave()
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired as exc:
                _log.debug("worker process %d did not end cleanly: %s", self._process.pid, exc)
        end_process(self._process)
