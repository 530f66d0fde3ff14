"""The admin interface of the in-memory broker, under the same contract tests as the real one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from keyshard.broker.admin.port import BEGINS_PROPERTY
from keyshard.broker.memory import MemoryCluster
from keyshard.broker.memory.dispatch import Subscription
from keyshard.broker.memory.log import EntryLog
from keyshard.core.creation import create_or_correct
from keyshard.core.message import MessageId
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.position.ledger import Ledger
from keyshard.core.subscription_state import CursorState
from keyshard.core.topic_schema import TopicSchema
from keyshard.core.topic_segments import is_scalable, is_segment
from keyshard.errors import AdminError, BrokerError, TopicNotFoundError


class MemoryAdmin:
    """The admin interface of a :class:`~keyshard.broker.memory.MemoryCluster`.

    Args:
        cluster: The broker's side.
        name: Name of the cluster.
    """

    def __init__(self, cluster: MemoryCluster, name: str = "memory") -> None:
        self._cluster = cluster
        self._name = name

    def cluster(self) -> str:
        return self._name

    def partition_count(self, topic: str) -> int | None:
        where = TopicPartition.parse(topic)
        found = self._cluster.topics().get(where.topic)
        if found is None or (where.partition >= 0 and where not in found):
            return None
        return 0 if where.partition >= 0 or found[0].partition < 0 else len(found)

    def namespaces(self, tenant: str) -> set[str]:
        names = [name.partition("://")[2].split("/") for name in self._cluster.topics()]
        found = {namespace for owner, namespace, *_ in names if owner == tenant}
        if not found:
            raise AdminError(f"Tenant {tenant} does not exist.", "Use an existing tenant.")
        return found

    def topics(self, tenant: str, namespace: str) -> set[str]:
        prefix = f"persistent://{tenant}/{namespace}/"
        names = (name for name in self._cluster.topics() if name.startswith(prefix))
        return {name for name in names if TopicPartition.parse(name).partition < 0}

    def scalable_topics(self, tenant: str, namespace: str) -> set[str] | None:
        prefix = f"topic://{tenant}/{namespace}/"
        return {name for name in self._cluster.scalable.names() if name.startswith(prefix)}

    def created(self, topic_partition: TopicPartition) -> str:
        with self._cluster.lock:
            self._require(topic_partition)
            return str(self._cluster.log(topic_partition).first_ledger)

    def stored_bytes(self, segment: TopicPartition) -> int | None:
        with self._cluster.lock:
            try:
                return sum(one.size_bytes for one in self._cluster.log(segment).ledgers)
            except TopicNotFoundError:
                return None

    def version(self) -> str:
        return self._cluster.version

    def settings(self) -> Mapping[str, str]:
        unacked, look_ahead = self._cluster.unacked_limits, self._cluster.look_ahead
        return {
            "maxUnackedMessagesPerConsumer": str(unacked.per_consumer),
            "maxUnackedMessagesPerSubscription": str(unacked.per_subscription),
            "keySharedLookAheadMsgInReplayThresholdPerConsumer": str(look_ahead.per_consumer),
            "keySharedLookAheadMsgInReplayThresholdPerSubscription": str(
                look_ahead.per_subscription
            ),
            "delayedDeliveryFixedDelayDetectionLookahead": str(look_ahead.delayed),
        }

    def subscription(
        self, topic_partition: TopicPartition, subscription: str, *, oldest: bool = False
    ) -> Mapping[str, Any] | None:
        if is_scalable(topic_partition.topic):
            return self._of_segments(topic_partition.topic, subscription)
        with self._cluster.lock:
            found = self._cluster.subscriptions(topic_partition).get(subscription)
            if found is None:
                return None
            if is_segment(topic_partition):
                return _stats_of_segment(found)
            first = found.cursor.mark_delete + 1
            oldest_ms = self._cluster.log(topic_partition).published_from(first) if oldest else 0
            shown_ms = -1 if oldest_ms is None else oldest_ms
            return {**_stats(found), "earliestMsgPublishTimeInBacklog": shown_ms}

    def _of_segments(self, topic: str, subscription: str) -> Mapping[str, Any] | None:
        with self._cluster.lock:
            where = self._cluster.scalable.graph(topic).partitions
            found = [self._cluster.subscriptions(one).get(subscription) for one in where]
            backlogs = [one.backlog for one in found if one is not None]
            return {"type": "QUEUE", "msgBacklog": sum(backlogs)} if backlogs else None

    def subscriptions(self, topic_partition: TopicPartition) -> Mapping[str, Mapping[str, Any]]:
        with self._cluster.lock:
            found = self._cluster.subscriptions(topic_partition)
            stats = _stats_of_segment if is_segment(topic_partition) else _stats
            return {name: stats(one) for name, one in found.items()}

    def register(self, topic: str, subscription: str) -> None:
        self._cluster.scalable.register(topic, subscription)

    def unregister(self, topic: str, subscription: str) -> None:
        self._cluster.scalable.unregister(topic, subscription)

    def remove_leftover(self, topic_partition: TopicPartition, subscription: str) -> bool | None:
        with self._cluster.lock:
            where = self._topic_of(topic_partition)
            if where is None:
                return True
            found = self._cluster.subscriptions(topic_partition)
            # An existing partition of a partitioned topic is not a leftover.
            if (
                set(found) - {subscription}
                or len(self._cluster.log(topic_partition))
                or where != topic_partition.name
            ):
                return False
            if not found or found[subscription].connected:
                return None
            self._cluster.delete_topic(where)
            return True

    def broker_state(
        self, topic_partition: TopicPartition, subscription: str
    ) -> CursorState | None:
        """Ledgers and cursor of a topic partition; ``None`` if there is no such topic."""
        with self._cluster.lock:
            log = self._log(topic_partition)
            if log is None:
                return None
            try:
                cursor = self._cluster.subscription(topic_partition, subscription).cursor
            except BrokerError:
                return CursorState(log.ledger_sizes, last_written=log.last_written)
            marked = cursor.mark_delete
            return CursorState(
                log.ledger_sizes,
                log.id(marked) if marked >= 0 else EntryId(min(log.ledger_sizes), -1),
                EntrySet.of(log.id(ordinal) for ordinal in cursor.acked),
                log.last_written,
            )

    def ledgers(self, topic_partition: TopicPartition) -> tuple[Ledger, ...] | None:
        """Ledgers of a topic partition; ``None`` if there is no such topic."""
        with self._cluster.lock:
            log = self._log(topic_partition)
            return None if log is None else log.ledgers

    def placed_ledgers(self, topic_partition: TopicPartition) -> tuple[Ledger, ...] | None:
        """As :meth:`ledgers`: the ledgers are in the memory of this process, not on bookies."""
        found = self.ledgers(topic_partition)
        why = "an in-memory cluster has no bookies"
        return found and tuple(replace(one, placement=why) for one in found)

    def offloads(self, topic_partition: TopicPartition) -> Mapping[int, str] | None:
        """Nothing: an in-memory cluster offloads no ledger."""
        return None if self.ledgers(topic_partition) is None else {}

    def last_written(self, topic_partition: TopicPartition) -> EntryId | None:
        """The last entry that was written, stored or not; ``None`` if there is no topic."""
        with self._cluster.lock:
            log = self._log(topic_partition)
            return None if log is None else log.last_written

    def held_back_behind(self, topic_partition: TopicPartition) -> EntryId | None:  # noqa: ARG002
        """Always ``None``: this broker has no open transactions."""
        return None

    def position_at(self, topic_partition: TopicPartition, time_ms: int) -> EntryId | None:
        """A position at which publish times reach ``time_ms``; ``None`` if there is no topic."""
        with self._cluster.lock:
            log = self._log(topic_partition)
            if log is None:
                return None
            found = log.position_at(time_ms)
            before_all = not time_ms and self._cluster.release.zero_is_before_all
            return EntryId(-1, -1) if before_all else found

    def begin(
        self, topic_partition: TopicPartition, subscription: str, position: MessageId
    ) -> bool:
        """Create a subscription that begins at an entry; ``False`` if it exists already."""
        with self._cluster.lock:
            self._require(topic_partition)
            if subscription in self._cluster.subscriptions(topic_partition):
                return False
            first = EntryId(position.ledger, position.entry)
            made = self._cluster.open_subscription(topic_partition, subscription, first)
            made.properties = {BEGINS_PROPERTY: str(position)} if position.batch_index else {}
            return True

    def set_property(
        self, topic_partition: TopicPartition, subscription: str, name: str, text: str | None
    ) -> bool:
        """Set a property of a subscription, or remove it (``None``); the others stay."""
        with self._cluster.lock:
            found = self._cluster.subscriptions(topic_partition).get(subscription)
            if found is None or is_segment(topic_partition):
                return False
            others = {one: found.properties[one] for one in found.properties if one != name}
            found.properties = others if text is None else others | {name: text}
            return True

    def schema(self, topic: str, version: int | None = None) -> TopicSchema | None:
        """A version of a topic's schema, by default the newest; ``None`` if there is none.

        A partition has the schema of its topic, as in Pulsar.
        """
        with self._cluster.lock:
            found = self._cluster.schemas.get(TopicPartition.parse(topic).topic, [])
        if version is None:
            return found[-1] if found else None
        return found[version] if 0 <= version < len(found) else None

    def creates_subscriptions(self, topic: str) -> bool:  # noqa: ARG002
        """Whether the broker creates subscriptions of a topic."""
        return True

    def unacknowledged_limits(self, topic: str) -> tuple[int, int]:  # noqa: ARG002
        """Maximum unacknowledged messages per consumer and per subscription; 0 for no limit."""
        limits = self._cluster.unacked_limits
        return limits.per_consumer, limits.per_subscription

    def consumer_limits(self, topic: str) -> tuple[int | None, int | None]:  # noqa: ARG002
        """Maximum consumers of a topic partition, and of one subscription there: no limit."""
        return 0, 0

    def retention_min(self, topic: str) -> int:  # noqa: ARG002
        """Time for which acknowledged messages are retained, minutes: none."""
        return 0

    def deduplicates(self, topic: str) -> bool:
        """Whether the broker deduplicates a topic."""
        with self._cluster.lock:
            return self._cluster.publishing.deduplicates(topic)

    def deduplicates_by_topic(self, topic: str) -> bool:  # noqa: ARG002
        """Whether a policy of the topic itself enables deduplication; topics have no policies."""
        return False

    def close(self) -> None:
        """Do nothing: there is no connection."""

    def _log(self, topic_partition: TopicPartition) -> EntryLog | None:
        """Return what is stored; ``None`` if there is no such topic, and for a segment."""
        if is_segment(topic_partition):
            return None
        try:
            return self._cluster.log(topic_partition)
        except TopicNotFoundError:
            return None

    def _topic_of(self, topic_partition: TopicPartition) -> str | None:
        topics = self._cluster.topics().items()
        return next((name for name, found in topics if topic_partition in found), None)

    def _require(self, topic_partition: TopicPartition) -> None:
        if self._topic_of(topic_partition) is None:
            raise AdminError(
                f"{topic_partition} does not exist.", create_or_correct(topic_partition.name)
            )


def _stats(found: Subscription) -> Mapping[str, Any]:
    return {
        "type": "Key_Shared",
        "keySharedMode": "STICKY",
        "allowOutOfOrderDelivery": False,
        "isDurable": True,
        "subscriptionProperties": found.properties,
        "msgBacklog": found.backlog,
        "msgInReplay": len(found.replay),
        "msgDelayed": len(found.delayed),
        "msgOutCounter": found.delivered,
        "nonContiguousDeletedMessagesRanges": found.cursor.ack_gaps,
        "blockedSubscriptionOnUnackedMsgs": found.blocked,
        "consumers": [
            {
                "consumerName": member.name,
                "address": "memory",
                "keyHashRangeArrays": [[member.hash_range.start, member.hash_range.end]],
                "unackedMessages": member.unacked,
                "blockedConsumerOnUnackedMsgs": member.blocked,
                "availablePermits": member.permits,
            }
            for member in found.members
        ],
    }


_OF_SEGMENT = (
    "type", "msgBacklog", "blockedSubscriptionOnUnackedMsgs", "consumers",
)  # fmt: skip
"""Statistics that Pulsar 5.0 reports of a segment."""
_OF_ITS_CONSUMERS = (
    "consumerName", "address", "unackedMessages", "blockedConsumerOnUnackedMsgs",
    "availablePermits",
)  # fmt: skip
"""Those of its consumers."""


def _stats_of_segment(found: Subscription) -> Mapping[str, Any]:
    stats = _stats(found)
    consumers = [{name: one[name] for name in _OF_ITS_CONSUMERS} for one in stats["consumers"]]
    return {name: stats[name] for name in _OF_SEGMENT} | {"consumers": consumers}
