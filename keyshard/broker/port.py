"""What keyshard needs of a broker; the only interface the runtime talks to.

Implementations: :mod:`keyshard.broker.pulsar.broker` (pulsar-client),
:mod:`keyshard.broker.wire.broker` (entries by Pulsar's protocol) and
:mod:`keyshard.broker.memory`. ``tests/contract`` runs the same cases on all.
Implementations translate every exception of their library into :mod:`keyshard.errors`, with
``raise ... from``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from keyshard.core.holes.broker_state import BrokerState
from keyshard.core.message import MessageId
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.position.ledger import Ledger
from keyshard.core.ring.hash_range import HashRange
from keyshard.core.topic_schema import TopicSchema


class StartPosition(str, Enum):
    """Where a subscription that does not exist yet begins."""

    EARLIEST = "earliest"
    LATEST = "latest"


class Consumer(Protocol):
    """Live Key_Shared STICKY subscription handle: one hash range of one topic partition."""

    @property
    def topic_partition(self) -> TopicPartition:
        """The topic partition it consumes."""

    @property
    def hash_range(self) -> HashRange:
        """The range it owns."""

    def receive(self, timeout_ms: int) -> list[EntryBlock]:
        """Take what was delivered, in delivery order; ``[]`` when nothing came in time.

        Args:
            timeout_ms: Longest wait for the first message, in milliseconds. An implementation may
                round it to a fixed receive time of its own.

        Returns:
            Blocks in delivery order. Neighbouring messages of one entry are one block; an entry may
            be spread over several blocks or calls. A reconnect lies between calls; between blocks
            of one call only where the queue holds at most ``POLLED_MAX`` messages.

        Raises:
            ChunkedMessageError: A chunked message came; nothing of it is acknowledged.
            CorruptEntryError: An entry cannot be read; nothing of it is acknowledged. The next call
                goes on behind it. Not every client tells.
            BrokerError: The consumer is closed or broken.
        """

    def when_ready(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, from any thread, when :meth:`receive` has something.

        An idle consumer costs its owner no time this way. Until the call came, neither ask again
        nor receive: the client may hold the first message meanwhile. After :meth:`close` it does
        not come.
        """

    def acknowledge(self, entries: Sequence[EntryId]) -> None:
        """Acknowledge whole entries of this topic partition, whoever received them.

        Returns as soon as the client took them; the broker may forget them in a crash. A client
        that is told by the broker that it has taken them sends again what a connection left open
        that was lost for a moment.

        Raises:
            BrokerError: The client did not take them.
        """

    def last_entry(self) -> EntryId | None:
        """The last entry published to the topic partition; ``None`` when nothing is stored.

        A broker may forget it with its ledger, once everybody acknowledged it. It may be an entry
        that nobody receives, such as a transaction marker.

        Raises:
            BrokerUnavailableError: No answer before the operation timeout (retriable).
        """

    def is_connected(self) -> bool:
        """Whether the broker holds this consumer now; a reconnect makes this false for a while."""

    def has_given_all(self) -> bool:
        """Whether it is connected, and who idles has all that came to its client until now.

        Where the client is in another process, silence alone does not show that: what came may wait
        there, while that process stands still.
        """

    def trouble(self) -> str:
        """One sentence on a broker that refuses this consumer or does not answer it.

        Empty while nothing is wrong, and where the client does not tell. A refusal that does not
        pass is raised by :meth:`receive` in the end.
        """

    def close(self, *, for_another: bool = False) -> None:
        """Flush acknowledgements and give the range back. Idempotent.

        Where the broker tells the client that it has taken acknowledgements, that is waited for,
        for a short time; what it has not confirmed by then is named in the log.

        What was delivered and not acknowledged is delivered again to the next owner.

        Args:
            for_another: Whether its owner subscribes the range again at once: then it goes on
                owning it, as it does while a connection is lost.
        """


