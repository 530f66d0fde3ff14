"""Flight: batches and errors cross to the task as they are."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pytest
from pyarrow import flight

from keyshard.columns.record_batches import SCHEMA, record_batches
from keyshard.coordinator import batch_reading, batch_server
from keyshard.coordinator.batch_reading import BatchTicket, read_batch, report_malformed
from keyshard.coordinator.batch_server import BatchServer
from keyshard.coordinator.batches import Batches
from keyshard.coordinator.kept_client import KeptClient
from keyshard.errors import (
    BatchReleasedError,
    BatchUnknownError,
    ConfigError,
    KeyShardError,
    UnexpectedError,
    WorkerUnreachableError,
)
from tests.helpers import P0, block, wait_until

ALL = tuple(SCHEMA.names)


class ServedBatches(Batches):
    """Serves 30 rows as batch ``"b"``, and errors on request."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.asked: list[tuple[str, int, tuple[str, ...]]] = []

    def read(
        self, batch_id: str, index: int, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        wanted = ALL if columns is None else tuple(columns)
        self.asked.append((batch_id, index, wanted))
        if self.error is not None:
            raise self.error
        return iter([
            batch
            for part in range(3)
            for batch in record_batches(
                [(P0, block(part, entry, f"key-{entry}")) for entry in range(10)], wanted
            )
        ])  # fmt: skip

    def direct(self, *_wanted: object) -> None:
        """The server has all content itself."""


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[ServedBatches, BatchServer]]:
    batches = ServedBatches()
    server = BatchServer(batches, "127.0.0.1")
    yield batches, server
    server._server.shutdown()


@pytest.fixture
def batches(served: tuple[ServedBatches, BatchServer]) -> ServedBatches:
    served[0].error = None
    served[0].asked.clear()
    return served[0]


@pytest.fixture
def ticket(served: tuple[ServedBatches, BatchServer]) -> BatchTicket:
    return served[1].ticket("b", 3, ALL)


