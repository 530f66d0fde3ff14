"""Scalable topics of the in-memory broker: graphs of segments, their splits and merges.

Private to :mod:`keyshard.broker.memory`, which documents the package.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, Protocol

from keyshard.broker.memory.dispatch import Subscription
from keyshard.broker.memory.log import Message
from keyshard.broker.memory.topics import TopicStore
from keyshard.broker.port import StartPosition
from keyshard.core.creation import create_or_correct
from keyshard.core.position.entry import TopicPartition
from keyshard.core.topic_segments import HASHES, SegmentGraph, TopicSegment, check_scalable
from keyshard.errors import ConfigError, TopicNotFoundError


class SubscriptionHolder(Protocol):
    """The cluster, as its scalable topics see it."""

    lock: Any
    """Guards everything."""

    def delete_topic(self, topic: str) -> None:
        """Delete a topic by force."""

    def subscriptions(self, topic_partition: TopicPartition) -> dict[str, Subscription]:
        """Subscriptions of a topic partition, by name."""

    def delete_subscription(self, topic_partition: TopicPartition, name: str) -> None:
        """Delete a subscription, and disconnect its consumers."""

    def open_subscription(
        self, topic_partition: TopicPartition, name: str, start: StartPosition
    ) -> Subscription:
        """Return a subscription, and create it if it is missing."""


class MemorySegmentWatch:
    """Reports the segments of a scalable topic to one client.

    Args:
        graph: The segments now.
        changed: Called after a change.
    """

    def __init__(self, graph: SegmentGraph, changed: Callable[[], None]) -> None:
        self.graph = graph
        self._changed = changed
        self.is_open = True

    def close(self) -> None:
        self.is_open = False

    def report(self, graph: SegmentGraph) -> None:
        """Take a new graph."""
        self.graph = graph
        self._changed()


class MemoryScalableTopics:
    """All scalable topics of a cluster, by name. Segments are topics of the store.

    Args:
        cluster: Holds the subscriptions.
        store: Stores the segments.
    """

    def __init__(self, cluster: SubscriptionHolder, store: TopicStore) -> None:
        self._cluster = cluster
        self._lock = cluster.lock
        self._store = store
        self._graphs: dict[str, SegmentGraph] = {}
        self._watches: dict[str, list[MemorySegmentWatch]] = {}
        self._registered: defaultdict[str, set[str]] = defaultdict(set)
        self._created = 0

    def create(self, topic: str, segments: int = 1) -> str:
        """Create a scalable topic, and return its name.

        Args:
            topic: ``topic://tenant/namespace/name``.
            segments: Number of its segments.

        Raises:
            ConfigError: The name is invalid, or it is taken.
        """
        with self._lock:
            if check_scalable(topic) in self._graphs:
                raise ConfigError(f"Topic {topic} already exists.", "Choose another name.")
            ends = [HASHES * number // segments for number in range(segments + 1)]
            found = [
                self._segment(number, ends[number], ends[number + 1] - 1)
                for number in range(segments)
            ]
            self._graphs[topic] = SegmentGraph(topic, 0, {})
            self._change(topic, found)
            self._store.changed([topic])
        return topic

    def split(self, topic: str, number: int) -> tuple[int, int]:
        """Seal a segment, and create two successors with half of its hashes each."""
        with self._lock:
            one = self.graph(topic).segments[number]
            middle = (one.first_hash + one.last_hash + 1) // 2
            new = max(self.graph(topic).segments) + 1
            self._change(topic, [
                replace(one, is_sealed=True),
                self._segment(new, one.first_hash, middle - 1, number),
                self._segment(new + 1, middle, one.last_hash, number),
            ])  # fmt: skip
        return new, new + 1

    def merge(self, topic: str, lower: int, upper: int) -> int:
        """Seal two adjacent segments, and create one successor with the hashes of both."""
        with self._lock:
            segments = self.graph(topic).segments
            low, high = segments[lower], segments[upper]
            new = max(segments) + 1
            self._change(topic, [
                replace(low, is_sealed=True),
                replace(high, is_sealed=True),
                self._segment(new, low.first_hash, high.last_hash, lower, upper),
            ])  # fmt: skip
        return new

    def delete(self, topic: str) -> None:
        """Delete a scalable topic by force."""
        with self._lock:
            graph = self.graph(topic)
            del self._graphs[topic]
            self._registered.pop(topic, None)
            self._watches.pop(topic, None)  # they stay open and report nothing, as in Pulsar
            for where in graph.partitions:
                self._cluster.delete_topic(where.topic)
            self._store.changed([topic])

    def register(self, topic: str, subscription: str) -> None:
        """Create a subscription in all open segments and in later ones, and keep sealed ones.

        Raises:
            TopicNotFoundError: The topic does not exist.
        """
        with self._lock:
            graph = self.graph(topic)
            self._registered[topic].add(subscription)
            for number, one in graph.segments.items():
                if not one.is_sealed:
                    self._subscribe(graph.partition(number), subscription)

    def is_registered(self, topic: str, subscription: str) -> bool:
        """Return whether a subscription is registered with a topic."""
        with self._lock:
            return subscription in self._registered[topic]

    def unregister(self, topic: str, subscription: str) -> None:
        """Delete a subscription from all segments, and do not create it in later ones."""
        with self._lock:
            self._registered[topic].discard(subscription)
            for where in self.graph(topic).partitions:
                if subscription in self._cluster.subscriptions(where):
                    self._cluster.delete_subscription(where, subscription)

    def collect(self, topic: str) -> list[int]:
        """Delete sealed segments without parents that registered subscriptions do not need.

        A broker of Pulsar does so every minute with segments older than the retention time.

        Returns:
            Their ids.
        """
        with self._lock:
            graph, gone = self.graph(topic), []
            for number, one in graph.segments.items():
                where = graph.partition(number)
                if one.is_sealed and where not in graph.parents and not self._needed(topic, where):
                    gone.append(number)
            rest = {one: graph.segments[one] for one in graph.segments if one not in gone}
            if gone:
                self._report(SegmentGraph(topic, graph.epoch + 1, rest))
            for number in gone:
                self._cluster.delete_topic(graph.partition(number).topic)
            return gone

    def _needed(self, topic: str, where: TopicPartition) -> bool:
        """Return whether a registered subscription has not acknowledged all of a segment.

        One that does not exist there counts as such.
        """
        found = self._cluster.subscriptions(where)
        return any(name not in found or found[name].backlog for name in self._registered[topic])

    def _subscribe(self, where: TopicPartition, subscription: str) -> None:
        self._cluster.open_subscription(where, subscription, StartPosition.EARLIEST)

    def names(self) -> set[str]:
        """Return the names of all scalable topics."""
        with self._lock:
            return set(self._graphs)

    def graph(self, topic: str) -> SegmentGraph:
        """Return the segments of a topic.

        Raises:
            TopicNotFoundError: It does not exist.
        """
        with self._lock:
            if topic not in self._graphs:
                raise TopicNotFoundError(
                    f"{topic} does not exist.", create_or_correct(topic), topic=topic
                )
            return self._graphs[topic]

    def watch(self, topic: str, changed: Callable[[], None]) -> MemorySegmentWatch:
        """Report the segments of a topic after each change.

        Raises:
            TopicNotFoundError: It does not exist.
        """
        with self._lock:
            watch = MemorySegmentWatch(self.graph(topic), changed)
            self._watches.setdefault(topic, []).append(watch)
            return watch

    def segment_of(self, topic: str, message: Message) -> TopicPartition:
        """Return the segment that a message is published to, by the bytes of its key."""
        graph = self.graph(topic)
        return graph.partition(graph.segment_of(message.hashed or "").number)

    def _segment(self, number: int, first: int, last: int, *parents: int) -> TopicSegment:
        """Return a new segment. Its time only distinguishes it: the clock may stand still."""
        self._created += 1
        return TopicSegment(
            number, first, last, is_sealed=False, parents=frozenset(parents),
            created_ms=self._created,
        )  # fmt: skip

    def _change(self, topic: str, changed: Collection[TopicSegment]) -> None:
        """Replace segments and add new ones, before anything is published to them."""
        before = self._graphs[topic]
        segments = {**before.segments, **{one.number: one for one in changed}}
        graph = SegmentGraph(topic, before.epoch + 1, segments)
        for one in changed:
            where = graph.partition(one.number)
            if not one.is_sealed:
                self._store.create(where.topic, 0)
                for name in self._registered[graph.topic]:
                    self._subscribe(where, name)
        self._report(graph)

    def _report(self, graph: SegmentGraph) -> None:
        self._graphs[graph.topic] = graph
        watches = [one for one in self._watches.get(graph.topic, ()) if one.is_open]
        self._watches[graph.topic] = watches
        for watch in watches:
            watch.report(graph)
