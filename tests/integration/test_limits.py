"""A limit of a real broker is an error of its own, told within seconds, with its remedy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any

import pulsar
import pyarrow as pa
import pytest
import tenacity

from keyshard import KeyShardSink, KeyShardSource, RetryPolicy
from keyshard.broker.admin.http import AdminHttp
from keyshard.config.connection import CLIENT
from keyshard.core.position.entry import full_topic_name
from keyshard.errors import KeyShardError, LimitReachedError, SubscriptionInUseError
from keyshard.testing.devbroker import DevBroker
from tests.helpers import wait_until
from tests.support.deadlines import deadline, in_time
from tests.support.tested_pulsar import PULSAR

pytestmark = pytest.mark.broker

SOON_S = deadline(12)
"""Longest time until a limit is named, seconds."""
HOUR_MS = 3_600_000
"""``subscribe_timeout_ms`` that a test cannot wait for."""
BATCH = pa.record_batch({"value": [b"1", b"2"], "__key": ["a", "b"]})
BROKER_LIMIT = 5
"""``maxSameAddressConsumersPerTopic`` and ``maxConsumersPerSubscription`` of the broker."""


@pytest.fixture(scope="module")
def broker() -> Iterator[DevBroker]:
    settings = {
        "brokerDeduplicationEnabled": "true",
        "maxSameAddressProducersPerTopic": "3",
        "maxConsumersPerSubscription": str(BROKER_LIMIT),
    }
    with DevBroker(PULSAR, settings=settings) as made:
        yield made


@pytest.fixture
def client(broker: DevBroker) -> Iterator[pulsar.Client]:
    made = pulsar.Client(broker.service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    yield made
    made.close()


def request(broker: DevBroker, method: str, path: str, body: object = None) -> None:
    with closing(AdminHttp(broker.connection)) as admin:
        answer = admin.request(method, f"/admin/v2/{path}", json=body)
        assert answer.is_success, answer.text


def limited(broker: DevBroker, name: str, **policies: int) -> str:
    """Make a namespace with limits, and a topic in it; return the topic."""
    namespace = f"public/{name}"
    request(broker, "PUT", f"namespaces/{namespace}")
    for policy, limit in policies.items():
        request(broker, "POST", f"namespaces/{namespace}/{policy}", limit)
    request(broker, "PUT", f"persistent/{namespace}/t")
    return f"persistent://{namespace}/t"


def source(broker: DevBroker, topic: str, **options: Any) -> KeyShardSource:
    without_admin = replace(broker.connection, admin_url=None)
    return KeyShardSource(
        topic,
        subscription=options.pop("subscription", "s"),
        connection=options.pop("connection", without_admin),
        starting_position=options.pop("starting_position", "earliest"),
        subscribe_timeout_ms=options.pop("subscribe_timeout_ms", HOUR_MS),
        **options,
    )


def refused(call: Callable[[], object], kind: type[KeyShardError] = LimitReachedError) -> str:
    began_s = time.monotonic()
    with pytest.raises(kind) as caught:
        call()
    in_time(began_s + SOON_S, "the refusal took longer")
    return caught.value.message


def opened(one: KeyShardSource) -> Callable[[], object]:
    def call() -> None:
        with one.open():
            pass

    return call


@contextmanager
def subscribed(client: pulsar.Client, topic: str, subscription: str) -> Iterator[None]:
    consumer = client.subscribe(topic, subscription)
    yield
    consumer.close()


@contextmanager
def three_others(client: pulsar.Client, topic: str) -> Iterator[None]:
    """Consumers of other applications, as many as the limit of a topic.

    If one place were left, a broker might admit several consumers that subscribe at once.
    """
    with ExitStack() as stack:
        for name in ("other-app", "second-app", "third-app"):
            stack.enter_context(subscribed(client, topic, name))
        yield


@pytest.mark.parametrize("with_admin", [False, True])
@pytest.mark.parametrize(
    ("policy", "command"),
    [
        ("maxConsumersPerTopic", "namespaces set-max-consumers-per-topic -c NUMBER public/"),
        (
            "maxConsumersPerSubscription",
            "namespaces set-max-consumers-per-subscription -c NUMBER public/",
        ),
    ],
)
def test_a_parallelism_above_a_limit_names_the_limit(
    broker: DevBroker, topic_name: str, policy: str, command: str, with_admin: bool
) -> None:
    """Issue: the start tried for 20 s, and then said to stop the other query."""
    topic = limited(broker, topic_name, **{policy: 2})
    connection = broker.connection if with_admin else replace(broker.connection, admin_url=None)
    text = refused(opened(source(broker, topic, parallelism=6, connection=connection)))
    assert policy in text
    assert command + topic_name in text
    assert ("it is 2" if with_admin else "reached max consumers limit") in text
    if with_admin:
        with closing(AdminHttp(broker.connection)) as admin:
            path = f"/admin/v2/{topic.replace('://', '/')}/subscriptions"
            assert admin.request("GET", path).json() == [], "nothing was created"


def test_a_limit_of_the_broker_is_named_also_to_handlers(
    broker: DevBroker, topic_name: str
) -> None:
    topic = limited(broker, topic_name)
    text = refused(lambda: source(broker, topic, parallelism=8).run(print))
    assert "maxConsumersPerSubscription in broker.conf" in text
    connection = broker.connection
    text = refused(opened(source(broker, topic, parallelism=8, connection=connection)))
    assert f"it is {BROKER_LIMIT}" in text


@pytest.mark.parametrize("with_admin", [False, True])
def test_consumers_of_another_application_are_named_beside_the_limit(
    broker: DevBroker, client: pulsar.Client, topic_name: str, with_admin: bool
) -> None:
    topic = limited(broker, topic_name, maxConsumersPerTopic=3)
    connection = broker.connection if with_admin else replace(broker.connection, admin_url=None)
    with three_others(client, topic):
        one = source(broker, topic, parallelism=3, connection=connection)
        text = refused(opened(one))
    assert "Topic reached max consumers limit" in text
    assert "keyshard opens 3 consumers" in text
    assert ("1 of subscription 'other-app' (" in text) is with_admin
    opened(one)()


def test_with_pulsar_client_only_the_admin_interface_names_the_limit(
    broker: DevBroker, client: pulsar.Client, topic_name: str
) -> None:
    """pulsar-client drops the text of the broker's error, which names the limit."""
    topic = limited(broker, topic_name, maxConsumersPerTopic=3)
    hidden = replace(broker.connection, transport=CLIENT, admin_url=None)
    seen = replace(broker.connection, transport=CLIENT)
    with three_others(client, topic):
        options: dict[str, Any] = {"parallelism": 3, "subscribe_timeout_ms": 2_000}
        text = refused(opened(source(broker, topic, connection=seen, **options)))
        assert "maxConsumersPerTopic" in text
        assert "1 of subscription 'other-app' (" in text
        text = refused(
            opened(source(broker, topic, connection=hidden, **options)), SubscriptionInUseError
        )
        assert "or a limit of consumers is reached" in text


