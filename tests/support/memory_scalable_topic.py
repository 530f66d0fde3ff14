"""A scalable topic of the in-memory broker, with numbered messages."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any

from keyshard import Message
from keyshard.broker.memory import Batching, MemoryBroker, MemoryCluster
from keyshard.broker.memory import Message as Stored
from keyshard.broker.memory.admin import MemoryAdmin
from keyshard.config.source import SourceConfig
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.diagnosis import Level
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.observe.doctor import Expected, examine
from tests.helpers import config, keys_of, rows_of, running

TOPIC = "topic://public/default/orders"
KEYS = keys_of(8)


class ScalableTopic:
    """A scalable topic with numbered messages, and what a source gave of them."""

    def __init__(self, segments: int = 1, cluster: MemoryCluster | None = None) -> None:
        self.cluster = cluster or MemoryCluster()
        self.cluster.scalable.create(TOPIC, segments)
        self.sent = 0
        self.got: list[tuple[str, int]] = []
        self._lock = threading.Lock()

    def publish(self, count: int) -> None:
        for message in self._messages(count):
            self.cluster.publish(TOPIC, message)

    def publish_mixed(self, count: int) -> None:
        """Publish batches of five, whatever the keys, as a producer of an entry bucket."""
        self.cluster.publish(
            TOPIC, *self._messages(count), batching=Batching.MIXED, batch_messages_max=5
        )

    def _messages(self, count: int) -> list[Stored]:
        first, self.sent = self.sent, self.sent + count
        return [
            Stored(b"%d" % number, key=KEYS[number % len(KEYS)])
            for number in range(first, self.sent)
        ]

    def handle(self, message: Message) -> None:
        with self._lock:
            self.got.append((str(message.key), int(message.value or b"")))

    def split(self, number: int) -> None:
        self.cluster.scalable.split(TOPIC, number)

    def running(
        self, source: SourceConfig, checkpoint: Checkpoint | None = None, **how: Any
    ) -> AbstractContextManager[Coordinator]:
        admin = MemoryAdmin(self.cluster)
        return running(self.cluster, source, checkpoint, admin=admin, **how)

    def findings(self, expected: Expected | None = None) -> dict[str, tuple[Level, str, str]]:
        """What ``keyshard doctor`` finds, by its subject."""
        found = examine(
            source_of(), lambda: MemoryBroker(self.cluster), MemoryAdmin(self.cluster), expected
        )
        return {one.about: (one.level, one.text, one.advice) for one in found}

    def take(self, rows: dict[int, list[dict[str, object]]]) -> None:
        self.got += [
            (str(row["__key"]), int(row["value"]))  # type: ignore[call-overload]
            for layout in rows.values()
            for row in layout
        ]

    def drain(self, coordinator: Coordinator, rows_max: int | None = None) -> None:
        """Take and commit batches until there is a row for each message."""
        while len(self.got) < self.sent:
            if (end := coordinator.batches.cut(rows_max)) is not None:
                self.take(rows_of(coordinator, end))
                coordinator.batches.release(end)

    def check(self) -> None:
        """Check that each message was given once, and those of a key in their order."""
        numbers = [number for _, number in self.got]
        assert sorted(numbers) == list(range(self.sent))
        for key in KEYS:
            of_key = [number for one, number in self.got if one == key]
            assert of_key == sorted(of_key), key


def source_of(topic: str = TOPIC, **changes: object) -> SourceConfig:
    """A source that looks for segments when the broker reports them, or a test makes it."""
    fields = {"discovery_interval_ms": 86_400_000, "admin_url": "http://memory"} | changes
    return config(topic, **fields)
