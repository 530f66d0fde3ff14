"""An in-memory cluster with changing topics, and their published and received messages."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from typing import Any

from keyshard.broker.memory import MemoryCluster, Message
from keyshard.broker.memory.admin import MemoryAdmin
from keyshard.config.source import SourceConfig
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import TopicPartition
from keyshard.core.releases import DEFAULT_VERSION
from tests.helpers import config, keys_of, rows_of, running

PREFIX = "persistent://public/default/"
KEYS = keys_of(4)


class ChangingTopics:
    """A cluster, with its published messages and those that a source gave."""

    def __init__(self, version: str = DEFAULT_VERSION, *, reports_topics: bool = False) -> None:
        self.cluster = MemoryCluster(version=version, reports_topics=reports_topics)
        self.admin = MemoryAdmin(self.cluster)
        self.sent: Counter[str] = Counter()
        self.got: Counter[str] = Counter()

    def publish(self, topic: str | TopicPartition, count: int) -> None:
        """Messages over all ranges; to a partitioned topic, over all its partitions."""
        name = topic if isinstance(topic, TopicPartition) else PREFIX + topic
        wheres = [name] if isinstance(name, TopicPartition) else self.cluster.partitions(name)
        for where in wheres:
            for _ in range(count):
                number = self.sent.total()
                value = f"{where.name}:{number}"
                self.sent[value] += 1
                message = Message(value.encode(), key=KEYS[number % len(KEYS)])
                self.cluster.publish(where, message, publish_ms=1_000)

    def source(self, topics: Any = (), **changes: Any) -> SourceConfig:
        """A source that looks for topics only when a test makes it."""
        return config(topics, **({"discovery_interval_ms": 86_400_000} | changes))

    def matching(self, regex: str, **changes: Any) -> SourceConfig:
        return self.source(topics_pattern=regex, admin_url="http://memory", **changes)

    def running(
        self,
        source: SourceConfig,
        checkpoint: Checkpoint | None = None,
        *,
        planned: bool = False,
        admin: bool = True,
    ) -> AbstractContextManager[Coordinator]:
        used = self.admin if admin else None
        return running(self.cluster, source, checkpoint, admin=used, planned=planned)

    def take(self, coordinator: Coordinator) -> Checkpoint:
        """Cut, read and commit one batch."""
        end = coordinator.batches.cut()
        assert end is not None
        self.read(coordinator, end)
        coordinator.batches.release(end)
        return end

    def read(self, coordinator: Coordinator, end: Checkpoint) -> None:
        for rows in rows_of(coordinator, end).values():
            self.got.update(row["value"].decode() for row in rows)

    def backlog(self, topic: str) -> int:
        wheres = self.cluster.partitions(PREFIX + topic)
        return sum(self.cluster.backlog(where, "unit") for where in wheres)

    def names(self) -> set[str]:
        return {name.removeprefix(PREFIX) for name in self.cluster.topics()}
