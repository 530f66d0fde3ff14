"""Looks up the topics of a source, named or matched by a pattern, and their partitions."""

from __future__ import annotations

import itertools
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

from keyshard.broker.admin.port import Admin
from keyshard.broker.port import Broker
from keyshard.broker.reports import TopicWatch
from keyshard.broker.retry import FIRST_TRIES_S, retry_until
from keyshard.broker.scalable_topics import ScalableTopics
from keyshard.config.source import SourceConfig
from keyshard.core.creation import create_or_correct
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import TopicPartition
from keyshard.core.topic_pattern import TopicPattern
from keyshard.core.topic_segments import is_scalable
from keyshard.errors import BrokerError, ConfigError, TopicNotFoundError
from keyshard.threads import Pool

PARKED = "-parked"
"""Suffix of the name of a subscription that keeps dead letters."""
THREADS_MAX = 8
"""Maximum number of concurrent requests."""
CATCH_UP_S = 5.0
"""Longest wait at a start for a broker that has not heard of segments in the checkpoint, seconds.
Later they count as deleted."""
LOOK_S = 0.05
"""Time between two looks meanwhile, seconds."""

_log = logging.getLogger(__name__)


class Catalog:
    """Looks topics up with the admin interface if there is one, else with the client.

    The client reports a missing topic as one without partitions. Without the admin interface, a
    partitioned topic that is reported without partitions therefore counts as deleted. The deletion
    of a topic without partitions is not detected.
    """

    def __init__(self, broker: Broker, admin: Admin | None, config: SourceConfig) -> None:
        self._broker = broker
        self._admin = admin
        self._topics = tuple(config.topics)
        self.scalable = ScalableTopics(broker, admin, config.subscription)
        self._dead_letters: dict[str, bool] = {}
        self._pattern = (
            None if config.topics_pattern is None else TopicPattern.parse(config.topics_pattern)
        )

    @property
    def by_pattern(self) -> bool:
        """Whether a pattern selects the topics."""
        return self._pattern is not None

    def topics(self) -> tuple[str, ...]:
        """Return the topics to consume: the named ones, or those that match now."""
        if self._pattern is None:
            return self._topics
        assert self._admin is not None, "a pattern needs admin_url"
        found = matching(self._admin, self._pattern)
        if self._pattern.is_scalable:
            self.scalable.exist_only(found)
            return found  # Dead letters are in persistent topics.
        return tuple(topic for topic in found if not self._has_dead_letters(topic))

    def prefixes(self) -> tuple[str, ...]:
        """Return how the names of the topics begin, for each namespace."""
        if self._pattern is not None:
            return (self._pattern.prefix,)
        by_namespace: defaultdict[str, list[str]] = defaultdict(list)
        for topic in self._topics:
            by_namespace[topic.rpartition("/")[0]].append(topic)
        return tuple(map(commonprefix, by_namespace.values()))

    def watch(self, prefix: str, changed: Callable[[], None]) -> TopicWatch | None:
        """Watch the topics whose names begin with ``prefix``.

        Args:
            prefix: One of :meth:`prefixes`.
            changed: Called when one of the topics, or a topic partition, is created or deleted. Any
                thread may call it, and it must return at once.

        Returns:
            ``None`` if the client or the broker does not report topics.

        Raises:
            BrokerError: The broker cannot be reached, or refuses.
        """

        def report(names: Collection[str]) -> None:
            if selected := list(filter(self._selects, names)):
                self.scalable.look_again(filter(is_scalable, selected))
                changed()

        return self._broker.watch_topics(prefix, report)

    def _selects(self, name: str) -> bool:
        """Return whether a topic or a topic partition belongs to the topics, by its name."""
        topic = TopicPartition.parse(name).topic
        if self._pattern is not None:
            return self._pattern.matches(topic)
        return name in self._topics or topic in self._topics

    def _has_dead_letters(self, topic: str) -> bool:
        """Return whether a topic holds dead letters of a source. The answer is cached."""
        assert self._admin is not None
        known = self._dead_letters.get(topic)
        if known is None:
            known = self._admin.partition_count(topic) == 0 and any(
                name.endswith(PARKED) for name in self._admin.subscriptions(TopicPartition(topic))
            )
            self._dead_letters[topic] = known
            if known:
                _log.warning(
                    "topic %s matches the pattern, but contains dead letters; it is not consumed",
                    topic,
                )
        return known

    def partitions(self, topic: str, *, was_partitioned: bool) -> tuple[TopicPartition, ...]:
        """Return the current topic partitions of a topic; ``()`` if it does not exist.

        Args:
            topic: Full topic name.
            was_partitioned: Whether it had partitions before.
        """
        if is_scalable(topic):
            return self.scalable.partitions(topic)
        plain = (TopicPartition.parse(topic),)  # A named partition counts as a topic of its own.
        if self._admin is None:
            found = self._broker.partitions(topic)
            return () if found == plain and was_partitioned else found
        count = self._admin.partition_count(topic)
        if count is None:
            return ()
        return tuple(TopicPartition(topic, i) for i in range(count)) or plain

    def missing(self) -> frozenset[str]:
        """Return the topics that the broker reports as missing.

        With an admin interface this only checks the connection: :meth:`partitions` then finds
        missing topics, more precisely.

        Raises:
            BrokerError: The broker cannot be reached.
        """
        named = () if self._admin is not None else self._topics
        return self._broker.missing(tuple(itertools.filterfalse(is_scalable, named)))

    def let_in(self) -> None:
        """Check that the broker accepts this connection. The client would only report a timeout.

        Raises:
            BrokerError: The broker cannot be reached, or refuses the connection.
        """
        self._broker.missing(())

    def reach(self, topic: str) -> None:
        """Look a topic up with the client, so that an unreachable broker is found early.

        Raises:
            BrokerError: The client cannot reach the broker.
        """
        if not is_scalable(topic):
            self._broker.partitions(topic)


