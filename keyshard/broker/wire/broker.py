"""The broker port on Pulsar's binary protocol.

Consuming, acknowledging, reading and look-ups are spoken here. What is produced goes through
pulsar-client, which is opened when something is.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from keyshard.broker.port import ANYHOW, HowToRead, Producer, StartPosition, WorkerFacts
from keyshard.broker.pulsar.at_exit import close_at_exit
from keyshard.broker.pulsar.credentials import Credentials, warn_of_secrets_in_the_clear
from keyshard.broker.pulsar.first_question import missing_topics
from keyshard.broker.retrier import Retrier
from keyshard.broker.wire.cluster import Cluster
from keyshard.broker.wire.consumer import (
    CONFIRM_S,
    WireConsumer,
    WireReader,
    warn_of_unconfirmed,
)
from keyshard.broker.wire.errors import RefusedError, error_of
from keyshard.broker.wire.subscribed import RETRY_S, Shared, Subscribed
from keyshard.config.connection import Connection
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.ring.hash_range import HashRange
from keyshard.core.window.client_queue import SentAhead
from keyshard.errors import BrokerError, BrokerUnavailableError

if TYPE_CHECKING:
    from keyshard.broker.pulsar.broker import PulsarBroker

LEAVE_S = 2.0
"""Longest wait for threads at the end, seconds."""
CLOSE_S = 3.0
"""Longest wait for the broker's answers to an orderly end; then connections are cut, seconds."""
NUDGE_LONGEST_WAIT_S = 60.0
"""Longest wait between two words to a broker that sends nothing, seconds."""
UNLIMITED_BYTES = 1 << 60

_log = logging.getLogger(__name__)


class WireBroker:
    """A connection to a Pulsar cluster.

    Args:
        connection: How the cluster is reached.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._credentials = Credentials(connection)
        self._shared = Shared(
            Cluster(connection, self._credentials),
            Retrier(),
            Retrier(longest_wait_s=NUDGE_LONGEST_WAIT_S, lane_threads_max=1),
            self._credentials,
            connection.operation_timeout_ms / 1000,
        )
        self._lock = threading.Lock()
        self._handles: weakref.WeakSet[Subscribed] = weakref.WeakSet()
        self._client: PulsarBroker | None = None
        self._closed = False
        warn_of_secrets_in_the_clear(connection)
        close_at_exit(self)

    def workers(self) -> tuple[WorkerFacts, ...]:
        return ()

    def missing(self, topics: Sequence[str]) -> frozenset[str]:
        return missing_topics(self._connection, self._credentials, topics)

    def partitions(self, topic: str) -> tuple[TopicPartition, ...]:
        end_s = time.monotonic() + self._shared.timeout_s
        while True:
            try:
                count = self._shared.cluster.partitions(topic, max(0.001, end_s - time.monotonic()))
                break
            except RefusedError as exc:
                error = error_of(exc, "look up", topic, topic, self._credentials.who())
                if not error.retriable or time.monotonic() + RETRY_S >= end_s:
                    raise error from exc
            except BrokerUnavailableError:
                if time.monotonic() + RETRY_S >= end_s:
                    raise
            time.sleep(RETRY_S)
        if not count:
            return (TopicPartition.parse(topic),)
        return tuple(TopicPartition(topic, number) for number in range(count))

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
    ) -> WireConsumer:
        queue = (
            SentAhead(receiver_queue_size, UNLIMITED_BYTES, receiver_queue_size)
            if receiver_queue_bytes is None
            else SentAhead(receiver_queue_size, receiver_queue_bytes)
        )
        consumer = WireConsumer(
            self._shared,
            topic_partition,
            queue,
            hash_range=hash_range,
            subscription=subscription,
            consumer_name=consumer_name,
            latest=start is StartPosition.LATEST,
            columns=columns,
            hand_on=self._acknowledge_by_another,
        )
        self._open(consumer)
        return consumer

    def reader(
        self, topic_partition: TopicPartition, start: EntryId, how: HowToRead = ANYHOW
    ) -> WireReader:
        reader = WireReader(self._shared, topic_partition, start, how)
        self._open(reader)
        return reader

    def producer(self, topic_partition: TopicPartition, *, send_timeout_ms: int) -> Producer:
        from keyshard.broker.pulsar.broker import PulsarBroker  # noqa: PLC0415

        with self._lock:
            self._check_open()
            self._client = self._client or PulsarBroker(self._connection)
            client = self._client
        return client.producer(topic_partition, send_timeout_ms=send_timeout_ms)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            handles = list(self._handles)
        end_s = time.monotonic() + CONFIRM_S
        left = sum(one.unconfirmed(max(0.0, end_s - time.monotonic())) for one in handles)
        if left:
            warn_of_unconfirmed(left, "this connection")
        self._shared.reconnects.close()
        self._shared.nudges.close()
        end_s = time.monotonic() + CLOSE_S
        for handle in handles:
            try:
                handle.close(max(0.001, end_s - time.monotonic()))
            except BrokerError as exc:  # noqa: PERF203 - the others are closed all the same
                _log.debug("closing what is open on %s: %s", handle.topic_partition, exc)
        self._shared.cluster.close(LEAVE_S)
        self._shared.reconnects.join(LEAVE_S)
        self._shared.nudges.join(LEAVE_S)
        if self._client is not None:
            self._client.close()

    def _acknowledge_by_another(self, closed: WireConsumer, entries: Sequence[EntryId]) -> None:
        with self._lock:
            handles = list(self._handles)
        for one in handles:
            if one is not closed and isinstance(one, WireConsumer) and one.stands_in_for(closed):
                with suppress(BrokerError):
                    one.acknowledge(entries)
                    return

    def _open(self, handle: Subscribed) -> None:
        with self._lock:
            self._check_open()
            self._handles.add(handle)
        handle.open()

    def _check_open(self) -> None:
        if self._closed:
            raise BrokerError(f"The connection to {self._connection.service_url} is closed.")
