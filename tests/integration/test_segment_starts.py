"""Start positions and positions as bounds of scalable topics, on a real broker of Pulsar 5."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from keyshard import KeyShardSource, Message
from keyshard.broker.port import PublishOptions
from keyshard.broker.wire.broker import WireBroker
from keyshard.columns.outgoing import OutgoingMessage
from keyshard.config.connection import Connection
from keyshard.core.message import MessageId
from keyshard.errors import ConfigError
from keyshard.testing import run_until_idle
from keyshard.testing.devbroker import DevBroker
from tests.helpers import wait_until
from tests.support.deadlines import deadline
from tests.support.java_client import JavaClient
from tests.support.scalable_topic import ScalableTopic
from tests.support.tested_pulsar import PULSAR

pytestmark = [
    pytest.mark.broker,
    pytest.mark.skipif(int(PULSAR.split(".")[0]) < 5, reason="needs scalable topics"),
]
END_S = deadline(120)


class Started:
    """Sources and reads of a topic, from positions on."""

    def __init__(self, broker: DevBroker, topic: ScalableTopic) -> None:
        self.broker, self.topic = broker, topic

    def source(self, start: object = "latest", name: str = "started") -> KeyShardSource:
        return KeyShardSource(
            self.topic.name, subscription=name, service_url=self.broker.service_url,
            admin_url=self.broker.admin_url, parallelism=3, discovery_interval_ms=1_000,
            starting_position=start if isinstance(start, str) else json.dumps(start),
        )  # fmt: skip

    def consume(self, start: object, name: str = "started") -> list[str]:
        """Values of a run until nothing is left, in the order of their keys."""
        got: list[str] = []
        lock = threading.Lock()

        def handle(message: Message) -> None:
            with lock:
                got.append((message.value or b"").decode())

        run_until_idle(self.source(start, name), handle, timeout_s=END_S)
        return got

    def read(self, **bounds: Any) -> list[str]:
        rows = self.source().read(**bounds)
        return [str(one, "utf-8") for batch in rows for one in batch.column("value").to_pylist()]

    def ends(self) -> dict[str, str]:
        return self.source().read().ends

    def check(self, got: list[str], before: int) -> None:
        """Check that the messages after the first ones came once, those of a key in order."""
        assert sorted(got) == sorted(self.topic.sent[before:])
        self.topic.check([*self.topic.sent[:before], *got])


@pytest.fixture
def started(dev_broker: DevBroker) -> Iterator[Started]:
    with closing(ScalableTopic(dev_broker, segments=2)) as topic:
        topic.keep()
        yield Started(dev_broker, topic)


def test_the_ends_of_a_read_are_the_start_of_the_next_while_segments_split_and_merge(
    started: Started,
) -> None:
    draw, topic, read = random.Random(1), started.topic, list[str]()
    start: Any = "earliest"
    for _ in range(4):
        topic.publish(60)
        topic.change(draw)
        topic.publish(60)
        before = len(read)
        rows = started.source().read(start=start)
        read += [str(one, "utf-8") for each in rows for one in each.column("value").to_pylist()]
        assert started.read(start=start, end=rows.ends) == read[before:]
        start = rows.ends
        topic.change(draw)
    topic.check(read)


def test_a_source_starts_at_positions_of_segments_that_split_since(started: Started) -> None:
    draw, topic = random.Random(2), started.topic
    topic.publish(100)
    start = started.ends()
    before = len(topic.sent)
    for _ in range(3):
        topic.change(draw)
        topic.publish(100)
    started.check(started.consume(start), before)
    topic.publish(20)
    assert sorted(started.consume(start)) == sorted(topic.sent[-20:])


@pytest.mark.parametrize("by_time", [False, True])
def test_a_source_of_a_migrated_topic_starts_in_its_old_partitions(
    dev_broker: DevBroker, by_time: bool
) -> None:
    """Positions that were noted before name its partitions, and no segment."""
    with closing(ScalableTopic(dev_broker, partitions=2)) as topic:
        started = Started(dev_broker, topic)
        old = KeyShardSource(
            topic.migrated_from, subscription="keeps", service_url=dev_broker.service_url,
            admin_url=dev_broker.admin_url,
        )  # fmt: skip
        with old.open():
            topic.publish_before(60)
        start: object = old.read().ends
        before, before_ms = len(topic.sent), time.time_ns() // 1_000_000
        wait_until(lambda: time.time_ns() // 1_000_000 > before_ms)
        if by_time:
            start = datetime.fromtimestamp((before_ms + 1) / 1_000, timezone.utc).isoformat()
        topic.publish_before(40)
        topic.migrate()
        topic.publish(40)
        started.check(started.consume(start), before)


@pytest.mark.parametrize("later", [False, True])
def test_a_source_starts_at_a_time_in_sealed_and_open_segments(
    started: Started, later: bool
) -> None:
    draw, topic = random.Random(3), started.topic
    topic.publish(100)
    topic.change(draw)
    topic.publish(100)
    before_ms = time.time_ns() // 1_000_000
    wait_until(lambda: time.time_ns() // 1_000_000 > before_ms)
    before = len(topic.sent)
    if not later:
        topic.publish(50)
        topic.change(draw)
        topic.publish(50)
    start = datetime.fromtimestamp((before_ms + 1) / 1_000, timezone.utc)
    started.check(started.consume(start.isoformat()), before)


def test_a_source_starts_inside_an_entry_of_javas_producer(
    started: Started, tmp_path: Path
) -> None:
    """Its entries have messages of many keys."""
    topic, count = started.topic, 400
    with closing(JavaClient(started.broker.service_url, tmp_path / "log")) as java:
        v5 = java.jvm.org.apache.pulsar.client.api.v5
        client = v5.PulsarClient.builder().serviceUrl(started.broker.service_url).build()
        producer = client.newProducer(v5.schema.Schema.string()).topic(topic.name).create()
        sender = getattr(producer, "async")()
        for number in range(count):
            key = f"k{number % 40}"
            sender.newMessage().key(key).value(f"{key}:{number}").send()
        sender.flush().get()
        client.close()
    rows = started.source().read(columns=["__messageId", "__topic", "value"])
    places: dict[str, list[tuple[MessageId, str]]] = {}
    for batch in rows:
        for at, where, value in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            place = MessageId(*map(int, at.split(":")))
            places.setdefault(where, []).append((place, str(value, "utf-8")))
    start, wanted = {}, list[str]()
    for where, found in places.items():
        inside = [one for one, (at, _) in enumerate(found) if at.batch_index]
        chosen = inside[len(inside) // 2]
        start[where] = str(found[chosen][0])
        wanted += [value for _, value in found[chosen:]]
    assert len(start) == 2
    assert sorted(started.read(start=start)) == sorted(wanted)
    assert sorted(started.consume(start)) == sorted(wanted)


_DYING = """
import json, os, signal, sys
from keyshard import KeyShardSource
from keyshard.broker.wire.broker import WireBroker
from keyshard.broker.admin.rest import PulsarAdmin
from keyshard.core.message import MessageId

