"""A worker, as the process that asks it has it: started, asked, and ended."""

from __future__ import annotations

import json
import logging
import pickle
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pyarrow as pa
from pyarrow import flight

from keyshard.broker.hosted.process import Setup
from keyshard.broker.hosted.wire import Delivery, heard, unpacked
from keyshard.config.connection import Connection
from keyshard.errors import WorkerUnreachableError
from keyshard.redaction import first_line

LEASE_S = 4.0
"""Longest time without a question to a worker, seconds; and without an answer of it."""
TAKE_WAIT_S = 1.0
"""Longest wait of a worker for something to give, seconds."""
START_TIMEOUT_S = 60.0
"""Longest wait until a process has started, seconds."""

START_LOOK_S = 0.1
"""Time between two looks whether anybody still waits for it, seconds."""

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from keyshard.broker.hosted.process import main; main()"
)
_log = logging.getLogger(__name__)


class Worker:
    """Who asks one worker; wherever that lives, a subclass says how it ends.

    Args:
        endpoint: Where it is asked: ``grpc://host:port``.
        token: Secret of this run.
        name: What people know it by.
    """

    def __init__(self, endpoint: str, token: str, name: str) -> None:
        self._client = flight.connect(endpoint)
        self._token = token
        self.name = name
        self._seq = 0

    def kill(self) -> None:
        """End it at once; who waits for an answer is told."""
        raise NotImplementedError

    def leave(self) -> None:
        """Tell it to give its ranges back and to end; returns at once. Idempotent."""
        raise NotImplementedError

    def end(self, timeout_s: float) -> None:
        """Let it give its ranges back; then, or when time is up, it is gone. Idempotent.

        Args:
            timeout_s: Longest wait for its orderly end, seconds; 0 ends it at once.
        """
        raise NotImplementedError

    def ask(self, command: str, timeout_s: float, **arguments: Any) -> Any:
        """Let its host do something.

        Args:
            command: Name of a method of :class:`keyshard.broker.hosted.host.Host`.
            timeout_s: Longest wait for the answer, seconds.
            **arguments: Plain JSON values.

        Raises:
            WorkerUnreachableError: It does not answer: nobody knows whether it was done.
            KeyShardError: What the host raised.
        """
        body = json.dumps({"token": self._token, "arguments": arguments}).encode()
        try:
            (result,) = self._client.do_action(
                flight.Action(command, body), flight.FlightCallOptions(timeout=timeout_s)
            )
        except (pa.ArrowException, OSError, ValueError) as exc:
            raise WorkerUnreachableError(
                f"The {self.name} did not answer: {first_line(exc)}."
            ) from exc
        answer = json.loads(result.body.to_pybytes())
        if "error" in answer:
            raise heard(answer["error"])
        return answer["result"]

    def take(self, taken: Mapping[int, int]) -> list[Delivery]:
        """What its consumers received, and who has lost or regained a connection, in order.

        Args:
            taken: Messages taken of some consumers since their beginning.

        Raises:
            WorkerUnreachableError: It does not answer in time.
        """
        question = {
            "token": self._token, "seq": self._seq + 1, "taken": taken, "wait_s": TAKE_WAIT_S,
        }  # fmt: skip
        try:
            (chunk,) = self._client.do_get(
                flight.Ticket(json.dumps(question).encode()),
                flight.FlightCallOptions(timeout=LEASE_S),
            )
        except (pa.ArrowException, OSError, ValueError) as exc:
            raise WorkerUnreachableError(
                f"The {self.name} gives no answer within {LEASE_S:.0f} s: {first_line(exc)}."
            ) from exc
        self._seq += 1
        header = json.loads(chunk.app_metadata.to_pybytes())
        for name, level, line in header["log"]:
            logging.getLogger(name).log(level, "%s (%s)", line, self.name)
        return unpacked(header["deliveries"], chunk.data)


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
        setup = Setup(connection, LEASE_S, logging.getLogger("keyshard").getEffectiveLevel())
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C in a terminal is for the process that asks; it decides what becomes of it.
            start_new_session=True,
        )
        try:
            hello = self._started(setup, stop)
            if "error" in hello:
                raise heard(hello["error"])
        except BaseException:
            self.end(0.0)
            raise
        endpoint = f"grpc://{setup.host}:{hello['port']}"
        super().__init__(endpoint, setup.token, f"worker process {self._process.pid}")

    def _started(self, setup: Setup, stop: threading.Event) -> dict[str, Any]:
        to, out = self._process.stdin, self._process.stdout
        assert to is not None
        assert out is not None
        line = b""
        try:
            to.write(pickle.dumps(setup))
            to.flush()
            end_s = time.monotonic() + START_TIMEOUT_S
            while time.monotonic() < end_s and not stop.is_set():
                if select.select([out], [], [], START_LOOK_S)[0]:
                    line = out.readline()
                    break
            hello: dict[str, Any] = json.loads(line)
        except (OSError, ValueError) as exc:
            status = self._process.poll()
            raise WorkerUnreachableError(
                f"A worker process did not start: it ended with status {status}, or was not ready "
                f"within {START_TIMEOUT_S:.0f} s. Its error stands in the output above this one; "
                "look for the memory limit, too."
            ) from exc
        return hello

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
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # what it did not read is thrown away
                if pipe is not None:
                    pipe.close()
