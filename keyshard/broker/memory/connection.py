"""One client of the in-memory broker.

Private to :mod:`keyshard.broker.memory`, which documents the package and re-exports public names.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeAlias

from keyshard.broker.memory.client import MemoryConnection, MemoryConsumer, MemoryReader
from keyshard.broker.memory.cluster import MemoryCluster
from keyshard.broker.memory.entry_producer import MemoryEntryProducer
from keyshard.broker.memory.producer import MemoryProducer
from keyshard.broker.memory.scalable_topics import MemorySegmentWatch
from keyshard.broker.memory.topics import MemoryTopicWatch
from keyshard.broker.port import (
    DEFAULT_READ_OPTIONS,
    PublishOptions,
    ReadOptions,
    StartPosition,
    SubscriptionSpec,
)
from keyshard.broker.reports import WorkerFacts
from keyshard.core.message import MessageId
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.ring.hash_range import HashRange
from keyshard.errors import BrokerError, ConfigError, RangeConflictError

_names = itertools.count()
_Handle: TypeAlias = MemoryConsumer | MemoryReader | MemoryProducer | MemoryEntryProducer
"""Handles that lose their connection with the client."""


class MemoryBroker:
    """One client connection to a :class:`MemoryCluster`; implements the ``Broker`` port."""

    def __init__(self, cluster: MemoryCluster) -> None:
        self._cluster = cluster
        self._consumers: list[MemoryConsumer] = []
        self._readers: list[MemoryReader] = []
        self._producers: list[MemoryProducer | MemoryEntryProducer] = []
        self._watches: list[MemoryTopicWatch | MemorySegmentWatch] = []
        self._frozen = False
        self._closed = False
        self._connection = MemoryConnection(
            lock=cluster.lock,
            now_ms=cluster.now_ms,
            answers=self._answers,
            frozen=lambda: self._frozen,
            group_ms=cluster.ack_group_ms,
            grouped=cluster.grouped,
            catch_up=cluster.catch_up,
            send_due=cluster.send_due,
        )
        cluster.attach(self)

    def missing(self, topics: Sequence[str]) -> frozenset[str]:
        self._check_open()
        stored = self._cluster.topics()
        parts = {where.name for partitions in stored.values() for where in partitions}
        return frozenset(topics) - stored.keys() - parts

    def partitions(
        self,
        topic: str,
        *,
        create: bool = False,  # noqa: ARG002 - it creates topics without partitions
    ) -> tuple[TopicPartition, ...]:
        self._check_open()
        return self._cluster.partitions(topic)

    def watch_topics(
        self, prefix: str, changed: Callable[[Collection[str]], None]
    ) -> MemoryTopicWatch | None:
        self._check_open()
        watch = self._cluster.watch_topics(prefix, changed)
        if watch is not None:
            self._watches.append(watch)
        return watch

    def watch_segments(self, topic: str, changed: Callable[[], None]) -> MemorySegmentWatch:
        self._check_open()
        watch = self._cluster.scalable.watch(topic, changed)
        self._watches.append(watch)
        return watch

    def begin(
        self,
        topic_partition: TopicPartition,
        subscription: str,
        start: MessageId | int,
        batch_size: int = 1,
    ) -> EntryId:
        with self._cluster.lock:
            self._check_open()
            where, cluster = topic_partition, self._cluster
            log = cluster.open_log(where)
            if cluster.open_subscription(where, subscription, StartPosition.EARLIEST).members:
                raise RangeConflictError(
                    f"Could not move a subscription of {where}: it has consumers.", "Stop them."
                )
            first = log.position_at(start) if isinstance(start, int) else EntryId(*start[:2])
            cluster.reset_cursor(where, subscription, first)
            cursor = cluster.subscription(where, subscription).cursor
            if isinstance(start, MessageId) and start.batch_index:
                cursor.ack_indices(cursor.mark_delete + 1, range(start.batch_index), batch_size)
                cursor.write(cluster.now_ms())
            if cursor.mark_delete < 0:
                return EntryId(min(log.ledger_sizes), 0)
            marked = log.id(cursor.mark_delete)
            return EntryId(marked.ledger, marked.entry + 1)

    def subscribe(self, spec: SubscriptionSpec, start: StartPosition) -> MemoryConsumer:
        size, where, name = spec.receiver_queue_size, spec.topic_partition, spec.subscription
        if size < 1:
            raise ConfigError(f"receiver_queue_size is {size}; it must be at least 1.")
        with self._cluster.lock:
            self._check_open()
            consumer = MemoryConsumer(
                connection=self._connection,
                find=lambda: self._cluster.open_subscription(where, name, start),
                topic_partition=where,
                hash_range=spec.hash_range,
                name=spec.consumer_name,
                receiver_queue_size=size,
                columns=spec.columns,
            )
            consumer.connect()
            self._consumers.append(consumer)
        return consumer

    def reader(
        self,
        topic_partition: TopicPartition,
        start: EntryId,
        how: ReadOptions = DEFAULT_READ_OPTIONS,
    ) -> MemoryReader:
        with self._cluster.lock:
            self._check_open()
            # A partition without entries may not be created yet, although its topic is.
            find = self._cluster.open_log if topic_partition.partition >= 0 else self._cluster.log
            log = find(topic_partition)
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

    def entry_producer(
        self, topic_partition: TopicPartition, how: PublishOptions
    ) -> MemoryEntryProducer:
        with self._cluster.lock:
            self._check_open()
            self._cluster.open_log(topic_partition)

            def last_entry() -> EntryId | None:
                return self._cluster.open_log(topic_partition).last_id

            producer = MemoryEntryProducer(
                self._cluster.lock,
                self._cluster.publishing,
                self._cluster.store_entry,
                topic_partition,
                how=how,
                name=how.name or f"memory-{next(_names)}",
                message_bytes_max=self._cluster.message_bytes_max,
                knows_every_id=self._cluster.release.knows_every_id,
                answers=self._answers,
                last_entry=last_entry,
            )
            producer.open()
            self._producers.append(producer)
        return producer

    def drop(self, of: Collection[TopicPartition] | None = None) -> list[_Handle]:
        """Lose the connection: the broker forgets the consumers, which do not notice.

        They keep their queues, and their acknowledgements are lost. Producers wait, and the answers
        of readers prove nothing (:class:`MemoryReader`).

        Args:
            of: If given, only handles of these topic partitions.

        Returns:
            The handles that were connected.
        """
        with self._cluster.lock:
            found = [
                handle
                for handle in self._handles
                if handle.is_connected() and (of is None or handle.topic_partition in of)
            ]
            for handle in found:
                handle.drop()
            for watch in self._watches if of is None else ():
                watch.close()
            return found

    def forget(self, topic_partition: TopicPartition, hash_range: HashRange) -> None:
        """Make the broker silently forget the consumer of a range, which still seems connected."""
        with self._cluster.lock:
            for consumer in self._consumers:
                if (consumer.topic_partition, consumer.hash_range) == (topic_partition, hash_range):
                    consumer.forget()

    def reconnect(self, dropped: Iterable[_Handle] | None = None) -> None:
        """Reconnect every dropped consumer with an empty queue, every reader and every producer.

        If another consumer took the range meanwhile, the consumer silently stays disconnected,
        as in Pulsar's client. Call it again for another attempt. A frozen client does nothing.
        """
        with self._cluster.lock:
            if not self._frozen:
                for handle in self._handles if dropped is None else dropped:
                    handle.reconnect()

    def move_readers(self, topic_partition: TopicPartition) -> None:
        """Move the cursors of connected readers, which then connect again."""
        with self._cluster.lock:
            for reader in self._readers:
                if reader.topic_partition == topic_partition and reader.is_connected():
                    reader.drop()
                    reader.reconnect()

    def disconnect(self) -> None:
        """Lose the connection and reconnect at once; unacknowledged entries are redelivered."""
        with self._cluster.lock:
            self.drop()
            self.reconnect()

    def freeze(self) -> None:
        """Suspend the client's process, as SIGSTOP does. The broker still assigns it its ranges.

        It does not answer, so it loses all of them when another client subscribes to one of them.
        """
        with self._cluster.lock:
            self._frozen = True

    def thaw(self) -> None:
        """Resume a frozen process; it tries to regain the handles that it lost."""
        with self._cluster.lock:
            self._frozen = False
            self.reconnect()

    def kill(self) -> None:
        """Kill the client's process, as SIGKILL does: grouped acknowledgements are lost."""
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
        for watch in self._watches:
            watch.close()
        self._cluster.detach(self)

    def _answers(self) -> bool:
        if self._frozen:
            self.drop()
        return not self._frozen

    def _check_open(self) -> None:
        if self._closed:
            raise BrokerError("The connection to the in-memory cluster is closed.")
