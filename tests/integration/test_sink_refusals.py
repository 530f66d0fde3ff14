"""Each refusal of a sink by a broker is a named error, also with TLS and tokens."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from http.server import HTTPServer
from typing import Any

import pyarrow as pa
import pytest

from keyshard import Connection, KeyShardSink, OAuth2, Token
from keyshard.broker.admin.http import AdminHttp
from keyshard.broker.port import PublishOptions
from keyshard.broker.wire.broker import WireBroker
from keyshard.config.connection import CLIENT
from keyshard.core.position.entry import TopicPartition, full_topic_name
from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import (
    AuthenticationError,
    AuthorizationError,
    BrokerUnavailableError,
    ConfigError,
    DeduplicationError,
    MessageTooLargeError,
    ProducerBusyError,
    QuotaExceededError,
    SchemaError,
    TopicNotFoundError,
)
from keyshard.testing.devbroker import DevBroker
from tests.integration.test_connection import SECRET, Issuer
from tests.support.deadlines import deadline, in_time
from tests.support.tested_pulsar import PULSAR

pytestmark = pytest.mark.broker
ROLE = "writer-app"
RIGHTS = ["produce", "consume"]
"""A batch that is new to the broker is looked for in the topic."""
BATCH = pa.record_batch({"value": [b"1", b"2"], "__key": ["a", "b"]})
RECORD = b'{"type":"record","name":"R","fields":[{"name":"a","type":"%s"}]}'


@pytest.fixture(scope="module")
def broker() -> Iterator[DevBroker]:
    settings = {
        "brokerDeduplicationEnabled": "true",
        "backlogQuotaCheckIntervalInSeconds": "1",
    }
    with DevBroker(PULSAR, tls=True, tokens=True, settings=settings) as made:
        yield made


@pytest.fixture
def topic(broker: DevBroker, topic_name: str) -> str:
    request(broker, "PUT", f"persistent/public/default/{topic_name}")
    return topic_name


def request(broker: DevBroker, method: str, path: str, body: object = None) -> None:
    with closing(AdminHttp(broker.connection)) as admin:
        answer = admin.request(method, f"/admin/v2/{path}", json=body)
        assert answer.is_success, answer.text


def closed_namespace(broker: DevBroker) -> str:
    """Make a namespace whose topics are not created by clients; return its name."""
    namespace = "public/closed"
    request(broker, "PUT", f"namespaces/{namespace}")
    request(
        broker, "POST", f"namespaces/{namespace}/autoTopicCreation",
        {"allowAutoTopicCreation": False},
    )  # fmt: skip
    return namespace


def sink(connection: Connection, topic: str, timeout_ms: int = 3_000) -> KeyShardSink:
    quick = replace(connection, operation_timeout_ms=timeout_ms)
    return KeyShardSink(topic, sink_id="s", connection=quick, send_timeout_ms=timeout_ms)


def test_a_role_with_the_permission_writes_and_one_without_is_named(
    broker: DevBroker, topic: str
) -> None:
    own = replace(broker.connection, authentication=Token(broker.signer.token(ROLE)))
    path = f"persistent/public/default/{topic}/permissions/{ROLE}"
    with sink(own, topic) as refused, pytest.raises(AuthorizationError) as caught:
        refused.write_batch(BATCH, 0)
    assert f"--role {ROLE} --actions produce,consume (a source" in caught.value.message
    request(broker, "POST", path, ["consume"])
    with sink(own, topic) as refused, pytest.raises(AuthorizationError) as caught:
        refused.write_batch(BATCH, 0)
    assert caught.value.facts["permission"] == "produce"
    request(broker, "POST", path, ["produce", "consume"])
    with sink(own, topic) as admitted:
        assert admitted.write_batch(BATCH, 0).entries == 2
        assert admitted.write_batch(BATCH, 0).already_stored == 2


def certified(broker: DevBroker, role: str) -> Connection:
    """A connection whose client certificate has the role."""
    certificate, key = broker.authority.certificate(role)
    return replace(
        broker.connection, authentication=None,
        tls_certificate_file_path=certificate, tls_key_file_path=key,
    )  # fmt: skip


def stored(broker: DevBroker, topic: str) -> int:
    """Number of stored entries."""
    with closing(AdminHttp(broker.connection)) as admin:
        path = f"/admin/v2/{full_topic_name(topic).replace('://', '/')}/internalStats"
        found = admin.request("GET", path).json()["numberOfEntries"]
        assert isinstance(found, int)
        return found


def publishes(connection: Connection, topic: str) -> None:
    """A sink stores a batch once, and a single message."""
    with sink(connection, topic) as admitted:
        assert admitted.write_batch(BATCH, 0).already_stored == 0
        assert admitted.write_batch(BATCH, 0).already_stored == 2
        assert admitted.send(b"3", key="a").result(deadline(10)).ledger >= 0


def refuses(
    connection: Connection, topic: str, error: type[AuthenticationError | AuthorizationError]
) -> None:
    """A sink fails at once, and by name, long before the deadline of its messages."""
    began_s = time.monotonic()
    refused = sink(connection, topic, 30_000)
    try:
        with pytest.raises(error):
            refused.write_batch(BATCH, 0)
        with pytest.raises(error):
            refused.send(b"3", key="a")
    finally:
        refused.close()
    in_time(began_s + deadline(10), "the refusal of a sink took longer")


def test_a_client_certificate_publishes_and_one_without_the_permission_is_named(
    broker: DevBroker, topic: str
) -> None:
    request(broker, "POST", f"persistent/public/default/{topic}/permissions/{ROLE}", RIGHTS)
    refuses(certified(broker, "somebody-else"), topic, AuthorizationError)
    assert stored(broker, topic) == 0
    publishes(certified(broker, ROLE), topic)
    assert stored(broker, topic) == 3


def test_a_wrong_token_stores_nothing(broker: DevBroker, topic: str) -> None:
    wrong = Token(f"{broker.signer.token(ROLE)[:-6]}AAAAAA")
    refuses(replace(broker.connection, authentication=wrong), topic, AuthenticationError)
    expired = Token(broker.signer.token(ROLE, -60))
    refuses(replace(broker.connection, authentication=expired), topic, AuthenticationError)
    assert stored(broker, topic) == 0


def test_client_credentials_of_an_issuer_publish_and_wrong_ones_are_named(
    broker: DevBroker, topic: str
) -> None:
    request(broker, "POST", f"persistent/public/default/{topic}/permissions/{ROLE}", RIGHTS)
    Issuer.token = broker.signer.token(ROLE)
    with HTTPServer(("127.0.0.1", 0), Issuer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        good = OAuth2(issuer_url=url, client_id="writer", client_secret=SECRET)
        bad = replace(good, client_secret="another")
        refuses(replace(broker.connection, authentication=bad), topic, AuthenticationError)
        assert stored(broker, topic) == 0
        publishes(replace(broker.connection, authentication=good), topic)
        assert stored(broker, topic) == 3
        server.shutdown()


def test_a_missing_topic_that_is_not_created_is_refused(broker: DevBroker) -> None:
    namespace = closed_namespace(broker)
    missing = sink(broker.connection, f"persistent://{namespace}/t")
    with missing, pytest.raises(TopicNotFoundError):
        missing.write_batch(BATCH, 0)


def test_a_schema_that_the_topic_does_not_admit_is_refused(broker: DevBroker, topic: str) -> None:
    where = TopicPartition(full_topic_name(topic))
    with closing(WireBroker(broker.connection)) as opened:
        first = PublishOptions(schema=TopicSchema("AVRO", RECORD % b"int"))
        opened.entry_producer(where, first).close()
        opened.entry_producer(where, first).close()
        other = PublishOptions(schema=TopicSchema("AVRO", RECORD % b"string"))
        with pytest.raises(SchemaError, match=topic):
            opened.entry_producer(where, other)


@pytest.mark.parametrize(
    ("policy", "refused", "remedy"),
    [
        (
            {"isAllowAutoUpdateSchema": False},
            {"topic": "new", "value_format": "avro", "register_schema": True},
            "set-is-allow-auto-update-schema --enable",
        ),
        (
            {"schemaValidationEnforced": True},
            {"topic": "known", "value_format": "raw"},
            "set-schema-validation-enforce --disable",
        ),
    ],
)
def test_a_namespace_that_restricts_schemas(
    broker: DevBroker, topic_name: str, policy: dict[str, bool], refused: dict[str, Any],
    remedy: str,
) -> None:  # fmt: skip
    """The refusal names the policy; rows with the schema of the topic are stored."""
    namespace = f"public/{topic_name}"
    request(broker, "PUT", f"namespaces/{namespace}")
    for name, value in policy.items():
        request(broker, "POST", f"namespaces/{namespace}/{name}", value)
    for topic in ("new", "known"):
        request(broker, "PUT", f"persistent/{namespace}/{topic}")
    body = {"type": "AVRO", "schema": (RECORD % b"int").decode(), "properties": {}}
    request(broker, "POST", f"schemas/{namespace}/known/schema", body)
    records = pa.record_batch({"a": pa.array([1, 2], pa.int32()), "__key": ["a", "b"]})

    def write(topic: str, value_format: Any, **options: Any) -> None:
        options |= {"sink_id": "s", "connection": broker.connection}
        with KeyShardSink(f"{namespace}/{topic}", value_format=value_format, **options) as made:
            made.write_batch(BATCH if value_format == "raw" else records, 0)

    with pytest.raises(SchemaError, match=f"{remedy} {namespace}"):
        write(**refused)
    write("known", "auto")


def test_a_sink_name_in_use_is_refused_until_it_is_free(broker: DevBroker, topic: str) -> None:
    with closing(WireBroker(broker.connection)) as opened:
        opened.entry_producer(TopicPartition(full_topic_name(topic)), PublishOptions("s-0"))
        with sink(broker.connection, topic) as second, pytest.raises(ProducerBusyError) as caught:
            second.write_batch(BATCH, 0)
        assert caught.value.retriable
    with sink(broker.connection, topic) as second:
        assert second.write_batch(BATCH, 0).already_stored == 0


def test_a_row_beyond_the_limit_of_the_broker_sends_nothing(broker: DevBroker, topic: str) -> None:
    large = pa.record_batch({"value": [b"1", bytes(6 << 20)], "__key": ["a", "b"]})
    with sink(broker.connection, topic) as refused:
        with pytest.raises(MessageTooLargeError, match="'b'"):
            replace_compression(refused, "none").write_batch(large, 0)
        assert refused.write_batch(BATCH, 0).already_stored == 0
        # It fits when it is compressed.
        assert refused.write_batch(large, 1).entries == 2


def replace_compression(one: KeyShardSink, compression: str) -> KeyShardSink:
    return KeyShardSink(
        one.topic, sink_id=one.sink_id, connection=one.connection,
        compression=compression,  # type: ignore[arg-type]
    )  # fmt: skip


def test_a_quota_that_is_exceeded_is_waited_for_and_named(broker: DevBroker) -> None:
    namespace = "public/full"
    request(broker, "PUT", f"namespaces/{namespace}")
    quota = {"limitSize": 1_000, "policy": "producer_request_hold"}
    request(broker, "POST", f"namespaces/{namespace}/backlogQuota", quota)
    path = f"persistent/{namespace}/t"
    request(broker, "PUT", path)
    request(broker, "PUT", f"{path}/subscription/s", {"ledgerId": -1, "entryId": -1})
    rows = pa.record_batch({"value": [bytes(2_000)], "__key": ["a"]})
    with sink(broker.connection, f"persistent://{namespace}/t") as full:
        end_s = time.monotonic() + deadline(60)
        refused: QuotaExceededError | None = None
        for batch_id in itertools.count():
            in_time(end_s, "the quota is not enforced")
            began_s = time.monotonic()
            try:
                full.write_batch(rows, batch_id)
            except QuotaExceededError as exc:
                refused = exc
                break
        assert refused is not None
        assert refused.retriable
        assert "the backlog quota is exceeded" in refused.message
        assert time.monotonic() - began_s > 2
        in_time(began_s + deadline(10), "the refusal of a write took longer")


@pytest.mark.parametrize("asks_admin", [True, False])
def test_a_namespace_without_deduplication_is_named_with_the_command(
    broker: DevBroker, asks_admin: bool
) -> None:
    namespace = f"public/plain-{asks_admin}".lower()
    request(broker, "PUT", f"namespaces/{namespace}")
    request(broker, "POST", f"namespaces/{namespace}/deduplication", body=False)
    request(broker, "PUT", f"persistent/{namespace}/t")
    topic = f"persistent://{namespace}/t"
    connection = broker.connection if asks_admin else replace(broker.connection, admin_url=None)
    with sink(connection, topic) as refused:
        with pytest.raises(DeduplicationError, match=f"set-deduplication {namespace} --enable"):
            refused.write_batch(BATCH, 0)
        # Without the admin interface, the first entry shows it.
        assert stored(broker, topic) == (0 if asks_admin else 1)
        # Single messages need none.
        refused.send(b"x", key="k").result(deadline(10))


def test_a_broker_that_is_not_there_is_named_in_time() -> None:
    away = sink(Connection("pulsar://127.0.0.1:1"), "t", 1_000)
    began_s = time.monotonic()
    with pytest.raises(BrokerUnavailableError):
        away.write_batch(BATCH, 0)
    in_time(began_s + deadline(5), "the refusal took longer")
    away.close()


def test_pulsar_client_is_refused_by_name(broker: DevBroker, topic: str) -> None:
    by_client = replace(broker.connection, transport=CLIENT)
    with sink(by_client, topic) as refused, pytest.raises(ConfigError, match="transport"):
        refused.write_batch(BATCH, 0)
