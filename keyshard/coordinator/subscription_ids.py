"""Recognizes the subscriptions of a source at a restart, by an id that is a property of each.

A subscription may expire or be deleted while a job is down, and another client may create it again.
The broker then shows a cursor like any other, but may have deleted entries meanwhile. So each
subscription of a source has the property ``keyshard.id``, and the checkpoint names its value. A
subscription without it is another one (docs/adr/0044).
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from keyshard.broker.admin.port import ID_PROPERTY, Admin
from keyshard.broker.retry import retry_until
from keyshard.config.source import SourceConfig
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import TopicPartition
from keyshard.errors import AdminError, AuthorizationError
from keyshard.threads import Pool

THREADS_MAX = 8
"""Topic partitions that are handled in parallel."""
ID_BYTES = 8
"""Random bytes of an id."""

_log = logging.getLogger(__name__)

Properties = Mapping[TopicPartition, Mapping[str, str] | None]
"""Properties of a subscription in each topic partition; ``None`` where it does not exist."""


def read_properties(
    admin: Admin | None, config: SourceConfig, found: Iterable[TopicPartition]
) -> Properties:
    """Return the properties of a source's subscription in some topic partitions.

    Args:
        admin: Admin REST interface; without one the result is empty.
        config: Names the subscription.
        found: The topic partitions.

    Raises:
        BrokerError: The admin interface does not answer, or refuses.
    """
    if admin is None:
        return {}
    timeout_s = config.operation_timeout_ms / 1000
    topic_partitions = tuple(found)

    def read(where: TopicPartition) -> Mapping[str, str] | None:
        stats = retry_until(lambda: admin.subscription(where, config.subscription), timeout_s)
        return None if stats is None else properties_of(stats)

    with Pool(THREADS_MAX, "keyshard-properties") as pool:
        return dict(zip(topic_partitions, pool.map(read, topic_partitions), strict=True))


def properties_of(stats: Any) -> Mapping[str, str]:
    """Return the properties in the statistics of a subscription; empty if there are none."""
    found = stats.get("subscriptionProperties") if isinstance(stats, Mapping) else None
    return found if isinstance(found, Mapping) else {}


class SubscriptionIds:
    """Gives each subscription of a source the same id.

    If the id cannot be set everywhere, checkpoints name none, and the next start tries again.

    Args:
        admin: Admin REST interface; without one, checkpoints name no id.
        subscription: Name of the subscription.
        checkpoint: Names the id, if it has one. Else it is that of an existing subscription, or a
            new one.
        properties: Properties of the subscriptions before the start.
    """

    def __init__(
        self,
        admin: Admin | None,
        subscription: str,
        checkpoint: Checkpoint | None,
        properties: Properties,
    ) -> None:
        self._admin = admin
        self._subscription = subscription
        known = None if checkpoint is None else checkpoint.subscription_id
        stored = (each.get(ID_PROPERTY) for each in properties.values() if each)
        existing = min((one for one in stored if one), default=None)
        self.id = known or existing or secrets.token_hex(ID_BYTES)
        self._is_known = known is not None
        self._has_id: set[TopicPartition] = set()
        for where, each in properties.items():
            self.seen(where, each)
        self._refused = False

    def known_in(self, where: TopicPartition) -> bool:
        """Return whether the subscription is that of the checkpoint, as far as that has an id."""
        return not self._is_known or where in self._has_id

    def set_in(self, found: Iterable[TopicPartition], timeout_s: float = 0.0) -> str | None:
        """Set the id in those subscriptions that lack it.

        Args:
            found: The topic partitions. Where there is no subscription, nothing is set.
            timeout_s: Longest time of repeated attempts for each, seconds; 0 for one attempt.

        Returns:
            The id for the next checkpoints; ``None`` if the admin interface refuses to set it.

        Raises:
            BrokerUnavailableError: The admin interface does not answer.
        """
        if self._admin is None or self._refused:
            return None
        admin, subscription = self._admin, self._subscription
        missing = [where for where in found if where not in self._has_id]

        def set_id(where: TopicPartition) -> bool:
            return retry_until(
                lambda: admin.set_property(where, subscription, ID_PROPERTY, self.id), timeout_s
            )

        try:
            with Pool(THREADS_MAX, "keyshard-properties") as pool:
                done = list(pool.map(set_id, missing))
        except (AdminError, AuthorizationError) as exc:
            self._refused = True
            _log.warning(
                "Property %s of subscription %r could not be set. So if the subscription is "
                "deleted and created again while this source is down, the next start will not "
                "notice it. %s",
                ID_PROPERTY, subscription, exc,
            )  # fmt: skip
            return None
        self._has_id.update(where for where, is_set in zip(missing, done, strict=True) if is_set)
        return self.id

    def seen(self, where: TopicPartition, properties: Mapping[str, str] | None) -> None:
        """Note the properties of a subscription; ``None`` if it does not exist."""
        if properties is not None and properties.get(ID_PROPERTY) == self.id:
            self._has_id.add(where)
        else:
            self._has_id.discard(where)
