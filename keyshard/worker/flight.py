"""Serves planned batches to the host's tasks over Arrow Flight, and reads them there.

``DoGet`` takes a ticket of the token and JSON: batch id, layout partition, columns, and whether the
answer may say that content is elsewhere; then workers give it. Reading is a pure replay from the
window, as often as the host likes, until the batch is released.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import pyarrow as pa
from pyarrow import flight

from keyshard.arrow.columns import select
from keyshard.arrow.content import CONTENT_NAMES
from keyshard.broker.hosted.questions import Body, read_with_token, with_token
from keyshard.errors import BY_CODE, ConfigError, KeyShardError, WorkerUnreachableError
from keyshard.redaction import first_line
from keyshard.threads import begin
from keyshard.worker.elsewhere import Chunk, Elsewhere, Place, Run, rows_of

CONNECT_TIMEOUT_S = 10.0
"""Longest wait for the endpoint to begin to answer; the data may then take what it takes."""
TOLD_MAX = 10_000
"""Layout partitions of which it is remembered how many rows were left out."""
FETCH_TIMEOUT_S = 10.0
"""Longest wait for a portion of content from a worker, seconds."""

_log = logging.getLogger(__name__)
_CODE = re.compile(r"\[(KEYSHARD_[A-Z_]+)\] ([^\n]*?)(?:\. gRPC client debug context|\. Detail:|$)")


class Batches(Protocol):
    """What is served; :class:`keyshard.coordinator.batches.Batches`."""

    def read(self, batch_id: str, index: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Rows of one layout partition of a planned batch."""

    def direct(
        self, batch_id: str, index: int, columns: Sequence[str]
    ) -> Iterator[tuple[pa.RecordBatch, Elsewhere]] | None:
        """The same, where all of its content is elsewhere."""


@dataclass(frozen=True)
class BatchTicket:
    """All that a task needs to read its part of a batch; small and picklable."""

    endpoint: str
    """Where to ask: ``grpc://host:port``."""
    token: str = field(repr=False)
    """Secret of this run."""
    batch_id: str
    index: int
    """Layout partition of the batch."""
    columns: tuple[str, ...]
    """Columns wanted, in their order."""


class BatchServer:
    """A Flight server in daemon threads.

    Args:
        batches: What is served.
        host: Address to listen on and to give to tasks.

    Raises:
        ConfigError: The address is not one of this machine.
    """

    def __init__(self, batches: Batches, host: str) -> None:
        self._token = secrets.token_hex(16)
        try:
            self._server = _Server(batches, self._token, f"grpc://{_bracketed(host)}:0")
        except (pa.ArrowException, OSError) as exc:
            raise ConfigError(
                f"Cannot listen on {host!r}: {exc}. Set worker_host to an address of the machine "
                "that runs the driver, one that the executors can reach."
            ) from exc
        self._endpoint = f"grpc://{_bracketed(host)}:{self._server.port}"
        begin("keyshard-flight", self._server.serve)

    def ticket(self, batch_id: str, index: int, columns: Sequence[str]) -> BatchTicket:
        """The ticket of some columns of one layout partition."""
        return BatchTicket(self._endpoint, self._token, batch_id, index, tuple(columns))

    @property
    def left_out(self) -> int:
        """Rows that tasks said they left out, each once however often it was read."""
        return self._server.left_out


