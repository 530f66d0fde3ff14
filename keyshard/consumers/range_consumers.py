"""The range consumers of a source and their threads; both grow and shrink while it runs.

The thread that starts and stops a source calls these methods. While the source runs, discovery and
rescales call them, one at a time. The acknowledger only looks a consumer up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

from keyshard.base_error import AGAIN
from keyshard.broker.admin.port import Admin
from keyshard.broker.connect import transport_of
from keyshard.broker.port import Broker, Consumer, StartPosition
from keyshard.config.connection import WIRE
from keyshard.config.source import SourceConfig
from keyshard.consumers.receiver import (
    Drop,
    OwnedRange,
    RangeConsumer,
    Receiver,
    Sink,
    close_quietly,
)
from keyshard.consumers.subscribe import THREADS_MAX, open_range_consumer, open_range_consumers
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.ring.assignment import Assignment
from keyshard.core.ring.hash_range import split_ring
from keyshard.core.topic_segments import SegmentOrder, receiving
from keyshard.core.window.receiver_queue_size import ReceiverQueueSize
from keyshard.errors import BrokerUnavailableError, KeyShardError
from keyshard.threads import Pool

DROP_TIMEOUT_S = 30.0
"""Longest wait for the receive threads to close consumers, seconds."""

_log = logging.getLogger(__name__)


class _AbsentConsumer:
    """The consumer of a range whose topic partition does not exist."""

    def __init__(self, owned_range: OwnedRange) -> None:
        self.topic_partition = owned_range.topic_partition
        self.hash_range = owned_range.hash_range

    def receive(self, timeout_ms: int) -> list[EntryBlock]:  # noqa: ARG002
        return []

    def when_ready(self, callback: Callable[[], None]) -> None:
        """Never call ``callback``: there are no messages."""

    def acknowledge(self, entries: Sequence[EntryId]) -> None:  # noqa: ARG002
        raise self._absent()

    def last_entry(self) -> EntryId | None:
        raise self._absent()

    def is_connected(self) -> bool:
        return False

    def has_given_all(self) -> bool:
        return False

    def problem(self) -> str:
        return ""

    def close(self, *, for_another: bool = False) -> None:
        """Do nothing: nothing is open."""

    def _absent(self) -> BrokerUnavailableError:
        return BrokerUnavailableError(f"{self.topic_partition} does not exist.", AGAIN)


class RangeConsumers:
    """Every hash range of every topic partition, spread over at most ``receive_threads`` threads.

    A consumer has one contiguous hash range. An owner of several ranges has several consumers in
    each topic partition. A segment of a scalable topic has one consumer, of the whole ring.

    Args:
        broker: Connection to subscribe through.
        admin: Admin REST interface, which names the other side of a conflict; ``None`` without
            ``admin_url``.
        config: The source.
        assignment: The owner of each range.
        order: Knows which segments wait for their parents.
    """

    def __init__(
        self, broker: Broker, admin: Admin | None, config: SourceConfig, assignment: Assignment,
        order: SegmentOrder,
    ) -> None:  # fmt: skip
        self._broker = broker
        self._admin = admin
        self._config = config
        self._lock = threading.Lock()
        self._stopped = False
        self._only_held: set[TopicPartition] = set()
        self._owned_ranges: set[OwnedRange] = set()
        self._suspended: frozenset[OwnedRange] = frozenset()
        self.sink: Sink
        """Takes received entries. Set it before :meth:`serve`."""
        self.assignment = assignment
        """Hash ranges of each owner, as subscribed."""
        self.queue_max = config.receiver_queue_size
        """Most messages in the client queue of a consumer; holds for later subscriptions."""
        self.epoch = 0
        """Number of the assignment; later owned ranges get it."""
        self.by_partition: dict[TopicPartition, list[RangeConsumer]] = {}
        """Lists are replaced, never changed, because the acknowledger iterates over them."""
        self.receivers: list[Receiver] = []
        self._order = order

    def open(self, found: Iterable[TopicPartition], start: StartPosition) -> list[RangeConsumer]:
        """Subscribe every range of some topic partitions; nothing is received yet.

        Raises:
            SubscriptionInUseError: Another consumer held a range until ``subscribe_timeout_ms``.
            BrokerError: The broker cannot be reached, or refused.
        """
        return self.subscribe(self.owned_ranges(found, self.assignment), start)

    def subscribe(
        self,
        owned_ranges: Sequence[OwnedRange],
        start: StartPosition = StartPosition.EARLIEST,
        *,
        absent_too: bool = False,
    ) -> list[RangeConsumer]:
        """Subscribe all of some owned ranges, or none; nothing is received yet.

        Args:
            owned_ranges: The owned ranges.
            start: Where a new subscription begins.
            absent_too: Whether a range of a topic partition that does not exist is owned, too. It
                lacks a consumer until the topic partition is created again.

        Raises:
            SubscriptionInUseError: Another consumer held a range until ``subscribe_timeout_ms``.
            BrokerError: The broker cannot be reached, or refused.
        """
        kept = sum(map(len, self.by_partition.values()))
        share = self._config.window_bytes_max // (2 * max(1, kept + len(owned_ranges)))
        adapts = transport_of(self._config.how_to_connect()) == WIRE
        make_queue = partial(ReceiverQueueSize, share, self.queue_max, adapts)
        made = open_range_consumers(
            self._broker, self._admin, self._config, owned_ranges, start,
            make_queue=make_queue, leaves_out=absent_too,
        )  # fmt: skip
        if not absent_too or self._config.is_scalable:
            return made
        present = {one.owned_range for one in made}
        return [
            *made,
            *(
                RangeConsumer(
                    one, _AbsentConsumer(one), make_queue(), lacking=True, subscribed_s=None
                )
                for one in owned_ranges
                if one not in present
            ),
        ]

    def owned_ranges(
        self, where: Iterable[TopicPartition], assignment: Assignment
    ) -> list[OwnedRange]:
        """Return the owned ranges of some topic partitions, in the present epoch."""
        return [
            OwnedRange(topic_partition, owner, hash_range, self.epoch)
            for topic_partition in where
            for owner, ranges in enumerate(receiving(topic_partition, assignment))
            for hash_range in ranges
        ]

    @property
    def consumed(self) -> list[TopicPartition]:
        """Topic partitions that are received from. May be called from any thread."""
        return [where for where in list(self.by_partition) if where not in self._only_held]

    @property
    def count(self) -> int:
        """Number of consumers to receive from. May be called from any thread."""
        return len(self._owned_ranges)

    @property
    def owned(self) -> list[OwnedRange]:
        """Owned ranges that have a consumer to receive from."""
        return [
            one.owned_range for where in self.consumed for one in self.by_partition.get(where, ())
        ]

    def serve(self, range_consumers: Sequence[RangeConsumer]) -> None:
        """Begin to receive from opened range consumers."""
        with self._lock:
            if self._stopped:
                return
            more: dict[TopicPartition, list[RangeConsumer]] = {}
            for range_consumer in range_consumers:
                more.setdefault(range_consumer.owned_range.topic_partition, []).append(
                    range_consumer
                )
                self._owned_ranges.add(range_consumer.owned_range)
                if range_consumer.lacking:
                    self.sink.reopen(range_consumer)
            for where, added in more.items():
                self.by_partition[where] = [*self.by_partition.get(where, ()), *added]
            threads = min(self._config.receive_threads, len(self.receivers) + len(range_consumers))
            new = [
                Receiver(f"keyshard-receive-{i}", (), self.sink)
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

    def drop(self, gone: Collection[TopicPartition], *, for_others: bool) -> None:
        """Close every consumer of some topic partitions, and wait for it.

        Args:
            gone: The topic partitions.
            for_others: Whether they are opened again at once.

        Raises:
            BrokerUnavailableError: A receive thread waits for a broker that does not answer.
        """
        self.close(
            {one.owned_range for where in gone for one in self.by_partition.get(where, ())},
            for_others=for_others,
        )
        for topic_partition in gone:
            self.by_partition.pop(topic_partition, None)

    def suspend(self, owned_ranges: Iterable[OwnedRange]) -> None:
        """Pause exactly these owned ranges; ranges of an earlier call resume."""
        self._suspended = frozenset(owned_ranges)

    def suspends(self, owned_range: OwnedRange) -> bool:
        """Whether :meth:`suspend` or the order of segments pauses an owned range. Thread-safe."""
        return (bool(self._suspended) and owned_range in self._suspended) or self._order.waits(
            owned_range.topic_partition
        )

    def owns(self, owned_range: OwnedRange) -> bool:
        """Whether an owned range is a present one; entries for any other are late."""
        return owned_range in self._owned_ranges

    def close(self, owned_ranges: Collection[OwnedRange], *, for_others: bool = False) -> None:
        """Close the consumers of owned ranges, and wait for it.

        Args:
            owned_ranges: The owned ranges.
            for_others: Whether the same hash ranges are opened again at once.

        Raises:
            BrokerUnavailableError: A receive thread waits for a broker that does not answer. Its
                consumers stay; those of the others are closed.
        """
        deadline = time.monotonic() + DROP_TIMEOUT_S
        with self._lock:
            drops = [
                (receiver, receiver.drop(owned_ranges, for_another=for_others))
                for receiver in self.receivers
            ]
        late = [drop for receiver, drop in drops if not self._is_done(receiver, drop, deadline)]
        closed = {owned_range for _, drop in drops for owned_range in drop.closed}
        self._owned_ranges -= closed
        for where in {owned_range.topic_partition for owned_range in closed}:
            self.by_partition[where] = [
                one for one in self.by_partition[where] if one.owned_range not in closed
            ]
        if late:
            names = sorted({owned_range.topic_partition.name for owned_range in owned_ranges})
            raise BrokerUnavailableError(
                f"Consumers of {', '.join(names)[:200]} were not closed within "
                f"{DROP_TIMEOUT_S:.0f} s.",
                f"Check the broker. {AGAIN}",
            )

    def _is_done(self, receiver: Receiver, drop: Drop, deadline_s: float) -> bool:
        """Wait until a receiver has closed its consumers; return whether it has."""
        while not drop.done.wait(0.05):
            if (time.monotonic() > deadline_s or self._stopped) and receiver.keep(drop):
                return False
        return True

    def hold(self, topic_partitions: Iterable[TopicPartition]) -> None:
        """Subscribe one consumer of the whole ring per topic partition, only to acknowledge.

        If another consumer has ranges of a topic partition, it is skipped with a warning.
        """
        with Pool(THREADS_MAX, "keyshard-subscribe") as pool:
            range_consumers = [
                range_consumer
                for range_consumer in pool.map(self._held, sorted(topic_partitions))
                if range_consumer is not None
            ]
        held = {one.owned_range.topic_partition: [one] for one in range_consumers}
        self._only_held |= held.keys()
        self.by_partition.update(held)

    def _held(self, topic_partition: TopicPartition) -> RangeConsumer | None:
        ring = split_ring(1)[0]
        try:
            return open_range_consumer(self._broker, self._config, topic_partition, ring)
        except KeyShardError as exc:
            _log.warning(
                "the last batch of %s is not acknowledged: %s", topic_partition, exc.summary
            )
            return None

    def let_go(self, held: Collection[TopicPartition]) -> None:
        """Close the consumers that :meth:`hold` opened."""
        self._only_held -= set(held)
        for topic_partition in sorted(held):
            for range_consumer in self.by_partition.pop(topic_partition, ()):
                close_quietly(range_consumer.consumer)

    def connected(self) -> list[tuple[OwnedRange, bool]]:
        """Return each owned range, and whether its consumer is connected."""
        return [
            (one.owned_range, one.consumer.is_connected())
            for consumers in list(self.by_partition.values())
            for one in list(consumers)
        ]

    def standing(self, where: TopicPartition) -> list[tuple[RangeConsumer, Consumer]]:
        """Return the connected range consumers of a topic partition, with their consumers."""
        if where in self._only_held:
            return []
        found = [(one, one.consumer) for one in self.by_partition.get(where, ())]
        return [(one, consumer) for one, consumer in found if consumer.is_connected()]

    def problems(self) -> dict[TopicPartition, str]:
        """Return one sentence for each topic partition whose broker refuses or does not answer."""
        found: dict[TopicPartition, str] = {}
        for where, consumers in list(self.by_partition.items()):
            text = next((text for one in consumers if (text := one.problem())), "")
            if text:
                found[where] = text
        return found

    def away(self) -> list[TopicPartition]:
        """Return topic partitions without a connected consumer."""
        return [
            where
            for where, consumers in list(self.by_partition.items())
            if not any(one.consumer.is_connected() for one in consumers)
        ]

    def consumer_of(self, topic_partition: TopicPartition) -> Consumer | None:
        """Return a connected consumer, whose acknowledgements reach the broker.

        Returns:
            ``None`` if the topic partition has no consumers.

        Raises:
            BrokerUnavailableError: None of its consumers is connected.
        """
        range_consumers = self.by_partition.get(topic_partition)
        if range_consumers is None:
            return None
        for range_consumer in range_consumers:
            if range_consumer.consumer.is_connected():
                return range_consumer.consumer
        raise BrokerUnavailableError(
            f"No consumer of {topic_partition} is connected.", "Check that the broker is running."
        )

    def stop(self) -> None:
        """Stop receiving, and serve no more consumers; returns without waiting."""
        with self._lock:
            self._stopped = True
        self.pause()

    def pause(self) -> None:
        """End the receive threads; returns without waiting.

        Unlike :meth:`stop`, it does not refuse further consumers. The consumers stay connected, so
        that released entries can still be acknowledged.
        """
        for receiver in self.receivers:
            receiver.stop()

    def join(self, deadline_s: float) -> None:
        """Wait until the threads end, or until a monotonic time."""
        for receiver in self.receivers:
            receiver.join(max(0.1, deadline_s - time.monotonic()))
