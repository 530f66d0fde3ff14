"""The server of a worker process, and workers, in the process of the test."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

from pyarrow import flight

from keyshard.broker.port import Broker
from keyshard.config.connection import Connection
from keyshard.workers.host import ConsumerHost
from keyshard.workers.server import LOOPBACK, WorkerServer, WorkerSetup, at
from keyshard.workers.worker import LEASE_S, Worker


@contextmanager
def worker_server(
    host: ConsumerHost, lease_s: float = 60.0
) -> Iterator[tuple[WorkerServer, WorkerSetup, flight.FlightClient]]:
    """A server of a host while the context lasts, its setup, and a client of it."""
    setup = WorkerSetup(Connection("pulsar://nobody"), lease_s, level=30)
    server = WorkerServer(host, setup)
    client = flight.connect(f"grpc://{LOOPBACK}:{server.port}")
    try:
        yield server, setup, client
    finally:
        client.close()
        server.shutdown()


class LocalWorker(Worker):
    """A host and its server in this process; asked over loopback, as any other."""

    def __init__(self, broker: Broker, *, keeps: bool = False, lease_s: float = LEASE_S) -> None:
        self.host = ConsumerHost(broker, keeps=keeps)
        self.keeps_content = keeps
        setup = WorkerSetup(Connection("pulsar://nobody"), lease_s, level=30)
        self._server = WorkerServer(self.host, setup)
        hello = {"endpoint": at(LOOPBACK, self._server.port), "pid": os.getpid(), "host": "here"}
        hello["reading"] = self._server.reading_token
        super().__init__(json.dumps(hello), setup.token, "local worker")

    def kill(self) -> None:
        self._client.close()

    def leave(self) -> None:
        self.host.close()

    def end(self, timeout_s: float) -> None:
        del timeout_s
        self.leave()
        self._server.shutdown()
        self._client.close()
