"""The operations of a contract case that the broker port lacks."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from keyshard.broker.admin.port import Admin
from keyshard.broker.memory import Batching, Message
from keyshard.broker.port import Broker, Consumer, Reader, StartPosition, SubscriptionSpec
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.releases import Release
from keyshard.core.ring.hash_range import HashRange, split_ring
from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import BrokerUnavailableError
from tests.support.deadlines import deadline, in_time

SUBSCRIPTION = "contract"
WHOLE_RING = split_ring(1)[0]
RECEIVE_MS = 10
DEADLINE_S = deadline(20)
COME_BACK_S = deadline(90)
"""Three of the client's own time-outs, for a broker that comes back."""


class Harness(Protocol):
    """One cluster with its topics."""

    release: Release
    """Behaviour of the broker's release."""
    look_ahead_per_consumer: int
    """Entries that may wait for their owner for each connected consumer."""
    idle_s: float
    """Time without a message after which no more is expected."""
    delay_ms: int
    """A delay of messages that lasts longer than a few requests, milliseconds."""
    delayed_look_ahead: int
    """Number of delayed messages of ascending times from which all that follows waits."""
    whole_entries: bool
    """Whether entries come in one piece with their metadata: whether a key was
    set as bytes, and that they are a part of a chunked message."""
    empty_keys: bool
    """Whether an empty key and a missing key are distinct."""
    not_handed_out: Collection[str]
    """Columns beside the content that are null here."""
    may_repeat: bool
    """Whether an entry may come twice though nothing failed (docs/semantics.md)."""
    publishes_entries: bool
    """Whether entries can be published whole, with sequence ids."""
    reports_topics: bool
    """Whether topics can be watched."""

    def broker(self) -> Broker:
        """Open a connection; it is closed at the end of the test."""

    def create_topic(self, partitions: int = 0) -> str:
        """Create a new topic, without partitions by default; return its full name."""

    def create_again(self, topic: str, partitions: int) -> None:
        """Create a partitioned topic that was deleted."""

    def deduplicate(self) -> None:
        """Topics that are created from now on store each sequence id once."""

    def forget_name(self, topic_partition: TopicPartition, name: str) -> None:
        """Make the broker forget a producer name, as it does when the name is unused for long."""

    def publish(
        self, topic: str, messages: Sequence[Message], batching: Batching = Batching.NONE
    ) -> None:
        """Publish and wait until all is stored; with batching, one entry for each batch."""

    def pass_time(self, until_ms: int) -> None:
        """Return when the broker's clock has reached a time, milliseconds since the epoch."""

    def publish_at(self, topic: str, times_ms: Sequence[int]) -> None:
        """Publish a message with key ``k`` for each publish time, in this order."""

    def backlog(self, topic_partition: TopicPartition, subscription: str = SUBSCRIPTION) -> int:
        """Entries the broker holds unacknowledged."""

    def expire(self, topic_partition: TopicPartition, before_ms: int) -> None:
        """Expire messages that were published before a time, for all subscriptions and readers."""

    def drop_connections(self, topic_partition: TopicPartition) -> None:
        """Make every consumer of a topic partition reconnect."""

    def grow_topic(self, topic: str, partitions: int) -> None:
        """Give a partitioned topic more partitions."""

    def delete_topic(self, topic: str) -> None:
        """Delete a topic by force."""

    def admin(self) -> Admin:
        """The admin interface."""

    def add_schema(
        self, topic: str, kind: str, definition: str = "", properties: dict[str, str] | None = None
    ) -> None:
        """Give a topic the next version of its schema."""

    def schema(self, topic: str, version: int | None = None) -> TopicSchema | None:
        """Return a version of a topic's schema, requested as the client of this harness does."""

    def close_producers(self) -> None:
        """Close the producers of :meth:`publish`."""

    def roll_ledger(self, topic_partition: TopicPartition) -> None:
        """Make the next entry of a topic partition open another ledger."""

    def unload(self, topic_partition: TopicPartition) -> None:
        """Let another broker take the topic partition; here it is the same one."""

    def limit_unacked(self, per_consumer: int, per_subscription: int) -> None:
        """Set limits for topics created from now on; 0 for none."""

    def publish_chunked(self, topic: str, key: str) -> list[EntryId]:
        """Publish a message that is stored as several entries; their ids."""

    def publish_corrupt(self, topic: str) -> None:
        """Store an entry that cannot be read."""

    def publish_encrypted(self, topic: str, key: str, messages: int) -> None:
        """Store an encrypted entry: one message, or a batch of several."""

    def other_producer(self, topic_partition: TopicPartition, name: str) -> OtherProducer:
        """Start another process with a producer of a name."""

    def other_client(self, topic_partition: TopicPartition, hash_range: HashRange) -> OtherClient:
        """Start another process with a consumer of the subscription."""

    def close(self) -> None:
        """Close every connection."""


class OtherClient(Protocol):
    """A process of its own, with one consumer of a range."""

    def receive(self, messages: int) -> list[EntryId]:
        """Receive so many messages; their entries."""

    def acknowledge_and_die(self, entries: Sequence[EntryId]) -> None:
        """Acknowledge and be killed at once."""

    def acknowledge_indices(self, entry_id: EntryId, indices: Sequence[int]) -> None:
        """Acknowledge some messages of a batch it received, and no more, and end."""

    def is_connected(self) -> bool:
        """Whether the client takes itself for connected."""

    def freeze(self) -> None:
        """Stop the process; the system keeps its connection open."""

    def thaw(self) -> None:
        """Continue a frozen client."""


