"""A ``Broker`` whose consumers run in workers. This process sends all other requests itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from weakref import WeakValueDictionary

from keyshard.broker.port import (
    DEFAULT_READ_OPTIONS,
    Broker,
    EntryProducer,
    Producer,
    PublishOptions,
    Reader,
    ReadOptions,
    StartPosition,
    SubscriptionSpec,
)
from keyshard.broker.reports import SegmentWatch, TopicWatch, WorkerFacts
from keyshard.core.message import MessageId
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.ring.hash_range import RING_SIZE
from keyshard.core.ring.key_slot import key_slot
from keyshard.core.topic_segments import is_segment, place_in_order
from keyshard.threads import Pool
from keyshard.workers.consumer import EntryHolders, RemoteConsumer
from keyshard.workers.server import LEAVE_S
from keyshard.workers.supervisor import WorkerSupervisor
from keyshard.workers.worker import Worker


class RemoteBroker:
    """Distributes consumers over workers. In every topic partition, adjacent ranges share a worker.

    A segment of a scalable topic has one consumer (ADR 57), so a worker hosts whole segments.

    Args:
        local: The connection of this process.
        start: Starts a worker; it stops waiting when the event that it gets is set.
        workers: Number of workers.
        operation_timeout_s: Longest time of one request to the broker, seconds.

    Raises:
        KeyShardError: A worker does not start, or the broker refuses it.
    """

    def __init__(
        self,
        local: Broker,
        start: Callable[[threading.Event], Worker],
        workers: int,
        operation_timeout_s: float,
    ) -> None:
        self._local = local
        self._holders: WeakValueDictionary[TopicPartition, EntryHolders] = WeakValueDictionary()

        def host(index: int) -> WorkerSupervisor:
            return WorkerSupervisor(start, operation_timeout_s, f"keyshard-worker-{index}")

        with Pool(workers, "keyshard-start") as pool:
            starting = [pool.submit(host, index) for index in range(workers)]
        errors = [one.exception() for one in starting]
        self._workers = [
            one.result() for one, error in zip(starting, errors, strict=True) if error is None
        ]
        for error in errors:
            if error is not None:
                self.close()
                raise error

    def missing(self, topics: Sequence[str]) -> frozenset[str]:
        return self._local.missing(topics)

    def partitions(self, topic: str, *, create: bool = False) -> tuple[TopicPartition, ...]:
        return self._local.partitions(topic, create=create)

    def watch_topics(
        self, prefix: str, changed: Callable[[Collection[str]], None]
    ) -> TopicWatch | None:
        return self._local.watch_topics(prefix, changed)

    def watch_segments(self, topic: str, changed: Callable[[], None]) -> SegmentWatch:
        return self._local.watch_segments(topic, changed)

    def begin(
        self,
        topic_partition: TopicPartition,
        subscription: str,
        start: MessageId | int,
        batch_size: int = 1,
    ) -> EntryId:
        return self._local.begin(topic_partition, subscription, start, batch_size)

    def subscribe(self, spec: SubscriptionSpec, start: StartPosition) -> RemoteConsumer:
        worker = self._workers[_worker_of(spec, len(self._workers))]
        holders = self._holders.setdefault(spec.topic_partition, EntryHolders())
        return worker.subscribe(spec, start, holders)

    def reader(
        self,
        topic_partition: TopicPartition,
        start: EntryId,
        how: ReadOptions = DEFAULT_READ_OPTIONS,
    ) -> Reader:
        return self._local.reader(topic_partition, start, how)

    def producer(self, topic_partition: TopicPartition, *, send_timeout_ms: int) -> Producer:
        return self._local.producer(topic_partition, send_timeout_ms=send_timeout_ms)

    def entry_producer(self, topic_partition: TopicPartition, how: PublishOptions) -> EntryProducer:
        return self._local.entry_producer(topic_partition, how)

    def workers(self) -> tuple[WorkerFacts, ...]:
        return tuple(worker.facts() for worker in self._workers)

    def close(self) -> None:
        deadline_s = time.monotonic() + LEAVE_S
        # No new threads here: the interpreter may be about to end.
        for worker in self._workers:
            worker.leave()
        for worker in self._workers:
            worker.close(deadline_s)
        self._local.close()


def _worker_of(spec: SubscriptionSpec, workers: int) -> int:
    """Return the index of the worker that hosts a consumer."""
    if not is_segment(spec.topic_partition):
        return spec.hash_range.start * workers // RING_SIZE
    # Its one consumer has the whole ring. A change gives its segments consecutive numbers.
    topic, number = place_in_order(spec.topic_partition)
    return (key_slot(topic) + number) % workers
