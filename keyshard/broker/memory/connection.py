"""One client of the in-memory broker.

Private to :mod:`keyshard.broker.memory`, which documents the whole and re-exports the public names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from keyshard.broker.memory.client import Connection, MemoryConsumer, MemoryReader
from keyshard.broker.memory.producer import MemoryProducer
from keyshard.broker.port import ANYHOW, HowToRead, StartPosition, WorkerFacts
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.ring.hash_range import HashRange
from keyshard.errors import BrokerError, ConfigError

if TYPE_CHECKING:
    from keyshard.broker.memory.cluster import MemoryCluster

_Handle: TypeAlias = MemoryConsumer | MemoryReader | MemoryProducer
"""What loses its connection with the client."""


class MemoryBroker:
    """One client connection to a :class:`MemoryCluster`; implements the ``Broker`` port."""

    def __init__(self, cluster: MemoryCluster) -> None:
        self._cluster = cluster
        self._consumers: list[MemoryConsumer] = []
        self._readers: list[MemoryReader] = []
        self._producers: list[MemoryProducer] = []
        self._frozen = False
        self._closed = False
        self._connection = Connection(
            lock=cluster.lock,
            now_ms=cluster.now_ms,
            answers=self._answers,
            frozen=lambda: self._frozen,
            group_ms=cluster.ack_group_ms,
            grouped=cluster.grouped,
            catch_up=cluster.catch_up,
        )
        cluster.attach(self)

    def missing(self, topics: Sequence[str]) -> frozenset[str]:
        self._check_open()
        stored = self._cluster.topics()
        parts = {where.name for partitions in stored.values() for where in partitions}
        return frozenset(topics) - stored.keys() - parts

    def partitions(self, topic: str) -> tuple[TopicPartition, ...]:
        self._check_open()
        return self._cluster.partitions(topic)

    def subscribe(
        self,
        topic_partition: TopicPartition,
        subscription: str,
        hash_range: HashRange,
        *,
        start: StartPosition,
        consumer_name: str,
        receiver_queue_size: int,
        receiver_queue_bytes: int | None = None,  # noqa: ARG002 - as with pulsar-client
        columns: Collection[str] | None = None,
    ) -> MemoryConsumer:
        if receiver_queue_size < 1:
            raise ConfigError(f"receiver_queue_size must be at least 1, got {receiver_queue_size}.")
        with self._cluster.lock:
            self._check_open()
            consumer = MemoryConsumer(
                connection=self._connection,
                find=lambda: self._cluster.open_subscription(topic_partition, subscription, start),
                topic_partition=topic_partition,
                hash_range=hash_range,
                name=consumer_name,
                receiver_queue_size=receiver_queue_size,
                columns=columns,
            )
            consumer.connect()
            self._consumers.append(consumer)
        return consumer

    def reader(
        self,
        topic_partition: TopicPartition,
        start: EntryId,
        how: HowToRead = ANYHOW,
    ) -> MemoryReader:
        with self._cluster.lock:
            self._check_open()
            log = self._cluster.open_log(topic_partition)
            reader = MemoryReader(self._cluster.lock, log, topic_partition, start, how.columns)
            self._readers.append(reader)
        return reader

    def workers(self) -> tuple[WorkerFacts, ...]:
        return ()

    def producer(self, topic_partition: TopicPartition, *, send_timeout_ms: int) -> MemoryProducer:
        with self._cluster.lock:
            self._check_open()
            self._cluster.open_log(topic_partition)
            producer = MemoryProducer(
                self._cluster.lock,
                self._cluster.publish,
                topic_partition,
                send_timeout_ms,
                message_bytes_max=self._cluster.message_bytes_max,
            )
            self._producers.append(producer)
        return producer

    def drop(self, of: Collection[TopicPartition] | None = None) -> list[_Handle]:
        """Lose the connection: the broker forgets the consumers, which do not notice.

        They keep what is in their queues, and their acknowledgements are lost. Producers wait, and
        what readers say is worth nothing (:class:`MemoryReader`).

        Args:
            of: Only handles of these topic partitions.

        Returns:
            Those that were connected.
        """
        with self._cluster.lock:
            found = [
                handle
                for handle in self._handles
                if handle.is_connected() and (of is None or handle.topic_partition in of)
            ]
            for handle in found:
                handle.drop()
            return found

    def forget(self, topic_partition: TopicPartition, hash_range: HashRange) -> None:
        """Let the broker forget the consumer of a range in silence: it thinks itself connected."""
        with self._cluster.lock:
            for consumer in self._consumers:
                if (consumer.topic_partition, consumer.hash_range) == (topic_partition, hash_range):
                    consumer.forget()

    def reconnect(self, dropped: Iterable[_Handle] | None = None) -> None:
        """Bring every dropped consumer back with an empty queue, every reader and producer.

        One whose range somebody else took meanwhile stays without connection and says nothing,
        as Pulsar's client does; call it again to let it retry. A frozen client does nothing.
        """
        with self._cluster.lock:
            if not self._frozen:
                for handle in self._handles if dropped is None else dropped:
                    handle.reconnect()

    def disconnect(self) -> None:
        """Lose the connection and get it back at once; what is unacknowledged comes again."""
        with self._cluster.lock:
            self.drop()
            self.reconnect()

    def freeze(self) -> None:
        """Stop the client's process, as SIGSTOP does: the broker thinks that it holds its ranges.

        It loses them all when somebody else subscribes to one of them, because it does not answer.
        """
        with self._cluster.lock:
            self._frozen = True

    def thaw(self) -> None:
        """Let a frozen process go on; what it lost meanwhile it tries to get back."""
        with self._cluster.lock:
            self._frozen = False
            self.reconnect()

    def kill(self) -> None:
        """End the client's process at once, as SIGKILL does: what it grouped is lost."""
        with self._cluster.lock:
            self._close_all(flush=False)

    def close(self) -> None:
        with self._cluster.lock:
            self._close_all(flush=True)

    @property
    def _handles(self) -> list[_Handle]:
        return [*self._consumers, *self._readers, *self._producers]

    def _close_all(self, *, flush: bool) -> None:
        self._closed = True
        for consumer in self._consumers:
            if flush:
                consumer.close()
            else:
                consumer.abandon()
        for reader in self._readers:
            reader.close()
        for producer in self._producers:
            producer.close()
        self._cluster.detach(self)

    def _answers(self) -> bool:
        if self._frozen:
            self.drop()
        return not self._frozen

    def _check_open(self) -> None:
        if self._closed:
            raise BrokerError("The connection to the in-memory cluster is closed.")
