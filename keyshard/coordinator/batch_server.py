"""Serves planned batches to the host's tasks over Arrow Flight, and reads them in tasks.

A ``DoGet`` ticket is the token and JSON: batch id, layout partition, columns, and whether the
answer may name a location of the content. In that case the task fetches it from workers. A read is
a pure replay from the window. It can be repeated until the batch is released.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, Protocol, TypeVar

import pyarrow as pa
from pyarrow import flight

from keyshard.columns.content import CONTENT_NAMES
from keyshard.columns.record_batches import put_together, select
from keyshard.coordinator.batches import Batches, ContentEndpoint, ContentLocation, Run
from keyshard.coordinator.kept_client import KeptClient
from keyshard.errors import BY_CODE, ConfigError, KeyShardError, WorkerUnreachableError
from keyshard.redaction import first_line
from keyshard.threads import logged_error
from keyshard.workers.authentication import Body, read_with_token, with_token
from keyshard.workers.flight_client import flight_client

CONNECT_TIMEOUT_S = 10.0
"""Longest wait until the endpoint begins to answer, seconds. The transfer itself has no limit."""
REPORTS_MAX = 10_000
"""Layout partitions whose number of omitted rows is remembered."""
FETCH_TIMEOUT_S = 10.0
"""Longest wait for a portion of content from a worker, seconds."""

T = TypeVar("T")
_log = logging.getLogger(__name__)
_source = KeptClient()
"""The connection of this process to the source whose tasks it runs."""
_CODE = re.compile(r"\[(KEYSHARD_[A-Z_]+)\] ([^\n]*?)(?:\. gRPC client debug context|\. Detail:|$)")


@dataclass(frozen=True)
class BatchTicket:
    """Everything that a task needs to read its part of a batch; small and picklable."""

    endpoint: str
    """URL of the server: ``grpc://host:port``."""
    token: str = field(repr=False)
    """Secret of this run."""
    batch_id: str
    index: int
    """Layout partition of the batch."""
    columns: tuple[str, ...]
    """Columns wanted, in their order."""


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
                f"Cannot listen on {host!r}: {exc}. Set worker_host to an address of the "
                "driver's machine that the executors can reach."
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
            raise flight.FlightUnauthenticatedError(
                "[KEYSHARD_BATCH_UNKNOWN] The ticket belongs to another run. The batch is "
                "planned again."
            ) from exc

    def do_action(self, _context: Any, action: flight.Action) -> list[bytes]:
        """Take the number of malformed rows of a task; another attempt of it sends the same."""
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
        raise flight.FlightServerError(str(logged_error("Reading a batch", exc))) from exc


def _named(rows: Iterator[T]) -> Iterator[T]:
    """Yield what an iterator yields. Its errors have their names."""
    with _named_errors():
        yield from rows


def read_batch(ticket: BatchTicket) -> Iterator[pa.RecordBatch]:
    """Read one layout partition of a batch, in a task of the host.

    Yields:
        Record batches of the ticket's columns; see :mod:`keyshard.columns.record_batches`.

    Raises:
        WorkerUnreachableError: The endpoint cannot be reached from this task.
        KeyShardError: The error of the serving process, such as BatchReleasedError.
    """
    with ExitStack() as clients:
        fetch = partial(_fetch, _Workers(clients))
        yield from rows_of(partial(_request_rows, ticket), fetch, ticket.columns)


def report_malformed(ticket: BatchTicket, rows: int) -> None:
    """Report to the source how many rows of a layout partition do not fit the schema.

    The number changes no result, so a failure is only logged.
    """
    report = {
        "batch": ticket.batch_id,
        "index": ticket.index,
        "rows": rows,
    }
    try:
        with _source.lent(ticket.endpoint) as (client, _):
            options = flight.FlightCallOptions(timeout=CONNECT_TIMEOUT_S)
            list(client.do_action(("malformed", with_token(ticket.token, report)), options))
    except pa.ArrowException as exc:
        _log.warning("the counts miss %d rows of batch %s: %s", rows, ticket.batch_id, exc)