def test_a_bounded_read_names_the_limits_that_its_readers_meet(
    broker: DevBroker, client: pulsar.Client, topic_name: str
) -> None:
    topic = limited(broker, f"{topic_name}-c", maxConsumersPerTopic=1)
    other = limited(broker, f"{topic_name}-s", maxSubscriptionsPerTopic=1)
    for name, sign in (topic, "maxConsumersPerTopic"), (other, "maxSubscriptionsPerTopic"):
        producer = client.create_producer(name)
        producer.send(b"x", partition_key="k")
        producer.close()
        read = KeyShardSource(name, connection=broker.connection).read
        with subscribed(client, name, "other-app"):
            assert sign in refused(lambda read=read: list(read()))  # type: ignore[misc]


def test_a_limit_of_subscriptions_names_its_command(
    broker: DevBroker, client: pulsar.Client, topic_name: str
) -> None:
    topic = limited(broker, topic_name, maxSubscriptionsPerTopic=1)
    with subscribed(client, topic, "other-app"):
        for position in "earliest", "2020-01-01T00:00:00Z":
            one = source(
                broker, topic, parallelism=2, connection=broker.connection,
                starting_position=position,
            )  # fmt: skip
            assert "set-max-subscriptions-per-topic -m NUMBER" in refused(opened(one))


