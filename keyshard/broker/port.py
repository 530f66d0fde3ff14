"""The interface between keyshard and a broker. The rest of keyshard talks only to this interface.

Implementations: :mod:`keyshard.broker.client.broker` (pulsar-client),
:mod:`keyshard.broker.wire.broker` (Pulsar's binary protocol) and
:mod:`keyshard.broker.memory`. ``tests/contract`` runs the same cases on all of them. Each
translates every exception of its library into :mod:`keyshard.errors`, with ``raise ... from``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Literal, Protocol

from keyshard.broker.reports import SegmentWatch, TopicWatch, WorkerFacts
from keyshard.columns.outgoing import Outgoing, OutgoingMessage
from keyshard.core.message import MessageId
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.ring.hash_range import HashRange
from keyshard.core.topic_schema import TopicSchema


class StartPosition(str, Enum):
    """Where a new subscription begins."""

    EARLIEST = "earliest"
    LATEST = "latest"


@dataclass(frozen=True, slots=True)
class SubscriptionSpec:
    """Range, name and limits of a consumer. The same spec subscribes it again."""

    topic_partition: TopicPartition
    subscription: str
    hash_range: HashRange
    consumer_name: str
    """Shown in the broker's statistics."""
    receiver_queue_size: int
    """Maximum number of messages that the client requests ahead of ``receive``."""
    receiver_queue_bytes: int | None = None
    """Memory for these messages, in bytes; one entry may exceed it. A client that cannot measure it
    ignores it. ``None``: all clients ignore it."""
    columns: Collection[str] | None = None
    """As :attr:`ReadOptions.columns`."""
    message_bytes: int | None = None
    """Mean memory of the messages that an earlier consumer of the range received, bytes. The client
    requests as many at once as fit. ``None``: it is unknown, and the client begins with one."""