class _Server(flight.FlightServerBase):  # type: ignore[misc]
    def __init__(self, batches: Batches, token: str, location: str) -> None:
        super().__init__(location)
        self._batches = batches
        self._token = token
        self._told: dict[tuple[str, int], int] = {}
        """Rows left out of layout partitions of the newest batches."""
        self._telling = threading.Lock()
        self.left_out = 0

    def _checked(self, body: Body) -> Any:
        """What is asked with the token of this run."""
        try:
            return read_with_token(body, self._token)
        except flight.FlightUnauthenticatedError as exc:
            raise flight.FlightUnauthenticatedError(
                "[KEYSHARD_BATCH_UNKNOWN] The ticket is of another run; the batch is planned again."
            ) from exc

    def do_action(self, _context: Any, action: flight.Action) -> list[bytes]:
        """A task tells how many rows it left out; another attempt of it says the same."""
        told = self._checked(action.body)
        of, rows = (str(told["batch"]), int(told["index"])), int(told["rows"])
        with self._telling:
            self.left_out += rows - self._told.pop(of, 0)
            self._told[of] = rows
            if len(self._told) > TOLD_MAX:
                self._told.pop(next(iter(self._told)))
        return []

    def do_get(self, _context: Any, ticket: flight.Ticket) -> flight.FlightDataStream:
        request = self._checked(ticket.ticket)
        wanted, columns = (request["batch"], request["index"]), request["columns"]
        try:
            elsewhere = self._batches.direct(*wanted, columns) if request["direct"] else None
            if elsewhere is None:
                rows = self._batches.read(*wanted, columns)
                return flight.GeneratorStream(select(columns), rows)
        except KeyShardError as exc:
            raise flight.FlightServerError(str(exc)) from exc
        here = select([name for name in columns if name not in CONTENT_NAMES])
        return flight.GeneratorStream(
            here, ((others, json.dumps(where).encode()) for others, where in elsewhere)
        )


def read_batch(ticket: BatchTicket) -> Iterator[pa.RecordBatch]:
    """Read one layout partition of a batch, in a task of the host.

    Yields:
        Record batches of the ticket's columns; see :mod:`keyshard.arrow.columns`.

    Raises:
        WorkerUnreachableError: The endpoint does not answer from here.
        KeyShardError: What the serving process raised, such as BatchReleasedError.
    """
    with ExitStack() as clients:
        fetch = partial(_fetch, _Workers(clients))
        yield from rows_of(partial(_ask, ticket), fetch, ticket.columns)


def tell_left_out(ticket: BatchTicket, rows: int) -> None:
    """Tell the source how many rows of a layout partition were left out.

    Nobody reads less because of it, so it is only logged that it could not be told.
    """
    told = {
        "batch": ticket.batch_id,
        "index": ticket.index,
        "rows": rows,
    }
    try:
        with flight.connect(ticket.endpoint) as client:
            options = flight.FlightCallOptions(timeout=CONNECT_TIMEOUT_S)
            list(client.do_action(("left_out", with_token(ticket.token, told)), options))
    except pa.ArrowException as exc:
        _log.warning("%d rows of batch %s are not counted: %s", rows, ticket.batch_id, exc)


def _ask(ticket: BatchTicket, *, direct: bool) -> Iterator[Chunk]:
    """What the source answers."""
    request = {
        "batch": ticket.batch_id,
        "index": ticket.index,
        "columns": ticket.columns,
        "direct": direct,
    }
    try:
        with flight.connect(ticket.endpoint) as client:
            client.wait_for_available(timeout=CONNECT_TIMEOUT_S)
            stream = client.do_get(flight.Ticket(with_token(ticket.token, request)))
            for chunk in stream:
                told = chunk.app_metadata
                yield (
                    chunk.data,
                    None if told is None else Elsewhere(*json.loads(told.to_pybytes())),
                )
    except (flight.FlightUnavailableError, flight.FlightTimedOutError) as exc:
        raise WorkerUnreachableError(
            f"Cannot read batch {ticket.batch_id} from {ticket.endpoint}: {first_line(exc)}. If "
            "this task runs on another machine than the driver, set worker_host to an address of "
            "the driver that it can reach; if the driver has just ended, nothing is wrong.",
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
    """Connections to workers, closed with the stack."""

    def __init__(self, clients: ExitStack) -> None:
        super().__init__()
        self._clients = clients

    def __missing__(self, endpoint: str) -> flight.FlightClient:
        client = self[endpoint] = self._clients.enter_context(flight.connect(endpoint))
        return client


def _fetch(
    workers: _Workers, place: Place, runs: Sequence[Run], columns: Sequence[str]
) -> pa.RecordBatch:
    """What a worker answers."""
    endpoint, token = place
    request = {"runs": runs, "columns": columns}
    try:
        (chunk,) = workers[endpoint].do_get(
            flight.Ticket(with_token(token, request)),
            flight.FlightCallOptions(timeout=FETCH_TIMEOUT_S),
        )
    except (pa.ArrowException, OSError, ValueError) as exc:
        raise WorkerUnreachableError(
            f"The worker at {endpoint} gives no content: {first_line(exc)}."
        ) from exc
    return chunk.data


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