class Reader(Protocol):
    """Bounded read of one topic partition from a position; no subscription, no acknowledgement.

    A Reader that lost its connection gets it back by itself, and reads on behind what it handed
    out or begins that entry again. Its silence, then and afterwards, is no sign of anything, nor is
    what it says of the end: only one that stayed connected shows that an entry is not there.
    """

    def read(self, timeout_ms: int) -> list[EntryBlock]:
        """Next whole or partial entries in position order; ``[]`` when nothing came in time.

        Raises:
            ChunkedMessageError: A chunked message came; not before what lies before it was read.
            UnreadableEntryError: An entry cannot be read; not before what lies before it was read.
                The next call goes on behind it.
            BrokerError: The reader is closed or broken.
        """

    def at_end(self) -> bool:
        """Whether everything stored at the time of the call has been read.

        Worth nothing unless :meth:`stayed_connected` holds afterwards.

        Raises:
            BrokerUnavailableError: No answer before the operation timeout (retriable).
        """

    def stayed_connected(self) -> bool:
        """Whether its connection has stood since it was opened, as far as the client tells.

        Once false, it stays so.
        """

    def close(self) -> None:
        """Free the handle. Idempotent."""


@dataclass(frozen=True, slots=True)
class HowToRead:
    """What a Reader may leave out, and what it may not."""

    receiver_queue_size: int = 1_000
    """Most messages the client asks for ahead of ``read``."""
    receiver_queue_bytes: int = 8 * 1024 * 1024
    """Memory that they may take, where the client can tell, bytes."""
    first: int = 10
    """Messages that such a client asks for before it has seen one."""
    columns: Collection[str] | None = None
    """Columns of the content that are wanted, the others may be empty; ``None``: all are that every
    entry's content has. What else it can have is there where it is named, and null where the client
    does not hand it out; see :data:`keyshard.arrow.content.METADATA`."""
    last: EntryId | None = None
    """The last entry that is wanted; more may come. ``None``: all that is stored is."""


ANYHOW = HowToRead()