class OtherProducer(Protocol):
    """A process of its own, with one producer of a name."""

    def publish(self, start: int, stop: int) -> str:
        """Publish numbered messages as an entry; the code of the error, or ``""``."""

    def send(self, start: int, stop: int) -> None:
        """Begin to publish numbered messages, and return."""

    def freeze(self) -> None:
        """Stop the process; the system keeps its connection open."""

    def thaw(self) -> None:
        """Continue a frozen process."""

    def kill(self) -> None:
        """Kill the process."""


class BreakableHarness(Harness, Protocol):
    """A cluster of its own, that may be broken."""

    names_max: int
    """Producer names of a topic partition that survive a move to another broker."""

    def crash(self) -> None:
        """Kill the broker and start it again."""

    def away(self) -> AbstractContextManager[None]:
        """Kill the broker; it is started again when the block ends."""

    def wipe(self) -> None:
        """Kill the broker, delete all its data and start it again."""

    def transaction(self, topic_partition: TopicPartition, keys: Sequence[str]) -> None:
        """Publish one message for each key in a transaction, and abort it."""

    def exceed_quota(self, topic: str, *, exceeded: bool) -> None:
        """Set the backlog quota of a topic and its namespace below the backlog, or beyond it.

        The broker enforces it at its next check.
        """


class FailingHarness(Harness, Protocol):
    """A cluster of its own, whose storage may stop."""

    def held_writes(
        self, topic_partition: TopicPartition
    ) -> AbstractContextManager[Callable[[], None]]:
        """Accept entries and store none; when the block ends, store those that wait.

        Yields:
            A function that returns when the writes of those that wait have failed.
        """


class ScalableHarness(Harness, Protocol):
    """A cluster that has scalable topics."""

    def create_scalable(self, segments: int) -> str:
        """Create a scalable topic; return its name."""

    def split(self, topic: str, number: int) -> None:
        """Split a segment."""

    def merge(self, topic: str, lower: int, upper: int) -> None:
        """Merge two segments."""

    def roll_segments(self, topic: str) -> None:
        """Begin a new ledger in each segment."""

    def delete_scalable(self, topic: str) -> None:
        """Delete a scalable topic by force."""

    def create_again_scalable(self, topic: str) -> None:
        """Create a scalable topic that was deleted, with one segment."""


def subscribe(
    broker: Broker,
    topic_partition: TopicPartition,
    hash_range: HashRange = WHOLE_RING,
    *,
    subscription: str = SUBSCRIPTION,
    start: StartPosition = StartPosition.EARLIEST,
    receiver_queue_size: int = 1_000,
    columns: Collection[str] | None = None,
) -> Consumer:
    """Subscribe with the values most cases want."""
    return broker.subscribe(
        SubscriptionSpec(
            topic_partition,
            subscription,
            hash_range,
            consumer_name=f"range-{hash_range}",
            receiver_queue_size=receiver_queue_size,
            columns=columns,
        ),
        start,
    )


class Received:
    """Blocks that consumers or a reader handed out, in the order they came."""

    def __init__(self) -> None:
        self.deliveries: list[tuple[Consumer | None, EntryBlock]] = []

    @property
    def blocks(self) -> list[EntryBlock]:
        """All blocks."""
        return [block for _, block in self.deliveries]

    @property
    def ids(self) -> list[EntryId]:
        """Entry of each block, without repeating it for its next part."""
        ids: list[EntryId] = []
        for block in self.blocks:
            if not (ids and ids[-1] == block.id):
                ids.append(block.id)
        return ids

    @property
    def values(self) -> list[bytes | None]:
        """Value of each message."""
        return [value for block in self.blocks for value in block.values]

    def by_key(self) -> dict[str | None, list[bytes | None]]:
        """Values of each partition key, in the order they came."""
        values: dict[str | None, list[bytes | None]] = {}
        for block in self.blocks:
            for key, value in zip(block.partition_keys, block.values, strict=True):
                values.setdefault(key, []).append(value)
        return values

    def take(self, consumers: Iterable[Consumer]) -> int:
        """Receive once from each consumer; the number of messages that came."""
        rows = 0
        for consumer in consumers:
            for block in consumer.receive(RECEIVE_MS):
                self.deliveries.append((consumer, block))
                rows += block.rows
        return rows


def receive(consumers: Sequence[Consumer], messages: int) -> Received:
    """Receive ``messages`` messages, each before a deadline, and then any further ones."""
    received, rows = Received(), 0
    deadline = time.monotonic() + DEADLINE_S
    while rows < messages:
        in_time(deadline, f"{rows} of {messages} messages came in time")
        if came := received.take(consumers):
            rows, deadline = rows + came, time.monotonic() + DEADLINE_S
    while received.take(consumers):
        pass
    return received


def receive_until_idle(
    consumers: Sequence[Consumer], received: Received, idle_s: float, at_least: int = 0
) -> None:
    """Receive until ``at_least`` messages came in all, and then nothing for a while."""
    deadline = time.monotonic() + DEADLINE_S
    rows = len(received.values)
    while rows < at_least:
        in_time(deadline, f"{rows} of {at_least} messages came in time")
        if came := received.take(consumers):
            rows, deadline = rows + came, time.monotonic() + DEADLINE_S
    quiet_since = time.monotonic()
    while time.monotonic() - quiet_since < idle_s:
        if received.take(consumers):
            quiet_since = time.monotonic()


def read_to_end(reader: Reader) -> Received:
    """Read until the reader says that it is at the end; a broker may come back meanwhile."""
    received = Received()
    deadline = time.monotonic() + COME_BACK_S
    while True:
        in_time(deadline, "the reader did not reach the end in time")
        try:
            if reader.at_end():
                return received
        except BrokerUnavailableError:
            continue
        received.deliveries += [(None, block) for block in reader.read(RECEIVE_MS)]
