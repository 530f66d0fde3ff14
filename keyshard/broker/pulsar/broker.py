"""The broker port on pulsar-client.

Two rules of this client shape the file: ids are unhashable and compare inconsistently, so they
become plain integers on arrival; and an id built by hand acknowledges its whole entry, from any
consumer of the subscription on that topic partition.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import _pulsar
import pulsar

from keyshard.arrow.content import pack
from keyshard.arrow.metadata import TIME_MS_MAX, readable_times
from keyshard.broker.port import StartPosition
from keyshard.broker.pulsar.at_exit import close_at_exit
from keyshard.broker.pulsar.calls import Calls, calls_of
from keyshard.broker.pulsar.client import client_of
from keyshard.broker.pulsar.client_log import close_client
from keyshard.broker.pulsar.credentials import Credentials
from keyshard.broker.pulsar.errors import UNAVAILABLE, translated
from keyshard.broker.pulsar.first_question import missing_topics
from keyshard.broker.pulsar.producer import PulsarProducer
from keyshard.broker.pulsar.refusals import lacks
from keyshard.config.connection import Connection
from keyshard.core.position.entry import EntryBlock, EntryId, Part, TopicPartition
from keyshard.core.ring.hash_range import HashRange
from keyshard.core.ring.key_slot import slots_of
from keyshard.core.window.client_queue import POLLED_MAX
from keyshard.errors import BrokerError, BrokerUnavailableError, ChunkedMessageError

RECEIVE_WAIT_MS = 10
"""One round of the client's batch receive when its queue is not full, milliseconds."""
RECEIVE_BYTES_MAX = 4 * 1024 * 1024
"""Payload bytes one round takes at most."""
READ_MESSAGES_MAX = 1_000
"""Messages one :meth:`PulsarReader.read` returns at most."""
ENTRIES_AT_ONCE = 40
"""Entries after which other threads are let in: who waits for the interpreter, such as a handler
that has slept, would else do so for the switch interval of 5 ms. Several receive threads that let
each other in more often only cost time."""

NOT_TEXT = "__notText"
"""Property in place of all those of a message that has one that is no text: the client tells only
the first of them."""

_Message = _pulsar.Message
_BATCH_SIZE_TAG = 6 << 3
"""Tag byte of field 6, ``batch_size``, a varint."""
_FIRST_CHUNK_TAG = 7 << 3 | 2
"""Tag byte of field 7, ``first_chunk_message_id``, a message."""


class _IdFacts(NamedTuple):
    batch_size: int
    chunked: bool


def _id_facts(data: bytes) -> _IdFacts:
    """Read what a message id tells only in its serialized form (``MessageIdData`` of PulsarApi).

    The fields before them are varints (ledger 1, entry 2, partition 3, batch_index 4) and packed or
    single varints of the ack set (5).
    """
    if data[-2] == _BATCH_SIZE_TAG and data[-1] < 0x80 and _FIRST_CHUNK_TAG not in data:
        # The value is one byte, because the byte before it is no part of a longer one.
        return _IdFacts(max(1, data[-1]), chunked=False)
    batch_size, position, end = 1, 0, len(data)
    while position < end:
        field, wire = data[position] >> 3, data[position] & 7
        position += 1
        if field == _FIRST_CHUNK_TAG >> 3:
            return _IdFacts(batch_size, chunked=True)
        value = shift = 0
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
        if wire == 2:
            position += value
        elif field == _BATCH_SIZE_TAG >> 3:
            batch_size = max(1, value)
    return _IdFacts(batch_size, chunked=False)


