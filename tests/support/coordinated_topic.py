"""A topic on the in-memory broker, and batches that a coordinator cuts of it."""

from __future__ import annotations

from typing import Any

from keyshard.broker.memory import Batching, MemoryCluster, Message
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.position.checkpoint import Checkpoint
from tests.helpers import config

KEYS = [f"key-{i}" for i in range(12)]


class CoordinatedTopic:
    """A cluster with one topic of two partitions, and its messages."""

    def __init__(self) -> None:
        self.cluster = MemoryCluster(entries_per_ledger=50)
        self.topic = self.cluster.create_topic("orders", partitions=2)
        self.where = self.cluster.partitions(self.topic)
        self.source = config(self.topic)
        self.count = 0

    def publish(
        self, count: int, *, batching: Batching = Batching.NONE, publish_ms: int = 1_000
    ) -> None:
        """Messages with twelve keys; each value says key and sequence number."""
        messages = []
        for _ in range(count):
            key = KEYS[self.count % len(KEYS)]
            messages.append(Message(f"{key}:{self.count}".encode(), key=key))
            self.count += 1
        self.cluster.publish(
            self.topic, *messages, batching=batching, batch_messages_max=4, publish_ms=publish_ms
        )

    @property
    def backlog(self) -> int:
        return sum(self.cluster.backlog(where, "unit") for where in self.where)

    def all_values(self) -> list[str]:
        return sorted(f"{KEYS[i % len(KEYS)]}:{i}" for i in range(self.count))


def values(rows: dict[int, list[dict[str, Any]]]) -> list[str]:
    return [row["value"].decode() for part in rows.values() for row in part]


def assert_in_order(rows: dict[int, list[dict[str, Any]]], last: dict[str, int]) -> None:
    """Rows of a key lie in one partition, in publish order after those of earlier batches."""
    homes: dict[str, int] = {}
    for index, part in rows.items():
        for row in part:
            key, number = row["value"].decode().split(":")
            assert homes.setdefault(key, index) == index
            assert int(number) > last.get(key, -1), "a key is out of order"
            last[key] = int(number)


def cut(coordinator: Coordinator, rows_max: int | None = None) -> Checkpoint:
    end = coordinator.batches.cut(rows_max)
    assert end is not None
    return end