def _request_rows(ticket: BatchTicket, *, direct: bool) -> Iterator[Chunk]:
    """Request rows from the source."""
    request = {
        "batch": ticket.batch_id,
        "index": ticket.index,
        "columns": ticket.columns,
        "direct": direct,
    }
    try:
        with _source.lent(ticket.endpoint) as (client, used):
            if not used:
                client.wait_for_available(timeout=CONNECT_TIMEOUT_S)
            get = partial(client.do_get, flight.Ticket(with_token(ticket.token, request)))
            try:
                stream = get()
            except flight.FlightUnavailableError:
                # A kept connection may have ended since its last request. This opens another.
                client.wait_for_available(timeout=CONNECT_TIMEOUT_S)
                stream = get()
            for chunk in stream:
                location = chunk.app_metadata
                yield (
                    chunk.data,
                    None
                    if location is None
                    else ContentLocation(*json.loads(location.to_pybytes())),
                )
    except (flight.FlightUnavailableError, flight.FlightTimedOutError) as exc:
        raise WorkerUnreachableError(
            f"Cannot read batch {ticket.batch_id} from {ticket.endpoint}: {first_line(exc)}. If "
            "this task runs on another machine than the driver, set worker_host to an address "
            "of the driver that it can reach. If the driver has just ended, ignore this error.",
            endpoint=ticket.endpoint,
        ) from exc
    except pa.ArrowException as exc:
        match = _CODE.search(str(exc))
        if match is None:
            raise WorkerUnreachableError(
                f"Reading batch {ticket.batch_id} from {ticket.endpoint} failed: {first_line(exc)}"
            ) from exc
        raise BY_CODE.get(match[1], KeyShardError)(match[2]) from exc


class _Workers(dict[str, flight.FlightClient]):
    """Connections to workers; the stack closes them."""

    def __init__(self, clients: ExitStack) -> None:
        super().__init__()
        self._clients = clients

    def __missing__(self, endpoint: str) -> flight.FlightClient:
        client = self[endpoint] = self._clients.enter_context(flight_client(endpoint))
        return client


def _fetch(
    workers: _Workers, at: ContentEndpoint, runs: Sequence[Run], columns: Sequence[str]
) -> pa.RecordBatch:
    """Fetch content from a worker."""
    endpoint, token = at
    request = {"runs": runs, "columns": columns}
    try:
        (chunk,) = workers[endpoint].do_get(
            flight.Ticket(with_token(token, request)),
            flight.FlightCallOptions(timeout=FETCH_TIMEOUT_S),
        )
    except (pa.ArrowException, OSError, ValueError) as exc:
        raise WorkerUnreachableError(
            f"The worker at {endpoint} does not send the content of messages: {first_line(exc)}. "
            "Check that it is running."
        ) from exc
    return chunk.data


# -- Content that workers keep, joined to its rows in a task --------------------------------------

Chunk = tuple[pa.RecordBatch, ContentLocation | None]
"""Rows, or their columns without content and the location of the content."""


class RequestRows(Protocol):
    """Requests rows from the source; with ``direct``, the answer may be a location of content."""

    def __call__(self, *, direct: bool) -> Iterator[Chunk]: ...


Fetch = Callable[[ContentEndpoint, Sequence[Run], Sequence[str]], pa.RecordBatch]
"""Fetches columns of the content of some runs.

Raises ``WorkerUnreachableError`` if the worker does not return them, for any reason.
"""


def rows_of(request: RequestRows, fetch: Fetch, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Return the rows of one layout partition of a batch.

    If a worker does not return content, the source returns the remaining rows.

    Args:
        request: Requests rows from the source. The rows are the same every time.
        fetch: Fetches content from a worker.
        columns: Columns wanted.
    """
    given = 0
    for rows, location in request(direct=True):
        try:
            batch = rows if location is None else _fetched(rows, location, fetch, columns)
        except WorkerUnreachableError as exc:
            _log.warning("%s The source reads those rows again.", exc.message)
            break
        given += batch.num_rows
        yield batch
    else:
        return
    for batch, _ in request(direct=False):
        known = min(given, batch.num_rows)
        given -= known
        if known < batch.num_rows:
            yield batch.slice(known)


def _fetched(
    others: pa.RecordBatch, location: ContentLocation, fetch: Fetch, columns: Sequence[str]
) -> pa.RecordBatch:
    wanted = [name for name in columns if name in CONTENT_NAMES]
    if not wanted:
        return put_together(others, None, columns)
    shares: dict[int, list[Run]] = {}
    for endpoint, run in location.runs:
        shares.setdefault(endpoint, []).append(run)
    got = {
        endpoint: fetch(location.endpoints[endpoint], runs, wanted)
        for endpoint, runs in shares.items()
    }
    if len(got) == 1:
        return put_together(others, got.popitem()[1], columns)
    starts = dict.fromkeys(got, 0)
    slices: list[pa.RecordBatch] = []
    for endpoint, runs in groupby(location.runs, lambda one: one[0]):
        rows = sum(run[2] for _, run in runs)
        slices.append(got[endpoint].slice(starts[endpoint], rows))
        starts[endpoint] += rows
    return put_together(others, pa.concat_batches(slices), columns)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
