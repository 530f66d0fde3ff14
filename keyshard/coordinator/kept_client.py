"""The Flight connection that a process keeps between tasks.

A connection costs a task more than a small request does. A host's worker process runs one task
after the other, mostly of one query, so it keeps one connection.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pyarrow import flight

from keyshard.workers.flight_client import flight_client

IDLE_TIMEOUT_MS = 30_000
"""Time without a request after which gRPC closes the connection, milliseconds."""


class KeptClient:
    """Lends a client for one request at a time, and keeps at most one between requests.

    A request that fails or that the caller abandons closes its client.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[int, tuple[str, flight.FlightClient]] = {}
        """Endpoint and client by process: a forked child must not touch the parent's client."""

    @contextmanager
    def lent(self, endpoint: str) -> Iterator[tuple[flight.FlightClient, bool]]:
        """Lend a client of an endpoint, and say whether it has answered an earlier request."""
        client = self._taken(endpoint)
        used = client is not None
        if client is None:
            client = flight_client(endpoint, client_idle_timeout_ms=IDLE_TIMEOUT_MS)
        try:
            yield client, used
        except BaseException:
            client.close()
            raise
        self._keep(endpoint, client)

    def _taken(self, endpoint: str) -> flight.FlightClient | None:
        with self._lock:
            at, client = self._kept.pop(os.getpid(), ("", None))
        if client is None or at == endpoint:
            return client
        client.close()
        return None

    def _keep(self, endpoint: str, client: flight.FlightClient) -> None:
        with self._lock:
            _, before = self._kept.get(os.getpid(), ("", None))
            self._kept[os.getpid()] = endpoint, client
        if before is not None:
            before.close()
