"""Several hosts of a service URL, several IP addresses of a host, and hosts that freeze."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from keyshard.broker import hosts, preflight
from keyshard.broker.auth.credentials import Credentials
from keyshard.broker.wire import connection_pool, keep_alive, subscription
from keyshard.broker.wire.broker import WireBroker
from keyshard.config.connection import Connection
from keyshard.core.protobuf import message
from keyshard.errors import BrokerUnavailableError
from tests.helpers import DEADLINE_S, wait_until
from tests.refusals.broker import SAID, Cluster, ScriptedBroker, Session
from tests.support.deadlines import deadline
from tests.support.frame_broker.session import NOT_FOUND, framed_fields
from tests.unit.test_reconnects import consumer_of

WORDS = SAID.decode()
TOPIC = "persistent://public/default/t"
NAME = "several-addresses"
"""A host name with two IP addresses."""
LONG = {"operation_timeout_ms": 60_000, "connection_timeout_ms": 60_000}
"""Timeouts that no test waits for."""


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "NEXT_S", 0.1)


@pytest.fixture
def pair(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> tuple[ScriptedBroker, ...]:
    """Brokers at the IP addresses of one host name, with the same port."""
    first = cluster.broker()
    second = cluster.broker("127.0.0.2", first.port)
    real = socket.getaddrinfo

    def found(host: Any, port: Any, *args: Any, **how: Any) -> list[Any]:
        if host != NAME:
            return real(host, port, *args, **how)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in
                ("127.0.0.1", "127.0.0.2")]  # fmt: skip

    monkeypatch.setattr(socket, "getaddrinfo", found)
    first.host = second.host = f"{NAME}:{first.port}"
    return first, second


@pytest.fixture
def hasty_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep_alive, "PING_AFTER_S", 0.1)
    monkeypatch.setattr(keep_alive, "UNRESPONSIVE_S", deadline(1))
    monkeypatch.setattr(keep_alive, "KEEP_ALIVE_S", 10 * DEADLINE_S)
    monkeypatch.setattr(connection_pool, "SECOND_S", DEADLINE_S)


def asked_first(*brokers: ScriptedBroker, topics: tuple[str, ...] = ()) -> frozenset[str]:
    """Send the first request to the hosts of a service URL; return the topics that are missing."""
    connection = Connection("pulsar://" + ",".join(one.host for one in brokers))
    return preflight.missing_topics(connection, Credentials(connection), topics)


def test_hosts_of_the_service_url_are_asked_side_by_side(
    cluster: Cluster, connect: Callable[..., WireBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "NEXT_S", 0.1)
    silent, gone, well = cluster.broker(), cluster.broker(), cluster.broker()
    cluster.owner_of = lambda _: 2
    silent.accepts = False
    gone.close()
    began_s = time.monotonic()
    consumer_of(
        connect(silent, gone, well, operation_timeout_ms=60_000, connection_timeout_ms=60_000)
    )
    assert time.monotonic() - began_s < DEADLINE_S, "the silent one has 60 s"
    assert "lookup" in well.asked


def test_the_error_names_each_host_and_its_failure(
    cluster: Cluster, connect: Callable[..., WireBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "NEXT_S", 0.1)
    silent, gone, starting = cluster.broker(), cluster.broker(), cluster.broker()
    silent.accepts = False
    gone.close()
    starting.refuses("connect", 6)
    with pytest.raises(BrokerUnavailableError) as raised:
        consumer_of(
            connect(silent, gone, starting, operation_timeout_ms=1_000, connection_timeout_ms=500)
        )
    said = str(raised.value)
    assert all(one.host in said for one in (silent, gone, starting))
    assert "does not answer within" in said
    assert "refused" in said.lower()
    assert WORDS in said


def test_the_first_question_continues_to_the_next_host(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that answers too late on a busy machine is asked again."""
    monkeypatch.setattr(preflight, "ANSWER_S", deadline(0.3))
    silent, starting, well = cluster.broker(), cluster.broker(), cluster.broker()
    silent.accepts = False
    starting.refuses("connect", 6)
    hosts = ",".join(one.host for one in (silent, starting, well))
    connection = Connection(f"pulsar://{hosts}")

    def said() -> str:
        try:
            preflight.missing_topics(connection, Credentials(connection), ())
        except BrokerUnavailableError as exc:
            return str(exc)
        return ""

    wait_until(lambda: not said())
    well.close()
    wait_until(lambda: WORDS in said())
    assert all(one.host in said() for one in (silent, starting, well))


