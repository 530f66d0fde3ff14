"""Connections of the wire transport, against a scripted broker."""

from __future__ import annotations

import logging
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyshard.broker import framing
from keyshard.broker.auth.credentials import Credentials
from keyshard.broker.framing import FrameReader, ProtocolError
from keyshard.broker.port import ReadOptions, StartPosition, SubscriptionSpec
from keyshard.broker.wire import (
    ack_grouping,
    connection_pool,
    keep_alive,
    receiver_queue,
    stored_entry,
)
from keyshard.broker.wire import broker as brokering
from keyshard.broker.wire import connection as connecting
from keyshard.broker.wire import consumer as consuming
from keyshard.broker.wire.broker import WireBroker
from keyshard.broker.wire.connect import Address, open_socket
from keyshard.broker.wire.connection import WireConnection
from keyshard.broker.wire.connection_pool import ConnectionPool
from keyshard.broker.wire.consumer import WireConsumer
from keyshard.broker.wire.errors import RefusedError, error_of
from keyshard.broker.wire.frames import api, read_frames
from keyshard.broker.wire.permits import LENT_MAX
from keyshard.config.connection import Connection, Token
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.protobuf import Value, fields_of, message
from keyshard.core.ring.hash_range import split_ring
from keyshard.errors import (
    AuthenticationError,
    AuthorizationError,
    BrokerError,
    BrokerUnavailableError,
    CorruptEntryError,
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
from tests.support.deadlines import deadline
from tests.support.frame_broker.server import FrameServer, SocketSession
from tests.support.frame_broker.session import command_fields, framed_fields

CONNECT, CONNECTED, SUBSCRIBE, MESSAGE, ACK, FLOW, SUCCESS, ERROR = 2, 3, 4, 9, 10, 11, 13, 14
CLOSE_CONSUMER, PING, PONG, LOOKUP, LOOKUP_RESPONSE = 16, 18, 19, 23, 24
LAST_ID, LAST_ID_RESPONSE, CHALLENGE, RESPONSE, ACK_RESPONSE = 29, 30, 36, 37, 38
METADATA, METADATA_RESPONSE, TOPIC_MIGRATED = 21, 22, 68
DEADLINE_S = deadline(10)
TOPIC = TopicPartition("persistent://public/default/t")
Fields = dict[int, Value]


def entry(number: int, payload: bytes = b"v") -> bytes:
    """A message without a checksum."""
    metadata = message({1: b"p", 2: number, 3: 1, 6: b"k"})
    return struct.pack(">I", len(metadata)) + metadata + payload


class Session(SocketSession):
    """One connection; commands are fields by number, independent of the generated classes."""

    broker: ScriptedBroker

    def __init__(self, broker: ScriptedBroker, stream: socket.socket) -> None:
        super().__init__(broker, stream)
        self.consumers: list[int] = []

    def reply(self, kind: int, fields: Fields, stored: bytes = b"") -> None:
        self.put(framed_fields(kind, fields, stored))

    def send_entry(self, number: int, stored: bytes | None = None, consumer: int = -1) -> None:
        where = message({1: 7, 2: number})
        stored = entry(number) if stored is None else stored
        self.reply(MESSAGE, {1: self.consumers[consumer], 2: where}, stored)

    def end_consumers(self) -> None:
        """End all consumers, as a broker does that loses its topic."""
        for number in self.consumers:
            self.reply(CLOSE_CONSUMER, {1: number, 2: 0})

    def received(self, data: bytes) -> None:
        kind, fields = command_fields(data)
        self.broker.asked.append((kind, fields))
        self.broker.answers.get(kind, Session.answer)(self, kind, fields)

    def answer(self, kind: int, fields: Fields) -> None:
        """Answer as the owner of the topic."""
        if kind == CONNECT:
            self.reply(CONNECTED, {1: b"told", 2: 21, 3: 1_000_000})
        elif kind == PING:
            self.reply(PONG, {})
        elif kind == LOOKUP:
            self.reply(LOOKUP_RESPONSE, {1: self.broker.url.encode(), 3: 1, 4: fields[2], 5: 1})
        elif kind == SUBSCRIBE:
            number = fields[4]
            assert isinstance(number, int)
            self.consumers.append(number)
            self.reply(SUCCESS, {1: fields[5]})
        elif kind == ACK:
            self.reply(ACK_RESPONSE, {1: fields[1], 6: fields[8]})
        elif kind == CLOSE_CONSUMER:
            self.reply(SUCCESS, {1: fields[2]})
        elif kind == LAST_ID:
            self.reply(LAST_ID_RESPONSE, {1: message({1: 7, 2: 3}), 2: fields[2]})


class ScriptedBroker(FrameServer):
    """Answers with :attr:`answers`, else as a broker in good health."""

    session = Session

    def __init__(self) -> None:
        self.answers: dict[int, Callable[[Session, int, Fields], Any]] = {}
        self.asked: list[tuple[int, Fields]] = []
        super().__init__()

    def asked_for(self, kind: int) -> list[Fields]:
        return [fields for one, fields in self.asked if one == kind]


@pytest.fixture
def scripted() -> Iterator[ScriptedBroker]:
    broker = ScriptedBroker()
    yield broker
    broker.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count no broker as silent, however busy the machine is."""
    monkeypatch.setattr(consuming, "QUIET_S", 3_600.0)


@pytest.fixture
def brokers() -> Iterator[Callable[..., WireBroker]]:
    made: list[WireBroker] = []

    def make(
        scripted: ScriptedBroker, operation_timeout_ms: int = 10_000, **how: Any
    ) -> WireBroker:
        """Connect; the timeout is that of a quiet machine."""
        how["operation_timeout_ms"] = int(deadline(operation_timeout_ms))
        made.append(WireBroker(Connection(scripted.url, **how)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def subscribed(broker: WireBroker, queue: int = 10, queue_bytes: int | None = None) -> WireConsumer:
    return broker.subscribe(
        SubscriptionSpec(
            TOPIC,
            "s",
            split_ring(1)[0],
            consumer_name="c",
            receiver_queue_size=queue,
            receiver_queue_bytes=queue_bytes,
        ),
        StartPosition.LATEST,
    )


@given(st.lists(st.binary(min_size=4, max_size=50), max_size=6), st.data())
def test_frames_are_whole_however_they_are_split(frames: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(struct.pack(">I", len(one)) + one for one in frames)
    reader, found, position = FrameReader(100), [], 0
    while position < len(stream):
        size = data.draw(st.integers(1, len(stream) - position))
        found += reader.feed(stream[position : position + size])
        position += size
    assert found == frames


@given(st.binary(max_size=100))
def test_invalid_frames_are_an_error(data: bytes) -> None:
    with suppress(ProtocolError):
        for frame in FrameReader(50).feed(data):
            list(read_frames([frame]))


def test_an_invalid_size_is_refused_at_once() -> None:
    for size in (0, 3, 51, 2**32 - 1):
        with pytest.raises(ProtocolError):
            FrameReader(50).feed(struct.pack(">I", size))


def test_permits_are_given_back_as_entries_are_taken(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    consumer = subscribed(brokers(scripted))
    for number in range(5):
        scripted.sessions[0].send_entry(number)
    taken = 0
    while taken < 5:
        taken += len(consumer.receive(1_000))
    wait_until(lambda: len(scripted.asked_for(FLOW)) > 1)
    assert [fields[2] for fields in scripted.asked_for(FLOW)] == [10, 5]
    assert scripted.asked_for(SUBSCRIBE)[0][3] == 3


def test_a_silent_broker_gets_a_limited_number_of_extra_permits(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consuming, "QUIET_S", 0.01)
    monkeypatch.setattr(brokering, "NUDGE_LONGEST_WAIT_S", 0.02)
    consumer = subscribed(brokers(scripted))

    def granted() -> int:
        return sum(cast(int, fields[2]) for fields in scripted.asked_for(FLOW))

    used = 0
    for count in (0, 2, 1, 30):
        for number in range(used, used + count):
            scripted.sessions[0].send_entry(number)
            used += 1
            wait_until(lambda: consumer.receive(100))
            assert granted() <= 10 + used + LENT_MAX
        wait_until(lambda: granted() == 10 + used + LENT_MAX)  # noqa: B023 - called at once
        wait_until(lambda: not consumer._watched)
    assert granted() == 10 + used + LENT_MAX, "nobody asks for ever"
    before = granted()
    scripted.sessions[0].cut()
    # The new subscription begins with its queue.
    wait_until(lambda: granted() == before + 10 + LENT_MAX)


def test_a_broker_with_untaken_entries_gets_no_extra_permits(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consuming, "QUIET_S", 0.2)
    scripted.answers[FLOW] = lambda session, *_: session.send_entry(0)
    consumer = subscribed(brokers(scripted))
    wait_until(lambda: not consumer._watched)
    assert len(scripted.asked_for(FLOW)) < 1 + LENT_MAX
    assert consumer.receive(1_000)
    assert consumer._watched


def test_a_reader_asks_for_nothing_behind_the_last_entry_that_is_wanted(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    how = ReadOptions(10, last=EntryId(7, 12))
    reader = brokers(scripted).reader(TOPIC, EntryId(7, 0), how)
    (session,) = scripted.sessions

    def permits() -> int:
        return sum(cast("int", fields[2]) for fields in scripted.asked_for(FLOW))

    for number in range(13):
        wait_until(lambda: permits() > number)  # noqa: B023
        session.send_entry(number)
        assert next_of(reader.read) == number
    assert permits() <= 13 + 1


def test_entries_requested_before_the_last_ledger_may_all_come(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    reader = brokers(scripted).reader(
        TOPIC, EntryId(6, 0), ReadOptions(300, last=EntryId(7, 2), first=300)
    )
    (session,) = scripted.sessions
    session.send_entry(0)
    assert next_of(reader.read) == 0
    for number in range(1, 300):
        session.send_entry(number)
    taken = 1
    while taken < 300:
        taken += len(reader.read(5_000))
    assert reader.stayed_connected()
    assert scripted.asked_for(FLOW)[0][2] == 300


def test_a_reader_that_begins_behind_the_end_accepts_earlier_entries(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    reader = brokers(scripted).reader(
        TOPIC, EntryId(7, 900), ReadOptions(1_000, last=EntryId(7, 900), first=1_000)
    )
    (session,) = scripted.sessions
    session.send_entry(0)
    assert next_of(reader.read) == 0
    wait_until(lambda: [fields[2] for fields in scripted.asked_for(FLOW)] == [1, 900])
    for number in range(1, 900):
        session.send_entry(number)
    taken = 1
    while taken < 900:
        taken += len(reader.read(5_000))
    assert reader.stayed_connected()


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


def test_redirects_are_followed_with_their_authority(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    owner = ScriptedBroker()

    def redirect(session: Session, _: int, fields: Fields) -> None:
        session.reply(LOOKUP_RESPONSE, {1: owner.url.encode(), 3: 0, 4: fields[2], 5: 1})

    scripted.answers[LOOKUP] = redirect
    consumer = subscribed(brokers(scripted))
    assert [fields.get(3, 0) for fields in scripted.asked_for(LOOKUP)] == [0]
    assert [fields.get(3, 0) for fields in owner.asked_for(LOOKUP)] == [1]
    assert len(owner.asked_for(SUBSCRIBE)) == 1
    consumer.close()
    owner.close()


def test_a_circle_of_redirects_is_given_up(scripted: ScriptedBroker) -> None:
    def redirect(session: Session, _: int, fields: Fields) -> None:
        session.reply(LOOKUP_RESPONSE, {1: scripted.url.encode(), 3: 0, 4: fields[2]})

    scripted.answers[LOOKUP] = redirect
    connection = Connection(scripted.url)
    cluster = ConnectionPool(connection, Credentials(connection))
    with pytest.raises(BrokerUnavailableError, match="redirected the lookup"):
        for _ in cluster.path(TOPIC.name, 5.0):
            pass
    cluster.close(1.0)


@pytest.mark.parametrize(
    "url",
    [
        b"pulsar://:6650", b"pulsar://[::1", b"pulsar://broker:99999", b"pulsar://broker:x",
        b"pulsar://" + b"a" * 300 + b":6650", b"pulsar://a..b:6650", b"pulsar://a\0b:6650",
    ],
)  # fmt: skip
def test_an_invalid_address_of_an_owner_is_named(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker], url: bytes
) -> None:
    scripted.answers[LOOKUP] = lambda session, _, fields: session.reply(
        LOOKUP_RESPONSE, {1: url, 3: 1, 4: fields[2], 5: 1}
    )
    with pytest.raises(BrokerUnavailableError, match="which is not an address"):
        subscribed(brokers(scripted, operation_timeout_ms=1_000))


def test_an_answer_to_another_question_ends_the_connection(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    scripted.answers[LOOKUP] = lambda session, _, fields: session.reply(SUCCESS, {1: fields[2]})
    with pytest.raises(BrokerUnavailableError, match="'success' instead of 'lookup_response'"):
        subscribed(brokers(scripted, operation_timeout_ms=1_000))


@pytest.mark.parametrize("answers", [1, 1_000])
def test_an_absurd_number_of_partitions_is_an_error(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker], answers: int
) -> None:
    """Issue: a last attempt, which had no time for an answer, hid the reason."""

    def absurd(session: Session, _: int, fields: Fields) -> None:
        if len(scripted.asked_for(METADATA)) <= answers:
            session.reply(METADATA_RESPONSE, {1: 2**32 - 1, 2: fields[2], 3: 0})

    scripted.answers[METADATA] = absurd
    with pytest.raises(BrokerUnavailableError, match="reports 4294967295 partitions"):
        brokers(scripted, operation_timeout_ms=1_000).partitions(TOPIC.name)


def test_a_consumer_that_gets_more_than_its_permits_subscribes_again(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    broker = brokers(scripted)
    consumer, other = subscribed(broker, queue=10), subscribed(broker)
    for number in range(1_000):
        scripted.sessions[0].send_entry(number, consumer=0)
    scripted.sessions[0].send_entry(0, consumer=1)
    assert next_of(other.receive) == 0
    assert len(consumer._queue) <= 2 * 10 + 200
    taken: list[int] = []

    def anew() -> bool:
        taken.extend(block.id.entry for block in consumer.receive(0))
        return len(scripted.asked_for(SUBSCRIBE)) == 3 and consumer.is_connected()

    wait_until(anew)
    assert taken == list(range(len(taken)))
    assert (consumer.losses, other.losses) == (1, 0)
    scripted.sessions[0].send_entry(0, consumer=2)
    assert next_of(consumer.receive) == 0


@pytest.mark.parametrize("hidden", ["hidden:6650", "[fd00::7]:6650"])
def test_a_proxy_learns_which_broker_is_meant(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker], hidden: str
) -> None:
    def proxied(session: Session, _: int, fields: Fields) -> None:
        answer: Fields = {1: f"pulsar://{hidden}".encode(), 3: 1, 4: fields[2], 8: 1}
        session.reply(LOOKUP_RESPONSE, answer)

    scripted.answers[LOOKUP] = proxied
    subscribed(brokers(scripted))
    assert [fields.get(6) for fields in scripted.asked_for(CONNECT)] == [None, hidden.encode()]


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


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "8080 is the port of the admin interface"),
        (b"\x15\x03\x01\x00\x02\x02\x46", r"with TLS, it begins with pulsar\+ssl://"),
    ],
)
def test_the_first_look_up_names_a_mistake_in_the_service_url(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker], answer: bytes, hint: str
) -> None:
    scripted.answers[CONNECT] = lambda session, *_: session.stream.sendall(answer)
    with pytest.raises(BrokerUnavailableError, match=hint):
        brokers(scripted, operation_timeout_ms=1_000).partitions(TOPIC.name)


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


def test_a_lost_connection_drops_queued_entries_and_resends_acknowledgements(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ack_grouping, "SENT_AGAIN_WITHIN_S", DEADLINE_S)
    consumer = subscribed(brokers(scripted, operation_timeout_ms=1_000))
    rung = threading.Event()
    consumer.when_ready(rung.set)
    scripted.sessions[0].send_entry(0)
    assert rung.wait(DEADLINE_S)
    scripted.answers[SUBSCRIBE] = lambda *_: None
    scripted.sessions[0].cut()
    wait_until(lambda: consumer.losses)
    assert not consumer.is_connected()
    assert consumer.receive(10) == []
    consumer.acknowledge([EntryId(7, 5), EntryId(7, 6)])
    assert not scripted.asked_for(ACK)
    del scripted.answers[SUBSCRIBE]
    wait_until(consumer.is_connected)
    wait_until(lambda: len(scripted.asked_for(FLOW)) == 2)
    kinds = [kind for kind, _ in scripted.asked if kind in (SUBSCRIBE, ACK, FLOW)]
    assert kinds[-3:] == [SUBSCRIBE, ACK, FLOW], "before anything can come again"
    again = scripted.asked_for(SUBSCRIBE)[-1]
    assert again[13] == 1, "a subscription that was deleted begins at the earliest"
    scripted.sessions[-1].send_entry(0)
    assert [block.id for block in consumer.receive(5_000)] == [EntryId(7, 0)]


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


def test_a_corrupt_entry_is_named_where_it_lies_and_never_acknowledged(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    broker = brokers(scripted)
    consumer, reader = subscribed(broker), broker.reader(TOPIC, EntryId(7, 0))
    bad = b"\x0e\x01\0\0\0\0" + entry(1)
    for number, take in enumerate((consumer.receive, reader.read)):
        for entry_id, stored in enumerate([entry(0), bad, entry(2), bad, bad, entry(5)]):
            scripted.sessions[0].send_entry(entry_id, stored, number)
        found = [next_of(take) for _ in range(6)]
        assert found == [0, "7:1", 2, "7:3", "7:4", 5]
    broker.close()
    assert not scripted.asked_for(ACK)


def next_of(take: Callable[[int], list[EntryBlock]]) -> int | str:
    """Return the number of the next entry, or its id as text if it cannot be read."""
    try:
        (block,) = take(5_000)
    except CorruptEntryError as exc:
        return str(exc.message.split()[1])
    return block.id.entry


def test_late_entries_of_an_ended_subscription_are_dropped(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    consumer = subscribed(brokers(scripted))
    (session,) = scripted.sessions
    session.end_consumers()
    session.send_entry(8, consumer=0)
    wait_until(lambda: len(scripted.asked_for(FLOW)) == 2)
    session.send_entry(9, consumer=0)
    session.send_entry(1, consumer=1)
    assert next_of(consumer.receive) == 1
    assert consumer.receive(10) == []


def test_an_entry_that_was_found_corrupt_before_a_cut_comes_again_in_its_order(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    consumer = subscribed(brokers(scripted))
    for entry_id, stored in enumerate([entry(0), b"\x0e\x01\0\0\0\0" + entry(1)]):
        scripted.sessions[0].send_entry(entry_id, stored)
    wait_until(lambda: len(consumer._queue) == 2)
    assert next_of(consumer.receive) == 0
    scripted.sessions[0].cut()
    wait_until(lambda: consumer.losses and consumer.is_connected())
    scripted.sessions[1].send_entry(0)
    assert next_of(consumer.receive) == 0


def test_permits_of_a_corrupt_batch_are_given_back_as_the_broker_counts_them(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    consumer = subscribed(brokers(scripted))
    metadata = message({1: b"p", 2: 0, 3: 1, 11: 10})
    checksum_wrong = b"\x0e\x01\0\0\0\0" + struct.pack(">I", len(metadata)) + metadata
    scripted.sessions[0].send_entry(0, checksum_wrong)
    with pytest.raises(CorruptEntryError):
        wait_until(lambda: consumer.receive(5_000))
    wait_until(lambda: [fields[2] for fields in scripted.asked_for(FLOW)] == [10, 10])


def declaring(count: int) -> bytes:
    """A batch that declares to have messages, and has none."""
    metadata = message({1: b"p", 2: 0, 3: 1, 11: count % 2**64})
    return struct.pack(">I", len(metadata)) + metadata


@pytest.mark.parametrize(
    ("count", "grants"),
    [(2**31 - 1, [2**31 - 1, 4]), (2**31, [2**31 - 1, 5]), (2**32 - 3, []), (-1, [])],
)
def test_permits_follow_the_declared_size_of_a_batch_within_31_bits(
    count: int, grants: list[int], scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    """Ten messages ahead; a grant of more than 31 bits would end the connection of everybody."""
    consumer = subscribed(brokers(scripted))
    for number in range(4):
        scripted.sessions[0].send_entry(number)
        assert next_of(consumer.receive) == number
    scripted.sessions[0].send_entry(4, declaring(count))
    with pytest.raises(CorruptEntryError, match="declare"):
        wait_until(lambda: consumer.receive(5_000))
    scripted.sessions[0].send_entry(5)
    assert next_of(consumer.receive) == 5
    wait_until(lambda: len(scripted.asked_for(FLOW)) > len(grants))
    assert [fields[2] for fields in scripted.asked_for(FLOW)][1:] == grants
    assert not consumer.losses


def test_a_consumer_with_excess_permits_subscribes_again_and_no_other_is_lost(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    """The broker adds negative declared sizes of a batch to the permits."""
    broker = brokers(scripted)
    consumer, other = subscribed(broker), subscribed(broker)
    scripted.sessions[0].send_entry(0, declaring(-(2**30)), consumer=0)
    with pytest.raises(CorruptEntryError):
        wait_until(lambda: consumer.receive(5_000))
    assert consumer.receive(0) == []
    wait_until(lambda: len(scripted.asked_for(SUBSCRIBE)) == 3 and consumer.is_connected())
    assert len(scripted.asked_for(CLOSE_CONSUMER)) == 1
    assert (consumer.losses, other.losses) == (1, 0)
    scripted.sessions[0].send_entry(1, consumer=2)
    assert next_of(consumer.receive) == 1


def test_the_beginning_of_an_oversized_frame_is_kept(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry is unreadable, whatever the limit of the broker."""

    def connected(session: Session, _: int, __: Fields) -> None:
        session.reply(CONNECTED, {1: b"t", 2: 21, 3: 2**31 - 1})

    scripted.answers[CONNECT] = connected
    for module in (framing, stored_entry):
        monkeypatch.setattr(module, "KEPT_BYTES_MAX", 200_000)
    consumer = subscribed(brokers(scripted))
    (session,) = scripted.sessions
    sizes = [(0, 1), (1, 3_000_000), (2, 100_000), (3, 200_001), (4, 300_000), (5, 1)]
    for number, size in sizes:
        session.send_entry(number, entry(number, bytes(size)))
    found: list[int] = []
    refused: list[str] = []

    def taken() -> bool:
        try:
            found.extend(block.id.entry for block in consumer.receive(5_000))
        except CorruptEntryError as exc:
            refused.append(exc.message)
        return len(found) + len(refused) == len(sizes)

    wait_until(taken)
    assert found == [0, 2, 5]
    assert [one.split()[1] for one in refused] == ["7:1", "7:3", "7:4"]
    assert all("bytes, more than 200000" in one for one in refused)
    assert not consumer.losses


@given(st.data())
def test_the_beginning_of_large_frames_is_kept_however_they_are_split(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(4, 60), max_size=6))
    sent = [bytes([number]) * size for number, size in enumerate(sizes)]
    stream = b"".join(struct.pack(">I", len(one)) + one for one in sent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(framing, "KEPT_BYTES_MAX", 20)
        patch.setattr(framing, "HEAD_BYTES", 8)
        reader, found, position = FrameReader(100), [], 0
        while position < len(stream):
            size = data.draw(st.integers(1, len(stream) - position))
            found += reader.feed(stream[position : position + size])
            position += size
            assert len(reader._rest) <= 24
    assert found == [one if len(one) <= 20 else one[:8] for one in sent]


def test_a_consumer_that_takes_nothing_does_not_hold_up_another(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    broker = brokers(scripted)
    idle, busy = subscribed(broker), subscribed(broker)
    (session,) = scripted.sessions
    for number in range(10):
        session.send_entry(number, entry(number, bytes(500_000)), consumer=0)
    session.send_entry(99, consumer=1)
    assert [block.id.entry for block in busy.receive(5_000)] == [99]
    assert busy.last_entry() == EntryId(7, 3)
    assert idle.losses == busy.losses == 0


def test_many_entries_are_acknowledged_by_one_command_and_closing_comes_after_it(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    consumer = subscribed(brokers(scripted))
    consumer.acknowledge([EntryId(7, number) for number in range(500)])
    consumer.close()
    assert [kind for kind, _ in scripted.asked if kind in (ACK, CLOSE_CONSUMER)] == [
        ACK, CLOSE_CONSUMER,
    ]  # fmt: skip
    with pytest.raises(BrokerError):
        consumer.acknowledge([EntryId(7, 1)])


def test_an_acknowledgement_without_a_receipt_is_sent_again_with_the_next_subscription(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    """This also holds if the broker ends the subscription but not the connection."""
    consumer = subscribed(brokers(scripted))
    for number, lose in enumerate((Session.cut, Session.end_consumers)):
        scripted.answers[ACK] = lambda *_: None
        consumer.acknowledge([EntryId(7, number)])
        wait_until(lambda: len(scripted.asked_for(ACK)) == 2 * number + 1)  # noqa: B023 - called at once
        del scripted.answers[ACK]
        lose(scripted.sessions[-1])
        wait_until(lambda: len(scripted.asked_for(ACK)) == 2 * number + 2)  # noqa: B023 - called at once
        first, second = scripted.asked_for(ACK)[-2:]
        assert first[3] == second[3]
        assert first[1] != second[1]
        assert consumer.unconfirmed(DEADLINE_S) == 0
    assert len(scripted.sessions) == 2


def test_unconfirmed_acknowledgements_of_a_consumer_go_through_another(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    """Another consumer may have received the entry. Then the next one does not get it again."""

    def moving(session: Session, _: int, fields: Fields) -> None:
        session.reply(ERROR, {1: fields[5], 2: 6, 3: b"moving"})

    broker = brokers(scripted)
    ended, stays = (
        broker.subscribe(
            SubscriptionSpec(TOPIC, "s", hash_range, consumer_name="c", receiver_queue_size=10),
            StartPosition.EARLIEST,
        )
        for hash_range in split_ring(2)
    )
    first, second = scripted.sessions[-1].consumers
    scripted.answers[ACK] = lambda *_: None
    ended.acknowledge([EntryId(7, 0)])
    wait_until(lambda: scripted.asked_for(ACK))
    del scripted.answers[ACK]
    scripted.answers[SUBSCRIBE] = moving
    scripted.sessions[-1].reply(CLOSE_CONSUMER, {1: first, 2: 0})
    wait_until(lambda: ended.losses)
    ended.close(for_another=True)
    wait_until(lambda: len(scripted.asked_for(ACK)) == 2)
    one, again = scripted.asked_for(ACK)
    assert (one[1], again[1]) == (first, second)
    assert one[3] == again[3]
    assert stays.unconfirmed(DEADLINE_S) == 0


def test_acknowledgements_from_before_a_long_absence_are_not_sent_again(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the cluster was wiped meanwhile, other entries have the ids acknowledged before."""
    monkeypatch.setattr(ack_grouping, "SENT_AGAIN_WITHIN_S", 0.1, raising=False)

    def moving(session: Session, _: int, fields: Fields) -> None:
        session.reply(ERROR, {1: fields[5], 2: 6, 3: b"moving"})

    consumer = subscribed(brokers(scripted))
    scripted.answers[ACK] = lambda *_: None
    consumer.acknowledge([EntryId(7, 0)])
    wait_until(lambda: scripted.asked_for(ACK))
    del scripted.answers[ACK]
    scripted.answers[SUBSCRIBE] = moving
    scripted.sessions[0].cut()
    wait_until(lambda: consumer.losses)
    consumer.acknowledge([EntryId(7, 1)])
    time.sleep(0.15)
    del scripted.answers[SUBSCRIBE]
    wait_until(consumer.is_connected)
    assert consumer.unconfirmed(DEADLINE_S) == 0
    consumer.acknowledge([EntryId(7, 2)])
    assert consumer.unconfirmed(DEADLINE_S) == 0
    named = [fields_of(fields[3])[2] for fields in scripted.asked_for(ACK)]  # type: ignore[arg-type]
    assert named == [0, 2]


def test_closing_waits_for_receipts(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consuming, "CONFIRM_S", DEADLINE_S)
    may_answer = threading.Event()

    def answer(*what: Any) -> None:
        if may_answer.wait(DEADLINE_S):
            Session.answer(*what)

    scripted.answers[ACK] = answer
    consumer = subscribed(brokers(scripted))
    consumer.acknowledge([EntryId(7, 1)])
    closing = threading.Thread(target=consumer.close)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    may_answer.set()
    closing.join(DEADLINE_S)
    assert [kind for kind, _ in scripted.asked if kind in (ACK, CLOSE_CONSUMER)] == [
        ACK, CLOSE_CONSUMER,
    ]  # fmt: skip


def test_without_receipts_no_more_than_a_limit_is_acknowledged(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ack_grouping, "WAITING_MAX", 3)
    may_answer = threading.Event()

    def answer(*what: Any) -> None:
        if may_answer.wait(DEADLINE_S):
            Session.answer(*what)

    scripted.answers[ACK] = answer
    consumer = subscribed(brokers(scripted))
    consumer.acknowledge([EntryId(7, number) for number in range(4)])
    with pytest.raises(BrokerUnavailableError, match="not confirmed 4"):
        consumer.acknowledge([EntryId(7, 5)])
    may_answer.set()
    assert consumer.unconfirmed(DEADLINE_S) == 0
    consumer.acknowledge([EntryId(7, 5)])


def test_closing_names_acknowledgements_without_a_receipt(
    scripted: ScriptedBroker,
    brokers: Callable[..., WireBroker],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(brokering, "CONFIRM_S", 0.2)
    broker = brokers(scripted)
    one, other = subscribed(broker), subscribed(broker)
    one.acknowledge([EntryId(7, 1)])
    assert one.unconfirmed(DEADLINE_S) == 0
    scripted.answers[ACK] = lambda *_: None
    one.acknowledge([EntryId(7, 2), EntryId(7, 3)])
    other.acknowledge([EntryId(7, 4)])
    began = time.monotonic()
    broker.close()
    assert time.monotonic() - began < deadline(5)
    assert "not confirm the acknowledgement of 3 entries" in caplog.text
    assert len(scripted.asked_for(CLOSE_CONSUMER)) == 2, "in good order all the same"


def test_a_refused_acknowledgement_is_sent_again(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    refused = threading.Event()

    def refuse(session: Session, _: int, fields: Fields) -> None:
        del scripted.answers[ACK]
        session.reply(ACK_RESPONSE, {1: fields[1], 4: 2, 5: b"no bookie", 6: fields[8]})
        refused.set()

    scripted.answers[ACK] = refuse
    consumer = subscribed(brokers(scripted))
    consumer.acknowledge([EntryId(7, 1)])
    assert refused.wait(DEADLINE_S)
    wait_until(lambda: len(scripted.asked_for(ACK)) == 2)
    assert consumer.unconfirmed(DEADLINE_S) == 0


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


def test_permits_begin_with_one_message_and_grow_with_measured_sizes(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    consumer = subscribed(brokers(scripted), queue=10, queue_bytes=1 << 20)
    for sent, permits in enumerate(([1], [1, 2], [1, 2, 3], [1, 2, 3, 5])):
        wait_until(lambda: [fields[2] for fields in scripted.asked_for(FLOW)] == permits)  # noqa: B023
        scripted.sessions[-1].send_entry(sent)
        assert consumer.receive(5_000)
    scripted.sessions[-1].cut()
    wait_until(lambda: scripted.asked_for(FLOW)[-1][2] == 10)


def test_large_messages_are_sent_ahead_one_by_one(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker]
) -> None:
    consumer = subscribed(brokers(scripted), queue=1_000, queue_bytes=100_000)
    for number in range(5):
        scripted.sessions[-1].send_entry(number, entry(number, bytes(90_000)))
        assert consumer.receive(5_000)
    wait_until(lambda: [fields[2] for fields in scripted.asked_for(FLOW)] == [1] * 6)


def test_entries_beyond_the_memory_of_a_queue_are_dropped_and_requested_again(
    scripted: ScriptedBroker, brokers: Callable[..., WireBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Small messages let a queue of 100 KB grow. 2. All of a sudden each message has 90 KB."""
    monkeypatch.setattr(receiver_queue, "EXCESS_BYTES_MAX", 200_000)
    consumer = subscribed(brokers(scripted), queue=1_000, queue_bytes=100_000)
    sent = 0
    for _ in range(8):
        scripted.sessions[-1].send_entry(sent)
        sent += 1
        assert consumer.receive(5_000)
    for number in range(sent, sent + 100):
        scripted.sessions[-1].send_entry(number, entry(number, bytes(90_000)))
    wait_until(lambda: consumer._queue.overflown)
    assert consumer._queue.held_bytes < 500_000
    assert not consumer.has_given_all()
    came = []
    while not consumer.losses:
        came += [block.id.entry for block in consumer.receive(100)]
    assert came == list(range(sent, sent + len(came)))
    wait_until(consumer.is_connected)
    assert scripted.asked_for(CLOSE_CONSUMER)
    # As many as fit of such messages.
    wait_until(lambda: scripted.asked_for(FLOW)[-1][2] == 1)
    assert consumer._shared.excess.bytes == 0


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
