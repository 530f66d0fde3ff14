"""The parts of the chaos tests: planned faults, the proxy, and histories."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator

import pytest

from keyshard.testing.devbroker.process import LOOPBACK, free_port
from keyshard.testing.verify.history import Event
from keyshard.workers.worker import LEASE_S
from tests.chaos.plan import PARTITIONS, PARTITIONS_MAX, WORKERS, Kind, Subject, faults
from tests.chaos.proxy import TcpProxy
from tests.chaos.report import (
    BROKER,
    forgotten,
    handled_and_parked,
    judge,
    redelivered,
    unchecked,
    wrongs_of_handlers,
)
from tests.chaos.stream import WORKER
from tests.helpers import DEADLINE_S, wait_until

ROUNDS = 30


@pytest.mark.parametrize("subject", Subject)
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("seed", range(20))
def test_every_round_has_every_kind_and_the_first_kill_comes_inside_a_batch(
    seed: int, workers: str, subject: Subject
) -> None:
    drawn = list(itertools.islice(faults(seed, subject, workers), ROUNDS))
    again = list(itertools.islice(faults(seed, subject, workers), ROUNDS))
    assert drawn == again, "a seed, the same faults"
    added = PARTITIONS_MAX - PARTITIONS
    for number, of_round in enumerate(drawn):
        missing = set(subject.kinds(workers)) - {fault.kind for fault in of_round}
        assert missing == (set() if number < added else {Kind.PARTITIONS_ADDED})
    kills = [one for one in itertools.chain(*drawn) if one.kind is Kind.STREAM_KILLED]
    assert kills[0].step is subject.first_step
    assert {one.step for one in kills} == {*subject.steps, None}
    assert max(one.lasts_s for one in drawn[0]) < 15


def test_only_handlers_are_rescaled_and_unpark_keys() -> None:
    of_handlers = {Kind.RESTARTED, Kind.RESCALED, Kind.UNPARKED}
    for workers in WORKERS:
        more = set(Subject.HANDLERS.kinds(workers)) - set(Subject.STREAM.kinds(workers))
        assert more == of_handlers


def test_workers_are_killed_and_stopped_for_less_and_more_than_their_lease() -> None:
    of_workers = {Kind.WORKER_KILLED, Kind.WORKER_STOPPED}
    embedded, processes = (set(Subject.STREAM.kinds(workers)) for workers in WORKERS)
    assert processes - embedded == of_workers
    assert not embedded - processes
    drawn = list(itertools.chain(*itertools.islice(faults(1, Subject.STREAM, WORKERS[1]), ROUNDS)))
    stops = [one.lasts_s for one in drawn if one.kind is Kind.WORKER_STOPPED]
    assert min(stops) < LEASE_S < max(stops)
    together = {one.workers_too for one in drawn if one.kind is Kind.STREAM_STOPPED}
    assert together == {False, True}


class Wire:
    """A client and a server with the proxy between them."""

    def __init__(self) -> None:
        self.server = socket.create_server((LOOPBACK, 0))
        self.server.settimeout(DEADLINE_S)
        self.port = free_port()
        self.proxy = TcpProxy(self.port, self.server.getsockname()[1])

    def connect(self) -> tuple[socket.socket, socket.socket]:
        client = socket.create_connection((LOOPBACK, self.port), 5)
        server, _ = self.server.accept()
        server.settimeout(DEADLINE_S)
        return client, server


@pytest.fixture
def wire() -> Iterator[Wire]:
    made = Wire()
    with made.server, made.proxy:
        yield made


def test_stalled_bytes_arrive_later_and_complete(wire: Wire) -> None:
    client, server = wire.connect()
    with client, server:
        client.sendall(b"before")
        assert server.recv(100) == b"before"
        wire.proxy.stall()
        client.sendall(b"held ")
        client.sendall(b"back")
        server.settimeout(0.05)
        with pytest.raises(TimeoutError):
            server.recv(100)
        server.settimeout(DEADLINE_S)
        wire.proxy.resume()
        held = b""
        while len(held) < 9 and (more := server.recv(100)):
            held += more
        assert held == b"held back"
        server.sendall(b"answer")
        assert client.recv(100) == b"answer"


def test_a_cut_closes_both_ends_and_the_next_connection_passes(wire: Wire) -> None:
    client, server = wire.connect()
    with client, server:
        wait_until(lambda: wire.proxy.connections == 1)
        assert wire.proxy.cut() == 1
        assert (client.recv(1), server.recv(1)) == (b"", b"")
    client, server = wire.connect()
    with client, server:
        client.sendall(b"again")
        assert server.recv(100) == b"again"


def delivery(t: float, entry: int) -> Event:
    return Event(t, "delivered", topic="t", partition=0, ledger=1, entry=entry, index=0)


def acknowledgement(t: float, entry: int) -> Event:
    return Event(t, "acked", topic="t", partition=0, ledger=1, entry=entry)


def test_forgotten_entries_come_again_after_an_acknowledgement_before_the_crash() -> None:
    events = [
        *(delivery(0.0, entry) for entry in range(4)),
        *(acknowledgement(1.0, entry) for entry in (0, 1)),
        delivery(1.5, 0),  # Without a crash: it comes again for another reason.
        acknowledgement(5.0, 2),
        Event(5.1, "crashed", worker=BROKER),  # It may not have heard of entry 2.
        *(delivery(6.0, entry) for entry in (1, 2, 3)),
        Event(7.0, "crashed", worker="stream"),
        delivery(8.0, 1),
        Event(9.0, "crashed", worker=BROKER),
    ]
    assert forgotten(events) == [1, 0]
    assert redelivered(events) == 5


def test_a_checker_without_anything_to_check_is_named_unless_it_needs_handlers() -> None:
    sent = Event(0.0, "sent", topic="t", key="k", seq=0)
    row = Event(1.0, "delivered", topic="t", key="k", seq=0, batch="b", part=0)
    events = [sent, row, Event(2.0, "checkpointed", batch="b")]
    assert unchecked(judge(events)) == [
        "acknowledged after the checkpoint",
        "re-runs are equal",
        "ring covered without overlap",
        "routed by key",
        "done in time after the faults",
    ]


def about(kind: str, seq: int) -> Event:
    """An event about a message of a key; each is an entry."""
    return Event(
        0.0, kind, topic="t", partition=0, ledger=1, entry=seq, index=0, key="k", seq=seq,
        worker=WORKER,
    )  # fmt: skip


def handling(*numbers: int) -> list[Event]:
    return [about(kind, seq) for seq in numbers for kind in ("started", "completed")]


def test_a_dead_letter_and_a_returned_handler_are_distinguished() -> None:
    failed = [about("started", 1), about("failed", 1), about("parked", 1)]
    killed = [about("started", 2), Event(0.0, "crashed", worker=WORKER), about("parked", 2)]
    handled, parked = handled_and_parked([*handling(0), *failed, *killed])
    assert handled == {about("started", 0).stored}
    assert parked == {about("started", 1).stored, about("started", 2).stored}


def wrongs(*events: Event) -> list[str]:
    return [text.split(":")[0] for text in wrongs_of_handlers(events, checkpoint=True)]


def test_checks_that_handlers_do_not_allow_are_named() -> None:
    failed = [about("started", 1), about("failed", 1), about("parked", 1), about("acked", 1)]
    assert wrongs(*handling(0), about("acked", 0), *failed, *handling(1, 2)) == []
    assert wrongs(*handling(0), *failed) == ["parked or begun, and never handled"]
    again = "handled again though it is in a checkpoint"
    assert wrongs(*handling(0), about("acked", 0), *handling(0, 1)) == [again]
    # A broker that forgets, and an unparked key: 0 1 2 0 1.
    assert wrongs(*handling(0, 1, 2, 0, 1)) == ["a key ended with an old message"]
    redelivered = [*handling(0), about("acked", 0), *handling(0, 1)]
    assert wrongs_of_handlers(redelivered, checkpoint=False) == []
