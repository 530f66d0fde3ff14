"""Handlers of a scalable topic on a real broker of Pulsar 5, while its segments split and merge."""

from __future__ import annotations

import random
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from functools import partial
from pathlib import Path

import httpx
import pytest

from keyshard import KeyShardSource, Message
from keyshard.broker.port import PublishOptions
from keyshard.broker.wire.broker import WireBroker
from keyshard.columns.outgoing import OutgoingMessage
from keyshard.config.connection import Connection
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import TopicPartition
from keyshard.core.topic_schema import TopicSchema
from keyshard.source_read import SourceRead
from keyshard.testing import run_until_idle
from keyshard.testing.devbroker import DevBroker
from tests.helpers import rows_of, started, wait_until
from tests.support.deadlines import deadline
from tests.support.java_client import JavaClient
from tests.support.scalable_topic import ScalableTopic
from tests.support.tested_pulsar import PULSAR

pytestmark = [
    pytest.mark.broker,
    pytest.mark.skipif(int(PULSAR.split(".")[0]) < 5, reason="needs scalable topics"),
]
END_S = deadline(120)


def values_of(read: SourceRead) -> list[str]:
    return [str(value, "utf-8") for batch in read for value in batch.column("value").to_pylist()]


@pytest.fixture
def topic(dev_broker: DevBroker) -> Iterator[ScalableTopic]:
    with closing(ScalableTopic(dev_broker)) as made:
        yield made


class Handled:
    """A handler that notes values in order, and sources that call it."""

    def __init__(self, broker: DevBroker, topic: ScalableTopic, folder: Path) -> None:
        self._lock = threading.Lock()
        self.checkpoint = f"file://{folder / 'checkpoint.json'}"
        self._broker, self._topic = broker, topic
        self.got: list[str] = []

    def has(self, count: int) -> bool:
        return len(self.got) >= count

    def source(self, parallelism: int, topic: str = "") -> KeyShardSource:
        return KeyShardSource(
            topic or self._topic.name, subscription="handled", service_url=self._broker.service_url,
            admin_url=self._broker.admin_url, starting_position="earliest",
            parallelism=parallelism, discovery_interval_ms=1_000,
        )  # fmt: skip

    def handle(self, message: Message) -> None:
        with self._lock:
            self.got.append((message.value or b"").decode())

    def running(self, parallelism: int, topic: str = "") -> AbstractContextManager[KeyShardSource]:
        source = self.source(parallelism, topic)
        return source.running(self.handle, checkpoint=self.checkpoint)


def test_handlers_get_each_message_once_in_order_across_splits_and_merges(
    dev_broker: DevBroker, topic: ScalableTopic, tmp_path: Path
) -> None:
    draw, handled = random.Random(1), Handled(dev_broker, topic, tmp_path)
    topic.publish(200)
    with handled.running(5):
        for _ in range(6):
            topic.publish(100)
            topic.change(draw)
            topic.publish(100)
        wait_until(lambda: len(handled.got) >= len(topic.sent), END_S)
    topic.check(handled.got)


def test_segments_that_split_and_merge_while_a_source_is_down_are_read_in_order(
    dev_broker: DevBroker, topic: ScalableTopic, tmp_path: Path
) -> None:
    draw, handled = random.Random(2), Handled(dev_broker, topic, tmp_path)
    for parallelism in (3, 7, 4):
        before = len(topic.sent)
        topic.publish(100)
        topic.change(draw)
        topic.publish(100)
        topic.change(draw)
        topic.publish(100)
        with handled.running(parallelism):
            wait_until(partial(handled.has, before + 150), END_S)
            topic.publish(50)
    with handled.running(4):
        wait_until(lambda: len(handled.got) >= len(topic.sent), END_S)
    topic.check(handled.got)