def _to_blocks(
    messages: Sequence[Any], where: TopicPartition, came_to: HashRange | None = None
) -> list[EntryBlock]:
    """Group messages, in delivery order, into blocks of neighbouring messages of one entry.

    Args:
        messages: What a consumer or Reader handed out.
        where: Its topic partition.
        came_to: The consumer's range; ``None`` for a Reader.

    Messages are the extension's own objects: the Python wrapper around each costs as much as all
    its getters together.
    """
    if not messages:
        return []
    values = list(map(_Message.data, messages))
    partition_keys, ordering_keys, routing_keys, event_ms, publish_ms, properties, unreadable = (
        _metadata(messages)
    )
    content = pack(
        values,
        [key or None for key in partition_keys] if "" in partition_keys else partition_keys,
        ordering_keys,
        event_ms,
        properties,
    )
    sizes = list(map(len, values))
    blocks: list[EntryBlock] = []
    position, end = 0, len(messages)
    while position < end:
        first = messages[position]
        first_id = first.message_id()
        facts = _id_facts(first_id.serialize())
        entry_id = EntryId(first_id.ledger_id(), first_id.entry_id())
        if facts.chunked:
            raise _chunked(where, entry_id)
        index = first_id.batch_index()
        indices: Sequence[int] = range(1)
        if index >= 0:
            indices = _indices(messages, position, entry_id, index, facts.batch_size)
        stop = position + len(indices)
        slot, mixed_slots, keys_of_bytes = slots_of(
            routing_keys[position:stop], None if ordering_keys[position] else came_to
        )
        blocks.append(
            EntryBlock(
                entry_id,
                facts.batch_size,
                index >= 0,
                indices,
                slot,
                mixed_slots,
                publish_ms[position],
                sum(sizes[position:stop]),
                (Part(content, position, stop - position),),
                first.redelivery_count() > 0,
                keys_of_bytes,
                sum(unreadable[position:stop]) if unreadable else 0,
            )
        )
        position = stop
        if not len(blocks) % ENTRIES_AT_ONCE:
            time.sleep(0)
    return blocks


class _Metadata(NamedTuple):
    """What some messages say about themselves, one value for each."""

    partition_keys: list[str]
    """Empty for none, as ordering keys are."""
    ordering_keys: list[str]
    routing_keys: list[str | bytes | None]
    """What the broker hashes: of an ordering key that is no text its bytes."""
    event_ms: list[int]
    publish_ms: list[int]
    properties: list[dict[str, str]]
    unreadable: list[bool]
    """Whether something had to be made readable; empty where nothing had."""


def _metadata(messages: Sequence[Any]) -> _Metadata:
    """Metadata of messages, made readable where it is not."""
    unreadable: list[bool] = []
    try:
        partition_keys = list(map(_Message.partition_key, messages))
        ordering_keys = list(map(_Message.ordering_key, messages))
        properties = list(map(_Message.properties, messages))
        routing_keys: list[str | bytes | None] = [
            ordering or partition or None
            for ordering, partition in zip(ordering_keys, partition_keys, strict=True)
        ]
    except UnicodeDecodeError:
        found = [
            [_readable(getter, message) for message in messages]
            for getter in (_Message.partition_key, _Message.ordering_key, _Message.properties)
        ]
        partition_keys, ordering_keys, properties = ([value for value, _ in one] for one in found)
        routing_keys = [
            ordering_bytes or ordering or partition or None
            for (ordering, ordering_bytes), partition in zip(found[1], partition_keys, strict=True)
        ]
        unreadable = [any(wrong for _, wrong in row) for row in zip(*found, strict=True)]
    event_ms = list(map(_Message.event_timestamp, messages))
    publish_ms = list(map(_Message.publish_timestamp, messages))
    if max(event_ms) >= TIME_MS_MAX or max(publish_ms) >= TIME_MS_MAX:
        event_ms, publish_ms, properties, wrong = readable_times(event_ms, publish_ms, properties)
        unreadable = [a or b for a, b in zip(wrong, unreadable or wrong, strict=True)]
    return _Metadata(
        partition_keys, ordering_keys, routing_keys, event_ms, publish_ms, properties, unreadable
    )


def _readable(getter: Callable[[Any], Any], message: Any) -> tuple[Any, bytes]:
    """What a getter says, and its bytes if they were no text.

    Broken bytes are replaced, as the broker does before it hashes a partition key.
    """
    try:
        return getter(message), b""
    except UnicodeDecodeError as exc:
        text = exc.object.decode(errors="replace")
        return {NOT_TEXT: text} if getter is _Message.properties else text, exc.object


def _indices(
    messages: Sequence[Any], position: int, entry_id: EntryId, index: int, batch_size: int
) -> Sequence[int]:
    """Batch indices of the messages from ``position`` on that are of one entry, ascending.

    The client hands out an entry in one piece. If the message where it should end has the right
    index, all between are of this entry, and only two ids are looked at instead of all.
    """
    length = min(batch_size - index, len(messages) - position)
    if length == 1:
        return range(index, index + 1)
    last = messages[position + length - 1].message_id()
    if (
        last.batch_index() == index + length - 1
        and last.entry_id() == entry_id.entry
        and last.ledger_id() == entry_id.ledger
    ):
        return range(index, index + length)
    indices = [index]
    for message in messages[position + 1 : position + batch_size]:
        other = message.message_id()
        same = other.entry_id() == entry_id.entry and other.ledger_id() == entry_id.ledger
        if not same or other.batch_index() <= indices[-1]:
            break
        indices.append(other.batch_index())
    return indices


