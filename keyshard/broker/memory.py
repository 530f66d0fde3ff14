"""An in-memory broker behind the port, for tests: keyshard's own and those of its users.

:class:`MemoryCluster` is the broker's side, shared by everybody; :class:`MemoryBroker` is one
client connection to it. ``tests/contract`` runs the same cases here and on a real broker::

    cluster = MemoryCluster()
    topic = cluster.create_topic("orders", partitions=5)
    cluster.publish(topic, Message(b"first", key="a"), Message(b"second", key="a"))
    broker = MemoryBroker(cluster)

What it shares with Pulsar 4.0, because programs get it wrong:

- A batch goes whole to the range of its first key; a keyless entry goes by producer and
  sequence id.
- Positions inside a range are not monotonic: slots that wait for their owner are overtaken by
  slots that do not. Within a slot order is kept.
- A range that nobody covers, or whose client queue is full, fills the replay queue; then all ranges
  of the topic partition stop (:class:`LookAhead`). Acknowledging what waits does not help before
  the mark-delete passes it.
- A consumer that closes or reconnects gives back what it has not acknowledged, and it is delivered
  again from the first index. When the last one leaves, the cursor rewinds to its mark-delete.
- Subscribing to a topic that does not exist creates it, without partitions. So does a consumer
  whose topic is deleted: it reconnects.

What it does not do: limits on unacknowledged messages, acknowledgements lost in a crash, negative
acknowledgement, delayed or chunked messages.

Nothing here reads a clock or starts a thread: publish times come from the caller, and entries are
dispatched in the thread that publishes, receives, acknowledges or subscribes.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator

from keyshard.broker.memory_client import MemoryConsumer, MemoryReader
from keyshard.broker.memory_dispatch import LookAhead, Subscription
from keyshard.broker.memory_log import Batching, EntryLog, Message, batches
from keyshard.broker.port import StartPosition
from keyshard.core.entry import EntryId, TopicPartition, full_topic_name
from keyshard.core.hash_range import HashRange
from keyshard.errors import BrokerError, ConfigError, TopicNotFoundError

__all__ = [
    "Batching",
    "LookAhead",
    "MemoryBroker",
    "MemoryCluster",
    "MemoryConsumer",
    "MemoryReader",
    "Message",
]


class MemoryCluster:
    """The broker's side: topics, what is stored in them, and their subscriptions.

    Thread-safe; one lock guards everything, also the handles of its clients.

    Args:
        entries_per_ledger: Entries after which a topic partition opens its next ledger.
        look_ahead: When entries without a ready owner stop all ranges of a topic partition.
        now_ms: Source of publish times where ``publish`` is given none, milliseconds.
    """

    def __init__(
        self,
        *,
        entries_per_ledger: int = 50_000,
        look_ahead: LookAhead | None = None,
        now_ms: Callable[[], int] = lambda: 0,
    ) -> None:
        if entries_per_ledger < 1:
            raise ConfigError(f"entries_per_ledger must be at least 1, got {entries_per_ledger}.")
        self.lock = threading.RLock()
        self._entries_per_ledger = entries_per_ledger
        self._look_ahead = look_ahead or LookAhead()
        self._now_ms = now_ms
        self._topics: dict[str, tuple[TopicPartition, ...]] = {}
        self._logs: dict[TopicPartition, EntryLog] = {}
        self._subscriptions: dict[tuple[TopicPartition, str], Subscription] = {}
        self._clients: list[MemoryBroker] = []
        self._next_ledger = 0
        self._next_partition = 0

    def create_topic(self, name: str, partitions: int = 0) -> str:
        """Create a topic and return its full name.

        Args:
            name: Short or full topic name.
            partitions: Topic partitions; 0 for a topic that is not partitioned.

        Raises:
            ConfigError: The name is not a topic name, or it is taken.
        """
        topic = full_topic_name(name)
        with self.lock:
            if topic in self._topics:
                raise ConfigError(f"Topic {topic} exists already. Choose another name.")
            numbers = range(partitions) if partitions else (-1,)
            self._topics[topic] = tuple(TopicPartition(topic, number) for number in numbers)
            for topic_partition in self._topics[topic]:
                self._logs[topic_partition] = EntryLog(self._new_ledger, self._entries_per_ledger)
        return topic

    def grow_topic(self, topic: str, partitions: int) -> None:
        """Give a partitioned topic more topic partitions, each with every subscription of it.

        Raises:
            ConfigError: It has no partitions, or as many already.
        """
        with self.lock:
            old = self._topics[topic]
            if old[0].partition < 0 or len(old) >= partitions:
                raise ConfigError(f"{topic} cannot grow to {partitions} partitions.")
            names = {name for where, name in self._subscriptions if where in old}
            new = tuple(TopicPartition(topic, i) for i in range(len(old), partitions))
            self._topics[topic] = old + new
            for where in new:
                self._logs[where] = EntryLog(self._new_ledger, self._entries_per_ledger)
                for name in names:
                    self.open_subscription(where, name, StartPosition.EARLIEST)

    def delete_topic(self, topic: str) -> None:
        """Delete a topic by force; the consumers that it had reconnect."""
        with self.lock:
            gone = self._topics.pop(topic)
            dropped = [client.drop(gone) for client in self._clients]
            for where in gone:
                del self._logs[where]
            self._subscriptions = {
                key: found for key, found in self._subscriptions.items() if key[0] not in gone
            }
            for client, consumers in zip(self._clients, dropped, strict=True):
                client.reconnect(consumers)

    def topics(self) -> dict[str, tuple[TopicPartition, ...]]:
        """All topics with their topic partitions."""
        with self.lock:
            return dict(self._topics)

    def subscriptions(self, topic_partition: TopicPartition) -> dict[str, Subscription]:
        """Subscriptions of a topic partition, by name."""
        with self.lock:
            found = self._subscriptions.items()
            return {name: one for (where, name), one in found if where == topic_partition}

    def attach(self, client: MemoryBroker) -> None:
        """Know a client, whose consumers are told when their topic is deleted."""
        with self.lock:
            self._clients.append(client)

    def partitions(self, topic: str) -> tuple[TopicPartition, ...]:
        """Topic partitions of a topic, or of one topic partition: itself.

        A missing topic is taken for one without partitions, as Pulsar takes it.
        """
        with self.lock:
            return self._topics.get(topic, (TopicPartition.parse(topic),))

    def publish(
        self,
        topic: str | TopicPartition,
        *messages: Message,
        batching: Batching = Batching.NONE,
        batch_messages_max: int = 1_000,
        producer: str = "producer",
        publish_ms: int | None = None,
    ) -> list[tuple[TopicPartition, EntryId]]:
        """Store messages, as one producer that flushes at the end.

        Args:
            topic: A full topic name, whose partition is chosen by key, or one topic partition or
                its name.
            messages: The messages, in publish order.
            batching: How they become entries.
            batch_messages_max: Messages of one producer batch at most.
            producer: Name of the producer, which routes keyless messages.
            publish_ms: Publish time of all of them; the cluster's ``now_ms`` when not given.

        Returns:
            Where each entry went, in the order of publishing.

        Raises:
            TopicNotFoundError: The topic does not exist.
        """
        with self.lock:
            time_ms = self._now_ms() if publish_ms is None else publish_ms
            by_partition: dict[TopicPartition, list[Message]] = {}
            for message in messages:
                where = topic if isinstance(topic, TopicPartition) else self._route(topic, message)
                by_partition.setdefault(where, []).append(message)
            published = []
            for where, routed in by_partition.items():
                log = self.log(where)
                for batch in batches(routed, batching, batch_messages_max):
                    entry = log.append(
                        batch,
                        batched=batching is not Batching.NONE,
                        producer=producer,
                        publish_ms=time_ms,
                    )
                    published.append((where, entry.id))
                for subscription in self._subscriptions_of(where):
                    subscription.dispatch()
                for notify in log.on_append:
                    notify()
        return published

    def publish_marker(self, topic_partition: TopicPartition) -> EntryId:
        """Store an entry that nobody receives, as the end of a transaction does."""
        with self.lock:
            log = self.log(topic_partition)
            entry = log.append((), batched=False, producer="marker", publish_ms=self._now_ms())
            for subscription in self._subscriptions_of(topic_partition):
                subscription.dispatch()
            for notify in log.on_append:
                notify()
        return entry.id

    def acknowledge(
        self, topic_partition: TopicPartition, subscription: str, entries: Iterable[EntryId]
    ) -> None:
        """Acknowledge entries as somebody else would, such as an administrator who skips them."""
        with self.lock:
            ordinals = [self.log(topic_partition).ordinal(entry_id) for entry_id in entries]
            self.subscription(topic_partition, subscription).acknowledge(
                ordinal for ordinal in ordinals if ordinal is not None
            )

    def backlog(self, topic_partition: TopicPartition, subscription: str) -> int:
        """Entries that are stored and not acknowledged.

        Raises:
            BrokerError: There is no such subscription.
        """
        with self.lock:
            return self.subscription(topic_partition, subscription).backlog

    def subscription(self, topic_partition: TopicPartition, name: str) -> Subscription:
        """A subscription. The caller holds the lock.

        Raises:
            BrokerError: There is no such subscription.
        """
        found = self._subscriptions.get((topic_partition, name))
        if found is None:
            raise BrokerError(f"{topic_partition} has no subscription {name!r}. Subscribe first.")
        return found

    def roll_ledger(self, topic_partition: TopicPartition) -> None:
        """Close the ledger of a topic partition, as a change of its broker does."""
        with self.lock:
            self.log(topic_partition).roll_ledger()

    def trim(self, topic_partition: TopicPartition, before: EntryId) -> None:
        """Forget all entries before an id, as a time to live and retention do together."""
        with self.lock:
            self.log(topic_partition).trim(before)
            for subscription in self._subscriptions_of(topic_partition):
                subscription.skip_trimmed()

    def validate(self) -> None:
        """Assert the invariants of everything that is stored; for tests."""
        with self.lock:
            for log in self._logs.values():
                log.validate()
            for subscription in self._subscriptions.values():
                subscription.validate()

    def log(self, topic_partition: TopicPartition) -> EntryLog:
        """What a topic partition stores. The caller holds the lock.

        Raises:
            TopicNotFoundError: It does not exist.
        """
        try:
            return self._logs[topic_partition]
        except KeyError:
            raise TopicNotFoundError(
                f"{topic_partition} does not exist. Create the topic or correct its name.",
                topic=topic_partition.topic,
            ) from None

    def open_log(self, topic_partition: TopicPartition) -> EntryLog:
        """As :meth:`log`, but a missing topic is created. The caller holds the lock."""
        if topic_partition not in self._logs and topic_partition.topic not in self._topics:
            self._topics[topic_partition.name] = (topic_partition,)
            self._logs[topic_partition] = EntryLog(self._new_ledger, self._entries_per_ledger)
        return self.log(topic_partition)

    def open_subscription(
        self, topic_partition: TopicPartition, name: str, start: StartPosition
    ) -> Subscription:
        """Find or create a subscription. The caller holds the lock."""
        log = self.open_log(topic_partition)
        found = self._subscriptions.get((topic_partition, name))
        if found is None:
            first = log.first if start is StartPosition.EARLIEST else len(log)
            found = Subscription(log, first - 1, self._look_ahead)
            self._subscriptions[topic_partition, name] = found
        return found

    def _subscriptions_of(self, topic_partition: TopicPartition) -> Iterator[Subscription]:
        for (where, _), subscription in self._subscriptions.items():
            if where == topic_partition:
                yield subscription

    def _new_ledger(self) -> int:
        self._next_ledger += 1
        return self._next_ledger

    def _route(self, topic: str, message: Message) -> TopicPartition:
        """Choose the topic partition: by a hash that is not the ring's, or in turn without key."""
        partitions = self.partitions(topic)
        if message.key is not None:
            return partitions[zlib.crc32(message.key.encode()) % len(partitions)]
        self._next_partition += 1
        return partitions[self._next_partition % len(partitions)]