def test_a_migrated_topic_goes_on_from_its_checkpoint(
    dev_broker: DevBroker, tmp_path: Path
) -> None:
    """Its partitions are the parents of all segments, under their own names."""
    with closing(ScalableTopic(dev_broker, partitions=3)) as topic:
        handled = Handled(dev_broker, topic, tmp_path)
        topic.publish_before(300)
        with handled.running(3, topic.migrated_from):
            wait_until(partial(handled.has, 200), END_S)
        topic.publish_before(100)
        topic.migrate()
        topic.publish(100)
        with handled.running(5):
            topic.change(random.Random(3))
            topic.publish(100)
            wait_until(lambda: len(handled.got) >= len(topic.sent), END_S)
        topic.check(handled.got)


def test_bounded_runs_take_what_is_stored_at_their_start_while_segments_split_and_merge(
    dev_broker: DevBroker, topic: ScalableTopic, tmp_path: Path
) -> None:
    topic.keep()
    draw, got = random.Random(4), list[str]()
    source = Handled(dev_broker, topic, tmp_path).source(3)
    checkpoint: Checkpoint | None = None
    for _ in range(3):
        for _ in range(3):
            topic.publish(100)
            topic.change(draw)
        before = len(topic.sent)
        with started(source.coordinator(), checkpoint, available_now=True) as run:
            while (end := run.batches.cut_available(100)) is not None:
                rows = rows_of(run, end)
                got += [str(row["value"], "utf-8") for part in rows.values() for row in part]
                run.batches.release(end)
                checkpoint = Checkpoint.from_json(end.to_json())
                if len(topic.sent) < before + 60:
                    topic.publish(20)
                    topic.change(draw)
        assert set(got) == set(topic.sent[:before])
    with started(source.coordinator(), checkpoint, available_now=True) as run:
        while (end := run.batches.cut_available()) is not None:
            rows = rows_of(run, end)
            got += [str(row["value"], "utf-8") for part in rows.values() for row in part]
            run.batches.release(end)
    topic.check(got)


def test_a_bounded_read_has_the_graph_of_its_plan_while_segments_split_and_merge(
    dev_broker: DevBroker, topic: ScalableTopic
) -> None:
    topic.keep()
    draw = random.Random(5)
    source = KeyShardSource(
        topic.name, service_url=dev_broker.service_url, admin_url=dev_broker.admin_url
    )
    assert values_of(source.read()) == []
    with ThreadPoolExecutor(1) as other:
        for _ in range(5):
            topic.publish(100)
            topic.change(draw)
            before, change = len(topic.sent), other.submit(topic.change, draw)
            read = source.read()
            change.result()
            topic.publish(50)
            whole = values_of(read)
            topic.check(whole, before)
            topic.change(draw)
            parts = read.split(7)
            assert [value for part in parts for value in values_of(part)] == whole


def test_a_migrated_topic_is_read_with_its_partitions_which_a_bounded_run_takes_first(
    dev_broker: DevBroker,
) -> None:
    name = f"public/default/migrated-{uuid.uuid4().hex}"
    connection = Connection(dev_broker.service_url, dev_broker.admin_url)
    sent: dict[TopicPartition, list[str]] = {}
    with (
        httpx.Client(base_url=dev_broker.admin_url, follow_redirects=True, timeout=END_S) as http,
        closing(WireBroker(connection)) as client,
    ):

        def publish(where: TopicPartition) -> None:
            sent[where] = [f"{where}:{number}" for number in range(10)]
            with closing(client.producer(where, send_timeout_ms=int(END_S * 1_000))) as producer:
                for value in sent[where]:
                    producer.send(value.encode(), key="k")

        http.put(f"/admin/v2/persistent/{name}/partitions", json=2).raise_for_status()
        old = [TopicPartition(f"persistent://{name}", number) for number in range(2)]
        for where in old:
            path = where.name.replace("persistent://", "/admin/v2/persistent/")
            http.put(f"{path}/subscription/kept").raise_for_status()
            publish(where)
        http.post(f"/admin/v2/scalable/{name}/migrate?force=true").raise_for_status()
        graph = client.watch_segments(f"topic://{name}", lambda: None).graph
        for where in graph.partitions[2:]:
            publish(where)
    source = KeyShardSource(
        f"topic://{name}", subscription="s", starting_position="earliest", parallelism=2,
        service_url=dev_broker.service_url, admin_url=dev_broker.admin_url,
    )  # fmt: skip
    everything = [value for values in sent.values() for value in values]
    assert values_of(source.read()) == everything
    got: list[str] = []
    with started(source.coordinator(), None, available_now=True) as run:
        while (end := run.batches.cut_available()) is not None:
            rows = rows_of(run, end)
            got += [str(row["value"], "utf-8") for part in rows.values() for row in part]
            run.batches.release(end)
    assert sorted(got) == sorted(everything)
    assert set(got[:20]) == {value for where in old for value in sent[where]}


