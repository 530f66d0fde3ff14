"""The server of a worker process, in the process of the test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pyarrow import flight

from keyshard.broker.hosted.host import Host
from keyshard.broker.hosted.process import LOOPBACK, Setup, WorkerServer
from keyshard.config.connection import Connection


@contextmanager
def worker_server(
    host: Host, lease_s: float = 60.0
) -> Iterator[tuple[WorkerServer, Setup, flight.FlightClient]]:
    """A server of a host while the context lasts, its setup, and a client of it."""
    setup = Setup(Connection("pulsar://nobody"), lease_s, level=30)
    server = WorkerServer(host, setup)
    thread = threading.Thread(target=server.serve)
    thread.start()
    client = flight.connect(f"grpc://{LOOPBACK}:{server.port}")
    try:
        yield server, setup, client
    finally:
        client.close()
        server.shutdown()
        thread.join(10)
