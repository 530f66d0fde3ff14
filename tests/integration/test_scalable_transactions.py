"""Entries of a parent that come late or never, on a real broker of Pulsar 5.

Children wait for entries of open transactions and for delayed messages. Entries of aborted
transactions, and those that another client acknowledged, never come.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import pytest

from keyshard import KeyShardSource, Message
from keyshard.broker.port import PublishOptions, StartPosition, SubscriptionSpec
from keyshard.broker.wire.broker import WireBroker
from keyshard.columns.outgoing import OutgoingMessage
from keyshard.config.connection import Connection
from keyshard.core.ring.hash_range import split_ring
from keyshard.testing.devbroker import DevBroker
from tests.helpers import wait_until
from tests.support.deadlines import deadline, in_time
from tests.support.java_client import JavaClient
from tests.support.scalable_topic import ScalableTopic
from tests.support.tested_pulsar import PULSAR

pytestmark = [
    pytest.mark.broker,
    pytest.mark.skipif(int(PULSAR.split(".")[0]) < 5, reason="needs scalable topics"),
]
END_S = deadline(60)
DELAY_MS = 10_000


@pytest.fixture(scope="module")
def broker() -> Iterator[DevBroker]:
    with DevBroker(PULSAR, settings={"transactionCoordinatorEnabled": "true"}) as made:
        yield made


@pytest.fixture(scope="module")
def java(broker: DevBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JavaClient]:
    with closing(JavaClient(broker.service_url, tmp_path_factory.mktemp("java") / "log")) as made:
        yield made


@pytest.fixture
def topic(broker: DevBroker) -> Iterator[ScalableTopic]:
    with closing(ScalableTopic(broker)) as made:
        yield made


class Handled:
    """A handler that notes values in order, and its source."""

    def __init__(self, broker: DevBroker, topic: ScalableTopic, folder: Path) -> None:
        self._checkpoint = f"file://{folder / 'checkpoint.json'}"
        self._lock = threading.Lock()
        self.got: list[str] = []
        self.source = KeyShardSource(
            topic.name, subscription="handled", service_url=broker.service_url,
            admin_url=broker.admin_url, starting_position="earliest", parallelism=3,
            discovery_interval_ms=1_000,
        )  # fmt: skip

    def running(self) -> AbstractContextManager[KeyShardSource]:
        return self.source.running(self.handle, checkpoint=self._checkpoint)

    def handle(self, message: Message) -> None:
        with self._lock:
            self.got.append((message.value or b"").decode())

    def waiting(self) -> int:
        window = self.source.status()["window"]
        assert window is not None
        return window["segmentsWaiting"]

    def wait_for(self, topic: ScalableTopic) -> None:
        wait_until(lambda: len(self.got) >= len(topic.sent), END_S)
        topic.check(self.got)


@pytest.mark.parametrize("ends", ["commit", "abort"])
def test_children_wait_for_an_open_transaction_in_their_parent(
    broker: DevBroker, topic: ScalableTopic, java: JavaClient, tmp_path: Path, ends: str
) -> None:
    handled = Handled(broker, topic, tmp_path)
    v5: Any = java.jvm.org.apache.pulsar.client.api.v5
    policy = v5.config.TransactionPolicy.builder().timeout(java.jvm.java.time.Duration.ofMinutes(5))
    client = (
        v5.PulsarClient.builder()
        .serviceUrl(broker.service_url)
        .transactionPolicy(policy.build())
        .build()
    )
    producer = client.newProducer(v5.schema.Schema.string()).topic(topic.name).create()
    with handled.running():
        topic.publish(40)
        handled.wait_for(topic)
        transaction = client.newTransaction()
        in_it = [f"k{number % 40}:{number}" for number in range(40, 80)]
        for value in in_it:
            message = producer.newMessage().key(value.partition(":")[0]).value(value)
            message.transaction(transaction).send()
        topic.sent += in_it
        topic.split(0)
        topic.publish(40)
        wait_until(lambda: handled.waiting() == 2, END_S)
        assert len(handled.got) == 40, "a child begins before the transaction ends"
        getattr(transaction, ends)()
        if ends == "abort":
            topic.sent = [one for one in topic.sent if one not in in_it]
        handled.wait_for(topic)
        wait_until(lambda: handled.waiting() == 0, END_S)
    client.close()


def test_children_wait_for_a_delayed_message_in_their_parent(
    broker: DevBroker, topic: ScalableTopic, tmp_path: Path
) -> None:
    handled = Handled(broker, topic, tmp_path)
    with handled.running():
        topic.publish(40)
        handled.wait_for(topic)
        with closing(WireBroker(Connection(broker.service_url, broker.admin_url))) as client:
            where = client.watch_segments(topic.name, lambda: None).graph.partition(0)
            with closing(client.entry_producer(where, PublishOptions())) as producer:
                due_ms = time.time_ns() // 1_000_000 + int(deadline(DELAY_MS))
                late = OutgoingMessage(b"k0:40", "k0", None, None, None, due_ms)
                producer.publish([late], 0).result()
        topic.sent.append("k0:40")
        topic.split(0)
        topic.publish(79)
        wait_until(lambda: handled.waiting() == 2, END_S)
        assert len(handled.got) == 40, "a child begins before the delayed message is due"
        handled.wait_for(topic)
        wait_until(lambda: handled.waiting() == 0, END_S)


def test_entries_that_another_client_acknowledged_hold_no_child_up(
    broker: DevBroker, topic: ScalableTopic, tmp_path: Path
) -> None:
    """The broker lists no entries of a segment: they are missing, and all others come in order."""
    handled, taken = Handled(broker, topic, tmp_path), set[str]()
    with handled.running():
        topic.publish(40)
        handled.wait_for(topic)
    topic.publish(40)
    with closing(WireBroker(Connection(broker.service_url, broker.admin_url))) as client:
        where = client.watch_segments(topic.name, lambda: None).graph.partition(0)
        ring = split_ring(1)
        spec = SubscriptionSpec(where, "handled", ring[0], "another", 100)
        consumer, end_s = client.subscribe(spec, StartPosition.EARLIEST), time.monotonic() + END_S
        while len(taken) < 10:
            in_time(end_s, "ten entries for the other client")
            for block in consumer.receive(100)[: 10 - len(taken)]:
                taken.update(str(value, "utf-8") for value in block.values if value)
                consumer.acknowledge([block.id])
        consumer.close()
    topic.split(0)
    topic.publish(40)
    topic.sent = [one for one in topic.sent if one not in taken]
    with handled.running():
        handled.wait_for(topic)
        wait_until(lambda: handled.waiting() == 0, END_S)
