"""The admin interface of the in-memory broker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keyshard.broker.memory import MemoryCluster
from keyshard.core.broker_state import BrokerState
from keyshard.core.entry import EntryId, TopicPartition
from keyshard.core.entry_set import EntrySet
from keyshard.errors import BrokerError, TopicNotFoundError


class MemoryAdmin:
    """What the runtime asks an admin interface, answered from a :class:`MemoryCluster`."""

    def __init__(self, cluster: MemoryCluster, name: str = "memory") -> None:
        self._cluster = cluster
        self._name = name

    def cluster(self) -> str:
        """Name of the cluster."""
        return self._name

    def topic_exists(self, topic: str) -> bool:
        """Whether a topic exists."""
        try:
            with self._cluster.lock:
                self._cluster.log(self._cluster.partitions(topic)[0])
        except TopicNotFoundError:
            return False
        return True

    def subscription(
        self, topic_partition: TopicPartition, subscription: str
    ) -> Mapping[str, Any] | None:
        """Statistics of a subscription; ``None`` when there is none."""
        try:
            return {"msgBacklog": self._cluster.backlog(topic_partition, subscription)}
        except BrokerError:
            return None

    def broker_state(
        self, topic_partition: TopicPartition, subscription: str
    ) -> BrokerState | None:
        """Ledgers and cursor of a topic partition; ``None`` when there is no such topic."""
        with self._cluster.lock:
            try:
                log = self._cluster.log(topic_partition)
            except TopicNotFoundError:
                return None
            try:
                cursor = self._cluster.subscription(topic_partition, subscription).cursor
            except BrokerError:
                return BrokerState(log.ledger_sizes)
            marked = cursor.mark_delete
            return BrokerState(
                log.ledger_sizes,
                log.id(marked) if marked >= 0 else EntryId(min(log.ledger_sizes), -1),
                EntrySet.of(log.id(ordinal) for ordinal in cursor.acked),
            )

    def close(self) -> None:
        """Nothing is held."""