def test_a_handler_runs_until_all_segments_are_acknowledged(
    dev_broker: DevBroker, topic: ScalableTopic, tmp_path: Path
) -> None:
    topic.keep()
    draw, handled = random.Random(6), Handled(dev_broker, topic, tmp_path)
    for _ in range(3):
        topic.publish(50)
        topic.change(draw)
    run_until_idle(handled.source(3), handled.handle, timeout_s=END_S)
    topic.check(handled.got)


def test_values_have_the_schema_of_the_topic(
    dev_broker: DevBroker, topic: ScalableTopic, tmp_path: Path
) -> None:
    schema = TopicSchema(
        "JSON", b'{"type":"record","name":"R","fields":[{"name":"a","type":"int"}]}', 0, {}
    )
    connection = Connection(dev_broker.service_url, dev_broker.admin_url)
    with closing(WireBroker(connection)) as client:
        where = client.watch_segments(topic.name, lambda: None).graph.partition(0)
        how = PublishOptions(schema=schema)
        with closing(client.entry_producer(where, how)) as producer:
            producer.publish([OutgoingMessage(b'{"a": 7}', "k", None, None, None)], 0).result()
    got: list[object] = []
    source = Handled(dev_broker, topic, tmp_path).source(2)
    with source.running(lambda message: got.append(message.data)):
        wait_until(lambda: got, END_S)
    assert got == [{"a": 7}]


@pytest.fixture(scope="module")
def java(dev_broker: DevBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JavaClient]:
    with closing(
        JavaClient(dev_broker.service_url, tmp_path_factory.mktemp("java") / "log")
    ) as made:
        yield made


@pytest.mark.parametrize("batches", [False, True])
def test_messages_of_javas_producer_come_once_and_in_order(
    dev_broker: DevBroker, topic: ScalableTopic, java: JavaClient, tmp_path: Path, batches: bool
) -> None:
    """Java's producer batches the keys of an entry bucket, and the broker routes by the first."""
    handled, count = Handled(dev_broker, topic, tmp_path), 3_000
    v5 = java.jvm.org.apache.pulsar.client.api.v5
    client = v5.PulsarClient.builder().serviceUrl(dev_broker.service_url).build()
    policy = v5.config.BatchingPolicy.builder().enabled(batches).build()
    producer = (
        client.newProducer(v5.schema.Schema.string()).topic(topic.name).batchingPolicy(policy)
    ).create()
    sender = getattr(producer, "async")()
    with handled.source(3).running(handled.handle) as run:
        for number in range(count):
            key = f"k{number % 40}"
            topic.sent.append(f"{key}:{number}")
            sender.newMessage().key(key).value(topic.sent[-1]).send()
            if number % 1_000 == 500:
                sender.flush().get()
                topic.change(random.Random(number))
        sender.flush().get()
        wait_until(lambda: len(handled.got) >= count, END_S)
        window = run.status()["window"]
        assert window is not None
        assert window["misrouted"] == 0
        entries = window["entriesReceived"]
    client.close()
    assert (entries < count) == batches, "whether producers batched"
    topic.check(handled.got)
