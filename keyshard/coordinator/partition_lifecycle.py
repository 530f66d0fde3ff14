"""Opens and closes the consumers of topic partitions that appear and disappear."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

from keyshard.broker.port import Consumer, StartPosition
from keyshard.broker.scalable_topics import ScalableTopics
from keyshard.consumers.consumers import Consumers
from keyshard.consumers.receiver import RangeConsumer
from keyshard.consumers.subscribe import consumer_name
from keyshard.core.position.checkpoint import Checkpoint, SubscriptionId
from keyshard.core.position.entry import TopicPartition
from keyshard.core.subscription_state import SubscriptionState
from keyshard.errors import BrokerError, KeyShardError


class PartitionLifecycle:
    """The topic partitions of a source: opens and closes their consumers.

    Args:
        consumers: Hosts their ranges.
        checkpoint: The checkpoint of the start; only its batch may be read again.
        planned: Whether that batch is planned. Then some of its topics may no longer be consumed.
        gone: Topic partitions of the checkpoint that no longer exist.
    """

    def __init__(
        self,
        consumers: Consumers,
        checkpoint: Checkpoint | None,
        *,
        planned: bool,
        gone: Collection[TopicPartition],
    ) -> None:
        self._consumers = consumers
        self._shared = consumers.shared
        self._before = frozenset(() if checkpoint is None else checkpoint.partitions)
        self._ending = checkpoint if planned else None
        self.gone = set(gone)
        """Topic partitions of the checkpoint of the start that are no longer stored."""

    def grow(self, found: Collection[TopicPartition]) -> None:
        """Own every range of new topic partitions, from their beginning."""
        consumers, window = self._consumers.range_consumers, self._shared.window
        with self._consumers.changing:
            range_consumers = consumers.open(found, StartPosition.EARLIEST)
            with self._shared.lock:
                for topic_partition in found:
                    window.add_partition(topic_partition)
                window.pauses.shared_anew()
                self.gone.difference_update(found)
            consumers.serve(range_consumers)

    def shrink(self, gone: Collection[TopicPartition], *, again: bool) -> None:
        """Close the consumers of deleted topic partitions.

        Args:
            gone: The topic partitions.
            again: Whether topic partitions of the same names exist, and will be owned at once.
        """
        window = self._shared.window
        with self._consumers.changing:
            self._consumers.range_consumers.drop(gone, for_others=again)
            window.order.forget(gone)
            with self._shared.lock:
                for topic_partition in gone:
                    window.drop_partition(topic_partition, gone=False)
                window.pauses.shared_anew()
                self.gone.update(self._before.intersection(gone))

    def forget(self, gone: TopicPartition) -> None:
        """Drop the delivered set of a topic partition after :meth:`shrink`. Idempotent."""
        with self._shared.lock:
            self._shared.window.drop_partition(gone, gone=True)

    def order(self, parents: Mapping[TopicPartition, frozenset[TopicPartition]]) -> None:
        """Receive from segments only after their parents, given by segment."""
        self._shared.window.order.parents = parents

    def waits(self, where: TopicPartition) -> bool:
        """Return whether a segment waits for its parents."""
        return self._shared.window.order.waits(where)

    @property
    def segments_waiting(self) -> int:
        """Number of segments that wait for their parents."""
        return self._shared.window.order.waiting()

    def look_at_ends(self, backlog: Callable[[TopicPartition], int | None]) -> None:
        """Receive from segments whose parents are acknowledged, or received up to their ends.

        Args:
            backlog: Returns the number of entries of a segment that are not acknowledged; ``None``
                without the subscription.

        Raises:
            BrokerError: It is unknown.
        """
        order = self._shared.window.order
        for parent in sorted(order.awaited()):
            left = backlog(parent)
            if left == 0 or (left and self._has_rest(parent, left)):
                order.end(parent)

    def _has_rest(self, parent: TopicPartition, backlog: int) -> bool:
        """Return whether a sealed segment is received up to its end.

        Entries of the backlog that wait for their time, or for the end of a transaction, are not.
        """
        with self._shared.lock:
            window = self._shared.window.known.get(parent)
            if window is None or not window.has_rest(backlog):
                return False
        try:
            consumer = self._consumers.range_consumers.consumer_of(parent)
            last = None if consumer is None else consumer.last_entry()
        except BrokerError:
            return False  # the next look asks again
        # If entries that this source holds have expired, the backlog may have as many others.
        with self._shared.lock:
            return last is not None and (window.holds(last) or window.state.covers(last))

    def identify(self, subscription_id: SubscriptionId | None) -> None:
        """Set the id of the subscription in the next checkpoints."""
        with self._shared.lock:
            self._shared.window.identify(subscription_id)

    def standing(self, where: TopicPartition) -> list[tuple[RangeConsumer, Consumer]]:
        """Return the consumers of a topic partition that are connected now."""
        return self._consumers.range_consumers.standing(where)

    def compare(
        self,
        standing: Collection[tuple[RangeConsumer, Consumer]],
        state: SubscriptionState | None,
    ) -> None:
        """Subscribe consumers again that the broker does not know.

        Args:
            standing: Consumers that were connected before the broker was asked.
            state: The subscription at the broker then; ``None`` if it does not exist.
        """
        for one, consumer in standing:
            owned_range = one.owned_range
            if state is None or state.lacks(owned_range.hash_range, consumer_name(owned_range)):
                one.replace_at_s = time.monotonic()
                one.forgotten = consumer

    def tidy(self) -> None:
        """Close consumers that only served to acknowledge earlier batches."""
        if self._ending is None:
            return
        with self._shared.lock:
            ended = self._shared.window.batches.is_released(self._ending.batch_id)
        if ended and not self._consumers.acknowledger.waiting:
            self._consumers.range_consumers.let_go(
                self._ending.partitions.keys() - set(self._shared.window.partitions)
            )
            self._ending = None

    def fail(self, error: KeyShardError) -> None:
        """End the source with an error."""
        self._shared.fail(error)


class BoundedSegments:
    """The segments of a bounded run: all that exist at its start. One thread calls the methods.

    Args:
        scalable: Reports the segments.
        owned: Their consumers.
        of_run: The segments; empty for a run without scalable topics.
    """

    def __init__(
        self,
        scalable: ScalableTopics,
        owned: PartitionLifecycle,
        of_run: Collection[TopicPartition],
    ) -> None:
        self._scalable = scalable
        self._owned = owned
        self._of_run = set(of_run)
        self.gone: set[TopicPartition] = set()
        """Segments of the run that were deleted. The broker deletes a sealed segment after
        everything in it is acknowledged."""

    def look(self) -> None:
        """Receive from segments whose parents have ended, and close deleted segments.

        Raises:
            BrokerError: The segments are unknown, or could not be closed.
        """
        if not self._of_run:
            return
        topics = sorted(set(map(self._scalable.topic_of, self._of_run)))
        existing = {where for topic in topics for where in self._scalable.partitions(topic)}
        gone = self._of_run - (existing - self._scalable.created_again)
        if gone:
            self._owned.shrink(gone, again=False)
            for where in gone:
                self._owned.forget(where)
            self._of_run -= gone
            self.gone |= gone
        parents = self._scalable.parents()
        self._owned.order(
            {one: parents[one] & self._of_run for one in self._of_run & parents.keys()}
        )
        self._owned.look_at_ends(self._scalable.backlog)

    def waits(self, where: TopicPartition) -> bool:
        """Return whether a segment waits for its parents."""
        return self._owned.waits(where)

    def backlog(self, where: TopicPartition) -> int | None:
        """Return the entries of a segment that are not acknowledged.

        Returns:
            ``None`` for a topic partition of another topic, or without the subscription.

        Raises:
            BrokerError: It is unknown.
        """
        return self._scalable.backlog(where) if where in self._of_run else None

    @property
    def waiting(self) -> int:
        """Number of segments that wait for their parents."""
        return self._owned.segments_waiting
