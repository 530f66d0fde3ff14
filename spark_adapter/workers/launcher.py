"""Worker launchers start worker processes in tasks of ``start_workers``; queries use them.

The task outlives queries and has no connection to a broker. The stream process of a query asks the
launcher for a worker, which is a process beside the task. The worker holds a lease of that query,
and ends with the lease or with the task.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from contextlib import closing
from typing import Any

from pyarrow import flight

from keyshard.config.connection import Connection
from keyshard.config.workers import WorkersOption
from keyshard.errors import BrokerError, ConfigError, KeyShardError, WorkerUnreachableError
from keyshard.workers.authentication import INTRODUCE, RequestVerifier
from keyshard.workers.backends import StartWorker
from keyshard.workers.encoding import encode_error
from keyshard.workers.server import at
from keyshard.workers.worker import (
    START_TIMEOUT_S,
    AuthenticatedClient,
    Worker,
    end_process,
    setup_of,
    start_process,
)
from spark_adapter.watched_process import spark_pid
from spark_adapter.workers import registry

CHILDREN_MAX = 64
"""Most worker processes of one launcher; a query has one in each launcher that it uses."""


class WorkerLauncher(flight.FlightServerBase):  # type: ignore[misc]
    """Starts worker processes for requests that prove that they know the token.

    Args:
        token: Token of the application.
        address: Address to listen on, also for the workers.
    """

    def __init__(self, token: str, address: str) -> None:
        super().__init__(at(address, 0))
        self.endpoint = at(address, self.port)
        self._verifier = RequestVerifier(token, self.endpoint)
        self._address = address
        self._lock = threading.Lock()
        self._starting = 0
        self._children: list[subprocess.Popen[bytes]] = []

    def do_action(self, _context: Any, action: flight.Action) -> list[bytes]:
        if action.type == INTRODUCE:
            return [self._verifier.introduce(action.body)]
        request, proof = self._verifier.read(action.body, action.type)
        answer: dict[str, Any] = {"proof": proof}
        try:
            answer["result"] = self._start(**request["arguments"])
        except KeyShardError as exc:
            answer["error"] = encode_error(exc)
        return [json.dumps(answer).encode()]

    def _start(self, *, version: str, packed: str) -> str:
        """Start a worker process and return its first line."""
        with self._lock:
            for child in [one for one in self._children if one.poll() is not None]:
                self._children.remove(child)
                end_process(child)
            if len(self._children) + self._starting >= CHILDREN_MAX:
                raise BrokerError(
                    f"The task already has {CHILDREN_MAX} worker processes.",
                    "Close unused sources.",
                )
            self._starting += 1
        try:
            child, hello = start_process((version, packed), address=self._address)
            with self._lock:
                self._children.append(child)
        finally:
            with self._lock:
                self._starting -= 1
        return hello.decode()

    def close(self) -> None:
        """Stop the server and end the worker processes."""
        self.shutdown()
        with self._lock:
            while self._children:
                end_process(self._children.pop())


# -- The backend of a stream process ---------------------------------------------------------------

_tasks_fetch = threading.Event()
"""Set in a stream process, where tasks fetch the content of messages."""

LOOK_S = 0.2
"""Pause before the next launcher is asked, seconds."""


def keep_content_in_workers() -> None:
    """Let the workers of this process keep remote content, because tasks fetch it."""
    _tasks_fetch.set()


def backend(connection: Connection, workers: WorkersOption) -> StartWorker:
    """Return the function that starts workers; the entry point ``spark`` of ``keyshard.workers``.

    Raises:
        ConfigError: The application has no launchers or too few, or an option is given.
    """
    if workers.options:
        raise ConfigError(f"workers is {workers.text!r}; 'spark' takes no options.")
    return WorkerLaunchers(connection, workers).start


class WorkerLaunchers:
    """The launchers of one application, as one source uses them."""

    def __init__(self, connection: Connection, workers: WorkersOption) -> None:
        self._connection = connection
        self._workers = workers
        self._jvm = spark_pid()
        self._lock = threading.Lock()
        self._used: dict[str, int] = {}
        """Requests by launcher; the next worker comes from the launcher with the fewest."""
        self._hosted()

    def _hosted(self) -> registry.RegisteredLaunchers:
        hosted = registry.read(self._jvm)
        if hosted is None:
            raise ConfigError(
                f"workers is {self._workers.text!r}, but this Spark application has no workers.",
                f"Call spark_adapter.start_workers(spark, {self._workers.count}) before the query "
                "starts, and keep its session.",
            )
        if self._workers.count > len(hosted.launchers):
            raise ConfigError(
                f"workers is {self._workers.text!r}, but this Spark application has "
                f"{len(hosted.launchers)} workers.",
                "Lower the number in workers, or start more workers.",
            )
        return hosted

    def start(self, stop: threading.Event) -> Worker:
        """Start a worker behind the least used launcher; try again until one answers."""
        end_s = time.monotonic() + START_TIMEOUT_S
        while True:
            hosted = self._hosted()
            with self._lock:
                launcher = min(hosted.launchers, key=lambda one: self._used.get(one, 0))
                self._used[launcher] = self._used.get(launcher, 0) + 1
            try:
                return self._start_at(launcher, hosted.token)
            except WorkerUnreachableError:
                if stop.is_set() or time.monotonic() > end_s:
                    raise
                stop.wait(LOOK_S)

    def _start_at(self, launcher: str, token: str) -> Worker:
        setup = setup_of(self._connection, keeps=_tasks_fetch.is_set())
        version, packed = setup.packed()
        with closing(AuthenticatedClient(launcher, token, "task of Spark workers")) as client:
            hello = client.request("start", START_TIMEOUT_S, version=version, packed=packed)
        worker = Worker(hello, setup.token, "worker on an executor")
        worker.keeps_content = setup.keeps
        return worker
