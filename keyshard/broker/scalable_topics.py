"""The segments of the scalable topics of a source, as the broker reports them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping

from keyshard.broker.admin.port import Admin
from keyshard.broker.port import Broker
from keyshard.broker.reports import SegmentWatch
from keyshard.core.position.entry import TopicPartition
from keyshard.core.topic_segments import SegmentGraph, is_scalable, topic_of
from keyshard.errors import BrokerError, TopicNotFoundError

LOOK_AGAIN_S = 60.0
"""Age at which a watch is replaced, seconds. The watch of a topic does not report that the topic
was deleted, and a watch of its namespace may be missing."""


class ScalableTopics:
    """Watches scalable topics, from their first look-up on.

    One thread at a time calls the methods. The watches end with the connection.

    Args:
        broker: Reports the segments.
        admin: Registers the subscription; ``None`` if there are no scalable topics.
        subscription: Subscription of the source.
    """

    def __init__(self, broker: Broker, admin: Admin | None, subscription: str) -> None:
        self._broker = broker
        self._admin = admin
        self._subscription = subscription
        self._watches: dict[str, tuple[SegmentWatch, float]] = {}
        """Open watches, and the monotonic times at which they were opened."""
        self._graphs: dict[str, SegmentGraph] = {}
        self._doubtful: set[str] = set()
        """Topics that may have been deleted since their watches were opened."""
        self._topics: dict[TopicPartition, str] = {}
        """Scalable topics of the partitions that were migrated."""
        self.created_again: set[TopicPartition] = set()
        """Segments of topics that were deleted and created again. The caller removes them."""
        self.changed: Callable[[], None] = lambda: None
        """Called after a split or a merge, by any thread; returns at once."""

    def partitions(self, topic: str) -> tuple[TopicPartition, ...]:
        """Return the segments of a scalable topic; ``()`` if it does not exist.

        Raises:
            BrokerError: The broker cannot be reached, refuses, or does not know scalable topics.
        """
        try:
            found = self._look(topic)
        except TopicNotFoundError:
            self._graphs.pop(topic, None)
            self._doubtful.discard(topic)
            if (of_deleted := self._watches.pop(topic, None)) is not None:
                of_deleted[0].close()
            return ()
        known = self._graphs.get(topic)
        if known is not None and found.precedes(known):
            # Another broker answers and has not heard of the newest change. Without its segments,
            # they would count as deleted.
            found = known
        elif known is not None and not known.precedes(found):
            self.created_again.update(known.partitions)
        self._graphs[topic] = found
        # The names of others say to which topic they belong, also after they were deleted.
        self._topics |= {
            found.partition(number): topic
            for number, one in found.segments.items()
            if one.stored_in
        }
        return found.partitions

    def look_again(self, topics: Iterable[str]) -> None:
        """Replace the watches of topics at the next look: their names were reported.

        Any thread may call it.
        """
        self._doubtful.update(topics)

    def exist_only(self, listed: Collection[str]) -> None:
        """Replace the watches of all other topics at the next look."""
        self.look_again(self._watches.keys() - set(listed))

    def lags(self, topic: str, known: Iterable[TopicPartition]) -> bool:
        """Return whether the broker that reports a topic has not heard of its known segments."""
        graph = self._graphs.get(topic)
        return graph is not None and graph.precedes_segments(known)

    def register(self, subscribed: Iterable[TopicPartition]) -> None:
        """Make the broker keep segments until the subscription has acknowledged them.

        Call it after consumers of new segments are subscribed: the broker creates a missing
        subscription at the beginning of a segment.

        Args:
            subscribed: Topic partitions with consumers. Those that are no segments are ignored.

        Raises:
            TopicNotFoundError: The topic does not exist.
            BrokerError: The admin interface fails or refuses.
        """
        failed: BrokerError | None = None
        for topic in sorted(filter(is_scalable, set(map(self.topic_of, subscribed)))):
            assert self._admin is not None, "a scalable topic needs admin_url"
            try:
                self._admin.register(topic, self._subscription)
            except BrokerError as exc:
                failed = failed or exc
        if failed is not None:
            raise failed

    def backlog(self, segment: TopicPartition) -> int | None:
        """Return the entries of a segment that the subscription has not acknowledged.

        The broker counts, as it does before it deletes the segment. Its count includes entries that
        wait for their time, or for the end of a transaction.

        Returns:
            ``None``: the subscription does not exist there.

        Raises:
            BrokerError: The admin interface cannot be reached, or refuses.
        """
        assert self._admin is not None, "a scalable topic needs admin_url"
        stats = self._admin.subscription(segment, self._subscription)
        return None if stats is None else stats.get("msgBacklog")

    def _report(self) -> None:
        self.changed()

    def _look(self, topic: str) -> SegmentGraph:
        """Return the newest graph that a watch reported; open one if there is none or it is old."""
        watch, opened_s = self._watches.get(topic, (None, 0.0))
        is_new = time.monotonic() - opened_s < LOOK_AGAIN_S and topic not in self._doubtful
        if watch is not None and watch.is_open and is_new:
            return watch.graph
        self._doubtful.discard(topic)  # before the look, which may not see a later report
        try:
            new = self._broker.watch_segments(topic, self._report)
        except BrokerError:
            self._doubtful.add(topic)
            raise
        self._watches[topic] = new, time.monotonic()
        if watch is not None:
            watch.close()
        return new.graph

    def topic_of(self, where: TopicPartition) -> str:
        """Return the topic of a topic partition; of a segment, its scalable topic."""
        return self._topics.get(where) or topic_of(where)

    def parents(self) -> Mapping[TopicPartition, frozenset[TopicPartition]]:
        """Return the parents of each segment that has some which are not deleted."""
        return {
            child: parents
            for graph in self._graphs.values()
            for child, parents in graph.parents.items()
        }
