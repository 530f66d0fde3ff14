"""Patterns over scalable topics on a real broker of Pulsar 5, while topics come and go."""

from __future__ import annotations

import random
import threading
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import httpx
import pytest

from keyshard import KeyShardSource, Message
from keyshard.core.topic_segments import scalable_topic_of
from keyshard.errors import ConfigError
from keyshard.testing.devbroker import DevBroker
from tests.helpers import rows_of, started, wait_until
from tests.support.deadlines import deadline
from tests.support.scalable_topic import ScalableTopic
from tests.support.tested_pulsar import PULSAR

PULSAR_5 = int(PULSAR.split(".")[0]) >= 5
pytestmark = pytest.mark.broker
needs_scalable_topics = pytest.mark.skipif(not PULSAR_5, reason="needs scalable topics")
END_S = deadline(120)
DAY_MS = 86_400_000


class Topics:
    """Scalable topics whose names begin alike, and the values that a source gave of each."""

    def __init__(self, broker: DevBroker) -> None:
        self._broker = broker
        self._open = ExitStack()
        self._lock = threading.Lock()
        self.prefix = f"pattern:={uuid.uuid4().hex[:12]}"
        self.got: defaultdict[str, list[str]] = defaultdict(list)

    def create(self, segments: int = 1) -> ScalableTopic:
        made = ScalableTopic(self._broker, segments, prefix=self.prefix)
        return self._open.enter_context(closing(made))

    def source(self, discovery_interval_ms: int = DAY_MS) -> KeyShardSource:
        return KeyShardSource(
            topics_pattern=f"topic://public/default/{self.prefix}-.*", subscription="matched",
            service_url=self._broker.service_url, admin_url=self._broker.admin_url,
            starting_position="earliest", parallelism=3,
            discovery_interval_ms=discovery_interval_ms,
        )  # fmt: skip

    def note(self, segment: str, value: bytes | None) -> None:
        with self._lock:
            self.got[scalable_topic_of(segment)].append(str(value or b"", "utf-8"))

    def handle(self, message: Message) -> None:
        self.note(message.topic, message.value)

    def wait(self, topics: Sequence[ScalableTopic]) -> None:
        """Wait for everything that was published to topics, and check it."""
        wait_until(lambda: all(len(self.got[one.name]) >= len(one.sent) for one in topics), END_S)
        for one in topics:
            one.check(self.got[one.name])

    def close(self) -> None:
        self._open.close()


@pytest.fixture
def topics(dev_broker: DevBroker) -> Iterator[Topics]:
    with closing(Topics(dev_broker)) as made:
        yield made


@needs_scalable_topics
def test_handlers_of_a_pattern_follow_topics_that_come_change_and_go(
    topics: Topics, tmp_path: Path
) -> None:
    """Without waiting for a regular round, which comes a day later."""
    draw, checkpoint = random.Random(7), f"file://{tmp_path / 'checkpoint.json'}"
    source, first, gone = topics.source(), topics.create(2), topics.create()
    first.publish(50)
    gone.publish(50)
    with source.running(topics.handle, checkpoint=checkpoint):
        topics.wait([first, gone])
        new = topics.create(3)
        new.publish(50)
        topics.wait([new])
        for topic in (first, new):
            topic.change(draw)
            topic.publish(50)
        gone.delete()
        wait_until(lambda: gone.name not in of_status(source), END_S)
        topics.wait([first, new])
    # The topics change while the source is down, too.
    new.delete()
    later = topics.create(2)
    for topic in (first, later):
        topic.publish(50)
        topic.change(draw)
        topic.publish(50)
    with source.running(topics.handle, checkpoint=checkpoint):
        topics.wait([first, later])
        assert of_status(source) == {first.name, later.name}


def of_status(source: KeyShardSource) -> set[str]:
    """Return the topics that a source consumes now."""
    return {scalable_topic_of(one["topic"]) for one in source.status()["partitions"]}


@needs_scalable_topics
def test_a_topic_that_is_created_again_is_consumed_from_its_beginning(
    topics: Topics, dev_broker: DevBroker
) -> None:
    source, topic = topics.source(), topics.create(2)
    topic.publish(20)
    with source.running(topics.handle):
        topics.wait([topic])
        topic.delete()
        httpx.put(f"{dev_broker.admin_url}{topic.path}").raise_for_status()
        topic.publish(20)
        topics.wait([topic])


@needs_scalable_topics
def test_bounded_runs_and_reads_of_a_pattern_have_all_topics_that_match(topics: Topics) -> None:
    draw, source = random.Random(8), topics.source()
    matching = [topics.create(segments) for segments in (1, 2, 1)]
    for topic in matching:
        topic.keep()
        topic.publish(40)
        topic.change(draw)
        topic.publish(40)
    with started(source.coordinator(), available_now=True) as run:
        while (end := run.batches.cut_available(100)) is not None:
            for rows in rows_of(run, end).values():
                for row in rows:
                    topics.note(row["__topic"], row["value"])
            run.batches.release(end)
    topics.wait(matching)
    topics.got.clear()
    for batch in source.read():
        names, values = (batch.column(name).to_pylist() for name in ("__topic", "value"))
        for name, value in zip(names, values, strict=True):
            topics.note(name, value)
    topics.wait(matching)


@pytest.mark.skipif(PULSAR_5, reason="the cluster has scalable topics")
def test_a_cluster_without_scalable_topics_refuses_a_pattern_of_them(topics: Topics) -> None:
    with pytest.raises(ConfigError, match="which the cluster does not know"):
        topics.source().run(topics.handle)