def test_a_host_that_freezes_later_is_not_asked_for_look_ups(
    cluster: Cluster, connect: Callable[..., WireBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. The first host answers look-ups. 2. It freezes. 3. The broker of the topic restarts."""
    monkeypatch.setattr(keep_alive, "PING_AFTER_S", 0.1)
    monkeypatch.setattr(keep_alive, "UNRESPONSIVE_S", 0.3)
    first, second = cluster.broker(), cluster.broker()
    cluster.owner_of = lambda _: 1
    consumer = consumer_of(connect(first, second))
    first.freeze()
    second.cut_all()
    wait_until(consumer.is_connected)


def test_the_first_question_waits_for_no_silent_host(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "ANSWER_S", 10 * DEADLINE_S)
    silent, well = cluster.broker(), cluster.broker()
    silent.accepts = False
    began_s = time.monotonic()
    assert asked_first(silent, well) == frozenset()
    assert time.monotonic() - began_s < DEADLINE_S


def test_the_first_question_goes_to_the_next_host_if_a_greeted_one_fails(
    cluster: Cluster,
) -> None:
    """1. Both hosts greet. 2. The first ends the connection when a topic is looked up."""

    def script(session: Session, name: str, command: Any) -> bool:
        if name == "connect":
            flags = message({5: 1})
            session.put(framed_fields(3, {1: b"test", 2: 21, 3: 5 << 20, 4: flags}))
        elif session.broker is failing:
            session.cut()
        else:
            session.refuse_command(name, command, NOT_FOUND)
        return True

    failing, well = cluster.broker(), cluster.broker()
    failing.script = well.script = script
    assert asked_first(failing, well, topics=(TOPIC,)) == {TOPIC}
    well.close()
    with pytest.raises(BrokerUnavailableError) as raised:
        asked_first(failing, well, topics=(TOPIC,))
    assert f"{failing.host} closes the connection" in str(raised.value)
    assert "refused" in str(raised.value).lower()


def test_brokers_of_earlier_look_ups_answer_for_a_frozen_host(
    cluster: Cluster, connect: Callable[..., WireBroker]
) -> None:
    """1. The only host of the URL freezes; its connection ends. 2. The topic's broker restarts."""
    frozen, healthy = cluster.broker(), cluster.broker()
    cluster.owner_of = lambda _: 1
    consumer = consumer_of(connect(frozen, **LONG))
    frozen.freeze()
    frozen.cut_all()
    healthy.cut_all()
    wait_until(lambda: healthy.asked.count("lookup") == 1)
    wait_until(consumer.is_connected)


def test_a_consumer_that_waits_for_the_service_url_says_so(
    cluster: Cluster, connect: Callable[..., WireBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscription, "WAITS_S", 0.1)
    frozen = cluster.broker()
    consumer = consumer_of(connect(frozen, **LONG))
    frozen.freeze()
    frozen.cut_all()
    wait_until(lambda: "The broker at service_url has not answered" in consumer.problem())
    frozen.is_well()
    wait_until(consumer.is_connected)


def test_an_ip_address_that_is_silent_delays_no_start(
    pair: tuple[ScriptedBroker, ScriptedBroker],
    cluster: Cluster,
    connect: Callable[..., WireBroker],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preflight, "ANSWER_S", 10 * DEADLINE_S)
    silent, well = pair
    silent.accepts = False
    cluster.owner_of = lambda _: 1
    began_s = time.monotonic()
    broker = connect(well, **LONG)
    assert broker.missing([TOPIC]) == frozenset()
    consumer_of(broker)
    broker.watch_topics("persistent://public/default/", lambda _: None)
    assert time.monotonic() - began_s < DEADLINE_S


def test_the_error_names_each_ip_address_and_its_failure(
    pair: tuple[ScriptedBroker, ScriptedBroker],
    connect: Callable[..., WireBroker],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preflight, "ANSWER_S", deadline(0.3))
    silent, gone = pair
    silent.accepts = False
    gone.close()
    errors: list[str] = []
    for ask in (
        lambda: consumer_of(connect(gone, operation_timeout_ms=1_000, connection_timeout_ms=500)),
        lambda: asked_first(gone),
    ):
        with pytest.raises(BrokerUnavailableError) as raised:
            ask()
        errors.append(str(raised.value))
    for said in errors:
        assert f"None of the 2 IP addresses of {gone.host} accepts the connection." in said
        assert all(f"{ip}: " in said for ip in ("127.0.0.1", "127.0.0.2"))
        assert "does not answer within" in said
        assert "refused" in said.lower()


def test_a_failure_of_all_ip_addresses_is_said_once(
    pair: tuple[ScriptedBroker, ScriptedBroker],
) -> None:
    for one in pair:
        one.close()
    with pytest.raises(BrokerUnavailableError) as raised:
        asked_first(pair[0])
    assert str(raised.value).count("refused") == 1
    assert "None of" not in str(raised.value)


@pytest.mark.usefixtures("hasty_pings")
def test_the_other_ip_address_answers_for_one_that_freezes_later(
    pair: tuple[ScriptedBroker, ScriptedBroker], connect: Callable[..., WireBroker]
) -> None:
    freezing, well = pair
    broker = connect(freezing, **LONG)
    broker.partitions(TOPIC)
    freezing.freeze()
    broker.partitions(TOPIC)
    assert "partitioned_metadata" in well.asked


@pytest.mark.usefixtures("hasty_pings")
def test_a_new_connection_to_a_load_balancer_answers_for_an_unresponsive_one(
    cluster: Cluster, connect: Callable[..., WireBroker]
) -> None:
    """1. The connection of a consumer freezes. 2. A new one reaches a healthy broker."""
    balancer = cluster.broker()
    broker = connect(balancer, **LONG)
    consumer = consumer_of(broker)
    (old,) = balancer.sessions
    balancer.script = lambda session, *_: session is old
    wait_until(lambda: "has not answered a ping" in consumer.problem())
    broker.partitions(TOPIC)
    assert len(balancer.sessions) == 2
    assert consumer.is_connected()
    broker.partitions(TOPIC)
    assert len(balancer.sessions) == 2, "the new connection replaces the old one"
    balancer.is_well()


def test_a_name_is_resolved_once_for_a_connection(
    cluster: Cluster, connect: Callable[..., WireBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = cluster.broker()
    real, asked = socket.getaddrinfo, []

    def found(host: Any, port: Any, *args: Any, **how: Any) -> list[Any]:
        if host != "one-address":
            return real(host, port, *args, **how)
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    broker.host = f"one-address:{broker.port}"
    assert asked_first(broker) == frozenset()
    assert len(asked) == 1
    connect(broker, **LONG).partitions(TOPIC)
    assert len(asked) == 2


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), socket.gaierror(-2, "?")])
def test_a_name_that_cannot_be_resolved_is_an_error_of_the_broker(
    error: OSError, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed(*_: Any, **__: Any) -> list[Any]:
        raise error

    broker = cluster.broker()
    monkeypatch.setattr(socket, "getaddrinfo", failed)
    with pytest.raises(BrokerUnavailableError):
        asked_first(broker)


def test_all_of_many_hosts_are_asked_in_half_of_the_time() -> None:
    asking: hosts.HostQuestions[int, int] = hosts.HostQuestions(lambda _: answers.wait())
    answers, began_s = threading.Event(), time.monotonic()
    assert asking.first(range(40), 0.5) is None
    answers.set()
    assert time.monotonic() - began_s < DEADLINE_S
    assert len(asking.failed) == 40


def test_an_answer_is_discarded_if_another_host_fails_unexpectedly() -> None:
    """Both come while the first host is asked, so both are there when the wait ends."""
    discarded: list[str] = []

    def ask(host: str) -> str:
        if host == "bad":
            raise RuntimeError
        return host

    asking = hosts.HostQuestions(ask, discard=discarded.append)
    asking._put("good")
    asking._put("bad")
    with pytest.raises(RuntimeError):
        asking.first(["good"], 1.0)
    assert "good" in discarded


def test_a_connection_that_opens_too_late_is_closed(
    pair: tuple[ScriptedBroker, ScriptedBroker], connect: Callable[..., WireBroker]
) -> None:
    late, well = pair
    late.freeze()
    connect(well, **LONG).partitions(TOPIC)
    assert "partitioned_metadata" in well.asked
    (session,) = late.sessions
    late.thawed.set()
    wait_until(lambda: session.stream.fileno() == -1)
    assert late.asked == ["connect"]
