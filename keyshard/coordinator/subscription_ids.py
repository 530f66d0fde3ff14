"""Recognizes the subscriptions of a source at a restart, by an id that is a property of each.

A subscription may expire or be deleted while a job is down, and another client may create it again.
The broker then shows a cursor like any other, but may have deleted entries meanwhile. So each
subscription of a source has the property ``keyshard.id``, and the checkpoint names its value. A
subscription without it is another one (docs/adr/0044).
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from keyshard.broker.admin.port import ID_PROPERTY, Admin
from keyshard.broker.retry import retry_until
from keyshard.config.source import SourceConfig
from keyshard.core.position.checkpoint import Checkpoint, SubscriptionId
from keyshard.core.position.entry import TopicPartition
from keyshard.errors import AdminError, BrokerError
from keyshard.threads import Pool

THREADS_MAX = 8
"""Topic partitions that are handled in parallel."""
ID_BYTES = 8
"""Random bytes of an id."""
WITHOUT_MAX = 100
"""Most topic partitions without the id in a checkpoint. If there are more, it names no id."""

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
        return None if stats is None else properties_of(where, stats)

    with Pool(THREADS_MAX, "keyshard-properties") as pool:
        return dict(zip(topic_partitions, pool.map(read, topic_partitions), strict=True))


def properties_of(where: TopicPartition, stats: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the properties in the statistics of a subscription; empty if there are none.

    Raises:
        AdminError: The answer of the broker has another form.
    """
    found = stats.get("subscriptionProperties") if isinstance(stats, Mapping) else stats
    if found is None:
        return {}
    if isinstance(found, Mapping) and all(type(each) is str for each in found.values()):
        return found
    raise AdminError(
        f"The properties of the subscription in {where} cannot be understood.", "Check admin_url."
    )


class SubscriptionIds:
    """Gives the subscriptions of a source one id.

    If a subscription has another id already, that one stays: it may belong to another source. But
    if the checkpoint names the id of this topic partition, the subscription gets it again.

    Args:
        admin: Admin REST interface; without one, no id is set.
        subscription: Name of the subscription.
        checkpoint: Names the id, if it has one. Else it is that of an existing subscription, or a
            new one.
        properties: Properties of the subscriptions before the start.
        gone: Topic partitions of the checkpoint that no longer exist.
    """

    def __init__(
        self,
        admin: Admin | None,
        subscription: str,
        checkpoint: Checkpoint | None,
        properties: Properties,
        gone: Collection[TopicPartition] = (),
    ) -> None:
        self._admin = admin
        self._subscription = subscription
        states = frozenset(() if checkpoint is None else checkpoint.partitions).difference(gone)
        known = None if checkpoint is None else checkpoint.subscription_id
        self._named = frozenset() if known is None else states - known.without
        """Topic partitions that have the id according to the checkpoint."""
        self._set_aside = states - properties.keys()
        """Topic partitions of the checkpoint whose properties are unknown: those that are no longer
        consumed, and all without an admin interface."""
        self._with_id = set(self._named & self._set_aside)
        stored = (each.get(ID_PROPERTY) for each in properties.values() if each)
        existing = min((one for one in stored if one), default=None)
        self._id = known.text if known else existing or secrets.token_hex(ID_BYTES)
        self._other: set[TopicPartition] = set()
        """Topic partitions whose subscription has the id of another source."""
        self._refused: dict[TopicPartition, None] = {}
        """Topic partitions whose newest attempt failed; the next in turn comes first."""
        for where, each in properties.items():
            self.seen(where, each)
        self._warned: set[str] = set()

    def same(self, where: TopicPartition) -> bool:
        """Return whether a subscription may be that of the checkpoint."""
        return where in self._with_id or where not in self._named

    def of(self, found: Iterable[TopicPartition]) -> SubscriptionId | None:
        """Return the id for the next checkpoints.

        Args:
            found: Topic partitions that the source consumes.
        """
        without = self._set_aside.union(found) - self._with_id
        if not self._with_id:
            return None
        if len(without) > WITHOUT_MAX:
            self._warn(
                f"is missing in {len(without)} topic partitions, so checkpoints do not name it"
            )
            return None
        return SubscriptionId(self._id, without)

    def set_in(self, found: Iterable[TopicPartition], timeout_s: float = 0.0) -> None:
        """Set the id in those subscriptions that lack it, unless another source's id stays.

        Errors are logged as warnings. An error other than ``AdminError`` concerns more than one
        topic partition, so the call skips those that it has not begun. The next call tries all
        skipped topic partitions, then one of those that failed. If that one succeeds, the call
        after it tries all that failed.

        Args:
            found: The topic partitions. Where there is no subscription, nothing is set.
            timeout_s: Longest time of repeated attempts, seconds; 0 for one attempt.
        """
        if self._admin is None:
            return
        admin, deadline_s = self._admin, time.monotonic() + timeout_s
        missing = set(found) - self._with_id - self._other
        again = [where for where in self._refused if where in missing][:1]
        new = sorted(missing - self._refused.keys())
        failed = threading.Event()

        def set_id(where: TopicPartition) -> None:
            if failed.is_set():
                return
            try:
                is_set = retry_until(
                    lambda: admin.set_property(where, self._subscription, ID_PROPERTY, self._id),
                    max(0.0, deadline_s - time.monotonic()),
                )
            except BrokerError as exc:
                if not isinstance(exc, AdminError):
                    failed.set()
                self._refused[where] = None
                self._warn(f"could not be set in {where}", exc)
            else:
                if is_set:
                    self._with_id.add(where)

        for where in again:
            del self._refused[where]
        with Pool(THREADS_MAX, "keyshard-properties") as pool:
            list(pool.map(set_id, [*new, *again]))
        if self._with_id.intersection(again):
            self._refused.clear()
        if not self._refused:
            self._warned.clear()

    def seen(self, where: TopicPartition, properties: Mapping[str, str] | None) -> None:
        """Note the properties of a subscription; ``None`` if it does not exist."""
        found = None if properties is None else properties.get(ID_PROPERTY)
        if found != self._id and where in self._with_id:
            _log.warning(
                "The subscription %r of %s was deleted while it was consumed. Its consumers create "
                "it again, but entries that the broker deletes in between are lost.",
                self._subscription, where,
            )  # fmt: skip
        self._with_id.discard(where)
        self._other.discard(where)
        if found == self._id:
            self._with_id.add(where)
        elif found is not None and where not in self._named:
            self._other.add(where)

    def forget(self, gone: TopicPartition) -> None:
        """Forget a topic partition that was deleted."""
        self._with_id.discard(gone)
        self._other.discard(gone)
        self._refused.pop(gone, None)

    def _warn(self, problem: str, error: BrokerError | None = None) -> None:
        """Warn of a kind of problem, once until all is well."""
        kind = type(error).__name__
        if kind in self._warned:
            return
        self._warned.add(kind)
        _log.warning(
            "Property %s of subscription %r %s. So if the subscription is deleted and created "
            "again while this source is down, the next start may not notice it. %s",
            ID_PROPERTY, self._subscription, problem, "" if error is None else error.summary,
        )  # fmt: skip
