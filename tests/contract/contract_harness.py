"""What a contract case needs of a broker beside the port, for the in-memory and the real one."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import _pulsar
import httpx
import pulsar

from keyshard.broker.admin import PulsarAdmin
from keyshard.broker.memory import Batching, LookAhead, MemoryBroker, MemoryCluster, Message
from keyshard.broker.memory_admin import MemoryAdmin
from keyshard.broker.port import Broker, Consumer, Reader, StartPosition
from keyshard.broker.pulsar import PulsarBroker
from keyshard.core.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.hash_range import HashRange, split_ring
from keyshard.runtime.subscribe import Admin

SUBSCRIPTION = "contract"
WHOLE_RING = split_ring(1)[0]
RECEIVE_MS = 10
DEADLINE_S = 20.0


class Harness(Protocol):
    """One cluster with its topics."""

    look_ahead_per_consumer: int
    """Entries that may wait for their owner for each connected consumer."""
    idle_s: float
    """Time without a message after which no more is expected."""

    def broker(self) -> Broker:
        """Open a connection; it is closed at the end of the test."""

    def create_topic(self, partitions: int = 0) -> str:
        """Create a topic nobody else uses, without partitions by default; its full name."""

    def publish(
        self, topic: str, messages: Sequence[Message], batching: Batching = Batching.NONE
    ) -> None:
        """Publish and wait until all is stored; with batching, one entry for each batch."""

    def backlog(self, topic_partition: TopicPartition, subscription: str = SUBSCRIPTION) -> int:
        """Entries the broker holds unacknowledged."""

    def drop_connections(self, topic_partition: TopicPartition) -> None:
        """Make every consumer of a topic partition reconnect."""

    def grow_topic(self, topic: str, partitions: int) -> None:
        """Give a partitioned topic more partitions."""

    def delete_topic(self, topic: str) -> None:
        """Delete a topic by force."""

    def admin(self) -> Admin:
        """The admin interface."""

    def close_producers(self) -> None:
        """End what :meth:`publish` opened."""

    def roll_ledger(self, topic_partition: TopicPartition) -> None:
        """Make the next entry of a topic partition open another ledger."""

    def close(self) -> None:
        """Close every connection."""


class MemoryHarness:
    """The in-memory broker, with a short look-ahead so that a stall needs few messages."""

    look_ahead_per_consumer = 100
    idle_s = 0.05

    def __init__(self) -> None:
        self._cluster = MemoryCluster(
            look_ahead=LookAhead(self.look_ahead_per_consumer), now_ms=_now_ms
        )
        self._brokers: list[MemoryBroker] = []

    def broker(self) -> Broker:
        self._brokers.append(MemoryBroker(self._cluster))
        return self._brokers[-1]

    def create_topic(self, partitions: int = 0) -> str:
        return self._cluster.create_topic(_unique_name(), partitions)

    def publish(
        self, topic: str, messages: Sequence[Message], batching: Batching = Batching.NONE
    ) -> None:
        self._cluster.publish(topic, *messages, batching=batching)

    def backlog(self, topic_partition: TopicPartition, subscription: str = SUBSCRIPTION) -> int:
        return self._cluster.backlog(topic_partition, subscription)

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

    def close_producers(self) -> None:
        pass

    def roll_ledger(self, topic_partition: TopicPartition) -> None:
        self._cluster.roll_ledger(topic_partition)

    def close(self) -> None:
        self._cluster.validate()
        for broker in self._brokers:
            broker.close()


class PulsarHarness:
    """A real broker, reached with pulsar-client and the admin REST interface."""

    look_ahead_per_consumer = 2_000
    idle_s = 0.8

    def __init__(self, service_url: str, admin_url: str) -> None:
        self._service_url = service_url
        self._admin = httpx.Client(base_url=admin_url, timeout=10)
        self._own_admin = PulsarAdmin(admin_url)
        self._client = pulsar.Client(
            service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
        )
        self._producers: dict[tuple[str, Batching], pulsar.Producer] = {}
        self._brokers: list[PulsarBroker] = []

    def broker(self) -> Broker:
        self._brokers.append(PulsarBroker(self._service_url))
        return self._brokers[-1]

    def create_topic(self, partitions: int = 0) -> str:
        topic = f"persistent://public/default/{_unique_name()}"
        if partitions:
            self._put(f"{_path(topic)}/partitions", json=partitions)
        else:
            self._put(_path(topic))
        return topic

    def publish(
        self, topic: str, messages: Sequence[Message], batching: Batching = Batching.NONE
    ) -> None:
        producer = self._producer(topic, batching)
        failures: list[Any] = []

        def sent(result: Any, _message_id: Any) -> None:
            if result != pulsar.Result.Ok:
                failures.append(result)

        for message in messages:
            # The wrapper drops an empty key, so the extension's own builder is used.
            producer._producer.send_async(_to_pulsar(message), sent)
        producer.flush()
        assert not failures

    def backlog(self, topic_partition: TopicPartition, subscription: str = SUBSCRIPTION) -> int:
        answer = self._admin.get(
            f"{_path(topic_partition.name)}/stats", params={"getPreciseBacklog": "true"}
        )
        answer.raise_for_status()
        backlog = answer.json()["subscriptions"][subscription]["msgBacklog"]
        assert isinstance(backlog, int)
        return backlog

    def drop_connections(self, topic_partition: TopicPartition) -> None:
        self._put(f"{_path(topic_partition.name)}/unload")

    def roll_ledger(self, topic_partition: TopicPartition) -> None:
        self._put(f"{_path(topic_partition.name)}/unload")

    def grow_topic(self, topic: str, partitions: int) -> None:
        self._admin.post(f"{_path(topic)}/partitions", json=partitions).raise_for_status()

    def delete_topic(self, topic: str) -> None:
        self.close_producers()
        partitioned = self._admin.get(f"{_path(topic)}/partitions").json()["partitions"] > 0
        path = f"{_path(topic)}/partitions" if partitioned else _path(topic)
        self._admin.delete(path, params={"force": "true"}).raise_for_status()

    def admin(self) -> Admin:
        return self._own_admin

    def close_producers(self) -> None:
        for producer in self._producers.values():
            producer.close()
        self._producers.clear()

    def close(self) -> None:
        for broker in self._brokers:
            broker.close()
        self._own_admin.close()
        self._client.close()
        self._admin.close()

    def _producer(self, topic: str, batching: Batching) -> pulsar.Producer:
        if (topic, batching) not in self._producers:
            by_key = batching is Batching.BY_KEY
            self._producers[topic, batching] = self._client.create_producer(
                topic,
                block_if_queue_full=True,
                max_pending_messages=10_000,
                batching_enabled=batching is not Batching.NONE,
                batching_type=pulsar.BatchingType.KeyBased if by_key else _MIXED,
                batching_max_messages=10_000,
                batching_max_allowed_size_in_bytes=1024 * 1024,
                # Never reached: flush sends, so that a batch is one entry however slow the test is.
                batching_max_publish_delay_ms=5_000,
            )
        return self._producers[topic, batching]

    def _put(self, path: str, **body: Any) -> None:
        self._admin.put(path, **body).raise_for_status()


_MIXED = pulsar.BatchingType.Default


def _to_pulsar(message: Message) -> Any:
    builder = _pulsar.MessageBuilder().content(message.value)
    if message.key is not None:
        builder.partition_key(message.key)
    if message.ordering_key is not None:
        builder.ordering_key(message.ordering_key)
    for name, value in message.properties.items():
        builder.property(name, value)
    if message.event_ms:
        builder.event_timestamp(message.event_ms)
    return builder.build()


def _path(topic: str) -> str:
    return f"/admin/v2/{topic.replace('://', '/')}"


def _unique_name() -> str:
    return f"contract-{uuid.uuid4().hex}"


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def subscribe(
    broker: Broker,
    topic_partition: TopicPartition,
    hash_range: HashRange = WHOLE_RING,
    *,
    subscription: str = SUBSCRIPTION,
    start: StartPosition = StartPosition.EARLIEST,
    receiver_queue_size: int = 1_000,
) -> Consumer:
    """Subscribe with the values most cases want."""
    return broker.subscribe(
        topic_partition,
        subscription,
        hash_range,
        start=start,
        consumer_name=f"range-{hash_range}",
        receiver_queue_size=receiver_queue_size,
    )


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll until a condition holds; fail at the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)


class Received:
    """Blocks that consumers or a reader handed out, in the order they came."""

    def __init__(self) -> None:
        self.deliveries: list[tuple[Consumer | None, EntryBlock]] = []

    @property
    def blocks(self) -> list[EntryBlock]:
        """All blocks."""
        return [block for _, block in self.deliveries]

    @property
    def ids(self) -> list[EntryId]:
        """Entry of each block, without repeating it for its next part."""
        ids: list[EntryId] = []
        for block in self.blocks:
            if not (ids and ids[-1] == block.id):
                ids.append(block.id)
        return ids

    @property
    def values(self) -> list[bytes]:
        """Value of each message."""
        return [value for block in self.blocks for value in block.values]

    def by_key(self) -> dict[str | None, list[bytes]]:
        """Values of each partition key, in the order they came."""
        values: dict[str | None, list[bytes]] = {}
        for block in self.blocks:
            for key, value in zip(block.partition_keys, block.values, strict=True):
                values.setdefault(key, []).append(value)
        return values

    def take(self, consumers: Iterable[Consumer]) -> int:
        """Receive once from each consumer; the number of messages that came."""
        rows = 0
        for consumer in consumers:
            for block in consumer.receive(RECEIVE_MS):
                self.deliveries.append((consumer, block))
                rows += block.rows
        return rows


def receive(consumers: Sequence[Consumer], messages: int) -> Received:
    """Receive until ``messages`` messages came, and then whatever still comes."""
    received, rows = Received(), 0
    deadline = time.monotonic() + DEADLINE_S
    while rows < messages:
        assert time.monotonic() < deadline, f"{rows} of {messages} messages came in time"
        rows += received.take(consumers)
    while received.take(consumers):
        pass
    return received


def receive_until_idle(
    consumers: Sequence[Consumer], received: Received, idle_s: float, at_least: int = 0
) -> None:
    """Receive until ``at_least`` messages came in all, and then nothing for a while."""
    deadline = time.monotonic() + DEADLINE_S
    rows = len(received.values)
    while rows < at_least:
        assert time.monotonic() < deadline, f"{rows} of {at_least} messages came in time"
        rows += received.take(consumers)
    quiet_since = time.monotonic()
    while time.monotonic() - quiet_since < idle_s:
        if received.take(consumers):
            quiet_since = time.monotonic()


def read_to_end(reader: Reader) -> Received:
    """Read until the reader says that it is at the end."""
    received = Received()
    deadline = time.monotonic() + DEADLINE_S
    while not reader.at_end():
        assert time.monotonic() < deadline, "the reader did not reach the end in time"
        received.deliveries += [(None, block) for block in reader.read(RECEIVE_MS)]
    return received
