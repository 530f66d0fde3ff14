"""Reads a planned batch from :mod:`.batch_server`, in a task of the host.

Each task imports this module, so it imports nothing of the coordinator but :mod:`.kept_client`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Protocol, TypeAlias

import pyarrow as pa
from pyarrow import flight

from keyshard.base_error import first_line
from keyshard.coordinator.kept_client import KeptClient
from keyshard.errors import BY_CODE, KeyShardError, WorkerUnreachableError
from keyshard.workers.authentication import with_token
from keyshard.workers.flight_client import flight_client

if TYPE_CHECKING:
    from keyshard.coordinator.batches import ContentEndpoint, ContentLocation, Run

CONNECT_TIMEOUT_S = 10.0
"""Longest wait until the endpoint begins to answer, seconds. The transfer itself has no limit."""
FETCH_TIMEOUT_S = 10.0
"""Longest wait for a portion of content from a worker, seconds."""

_log = logging.getLogger(__name__)
_source = KeptClient()
"""The connection of this process to the source whose tasks it runs."""
_ERROR = '["KEYSHARD_'
"""Beginning of an error of the source, in the text of an error of Flight."""


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


def read_batch(ticket: BatchTicket) -> Iterator[pa.RecordBatch]:
    """Read one layout partition of a batch: the rows that one task of the host reads.

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
                where = chunk.app_metadata
                yield chunk.data, None if where is None else _location(where.to_pybytes())
    except (flight.FlightUnavailableError, flight.FlightTimedOutError) as exc:
        raise WorkerUnreachableError(
            f"Cannot read batch {ticket.batch_id} from {ticket.endpoint}: {first_line(exc)}.",
            "If this task runs on another machine than the driver, set worker_host to an address "
            "of the driver that it can reach. If the driver has just ended, ignore this error.",
            endpoint=ticket.endpoint,
        ) from exc
    except pa.ArrowException as exc:
        text = str(exc)
        begin = text.find(_ERROR)
        if begin < 0:
            raise WorkerUnreachableError(
                f"Reading batch {ticket.batch_id} from {ticket.endpoint} failed: {first_line(exc)}."
            ) from exc
        code, problem, remedy = json.JSONDecoder().raw_decode(text, begin)[0]
        raise BY_CODE.get(code, KeyShardError)(problem, remedy) from exc


def _location(text: bytes) -> ContentLocation:
    from keyshard.coordinator.batches import ContentLocation  # noqa: PLC0415 - few tasks need it

    return ContentLocation(*json.loads(text))


class _Workers(dict[str, flight.FlightClient]):
    """Connections to workers by endpoint, opened when needed. ``clients`` closes them."""

    def __init__(self, clients: ExitStack) -> None:
        super().__init__()
        self._clients = clients

    def __missing__(self, endpoint: str) -> flight.FlightClient:
        client = self[endpoint] = self._clients.enter_context(flight_client(endpoint))
        return client


def _fetch(
    workers: _Workers, at: ContentEndpoint, runs: Sequence[Run], columns: Sequence[str]
) -> pa.RecordBatch:
    endpoint, token = at
    request = {"runs": runs, "columns": columns}
    try:
        (chunk,) = workers[endpoint].do_get(
            flight.Ticket(with_token(token, request)),
            flight.FlightCallOptions(timeout=FETCH_TIMEOUT_S),
        )
    except (pa.ArrowException, OSError, ValueError) as exc:
        raise WorkerUnreachableError(
            f"The worker at {endpoint} does not send the content of messages: {first_line(exc)}.",
            "Check that it is running.",
        ) from exc
    return chunk.data


# -- Content that workers keep, joined to its rows in a task --------------------------------------

Chunk: TypeAlias = "tuple[pa.RecordBatch, ContentLocation | None]"
"""Rows, or their columns without content and the location of the content."""


class RequestRows(Protocol):
    """Requests rows from the source; with ``direct``, the answer may be a location of content."""

    def __call__(self, *, direct: bool) -> Iterator[Chunk]: ...


Fetch: TypeAlias = "Callable[[ContentEndpoint, Sequence[Run], Sequence[str]], pa.RecordBatch]"
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
    from keyshard.columns.content import CONTENT_NAMES  # noqa: PLC0415 - few tasks need it
    from keyshard.columns.record_batches import put_together  # noqa: PLC0415

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
