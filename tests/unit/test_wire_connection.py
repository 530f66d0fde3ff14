"""Connections of the wire transport, against a scripted broker."""

from __future__ import annotations

import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from keyshard.broker.auth.credentials import Credentials
from keyshard.broker.port import StartPosition, SubscriptionSpec
from keyshard.broker.wire import ack_grouping, connection_pool, keep_alive
from keyshard.broker.wire import broker as brokering
from keyshard.broker.wire import connection as connecting
from keyshard.broker.wire.broker import WireBroker
from keyshard.broker.wire.connect import Address, open_socket
from keyshard.broker.wire.connection import WireConnection
from keyshard.broker.wire.errors import RefusedError, error_of
from keyshard.broker.wire.frames import api
from keyshard.config.connection import Connection, Token
from keyshard.core.position.entry import EntryId
from keyshard.core.protobuf import message
from keyshard.core.ring.hash_range import split_ring
from keyshard.errors import (
    AuthenticationError,
    AuthorizationError,
    BrokerError,
    BrokerUnavailableError,
    KeyShardError,
    RangeConflictError,
    SubscriptionNotFoundError,
    ThreadStartError,
    TopicMigratedError,
    TopicNotFoundError,
    UnexpectedError,
)
from keyshard.threads import owned_by
from tests.helpers import wait_until
from tests.support.answering_broker import (
    ACK,
    CHALLENGE,
    CLOSE_CONSUMER,
    CONNECT,
    DEADLINE_S,
    ERROR,
    FLOW,
    METADATA,
    METADATA_RESPONSE,
    PING,
    PONG,
    RESPONSE,
    SUBSCRIBE,
    TOPIC,
    TOPIC_MIGRATED,
    Fields,
    ScriptedBroker,
    Session,
    subscribed,
)
from tests.support.deadlines import deadline

pytestmark = pytest.mark.usefixtures("patient")


def test_a_lost_connection_is_logged_once_and_a_closed_one_is_not(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "keyshard"):
        broker = brokers(scripted)
        consumers = [subscribed(broker) for _ in range(3)]
        scripted.sessions[0].cut()
        wait_until(lambda: len(scripted.asked_for(SUBSCRIBE)) == 6)
        wait_until(lambda: all(consumer.is_connected() for consumer in consumers))
        broker.close()
    where = f"127.0.0.1:{scripted.port}"
    line = f"connection to the broker at {where} is lost (the broker closed it)"
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [
        ("WARNING", f"the {line}; keyshard connects again")
    ]


def test_a_ping_is_answered_and_a_silent_broker_is_given_up(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keep_alive, "PING_AFTER_S", 0.1)
    monkeypatch.setattr(keep_alive, "KEEP_ALIVE_S", deadline(0.5))
    consumer = subscribed(brokers(scripted))
    scripted.sessions[0].reply(PING, {})
    wait_until(lambda: scripted.asked_for(PONG))
    wait_until(lambda: len(scripted.asked_for(PING)) > 3)
    assert consumer.losses == 0, "a broker that answers stays"
    scripted.answers[PING] = lambda *_: None
    wait_until(lambda: consumer.losses)
    del scripted.answers[PING]
    wait_until(consumer.is_connected)


