"""The parts of the chaos tests: which faults come, what passes the proxy, what a history shows."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator

import pytest

from helpers import wait_until
from keyshard.devbroker.ports import LOOPBACK, free_port
from keyshard.verify.history import Event
from tests.chaos.plan import PARTITIONS, PARTITIONS_MAX, Kind, faults
from tests.chaos.proxy import TcpProxy
from tests.chaos.report import BROKER, forgotten, judge, redelivered, unchecked
from tests.chaos.stream import Step

ROUNDS = 30


@pytest.mark.parametrize("seed", range(20))
def test_every_round_has_every_kind_and_the_first_kill_comes_inside_a_batch(seed: int) -> None:
    drawn = list(itertools.islice(faults(seed), ROUNDS))
    assert drawn == list(itertools.islice(faults(seed), ROUNDS)), "a seed gives the same faults"
    added = PARTITIONS_MAX - PARTITIONS
    for number, of_round in enumerate(drawn):
        missing = set(Kind) - {fault.kind for fault in of_round}
        assert missing == (set() if number < added else {Kind.PARTITIONS_ADDED})
    kills = [one for one in itertools.chain(*drawn) if one.kind is Kind.STREAM_KILLED]
    assert kills[0].step is Step.READING
    assert {one.step for one in kills} == {*Step, None}
    assert max(one.lasts_s for one in drawn[0]) < 15


class Wire:
    """A client and a server with the proxy between them."""

    def __init__(self) -> None:
        self.server = socket.create_server((LOOPBACK, 0))
        self.server.settimeout(5)
        self.port = free_port()
        self.proxy = TcpProxy(self.port, self.server.getsockname()[1])

    def connect(self) -> tuple[socket.socket, socket.socket]:
        client = socket.create_connection((LOOPBACK, self.port), 5)
        server, _ = self.server.accept()
        server.settimeout(5)
        return client, server


@pytest.fixture
def wire() -> Iterator[Wire]:
    made = Wire()
    with made.server, made.proxy:
        yield made


def test_what_is_stalled_comes_later_and_whole(wire: Wire) -> None:
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
        server.settimeout(5)
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


def test_forgotten_is_what_comes_again_though_it_was_acknowledged_before_the_broker_died() -> None:
    events = [
        *(delivery(0.0, entry) for entry in range(4)),
        *(acknowledgement(1.0, entry) for entry in (0, 1)),
        delivery(1.5, 0),  # The broker lives: it comes again for another reason.
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