def _chunked(where: TopicPartition, entry_id: EntryId) -> ChunkedMessageError:
    return ChunkedMessageError(
        f"Message {entry_id.ledger}:{entry_id.entry} of {where} is chunked. keyshard commits whole "
        "entries and a chunked message is several; nothing of it was acknowledged. Switch chunking "
        "off at the producer or raise the broker's maxMessageSize.",
        topic_partition=where.name,
        ledger=entry_id.ledger,
        entry=entry_id.entry,
    )


class PulsarConsumer:
    """One plain single-topic consumer: it clears its queue on a reconnect."""

    def __init__(
        self,
        consumer: pulsar.Consumer,
        topic_partition: TopicPartition,
        hash_range: HashRange,
        queue: int,
        calls: Calls,
    ) -> None:
        self._consumer = consumer
        self._calls = calls
        self._raw = consumer._consumer
        self._topic_partition = topic_partition
        self._hash_range = hash_range
        self._queue = queue
        self._first: deque[Any] = deque()
        self._closed = False

    @property
    def topic_partition(self) -> TopicPartition:
        return self._topic_partition

    @property
    def hash_range(self) -> HashRange:
        return self._hash_range

    def receive(self, timeout_ms: int) -> list[EntryBlock]:
        deadline = time.monotonic() + timeout_ms / 1000
        with translated("receive from", self._topic_partition):
            # Alone: a reconnect may lie between it and what is in the client's queue now.
            messages = self._take_first()
            if not messages:
                polled = self._queue <= POLLED_MAX
                messages = self._poll() if polled else self._batch()
            while not messages and time.monotonic() + RECEIVE_WAIT_MS / 1000 < deadline:
                messages = self._batch()
        return _to_blocks(messages, self._topic_partition, self._hash_range)

    def _batch(self) -> list[Any]:
        """One round of the client's batch receive."""
        with self._calls.inside():
            messages: list[Any] = self._raw.batch_receive()
        return messages

    def _poll(self) -> list[Any]:
        """What is in the client's queue, without waiting."""
        messages: list[Any] = []
        with self._calls.inside(), suppress(pulsar.Timeout):
            while len(messages) < self._queue:
                messages.append(self._raw.receive(0))
        return messages

    def when_ready(self, callback: Callable[[], None]) -> None:
        def arrived(result: pulsar.Result, message: Any) -> None:
            # On the client's thread. A result other than Ok says that the consumer is closed.
            if result == pulsar.Result.Ok:
                self._first.append(message)
            if not self._closed:
                callback()

        with translated("receive from", self._topic_partition):
            self._raw.receive_async(self._calls.lent(arrived))

    def _take_first(self) -> list[Any]:
        """What :meth:`when_ready` took from the client's queue; it is older than the rest of it."""
        return [self._first.popleft() for _ in range(len(self._first))]

    def acknowledge(self, entries: Sequence[EntryId]) -> None:
        partition = self._topic_partition.partition
        acknowledge, message_id = self._raw.acknowledge, _pulsar.MessageId
        with translated("acknowledge in", self._topic_partition), self._calls.inside():
            for ledger, entry in entries:
                acknowledge(message_id(partition, ledger, entry, -1))

    def last_entry(self) -> EntryId | None:
        with translated("ask for the last entry of", self._topic_partition):
            last = self._calls.answer_of(self._raw.get_last_message_id_async)
        return EntryId(last.ledger_id(), last.entry_id()) if last.entry_id() >= 0 else None

    def is_connected(self) -> bool:
        return not self._closed and bool(self._consumer.is_connected())

    def close(self, *, for_another: bool = False) -> None:  # noqa: ARG002 - the broker cannot know
        if self._closed:
            return
        self._closed = True
        with translated("close", self._topic_partition), suppress(pulsar.AlreadyClosed):
            self._consumer.close()