def test_an_answer_that_does_not_come_is_an_error_in_time(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    scripted.answers[SUBSCRIBE] = lambda *_: None
    began = time.monotonic()
    with pytest.raises(BrokerUnavailableError, match="did not answer"):
        subscribed(brokers(scripted, operation_timeout_ms=1_000))
    assert time.monotonic() - began < deadline(5)
    # It may hold the range by now.
    wait_until(lambda: scripted.asked_for(CLOSE_CONSUMER))


def test_a_consumer_that_a_frozen_broker_makes_after_its_end_is_closed_again(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    held: list[Fields] = []

    def close(session: Session, kind: int, fields: Fields) -> None:
        if held:
            session.reply(ERROR, {1: fields[2], 2: 0, 3: b"Consumer not found"})
            session.answer(SUBSCRIBE, held.pop())
        else:
            session.answer(kind, fields)

    scripted.answers[SUBSCRIBE] = lambda _, _kind, fields: held.append(fields)
    scripted.answers[CLOSE_CONSUMER] = close
    with pytest.raises(BrokerUnavailableError, match="did not answer"):
        subscribed(brokers(scripted, operation_timeout_ms=1_000))
    wait_until(lambda: len(scripted.asked_for(CLOSE_CONSUMER)) == 2)
    first, second = scripted.asked_for(CLOSE_CONSUMER)
    assert first[1] == second[1] == scripted.asked_for(SUBSCRIBE)[-1][4]


def test_a_broker_that_does_not_greet_is_an_error_in_time(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    scripted.answers[CONNECT] = lambda *_: None
    with pytest.raises(BrokerUnavailableError, match="does not answer"):
        subscribed(brokers(scripted, operation_timeout_ms=1_000))


def test_a_refused_connection_and_a_refused_range_are_distinguished(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    def conflict(session: Session, _: int, fields: Fields) -> None:
        session.reply(ERROR, {1: fields[5], 2: 19, 3: b"range is taken"})

    scripted.answers[SUBSCRIBE] = conflict
    with pytest.raises(RangeConflictError, match="range is taken"):
        subscribed(brokers(scripted))
    scripted.answers[CONNECT] = lambda session, *_: session.reply(
        ERROR, {1: 2**64 - 1, 2: 3, 3: b"bad token"}
    )
    with pytest.raises(AuthenticationError, match="bad token"):
        subscribed(brokers(scripted, authentication=Token("t")))


@pytest.mark.parametrize(
    ("code", "kind", "named"),
    [
        (0, BrokerUnavailableError, "it had an internal error"),
        (2, BrokerUnavailableError, "its storage fails"),
        (4, AuthorizationError, "consume"),
        (7, BrokerError, "ProducerBlockedQuotaExceededError: the backlog quota"),
        (8, BrokerError, "ProducerBlockedQuotaExceededException: the backlog quota"),
        (11, TopicNotFoundError, f"Create the topic (pulsar-admin topics create {TOPIC.topic})"),
        (12, SubscriptionNotFoundError, "SubscriptionNotFound"),
        (14, BrokerUnavailableError, "too many concurrent requests"),
        (15, BrokerError, "TopicTerminatedError"),
        (22, BrokerError, "NotAllowedError"),
        (99, BrokerError, "error 99"),
    ],
)
def test_each_refusal_of_a_broker_has_its_error(
    code: int, kind: type[BrokerError], named: str
) -> None:
    refused = RefusedError(code, b"own words")
    error = error_of(refused, "subscribe to", TOPIC, TOPIC.topic, "nobody")
    assert type(error) is kind
    assert named in error.message
    assert code in (4, 11) or "own words" in error.message


def test_a_topic_that_went_to_another_cluster_ends_its_consumers_by_name(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    broker = brokers(scripted, operation_timeout_ms=60_000)
    consumer, reader, other = (
        subscribed(broker),
        broker.reader(TOPIC, EntryId(7, 0)),
        subscribed(broker),
    )
    rung = threading.Event()
    consumer.when_ready(rung.set)
    (session,) = scripted.sessions
    for number in session.consumers[:2]:
        moved = {1: number, 2: 1, 3: b"pulsar://green:6650", 4: b"pulsar+ssl://green:6651"}
        session.reply(TOPIC_MIGRATED, moved)
    assert rung.wait(DEADLINE_S)
    with pytest.raises(TopicMigratedError, match="pulsar://green:6650"):
        consumer.receive(0)
    with pytest.raises(TopicMigratedError):
        reader.read(5_000)
    assert not consumer.is_connected()
    session.send_entry(1)
    assert other.receive(5_000), "the connection goes on"
    scripted.answers[SUBSCRIBE] = lambda session, _, fields: session.reply(
        TOPIC_MIGRATED, {1: fields[4], 2: 1}
    )
    with pytest.raises(TopicMigratedError, match="an unknown URL"):
        subscribed(broker)
    broker.close()


@pytest.mark.parametrize("garbage", [b"HTTP/1.1 400 Bad", b"\0\0\0\x04\xff\xff\xff\xff", b"\0" * 9])
def test_a_server_of_another_protocol_is_named(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker], garbage: bytes
) -> None:
    scripted.answers[CONNECT] = lambda session, *_: session.stream.sendall(garbage)
    with pytest.raises(BrokerUnavailableError, match="does not speak Pulsar's protocol"):
        subscribed(brokers(scripted, operation_timeout_ms=1_000))


def test_a_challenge_is_answered_with_the_newest_token(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker], tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("old")
    subscribed(brokers(scripted, authentication=Token(file=str(file))))
    assert scripted.asked_for(CONNECT)[0][3] == b"old"
    features = scripted.asked_for(CONNECT)[0][10]
    assert features == message({1: 1, 2: 1}), "it can be asked again, and reads broker times"
    file.write_text("new")
    scripted.sessions[0].reply(CHALLENGE, {2: message({1: b"token"})})
    wait_until(lambda: scripted.asked_for(RESPONSE))
    assert scripted.asked_for(RESPONSE)[0][2] == message({1: b"token", 2: b"new"})


def test_a_subscription_that_the_broker_ends_while_it_is_made_is_made_again(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    def ended_at_once(session: Session, kind: int, fields: Fields) -> None:
        scripted.answers.clear()
        session.reply(CLOSE_CONSUMER, {1: fields[4], 2: 0})
        session.answer(kind, fields)

    scripted.answers[SUBSCRIBE] = ended_at_once
    consumer = subscribed(brokers(scripted))
    assert len(scripted.asked_for(SUBSCRIBE)) == 2
    scripted.sessions[0].send_entry(3)
    assert [block.id.entry for block in consumer.receive(5_000)] == [3]


def test_a_connection_that_is_replaced_ends_with_its_last_consumer(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each renewal of credentials leaves a connection and a thread behind."""
    monkeypatch.setattr(connection_pool, "RETIRE_AGE_S", 0.0)
    broker = brokers(scripted)
    before: list[WireConnection] = []
    for renewals in range(4):
        first, second = subscribed(broker), subscribed(broker)
        at, _ = first.standing()
        assert at is not None
        assert len(scripted.sessions) == renewals + 1
        first._shared.pool.retire(at)
        first.close()
        assert second.is_connected(), "one that is in use stays"
        if renewals % 2:
            second.close()
        else:
            scripted.sessions[-1].end_consumers()
            wait_until(lambda: len(scripted.sessions) == renewals + 2)  # noqa: B023 - called at once
            wait_until(second.is_connected)
            second.close()
        before.append(at)
        wait_until(lambda: not before[-1].is_open)
    for one in before:
        one.join(DEADLINE_S)
        assert not one._thread.is_alive()


def test_a_look_at_partitions_that_finds_expired_credentials_shows_new_ones_next(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy refuses so, and leaves the connection open."""
    monkeypatch.setattr(connection_pool, "RETIRE_AGE_S", 0.0)

    def answer(session: Session, _: int, fields: Fields) -> None:
        expired = session is scripted.sessions[0]
        refusal: Fields = {2: fields[2], 3: 1, 4: 3, 5: b"Token expired"}
        session.reply(METADATA_RESPONSE, refusal if expired else {1: 2, 2: fields[2], 3: 0})

    scripted.answers[METADATA] = answer
    broker = brokers(scripted)
    consumer = subscribed(broker)
    with pytest.raises(AuthenticationError, match="Token expired"):
        broker.partitions(TOPIC.topic)
    assert len(broker.partitions(TOPIC.topic)) == 2
    assert consumer.is_connected()


@pytest.mark.parametrize("what", ["thread", "pipe"])
def test_a_connection_that_cannot_begin_leaves_nothing_open(
    scripted: ScriptedBroker, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    ends: list[int] = []
    sockets: list[socket.socket] = []

    def no_thread(*_: object, **__: object) -> None:
        raise ThreadStartError("no thread")

    def pipe(made: Callable[[], tuple[int, int]] = os.pipe) -> tuple[int, int]:
        if what == "pipe":
            raise OSError(24, "Too many open files")
        ends.extend(made())
        return ends[0], ends[1]

    def opened(*how: Any, made: Callable[..., socket.socket] = open_socket) -> Any:
        sockets.append(made(*how))
        return sockets[0]

    monkeypatch.setattr(connecting, "begin", no_thread)
    monkeypatch.setattr(connecting, "open_socket", opened)
    monkeypatch.setattr(os, "pipe", pipe)
    connection = Connection(scripted.url)
    address = Address("127.0.0.1", scripted.port)
    with pytest.raises(KeyShardError, match=r"no thread|Too many open files") as raised:
        WireConnection(address, connection, Credentials(connection), 5.0)
    assert isinstance(raised.value, ThreadStartError if ends else BrokerUnavailableError)
    assert sockets[0].fileno() == -1
    for end in ends:
        with suppress(OSError):  # another file may have its number by now
            assert not stat.S_ISFIFO(os.fstat(end).st_mode)


def test_a_broker_that_reads_nothing_is_given_up(
    scripted: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connecting, "UNSENT_BYTES_MAX", 100_000)
    held = threading.Event()
    scripted.answers[ACK] = lambda *_: held.wait(DEADLINE_S)
    connection = Connection(scripted.url)
    open_one = WireConnection(
        Address("127.0.0.1", scripted.port), connection, Credentials(connection), 5.0
    )
    ids = [api.MessageId(ledger=2**40, entry=2**40)] * 5_000
    many = api.Ack(consumer_id=1, ack_type=0, message_id=ids)

    def send_on() -> None:
        for _ in range(1_000):
            open_one.send("ack", many)

    with pytest.raises(BrokerUnavailableError, match="reads nothing"):
        send_on()
    held.set()


def test_unsent_bytes_are_sent_when_the_socket_takes_them(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes do not wait for the next keep-alive."""
    monkeypatch.setattr(ack_grouping, "WAITING_MAX", 10**6)
    monkeypatch.setattr(brokering, "CONFIRM_S", 0.1)
    consumer = subscribed(brokers(scripted), queue=2)
    held = threading.Event()
    scripted.answers[ACK] = lambda *_: held.wait(DEADLINE_S)
    for number in range(2):
        scripted.sessions[0].send_entry(number)
    wait_until(lambda: len(consumer._queue) == 2)
    ids = [EntryId(2**40, 2**40 + number) for number in range(5_000)]
    for _ in range(100):
        consumer.acknowledge(ids)
    assert len(consumer.receive(0)) == 2
    held.set()
    wait_until(lambda: len(scripted.asked_for(FLOW)) == 2)
    assert len(scripted.asked_for(ACK)) == 100
    assert consumer.losses == 0


def test_closing_while_the_broker_is_away_takes_no_time(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    broker = brokers(scripted)
    consumers = [subscribed(broker) for _ in range(5)]
    scripted.close()
    wait_until(lambda: not any(consumer.is_connected() for consumer in consumers))
    began = time.monotonic()
    broker.close()
    assert time.monotonic() - began < deadline(5)


def test_closing_ends_every_thread(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    before = set(threading.enumerate())
    for _ in range(20):
        broker = brokers(scripted)
        consumer = subscribed(broker)
        scripted.sessions[-1].cut()
        wait_until(lambda: consumer.losses)  # noqa: B023 - called at once
        wait_until(consumer.is_connected)
        broker.close()
        alive = [one for one in threading.enumerate() if one.name.startswith("keyshard-wire")]
        assert not set(alive) - before


def test_an_unexpected_error_of_a_reading_thread_ends_the_source_by_name(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread without an owner opens the connection."""
    errors: list[KeyShardError] = []
    with owned_by(errors.append):
        broker = brokers(scripted)
    broker.subscribe(
        SubscriptionSpec(TOPIC, "s", split_ring(1)[0], consumer_name="c", receiver_queue_size=10),
        StartPosition.EARLIEST,
    )

    def broken(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(WireConnection, "_take_all", broken)
    scripted.sessions[-1].reply(PING, {})
    wait_until(lambda: errors)
    assert isinstance(errors[0], UnexpectedError)
    assert "Thread keyshard-wire-127.0.0.1" in errors[0].message
