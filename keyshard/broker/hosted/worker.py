"""A worker, as the process that asks it has it: started, asked, and ended."""

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

from keyshard.broker.hosted.process import LOOPBACK, Setup
from keyshard.broker.hosted.questions import INTRODUCE, Prover
from keyshard.broker.hosted.wire import Delivery, Kept, Taken, heard, unpacked
from keyshard.config.connection import Connection
from keyshard.errors import UnexpectedError, WorkerUnreachableError
from keyshard.redaction import first_line, shown

LEASE_S = 4.0
"""Longest time without a question to a worker, seconds; and without an answer of it."""
TAKE_WAIT_S = 1.0
"""Longest wait of a worker for something to give, seconds."""
START_TIMEOUT_S = 60.0
"""Longest wait until a process has started, seconds."""

START_LOOK_S = 0.1
"""Time between two looks whether anybody still waits for it, seconds."""
REACH_S = 10.0
"""Longest time in which a worker that has begun is reached, seconds."""
LEAVE_ASK_S = 1.0
"""Longest time in which a worker hears that it is to end, seconds."""

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from keyshard.broker.hosted.process import main; main()"
)
_log = logging.getLogger(__name__)


class Asker:
    """Asks a server for something to be done, once that has shown that it knows the token.

    Args:
        endpoint: Where: ``grpc://host:port``.
        token: Both sides show that they know it; it is not sent.
        name: What people know the server by.
    """

    def __init__(self, endpoint: str, token: str, name: str) -> None:
        self._client = flight.connect(endpoint)
        self._endpoint = endpoint
        self._prover = Prover(token, endpoint)
        self._met = False
        self._meeting = threading.Lock()
        self.name = name

    def close(self) -> None:
        """Ask nothing more."""
        self._client.close()

    def ask(self, command: str, timeout_s: float, **arguments: Any) -> Any:
        """Let something be done.

        Args:
            command: Its name there.
            timeout_s: Longest wait for the answer, seconds.
            **arguments: Plain JSON values.

        Raises:
            WorkerUnreachableError: There is no answer: nobody knows whether it was done.
            KeyShardError: What was raised there.
        """
        self._meet(timeout_s)
        number, body = self._prover.question(command, {"arguments": arguments})
        answer = self._read(self._done(command, body, timeout_s), number)
        if "error" in answer:
            raise heard(answer["error"])
        return answer["result"]

    def _done(self, command: str, body: bytes, timeout_s: float) -> bytes:
        try:
            (result,) = self._client.do_action(
                flight.Action(command, body), flight.FlightCallOptions(timeout=timeout_s)
            )
        except (pa.ArrowException, OSError, ValueError) as exc:
            raise WorkerUnreachableError(
                f"The {self.name} did not answer: {first_line(exc)}."
            ) from exc
        answer: bytes = result.body.to_pybytes()
        return answer

    def _meet(self, timeout_s: float) -> None:
        """Let the server prove that it knows the token, before anything else is sent."""
        with self._meeting:
            if not self._met:
                introduction = self._prover.introduction()
                self._met = self._prover.meet(self._done(INTRODUCE, introduction, timeout_s))
            if not self._met:
                raise self._stranger()

    def _read(self, text: bytes, number: int) -> dict[str, Any]:
        """An answer, if it is from a server that knows the token."""
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict) or not self._prover.is_answer(number, answer.get("proof")):
            raise self._stranger()
        return answer

    def _stranger(self) -> WorkerUnreachableError:
        return WorkerUnreachableError(
            f"The program at {self._endpoint} does not know the token of the {self.name}. It is "
            "another program, or of another run or release of keyshard. No question was sent."
        )


