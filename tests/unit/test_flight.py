"""Flight: batches and errors cross to the task as they are."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pytest

from helpers import P0, block, wait_until
from keyshard.arrow.columns import SCHEMA, record_batches
from keyshard.errors import (
    BatchReleasedError,
    BatchUnknownError,
    ConfigError,
    KeyShardError,
    WorkerUnreachableError,
)
from keyshard.worker import flight
from keyshard.worker.flight import BatchServer, BatchTicket, read_batch, tell_left_out

ALL = tuple(SCHEMA.names)


class Batches:
    """Serves 30 rows as batch ``"b"``, and errors when told to."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.asked: list[tuple[str, int, tuple[str, ...]]] = []

    def read(self, batch_id: str, index: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        self.asked.append((batch_id, index, tuple(columns)))
        if self.error is not None:
            raise self.error
        return iter([
            batch
            for part in range(3)
            for batch in record_batches(
                [(P0, block(part, entry, f"key-{entry}")) for entry in range(10)], columns
            )
        ])  # fmt: skip

    def direct(self, *_wanted: object) -> None:
        """Nothing is elsewhere."""


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Batches, BatchServer]]:
    batches = Batches()
    server = BatchServer(batches, "127.0.0.1")
    yield batches, server
    server._server.shutdown()


@pytest.fixture
def batches(served: tuple[Batches, BatchServer]) -> Batches:
    served[0].error = None
    served[0].asked.clear()
    return served[0]


@pytest.fixture
def ticket(served: tuple[Batches, BatchServer]) -> BatchTicket:
    return served[1].ticket("b", 3, ALL)


def test_rows_that_tasks_left_out_are_counted_once(
    served: tuple[Batches, BatchServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = served[1]
    before = server.left_out
    for index, rows in [(0, 5), (1, 2), (0, 5), (0, 5)]:
        tell_left_out(server.ticket("c", index, ALL), rows)
    assert server.left_out - before == 7
    monkeypatch.setattr(flight, "TOLD_MAX", 2)
    for number in range(3):
        tell_left_out(server.ticket(f"d{number}", 0, ALL), 1)
    assert server.left_out - before == 10
    assert len(server._server._told) <= 3
    stranger = dataclasses.replace(server.ticket("c", 0, ALL), token="guessed")
    tell_left_out(stranger, 100)
    assert server.left_out - before == 10


def test_a_batch_crosses_unchanged_as_often_as_asked(batches: Batches, ticket: BatchTicket) -> None:
    expected = pa.Table.from_batches(list(batches.read("b", 3, ALL)))
    for _ in range(2):
        assert pa.Table.from_batches(list(read_batch(ticket))).equals(expected)
    assert batches.asked == [("b", 3, ALL)] * 3


def test_columns_are_selected_at_the_server(
    batches: Batches, served: tuple[Batches, BatchServer]
) -> None:
    (first, *_) = read_batch(served[1].ticket("b", 0, ["__messageId", "value"]))
    assert first.schema.names == ["__messageId", "value"]


def test_a_ticket_crosses_process_borders(batches: Batches, ticket: BatchTicket) -> None:
    copy = pickle.loads(pickle.dumps(ticket))
    assert copy == ticket
    assert sum(batch.num_rows for batch in read_batch(copy)) == 30


@pytest.mark.parametrize("token", ["", "0" * 32, "\u00e9"])
def test_a_ticket_of_another_run_is_refused_unread(
    batches: Batches, ticket: BatchTicket, token: str
) -> None:
    with pytest.raises(KeyShardError):
        list(read_batch(dataclasses.replace(ticket, token=token)))
    assert batches.asked == []


def test_the_refusal_of_a_ticket_says_that_the_batch_is_planned_again(
    batches: Batches, ticket: BatchTicket
) -> None:
    with pytest.raises(BatchUnknownError) as caught:
        list(read_batch(dataclasses.replace(ticket, token="other")))
    assert caught.value.message == "The ticket is of another run; the batch is planned again."


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\xff",
        b'{"token": null}',
        '{"token": "é"}'.encode(),
        b"[" * 9_999,
        b"guess\n" + b"[" * 9_999,
        b"\n{}",
    ],
)
def test_who_has_no_token_gets_nothing(batches: Batches, ticket: BatchTicket, text: bytes) -> None:
    with flight.flight.connect(ticket.endpoint) as client:
        with pytest.raises(flight.flight.FlightUnauthenticatedError):
            client.do_get(flight.flight.Ticket(text)).read_all()
        for ask in (
            lambda: list(client.list_flights()),
            lambda: list(client.do_action(flight.flight.Action("x", b""))),
        ):
            with pytest.raises(pa.ArrowException):
                ask()
    assert batches.asked == []


def test_each_run_has_a_token_of_its_own(ticket: BatchTicket) -> None:
    other = BatchServer(Batches(), "127.0.0.1")
    try:
        mine = other.ticket("b", 3, ALL)
        assert mine.token != ticket.token
        assert mine.endpoint != ticket.endpoint
        assert len(mine.token) == 32
    finally:
        other._server.shutdown()


@pytest.mark.parametrize(
    "error",
    [
        BatchReleasedError("Batch b is committed and its rows are gone. Cache it.", batch_id="b"),
        BatchUnknownError("This process planned no batch b with a partition 3."),
        KeyShardError("Something else: [1:2] of 'x'."),
    ],
    ids=lambda error: error.code,
)
def test_an_error_of_the_server_crosses_with_its_class_and_text(
    batches: Batches, ticket: BatchTicket, error: KeyShardError
) -> None:
    batches.error = error
    with pytest.raises(type(error)) as caught:
        list(read_batch(ticket))
    assert type(caught.value) is type(error)
    assert str(caught.value) == str(error)


def test_an_unforeseen_error_of_the_server_is_told_with_the_endpoint(
    batches: Batches, ticket: BatchTicket
) -> None:
    batches.error = ZeroDivisionError("by zero")
    with pytest.raises(WorkerUnreachableError, match=ticket.endpoint):
        list(read_batch(ticket))


def test_an_endpoint_that_does_not_answer_is_named_with_the_remedy(
    ticket: BatchTicket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight, "CONNECT_TIMEOUT_S", 0.1)
    away = dataclasses.replace(ticket, endpoint="grpc://127.0.0.1:1")
    with pytest.raises(WorkerUnreachableError, match="set worker_host") as caught:
        list(read_batch(away))
    assert caught.value.facts == {"endpoint": "grpc://127.0.0.1:1"}


def test_a_server_that_has_ended_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight, "CONNECT_TIMEOUT_S", 0.1)
    server = BatchServer(Batches(), "127.0.0.1")
    ticket = server.ticket("b", 0, ALL)
    assert list(read_batch(ticket))
    server._server.shutdown()
    with pytest.raises(WorkerUnreachableError):
        list(read_batch(ticket))


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_of_another_machine_cannot_be_listened_on(host: str) -> None:
    with pytest.raises(ConfigError, match=f"Cannot listen on '{host}'"):
        BatchServer(Batches(), host)


def test_an_abandoned_read_leaves_the_server_serving(batches: Batches, ticket: BatchTicket) -> None:
    rows = read_batch(ticket)
    assert next(rows).num_rows == 10
    rows.close()  # type: ignore[attr-defined]
    wait_until(lambda: sum(batch.num_rows for batch in read_batch(ticket)) == 30)
