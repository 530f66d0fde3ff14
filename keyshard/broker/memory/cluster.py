"""The broker's side of the in-memory broker: topics, what is stored, and what may go wrong.

Private to :mod:`keyshard.broker.memory`, which documents the whole and re-exports the public names.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from keyshard.broker.memory.cursor import Cursor
from keyshard.broker.memory.dispatch import Subscription
from keyshard.broker.memory.limits import LookAhead, UnackedLimits
from keyshard.broker.memory.log import Batching, EntryLog, Message, batches
from keyshard.broker.memory.topics import TopicStore
from keyshard.broker.port import StartPosition
from keyshard.core.position.entry import EntryId, TopicPartition, full_topic_name
from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import BrokerError

if TYPE_CHECKING:
    from keyshard.broker.memory.client import MemoryConsumer
    from keyshard.broker.memory.connection import MemoryBroker


class MemoryCluster:
    """The broker's side: topics, what is stored in them, and their subscriptions.

    Thread-safe; one lock guards everything, also the handles of its clients.

    Args:
        entries_per_ledger: Entries after which a topic partition opens its next ledger.
        look_ahead: When entries without a ready owner stop all ranges of a topic partition.
        unacked_limits: When unacknowledged messages stop a range, or a topic partition.
        cursor_write_ms: What is acknowledged is written at most this often, milliseconds; a
            :meth:`crash` forgets the rest.
        ack_group_ms: How long a client holds acknowledgements back to send them together,
            milliseconds; a killed client loses those. Pulsar's takes 100.
        now_ms: The clock, milliseconds: publish times where ``publish`` is given none, and when
            cursors are written and acknowledgements sent. The default one stands still.
    """

    def __init__(
        self,
        *,
        entries_per_ledger: int = 50_000,
        look_ahead: LookAhead | None = None,
        unacked_limits: UnackedLimits | None = None,
        cursor_write_ms: int = 10_000,
        ack_group_ms: int = 0,
        message_bytes_max: int = 5 * 1024 * 1024,
        now_ms: Callable[[], int] = lambda: 0,
    ) -> None:
        self.lock = threading.RLock()
        self.now_ms = now_ms
        self.ack_group_ms = ack_group_ms
        self.message_bytes_max = message_bytes_max
        """Largest message that a producer of the port may send, bytes."""
        self.look_ahead = look_ahead or LookAhead()
        self.unacked_limits = unacked_limits or UnackedLimits()
        self._cursor_write_ms = cursor_write_ms
        self._store = TopicStore(entries_per_ledger)
        self._subscriptions: dict[tuple[TopicPartition, str], Subscription] = {}
        self._clients: list[MemoryBroker] = []
        self._grouped: dict[MemoryConsumer, None] = {}

    @classmethod
    def named(cls, name: str) -> MemoryCluster:
        """The cluster of this process at ``memory://name``; made at the first call.

        Its clock is the machine's.
        """
        with _NAMED_LOCK:
            if name not in _NAMED:
                _NAMED[name] = cls(now_ms=lambda: time.time_ns() // 1_000_000)
            return _NAMED[name]

    @property
    def schemas(self) -> dict[str, list[TopicSchema]]:
        """All versions of the schema of each topic that has one, to be added to."""
        return self._store.schemas

    def create_topic(self, name: str, partitions: int = 0) -> str:
        """Create a topic and return its full name.

        Args:
            name: Short or full topic name.
            partitions: Topic partitions; 0 for a topic that is not partitioned.

        Raises:
            ConfigError: The name is not a topic name, or it is taken.
        """
        with self.lock:
            return self._store.create(full_topic_name(name), partitions)

    def grow_topic(self, topic: str, partitions: int) -> None:
        """Give a partitioned topic more topic partitions, each with every subscription of it.

        Raises:
            ConfigError: It has no partitions, or as many already.
        """
        with self.lock:
            old = self._store.partitions(topic)
            names = {name: None for where, name in self._subscriptions if where in old}
            for where in self._store.grow(topic, partitions):
                for name in names:
                    self.open_subscription(where, name, StartPosition.EARLIEST)

    def delete_topic(self, topic: str) -> None:
        """Delete a topic by force; the consumers that it had reconnect."""
        with self.lock:
            gone = self._store.partitions(topic)
            with self._disconnected(gone):
                self._store.delete(topic)
                self._subscriptions = {
                    key: found for key, found in self._subscriptions.items() if key[0] not in gone
                }

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

    def attach(self, client: MemoryBroker) -> None:
        """Know a client, whose consumers are told when their topic is deleted."""
        with self.lock:
            self._clients.append(client)

    def detach(self, client: MemoryBroker) -> None:
        """Forget a client that was closed."""
        with self.lock:
            if client in self._clients:
                self._clients.remove(client)

    def partitions(self, topic: str) -> tuple[TopicPartition, ...]:
        """Topic partitions of a topic, or of one topic partition: itself.

        A missing topic is taken for one without partitions, as Pulsar takes it.
        """
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
            batching: How they become entries.
            batch_messages_max: Messages of one producer batch at most.
            producer: Name of the producer, which routes keyless messages.
            publish_ms: Publish time of all of them; the cluster's ``now_ms`` when not given.
            encrypted: Whether the producer encrypts them.
            corrupt: Whether nobody can read them, from the beginning.

        Returns:
            Where each entry went, in the order of publishing.

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
                        batched=batching is not Batching.NONE,
                        producer=producer,
                        publish_ms=time_ms,
                        encrypted=encrypted,
                    )
                    published.append((where, entry.id))
                    if corrupt:
                        log.corrupt.add(entry.id)
                self._appended(where)
        return published

    def publish_marker(self, topic_partition: TopicPartition) -> EntryId:
        """Store an entry that nobody receives, as the end of a transaction does."""
        return self.publish_aborted(topic_partition)[-1]

    def publish_aborted(
        self, topic_partition: TopicPartition, *messages: Message, producer: str = "producer"
    ) -> list[EntryId]:
        """Store what an aborted transaction leaves: its messages, and a marker at the end."""
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
        """Store one message as several entries; the last one names it."""
        with self.lock:
            log = self.log(topic_partition)
            entries = log.append_chunked(
                message, chunks, producer=producer, publish_ms=self.now_ms()
            )
            self._appended(topic_partition)
        return [entry.id for entry in entries]

    def corrupt(self, topic_partition: TopicPartition, *entries: EntryId) -> None:
        """From now on nobody can read some entries."""
        with self.lock:
            self.log(topic_partition).corrupt.update(entries)

    def acknowledge(
        self, topic_partition: TopicPartition, subscription: str, entries: Iterable[EntryId]
    ) -> None:
        """Acknowledge entries as somebody else would, such as an administrator who skips them."""
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
        """Acknowledge some messages of a batch as somebody else would; the rest comes next time."""
        with self.lock:
            ordinal = self.log(topic_partition).ordinal(entry_id)
            found = self.subscription(topic_partition, subscription)
            if ordinal is not None:
                found.acknowledge_indices(ordinal, indices)

    def deliver_again(
        self, topic_partition: TopicPartition, subscription: str, *entries: EntryId
    ) -> int:
        """Deliver entries once more for no reason, as a broker rarely does; how many it was."""
        with self.lock:
            found = self.subscription(topic_partition, subscription)
            ordinals = [self.log(topic_partition).ordinal(entry_id) for entry_id in entries]
            return sum(found.deliver_again(one) for one in ordinals if one is not None)

    def crash(self) -> None:
        """Kill the broker, as SIGKILL does, and start it again.

        What was acknowledged since a cursor was written is forgotten, and what clients held back is
        lost. Every ledger rolls over, and every client reconnects.
        """
        with self.lock, self._disconnected():
            self._send_groups()
            self._reload(self._store.logs, lossy=True)

    def unload(self, topic: str | TopicPartition) -> None:
        """Move a topic or a topic partition to another broker: nothing is forgotten.

        Its cursors are written, its ledger rolls over, its consumers reconnect.
        """
        with self.lock:
            self.catch_up()
            where = (topic,) if isinstance(topic, TopicPartition) else self.partitions(topic)
            with self._disconnected(where):
                self._reload(where, lossy=False)

    def wipe(self) -> None:
        """Delete everything; ledger ids begin again. Clients stay away until they reconnect."""
        with self.lock:
            for client in self._clients:
                client.drop()
            self._send_groups()
            self._store.clear()
            self._subscriptions.clear()

    def backlog(self, topic_partition: TopicPartition, subscription: str) -> int:
        """Entries that are stored and not acknowledged.

        Raises:
            BrokerError: There is no such subscription.
        """
        with self.lock:
            self.catch_up()
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

    def reset_cursor(self, topic_partition: TopicPartition, name: str, first: EntryId) -> None:
        """Let a subscription go on at an entry; its consumers reconnect.

        Raises:
            BrokerError: There is no such subscription.
        """
        with self.lock, self._disconnected({topic_partition}):
            before = self.subscription(topic_partition, name)
            del self._subscriptions[topic_partition, name]
            self.open_subscription(topic_partition, name, first).properties = before.properties

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
            for log in self._store.logs.values():
                log.validate()
            for subscription in self._subscriptions.values():
                subscription.validate()

    def log(self, topic_partition: TopicPartition) -> EntryLog:
        """What a topic partition stores. The caller holds the lock.

        Raises:
            TopicNotFoundError: It does not exist.
        """
        return self._store.log(topic_partition)

    def open_log(self, topic_partition: TopicPartition) -> EntryLog:
        """As :meth:`log`, but a missing topic is created. The caller holds the lock."""
        return self._store.open_log(topic_partition)

    def open_subscription(
        self, topic_partition: TopicPartition, name: str, start: StartPosition | EntryId
    ) -> Subscription:
        """Find or create a subscription. The caller holds the lock."""
        log = self.open_log(topic_partition)
        found = self._subscriptions.get((topic_partition, name))
        if found is None:
            if isinstance(start, EntryId):
                first = log.first_from(start)
            else:
                first = log.first if start is StartPosition.EARLIEST else len(log)
            cursor = Cursor(first - 1, self._cursor_write_ms)
            found = Subscription(log, cursor, self.look_ahead, self.unacked_limits, self.now_ms)
            self._subscriptions[topic_partition, name] = found
        return found

    def grouped(self, consumer: MemoryConsumer) -> None:
        """Know a consumer that holds acknowledgements back. The caller holds the lock."""
        self._grouped[consumer] = None

    def catch_up(self) -> None:
        """Send the acknowledgements that clients hold back and that are due."""
        with self.lock:
            if self._grouped:
                self._send_groups(self.now_ms())

    def _send_groups(self, due_by_ms: int | None = None) -> None:
        for consumer in list(self._grouped):
            if consumer.flush(due_by_ms):
                del self._grouped[consumer]

    @contextmanager
    def _disconnected(self, of: Collection[TopicPartition] | None = None) -> Iterator[None]:
        """Drop consumers for a while; those that were connected then reconnect, in their order."""
        dropped = [client.drop(of) for client in self._clients]
        yield
        for client, handles in zip(self._clients, dropped, strict=True):
            client.reconnect(handles)

    def _reload(self, where: Collection[TopicPartition], *, lossy: bool) -> None:
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
