"""The range consumers of a source and their threads; both grow and shrink while it runs.

Called by the thread that starts and stops a source, by the discovery thread between the two, and
by the acknowledger, which only looks a consumer up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from keyshard.broker.port import Broker, Consumer, StartPosition
from keyshard.config import SourceConfig
from keyshard.core.entry import TopicPartition
from keyshard.core.hash_range import split_ring
from keyshard.errors import BrokerUnavailableError, KeyShardError
from keyshard.runtime.receiver import RangeConsumer, Receiver, Sink, close_quietly
from keyshard.runtime.subscribe import THREADS_MAX, Admin, open_range_consumer, open_range_consumers

DROP_TIMEOUT_S = 30.0
"""Longest wait for the receive threads to close consumers, seconds."""

_log = logging.getLogger(__name__)


class RangeConsumers:
    """Every hash range of every topic partition, spread over at most ``receive_threads`` threads.

    Args:
        broker: Connection to subscribe through.
        admin: Admin REST interface, where there is one; names the other side of a conflict.
        config: The source.
        sink: Where received entries go.
    """

    def __init__(
        self, broker: Broker, admin: Admin | None, config: SourceConfig, sink: Sink
    ) -> None:
        self._broker = broker
        self._admin = admin
        self._config = config
        self._sink = sink
        self._lock = threading.Lock()
        self._stopped = False
        self.by_partition: dict[TopicPartition, list[RangeConsumer]] = {}
        self.receivers: list[Receiver] = []

    def open(self, found: Collection[TopicPartition], start: StartPosition) -> list[RangeConsumer]:
        """Subscribe every range of some topic partitions; nothing is received yet.

        Raises:
            SubscriptionInUseError: Somebody else held a range until ``subscribe_timeout_ms``.
            BrokerError: The broker cannot be reached, or refused.
        """
        consumers = self._config.parallelism * len(self.by_partition.keys() | set(found))
        share = self._config.window_bytes_max // (2 * max(1, consumers))
        return open_range_consumers(
            self._broker, self._admin, self._config, found, start, queue_bytes_max=share
        )

    def serve(self, range_consumers: Sequence[RangeConsumer]) -> None:
        """Begin to receive from opened range_consumers."""
        with self._lock:
            if self._stopped:
                return
            for range_consumer in range_consumers:
                self.by_partition.setdefault(range_consumer.seat.topic_partition, []).append(
                    range_consumer
                )
            threads = min(self._config.receive_threads, len(self.receivers) + len(range_consumers))
            new = [
                Receiver(f"keyshard-receive-{i}", (), self._sink)
                for i in range(len(self.receivers), threads)
            ]
            self.receivers += new
            shares: dict[int, list[RangeConsumer]] = {i: [] for i in range(threads)}
            for range_consumer in range_consumers:
                least = min(
                    shares, key=lambda i: self.receivers[i].range_consumers + len(shares[i])
                )
                shares[least].append(range_consumer)
            for i, share in shares.items():
                self.receivers[i].add(share)

    def drop(self, gone: Collection[TopicPartition]) -> None:
        """Close every consumer of some topic partitions; returns when that is done.

        Raises:
            BrokerUnavailableError: A receive thread is busy with a broker that does not answer.
        """
        deadline = time.monotonic() + DROP_TIMEOUT_S
        with self._lock:
            waiting = [receiver.drop(gone) for receiver in self.receivers]
        for done in waiting:
            while not done.wait(0.05):
                if time.monotonic() < deadline and not self._stopped:
                    continue
                raise BrokerUnavailableError(
                    f"Consumers of {', '.join(sorted(tp.name for tp in gone))[:200]} could not be "
                    f"closed within {DROP_TIMEOUT_S:.0f} s. Check the broker; it is tried again."
                )
        for topic_partition in gone:
            self.by_partition.pop(topic_partition, None)

    def hold(self, topic_partitions: Iterable[TopicPartition]) -> None:
        """Subscribe only to acknowledge: one consumer of the whole ring, never received from.

        A topic partition whose ranges somebody else has now is left to them, with a warning.
        """
        with ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="keyshard-subscribe") as pool:
            range_consumers = [
                range_consumer
                for range_consumer in pool.map(self._held, topic_partitions)
                if range_consumer is not None
            ]
        self.by_partition.update(
            {
                range_consumer.seat.topic_partition: [range_consumer]
                for range_consumer in range_consumers
            }
        )

    def _held(self, topic_partition: TopicPartition) -> RangeConsumer | None:
        ring = split_ring(1)[0]
        try:
            return open_range_consumer(self._broker, self._config, topic_partition, ring)
        except KeyShardError as exc:
            _log.warning("the last batch of %s is not acknowledged: %s", topic_partition, exc)
            return None

    def let_go(self, held: Collection[TopicPartition]) -> None:
        """Close what :meth:`hold` opened."""
        for topic_partition in held:
            for range_consumer in self.by_partition.pop(topic_partition, ()):
                close_quietly(range_consumer)

    def consumer_of(self, topic_partition: TopicPartition) -> Consumer | None:
        """A connected consumer: its acknowledgements reach the broker. ``None``: it has none.

        Raises:
            BrokerUnavailableError: None of its consumers is connected now.
        """
        range_consumers = self.by_partition.get(topic_partition)
        if range_consumers is None:
            return None
        for range_consumer in range_consumers:
            if range_consumer.consumer.is_connected():
                return range_consumer.consumer
        raise BrokerUnavailableError(f"No consumer of {topic_partition} is connected.")

    def stop(self) -> None:
        """Receive nothing more; returns without waiting."""
        with self._lock:
            self._stopped = True
        self.pause()

    def pause(self) -> None:
        """End the receive threads."""
        for receiver in self.receivers:
            receiver.stop()

    def join(self, deadline_s: float) -> None:
        """Wait for the threads' end until a monotonic time."""
        for receiver in self.receivers:
            receiver.join(max(0.1, deadline_s - time.monotonic()))