topic, service, admin, start, at, step = sys.argv[1:]
left = [int(at)]

def dies(owner, name):
    real = getattr(owner, name)

    def change(self, *of):
        left[0] -= 1
        if left[0] < 0:
            if name == "begin":
                real(self, of[0], of[1], MessageId(0, 0, 0))
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, *of)

    setattr(owner, name, change)

dies(WireBroker, "begin")
dies(PulsarAdmin, "register")
dies(PulsarAdmin, "unregister")
KeyShardSource(
    topic, subscription=step, service_url=service, admin_url=admin, starting_position=start
).run(print)
"""


def test_a_source_that_is_killed_during_its_start_loses_and_repeats_nothing(
    started: Started,
) -> None:
    """Also between the creation of a subscription and the move to its position."""
    topic, broker = started.topic, started.broker
    topic.publish(60)
    start = started.ends()
    before = len(topic.sent)
    topic.change(random.Random(4))
    topic.publish(60)
    for number in range(7):
        name = f"killed-{number}"
        died = subprocess.run(
            [sys.executable, "-c", _DYING, topic.name, broker.service_url, broker.admin_url,
             json.dumps(start), str(number), name],
            timeout=END_S, check=False,
        )  # fmt: skip
        assert died.returncode == -9
        started.check(started.consume(start, name), before)


def batch_of(broker: DevBroker, topic: str) -> dict[str, str]:
    """Publish an entry of ten messages; the position of the fifth."""
    with closing(WireBroker(Connection(broker.service_url))) as client:
        where = client.watch_segments(topic, lambda: None).graph.partition(0)
        rows = [OutgoingMessage(b"%d" % number, "k", None, None, None) for number in range(10)]
        with closing(client.entry_producer(where, PublishOptions())) as producer:
            at = producer.publish(rows, 0).result()
    assert at is not None
    return {where.name: f"{at.ledger}:{at.entry}:4"}


def test_a_start_inside_an_entry_outlives_a_broker_that_is_killed() -> None:
    with DevBroker(PULSAR) as broker, closing(ScalableTopic(broker)) as topic:
        topic.keep()
        started, start = Started(broker, topic), batch_of(broker, topic.name)
        with started.source(start).open():
            pass
        broker.kill()
        broker.start()
        assert started.consume(start) == [str(number) for number in range(4, 10)]


def test_a_broker_that_keeps_no_parts_of_entries_is_named() -> None:
    settings = {"acknowledgmentAtBatchIndexLevelEnabled": "false"}
    with (
        DevBroker(PULSAR, settings=settings) as broker,
        closing(ScalableTopic(broker)) as topic,
    ):
        topic.keep()
        started, start = Started(broker, topic), batch_of(broker, topic.name)
        with pytest.raises(ConfigError, match="Set acknowledgmentAtBatchIndexLevelEnabled"):
            started.consume(start)
        whole = {where: at.rpartition(":")[0] for where, at in start.items()}
        assert started.consume(whole) == [str(number) for number in range(10)]
