"""The broker's side of entry producers: names, deduplication, quotas and slow writes.

Private to :mod:`keyshard.broker.memory`, which documents the package. Call every method under the
lock of the cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from keyshard.broker.memory.deduplication import Deduplication, DuplicateCheck
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.errors import ProducerBusyError, QuotaExceededError


class Publisher(Protocol):
    """An entry producer, as the broker sees it."""

    topic_partition: TopicPartition

    def answers(self) -> bool:
        """Whether its client answers."""

    def drop(self) -> None:
        """Lose the connection."""

    def reconnect(self) -> None:
        """Connect again."""


@dataclass(frozen=True, slots=True)
class Write:
    """An entry that is being written."""

    publisher: Publisher
    name: str
    first: int
    last: int
    store: Callable[[], EntryId]
    confirmed: Callable[[int, EntryId | None], None]
    """Takes the confirmation, if the connection that sent the entry still stands."""


class Publishing:
    """Entry producers of a cluster."""

    def __init__(self) -> None:
        self.names_max = 10_000
        """Producer names of a topic partition that survive an unload or a crash."""
        self._open: dict[tuple[TopicPartition, str], Publisher] = {}
        self._seen: dict[TopicPartition, Deduplication] = {}
        self._enabled: set[str] = set()
        self._held: dict[TopicPartition, list[Write]] = {}
        self._undecided: dict[TopicPartition, list[Write]] = {}
        """Entries that may be copies of held ones, and are judged again after these are written."""
        self._full: dict[str, list[Publisher]] = {}
        """Refused producers, by topic. They reconnect once its quota is not exceeded any more."""

    def enable(self, topic: str) -> None:
        """Deduplicate a topic from now on."""
        self._enabled.add(topic)

    def deduplicates(self, topic: str) -> bool:
        """Whether a topic is deduplicated."""
        return topic in self._enabled

    def open(self, where: TopicPartition, name: str, publisher: Publisher) -> int:
        """Give a name to a producer; return the last sequence id of the name.

        Raises:
            ProducerBusyError: A producer whose client answers has the name.
            QuotaExceededError: The quota of the topic is exceeded.
        """
        refused = self._full.get(where.topic)
        if refused is not None:
            if publisher not in refused:
                refused.append(publisher)
            raise QuotaExceededError(
                f"Could not publish to {where}: the backlog quota is exceeded.",
                "Let the subscriptions catch up, or raise the quota.",
            )
        holder = self._open.get((where, name))
        if holder is not None and holder is not publisher and holder.answers():
            raise ProducerBusyError(
                f"Could not publish to {where}: another connection publishes under the name "
                f"{name!r}.",
                "Stop that program, or use another sink id.",
            )
        self._open[where, name] = publisher
        return self._ids(where).last(name)

    def leave(self, where: TopicPartition, name: str, publisher: Publisher) -> None:
        """Give a name back."""
        if self._open.get((where, name)) is publisher:
            del self._open[where, name]
        if where in self._undecided:
            # The producer sends them again after it reconnects.
            waiting = self._undecided[where]
            self._undecided[where] = [one for one in waiting if one.publisher is not publisher]

    def write(self, where: TopicPartition, write: Write) -> None:
        """Judge an entry, and store it unless writes are held."""
        if where.topic in self._enabled:
            check = self._ids(where).judge(write.name, write.first)
            if check is DuplicateCheck.DUPLICATE:
                write.confirmed(write.first, None)
            if check is DuplicateCheck.UNDECIDED:
                self._undecided.setdefault(where, []).append(write)
            if check is not DuplicateCheck.NEW:
                return
            self._ids(where).accept(write.name, write.last)
        if where in self._held:
            self._held[where].append(write)
        else:
            self._store(where, write)

    def hold(self, where: TopicPartition) -> None:
        """Accept entries from now on, and write none."""
        self._held.setdefault(where, [])

    def release(self, where: TopicPartition) -> None:
        """Write the held entries, and all later ones at once."""
        for write in self._held.pop(where, ()):
            self._store(where, write)
        for write in self._undecided.pop(where, ()):
            self.write(where, write)

    def fail(self, where: TopicPartition) -> None:
        """Lose the held entries: their writes failed. All producers reconnect."""
        self._lose(where)
        publishers = self._publishers({where.topic}, where)
        for publisher in publishers:
            publisher.drop()
        self._ids(where).failed()
        for publisher in publishers:
            publisher.reconnect()

    def reload(self, where: Collection[TopicPartition]) -> None:
        """Move topic partitions to another broker, which recovers the ids."""
        for one in where:
            self._lose(one)
            self._ids(one).reload(self.names_max)

    def delete(self, where: Collection[TopicPartition]) -> None:
        """Forget topic partitions that are deleted."""
        for one in where:
            self._lose(one)
            self._seen.pop(one, None)

    def forget(self, where: TopicPartition, name: str, behind: int) -> None:
        """Forget the ids of a name above ``behind``."""
        self._ids(where).forget(name, behind)

    def set_quota(self, topic: str, *, exceeded: bool) -> None:
        """Refuse producers of a topic, or accept them again."""
        if not exceeded:
            for publisher in self._full.pop(topic, []):
                publisher.reconnect()
            return
        self._full.setdefault(topic, [])
        for publisher in self._publishers({topic}):
            publisher.drop()
            publisher.reconnect()

    def _publishers(
        self, topics: Collection[str], where: TopicPartition | None = None
    ) -> list[Publisher]:
        return [
            one
            for (place, _), one in self._open.items()
            if place.topic in topics and where in (None, place)
        ]

    def _lose(self, where: TopicPartition) -> None:
        self._held.pop(where, None)
        self._undecided.pop(where, None)

    def _ids(self, where: TopicPartition) -> Deduplication:
        return self._seen.setdefault(where, Deduplication())

    def _store(self, where: TopicPartition, write: Write) -> None:
        stored = write.store()
        if where.topic in self._enabled:
            self._ids(where).stored(write.name, write.last)
        write.confirmed(write.first, stored)
