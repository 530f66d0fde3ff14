"""The broker's side of the in-memory broker: topics, their storage, and faults.

Private to :mod:`keyshard.broker.memory`, which documents the package and re-exports public names.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from keyshard.broker.memory.cursor import Cursor
from keyshard.broker.memory.dispatch import Subscription
from keyshard.broker.memory.limits import LookAhead, UnackedLimits
from keyshard.broker.memory.log import Batching, EntryLog, Message, batches
from keyshard.broker.memory.publishing import Publishing
from keyshard.broker.memory.scalable_topics import MemoryScalableTopics
from keyshard.broker.memory.topics import MemoryTopicWatch, TopicStore
from keyshard.broker.port import StartPosition
from keyshard.core.position.entry import EntryId, TopicPartition, full_topic_name
from keyshard.core.releases import DEFAULT_VERSION, release_of
from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import BrokerError


class ConnectedClient(Protocol):
    """A client connection, as the cluster sees it."""

    def drop(self, of: Collection[TopicPartition] | None = None) -> list[Any]:
        """Lose the connection, only for some topic partitions if given; return its handles."""

    def reconnect(self, dropped: Iterable[Any] | None = None) -> None:
        """Reconnect the handles that :meth:`drop` returned; by default, all of them."""

    def move_readers(self, topic_partition: TopicPartition) -> None:
        """Move the cursors of the readers of a topic partition."""


class Grouping(Protocol):
    """A consumer that groups acknowledgements."""

    def flush(self, due_by_ms: int | None = None) -> bool:
        """Send the group, if it is due by then; return whether it is empty now."""


class MemoryCluster:
    """The broker's side: topics, their entries, and their subscriptions.

    Thread-safe: one lock guards everything, including the handles of its clients.

    Args:
        version: Release of Pulsar that it behaves like, such as ``4.0.8``.
        entries_per_ledger: Entries after which a topic partition opens its next ledger.
        look_ahead: When entries without a ready owner stop all ranges of a topic partition.
        unacked_limits: When unacknowledged messages stop a range, or a topic partition.
        cursor_write_ms: Shortest time between two writes of a cursor, milliseconds. A
            :meth:`crash` loses later acknowledgements.
        ack_group_ms: How long a client groups acknowledgements, milliseconds. A killed client
            loses them. Pulsar's default is 100.
        reports_topics: Whether clients may watch topics; by default not, so that a source looks for
            topics only when its interval ends.
        now_ms: The clock, milliseconds. It gives default publish times, and decides when cursors
            are written and groups are sent. The default clock never advances.
    """

    def __init__(
        self,
        *,
        version: str = DEFAULT_VERSION,
        entries_per_ledger: int = 50_000,
        look_ahead: LookAhead | None = None,
        unacked_limits: UnackedLimits | None = None,
        cursor_write_ms: int = 10_000,
        ack_group_ms: int = 0,
        message_bytes_max: int = 5 * 1024 * 1024,
        reports_topics: bool = False,
        now_ms: Callable[[], int] = lambda: 0,
    ) -> None:
        self.lock = threading.RLock()
        self.now_ms = now_ms
        self.ack_group_ms = ack_group_ms
        self.message_bytes_max = message_bytes_max
        """Largest message that a producer of the port may send, bytes."""
        self.version = version
        self.release = release_of(version)
        limits = self.release.limits
        self.look_ahead = look_ahead or LookAhead(
            limits.replay_per_consumer, limits.replay_per_subscription
        )
        self.unacked_limits = unacked_limits or UnackedLimits()
        self._cursor_write_ms = cursor_write_ms
        self._store = TopicStore(entries_per_ledger, self.release)
        self.scalable = MemoryScalableTopics(self, self._store)
        self._store.segment_of = self.scalable.segment_of
        self._subscriptions: dict[tuple[TopicPartition, str], Subscription] = {}
        self.publishing = Publishing()
        """Entry producers and deduplication; use it under the lock."""
        self._clients: list[ConnectedClient] = []
        self._grouped: dict[Grouping, None] = {}
        self._reports_topics = reports_topics
        self._watches: list[MemoryTopicWatch] = []
        self._store.changed = self._topics_changed
        self._delaying: dict[Subscription, None] = {}
        """Subscriptions with entries that wait for their time."""

    @classmethod
    def named(cls, name: str, **options: Any) -> MemoryCluster:
        """Return the cluster of this process at ``memory://name``; the first call creates it.

        Args:
            name: Its name.
            options: Arguments of a new cluster; by default its clock is the machine's.
        """
        with _NAMED_LOCK:
            if name not in _NAMED:
                _NAMED[name] = cls(**{"now_ms": lambda: time.time_ns() // 1_000_000} | options)
            return _NAMED[name]

    @property
    def schemas(self) -> dict[str, list[TopicSchema]]:
        """All schema versions by topic. Tests may add to it."""
        return self._store.schemas

    def create_topic(self, name: str, partitions: int = 0) -> str:
        """Create a topic and return its full name.

        Args:
            name: Short or full topic name.
            partitions: Number of topic partitions; 0 for a non-partitioned topic.

        Raises:
            ConfigError: The name is invalid, or it is taken.
        """
        with self.lock:
            return self._store.create(full_topic_name(name), partitions)

    def grow_topic(self, topic: str, partitions: int) -> None:
        """Increase the partitions of a topic. New ones get every subscription of the topic.

        Raises:
            ConfigError: It is not partitioned, or has as many partitions already.
        """
        with self.lock:
            old = self._store.partitions(topic)
            names = {name: None for where, name in self._subscriptions if where in old}
            for where in self._store.grow(topic, partitions):
                for name in names:
                    self.open_subscription(where, name, StartPosition.EARLIEST)

    def delete_topic(self, topic: str) -> None:
        """Delete a topic by force; its consumers reconnect."""
        with self.lock:
            gone = self._store.partitions(topic)
            with self._disconnected(gone):
                self._store.delete(topic)
                self.publishing.delete(gone)
                self._subscriptions = {
                    key: found for key, found in self._subscriptions.items() if key[0] not in gone
                }

    def watch_topics(
        self, prefix: str, changed: Callable[[Collection[str]], None]
    ) -> MemoryTopicWatch | None:
        """Report topic partitions of a prefix as they are created or deleted."""
        if not self._reports_topics:
            return None
        with self.lock:
            self._watches.append(MemoryTopicWatch(prefix, changed))
            return self._watches[-1]

    def _topics_changed(self, names: Collection[str]) -> None:
        self._watches = [watch for watch in self._watches if watch.is_open]
        for watch in self._watches:
            watch.report(names)

    def topics(self) -> dict[str, tuple[TopicPartition, ...]]:
        """All topics with their topic partitions."""
        with self.lock:
            return self._store.topics()

    def subscriptions(self, topic_partition: TopicPartition) -> dict[str, Subscription]:
        """Subscriptions of a topic partition, by name."""
        with self.lock:
            self.catch_up()
            found = self._subscriptions.items()
            return {name: one for (where, name), one in found if where == topic_partition}

    def attach(self, client: ConnectedClient) -> None:
        """Register a client, so that its consumers are notified if their topic is deleted."""
        with self.lock:
            self._clients.append(client)

    def detach(self, client: ConnectedClient) -> None:
        """Unregister a client that was closed."""
        with self.lock:
            if client in self._clients:
                self._clients.remove(client)

    def partitions(self, topic: str) -> tuple[TopicPartition, ...]:
        """Topic partitions of a topic; of a topic partition or a missing topic, itself."""
        with self.lock:
            return self._store.partitions(topic)

    def publish(
        self,
        topic: str | TopicPartition,
        *messages: Message,
        batching: Batching = Batching.NONE,
        batch_messages_max: int = 1_000,
        producer: str = "producer",
        publish_ms: int | None = None,
        encrypted: bool = False,
        corrupt: bool = False,
    ) -> list[tuple[TopicPartition, EntryId]]:
        """Store messages, as one producer that flushes at the end.

        Args:
            topic: A full topic name, whose partition is chosen by key, or one topic partition or
                its name.
            messages: The messages, in publish order.
            batching: How they are batched into entries.
            batch_messages_max: Maximum number of messages of one producer batch.
            producer: Name of the producer, which routes keyless messages.
            publish_ms: Publish time of all of them; by default the cluster's ``now_ms``.
            encrypted: Whether the producer encrypts them.
            corrupt: Whether the entries are unreadable from the beginning.

        Returns:
            The position of each entry, in publish order.

        Raises:
            TopicNotFoundError: The topic does not exist.
        """
        with self.lock:
            time_ms = self.now_ms() if publish_ms is None else publish_ms
            published = []
            for where, routed in self._store.routed(topic, messages).items():
                log = self.log(where)
                for batch in batches(routed, batching, batch_messages_max):
                    entry = log.append(
                        batch,
                        batched=batching is not Batching.NONE and batch[0].deliver_at_ms is None,
                        producer=producer,
                        publish_ms=time_ms,
                        encrypted=encrypted,
                    )
                    published.append((where, entry.id))
                    if corrupt:
                        log.corrupt.add(entry.id)
                self._appended(where)
        return published

    def store_entry(
        self,
        where: TopicPartition,
        messages: Sequence[Message],
        producer: str,
        sequence_id: int,
    ) -> EntryId:
        """Store the entry of an entry producer."""
        with self.lock:
            entry = self.open_log(where).append(
                messages,
                batched=len(messages) > 1,
                producer=producer,
                publish_ms=self.now_ms(),
                sequence_id=sequence_id,
            )
            self._appended(where)
        return entry.id

    def deduplicate(self, topic: str) -> None:
        """Store each sequence id of a producer name once, as a namespace with deduplication."""
        with self.lock:
            self.publishing.enable(topic)

    def hold_writes(self, topic_partition: TopicPartition) -> None:
        """Accept entries from now on without storing them, as a slow disk does."""
        with self.lock:
            self.publishing.hold(topic_partition)

    def release_writes(self, topic_partition: TopicPartition) -> None:
        """Store the held entries, and later ones at once."""
        with self.lock:
            self.publishing.release(topic_partition)

    def fail_writes(self, topic_partition: TopicPartition) -> None:
        """Lose the held entries; all entry producers of the topic partition reconnect."""
        with self.lock:
            self.publishing.fail(topic_partition)

    def forget_producer(self, where: TopicPartition, name: str, behind: int = -1) -> None:
        """Forget a name's sequence ids above ``behind``; by default all, as after some hours."""
        with self.lock:
            self.publishing.forget(where, name, behind)

    def exceed_quota(self, topic: str, *, exceeded: bool) -> None:
        """Refuse entry producers of a topic, or accept them again."""
        with self.lock:
            self.publishing.set_quota(topic, exceeded=exceeded)

    def publish_marker(self, topic_partition: TopicPartition) -> EntryId:
        """Store an entry that no consumer receives, such as the end of a transaction."""
        return self.publish_aborted(topic_partition)[-1]

    def publish_aborted(
        self, topic_partition: TopicPartition, *messages: Message, producer: str = "producer"
    ) -> list[EntryId]:
        """Store the entries of an aborted transaction: its messages, and a marker at the end."""
        with self.lock:
            log, now_ms = self.log(topic_partition), self.now_ms()
            contents: list[list[Message]] = [*([message] for message in messages), []]
            ids = [
                log.append_hidden(content, producer=producer, publish_ms=now_ms).id
                for content in contents
            ]
            self._appended(topic_partition)
        return ids

    def publish_chunked(
        self,
        topic_partition: TopicPartition,
        message: Message,
        chunks: int,
        producer: str = "producer",
    ) -> list[EntryId]:
        """Store one message as several entries; the last one has its id."""
        with self.lock:
            log = self.log(topic_partition)
            entries = log.append_chunked(
                message, chunks, producer=producer, publish_ms=self.now_ms()
            )
            self._appended(topic_partition)
        return [entry.id for entry in entries]

    def corrupt(self, topic_partition: TopicPartition, *entries: EntryId) -> None:
        """Make entries unreadable from now on."""
        with self.lock:
            self.log(topic_partition).corrupt.update(entries)

    def acknowledge(
        self, topic_partition: TopicPartition, subscription: str, entries: Iterable[EntryId]
    ) -> None:
        """Acknowledge entries as another client, such as an administrator, would."""
        with self.lock:
            ordinals = [self.log(topic_partition).ordinal(entry_id) for entry_id in entries]
            known = [ordinal for ordinal in ordinals if ordinal is not None]
            self.subscription(topic_partition, subscription).acknowledge(known)

    def acknowledge_indices(
        self,
        topic_partition: TopicPartition,
        subscription: str,
        entry_id: EntryId,
        indices: Collection[int],
    ) -> None:
        """Acknowledge some messages of a batch as another client; the rest is delivered next."""
        with self.lock:
            ordinal = self.log(topic_partition).ordinal(entry_id)
            found = self.subscription(topic_partition, subscription)
            if ordinal is not None:
                found.acknowledge_indices(ordinal, indices)

    def deliver_again(
        self, topic_partition: TopicPartition, subscription: str, *entries: EntryId
    ) -> int:
        """Deliver entries once more, as a broker rarely does. Return how many were delivered."""
        with self.lock:
            found = self.subscription(topic_partition, subscription)
            ordinals = [self.log(topic_partition).ordinal(entry_id) for entry_id in entries]
            return sum(found.deliver_again(one) for one in ordinals if one is not None)

    def crash(self) -> None:
        """Kill the broker, as SIGKILL does, and restart it.

        Acknowledgements since the last write of a cursor are lost, and so are those that clients
        grouped. Every ledger rolls over, and every client reconnects.
        """
        with self.lock, self._disconnected():
            self._send_groups()
            self._reload(self._store.logs, lossy=True)

    def unload(self, topic: str | TopicPartition) -> None:
        """Move a topic or a topic partition to another broker, without loss.

        Its cursors are written, its ledger rolls over, and its consumers reconnect.
        """
        with self.lock:
            self.catch_up()
            where = (topic,) if isinstance(topic, TopicPartition) else self.partitions(topic)
            with self._disconnected(where):
                self._reload(where, lossy=False)

    def wipe(self) -> None:
        """Delete everything, and disconnect all clients; ledger ids begin again."""
        with self.lock:
            for client in self._clients:
                client.drop()
            self._send_groups()
            self.publishing.delete(self._store.logs)
            self._store.clear()
            self._subscriptions.clear()

    def backlog(self, topic_partition: TopicPartition, subscription: str) -> int:
        """Number of entries that are stored and not acknowledged.

        Raises:
            BrokerError: There is no such subscription.
        """
        with self.lock:
            self.catch_up()
            return self.subscription(topic_partition, subscription).backlog

    def subscription(self, topic_partition: TopicPartition, name: str) -> Subscription:
        """Return a subscription. Call it under the lock.

        Raises:
            BrokerError: There is no such subscription.
        """
        found = self._subscriptions.get((topic_partition, name))
        if found is None:
            raise BrokerError(f"{topic_partition} has no subscription {name!r}.")
        return found

    def reset_cursor(self, topic_partition: TopicPartition, name: str, first: EntryId) -> None:
        """Reset a subscription to an entry; its consumers reconnect.

        Raises:
            BrokerError: There is no such subscription.
        """
        with self.lock, self._disconnected({topic_partition}):
            before = self.subscription(topic_partition, name)
            del self._subscriptions[topic_partition, name]
            self.open_subscription(topic_partition, name, first).properties = before.properties

    def delete_subscription(self, topic_partition: TopicPartition, name: str) -> None:
        """Delete a subscription by force; its consumers reconnect, and create it again.

        Raises:
            BrokerError: There is no such subscription.
        """
        with self.lock, self._disconnected({topic_partition}):
            self.subscription(topic_partition, name)
            del self._subscriptions[topic_partition, name]

    def roll_ledger(self, topic_partition: TopicPartition) -> None:
        """Close the ledger of a topic partition, as a change of its broker does."""
        with self.lock:
            self.log(topic_partition).roll_ledger()

    def trim(self, topic_partition: TopicPartition, before: EntryId) -> None:
        """Delete all entries before an id, as a time to live and retention do together."""
        with self.lock:
            self.log(topic_partition).trim(before)
            for subscription in self._subscriptions_of(topic_partition):
                subscription.skip_trimmed()

    def expire(self, topic_partition: TopicPartition, before_ms: int) -> None:
        """Expire the first messages, published before a time, as a time to live does.

        They count as acknowledged in all subscriptions, and stay stored. Readers miss none of them:
        those of the wire transport notice that their cursor was moved, and connect again.
        """
        with self.lock:
            end = self.log(topic_partition).ordinal_at(before_ms)
            for client in self._clients:
                client.move_readers(topic_partition)
            for subscription in self._subscriptions_of(topic_partition):
                subscription.acknowledge(range(subscription.cursor.mark_delete + 1, end))

    def validate(self) -> None:
        """Assert the invariants of everything that is stored; for tests."""
        with self.lock:
            for log in self._store.logs.values():
                log.validate()
            for subscription in self._subscriptions.values():
                subscription.validate()

    def log(self, topic_partition: TopicPartition) -> EntryLog:
        """Return the log of a topic partition. Call it under the lock.

        Raises:
            TopicNotFoundError: It does not exist.
        """
        return self._store.log(topic_partition)

    def open_log(self, topic_partition: TopicPartition) -> EntryLog:
        """Return the log as :meth:`log`, but create a missing topic. Call it under the lock."""
        return self._store.open_log(topic_partition)

    def open_subscription(
        self, topic_partition: TopicPartition, name: str, start: StartPosition | EntryId
    ) -> Subscription:
        """Find or create a subscription. Call it under the lock."""
        log = self.open_log(topic_partition)
        found = self._subscriptions.get((topic_partition, name))
        if found is None:
            if isinstance(start, EntryId):
                first = log.first_from(start)
            else:
                first = log.first if start is StartPosition.EARLIEST else len(log)
            cursor = Cursor(first - 1, self._cursor_write_ms)
            found = Subscription(
                log, cursor, self.look_ahead, self.unacked_limits, self.now_ms,
                delays=self._delays, release=self.release,
            )  # fmt: skip
            self._subscriptions[topic_partition, name] = found
        return found

    def grouped(self, consumer: Grouping) -> None:
        """Register a consumer that groups acknowledgements. Call it under the lock."""
        self._grouped[consumer] = None

    def catch_up(self) -> None:
        """Send the groups of acknowledgements and the delayed messages that are due."""
        with self.lock:
            if self._grouped:
                self._send_groups(self.now_ms())
            self.send_due()

    def send_due(self) -> None:
        """Send the delayed messages that are due."""
        with self.lock:
            for subscription in list(self._delaying):
                if subscription.delayed.is_due():
                    subscription.dispatch()
                if not subscription.delayed:
                    del self._delaying[subscription]

    def _delays(self, subscription: Subscription) -> None:
        self._delaying[subscription] = None

    def _send_groups(self, due_by_ms: int | None = None) -> None:
        for consumer in list(self._grouped):
            if consumer.flush(due_by_ms):
                del self._grouped[consumer]

    @contextmanager
    def _disconnected(self, of: Collection[TopicPartition] | None = None) -> Iterator[None]:
        """Drop connected handles before the block, and reconnect them in their order after it."""
        dropped = [client.drop(of) for client in self._clients]
        yield
        for client, handles in zip(self._clients, dropped, strict=True):
            client.reconnect(handles)

    def _reload(self, where: Collection[TopicPartition], *, lossy: bool) -> None:
        self.publishing.reload(where)
        for topic_partition in where:
            self.log(topic_partition).roll_ledger()
            for subscription in self._subscriptions_of(topic_partition):
                subscription.restart(lossy=lossy)

    def _appended(self, topic_partition: TopicPartition) -> None:
        for subscription in self._subscriptions_of(topic_partition):
            subscription.dispatch()
        for notify in self.log(topic_partition).on_append:
            notify()

    def _subscriptions_of(self, topic_partition: TopicPartition) -> Iterator[Subscription]:
        for (where, _), subscription in self._subscriptions.items():
            if where == topic_partition:
                yield subscription


_NAMED: dict[str, MemoryCluster] = {}
_NAMED_LOCK = threading.Lock()
