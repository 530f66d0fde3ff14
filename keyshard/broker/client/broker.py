"""The broker port on pulsar-client."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import _pulsar
import pulsar

from keyshard.broker.at_exit import close_at_exit
from keyshard.broker.auth.credentials import Credentials
from keyshard.broker.auth.errors import lacks
from keyshard.broker.client.calls import Calls, calls_of
from keyshard.broker.client.connection import client_of
from keyshard.broker.client.consumer import (
    RECEIVE_BYTES_MAX,
    RECEIVE_WAIT_MS,
    ClientConsumer,
    ClientReader,
)
from keyshard.broker.client.errors import UNAVAILABLE, translated
from keyshard.broker.client.log import close_client
from keyshard.broker.port import (
    DEFAULT_READ_OPTIONS,
    EntryProducer,
    PublishOptions,
    ReadOptions,
    StartPosition,
    SubscriptionSpec,
)
from keyshard.broker.preflight import missing_topics
from keyshard.broker.reports import SegmentWatch, WorkerFacts
from keyshard.config.connection import Connection
from keyshard.core.message import MessageId
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.errors import BrokerError, BrokerUnavailableError, ConfigError


class ClientBroker:
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

    def partitions(self, topic: str, *, create: bool = False) -> tuple[TopicPartition, ...]:
        if not create and self._is_missing(topic):
            return (TopicPartition.parse(topic),)
        where = f"{topic} at {self._service_url}"
        with translated("look up", where), self._explained("consume", topic):
            names = self._client.get_topic_partitions(topic)
            if not names:
                # The client returns an empty list if it loses the connection during the request.
                raise pulsar.NotConnected("the connection was lost")
        return tuple(sorted(TopicPartition.parse(name) for name in names))

    def _is_missing(self, topic: str) -> bool:
        """Whether the client would create a topic; ``False`` if no broker answers."""
        try:
            return bool(self.missing([topic]))
        except BrokerUnavailableError:
            return False  # the caller's next request fails, with the reason

    def watch_topics(
        self,
        prefix: str,
        changed: Callable[[Collection[str]], None],
    ) -> None:
        """Report nothing: the client cannot."""

    def watch_segments(self, topic: str, changed: Callable[[], None]) -> SegmentWatch:  # noqa: ARG002
        raise ConfigError(
            f"pulsar-client cannot consume {topic}, which is a scalable topic.",
            "Set transport to wire.",
        )

    def begin(
        self,
        topic_partition: TopicPartition,
        subscription: str,
        start: MessageId | int,  # noqa: ARG002 - pulsar-client moves only cursors of its consumers
        batch_size: int = 1,  # noqa: ARG002
    ) -> EntryId:
        raise ConfigError(
            f"pulsar-client cannot move subscription {subscription!r} of {topic_partition}.",
            "Set transport to wire.",
        )

    def subscribe(self, spec: SubscriptionSpec, start: StartPosition) -> ClientConsumer:
        position = (
            pulsar.InitialPosition.Earliest
            if start is StartPosition.EARLIEST
            else pulsar.InitialPosition.Latest
        )
        where, hash_range, size = spec.topic_partition, spec.hash_range, spec.receiver_queue_size
        what = f"{where} as {spec.subscription!r} [{hash_range}]"
        with translated("subscribe to", what), self._explained("consume", where.topic):
            consumer = self._client.subscribe(
                where.name,
                spec.subscription,
                consumer_type=pulsar.ConsumerType.KeyShared,
                consumer_name=spec.consumer_name,
                receiver_queue_size=size,
                initial_position=position,
                key_shared_policy=pulsar.ConsumerKeySharedPolicy(
                    pulsar.KeySharedMode.Sticky,
                    sticky_ranges=[(hash_range.start, hash_range.end)],
                ),
                batch_receive_policy=pulsar.ConsumerBatchReceivePolicy(
                    size, RECEIVE_BYTES_MAX, RECEIVE_WAIT_MS
                ),
                crypto_failure_action=pulsar.ConsumerCryptoFailureAction.CONSUME,
            )
        return ClientConsumer(consumer, spec, self._calls)

    def reader(
        self,
        topic_partition: TopicPartition,
        start: EntryId,
        how: ReadOptions = DEFAULT_READ_OPTIONS,
    ) -> ClientReader:
        topic = topic_partition.topic
        with translated("open a reader on", topic_partition), self._explained("consume", topic):
            if topic_partition.partition < 0 and self._is_missing(topic):
                raise pulsar.TopicNotFound
            reader = self._client.create_reader(
                topic_partition.name,
                _pulsar.MessageId(topic_partition.partition, start.ledger, start.entry, -1),
                receiver_queue_size=how.receiver_queue_size,
                start_message_id_inclusive=True,
                crypto_failure_action=pulsar.ConsumerCryptoFailureAction.CONSUME,
            )
        return ClientReader(reader, topic_partition, self._calls, how)

    def workers(self) -> tuple[WorkerFacts, ...]:
        return ()

    def producer(self, topic_partition: TopicPartition, *, send_timeout_ms: int) -> ClientProducer:
        topic = topic_partition.topic
        with translated("open a producer on", topic_partition), self._explained("produce", topic):
            producer = self._client.create_producer(
                topic_partition.name,
                batching_enabled=False,
                block_if_queue_full=True,
                send_timeout_millis=send_timeout_ms,
            )
        return ClientProducer(producer, topic_partition, self._calls)

    def entry_producer(
        self,
        topic_partition: TopicPartition,
        how: PublishOptions,  # noqa: ARG002 - it is refused
    ) -> EntryProducer:
        raise ConfigError(
            f"Entries cannot be published to {topic_partition} with transport 'client': "
            "pulsar-client sends no highest sequence id, so the broker cannot find duplicates.",
            "Leave transport out, or use 'wire'.",
        )

    @contextmanager
    def _explained(self, permission: str, topic: str) -> Iterator[None]:
        """Explain the client's errors, which name no role and report refusals as timeouts."""
        try:
            yield
        except pulsar.AuthorizationError as exc:
            raise lacks(self._credentials.who(), permission, topic) from exc
        except UNAVAILABLE as exc:
            listener = self._connection.listener_name
            if self._connection.tls or self._connection.authentication is not None or listener:
                try:
                    self.missing(())
                except BrokerError as why:
                    # Retriable, because a token may be renewed. The caller limits the wait.
                    raise BrokerUnavailableError(why.problem, why.remedy) from exc
            if listener:
                raise BrokerUnavailableError(
                    f"The broker answers, but {topic} cannot be reached: {exc}.",
                    f"Check that listener_name {listener!r} is one of its advertisedListeners.",
                ) from exc
            raise

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        # A restarted broker does not know consumers from before the restart, and a connection may
        # be lost meanwhile. Both count as closed.
        gone = suppress(pulsar.AlreadyClosed, pulsar.BrokerMetadataError, pulsar.NotConnected)
        with translated("disconnect from", self._service_url), gone:
            close_client(self._client)


