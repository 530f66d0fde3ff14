"""An unexpected error in a thread of a connection, of a worker, of a replay or of Flight is named.

The threads of an in-memory source are those of test_threads.py. Here a source consumes over the
wire transport, in its own process and in a worker, from brokers whose connections end.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import Context
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from keyshard import KeyShardSource
from keyshard.broker import retry
from keyshard.broker.wire import connection
from keyshard.broker.wire.frames import api
from keyshard.config.connection import Connection
from keyshard.consumers import reconnector
from keyshard.errors import KeyShardError, UnexpectedError
from keyshard.workers import backends
from keyshard.workers.server import start_server
from keyshard.workers.worker import Worker, setup_of
from tests.refusals.broker import Cluster, ScriptedBroker
from tests.refusals.run import TOPIC
from tests.runtime.test_threads import STEPS as STEPS_IN_MEMORY
from tests.support.deadlines import deadline
from tests.support.frame_broker.session import NOT_READY
from tests.support.thread_faults import Calls, Step

NAMED_S = deadline(30)
"""Longest time until an error ends the source, seconds."""
DEPTH = 6
STEPS = [
    Step("keyshard-host", "keyshard.broker.preflight._asked"),
    Step("keyshard-host", "keyshard.broker.wire.connection_pool.ConnectionPool._connect"),
    Step("keyshard-reopen", "keyshard.broker.retry.Retrier._go_on"),
    Step("keyshard-reopen", "keyshard.broker.retry.Retrier._next"),
    Step("keyshard-resubscribe", "keyshard.broker.retry.Retrier._go_on"),
    Step("keyshard-resubscribe", "keyshard.broker.retry.Retrier._next"),
    Step("keyshard-resubscribe", "keyshard.broker.wire.reconnect.ReconnectingHandle._reconnect"),
    Step("keyshard-wire", "keyshard.broker.framing.FrameReader.feed"),
    Step("keyshard-wire", "keyshard.broker.wire.ack_grouping.AckGrouping._taken_out"),
    Step("keyshard-wire", "keyshard.broker.wire.connection.WireConnection._end"),
    Step("keyshard-wire", "keyshard.broker.wire.connection.WireConnection._read"),
    Step("keyshard-wire", "keyshard.broker.wire.connection.WireConnection._read_on"),
    Step("keyshard-wire", "keyshard.broker.wire.connection.WireConnection._take_all"),
    Step("keyshard-wire", "keyshard.broker.wire.handles.Handles.clear"),
    Step("keyshard-wire", "keyshard.broker.wire.keep_alive.KeepAlive.look"),
    Step("keyshard-wire", "keyshard.broker.wire.reconnect.ReconnectingHandle.lost"),
    Step("keyshard-wire", "keyshard.broker.wire.requests.PendingRequests.fail_all"),
    Step("keyshard-wire-auth", "keyshard.broker.auth.credentials.Credentials.show"),
    Step("keyshard-wire-auth", "keyshard.broker.wire.connection.WireConnection.send"),
]
"""A thread of the wire transport, and calls that it makes."""
WORKER_STEPS = [
    Step("keyshard-hosted-receive", "keyshard.workers.host.ConsumerHost._receive"),
    Step("keyshard-resubscribe", "keyshard.broker.retry.Retrier._go_on"),
    Step("keyshard-resubscribe", "keyshard.broker.retry.Retrier._next"),
    Step("keyshard-start", "keyshard.workers.supervisor.WorkerSupervisor.__init__"),
    Step("keyshard-wire", "keyshard.broker.wire.connection.WireConnection._end"),
    Step("keyshard-wire", "keyshard.broker.wire.connection.WireConnection._read_on"),
    Step("keyshard-wire-auth", "keyshard.broker.wire.connection.WireConnection.send"),
    Step("keyshard-worker", "keyshard.workers.supervisor.WorkerSupervisor._take"),
]
"""The same for a source whose consumers are in a worker."""
AT_THE_END = {"keyshard-close"}
"""Threads of a source that has stopped."""


class ServedWorker(Worker):
    """A worker as its own process starts it, in this process."""

    def __init__(self, connection: Connection) -> None:
        setup = replace(setup_of(connection), lease_s=NAMED_S)
        # A worker process has no source that owns its threads.
        self._server, hello = Context().run(start_server, *setup.packed())
        super().__init__(hello, setup.token, "local worker")

    def kill(self) -> None:
        self._client.close()

    def leave(self) -> None:
        assert self._server is not None
        self._server._host.close()

    def end(self, timeout_s: float) -> None:
        del timeout_s
        self.leave()
        assert self._server is not None
        self._server.shutdown()
        self._client.close()


@contextmanager
def hurried() -> Iterator[None]:
    """Short waits, and workers in this process."""
    changes: list[tuple[Any, str, Any]] = [
        (retry, "LONGEST_WAIT_S", 0.2), (reconnector, "LOOK_S", 0.05),
        (reconnector, "AWAY_S", (0.3, 0.6)),
        (backends, "start_of", lambda connection, _: lambda _stop: ServedWorker(connection)),
    ]  # fmt: skip
    with ExitStack() as patches:
        for change in changes:
            patches.enter_context(patch.object(*change))
        yield


class ConnectedSource:
    """A source at brokers that end consumers and connections, and ask for new credentials."""

    def __init__(self, calls: Calls, workers: str = "embedded") -> None:
        self.error: BaseException | None = None
        self.acknowledged = 0
        self.cluster = Cluster(partitions=2)
        self._calls = calls
        self._broker: ScriptedBroker = self.cluster.broker()
        hosts = f"{self._broker.host},{self.cluster.broker().host}"
        self._source = KeyShardSource(
            TOPIC, subscription="s", parallelism=2, starting_position="earliest",
            workers=workers, connection=Connection(f"pulsar://{hosts}"),
        )  # fmt: skip

    def run(self, until: Callable[[], bool]) -> BaseException | None:
        """Run until something holds or the source ends; return the error that ended it."""
        with hurried(), self._calls.watched():
            thread = threading.Thread(target=self._consume, name="consumes", daemon=True)
            thread.start()
            end_s = time.monotonic() + NAMED_S
            for number in itertools.count(1):
                if time.monotonic() > end_s or not thread.is_alive() or until():
                    break
                self._disturb(number)
                thread.join(0.02)
            ended = not thread.is_alive()
            while thread.is_alive() and time.monotonic() < end_s + NAMED_S:
                self._stop()
                thread.join(0.1)
        assert not thread.is_alive(), "it does not end"
        self.cluster.close()
        return self.error if ended else None

    def _consume(self) -> None:
        try:
            for batch in self._source.batches(max_rows=100, max_wait_s=0.01):
                self.acknowledged += batch.records.num_rows
                batch.ack()
        except BaseException as exc:  # noqa: BLE001 - judged by the test
            self.error = exc

    def _disturb(self, number: int) -> None:
        self.cluster.publish(4)
        if number % 60 == 20:
            self._broker.refuses("subscribe", NOT_READY)
        elif number % 60 == 55:
            self._broker.is_well()
        if number % 60 == 25:
            self._broker.cut_all()
        elif number % 60 == 10:
            self._broker.end_consumers()
        elif number % 15 == 0:
            for session in list(self._broker.sessions):
                session.send("auth_challenge", api.AuthChallenge())

    def _stop(self) -> None:
        with suppress(KeyShardError):  # it starts
            self._source.stop()


CASES = [
    *(("embedded", step) for step in STEPS),
    *(("processes:1", step) for step in WORKER_STEPS),
]


@pytest.mark.parametrize(("workers", "step"), CASES, ids=str)
def test_an_unexpected_error_in_a_thread_ends_the_source_and_is_in_its_error(
    workers: str, step: Step
) -> None:
    """An error of ``keyshard-resubscribe`` in a worker was lost, and its range got no consumer."""
    before = set(connection._connections)  # connections of other tests, such as simulated ones
    calls = Calls(DEPTH, step)
    source = ConnectedSource(calls, workers)
    error = source.run(lambda: False)
    assert calls.raised.is_set(), "the thread does not come by there"
    assert not _left_open(before), "the garbage collector would close a socket"
    assert isinstance(error, UnexpectedError), repr(error)
    assert f"InjectedError('{step.function}')" in error.message
    assert len(source.cluster.acknowledged()) <= source.acknowledged


@pytest.mark.parametrize(("workers", "steps"), [("embedded", STEPS), ("processes:1", WORKER_STEPS)])
def test_every_thread_of_a_connected_source_is_in_a_list_of_steps(
    workers: str, steps: list[Step]
) -> None:
    calls = Calls(DEPTH)
    wanted = {step.thread for step in steps}
    assert ConnectedSource(calls, workers).run(lambda: wanted <= _threads(calls)) is None
    assert wanted <= _threads(calls)
    tables = [*STEPS, *WORKER_STEPS, *STEPS_IN_MEMORY]
    assert _threads(calls) - AT_THE_END <= {step.thread for step in tables}


def _threads(calls: Calls) -> set[str]:
    return {step.thread for step in list(calls.steps)}


def _left_open(before: set[connection.WireConnection]) -> list[connection.WireConnection]:
    """Return new connections without a thread whose socket is open."""
    new = [one for one in list(connection._connections) if one not in before]
    return [one for one in new if one._socket.fileno() >= 0 and not one._thread.is_alive()]
