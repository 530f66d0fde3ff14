"""The in-memory broker under the contract."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from keyshard.broker.admin.port import Admin
from keyshard.broker.memory import (
    Batching,
    LookAhead,
    MemoryBroker,
    MemoryCluster,
    Message,
    UnackedLimits,
)
from keyshard.broker.memory.admin import MemoryAdmin
from keyshard.broker.port import Broker
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.releases import DEFAULT_VERSION, release_of
from keyshard.core.ring.hash_range import HashRange
from keyshard.core.topic_schema import TopicSchema
from tests.contract.contract_harness import (
    SUBSCRIPTION,
    OtherClient,
    OtherProducer,
    receive,
    subscribe,
)
from tests.contract.entries import named, numbered, outcome


class MemoryHarness:
    """The in-memory broker, with a short look-ahead so that a stall needs few messages."""

    version = DEFAULT_VERSION
    look_ahead_per_consumer = 100
    idle_s = 0.25
    delay_ms = 3_600_000
    delayed_look_ahead = 50
    whole_entries = False
    empty_keys = True
    not_handed_out: Collection[str] = ("__brokerPublishTime",)
    may_repeat = False
    publishes_entries = True
    reports_topics = True
    names_max = 10

    def __init__(self) -> None:
        self.release = release_of(self.version)
        self._cluster = MemoryCluster(
            version=self.version,
            look_ahead=LookAhead(self.look_ahead_per_consumer, delayed=self.delayed_look_ahead),
            ack_group_ms=100,
            reports_topics=True,
            now_ms=lambda: time.time_ns() // 1_000_000 + self._ahead_ms,
        )
        self._cluster.publishing.names_max = self.names_max
        self._ahead_ms = 0
        self._brokers: list[MemoryBroker] = []
        self._deduplicates = False

    def broker(self) -> Broker:
        self._brokers.append(MemoryBroker(self._cluster))
        return self._brokers[-1]

    def create_topic(self, partitions: int = 0) -> str:
        topic = self._cluster.create_topic(f"contract-{uuid.uuid4().hex}", partitions)
        if self._deduplicates:
            self._cluster.deduplicate(topic)
        return topic

    def create_again(self, topic: str, partitions: int) -> None:
        self._cluster.create_topic(topic, partitions)

    def deduplicate(self) -> None:
        self._deduplicates = True

    def forget_name(self, topic_partition: TopicPartition, name: str) -> None:
        self._cluster.forget_producer(topic_partition, name)

    def publish(
        self, topic: str, messages: Sequence[Message], batching: Batching = Batching.NONE
    ) -> None:
        self._cluster.publish(topic, *messages, batching=batching)

    def pass_time(self, until_ms: int) -> None:
        self._ahead_ms = max(self._ahead_ms, until_ms - time.time_ns() // 1_000_000)

    def publish_at(self, topic: str, times_ms: Sequence[int]) -> None:
        for time_ms in times_ms:
            self._cluster.publish(topic, Message(b"%d" % time_ms, key="k"), publish_ms=time_ms)

    def publish_corrupt(self, topic: str) -> None:
        self._cluster.publish(topic, Message(b"?", key="k"), corrupt=True)

    def publish_encrypted(self, topic: str, key: str, messages: int) -> None:
        sent = [Message(b"secret", key=key)] * messages
        batching = Batching.BY_KEY if messages > 1 else Batching.NONE
        self._cluster.publish(topic, *sent, batching=batching, encrypted=True)

    def backlog(self, topic_partition: TopicPartition, subscription: str = SUBSCRIPTION) -> int:
        return self._cluster.backlog(topic_partition, subscription)

    def expire(self, topic_partition: TopicPartition, before_ms: int) -> None:
        self._cluster.expire(topic_partition, before_ms)

    def drop_connections(
        self,
        topic_partition: TopicPartition,  # noqa: ARG002 - a connection carries all of them
    ) -> None:
        for broker in self._brokers:
            broker.disconnect()

    def grow_topic(self, topic: str, partitions: int) -> None:
        self._cluster.grow_topic(topic, partitions)

    def delete_topic(self, topic: str) -> None:
        self._cluster.delete_topic(topic)

    def admin(self) -> Admin:
        return MemoryAdmin(self._cluster)

    def add_schema(
        self, topic: str, kind: str, definition: str = "", properties: dict[str, str] | None = None
    ) -> None:
        versions = self._cluster.schemas.setdefault(topic, [])
        versions.append(TopicSchema(kind, definition.encode(), len(versions), properties or {}))

    def schema(self, topic: str, version: int | None = None) -> TopicSchema | None:
        return self.admin().schema(topic, version)

    def close_producers(self) -> None:
        pass

    def roll_ledger(self, topic_partition: TopicPartition) -> None:
        self._cluster.roll_ledger(topic_partition)

    def unload(self, topic_partition: TopicPartition) -> None:
        self._cluster.unload(topic_partition)

    def limit_unacked(self, per_consumer: int, per_subscription: int) -> None:
        self._cluster.unacked_limits = UnackedLimits(per_consumer, per_subscription)

    def publish_chunked(self, topic: str, key: str) -> list[EntryId]:
        where = TopicPartition.parse(topic)
        return self._cluster.publish_chunked(where, Message(b"x" * 10, key), 2)

    def other_client(self, topic_partition: TopicPartition, hash_range: HashRange) -> OtherClient:
        return MemoryOtherClient(self._cluster, topic_partition, hash_range)

    def other_producer(self, topic_partition: TopicPartition, name: str) -> OtherProducer:
        return MemoryOtherProducer(self._cluster, topic_partition, name)

    @contextmanager
    def held_writes(self, topic_partition: TopicPartition) -> Iterator[Callable[[], None]]:
        self._cluster.hold_writes(topic_partition)
        yield lambda: self._cluster.fail_writes(topic_partition)
        self._cluster.release_writes(topic_partition)

    def crash(self) -> None:
        self._cluster.crash()

    @contextmanager
    def away(self) -> Iterator[None]:
        for broker in self._brokers:
            broker.drop()
        yield
        for broker in self._brokers:
            broker.reconnect()

    def wipe(self) -> None:
        self._cluster.wipe()

    def transaction(self, topic_partition: TopicPartition, keys: Sequence[str]) -> None:
        self._cluster.publish_aborted(topic_partition, *(Message(b"", key) for key in keys))

    def exceed_quota(self, topic: str, *, exceeded: bool) -> None:
        self._cluster.exceed_quota(topic, exceeded=exceeded)

    def create_scalable(self, segments: int) -> str:
        name = f"topic://public/default/contract-{uuid.uuid4().hex}"
        return self._cluster.scalable.create(name, segments)

    def split(self, topic: str, number: int) -> None:
        self._cluster.scalable.split(topic, number)

    def merge(self, topic: str, lower: int, upper: int) -> None:
        self._cluster.scalable.merge(topic, lower, upper)

    def roll_segments(self, topic: str) -> None:
        for where in self._cluster.scalable.graph(topic).partitions:
            self._cluster.roll_ledger(where)

    def create_again_scalable(self, topic: str) -> None:
        self._cluster.scalable.create(topic)

    def delete_scalable(self, topic: str) -> None:
        self._cluster.scalable.delete(topic)

    def close(self) -> None:
        self._cluster.validate()
        for broker in self._brokers:
            broker.close()


class OldestMemoryHarness(MemoryHarness):
    """The same harness with a cluster that behaves as Pulsar 4.0.8 does."""

    version = "4.0.8"


class MemoryOtherClient:
    """One more client of the cluster."""

    def __init__(
        self, cluster: MemoryCluster, topic_partition: TopicPartition, hash_range: HashRange
    ) -> None:
        self._cluster = cluster
        self._where = topic_partition
        self._broker = MemoryBroker(cluster)
        self._consumer = subscribe(self._broker, topic_partition, hash_range)

    def receive(self, messages: int) -> list[EntryId]:
        return list(dict.fromkeys(receive([self._consumer], messages).ids))

    def acknowledge_and_die(self, entries: Sequence[EntryId]) -> None:
        self._consumer.acknowledge(entries)
        self._broker.kill()

    def acknowledge_indices(self, entry_id: EntryId, indices: Sequence[int]) -> None:
        self._cluster.acknowledge_indices(self._where, SUBSCRIPTION, entry_id, indices)
        self._broker.close()

    def is_connected(self) -> bool:
        self._broker.reconnect()  # as a client tries by itself
        return self._consumer.is_connected()

    def freeze(self) -> None:
        self._broker.freeze()

    def thaw(self) -> None:
        self._broker.thaw()


class MemoryOtherProducer:
    """One more client of the cluster."""

    def __init__(self, cluster: MemoryCluster, where: TopicPartition, name: str) -> None:
        self._broker = MemoryBroker(cluster)
        self._producer = named(self._broker, where, name)

    def publish(self, start: int, stop: int) -> str:
        return outcome(self._producer, start, stop)

    def send(self, start: int, stop: int) -> None:
        self._producer.publish(numbered(start, stop), start)

    def kill(self) -> None:
        self._broker.kill()

    def freeze(self) -> None:
        self._broker.freeze()

    def thaw(self) -> None:
        self._broker.thaw()
