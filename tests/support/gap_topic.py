"""A topic with gaps: markers, acknowledgements of other clients, and a range that receives late."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from keyshard.broker.admin.port import Admin
from keyshard.broker.memory import (
    LookAhead,
    MemoryBroker,
    MemoryCluster,
    MemoryConsumer,
    Message,
)
from keyshard.broker.memory.admin import MemoryAdmin
from keyshard.broker.port import StartPosition, SubscriptionSpec
from keyshard.config.source import SourceConfig
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.position.checkpoint import PartitionCheckpoint
from keyshard.core.position.entry import EntryId
from keyshard.core.ring.hash_range import HashRange, split_ring
from tests.helpers import commit, config, key_in, running, wait_until
from tests.support.faulty_broker import Fault, ScriptedCall, faulty

FAST, SLOW = split_ring(2)
FAST_KEY, SLOW_KEY = key_in(FAST), key_in(SLOW)


class GapTopic:
    """A topic of one partition, with markers and acknowledgements of other clients."""

    def __init__(self, *, entries_per_ledger: int = 50_000) -> None:
        self.cluster = MemoryCluster(
            entries_per_ledger=entries_per_ledger, look_ahead=LookAhead(100_000, 100_000)
        )
        self.topic = self.cluster.create_topic("orders", partitions=1)
        (self.where,) = self.cluster.partitions(self.topic)
        self.admin = MemoryAdmin(self.cluster)

    def publish(self, *keys: str, publish_ms: int = 1_000) -> list[EntryId]:
        messages = [Message(b"m", key=key) for key in keys]
        made = self.cluster.publish(self.where, *messages, publish_ms=publish_ms)
        return [entry_id for _, entry_id in made]

    def source(self, **changes: object) -> SourceConfig:
        return config(self.topic, **{"parallelism": 2, "settle_after_ms": 20} | changes)

    def acknowledge(self, entries: Sequence[EntryId]) -> None:
        self.cluster.acknowledge(self.where, "unit", entries)

    def earlier_owner(self) -> tuple[MemoryBroker, MemoryConsumer]:
        """A consumer that owns the whole ring of the subscription before the source begins."""
        broker = MemoryBroker(self.cluster)
        return broker, broker.subscribe(
            SubscriptionSpec(
                self.where,
                "unit",
                split_ring(1)[0],
                consumer_name="earlier",
                receiver_queue_size=100,
            ),
            StartPosition.EARLIEST,
        )

    def backlog(self) -> int:
        return self.cluster.backlog(self.where, "unit")


def one_more(topic: GapTopic, coordinator: Coordinator) -> PartitionCheckpoint:
    """Publish an entry, commit what has come as a batch, and return the state."""
    topic.publish(FAST_KEY)
    coordinator.batches.wait_for_rows(5)
    return commit(coordinator).partitions[topic.where]


def resolved_by_batches(topic: GapTopic, coordinator: Coordinator) -> PartitionCheckpoint:
    """Publish single entries, each its own batch, until ack gaps are resolved."""
    state = PartitionCheckpoint()

    def resolved() -> bool:
        nonlocal state
        topic.publish(FAST_KEY)
        coordinator.batches.wait_for_rows(5)
        if coordinator.status()["windowRows"]:
            state = commit(coordinator).partitions[topic.where]
        return coordinator.status()["ackGaps"] == 0

    wait_until(resolved)
    return state


def wait_rounds(rounds: ScriptedCall) -> None:
    """Wait for many more rounds than an acknowledgement needs to count as lasting."""
    before = len(rounds.asked)
    wait_until(lambda: len(rounds.asked) >= before + 10)


class Gate:
    """Withholds the entries of one range, and counts Readers."""

    def __init__(self, hash_range: HashRange = SLOW) -> None:
        self.hash_range = hash_range
        self.closed = True
        self._reader = ScriptedCall()

    @property
    def readers(self) -> int:
        return len(self._reader.asked)

    def open(self) -> None:
        self.closed = False

    def broker(self, topic: GapTopic) -> MemoryBroker:
        """A client whose consumers of the range receive nothing while the gate is closed."""
        return faulty(MemoryBroker(topic.cluster), subscribe=self._subscribe, reader=self._reader)

    def _subscribe(self, call: Fault, spec: SubscriptionSpec, start: StartPosition) -> Any:
        consumer = call(spec, start)
        if spec.hash_range == self.hash_range:
            faulty(consumer, receive=lambda call, ms: [] if self.closed else call(ms))
        return consumer


def running_gated(
    topic: GapTopic, source: SourceConfig, gate: Gate, admin: Admin | None = None
) -> AbstractContextManager[Coordinator]:
    """A started coordinator whose consumers a gate may stop."""
    return running(topic.cluster, source, admin=admin, connect=lambda: gate.broker(topic))