class Worker(Asker):
    """Who asks one worker; a subclass starts it, wherever it lives, and can end it there.

    Args:
        hello: What it said when it began: a line of JSON.
        token: Secret of this run.
        kind: What people know it by: ``worker process``.

    Raises:
        KeyShardError: It said that it cannot begin.
        WorkerUnreachableError: It cannot be reached where it says.
    """

    def __init__(self, hello: str | bytes, token: str, kind: str) -> None:
        try:
            said = json.loads(hello)
        except (ValueError, RecursionError):
            said = None
        if not isinstance(said, dict) or not said.keys() & {"error", "endpoint"}:
            raise WorkerUnreachableError(
                f"A {kind} began with {shown(hello)}, which is not what a worker says. Look at "
                "what its interpreter does before it runs keyshard."
            )
        if "error" in said:
            raise heard(said["error"])
        self._seq = 0
        self.kind = kind
        self.lost = False
        self.released: deque[int] = deque()
        self.place = (said["endpoint"], said.get("reading", ""))
        self.pid: int = said["pid"]
        self.machine: str = said["host"]
        super().__init__(said["endpoint"], token, f"{kind} {self.pid} on {self.machine}")
        try:
            self.ask("ready", REACH_S)
        except WorkerUnreachableError as exc:
            self._client.close()
            raise WorkerUnreachableError(
                f"The {self.name} cannot be reached at {said['endpoint']} within {REACH_S:.0f} s: "
                f"{first_line(exc.__cause__ or exc)}. The process that runs the source connects to "
                "every worker that its option workers asks for, on a port of that machine which "
                "the system chooses. Open the way, or run the source on that side of it."
            ) from exc

    def kill(self) -> None:
        """End it at once; who waits for an answer is told.

        Nobody asks it any more, so it ends with its lease, if nothing else ends it.
        """
        self._client.close()

    def leave(self) -> None:
        """Tell it to give its ranges back and to end; returns soon. Idempotent."""
        with suppress(WorkerUnreachableError):  # then it is gone, or its lease ends
            self.ask("leave", LEAVE_ASK_S)

    def end(self, timeout_s: float) -> None:
        """Let it give its ranges back; then, or when time is up, it is gone. Idempotent.

        Args:
            timeout_s: Longest wait for its orderly end, seconds; 0 ends it at once.
        """
        if timeout_s:
            self.leave()
            with suppress(WorkerUnreachableError):  # it is gone, so they are given back
                self.ask("given_back", timeout_s)
        self.kill()

    def take(self, taken: Mapping[int, Taken]) -> list[Delivery]:
        """What its consumers received, and who has lost or regained a connection, in order.

        Args:
            taken: Messages and bytes taken of some consumers since their beginning.

        Raises:
            WorkerUnreachableError: It does not answer in time.
        """
        released = [self.released.popleft() for _ in range(len(self.released))]
        asked = {
            "seq": self._seq + 1, "taken": taken, "wait_s": TAKE_WAIT_S, "released": released,
        }  # fmt: skip
        number, question = self._prover.question("take", asked)
        try:
            (chunk,) = self._client.do_get(
                flight.Ticket(question), flight.FlightCallOptions(timeout=LEASE_S)
            )
        except (pa.ArrowException, OSError, ValueError) as exc:
            if f"[{UnexpectedError.code}]" in str(exc):
                raise UnexpectedError(f"The {self.name} failed: {first_line(exc)}.") from exc
            raise WorkerUnreachableError(
                f"The {self.name} gives no answer: {first_line(exc)}."
            ) from exc
        told = chunk.app_metadata
        header = self._read(b"" if told is None else told.to_pybytes(), number)
        self._seq += 1
        for name, level, line in header["log"]:
            logging.getLogger(name).log(level, "%s (%s)", line, self.name)
        kept = Kept(self, self._seq) if header["kept"] else None
        return unpacked(header["deliveries"], chunk.data, kept)


def setup_of(connection: Connection, *, keeps: bool = False) -> Setup:
    """What another worker of this process has to know."""
    return Setup(connection, LEASE_S, logging.getLogger("keyshard").getEffectiveLevel(), keeps)


def started(
    packed: tuple[str, str], stop: threading.Event | None = None, address: str = LOOPBACK
) -> tuple[subprocess.Popen[bytes], bytes]:
    """Start a worker process.

    Args:
        packed: What :meth:`Setup.packed` gave.
        stop: Ends the wait.
        address: Where it listens.

    Returns:
        The process, and what it said when it began.

    Raises:
        WorkerUnreachableError: It does not start.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", _START, json.dumps(sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # Ctrl-C in a terminal is for the process that asks; it decides what becomes of it.
        start_new_session=True,
    )
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
        status = process.poll()
        end_process(process)
        raise WorkerUnreachableError(
            f"A worker process did not start: it ended with status {status}, or was not ready "
            f"within {START_TIMEOUT_S:.0f} s. Its error stands in the output above this one; "
            "look for the memory limit, too."
        ) from broken
    return process, hello


def end_process(process: subprocess.Popen[bytes]) -> None:
    """End a worker process at once, if it has not ended by itself."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):  # what it did not read is thrown away
            if pipe is not None:
                pipe.close()


class WorkerProcess(Worker):
    """A process of this machine; it is asked over loopback.

    Args:
        connection: How it reaches the cluster.
        stop: Ends the wait for its start.

    Raises:
        KeyShardError: The broker refuses it.
        WorkerUnreachableError: It does not start.
    """

    def __init__(self, connection: Connection, stop: threading.Event) -> None:
        setup = setup_of(connection)
        self._process, hello = started(setup.packed(), stop)
        try:
            super().__init__(hello, setup.token, "worker process")
        except BaseException:
            self.end(0.0)
            raise

    def kill(self) -> None:
        self._process.kill()

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
                _log.debug("worker process %d did not end in order: %s", self._process.pid, exc)
        end_process(self._process)
