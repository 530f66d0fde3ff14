"""Workers that serve requests: token, lease, version, and the way to leave."""

from __future__ import annotations

import json
import socket
import threading

import pytest
from pyarrow import flight

import keyshard
from keyshard.broker.memory import MemoryBroker
from keyshard.config.connection import Connection
from keyshard.core.position.entry import TopicPartition
from keyshard.errors import WorkerEnvironmentError, WorkerUnreachableError
from keyshard.workers import authentication
from keyshard.workers.host import ConsumerHost
from keyshard.workers.server import LOOPBACK, Lease, WorkerServer, WorkerSetup, at, start_server
from keyshard.workers.worker import Worker
from tests.helpers import DEADLINE_S, wait_until
from tests.support.hosted_consumers import hosted
from tests.support.worker_servers import worker_server


def test_a_lease_that_has_ended_never_begins_again() -> None:
    now = [100.0]
    lease = Lease(4.0, lambda: now[0])
    now[0] += 3.9
    assert lease.renew()
    now[0] += 3.9
    assert lease.left_s() == pytest.approx(0.1)
    now[0] += 0.2
    assert not lease.renew()
    now[0] -= 1.0
    assert not lease.renew()
    assert lease.left_s() == 0


MUCH = b"[" + b"0," * 1_000_000 + b"0]"


@pytest.mark.parametrize(
    "credential",
    [
        b"guess\n", b"guess", b"", b"\n", b" \n", b"a 1 b\n", b"\xff \xff \xff\n",
        b"a " * 200 + b"\n",
        b"0" * 32 + b" 1 " + b"0" * 64 + b"\n",
    ],
)  # fmt: skip
def test_a_request_without_the_token_is_refused_unread_and_logged_once(
    credential: bytes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The JSON of a stranger was parsed before its token was compared."""
    read: list[object] = []
    monkeypatch.setattr(authentication, "_read", read.append)
    with hosted() as at, worker_server(at.host) as (_, _, client):
        for body in (b"{}", b"[" * 9_000, MUCH):
            with pytest.raises(flight.FlightUnauthenticatedError):
                list(client.do_action(flight.Action("last_entry", credential + body)))
            with pytest.raises(flight.FlightUnauthenticatedError):
                list(client.do_get(flight.Ticket(credential + body)))
    assert caplog.text.count("another token") == 1
    assert not read


def test_a_worker_whose_lease_has_ended_neither_gives_nor_acknowledges() -> None:
    with hosted() as at, worker_server(at.host, lease_s=0.3) as served:
        server, setup, client = served
        at.publish(1)
        wait_until(lambda: at.host.take(1, {}, 0.1)[0]["deliveries"])
        wait_until(lambda: server.lease.left_s() == 0)
        prover = authentication.RequestSigner(setup.token, f"grpc://{LOOPBACK}:{server.port}")
        introduction = flight.Action(authentication.INTRODUCE, prover.introduction())
        (met,) = client.do_action(introduction)  # type: ignore[attr-defined]
        assert prover.meet(bytes(met.body))
        asked = {"arguments": {"number": 1, "entries": [[0, 0]]}}
        _, body = prover.request("acknowledge", asked)
        with pytest.raises(flight.FlightUnavailableError, match="lease"):
            list(client.do_action(flight.Action("acknowledge", body)))
        _, body = prover.request("take", {"seq": 1, "taken": {}, "wait_s": 0, "released": []})
        with pytest.raises(flight.FlightUnavailableError, match="lease"):
            list(client.do_get(flight.Ticket(body)))
        assert at.cluster.backlog(TopicPartition(at.topic), "s") == 1


def test_a_worker_of_another_version_is_refused_by_name() -> None:
    """The refusal comes before any content of the other version is read."""
    server, hello = start_server("0.0.9", "no setup of this version")
    assert server is None
    with pytest.raises(WorkerEnvironmentError) as caught:
        Asked(hello)
    for told_too in ("0.0.9", keyshard.__version__, socket.gethostname(), "same version"):
        assert told_too in caught.value.message


class Asked(Worker):
    """A worker that was not started."""

    def __init__(self, hello: str) -> None:
        super().__init__(hello, "token", "worker")


@pytest.mark.parametrize("hello", ["", "Welcome to Python!\n", "\0", "7", "[]", "{}", "[" * 10**5])
def test_an_invalid_hello_is_refused(hello: str) -> None:
    with pytest.raises(WorkerUnreachableError, match="not the output of a worker"):
        Asked(hello)


def test_a_silent_address_is_named_with_the_option() -> None:
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        endpoint = at(LOOPBACK, free.getsockname()[1])
    with pytest.raises(WorkerUnreachableError, match=f"{endpoint} within .* every worker"):
        Asked(json.dumps({"endpoint": endpoint, "pid": 7, "host": "there"}))


def test_a_worker_that_is_asked_to_leave_gives_its_ranges_back() -> None:
    with hosted() as at_place:
        setup = WorkerSetup(Connection("pulsar://nobody"), 60.0, level=30)
        server = WorkerServer(at_place.host, setup)
        gave_back: list[bool] = []
        main = threading.Thread(target=lambda: gave_back.append(server.serve_to_the_end()))
        main.start()
        hello = {"endpoint": at(LOOPBACK, server.port), "pid": 7, "host": "there"}
        worker = Worker(json.dumps(hello), setup.token, "worker")
        worker.leave()
        worker.end(5.0)
        worker.end(5.0)
        main.join(DEADLINE_S)
        server.shutdown()
        assert gave_back == [True]
        at_place.host = ConsumerHost(MemoryBroker(at_place.cluster))
        at_place.subscribe(1)  # the range is free