def test_a_sink_names_the_limits_of_producers_and_topics(
    broker: DevBroker, client: pulsar.Client, topic_name: str
) -> None:
    """Issue: the sink said that another program used its sink id."""
    topic = limited(broker, topic_name, maxProducersPerTopic=2, maxTopicsPerNamespace=1)

    def sink(name: str) -> KeyShardSink:
        return KeyShardSink(name, sink_id="s", connection=broker.connection)

    with sink(topic) as one:
        assert one.write_batch(BATCH, 0).entries == 2
    producers = [client.create_producer(topic) for _ in range(2)]
    for act in (
        lambda one: one.write_batch(BATCH, 1),
        lambda one: one.send(b"x", key="k").result(),
    ):
        with sink(topic) as one:
            text = refused(lambda act=act, one=one: act(one))  # type: ignore[misc]
        assert "set-max-producers-per-topic -p NUMBER" in text
        with sink(f"{topic}-new") as one:
            text = refused(lambda act=act, one=one: act(one))  # type: ignore[misc]
        assert "set-max-topics-per-namespace -t NUMBER" in text
    for producer in producers:
        producer.close()
    plain = f"{full_topic_name(topic_name)}-plain"
    producers = [client.create_producer(plain) for _ in range(3)]
    with sink(plain) as one:
        text = refused(lambda: one.write_batch(BATCH, 0))
    assert "maxSameAddressProducersPerTopic in broker.conf" in text
    assert "org.apache" not in text
    for producer in producers:
        producer.close()


def test_a_dead_letter_topic_beyond_the_limit_of_topics_ends_the_source_by_name(
    broker: DevBroker, client: pulsar.Client, topic_name: str
) -> None:
    topic = limited(broker, topic_name, maxTopicsPerNamespace=1)
    producer = client.create_producer(topic)
    producer.send(b"x", partition_key="k")
    producer.close()

    def fail(message: object) -> None:
        raise ValueError("no")

    one = source(broker, topic, parallelism=1)
    text = refused(lambda: one.run(fail, retry=RetryPolicy(stop=tenacity.stop_after_attempt(1))))
    assert "set-max-topics-per-namespace -t NUMBER" in text


def test_a_limit_that_comes_while_a_source_runs_is_retried_and_named(
    broker: DevBroker, client: pulsar.Client, topic_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A reconnect that meets the limit goes on, as it does when another consumer has the range."""
    topic = limited(broker, topic_name)
    handled: list[Any] = []
    one = source(broker, topic, parallelism=4)
    run = threading.Thread(target=lambda: one.run(lambda message: handled.append(message.value)))
    run.start()
    producer = client.create_producer(topic)
    producer.send(b"first", partition_key="k")
    wait_until(lambda: handled == [b"first"])
    request(broker, "POST", f"namespaces/public/{topic_name}/maxConsumersPerTopic", 2)
    request(broker, "PUT", f"namespaces/public/{topic_name}/unload")
    wait_until(lambda: "maxConsumersPerTopic" in caplog.text)
    wait_until(lambda: "maxConsumersPerTopic" in str(one.status()))
    assert run.is_alive()
    request(broker, "DELETE", f"namespaces/public/{topic_name}/maxConsumersPerTopic")
    for key in "abcdefgh":
        producer.send(key.encode(), partition_key=key)
    wait_until(lambda: len(handled) == 9)
    one.stop()
    run.join()
    producer.close()
