"""The interface between keyshard and the admin interface of a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from keyshard.core.message import MessageId
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.ledger import Ledger
from keyshard.core.subscription_state import CursorState
from keyshard.core.topic_schema import TopicSchema

BEGINS_PROPERTY = "keyshard.begins"
"""Property of a subscription that begins inside a producer batch: ``ledger:entry:index``."""
ID_PROPERTY = "keyshard.id"
"""Property that distinguishes a subscription from another one of the same name (ADR 44)."""


class Admin(Protocol):
    """Requests to the admin interface.

    Of a segment of a scalable topic, Pulsar 5.0 reports only statistics and the creation time. A
    request for its ledgers, its cursor or a property returns ``None`` or ``False`` at once, as if
    the topic did not exist. So ``None`` means that nothing is known; it proves no deletion.
    """

    def version(self) -> str: ...

    def settings(self) -> Mapping[str, str] | None:
        """Configuration of the broker by name; ``None`` if this role may not read it."""

    def cluster(self) -> str: ...

    def partition_count(self, topic: str) -> int | None: ...

    def namespaces(self, tenant: str) -> set[str]: ...

    def topics(self, tenant: str, namespace: str) -> set[str]:
        """Full names of all persistent topics of a namespace, without their partitions.

        A non-partitioned topic named ``...-partition-N`` is left out.
        """

    def scalable_topics(self, tenant: str, namespace: str) -> set[str] | None:
        """Full names of all scalable topics of a namespace.

        ``None`` if the cluster does not know scalable topics.
        """

    def created(self, topic_partition: TopicPartition) -> str: ...

    def stored_bytes(self, segment: TopicPartition) -> int | None:
        """Size of what is stored in a segment of a scalable topic, bytes.

        ``None``: it does not exist.
        """

    def remove_leftover(self, topic_partition: TopicPartition, subscription: str) -> bool | None:
        """Delete a topic that a reconnect of keyshard recreated. Return whether it is gone now.

        ``False``: it holds an entry, or other clients used it. ``None``: it is undecided, so ask
        again later. There are three cases:

        - A consumer of the subscription is connected. It may be one that keyshard is closing.
        - There is no subscription. The broker may be deleting the topic, or a consumer of keyshard
          may be creating the subscription.
        - The broker does not delete it now.
        """

    def subscription(
        self, topic_partition: TopicPartition, subscription: str, *, oldest: bool = False
    ) -> Mapping[str, Any] | None:
        """Statistics of a subscription, as the broker names them; ``None`` if there is none.

        Args:
            topic_partition: Its topic partition, or a scalable topic: its ``msgBacklog`` is that of
                all segments.
            subscription: Its name.
            oldest: Whether to report when the first unacknowledged entry was published. The broker
                reads that entry, of every subscription.
        """

    def subscriptions(self, topic_partition: TopicPartition) -> Mapping[str, Mapping[str, Any]]: ...

    def broker_state(
        self, topic_partition: TopicPartition, subscription: str
    ) -> CursorState | None: ...

    def ledgers(self, topic_partition: TopicPartition) -> tuple[Ledger, ...] | None:
        """Stored ledgers in ascending order, the open one last; ``None`` if there is no topic."""

    def placed_ledgers(self, topic_partition: TopicPartition) -> tuple[Ledger, ...] | None:
        """As :meth:`ledgers`, with the placement of each ledger, by one request as well."""

    def offloads(self, topic_partition: TopicPartition) -> Mapping[int, str] | None:
        """Id of the offload of each offloaded ledger; ``None`` if there is no topic."""

    def last_written(self, topic_partition: TopicPartition) -> EntryId | None:
        """The last entry that was written, stored or not; ``None`` if there is no topic.

        If all entries are trimmed, the broker forgets this entry when it reloads the topic. The
        result is then the position before the first entry of the open ledger.
        """

    def held_back_behind(self, topic_partition: TopicPartition) -> EntryId | None:
        """The last entry that consumers can see, if an open transaction hides the later ones.

        ``None`` if no transaction does, or if the broker does not report it.

        Raises:
            AuthorizationError: This role may not ask.
            BrokerUnavailableError: The broker is still loading the topic, or has not begun to
                load it; :meth:`ledgers` makes it begin (retriable).
        """

    def position_at(self, topic_partition: TopicPartition, time_ms: int) -> EntryId | None:
        """Find a position at which entry times reach ``time_ms``; ``None`` if there is no topic.

        The entry before the position, if any, has an earlier time. The entry at the position, if
        it exists yet, does not. If times are not in entry order, several positions qualify, and
        this is any of them. The time is the broker's entry time if the broker adds one, else the
        publish time.
        """

    def begin(
        self, topic_partition: TopicPartition, subscription: str, position: MessageId
    ) -> bool:
        """Create a subscription that begins at an entry; ``False`` if it exists already.

        If nothing is stored at the position, it begins at the next entry. The broker alone would
        deliver a producer batch from its first message. A position inside a batch is therefore
        stored in the property :data:`BEGINS_PROPERTY` of the subscription.
        """

    def register(self, topic: str, subscription: str) -> None:
        """Register a subscription of a scalable topic. Idempotent.

        The broker then creates it in all segments that are open and in later ones, from their
        beginning, and deletes no sealed segment that it has not acknowledged. Brokers delete others
        after the retention time, by default within a minute, whatever subscriptions they have.

        Raises:
            TopicNotFoundError: The topic does not exist.
            BrokerError: The request fails.
        """

    def unregister(self, topic: str, subscription: str) -> None:
        """Delete a subscription of a scalable topic from all segments. Idempotent.

        Raises:
            BrokerError: The request fails.
        """

    def set_property(
        self, topic_partition: TopicPartition, subscription: str, name: str, text: str | None
    ) -> bool:
        """Set a property of a subscription, or remove it (``None``); the others stay.

        Returns:
            Whether the subscription exists.
        """

    def creates_subscriptions(self, topic: str) -> bool:
        """Whether the broker creates subscriptions of a topic; true if this role may not ask."""

    def unacknowledged_limits(self, topic: str) -> tuple[int, int]:
        """Maximum unacknowledged messages per consumer and per subscription; 0 for no limit.

        If the cluster has no topic policies, the limits are those of the namespace, or Pulsar's
        defaults. A scalable topic or a segment has no policies of its own.
        """

    def consumer_limits(self, topic: str) -> tuple[int | None, int | None]:
        """Maximum consumers of a topic partition, and of one subscription there; 0 for no limit.

        ``None`` if this role may not read the limit.
        """

    def retention_min(self, topic: str) -> int | None:
        """Time for which the namespace of a topic retains acknowledged messages, minutes.

        -1 for no limit; ``None`` if this role may not read it.
        """

    def deduplicates(self, topic: str) -> bool | None:
        """Whether the broker deduplicates a topic; ``None`` if this role may not ask."""

    def deduplicates_by_topic(self, topic: str) -> bool:
        """Whether a policy of the topic itself enables deduplication."""

    def schema(self, topic: str, version: int | None = None) -> TopicSchema | None:
        """A version of a topic's schema, by default the newest; ``None`` if there is none."""

    def close(self) -> None: ...
