"""Serves planned batches over Arrow Flight to tasks, which read them by :mod:`.batch_reading`.

A ``DoGet`` ticket is the token and JSON: batch id, layout partition, columns, and whether the
answer may name a location of the content. In that case the task fetches it from workers. A read is
a pure replay from the window. It can be repeated until the batch is released.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import pyarrow as pa
from pyarrow import flight

from keyshard.columns.content import CONTENT_NAMES
from keyshard.columns.record_batches import select
from keyshard.coordinator.batch_reading import BatchTicket
from keyshard.coordinator.batches import Batches
from keyshard.errors import BatchUnknownError, ConfigError, KeyShardError
from keyshard.threads import logged_error
from keyshard.workers.authentication import Body, read_with_token

REPORTS_MAX = 10_000
"""Most layout partitions whose number of malformed rows is remembered."""

T = TypeVar("T")


class BatchServer:
    """A Flight server. It answers in threads of its own, from its creation on.

    No server of keyshard calls ``serve()``, which only waits: when it returns, Arrow may stop
    another server of the process.

    Args:
        batches: The served batches.
        host: Address to listen on, which tasks connect to.

    Raises:
        ConfigError: The address does not belong to this machine.
    """

    def __init__(self, batches: Batches, host: str) -> None:
        self._token = secrets.token_hex(16)
        try:
            self._server = _FlightServer(batches, self._token, f"grpc://{_bracketed(host)}:0")
        except (pa.ArrowException, OSError) as exc:
            raise ConfigError(
                f"Cannot listen on {host!r}: {exc}.",
                "Set worker_host to an address of the driver's machine that the executors can "
                "reach.",
            ) from exc
        self._endpoint = f"grpc://{_bracketed(host)}:{self._server.port}"

    def ticket(self, batch_id: str, index: int, columns: Sequence[str]) -> BatchTicket:
        """Return the ticket for some columns of one layout partition."""
        return BatchTicket(self._endpoint, self._token, batch_id, index, tuple(columns))

    @property
    def malformed(self) -> int:
        """Rows that do not fit the schema, as tasks reported; a repeated read counts once."""
        return self._server.malformed


class _FlightServer(flight.FlightServerBase):  # type: ignore[misc]
    def __init__(self, batches: Batches, token: str, location: str) -> None:
        super().__init__(location)
        self._batches = batches
        self._token = token
        self._reported: dict[tuple[str, int], int] = {}
        """Malformed rows by layout partition, of the newest batches."""
        self._reporting = threading.Lock()
        self.malformed = 0

    def _checked(self, body: Body) -> Any:
        """Check the token of a request, and return its content."""
        try:
            return read_with_token(body, self._token)
        except flight.FlightUnauthenticatedError as exc:
            unknown = BatchUnknownError("The ticket belongs to another run.")
            raise flight.FlightUnauthenticatedError(_answer(unknown)) from exc

    def do_action(self, _context: Any, action: flight.Action) -> list[bytes]:
        """Record the number of malformed rows of a layout partition.

        A second report replaces the first one, so a task that runs again does not count twice.
        """
        report = self._checked(action.body)
        of, rows = (str(report["batch"]), int(report["index"])), int(report["rows"])
        with self._reporting:
            self.malformed += rows - self._reported.pop(of, 0)
            self._reported[of] = rows
            if len(self._reported) > REPORTS_MAX:
                self._reported.pop(next(iter(self._reported)))
        return []

    def do_get(self, _context: Any, ticket: flight.Ticket) -> flight.FlightDataStream:
        request = self._checked(ticket.ticket)
        part, columns = (request["batch"], request["index"]), request["columns"]
        with _named_errors():
            remote = self._batches.direct(*part, columns) if request["direct"] else None
            if remote is None:
                rows = self._batches.read(*part, columns)
                return flight.GeneratorStream(select(columns), _named(rows))
        here = select([name for name in columns if name not in CONTENT_NAMES])
        return flight.GeneratorStream(
            here, _named((others, json.dumps(where).encode()) for others, where in remote)
        )


@contextmanager
def _named_errors() -> Iterator[None]:
    """Answer a request with the code and the text of an error, also of an unexpected one."""
    try:
        yield
    except Exception as exc:
        raise flight.FlightServerError(_answer(logged_error("Reading a batch", exc))) from exc


def _answer(error: KeyShardError) -> str:
    """Return an error as :func:`keyshard.coordinator.batch_reading.read_batch` reads it."""
    return json.dumps([error.code, error.problem, error.remedy])


def _named(rows: Iterator[T]) -> Iterator[T]:
    """Yield the values of an iterator; answer its errors with their code and text."""
    with _named_errors():
        yield from rows


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
