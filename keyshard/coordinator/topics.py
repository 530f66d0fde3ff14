"""What exists at the broker of the topics that a source names, or whose names match its pattern."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from keyshard.broker.port import Admin, Broker
from keyshard.broker.retry import FIRST_TRIES_S, retry_until
from keyshard.config.source import SourceConfig
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import TopicPartition
from keyshard.core.topic_pattern import TopicPattern
from keyshard.errors import BrokerError, TopicNotFoundError
from keyshard.threads import Pool

PARKED = "-parked"
"""End of the name of a subscription that keeps dead letters."""
THREADS_MAX = 8
"""Questions asked at the same time."""

_log = logging.getLogger(__name__)


class Catalog:
    """Looks topics up: at the admin interface where there is one, else through the client.

    The client takes a topic that does not exist for one without partitions. So without admin a
    partitioned topic that turns into such a one counts as deleted, and the deletion of a topic
    without partitions is not seen.
    """

    def __init__(self, broker: Broker, admin: Admin | None, config: SourceConfig) -> None:
        self._broker = broker
        self._admin = admin
        self._topics = tuple(config.topics)
        self._letters: dict[str, bool] = {}
        self._pattern = (
            None if config.topics_pattern is None else TopicPattern.parse(config.topics_pattern)
        )

    @property
    def by_pattern(self) -> bool:
        """Whether topics are matched, not named."""
        return self._pattern is not None

    def topics(self) -> tuple[str, ...]:
        """Topics to consume: the named ones, or those that match now."""
        if self._pattern is None:
            return self._topics
        assert self._admin is not None, "a pattern needs admin_url"
        found = self._admin.topics(self._pattern.tenant, self._pattern.namespace)
        matching = sorted(topic for topic in found if self._pattern.matches(topic))
        return tuple(topic for topic in matching if not self._has_letters(topic))

    def _has_letters(self, topic: str) -> bool:
        """Whether a topic is where a source parks; asked once, when it is seen first."""
        assert self._admin is not None
        known = self._letters.get(topic)
        if known is None:
            known = self._admin.partition_count(topic) == 0 and any(
                name.endswith(PARKED) for name in self._admin.subscriptions(TopicPartition(topic))
            )
            self._letters[topic] = known
            if known:
                _log.warning("topic %s matches, but holds dead letters: it is left out", topic)
        return known

    def partitions(self, topic: str, *, was_partitioned: bool) -> tuple[TopicPartition, ...]:
        """Topic partitions that a topic has now; ``()`` when it does not exist.

        Args:
            topic: Full topic name.
            was_partitioned: Whether it had partitions before.
        """
        plain = (TopicPartition.parse(topic),)  # one partition may be a topic of its own
        if self._admin is None:
            found = self._broker.partitions(topic)
            return () if found == plain and was_partitioned else found
        count = self._admin.partition_count(topic)
        if count is None:
            return ()
        return tuple(TopicPartition(topic, i) for i in range(count)) or plain

    def missing(self) -> frozenset[str]:
        """Topics that do not exist, as the broker says; the admin interface says it better.

        Raises:
            BrokerError: The broker cannot be reached.
        """
        return self._broker.missing(() if self._admin is not None else self._topics)

    def let_in(self) -> None:
        """Ask whether the broker lets this connection in; the client says only that time is up.

        Raises:
            BrokerError: It cannot be reached, or does not.
        """
        self._broker.missing(())

    def reach(self, topic: str) -> None:
        """Ask the client for a topic, whether or not the admin interface told all that is needed.

        Raises:
            BrokerError: The client cannot reach the broker.
        """
        self._broker.partitions(topic)


@dataclass(frozen=True, slots=True)
class Found:
    """What a source starts with."""

    consumed: tuple[TopicPartition, ...]
    kept: frozenset[TopicPartition]
    """In the checkpoint and not to be consumed any more."""
    gone: frozenset[TopicPartition]
    """In the checkpoint and deleted."""


def look(catalog: Catalog, checkpoint: Checkpoint | None, timeout_s: float) -> Found:
    """Find the topic partitions of a source that starts.

    Raises:
        TopicNotFoundError: A topic does not exist at the first start. Pulsar would create it on
            subscribe, and a typing error would leave a subscription that holds backlog.
        BrokerError: The broker, or the admin interface, could not be reached until the timeout.
    """
    known = tuple(checkpoint.partitions) if checkpoint else ()
    partitioned = {tp.topic for tp in known if tp.partition >= 0}
    if checkpoint is None:
        # A mistake in a URL is told soon; who goes on from a checkpoint may outlast an outage.
        timeout_s = min(timeout_s, FIRST_TRIES_S)
        for topic in sorted(retry_until(catalog.missing, timeout_s)):
            raise _not_found(topic)
    else:
        retry_until(catalog.let_in, timeout_s)
    topics = retry_until(catalog.topics, timeout_s)
    if not topics:
        _log.warning("no topic matches the pattern yet")
    existing: dict[str, tuple[TopicPartition, ...]] = {}
    for topic in dict.fromkeys([*topics, *(tp.topic for tp in known)]):

        def ask(topic: str = topic) -> tuple[TopicPartition, ...]:
            return catalog.partitions(topic, was_partitioned=topic in partitioned)

        existing[topic] = retry_until(ask, timeout_s)
        if existing[topic]:
            continue
        if checkpoint is None and not catalog.by_pattern:
            raise _not_found(topic)
        _log.warning("topic %s does not exist; it is consumed once it is created", topic)
    # A topic and one of its partitions may both be named.
    consumed = tuple(dict.fromkeys(tp for topic in topics for tp in existing[topic]))
    if consumed:
        # Subscribing would wait longer for a broker: as long as for ranges in use.
        retry_until(lambda: catalog.reach(consumed[0].topic), timeout_s)
    others = frozenset(known) - set(consumed)
    kept = frozenset(tp for tp in others if tp in existing[tp.topic])
    for topic in sorted({tp.topic for tp in kept}):
        _log.warning("topic %s is in the checkpoint, but no longer consumed", topic)
    return Found(consumed, kept, others - kept)


def _not_found(topic: str) -> TopicNotFoundError:
    return TopicNotFoundError(
        f"Topic {topic} does not exist. Create it first, or correct its name.", topic=topic
    )


def warn_of_existing(
    admin: Admin, subscription: str, found: Iterable[TopicPartition], start: str
) -> None:
    """Say that a subscription exists, when a starting position was to apply; never raises."""

    def stats(topic_partition: TopicPartition) -> Mapping[str, Any] | None:
        try:
            return admin.subscription(topic_partition, subscription)
        except BrokerError as exc:
            _log.debug("no statistics of %s: %s", topic_partition, exc)
            return None

    found = tuple(found)
    with Pool(THREADS_MAX, "keyshard-existing") as pool:
        existing = [one for one in pool.map(stats, found) if one is not None]
    if existing:
        backlog = sum(int(one.get("msgBacklog", 0)) for one in existing)
        _log.warning(
            "subscription %r exists on %d of %d topic partitions, with a backlog of %d entries: it "
            "is continued there, and the starting position %r does not apply",
            subscription, len(existing), len(found), backlog, start,
        )  # fmt: skip