class Producer(Protocol):
    """Publishes to one topic partition, one message at a time and each an entry of its own.

    Any thread may send. What one thread sends is stored in the order of its calls.
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
        """Publish a message; returns when the broker has confirmed that it is stored.

        Args:
            value: Payload; ``None`` for a null value.
            key: Partition key; ``None`` for none, which is not the empty one.
            ordering_key: Ordering key; as ``key``.
            properties: Properties; default none.
            event_ms: Event time, milliseconds since the epoch; 0 when unset.

        Returns:
            Where it is stored.

        Raises:
            BrokerUnavailableError: No confirmation before the deadline (retriable). The message
                may be stored all the same, so another attempt may store it twice.
            MessageTooLargeError: The broker takes no message as large, its properties included.
            BrokerError: The broker refused it, or the producer is closed.
        """

    def close(self) -> None:
        """Free the handle. Idempotent."""


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """A worker that has consumers of a connection."""

    kind: str
    """What it is: ``worker process``."""
    pid: int | None
    """Its process; ``None`` while there is none."""
    host: str | None
    """The machine of that process."""
    consumers: int
    since_s: float
    """Monotonic time since when it is there, or away."""
    restarts: int
    """How many were started in its place before."""


BEGINS = "keyshard.begins"
"""Property of a subscription that begins inside a producer batch: ``ledger:entry:index``."""


class Broker(Protocol):
    """A connection to one cluster. Not shared between processes: create it after a fork."""

    def workers(self) -> Sequence[WorkerFacts]:
        """Who has the consumers; nobody: this process has them."""

    def missing(self, topics: Sequence[str]) -> frozenset[str]:
        """Those of some full topic names that do not exist, where the broker can tell.

        Creates nothing. Also without topics it finds out, within seconds, whether the broker is
        there and takes connections.

        Raises:
            BrokerUnavailableError: It is not there; says why (retriable).
            BrokerError: It refuses.
        """

    def partitions(self, topic: str) -> tuple[TopicPartition, ...]:
        """Topic partitions of a full topic name; one with ``partition == -1`` if not partitioned.

        Raises:
            BrokerUnavailableError: No answer before the operation timeout.
            TopicNotFoundError: The topic does not exist, where the broker says so.
        """

    def subscribe(
        self,
        topic_partition: TopicPartition,
        subscription: str,
        hash_range: HashRange,
        *,
        start: StartPosition,
        consumer_name: str,
        receiver_queue_size: int,
        receiver_queue_bytes: int | None = None,
        columns: Collection[str] | None = None,
    ) -> Consumer:
        """Own ``hash_range`` of ``topic_partition``, creating the subscription if it is missing.

        Args:
            start: Where a subscription that does not exist yet begins.
            consumer_name: Shown in the broker's statistics.
            receiver_queue_size: Most messages the client asks for ahead of ``receive``.
            receiver_queue_bytes: Memory that they may take, bytes; one entry may take more. A
                client that cannot tell asks for as many messages as it is given; ``None``: all do.
            columns: As :attr:`HowToRead.columns`.

        Raises:
            RangeConflictError: Another consumer holds a part of the range (retriable).
            BrokerUnavailableError: No answer before the operation timeout (retriable).
        """

    def reader(
        self, topic_partition: TopicPartition, start: EntryId, how: HowToRead = ANYHOW
    ) -> Reader:
        """Read from ``start``, inclusive; if it is gone, from the next entry that is stored.

        Raises:
            BrokerUnavailableError: No answer before the operation timeout (retriable).
        """

    def producer(self, topic_partition: TopicPartition, *, send_timeout_ms: int) -> Producer:
        """Publish to ``topic_partition``; Pulsar creates a topic that is missing.

        Args:
            send_timeout_ms: Longest wait of one send for its confirmation, milliseconds.

        Raises:
            BrokerUnavailableError: No answer before the operation timeout (retriable).
        """

    def close(self) -> None:
        """Close every handle and the connection. Idempotent."""


class Admin(Protocol):
    """What the runtime asks the admin interface."""

    def version(self) -> str: ...

    def settings(self) -> Mapping[str, str]: ...

    def cluster(self) -> str: ...

    def partition_count(self, topic: str) -> int | None: ...

    def namespaces(self, tenant: str) -> set[str]: ...

    def topics(self, tenant: str, namespace: str) -> set[str]: ...

    def created(self, topic_partition: TopicPartition) -> str: ...

    def remove_leftover(
        self, topic_partition: TopicPartition, subscription: str
    ) -> bool | None: ...

    def subscription(
        self, topic_partition: TopicPartition, subscription: str
    ) -> Mapping[str, Any] | None: ...

    def subscriptions(self, topic_partition: TopicPartition) -> Mapping[str, Mapping[str, Any]]: ...

    def broker_state(
        self, topic_partition: TopicPartition, subscription: str
    ) -> BrokerState | None: ...

    def ledgers(self, topic_partition: TopicPartition) -> tuple[Ledger, ...] | None:
        """What is stored, ascending, the ledger that is written to last; ``None`` for no topic."""

    def last_written(self, topic_partition: TopicPartition) -> EntryId | None:
        """The last entry that was written, stored or not; ``None`` for no topic.

        Where all is trimmed, the broker forgets it when it loads the topic anew: then it is the
        place before the first entry of the ledger that is written to.
        """

    def held_back_behind(self, topic_partition: TopicPartition) -> EntryId | None:
        """The last entry that is shown to anybody, where an open transaction holds back the rest.

        ``None`` where none does, and where that is not told.

        Raises:
            BrokerUnavailableError: The broker does not know it, because it is still loading the
                topic; or has not begun to, which :meth:`ledgers` makes it do (retriable).
        """

    def position_at(self, topic_partition: TopicPartition, time_ms: int) -> EntryId | None:
        """A position at which times pass a moment; ``None`` for no topic.

        The entry before it, if there is one, is of an earlier time, and the entry at it, if it
        exists yet, is not. Where times are not in the order of entries, that holds at several
        positions, and this is any of them. The time is the broker's where it adds one to entries,
        else the publish time.
        """

    def begin(
        self, topic_partition: TopicPartition, subscription: str, position: MessageId
    ) -> bool:
        """Create a subscription that begins at an entry; ``False`` where it exists already.

        Where nothing is stored at the position it begins at what comes next. A position inside a
        producer batch becomes its property :data:`BEGINS`, which lasts as long as it does: by
        itself the broker delivers the entry from its first message on.
        """

    def begins_whole(self, topic_partition: TopicPartition, subscription: str) -> None:
        """Take the property :data:`BEGINS` from a subscription; it keeps its others."""

    def unacknowledged_limits(self, topic: str) -> tuple[int, int]: ...

    def schema(self, topic: str, version: int | None = None) -> TopicSchema | None:
        """A version of the schema of a topic, by default the newest; ``None`` where none is."""

    def close(self) -> None: ...