class MemoryBroker:
    """One client connection to a :class:`MemoryCluster`; implements the ``Broker`` port."""

    def __init__(self, cluster: MemoryCluster) -> None:
        self._cluster = cluster
        self._consumers: list[MemoryConsumer] = []
        self._readers: list[MemoryReader] = []
        self._closed = False
        cluster.attach(self)

    def partitions(self, topic: str) -> tuple[TopicPartition, ...]:
        self._check_open()
        return self._cluster.partitions(topic)

    def subscribe(
        self,
        topic_partition: TopicPartition,
        subscription: str,
        hash_range: HashRange,
        *,
        start: StartPosition,
        consumer_name: str,
        receiver_queue_size: int,
    ) -> MemoryConsumer:
        if receiver_queue_size < 1:
            raise ConfigError(f"receiver_queue_size must be at least 1, got {receiver_queue_size}.")
        with self._cluster.lock:
            self._check_open()
            consumer = MemoryConsumer(
                lock=self._cluster.lock,
                find=lambda: self._cluster.open_subscription(topic_partition, subscription, start),
                topic_partition=topic_partition,
                hash_range=hash_range,
                name=consumer_name,
                receiver_queue_size=receiver_queue_size,
            )
            consumer.connect()
            self._consumers.append(consumer)
        return consumer

    def reader(self, topic_partition: TopicPartition, start: EntryId) -> MemoryReader:
        with self._cluster.lock:
            self._check_open()
            log = self._cluster.open_log(topic_partition)
            reader = MemoryReader(self._cluster.lock, log, topic_partition, start)
            self._readers.append(reader)
        return reader

    def drop(self, of: Collection[TopicPartition] | None = None) -> list[MemoryConsumer]:
        """Lose the connection: the broker forgets the consumers, which do not notice.

        They keep what is in their queues, and their acknowledgements are lost.

        Args:
            of: Only consumers of these topic partitions.

        Returns:
            Those that were connected.
        """
        with self._cluster.lock:
            found = [
                consumer
                for consumer in self._consumers
                if consumer.is_connected() and (of is None or consumer.topic_partition in of)
            ]
            for consumer in found:
                consumer.drop()
            return found

    def reconnect(self, consumers: Iterable[MemoryConsumer] | None = None) -> None:
        """Bring every dropped consumer back with an empty queue.

        One whose range somebody else took meanwhile stays without connection and says nothing,
        as Pulsar's client does; call it again to let it retry.
        """
        with self._cluster.lock:
            for consumer in self._consumers if consumers is None else consumers:
                consumer.reconnect()

    def disconnect(self) -> None:
        """Lose the connection and get it back at once; what is unacknowledged comes again."""
        with self._cluster.lock:
            self.drop()
            self.reconnect()

    def close(self) -> None:
        with self._cluster.lock:
            self._closed = True
            for consumer in self._consumers:
                consumer.close()
            for reader in self._readers:
                reader.close()

    def _check_open(self) -> None:
        if self._closed:
            raise BrokerError("The connection to the in-memory cluster is closed.")