def test_rows_that_tasks_left_out_are_counted_once(
    served: tuple[ServedBatches, BatchServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = served[1]
    before = server.malformed
    for index, rows in [(0, 5), (1, 2), (0, 5), (0, 5)]:
        report_malformed(server.ticket("c", index, ALL), rows)
    assert server.malformed - before == 7
    monkeypatch.setattr(batch_server, "REPORTS_MAX", 2)
    for number in range(3):
        report_malformed(server.ticket(f"d{number}", 0, ALL), 1)
    assert server.malformed - before == 10
    assert len(server._server._reported) <= 3
    stranger = dataclasses.replace(server.ticket("c", 0, ALL), token="guessed")
    report_malformed(stranger, 100)
    assert server.malformed - before == 10


def test_a_batch_crosses_unchanged_as_often_as_asked(
    batches: ServedBatches, ticket: BatchTicket
) -> None:
    expected = pa.Table.from_batches(list(batches.read("b", 3, ALL)))
    for _ in range(2):
        assert pa.Table.from_batches(list(read_batch(ticket))).equals(expected)
    assert batches.asked == [("b", 3, ALL)] * 3


def test_rows_and_requests_use_no_proxy(
    ticket: BatchTicket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue: gRPC sent even requests to loopback through the proxy of the environment."""
    for name in ("http_proxy", "grpc_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    opened_by(monkeypatch)
    assert sum(batch.num_rows for batch in read_batch(ticket)) == 30


def test_columns_are_selected_at_the_server(
    batches: ServedBatches, served: tuple[ServedBatches, BatchServer]
) -> None:
    (first, *_) = read_batch(served[1].ticket("b", 0, ["__messageId", "value"]))
    assert first.schema.names == ["__messageId", "value"]


def test_a_ticket_crosses_process_borders(batches: ServedBatches, ticket: BatchTicket) -> None:
    copy = pickle.loads(pickle.dumps(ticket))
    assert copy == ticket
    assert sum(batch.num_rows for batch in read_batch(copy)) == 30


@pytest.mark.parametrize("token", ["", "0" * 32, "\u00e9"])
def test_a_ticket_of_another_run_is_refused_unread(
    batches: ServedBatches, ticket: BatchTicket, token: str
) -> None:
    with pytest.raises(KeyShardError):
        list(read_batch(dataclasses.replace(ticket, token=token)))
    assert batches.asked == []


def test_the_refusal_of_a_ticket_names_the_new_plan(
    batches: ServedBatches, ticket: BatchTicket
) -> None:
    with pytest.raises(BatchUnknownError) as caught:
        list(read_batch(dataclasses.replace(ticket, token="other")))
    assert caught.value.message == "The ticket belongs to another run."


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
def test_a_request_without_the_token_gets_nothing(
    batches: ServedBatches, ticket: BatchTicket, text: bytes
) -> None:
    with flight.connect(ticket.endpoint) as client:
        with pytest.raises(flight.FlightUnauthenticatedError):
            client.do_get(flight.Ticket(text)).read_all()
        for ask in (
            lambda: list(client.list_flights()),
            lambda: list(client.do_action(flight.Action("x", b""))),
        ):
            with pytest.raises(pa.ArrowException):
                ask()
    assert batches.asked == []


def test_each_run_has_a_token_of_its_own(ticket: BatchTicket) -> None:
    other = BatchServer(ServedBatches(), "127.0.0.1")
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
    batches: ServedBatches, ticket: BatchTicket, error: KeyShardError
) -> None:
    batches.error = error
    with pytest.raises(type(error)) as caught:
        list(read_batch(ticket))
    assert type(caught.value) is type(error)
    assert str(caught.value) == str(error)


def test_an_endpoint_that_does_not_answer_is_named_with_the_remedy(
    ticket: BatchTicket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_reading, "CONNECT_TIMEOUT_S", 0.1)
    away = dataclasses.replace(ticket, endpoint="grpc://127.0.0.1:1")
    with pytest.raises(WorkerUnreachableError, match="set worker_host") as caught:
        list(read_batch(away))
    assert caught.value.facts == {"endpoint": "grpc://127.0.0.1:1"}


def test_a_server_that_has_ended_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_reading, "CONNECT_TIMEOUT_S", 0.1)
    server = BatchServer(ServedBatches(), "127.0.0.1")
    ticket = server.ticket("b", 0, ALL)
    assert list(read_batch(ticket))
    server._server.shutdown()
    with pytest.raises(WorkerUnreachableError):
        list(read_batch(ticket))


@pytest.mark.usefixtures("batches")
def test_requests_of_one_process_share_a_connection(
    ticket: BatchTicket, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, opened = opened_by(monkeypatch)
    for _ in range(3):
        assert list(read_batch(ticket))
    report_malformed(ticket, 0)
    assert opened == [ticket.endpoint]
    assert len(kept._kept) == 1


def test_a_read_that_is_abandoned_or_fails_closes_its_connection(
    batches: ServedBatches, ticket: BatchTicket, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, opened = opened_by(monkeypatch)
    rows = read_batch(ticket)
    next(rows)
    rows.close()  # type: ignore[attr-defined]
    assert not kept._kept
    batches.error = BatchUnknownError("unknown")
    with pytest.raises(BatchUnknownError):
        list(read_batch(ticket))
    assert not kept._kept
    assert len(opened) == 2


@pytest.mark.usefixtures("batches")
def test_a_connection_is_kept_to_one_source_and_taken_by_one_request(
    ticket: BatchTicket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Two reads at once. 2. Another run of the source, at another address."""
    kept, opened = opened_by(monkeypatch)
    first, second = read_batch(ticket), read_batch(ticket)
    next(first)
    next(second)
    assert list(first)
    assert list(second)
    assert len(opened) == 2
    other = BatchServer(ServedBatches(), "127.0.0.1")
    assert list(read_batch(other.ticket("b", 0, ALL)))
    other._server.shutdown()
    assert opened == [ticket.endpoint, ticket.endpoint, other._endpoint]
    assert [at for at, _ in kept._kept.values()] == [other._endpoint]


@pytest.mark.usefixtures("batches")
def test_a_forked_process_does_not_use_the_connection_of_its_parent(
    ticket: BatchTicket, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, opened = opened_by(monkeypatch)
    assert list(read_batch(ticket))
    before = dict(kept._kept)
    monkeypatch.setattr("keyshard.coordinator.kept_client.os.getpid", lambda: -1)
    assert list(read_batch(ticket))
    assert len(opened) == 2
    assert before.items() <= kept._kept.items()


@pytest.mark.usefixtures("batches")
def test_a_kept_connection_that_ended_is_opened_again(
    ticket: BatchTicket, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, _ = opened_by(monkeypatch)
    assert list(read_batch(ticket))
    ((pid, (at, client)),) = kept._kept.items()
    kept._kept[pid] = at, LostOnce(client)
    assert list(read_batch(ticket))


class LostOnce:
    """A client whose connection ended since its last request."""

    def __init__(self, client: flight.FlightClient) -> None:
        self._client = client
        self._lost = True
        self.close, self.wait_for_available = client.close, client.wait_for_available

    def do_get(self, ticket: flight.Ticket) -> flight.FlightStreamReader:
        if self._lost:
            self._lost = False
            raise flight.FlightUnavailableError("Socket closed")
        return self._client.do_get(ticket)


def opened_by(monkeypatch: pytest.MonkeyPatch) -> tuple[KeptClient, list[str]]:
    """Start without a kept connection; return the ``KeptClient`` and a list of used endpoints."""
    kept, opened, connect = KeptClient(), list[str](), flight.connect

    def connecting(endpoint: str, **options: object) -> flight.FlightClient:
        opened.append(endpoint)
        return connect(endpoint, **options)

    monkeypatch.setattr(batch_reading, "_source", kept)
    monkeypatch.setattr("keyshard.coordinator.kept_client.flight.connect", connecting)
    return kept, opened


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_of_another_machine_cannot_be_listened_on(host: str) -> None:
    with pytest.raises(ConfigError, match=f"Cannot listen on '{host}'"):
        BatchServer(ServedBatches(), host)


def test_an_abandoned_read_leaves_the_server_serving(
    batches: ServedBatches, ticket: BatchTicket
) -> None:
    rows = read_batch(ticket)
    assert next(rows).num_rows == 10
    rows.close()  # type: ignore[attr-defined]
    wait_until(lambda: sum(batch.num_rows for batch in read_batch(ticket)) == 30)


def test_an_unexpected_error_of_the_server_is_named_in_the_task(
    batches: ServedBatches, ticket: BatchTicket, caplog: pytest.LogCaptureFixture
) -> None:
    """The error of the task said that the endpoint cannot be reached."""
    batches.error = ZeroDivisionError("in a thread of Flight")
    with pytest.raises(UnexpectedError, match=r"Reading a batch ended.*in a thread of Flight"):
        list(read_batch(ticket))
    assert "Reading a batch ended unexpectedly" in caplog.text


def test_an_unexpected_error_in_the_midst_of_rows_is_named_in_the_task(
    batches: ServedBatches, ticket: BatchTicket, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = list(batches.read("b", 3, ALL))

    def breaks(*_: object) -> Iterator[pa.RecordBatch]:
        yield rows[0]
        raise ZeroDivisionError("in the midst")

    monkeypatch.setattr(batches, "read", breaks)
    got = read_batch(ticket)
    assert next(got).num_rows == rows[0].num_rows
    with pytest.raises(UnexpectedError, match="in the midst"):
        list(got)
