"""Sources and sinks at a broker that asks for a password, and that advertises two addresses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from keyshard import Basic, Connection, KeyShardSink, KeyShardSource
from keyshard.cli import main
from keyshard.errors import (
    AuthenticationError,
    AuthorizationError,
    BrokerError,
    BrokerUnavailableError,
)
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.devbroker.process import LOOPBACK, free_port
from keyshard.testing.verify.workloads import Workload, create_partitioned_topic, produce
from tests.support.deadlines import deadline
from tests.support.error_text import has_error_form

pytestmark = pytest.mark.broker

PASSWORD = "s3cr3t-of-nobody"
HASHED = "$apr1$keyshard$T34JY1Uea0FSxNH.YP2xU1"
"""``openssl passwd -apr1 -salt keyshard`` of it."""
ADMIN, GUEST = "ann", "guest"


class BasicBroker(DevBroker):
    """Knows two users by a file of htpasswd, and advertises two listeners.

    A standalone broker sends each client back to the URL of its request, whatever it advertises.
    So the name of the listener can be tested here, but not its address.
    """

    def __init__(self, folder: Path) -> None:
        users = folder / "htpasswd"
        users.write_text(f"{ADMIN}:{HASHED}\n{GUEST}:{HASHED}\n")
        port = free_port(set())
        far = free_port({port})
        java = "org.apache.pulsar"
        super().__init__(
            port=port,
            settings={
                "authenticationEnabled": "true",
                "authenticationProviders":
                    f"{java}.broker.authentication.AuthenticationProviderBasic",
                "basicAuthConf": users.as_uri(),
                "authorizationEnabled": "true",
                "superUserRoles": ADMIN,
                "brokerClientAuthenticationPlugin":
                    f"{java}.client.impl.auth.AuthenticationBasic",
                "brokerClientAuthenticationParameters":
                    json.dumps({"userId": ADMIN, "password": PASSWORD}),
                "advertisedAddress": "",
                "advertisedListeners":
                    f"near:pulsar://{LOOPBACK}:{port},far:pulsar://{LOOPBACK}:{far}",
                "internalListenerName": "near",
            },
        )  # fmt: skip

    @property
    def connection(self) -> Connection:
        return self.of(ADMIN)

    def of(self, user: str, password: str = PASSWORD) -> Connection:
        return replace(super().connection, authentication=Basic(user, password))


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BasicBroker]:
    broker = BasicBroker(tmp_path_factory.mktemp("users"))
    with broker:
        yield broker


@pytest.fixture
def topic(broker: BasicBroker, topic_name: str) -> str:
    create_partitioned_topic(broker.connection, topic_name, 2)
    produce(Workload(100, 10), broker.connection, topic_name)
    return topic_name


def source_at(connection: Connection, topic: str) -> KeyShardSource:
    return KeyShardSource(
        topic, subscription="billing", connection=connection, parallelism=4,
        starting_position="earliest",
    )  # fmt: skip


def rows_of(connection: Connection, topic: str) -> int:
    rows = 0
    with source_at(connection, topic).open() as stream:
        while rows < 100 and (batch := stream.next_batch(timeout_s=deadline(30))):
            rows += sum(part.num_rows for part in batch)
            stream.commit(batch)
    return rows


def refusal(connection: Connection, topic: str, kind: type[BrokerError]) -> str:
    text = ""
    for way in (connection, replace(connection, admin_url=None)):
        with pytest.raises(BrokerError) as caught:
            source_at(way, topic).open()
        text = str(caught.value)
        assert type(caught.value) is kind, text
        assert PASSWORD not in text
        assert has_error_form(text), text
    return text


def test_the_right_password_gets_everything(broker: BasicBroker, topic: str) -> None:
    assert rows_of(broker.of(ADMIN), topic) == 100


def test_a_wrong_password_names_the_user(broker: BasicBroker, topic: str) -> None:
    output = refusal(broker.of(ADMIN, "another"), topic, AuthenticationError)
    assert f"user {ADMIN!r}" in output


def test_a_user_without_permission_is_named(broker: BasicBroker, topic: str) -> None:
    assert GUEST in refusal(broker.of(GUEST), topic, AuthorizationError)


def test_a_sink_needs_the_password_of_a_user_with_permission(
    broker: BasicBroker, topic: str
) -> None:
    rows = pa.record_batch({"value": [b"1"], "__key": ["a"]})

    def write(connection: Connection) -> int:
        given: Any = {"connection": connection, "delivery_guarantee": "at-least-once"}
        with KeyShardSink(topic, **given) as sink:
            return sink.write_batch(rows, 0).entries

    assert write(broker.of(ADMIN)) == 1
    with pytest.raises(AuthenticationError, match=f"user {ADMIN!r}"):
        write(broker.of(ADMIN, "another"))
    with pytest.raises(AuthorizationError, match=GUEST):
        write(broker.of(GUEST))


def test_a_source_without_authentication_is_refused(broker: BasicBroker, topic: str) -> None:
    nobody = replace(broker.connection, authentication=None)
    assert "without authentication" in refusal(nobody, topic, AuthenticationError)


def test_commands_take_a_name_and_a_password(
    broker: BasicBroker, topic_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    basic = json.dumps({"userId": ADMIN, "password": PASSWORD})
    urls = ["--service-url", broker.service_url, "--admin-url", broker.admin_url]
    with pytest.raises(SystemExit) as caught:
        main(["produce", topic_name, "--messages", "10", *urls, "--auth-plugin", "basic",
              "--auth-params", basic])  # fmt: skip
    assert caught.value.code in (0, None), capsys.readouterr().err
    assert "Published 10 messages" in capsys.readouterr().out


@pytest.mark.parametrize("name", [None, "near", "far"])
def test_rows_arrive_with_each_listener_name_that_the_broker_knows(
    broker: BasicBroker, topic: str, name: str
) -> None:
    assert rows_of(replace(broker.connection, listener_name=name), topic) == 100


def test_a_listener_that_the_broker_does_not_know_is_named(broker: BasicBroker, topic: str) -> None:
    connection = replace(broker.connection, listener_name="nowhere", operation_timeout_ms=2_000)
    source = replace(source_at(connection, topic), subscribe_timeout_ms=1_000)
    with pytest.raises(BrokerUnavailableError, match="listener_name 'nowhere'"):
        source.open()
