"""The broker port on pulsar-client."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress

import _pulsar
import pulsar

from keyshard.broker.port import ANYHOW, HowToRead, StartPosition, WorkerFacts
from keyshard.broker.pulsar.at_exit import close_at_exit
from keyshard.broker.pulsar.calls import calls_of
from keyshard.broker.pulsar.client import client_of
from keyshard.broker.pulsar.client_log import close_client
from keyshard.broker.pulsar.consumer import (
    RECEIVE_BYTES_MAX,
    RECEIVE_WAIT_MS,
    PulsarConsumer,
    PulsarReader,
)
from keyshard.broker.pulsar.credentials import Credentials
from keyshard.broker.pulsar.errors import UNAVAILABLE, translated
from keyshard.broker.pulsar.first_question import missing_topics
from keyshard.broker.pulsar.producer import PulsarProducer
from keyshard.broker.pulsar.refusals import lacks
from keyshard.config.connection import Connection
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.ring.hash_range import HashRange
from keyshard.errors import BrokerError, BrokerUnavailableError


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
        receiver_queue_bytes: int | None = None,  # noqa: ARG002 - its queue counts messages
        columns: Collection[str] | None = None,
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
                crypto_failure_action=pulsar.ConsumerCryptoFailureAction.CONSUME,
            )
        return PulsarConsumer(
            consumer, topic_partition, hash_range, receiver_queue_size, self._calls, columns=columns
        )

    def reader(
        self, topic_partition: TopicPartition, start: EntryId, how: HowToRead = ANYHOW
    ) -> PulsarReader:
        topic = topic_partition.topic
        with translated("open a reader on", topic_partition), self._explained("consume", topic):
            reader = self._client.create_reader(
                topic_partition.name,
                _pulsar.MessageId(topic_partition.partition, start.ledger, start.entry, -1),
                receiver_queue_size=how.receiver_queue_size,
                start_message_id_inclusive=True,
                crypto_failure_action=pulsar.ConsumerCryptoFailureAction.CONSUME,
            )
        return PulsarReader(reader, topic_partition, self._calls, how)

    def workers(self) -> tuple[WorkerFacts, ...]:
        return ()

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
        """The client knows no role, and says of whom or what the broker refuses that time is up."""
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
                    # A token may be renewed: who asks decides how long that is waited for.
                    raise BrokerUnavailableError(why.message) from exc
            if listener:
                raise BrokerUnavailableError(
                    f"{topic} cannot be reached, though the broker answers: {exc}. Check that "
                    f"listener_name {listener!r} is one of its advertisedListeners."
                ) from exc
            raise

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        # A broker that was started again does not know a consumer of before: that one is closed,
        # as are those whose connection is lost meanwhile.
        gone = suppress(pulsar.AlreadyClosed, pulsar.BrokerMetadataError, pulsar.NotConnected)
        with translated("disconnect from", self._service_url), gone:
            close_client(self._client)
