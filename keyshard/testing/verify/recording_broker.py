"""A :class:`~keyshard.broker.port.Broker` that forwards to another one, and records events.

It records ranges, deliveries, acknowledgements, and the dead letters that complete messages.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from keyshard.broker.port import (
    DEFAULT_READ_OPTIONS,
    Broker,
    Consumer,
    EntryProducer,
    Producer,
    PublishOptions,
    Reader,
    ReadOptions,
    StartPosition,
    SubscriptionSpec,
)
from keyshard.broker.reports import SegmentWatch, TopicWatch, WorkerFacts
from keyshard.core.dead_letter import PREFIX
from keyshard.core.message import MessageId
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.ring.hash_range import HashRange
from keyshard.core.ring.key_slot import possible_slots, routing_key
from keyshard.testing.verify.history import Event
from keyshard.testing.verify.workloads import parse_value


def message_name(value: bytes | None, key: str | None) -> tuple[str | None, int | None]:
    """Return key and sequence number of a message, as a history names it.

    Args:
        value: Its payload; the payload of a workload contains both.
        key: Its routing key; ``None`` if it is keyless, and then it has no number.
    """
    if key is None:
        return None, None
    try:
        return parse_value(value or b"")
    except ValueError:
        return key, None


class RecordingBroker:
    """Forwards every call and records it. A range counts as lost just before its consumer closes.

    If another consumer replaces it, the range stays owned. An owner that gains the range before the
    replacement comes is recorded as a second owner.

    Args:
        broker: The broker that does the work.
        write: Takes events, from any thread.
        worker: Name of the owner of the ranges.
        clock: Returns seconds.
        epoch: Returns the number of the current assignment, or ``None`` if nothing counts it.
        subscription: Subscription to record; ``None``: all.
    """

    def __init__(
        self,
        broker: Broker,
        write: Callable[[Iterable[Event]], None],
        worker: str,
        clock: Callable[[], float],
        *,
        epoch: Callable[[], int | None] = lambda: None,
        subscription: str | None = None,
    ) -> None:
        self._broker = broker
        self._write = write
        self._worker = worker
        self._clock = clock
        self._epoch = epoch
        self._subscription = subscription
        self._lock = threading.Lock()
        self._open: set[_RecordingConsumer] = set()
        self._owners: Counter[tuple[TopicPartition, HashRange]] = Counter()
        """Consumers of each range: a replacement subscribes before the lost one is closed."""
        self._replaced: dict[tuple[TopicPartition, HashRange], _RecordingConsumer] = {}
        """Closed consumers that wait for their replacement."""

    def missing(self, topics: Sequence[str]) -> frozenset[str]:
        return self._broker.missing(topics)

    def partitions(self, topic: str, *, create: bool = False) -> tuple[TopicPartition, ...]:
        return self._broker.partitions(topic, create=create)

    def watch_topics(
        self, prefix: str, changed: Callable[[Collection[str]], None]
    ) -> TopicWatch | None:
        return self._broker.watch_topics(prefix, changed)

    def watch_segments(self, topic: str, changed: Callable[[], None]) -> SegmentWatch:
        return self._broker.watch_segments(topic, changed)

    def begin(
        self,
        topic_partition: TopicPartition,
        subscription: str,
        start: MessageId | int,
        batch_size: int = 1,
    ) -> EntryId:
        return self._broker.begin(topic_partition, subscription, start, batch_size)

    def subscribe(self, spec: SubscriptionSpec, start: StartPosition) -> Consumer:
        consumer = self._broker.subscribe(spec, start)
        if self._subscription not in {None, spec.subscription}:
            return consumer
        recording = _RecordingConsumer(consumer, self)
        owned = spec.topic_partition, spec.hash_range
        with self._lock:
            self._open.add(recording)
            self._owners[owned] += 1
            replaced = self._replaced.pop(owned, None)
            if replaced in self._open:
                self._open.remove(replaced)
                self._owners[owned] -= 1
        gained = self._event(
            "range_gained", consumer, range=str(spec.hash_range), epoch=self._epoch()
        )
        self._write([gained])
        return recording

    def reader(
        self,
        topic_partition: TopicPartition,
        start: EntryId,
        how: ReadOptions = DEFAULT_READ_OPTIONS,
    ) -> Reader:
        return self._broker.reader(topic_partition, start, how)

    def workers(self) -> Sequence[WorkerFacts]:
        return self._broker.workers()

    def entry_producer(self, topic_partition: TopicPartition, how: PublishOptions) -> EntryProducer:
        return self._broker.entry_producer(topic_partition, how)

    def producer(self, topic_partition: TopicPartition, *, send_timeout_ms: int) -> Producer:
        producer = self._broker.producer(topic_partition, send_timeout_ms=send_timeout_ms)
        return _RecordingProducer(producer, self)

    def close(self) -> None:
        with self._lock:
            left = list(self._open)
        for recording in left:
            self.give_up(recording)
        self._broker.close()

    # -- called by its consumers ------------------------------------------------------------------

    def give_up(self, recording: _RecordingConsumer, *, for_another: bool = False) -> None:
        """Record once that a range is lost, unless another consumer of it follows."""
        recording.receive_no_more()
        with self._lock:
            if recording not in self._open:
                return
            consumer = recording.consumer
            owned = consumer.topic_partition, consumer.hash_range
            if for_another and self._owners[owned] == 1:
                self._replaced[owned] = recording
                return
            self._open.remove(recording)
            self._owners[owned] -= 1
            if self._owners[owned]:
                return
        self._write([self._event("range_lost", consumer, range=str(consumer.hash_range))])

    def delivered(self, consumer: Consumer, blocks: Sequence[EntryBlock]) -> None:
        """Record the entries that a consumer received."""
        self._write(self._deliveries(consumer, blocks))

    def acknowledged(self, consumer: Consumer, entries: Sequence[EntryId]) -> None:
        """Record the entries that are about to be acknowledged."""
        self._write(
            self._event("acked", consumer, ledger=ledger, entry=entry) for ledger, entry in entries
        )

    def published(
        self, properties: Mapping[str, str], value: bytes | None, key: str | None
    ) -> None:
        """Record that a message is parked, if the stored message is its dead letter."""
        if not properties.get(f"{PREFIX}messageId"):
            return
        name, seq = message_name(value, key)
        ledger, entry, index = map(int, properties[f"{PREFIX}messageId"].split(":"))
        self._write([
            Event(
                self._clock(), "parked", topic=properties[f"{PREFIX}topic"],
                partition=int(properties[f"{PREFIX}partition"]), ledger=ledger, entry=entry,
                index=index, key=name, seq=seq, worker=self._worker,
            )
        ])  # fmt: skip

    def _deliveries(self, consumer: Consumer, blocks: Sequence[EntryBlock]) -> Iterator[Event]:
        hash_range = str(consumer.hash_range)
        for block in blocks:
            keys = zip(block.partition_keys, block.slots, strict=True)
            for index, value, (own, slot) in zip(block.indices, block.values, keys, strict=True):
                # A message routed by its ordering key cannot be named by its partition key.
                routed_by = own if own is not None and slot in possible_slots(own) else None
                key, seq = message_name(value, routed_by)
                yield self._event(
                    "delivered", consumer, ledger=block.id.ledger, entry=block.id.entry,
                    index=index, key=key, seq=seq, range=hash_range,
                )  # fmt: skip

    def _event(self, kind: str, consumer: Consumer, **fields: Any) -> Event:
        where = consumer.topic_partition
        return Event(
            self._clock(), kind, topic=where.topic, partition=where.partition,
            worker=self._worker, **fields,
        )  # fmt: skip


class _RecordingConsumer:
    """A consumer that reports its calls to its broker."""

    def __init__(self, consumer: Consumer, broker: RecordingBroker) -> None:
        self.consumer = consumer
        self._broker = broker
        self._lock = threading.Lock()
        """Held from a receive to its record: the range is not recorded as lost in between."""
        self._given_up = False

    @property
    def topic_partition(self) -> TopicPartition:
        return self.consumer.topic_partition

    @property
    def hash_range(self) -> HashRange:
        return self.consumer.hash_range

    def receive(self, timeout_ms: int) -> list[EntryBlock]:
        with self._lock:
            if self._given_up:
                return []
            blocks = self.consumer.receive(timeout_ms)
            if blocks:
                self._broker.delivered(self.consumer, blocks)
            return blocks

    def receive_no_more(self) -> None:
        """Wait for a receive in progress; later ones return nothing."""
        with self._lock:
            self._given_up = True

    def when_ready(self, callback: Callable[[], None]) -> None:
        self.consumer.when_ready(callback)

    def acknowledge(self, entries: Sequence[EntryId]) -> None:
        self._broker.acknowledged(self.consumer, entries)
        self.consumer.acknowledge(entries)

    def last_entry(self) -> EntryId | None:
        return self.consumer.last_entry()

    def is_connected(self) -> bool:
        return self.consumer.is_connected()

    def has_given_all(self) -> bool:
        return self.consumer.has_given_all()

    def problem(self) -> str:
        return self.consumer.problem()

    def close(self, *, for_another: bool = False) -> None:
        self._broker.give_up(self, for_another=for_another)
        self.consumer.close(for_another=for_another)


class _RecordingProducer:
    """A producer that reports stored messages to its broker."""

    def __init__(self, producer: Producer, broker: RecordingBroker) -> None:
        self._producer = producer
        self._broker = broker

    def send(
        self,
        value: bytes | None,
        *,
        key: str | None = None,
        ordering_key: str | None = None,
        properties: Mapping[str, str] | None = None,
        event_ms: int = 0,
    ) -> EntryId:
        position = self._producer.send(
            value, key=key, ordering_key=ordering_key, properties=properties, event_ms=event_ms
        )
        self._broker.published(properties or {}, value, routing_key(key, ordering_key))
        return position

    def close(self) -> None:
        self._producer.close()
