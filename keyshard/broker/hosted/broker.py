"""The broker port with consumers in worker processes; all else is asked from here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from weakref import WeakValueDictionary

from keyshard.broker.hosted.consumer import Holders, HostedConsumer, Wanted
from keyshard.broker.hosted.hosting import WorkerHosting
from keyshard.broker.hosted.process import LEAVE_S
from keyshard.broker.hosted.worker import Worker
from keyshard.broker.port import (
    ANYHOW,
    Broker,
    HowToRead,
    Producer,
    Reader,
    StartPosition,
    WorkerFacts,
)
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.ring.hash_range import RING_SIZE, HashRange
from keyshard.threads import Pool


class HostedBroker:
    """Neighbouring ranges have the same worker, in every topic partition.

    Args:
        local: The connection of this process.
        start: Starts a worker; the event ends the wait for it.
        workers: How many.
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
        self._holders: WeakValueDictionary[TopicPartition, Holders] = WeakValueDictionary()

        def host(index: int) -> WorkerHosting:
            return WorkerHosting(start, operation_timeout_s, f"keyshard-worker-{index}")

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

    def partitions(self, topic: str) -> tuple[TopicPartition, ...]:
        return self._local.partitions(topic)

    def subscribe(
        self,
        topic_partition: TopicPartition,
        subscription: str,
        hash_range: HashRange,
        *,
        start: StartPosition,
        consumer_name: str,
        receiver_queue_size: int,
        receiver_queue_bytes: int | None = None,
        columns: Collection[str] | None = None,
    ) -> HostedConsumer:
        wanted = Wanted(
            topic_partition, subscription, hash_range, consumer_name, receiver_queue_size,
            receiver_queue_bytes, columns,
        )  # fmt: skip
        worker = self._workers[hash_range.start * len(self._workers) // RING_SIZE]
        holders = self._holders.setdefault(topic_partition, Holders())
        return worker.subscribe(wanted, start, holders)

    def reader(
        self, topic_partition: TopicPartition, start: EntryId, how: HowToRead = ANYHOW
    ) -> Reader:
        return self._local.reader(topic_partition, start, how)

    def producer(self, topic_partition: TopicPartition, *, send_timeout_ms: int) -> Producer:
        return self._local.producer(topic_partition, send_timeout_ms=send_timeout_ms)

    def workers(self) -> tuple[WorkerFacts, ...]:
        return tuple(worker.facts() for worker in self._workers)

    def close(self) -> None:
        deadline_s = time.monotonic() + LEAVE_S
        # Without threads of its own: it may be called at the end of the interpreter.
        for worker in self._workers:
            worker.leave()
        for worker in self._workers:
            worker.close(deadline_s)
        self._local.close()
