"""Topics of the in-memory broker, their topic partitions, and the ledger ids of the cluster.

Private to :mod:`keyshard.broker.memory`, which documents the package. Call every method under the
lock of the cluster.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Mapping

from keyshard.broker.memory.log import EntryLog, Message
from keyshard.core.creation import create_or_correct
from keyshard.core.position.entry import TopicPartition
from keyshard.core.releases import Release
from keyshard.core.topic_schema import TopicSchema
from keyshard.core.topic_segments import SEGMENT, is_scalable
from keyshard.errors import ConfigError, TopicNotFoundError


class MemoryTopicWatch:
    """Reports topic partitions to one client.

    Args:
        prefix: Beginning of their names.
        changed: Takes names.
    """

    def __init__(self, prefix: str, changed: Callable[[Collection[str]], None]) -> None:
        self._prefix = prefix
        self._changed = changed
        self.is_open = True

    def close(self) -> None:
        self.is_open = False

    def report(self, names: Iterable[str]) -> None:
        """Report those names that have the prefix."""
        if found := [name for name in names if name.startswith(self._prefix)]:
            self._changed(found)


class TopicStore:
    """Stores topics, without subscriptions.

    Args:
        entries_per_ledger: Entries after which a topic partition opens its next ledger.
        release: The Pulsar version that the broker imitates.
    """

    def __init__(self, entries_per_ledger: int, release: Release) -> None:
        if entries_per_ledger < 1:
            raise ConfigError(f"entries_per_ledger is {entries_per_ledger}; it must be at least 1.")
        self._entries_per_ledger = entries_per_ledger
        self._release = release
        self._topics: dict[str, tuple[TopicPartition, ...]] = {}
        self._logs: dict[TopicPartition, EntryLog] = {}
        self._next_ledger = 0
        self._next_partition = 0
        self.changed: Callable[[Collection[str]], None] = lambda _names: None
        """Called with the names of topic partitions that were created or deleted."""
        self.segment_of: Callable[[str, Message], TopicPartition]
        """Chooses the segment of a scalable topic."""
        self.schemas: dict[str, list[TopicSchema]] = {}
        """All schema versions by topic."""

    @property
    def logs(self) -> Mapping[TopicPartition, EntryLog]:
        """The log of each topic partition."""
        return self._logs

    def create(self, topic: str, partitions: int) -> str:
        """Create a topic; with 0 partitions, a non-partitioned one.

        Raises:
            ConfigError: The name is taken.
        """
        if topic in self._topics:
            raise ConfigError(f"Topic {topic} already exists.", "Choose another name.")
        numbers = range(partitions) if partitions else (-1,)
        self._topics[topic] = tuple(TopicPartition(topic, number) for number in numbers)
        self._open(self._topics[topic])
        return topic

    def grow(self, topic: str, partitions: int) -> tuple[TopicPartition, ...]:
        """Increase the partitions of a topic. Return the new ones.

        Raises:
            ConfigError: It is not partitioned, or has as many partitions already.
        """
        old = self._topics[topic]
        if old[0].partition < 0 or len(old) >= partitions:
            raise ConfigError(
                f"{topic} cannot grow to {partitions} partitions.",
                "Request more partitions than it has.",
            )
        new = tuple(TopicPartition(topic, number) for number in range(len(old), partitions))
        self._topics[topic] = old + new
        self._open(new)
        return new

    def delete(self, topic: str) -> None:
        """Delete a topic."""
        self.schemas.pop(topic, None)
        gone = self._topics.pop(topic)
        for where in gone:
            del self._logs[where]
        self.changed([where.name for where in gone])

    def clear(self) -> None:
        """Delete everything; ledger ids begin again."""
        self._topics.clear()
        self._logs.clear()
        self.schemas.clear()
        self._next_ledger = 0

    def topics(self) -> dict[str, tuple[TopicPartition, ...]]:
        """All topics with their topic partitions."""
        return dict(self._topics)

    def partitions(self, topic: str) -> tuple[TopicPartition, ...]:
        """Topic partitions of a topic; of a topic partition, itself.

        A missing topic counts as one without partitions.
        """
        return self._topics.get(topic, (TopicPartition.parse(topic),))

    def log(self, topic_partition: TopicPartition) -> EntryLog:
        """Return the log of a topic partition.

        Raises:
            TopicNotFoundError: It does not exist.
        """
        try:
            return self._logs[topic_partition]
        except KeyError:
            raise TopicNotFoundError(
                f"{topic_partition} does not exist.",
                create_or_correct(topic_partition.name),
                topic=topic_partition.topic,
            ) from None

    def open_log(self, topic_partition: TopicPartition) -> EntryLog:
        """Return the log as :meth:`log`, but create a missing topic.

        Raises:
            TopicNotFoundError: The topic exists without this partition. Or it is missing, and is a
                segment, or the Pulsar version refuses partitions of missing topics.
        """
        refused = topic_partition.topic.startswith(SEGMENT) or (
            topic_partition.partition >= 0 and self._release.partitions_need_topic
        )
        missing = topic_partition not in self._logs and topic_partition.topic not in self._topics
        if missing and not refused:
            self._topics[topic_partition.name] = (topic_partition,)
            self._open([topic_partition])
        return self.log(topic_partition)

    def routed(
        self, topic: str | TopicPartition, messages: Iterable[Message]
    ) -> dict[TopicPartition, list[Message]]:
        """Assign messages to topic partitions."""
        found: dict[TopicPartition, list[Message]] = {}
        for message in messages:
            where = topic if isinstance(topic, TopicPartition) else self._route(topic, message)
            found.setdefault(where, []).append(message)
        return found

    def _route(self, topic: str, message: Message) -> TopicPartition:
        """Choose the topic partition by a hash other than the ring's, or in turn without a key."""
        if is_scalable(topic):
            return self.segment_of(topic, message)
        partitions = self.partitions(topic)
        if message.key is not None:
            return partitions[zlib.crc32(message.key.encode()) % len(partitions)]
        self._next_partition += 1
        return partitions[self._next_partition % len(partitions)]

    def _open(self, where: Collection[TopicPartition]) -> None:
        for topic_partition in where:
            self._logs[topic_partition] = EntryLog(self._new_ledger, self._entries_per_ledger)
        self.changed([topic_partition.name for topic_partition in where])

    def _new_ledger(self) -> int:
        self._next_ledger += 1
        return self._next_ledger
