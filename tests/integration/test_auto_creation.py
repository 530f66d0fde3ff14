"""Topics and subscriptions where a broker creates none by itself, or creates topics partitioned."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest

from keyshard import KeyShardSource, Message, Reject
from keyshard.broker.connect import connect
from keyshard.config.connection import CLIENT
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.errors import (
    KeyShardError,
    SubscriptionNotFoundError,
    TopicNotFoundError,
)
from keyshard.testing.devbroker import DevBroker
from tests.helpers import wait_until
from tests.support.deadlines import deadline, joined

pytestmark = pytest.mark.broker

MESSAGES = 5
NO_TOPICS = {"autoTopicCreation": {"allowAutoTopicCreation": False}}
NO_SUBSCRIPTIONS = {"autoSubscriptionCreation": {"allowAutoSubscriptionCreation": False}}
PARTITIONED = {
    "autoTopicCreation": {
        "allowAutoTopicCreation": True, "topicType": "partitioned", "defaultNumPartitions": 3,
    }
}  # fmt: skip


class Namespace:
    """A namespace with policies, and a topic with messages that every handler rejects."""

    def __init__(self, broker: DevBroker, api: httpx.Client, name: str) -> None:
        self.broker, self.api = broker, api
        self.path = f"public/{name}"
        self.topic = f"persistent://{self.path}/in"
        self.letters = f"persistent://{self.path}/letters"
        self.calls = 0
        api.put(f"namespaces/{self.path}").raise_for_status()
        api.put(f"persistent/{self.path}/in").raise_for_status()
        with closing(connect(broker.connection)) as client:
            producer = client.producer(TopicPartition(self.topic), send_timeout_ms=10_000)
            for number in range(MESSAGES):
                producer.send(b"%d" % number, key=f"k{number}")
            producer.close()

    def admit(self, policies: dict[str, Any]) -> None:
        for name, policy in policies.items():
            self.api.post(f"namespaces/{self.path}/{name}", json=policy).raise_for_status()

    def subscribe(self, topic: str, name: str) -> None:
        path = f"persistent/{self.path}/{topic}/subscription/{name}"
        self.api.put(path, json="earliest").raise_for_status()

    def topics(self) -> set[str]:
        plain = self.api.get(f"persistent/{self.path}").json()
        parted = self.api.get(f"persistent/{self.path}/partitioned").json()
        return {name.rpartition("/")[2] for name in [*plain, *parted]}

    def backlog(self, topic: str, subscription: str) -> int:
        """Unacknowledged messages; -1 without topic or subscription."""
        stats = self.api.get(f"persistent/{self.path}/{topic}/stats").json()
        found = stats.get("subscriptions", {}).get(subscription)
        return -1 if found is None else int(found["msgBacklog"])

    def source(self, **options: Any) -> KeyShardSource:
        return KeyShardSource(
            self.topic, subscription="s", starting_position="earliest",
            **{
                "service_url": self.broker.service_url,
                "admin_url": self.broker.admin_url,
                **options,
            },
        )  # fmt: skip

    def rejected(self, message: Message) -> None:
        self.calls += 1
        raise Reject(str(message.message_id))

    def refused(self, error: type[KeyShardError], **options: Any) -> str:
        """Run a handler; return the error at its start. Nothing is handled or acknowledged."""
        with pytest.raises(error) as caught:
            self.source(**options).run(self.rejected, dead_letter_topic=self.letters)
        assert self.calls == 0
        return caught.value.message

    def run_rejects_all(self, **options: Any) -> None:
        """Run a handler until all messages are dead letters."""
        source = self.source(**options)
        thread = threading.Thread(
            target=lambda: source.run(self.rejected, dead_letter_topic=self.letters)
        )
        thread.start()
        try:
            wait_until(lambda: self.backlog("letters", "s-parked") == MESSAGES, deadline(30))
        finally:
            source.stop()
            joined(thread, deadline(30))


@pytest.fixture
def namespace(dev_broker: DevBroker, topic_name: str) -> Iterator[Namespace]:
    with httpx.Client(base_url=f"{dev_broker.admin_url}/admin/v2/", timeout=deadline(20)) as api:
        yield Namespace(dev_broker, api, topic_name)


WAYS = pytest.mark.parametrize(
    "options",
    [{}, {"admin_url": None}, {"transport": CLIENT}],
    ids=["admin", "without admin", "client"],
)


@WAYS
def test_a_dead_letter_topic_has_no_partitions_where_new_topics_have(
    namespace: Namespace, options: dict[str, Any]
) -> None:
    namespace.admit(PARTITIONED)
    namespace.run_rejects_all(**options)
    assert namespace.topics() == {"in", "letters"}


@WAYS
def test_a_dead_letter_topic_that_no_broker_creates_is_named_at_the_start(
    namespace: Namespace, options: dict[str, Any]
) -> None:
    namespace.admit(NO_TOPICS)
    said = namespace.refused(TopicNotFoundError, **options)
    assert f"dead-letter topic {namespace.letters}" in said
    assert "auto-creation" in said
    assert f"pulsar-admin topics create {namespace.letters}" in said
    assert namespace.backlog("in", "s") == MESSAGES
    assert namespace.topics() == {"in"}
    namespace.api.put(f"persistent/{namespace.path}/letters").raise_for_status()
    namespace.run_rejects_all(**options)


def test_the_subscription_of_dead_letters_is_named_before_anything_is_created(
    namespace: Namespace,
) -> None:
    namespace.subscribe("in", "s")
    namespace.admit(NO_SUBSCRIPTIONS)
    said = namespace.refused(SubscriptionNotFoundError)
    command = "pulsar-admin topics create-subscription --subscription s-parked"
    assert f"{command} --messageId earliest {namespace.letters}" in said
    assert namespace.topics() == {"in"}
    assert namespace.backlog("in", "s") == MESSAGES
    namespace.api.put(f"persistent/{namespace.path}/letters").raise_for_status()
    namespace.subscribe("letters", "s-parked")
    namespace.run_rejects_all()


def test_a_subscription_of_a_source_that_no_broker_creates_is_named(namespace: Namespace) -> None:
    namespace.admit(NO_SUBSCRIPTIONS)
    said = namespace.refused(SubscriptionNotFoundError)
    command = "pulsar-admin topics create-subscription --subscription s --messageId earliest"
    assert f"{command} {namespace.topic}" in said
    assert namespace.topics() == {"in"}
    namespace.subscribe("in", "s")
    with namespace.source().open():
        assert namespace.topics() == {"in"}


@WAYS
def test_a_look_up_and_a_reader_create_no_topic(
    namespace: Namespace, options: dict[str, Any]
) -> None:
    namespace.admit(PARTITIONED)
    missing = TopicPartition(f"persistent://{namespace.path}/missing")
    with closing(connect(namespace.source(**options).how_to_connect())) as client:
        assert client.partitions(missing.topic) == (missing,)
        with pytest.raises(TopicNotFoundError):
            client.reader(missing, EntryId(0, 0))
    assert namespace.topics() == {"in"}
