"""A job over a scalable topic of Pulsar 5: segments change, and actors and driver are killed."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from keyshard.testing.devbroker import DevBroker
from tests.ray.kills import Kills
from tests.support.deadlines import deadline
from tests.support.java_client import JavaClient
from tests.support.scalable_topic import ScalableTopic
from tests.support.tested_pulsar import PULSAR

pytestmark = [
    pytest.mark.ray,
    pytest.mark.broker,
    pytest.mark.skipif(int(PULSAR.split(".")[0]) < 5, reason="needs scalable topics"),
]
KEYS = 40
SLICES = 6
"""Parts in which messages are published; segments change between them."""
MESSAGES = 6_000
BATCHES = True


@dataclass
class ScalableKills(Kills):
    """Drivers of a scalable topic, which Java's producer of V5 publishes to while they run."""

    scalable: ScalableTopic = field(kw_only=True)
    sender: Any = field(kw_only=True)
    """The producer: it batches messages of several keys."""
    stopping: threading.Event = field(default_factory=threading.Event)

    def publish(self) -> Mapping[str, int]:
        """Publish the first messages; :meth:`go_on` publishes the others."""
        self._slice(0)
        return {f"k{key}": self.messages // KEYS for key in range(KEYS)}

    def go_on(self) -> None:
        """Change segments, and publish the other messages, as results come."""
        draw = random.Random(7)
        for number in range(1, SLICES):
            while self.lines() < (number - 1) * self.messages // SLICES:
                if self.stopping.wait(0.05):
                    return
            self.scalable.change(draw)
            self._slice(number)

    def _slice(self, number: int) -> None:
        size = self.messages // SLICES
        for one in range(number * size, (number + 1) * size):
            key = f"k{one % KEYS}"
            self.sender.newMessage().key(key).value(f"{key}:{one // KEYS}:").send()
        self.sender.flush().get()


@pytest.fixture
def java(dev_broker: DevBroker, tmp_path: Path) -> Iterator[JavaClient]:
    with closing(JavaClient(dev_broker.service_url, tmp_path / "java.log")) as made:
        yield made


def test_nothing_comes_again_and_the_order_stays_when_segments_change_under_kills(
    dev_broker: DevBroker, java: JavaClient, tmp_path: Path
) -> None:
    v5 = java.jvm.org.apache.pulsar.client.api.v5
    with closing(ScalableTopic(dev_broker)) as topic:
        topic.keep()
        client = v5.PulsarClient.builder().serviceUrl(dev_broker.service_url).build()
        batching = v5.config.BatchingPolicy.builder().enabled(BATCHES).build()
        producer = client.newProducer(v5.schema.Schema.string()).topic(topic.name)
        kills = ScalableKills(
            dev_broker, tmp_path, messages=MESSAGES, deadline_s=deadline(150), topic=topic.name,
            options=("--admin-url", dev_broker.admin_url), scalable=topic,
            sender=getattr(producer.batchingPolicy(batching).create(), "async")(),
        )  # fmt: skip
        publisher = threading.Thread(target=kills.go_on)
        publisher.start()
        try:
            kills.run(driver_kills=1, actor_kills=2)
        finally:
            kills.stopping.set()
            publisher.join()
            client.close()
        assert kills.broken() == []
        assert (len(kills.durable), kills.actors_killed) == (1, 2)
        assert len(topic.changes) == SLICES - 1