class ClientProducer:
    """Sends one message after the other, without batching."""

    def __init__(
        self, producer: pulsar.Producer, topic_partition: TopicPartition, calls: Calls
    ) -> None:
        self._producer = producer
        self._calls = calls
        self._topic_partition = topic_partition
        self._closed = False

    def send(
        self,
        value: bytes | None,
        *,
        key: str | None = None,
        ordering_key: str | None = None,
        properties: Mapping[str, str] | None = None,
        event_ms: int = 0,
    ) -> EntryId:
        with translated("send to", self._topic_partition):
            message = _message(value, key, ordering_key, properties or {}, event_ms)
            sent = self._calls.answer_of(
                lambda take: self._producer._producer.send_async(message, take)
            )
            if sent.entry_id() < 0:
                # The client returns this if it lost the connection for good during the wait.
                raise pulsar.NotConnected("the connection was lost")
        return EntryId(sent.ledger_id(), sent.entry_id())

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with translated("close", self._topic_partition), suppress(pulsar.AlreadyClosed):
            self._producer.close()


def _message(
    value: bytes | None,
    key: str | None,
    ordering_key: str | None,
    properties: Mapping[str, str],
    event_ms: int,
) -> Any:
    """Build a message with the extension's builder, whose Python wrapper drops an empty key."""
    builder = _pulsar.MessageBuilder()
    if value is None:
        builder.set_null_value()
    else:
        builder.content(value)
    if key is not None:
        builder.partition_key(key)
    if ordering_key is not None:
        builder.ordering_key(ordering_key)
    for name, text in properties.items():
        builder.property(name, text)
    if event_ms:
        builder.event_timestamp(event_ms)
    return builder.build()
