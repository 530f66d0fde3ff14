"""Patterns over scalable topics, which are created and deleted while a source runs."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tenacity

from keyshard import KeyShardSource, Message, RetryPolicy
from keyshard.broker.memory import MemoryCluster
from keyshard.broker.memory import Message as Stored
from keyshard.broker.memory.admin import MemoryAdmin
from keyshard.broker.topics import matching
from keyshard.config.source import SourceConfig
from keyshard.coordinator import discovery, topic_watches
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import TopicPartition
from keyshard.core.topic_pattern import TopicPattern
from keyshard.errors import ConfigError
from keyshard.testing import run_until_idle
from tests.helpers import config, keys_of, received, rows_of, running, wait_until

BASE = "topic://public/default/"
PATTERN = "topic://public/default/orders-.*"
KEYS = keys_of(4)


class Namespace:
    """Scalable topics on the in-memory broker, with numbered messages."""

    def __init__(self) -> None:
        self.name = uuid.uuid4().hex
        self.cluster = MemoryCluster.named(self.name, reports_topics=True)
        self.scalable = self.cluster.scalable
        self.sent: list[str] = []
        self.got: list[str] = []
        self._lock = threading.Lock()

    def create(self, *names: str, segments: int = 1) -> None:
        for name in names:
            self.scalable.create(BASE + name, segments)

    def publish(self, topic: str, count: int) -> None:
        name = topic if "://" in topic else BASE + topic
        for _ in range(count):
            number = len(self.sent)
            self.sent.append(f"{topic}:{number}")
            stored = Stored(self.sent[-1].encode(), key=KEYS[number % len(KEYS)])
            self.cluster.publish(name, stored)

    def handle(self, message: Message) -> None:
        with self._lock:
            self.got.append(str(message.value or b"", "utf-8"))

    def source(self, **changes: Any) -> KeyShardSource:
        url = f"memory://{self.name}"
        return KeyShardSource(
            topics_pattern=PATTERN, subscription="s", service_url=url, admin_url=url,
            starting_position="earliest", parallelism=3, **changes,
        )  # fmt: skip

    def running(
        self, source: SourceConfig, checkpoint: Checkpoint | None = None, **how: Any
    ) -> Any:
        admin = MemoryAdmin(self.cluster)
        return running(self.cluster, source, checkpoint, admin=admin, **how)

    def take(self, coordinator: Coordinator) -> Checkpoint:
        """Cut, read and commit one batch."""
        end = coordinator.batches.cut()
        assert end is not None
        self.commit(coordinator, end)
        return end

    def commit(self, coordinator: Coordinator, end: Checkpoint) -> None:
        for rows in rows_of(coordinator, end).values():
            self.got += [str(row["value"], "utf-8") for row in rows]
        coordinator.batches.release(end)

    def check(self) -> None:
        """Check that each message came once, and those of a topic and key in their order."""
        assert sorted(self.got) == sorted(self.sent)
        for topic in {value.partition(":")[0] for value in self.sent}:
            for key in range(len(KEYS)):
                numbers = [
                    number
                    for name, _, text in (value.partition(":") for value in self.got)
                    if name == topic and (number := int(text)) % len(KEYS) == key
                ]
                assert numbers == sorted(numbers), (topic, key)


@pytest.fixture
def namespace(monkeypatch: pytest.MonkeyPatch) -> Iterator[Namespace]:
    monkeypatch.setattr(discovery, "SETTLE_S", 0.01)
    monkeypatch.setattr(discovery, "AGAIN_S", 0.05)
    made = Namespace()
    yield made
    made.cluster.validate()


def source_of(**changes: Any) -> SourceConfig:
    """A source that looks for topics when the broker reports them, or a test makes it."""
    fields = {
        "topics_pattern": PATTERN, "admin_url": "http://memory",
        "discovery_interval_ms": 86_400_000,
    }  # fmt: skip
    return config([], **fields | changes)


def segments(coordinator: Coordinator) -> int:
    return coordinator.status()["topicPartitions"]


def test_a_pattern_takes_the_scalable_topics_that_match_and_no_persistent_ones(
    namespace: Namespace,
) -> None:
    namespace.create("orders-a", "orders-b", segments=2)
    namespace.create("bills", "orders-x-DLQ", "__orders")
    namespace.cluster.create_topic("orders-c")
    for topic in ("orders-a", "orders-b"):
        namespace.publish(topic, 8)
    with namespace.running(source_of()) as coordinator:
        received(coordinator, 16)
        assert segments(coordinator) == 4
        namespace.take(coordinator)
    namespace.check()
    persistent = source_of(topics_pattern="persistent://public/default/.*")
    with namespace.running(persistent) as coordinator:
        assert segments(coordinator) == 1


def test_topics_that_come_and_go_are_found_without_waiting_for_the_interval(
    namespace: Namespace,
) -> None:
    namespace.create("orders-a")
    with namespace.running(source_of(starting_position="latest")) as coordinator:
        namespace.create("orders-b", "bills", segments=2)
        namespace.publish("orders-b", 8)
        wait_until(lambda: segments(coordinator) == 3)
        received(coordinator, 8)
        namespace.take(coordinator)
        namespace.scalable.split(BASE + "orders-b", 0)
        assert namespace.cluster.subscriptions(
            namespace.scalable.graph(BASE + "orders-b").partition(2)
        ).keys() == {"unit"}, "the subscription is registered"
        wait_until(lambda: segments(coordinator) == 5)
        namespace.scalable.delete(BASE + "orders-a")
        wait_until(lambda: segments(coordinator) == 4)
        namespace.publish("orders-b", 8)
        received(coordinator, 16)
        namespace.take(coordinator)
    namespace.check()


def test_a_topic_that_is_deleted_and_created_again_at_once_is_consumed_from_its_beginning(
    namespace: Namespace,
) -> None:
    namespace.create("orders-a", segments=2)
    namespace.publish("orders-a", 8)
    with namespace.running(source_of()) as coordinator:
        received(coordinator, 8)
        namespace.take(coordinator)
        with namespace.cluster.lock:
            namespace.scalable.delete(BASE + "orders-a")
            namespace.create("orders-a", segments=2)
            namespace.publish("orders-a", 8)
        received(coordinator, 16)
        namespace.take(coordinator)
    namespace.check()


def test_a_deleted_topic_is_dropped_in_the_next_round_without_a_report(
    namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(namespace.cluster, "watch_topics", lambda *_: None)
    namespace.create("orders-a", "orders-b")
    with namespace.running(source_of()) as coordinator:
        namespace.scalable.delete(BASE + "orders-a")
        coordinator.discovery.round()
        assert segments(coordinator) == 1


def test_twenty_topics_that_are_created_at_once_are_consumed(namespace: Namespace) -> None:
    names = [f"orders-{number}" for number in range(20)]
    with namespace.running(source_of()) as coordinator:
        assert segments(coordinator) == 0
        namespace.create(*names, segments=2)
        for name in names:
            namespace.publish(name, 4)
        received(coordinator, 80)
        assert segments(coordinator) == 40
        namespace.take(coordinator)
    namespace.check()


def test_a_restart_goes_on_without_deleted_topics_and_with_new_ones(namespace: Namespace) -> None:
    namespace.create("orders-a", "orders-b")
    for topic in ("orders-a", "orders-b"):
        namespace.publish(topic, 8)
    with namespace.running(source_of()) as coordinator:
        received(coordinator, 16)
        end = namespace.take(coordinator)
    namespace.scalable.delete(BASE + "orders-a")
    namespace.create("orders-c")
    namespace.publish("orders-b", 8)
    namespace.publish("orders-c", 8)
    with namespace.running(source_of(), Checkpoint.from_json(end.to_json())) as coordinator:
        received(coordinator, 16)
        end = namespace.take(coordinator)
    assert {where.topic.rpartition("/")[0] for where in end.partitions} == {
        "segment://public/default/orders-b", "segment://public/default/orders-c"
    }  # fmt: skip
    namespace.check()


def test_a_lost_watch_of_the_namespace_is_opened_again(
    namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_watches, "AGAIN_S", 0.0)
    namespace.create("orders-a")
    with namespace.running(source_of(discovery_interval_ms=20)) as coordinator:
        wait_until(lambda: namespace.cluster._watches)
        namespace.cluster.crash()
        wait_until(lambda: any(watch.is_open for watch in namespace.cluster._watches))
        namespace.create("orders-b")
        wait_until(lambda: segments(coordinator) == 2)


def test_a_named_topic_that_is_created_again_is_reported_too(namespace: Namespace) -> None:
    names = [BASE + "a", BASE + "b"]
    namespace.create("a", "b")
    source = config(names, admin_url="http://memory", discovery_interval_ms=86_400_000)
    with namespace.running(source) as coordinator:
        namespace.scalable.delete(BASE + "a")
        wait_until(lambda: segments(coordinator) == 1)
        namespace.create("a", segments=2)
        namespace.publish("a", 8)
        namespace.publish("b", 8)
        received(coordinator, 16)
        assert segments(coordinator) == 3
        namespace.take(coordinator)
    namespace.check()


def test_a_cluster_without_scalable_topics_is_refused_at_once(
    namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryAdmin, "scalable_topics", lambda *_: None)
    with (
        pytest.raises(ConfigError, match="matches scalable topics, which") as caught,
        namespace.running(source_of()),
    ):
        pass
    assert "Pulsar 5.0" in caught.value.remedy


def test_dead_letters_of_a_pattern_are_in_a_persistent_topic_that_it_does_not_consume(
    namespace: Namespace,
) -> None:
    namespace.create("orders-a", segments=2)
    namespace.publish("orders-a", 8)

    def fail(message: Message) -> None:
        if message.key == KEYS[0]:
            raise ValueError("no")
        namespace.handle(message)

    once = RetryPolicy(stop=tenacity.stop_after_attempt(1))
    source = namespace.source(discovery_interval_ms=20)
    with source.running(fail, retry=once, on_failure="dead_letter"):
        wait_until(lambda: len(namespace.got) == 6)
        dead_letters = TopicPartition("persistent://public/default/s-DLQ")
        wait_until(lambda: dead_letters.topic in namespace.cluster.topics())
        wait_until(lambda: len(namespace.cluster.log(dead_letters)) == 2)
        namespace.create("orders-b")
        wait_until(lambda: len(source.status()["partitions"]) == 3)
    assert len(namespace.cluster.log(dead_letters)) == 2


def test_a_handler_run_goes_on_from_its_checkpoint_after_topics_changed(
    namespace: Namespace, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint.json"
    namespace.create("orders-a", "orders-b")
    for round_ in range(3):
        namespace.publish("orders-b", 8)
        with namespace.source().running(namespace.handle, checkpoint=f"file://{path}"):
            wait_until(lambda: len(namespace.got) == len(namespace.sent))
        namespace.scalable.delete(BASE + f"orders-{'ac'[round_ % 2]}")
        namespace.create(f"orders-{'ca'[round_ % 2]}", segments=2)
    namespace.check()
    assert "orders-b" in json.dumps(json.loads(path.read_text()))


def test_bounded_runs_and_reads_take_all_topics_that_match(namespace: Namespace) -> None:
    namespace.create("orders-a", "orders-b", segments=2)
    namespace.create("bills")
    for topic in ("orders-a", "orders-b"):
        namespace.publish(topic, 8)
    namespace.scalable.split(BASE + "orders-a", 0)
    namespace.publish("orders-a", 8)
    source = source_of(available_now_quiet_ms=100)
    with namespace.running(source, available_now=True) as coordinator:
        while (end := coordinator.batches.cut_available()) is not None:
            namespace.commit(coordinator, end)
    namespace.check()
    read = namespace.source().read()
    values = [str(one, "utf-8") for batch in read for one in batch.column("value").to_pylist()]
    assert sorted(values) == sorted(namespace.sent)


def test_run_until_idle_waits_for_the_backlog_of_all_topics_that_match(
    namespace: Namespace,
) -> None:
    namespace.create("orders-a", "orders-b", segments=2)
    for topic in ("orders-a", "orders-b"):
        namespace.publish(topic, 20)
    run_until_idle(namespace.source(), namespace.handle)
    namespace.check()


def test_the_topics_of_a_pattern_are_those_of_its_kind() -> None:
    cluster = MemoryCluster()
    cluster.scalable.create(BASE + "orders-a")
    cluster.create_topic("orders-b")
    admin = MemoryAdmin(cluster)
    assert matching(admin, TopicPattern.parse(PATTERN)) == (BASE + "orders-a",)
    assert matching(admin, TopicPattern.parse("orders-.*")) == (
        "persistent://public/default/orders-b",
    )