class Consumer(Protocol):
    """Live Key_Shared STICKY subscription handle: one hash range of one topic partition."""

    @property
    def topic_partition(self) -> TopicPartition:
        """The topic partition that the consumer reads."""

    @property
    def hash_range(self) -> HashRange:
        """The hash range that the consumer owns."""

    def receive(self, timeout_ms: int) -> list[EntryBlock]:
        """Take delivered messages, in delivery order. Return ``[]`` if none arrive in time.

        Args:
            timeout_ms: Longest wait for the first message, in milliseconds. An implementation may
                round it to a fixed receive time.

        Returns:
            Blocks in delivery order. Adjacent messages of one entry form one block. An entry may
            span several blocks or calls. The blocks of a call come from one connection, unless
            ``receiver_queue_size`` is at most ``POLLED_MAX``: a reconnect may then separate them.

        Raises:
            ChunkedMessageError: A chunked message arrived. None of it is acknowledged.
            CorruptEntryError: An entry cannot be read. None of it is acknowledged. The next call
                continues after it. Some clients do not report this.
            BrokerError: The consumer is closed or broken.
        """

    def when_ready(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, from any thread, when :meth:`receive` has messages.

        An idle consumer then costs its owner no time. Until the callback runs, do not call this
        method or :meth:`receive`: the client may hold the first message meanwhile. After
        :meth:`close` the callback does not run.
        """

    def acknowledge(self, entries: Sequence[EntryId]) -> None:
        """Acknowledge whole entries of this topic partition, whichever consumer received them.

        Returns as soon as the client accepts them. The broker may lose them in a crash. If the
        broker confirms acknowledgements to the client, the client resends unconfirmed ones after
        a short loss of the connection.

        Raises:
            BrokerError: The client did not accept them.
        """

    def last_entry(self) -> EntryId | None:
        """Return the last entry published to the topic partition; ``None`` if nothing is stored.

        If every subscription acknowledged the entry, a broker may delete it with its ledger. The
        entry may be one that no consumer receives, such as a transaction marker.

        Raises:
            BrokerUnavailableError: No answer before the operation timeout (retriable).
        """

    def is_connected(self) -> bool:
        """Return whether the broker holds this consumer now. A reconnect makes this false."""

    def has_given_all(self) -> bool:
        """Return whether it is connected, and no message waits in another process or was dropped.

        If the consumer is also idle, all messages that arrived are handed out. Silence alone does
        not show that: a suspended process of the client may hold messages.
        """

    def problem(self) -> str:
        """Return one sentence about a broker that refuses this consumer or does not answer it.

        Empty while nothing is wrong, and if the client does not report it. :meth:`receive` raises
        a permanent refusal in the end.
        """

    def close(self, *, for_another: bool = False) -> None:
        """Flush acknowledgements and give the range back. Idempotent.

        If the broker confirms acknowledgements, this method waits for them for a short time. The
        log names those that are still unconfirmed.

        The broker redelivers unacknowledged messages to the next owner of the range.

        Args:
            for_another: Whether the owner subscribes the range again at once. The owner then
                keeps the range, as it does while a connection is lost.
        """


class Reader(Protocol):
    """Bounded read of one topic partition from a position; no subscription, no acknowledgement.

    A Reader reconnects by itself. It then continues after the last entry that it handed out, or
    begins that entry again. After a lost connection, neither its silence nor :meth:`at_end` proves
    anything. Only a Reader that stayed connected shows that an entry does not exist.
    """

    def read(self, timeout_ms: int) -> list[EntryBlock]:
        """Return the next whole or partial entries, by position; ``[]`` if none arrive in time.

        If an entry is missing, the broker may be asked whether it is stored.

        Raises:
            BrokerUnavailableError: It did not answer before the operation timeout (retriable).
            ChunkedMessageError: A chunked message arrived, and everything before it was read.
            UnreadableEntryError: An entry cannot be read, and everything before it was read. The
                next call continues after it.
            BrokerError: The reader is closed or broken.
        """

    def at_end(self) -> bool:
        """Return whether everything stored at the time of the call has been read.

        The answer is valid only if :meth:`stayed_connected` holds afterwards.

        Raises:
            BrokerUnavailableError: No answer before the operation timeout (retriable).
        """

    def stayed_connected(self) -> bool:
        """Return whether the connection has never been lost, as far as the client reports it.

        Once false, it stays false.
        """

    def close(self) -> None:
        """Free the handle. Idempotent."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Limits of a Reader, and the content that it must return."""

    receiver_queue_size: int = 1_000
    """Maximum number of messages that the client requests ahead of ``read``."""
    receiver_queue_bytes: int = 8 * 1024 * 1024
    """Memory for these messages, in bytes, if the client can measure it."""
    first: int = 10
    """Messages that such a client requests before it knows the size of one."""
    columns: Collection[str] | None = None
    """Columns of the content to read; the others may be empty. ``None``: the columns that the
    content of every entry has. Optional columns are present only if they are named, and null if the
    client does not provide them; see :data:`keyshard.columns.content.METADATA`."""
    last: EntryId | None = None
    """Last entry to read; the Reader may return more. ``None``: read all that is stored."""


DEFAULT_READ_OPTIONS = ReadOptions()


class Producer(Protocol):
    """Publishes to one topic partition, one message at a time. Each message is its own entry.

    Any thread may send. The messages of one thread are stored in the order of its calls.
    """

    def send(
        self,
        value: bytes | None,
        *,
        key: str | None = None,
        ordering_key: str | None = None,
        properties: Mapping[str, str] | None = None,
        event_ms: int = 0,
    ) -> EntryId:
        """Publish a message. Return when the broker has confirmed that it is stored.

        Args:
            value: Payload; ``None`` for a null value.
            key: Partition key; ``None`` for no key, which differs from the empty key.
            ordering_key: Ordering key; ``None`` as for ``key``.
            properties: Properties; default none.
            event_ms: Event time, milliseconds since the epoch; 0 when unset.

        Returns:
            The id of the stored entry.

        Raises:
            BrokerUnavailableError: No confirmation before the deadline (retriable). The message
                may be stored nevertheless, so another attempt may store it twice.
            MessageTooLargeError: The message with its properties exceeds the broker's limit.
            BrokerError: The broker refused it, or the producer is closed.
        """

    def close(self) -> None:
        """Free the handle. Idempotent."""


Compression = Literal["none", "lz4", "zlib", "zstd", "snappy"]


@dataclass(frozen=True, slots=True)
class PublishOptions:
    """Name, limits and format of an entry producer."""

    name: str | None = None
    """Name by which the broker finds duplicates. ``None``: the broker chooses a new one."""
    send_timeout_s: float = 30.0
    """Longest time until an entry is confirmed, seconds; also the longest wait for room."""
    busy_timeout_s: float | None = None
    """Longest wait for a name that another connection has, seconds; ``None``: the timeout of an
    operation."""
    pending_messages_max: int = 100_000
    """Most messages without a confirmation; one entry may exceed it."""
    pending_bytes_max: int = 64 * 1024 * 1024
    """Most memory of entries without a confirmation, bytes; one entry may exceed it."""
    compression: Compression = "none"
    schema: TopicSchema | None = None
    """Schema of the messages; the broker adds it to the topic, or refuses it."""


class EntryProducer(Protocol):
    """Publishes entries to one topic partition, in order, and reconnects by itself.

    With a name, the broker stores each sequence id once. Ids ascend from call to call. Such a
    producer ends with its first error, because a later entry must not be stored before an earlier
    one. Without a name, an error concerns its own entry.
    """

    topic_partition: TopicPartition

    @property
    def last_sequence_id(self) -> int:
        """Last sequence id that the broker knows of the name; -1 if it knows none.

        The messages up to there may still be lost, until :meth:`publish` of one of them succeeds.
        """

    @property
    def knows_every_id(self) -> bool:
        """Whether the broker surely knows the ids that it has stored.

        If not, a caller that repeats ids looks for them in the topic while it has the producer. If
        the connection is lost before the caller's last id is confirmed, another producer may have
        had the name. The next :meth:`publish`, or the wait for a confirmation, then fails with a
        retriable error, and the caller looks again.
        """

    @property
    def message_bytes_max(self) -> int:
        """Largest entry that the broker takes, with its metadata, bytes."""

    def has_ended(self) -> bool:
        """Return whether an error has ended it for good, so that it takes no more messages."""

    def last_entry(self) -> EntryId | None:
        """Return the last entry of the topic partition, of any producer; ``None`` if it is empty.

        Raises:
            BrokerUnavailableError: No answer in time (retriable).
        """

    def check(self, message: OutgoingMessage) -> None:
        """Check the size of a message as an entry, and send nothing.

        Raises:
            MessageTooLargeError: The entry exceeds ``message_bytes_max``.
        """

    def publish(self, rows: Sequence[OutgoingMessage], sequence_id: int) -> Future[EntryId | None]:
        """Publish messages as one entry. Wait while too much is unconfirmed.

        Args:
            rows: At least one message. All have one routing key.
            sequence_id: Sequence id of the first message; the others follow. If the broker knows
                some of these ids, only the other messages are stored.

        Returns:
            A future of the stored entry's id, or of ``None`` if all messages were stored before. It
            fails with the errors below, or with:

            - ``DeduplicationError``: the producer has a name, and the broker does not deduplicate.
              The first entry may be stored.
            - ``ProducerFencedError``: another program publishes under the name.

        Raises:
            MessageTooLargeError: The entry exceeds ``message_bytes_max``.
            BrokerUnavailableError: No room or no confirmation in time (retriable).
            BrokerError: The broker refused it, or the producer has ended.
        """

    def publish_all(
        self, columns: Outgoing, ends: Sequence[int], sequence_id: int
    ) -> list[Future[EntryId | None]]:
        """Publish messages as several entries, as :meth:`publish` does with each.

        It raises no error of an entry. If an entry cannot be published, its future and those of
        the entries after it fail.

        Args:
            columns: The messages.
            ends: End of each entry, exclusive, ascending up to the length of the columns.
            sequence_id: Sequence id of the first message; the others follow.
        """

    def flush(self) -> None:
        """Wait until everything that was published before is confirmed, or has failed.

        Raises:
            BrokerError: The producer has ended.
        """

    def close(self, timeout_s: float | None = None) -> None:
        """Give the name back. Unconfirmed messages fail. Idempotent.

        Args:
            timeout_s: Longest wait for the broker, seconds; ``None``: the timeout of a request.

        Raises:
            BrokerUnavailableError: No answer in time (retriable). The broker frees the name once it
                handles the request.
        """


class OpensReaders(Protocol):
    """The part of a broker that opens Readers."""

    def reader(
        self,
        topic_partition: TopicPartition,
        start: EntryId,
        how: ReadOptions = DEFAULT_READ_OPTIONS,
    ) -> Reader:
        """Open a Reader at ``start``, inclusive. If that entry is gone, it begins at the next one.

        Raises:
            BrokerUnavailableError: No answer before the operation timeout (retriable).
        """


class Broker(OpensReaders, Protocol):
    """A connection to one cluster. Not shared between processes: create it after a fork."""

    def workers(self) -> Sequence[WorkerFacts]:
        """Return the workers that host the consumers; empty if this process hosts them."""

    def missing(self, topics: Sequence[str]) -> frozenset[str]:
        """Return the full topic names that do not exist, if the broker can tell.

        Creates no topic. Without topics, it only checks, within seconds, that the broker is
        reachable and accepts connections.

        Raises:
            BrokerUnavailableError: The broker is not reachable; the text says why (retriable).
            BrokerError: The broker refuses the connection.
        """

    def partitions(self, topic: str, *, create: bool = False) -> tuple[TopicPartition, ...]:
        """Topic partitions of a full topic name; one with ``partition == -1`` if not partitioned.

        A missing topic counts as one that is not partitioned.

        Args:
            topic: The full topic name.
            create: Whether a broker that creates topics with partitions may create a missing one.

        Raises:
            BrokerUnavailableError: No answer before the operation timeout.
            TopicNotFoundError: With ``create``: the topic does not exist, and the broker creates
                none.
        """

    def watch_topics(
        self, prefix: str, changed: Callable[[Collection[str]], None]
    ) -> TopicWatch | None:
        """Report topics and topic partitions as soon as they are created or deleted.

        Reports may be late or missing, so a caller also has to look now and then.

        Args:
            prefix: Beginning of their names, with at least the namespace:
                ``persistent://tenant/namespace/``, or ``topic://tenant/namespace/`` for scalable
                topics.
            changed: Takes full names. Any thread may call it, and it must return at once.

        Returns:
            ``None`` if the client or the broker does not report topics.

        Raises:
            BrokerUnavailableError: No answer before the operation timeout (retriable).
            BrokerError: The broker refuses.
        """

    def watch_segments(self, topic: str, changed: Callable[[], None]) -> SegmentWatch:
        """Report the segments of a scalable topic, now and after each split and merge.

        Args:
            topic: ``topic://tenant/namespace/name``. A missing topic is not created.
            changed: Called after a change. Any thread may call it, and it must return at once.

        Raises:
            ConfigError: The client or the broker does not know scalable topics.
            TopicNotFoundError: The topic does not exist.
            AuthorizationError: The permission is missing.
            BrokerUnavailableError: No answer before the operation timeout (retriable).
        """

    def begin(
        self, topic_partition: TopicPartition, subscription: str, start: MessageId | int,
        batch_size: int = 1,
    ) -> EntryId:  # fmt: skip
        """Move a cursor without consumers, and return the position after its mark-delete.

        ``start`` is a publish time, milliseconds, or a message of an entry of ``batch_size``. A
        missing subscription is created first. If a consumer is connected, it raises
        RangeConflictError (retriable).
        """

    def subscribe(self, spec: SubscriptionSpec, start: StartPosition) -> Consumer:
        """Own a hash range of a topic partition. Create the subscription if it is missing.

        Args:
            spec: Range, name and limits of the consumer.
            start: Where a new subscription begins.

        Raises:
            RangeConflictError: Another consumer holds a part of the range (retriable).
            BrokerUnavailableError: No answer before the operation timeout (retriable).
        """

    def producer(self, topic_partition: TopicPartition, *, send_timeout_ms: int) -> Producer:
        """Open a producer for ``topic_partition``; Pulsar creates a missing topic.

        Args:
            send_timeout_ms: Longest wait of one send for its confirmation, milliseconds.

        Raises:
            BrokerUnavailableError: No answer before the operation timeout (retriable).
        """

    def entry_producer(self, topic_partition: TopicPartition, how: PublishOptions) -> EntryProducer:
        """Open an entry producer for ``topic_partition``; Pulsar creates a missing topic if it may.

        Raises:
            ConfigError: This transport does not publish entries.
            ProducerBusyError: Another connection had the name until the operation timeout
                (retriable).
            QuotaExceededError: The backlog quota was exceeded until then (retriable).
            AuthorizationError: The permission to produce is missing.
            SchemaError: The schema of the topic does not admit that of ``how``.
            TopicNotFoundError: The topic does not exist, and the broker does not create it.
            BrokerUnavailableError: No answer before the operation timeout (retriable).
        """

    def close(self) -> None:
        """Close every handle and the connection. Idempotent."""