def matching(admin: Admin, pattern: TopicPattern) -> tuple[str, ...]:
    """Return the names of the topics that match a pattern now, in order.

    Raises:
        ConfigError: The cluster does not have the kind of the topics.
        BrokerError: The admin interface does not answer, or refuses.
    """
    found: set[str] | None
    if pattern.is_scalable:
        found = admin.scalable_topics(pattern.tenant, pattern.namespace)
        if found is None:
            raise ConfigError(
                f"Pattern {pattern.text} matches scalable topics, which the cluster does not know.",
                "Use a pattern of persistent topics, or a cluster of Pulsar 5.0 or later.",
            )
    else:
        found = admin.topics(pattern.tenant, pattern.namespace)
    return tuple(sorted(filter(pattern.matches, found)))


@dataclass(frozen=True, slots=True)
class Found:
    """The topic partitions of a source at its start."""

    consumed: tuple[TopicPartition, ...]
    kept: frozenset[TopicPartition]
    """In the checkpoint, but no longer consumed."""
    gone: frozenset[TopicPartition]
    """In the checkpoint, but deleted."""


def look(catalog: Catalog, checkpoint: Checkpoint | None, timeout_s: float) -> Found:
    """Find the topic partitions of a source at its start.

    Raises:
        TopicNotFoundError: A topic does not exist at the first start. Pulsar would create it on
            subscribe. A misspelled name would then leave a subscription that keeps a backlog.
        BrokerError: The broker or the admin interface was not reached before the timeout.
    """
    known = tuple(checkpoint.partitions) if checkpoint else ()
    partitioned = {tp.topic for tp in known if tp.partition >= 0}
    topic_of = catalog.scalable.topic_of
    if checkpoint is None:
        # Report a wrong URL soon. A restart from a checkpoint may wait through an outage.
        timeout_s = min(timeout_s, FIRST_TRIES_S)
        for topic in sorted(retry_until(catalog.missing, timeout_s)):
            raise _not_found(topic)
    else:
        retry_until(catalog.let_in, timeout_s)
    topics = retry_until(catalog.topics, timeout_s)
    if not topics:
        _log.warning("no topic matches the pattern yet")
    existing: dict[str, tuple[TopicPartition, ...]] = {}
    for topic in _with_topics_of(topics, known, topic_of):

        def ask(topic: str = topic) -> tuple[TopicPartition, ...]:
            return catalog.partitions(topic, was_partitioned=topic in partitioned)

        existing[topic] = retry_until(ask, timeout_s)
        end_s = time.monotonic() + CATCH_UP_S
        while catalog.scalable.lags(topic, known) and time.monotonic() < end_s:
            time.sleep(LOOK_S)
            existing[topic] = retry_until(ask, timeout_s)
        if existing[topic]:
            continue
        if checkpoint is None and not catalog.by_pattern:
            raise _not_found(topic)
        _log.warning("topic %s does not exist; it is consumed as soon as it is created", topic)
    # A topic and one of its partitions may both be named.
    consumed = tuple(dict.fromkeys(tp for topic in topics for tp in existing[topic]))
    if consumed:
        # An unreachable broker fails here. A subscribe would retry for as long as it waits for a
        # range that is in use.
        retry_until(lambda: catalog.reach(topic_of(consumed[0])), timeout_s)
    others = frozenset(known) - set(consumed)
    kept = frozenset(tp for tp in others if tp in existing[topic_of(tp)])
    for topic in sorted(set(map(topic_of, kept))):
        _log.warning("topic %s is in the checkpoint, but is not consumed any more", topic)
    return Found(consumed, kept, others - kept)


def _with_topics_of(
    topics: Collection[str],
    known: Iterable[TopicPartition],
    topic_of: Callable[[TopicPartition], str],
) -> Iterator[str]:
    """Yield topics, then the topics of topic partitions that are known beside them."""
    yield from topics
    # A look-up of the first shows which topic partitions are segments of them.
    yield from dict.fromkeys(topic for tp in known if (topic := topic_of(tp)) not in topics)


def _not_found(topic: str) -> TopicNotFoundError:
    return TopicNotFoundError(
        f"Topic {topic} does not exist.", create_or_correct(topic), topic=topic
    )


def warn_of_existing(
    admin: Admin, subscription: str, found: Iterable[TopicPartition], start: str
) -> None:
    """Warn if a subscription exists although a start position was given. Never raises."""

    def stats(topic_partition: TopicPartition) -> Mapping[str, Any] | None:
        try:
            return admin.subscription(topic_partition, subscription)
        except BrokerError as exc:
            _log.debug("no statistics of %s: %s", topic_partition, exc.summary)
            return None

    found = tuple(found)
    with Pool(THREADS_MAX, "keyshard-existing") as pool:
        existing = [one for one in pool.map(stats, found) if one is not None]
    if existing:
        backlog = sum(int(one.get("msgBacklog", 0)) for one in existing)
        _log.warning(
            "subscription %r exists on %d of %d topic partitions, with a backlog of %d entries; "
            "it continues there, and the starting position %r is ignored",
            subscription, len(existing), len(found), backlog, start,
        )  # fmt: skip