class PulsarReader:
    """A plain Reader; the client offers no batch receive for it."""

    def __init__(
        self, reader: pulsar.Reader, topic_partition: TopicPartition, calls: Calls
    ) -> None:
        self._reader = reader
        self._calls = calls
        self._raw = reader._reader
        self._topic_partition = topic_partition
        self._closed = False
        self._stayed_connected = True

    def read(self, timeout_ms: int) -> list[EntryBlock]:
        messages: list[Any] = []
        wait_ms = timeout_ms
        with translated("read from", self._topic_partition), self._calls.inside():
            try:
                while len(messages) < READ_MESSAGES_MAX:
                    messages.append(self._raw.read_next(wait_ms))
                    wait_ms = 1
            except pulsar.Timeout:
                pass
        return _to_blocks(messages, self._topic_partition)

    def at_end(self) -> bool:
        with translated("look for the end of", self._topic_partition):
            return not self._calls.answer_of(self._raw.has_message_available_async)

    def stayed_connected(self) -> bool:
        # The client tells no more than whether it has one now; it takes 90 ms to get another.
        self._stayed_connected = self._stayed_connected and bool(self._raw.is_connected())
        return self._stayed_connected

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with translated("close", self._topic_partition), suppress(pulsar.AlreadyClosed):
            self._reader.close()


class PulsarBroker:
    """A connection to a Pulsar cluster.

    Args:
        connection: How the cluster is reached.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._service_url = connection.service_url
        self._credentials = Credentials(connection)
        with translated("connect to", self._service_url):
            self._client = client_of(connection, self._credentials)
        self._calls = calls_of(self._client)
        self._closed = False
        close_at_exit(self)

    def missing(self, topics: Sequence[str]) -> frozenset[str]:
        return missing_topics(self._connection, self._credentials, topics)

    def partitions(self, topic: str) -> tuple[TopicPartition, ...]:
        where = f"{topic} at {self._service_url}"
        with translated("look up", where), self._explained("consume", topic):
            names = self._client.get_topic_partitions(topic)
            if not names:
                # What the client gives when it lost the connection while it asked.
                raise pulsar.NotConnected("the connection was lost")
        return tuple(sorted(TopicPartition.parse(name) for name in names))

    def subscribe(
        self,
        topic_partition: TopicPartition,
        subscription: str,
        hash_range: HashRange,
        *,
        start: StartPosition,
        consumer_name: str,
        receiver_queue_size: int,
    ) -> PulsarConsumer:
        position = (
            pulsar.InitialPosition.Earliest
            if start is StartPosition.EARLIEST
            else pulsar.InitialPosition.Latest
        )
        what = f"{topic_partition} as {subscription!r} [{hash_range}]"
        with translated("subscribe to", what), self._explained("consume", topic_partition.topic):
            consumer = self._client.subscribe(
                topic_partition.name,
                subscription,
                consumer_type=pulsar.ConsumerType.KeyShared,
                consumer_name=consumer_name,
                receiver_queue_size=receiver_queue_size,
                initial_position=position,
                key_shared_policy=pulsar.ConsumerKeySharedPolicy(
                    pulsar.KeySharedMode.Sticky,
                    sticky_ranges=[(hash_range.start, hash_range.end)],
                ),
                batch_receive_policy=pulsar.ConsumerBatchReceivePolicy(
                    receiver_queue_size, RECEIVE_BYTES_MAX, RECEIVE_WAIT_MS
                ),
            )
        return PulsarConsumer(
            consumer, topic_partition, hash_range, receiver_queue_size, self._calls
        )

    def reader(self, topic_partition: TopicPartition, start: EntryId) -> PulsarReader:
        topic = topic_partition.topic
        with translated("open a reader on", topic_partition), self._explained("consume", topic):
            reader = self._client.create_reader(
                topic_partition.name,
                _pulsar.MessageId(topic_partition.partition, start.ledger, start.entry, -1),
                start_message_id_inclusive=True,
            )
        return PulsarReader(reader, topic_partition, self._calls)

    def producer(self, topic_partition: TopicPartition, *, send_timeout_ms: int) -> PulsarProducer:
        topic = topic_partition.topic
        with translated("open a producer on", topic_partition), self._explained("produce", topic):
            producer = self._client.create_producer(
                topic_partition.name,
                batching_enabled=False,
                block_if_queue_full=True,
                send_timeout_millis=send_timeout_ms,
            )
        return PulsarProducer(producer, topic_partition, self._calls)

    @contextmanager
    def _explained(self, permission: str, topic: str) -> Iterator[None]:
        """The client knows no role, and says of who is not let in that time is up."""
        try:
            yield
        except pulsar.AuthorizationError as exc:
            raise lacks(self._credentials.who(), permission, topic) from exc
        except UNAVAILABLE as exc:
            if self._connection.tls or self._connection.authentication is not None:
                try:
                    self.missing(())
                except BrokerError as why:
                    # A token may be renewed: who asks decides how long that is waited for.
                    raise BrokerUnavailableError(why.message) from exc
            raise

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with translated("disconnect from", self._service_url), suppress(pulsar.AlreadyClosed):
            close_client(self._client)
