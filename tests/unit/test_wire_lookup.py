"""The wire transport finds the owner of a topic, and names wrong addresses and answers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from keyshard.broker.auth.credentials import Credentials
from keyshard.broker.wire.broker import WireBroker
from keyshard.broker.wire.connection_pool import ConnectionPool
from keyshard.config.connection import Connection
from keyshard.errors import BrokerUnavailableError
from tests.support.answering_broker import (
    CONNECT,
    LOOKUP,
    LOOKUP_RESPONSE,
    METADATA,
    METADATA_RESPONSE,
    SUBSCRIBE,
    SUCCESS,
    TOPIC,
    Fields,
    ScriptedBroker,
    Session,
    subscribed,
)

pytestmark = pytest.mark.usefixtures("patient")


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
