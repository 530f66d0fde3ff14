"""The broker port on Pulsar's binary protocol.

This package consumes, acknowledges, reads, looks topics up, and publishes.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

from keyshard.broker.at_exit import close_at_exit
from keyshard.broker.auth.credentials import Credentials, warn_of_secrets_in_the_clear
from keyshard.broker.auth.errors import EITHER
from keyshard.broker.port import (
    DEFAULT_READ_OPTIONS,
    Producer,
    PublishOptions,
    ReadOptions,
    StartPosition,
    SubscriptionSpec,
)
from keyshard.broker.preflight import missing_topics
from keyshard.broker.reports import TopicWatch, WorkerFacts
from keyshard.broker.retry import Retrier
from keyshard.broker.wire.beginning import WireBeginning
from keyshard.broker.wire.connection_pool import ConnectionPool
from keyshard.broker.wire.consumer import (
    CONFIRM_S,
    WireConsumer,
    WireReader,
    warn_of_unconfirmed,
)
from keyshard.broker.wire.errors import TOPIC_NOT_FOUND, RefusedError, error_of
from keyshard.broker.wire.producer import WireProducer
from keyshard.broker.wire.reconnect import Shared, first_answer
from keyshard.broker.wire.scalable_watches import ABSENT, ScalableWatches, WireSegmentWatch
from keyshard.columns.outgoing import OutgoingMessage
from keyshard.config.connection import Connection
from keyshard.core.message import MessageId
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.topic_segments import SCALABLE
from keyshard.errors import (
    BrokerError,
    BrokerUnavailableError,
    KeyShardError,
    TopicNotFoundError,
)

WATCH_S = 5.0
"""Longest wait for the opening of a watch, seconds."""
LEAVE_S = 2.0
"""Longest wait for threads at the end, seconds."""
CLOSE_S = 3.0
"""Longest wait for the broker's answers at a close, seconds. Then the connections are cut."""
NUDGE_LONGEST_WAIT_S = 60.0
"""Longest wait between two nudges to a silent broker, seconds."""

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
            ConnectionPool(connection, self._credentials),
            Retrier(),
            Retrier(longest_wait_s=NUDGE_LONGEST_WAIT_S, lane_threads_max=1),
            self._credentials,
            connection.operation_timeout_ms / 1000,
        )
        self._segments = ScalableWatches(self._shared.pool)
        self._namespaces = ScalableWatches(self._shared.pool)
        # Not one for both: the list of a large namespace may end its connection.
        self._lock = threading.Lock()
        self._handles: weakref.WeakSet[WireConsumer | WireReader | WireProducer] = weakref.WeakSet()
        self._closed = False
        warn_of_secrets_in_the_clear(connection)
        close_at_exit(self)

    def workers(self) -> tuple[WorkerFacts, ...]:
        return ()

    def missing(self, topics: Sequence[str]) -> frozenset[str]:
        return missing_topics(self._connection, self._credentials, topics)

    def partitions(self, topic: str, *, create: bool = False) -> tuple[TopicPartition, ...]:
        reason: KeyShardError | None = None

        def attempt(left_s: float) -> int:
            nonlocal reason
            try:
                return self._shared.pool.partitions(topic, left_s, create=create)
            except RefusedError as exc:
                if exc.code == TOPIC_NOT_FOUND and not create:
                    return 0
                who = self._credentials.who()
                raise error_of(exc, "look up", topic, topic, who, permission=EITHER) from exc
            except BrokerUnavailableError as exc:
                if self._shared.pool.has_connected:
                    raise
                reason = reason or self._why_no_host_answers()
                raise reason or exc from exc

        count = first_answer(attempt, lambda error: error.retriable, self._shared.timeout_s)
        if not count:
            return (TopicPartition.parse(topic),)
        return tuple(TopicPartition(topic, number) for number in range(count))

    def _why_no_host_answers(self) -> KeyShardError | None:
        """Return the mistake in the service URL or the credentials, if there is one."""
        try:
            self.missing(())
        except KeyShardError as exc:
            return exc
        return None

    def watch_topics(
        self, prefix: str, changed: Callable[[Collection[str]], None]
    ) -> TopicWatch | None:
        def report(names: Sequence[str]) -> None:
            if found := [name for name in names if name.startswith(prefix)]:
                changed(found)

        timeout_s = min(self._shared.timeout_s, WATCH_S)
        try:
            if prefix.startswith(SCALABLE):
                return self._namespaces.of_topics(prefix, report, timeout_s)
            return self._shared.pool.watch(prefix, report, timeout_s)
        except RefusedError as exc:
            raise error_of(exc, "watch", prefix, prefix, self._credentials.who()) from exc

    def watch_segments(self, topic: str, changed: Callable[[], None]) -> WireSegmentWatch:
        try:
            return self._segments.of_segments(topic, changed, self._shared.timeout_s)
        except RefusedError as exc:
            error = error_of(exc, "look up", topic, topic, self._credentials.who())
            if isinstance(error, TopicNotFoundError) and ABSENT not in exc.said:
                # Brokers answer so to each failure of the look-up, such as that of a moving bundle.
                raise BrokerUnavailableError(
                    f"Could not look up {topic}: the broker fails ({exc.said}).",
                    "Check the health of the broker.",
                ) from exc
            raise error from exc

    def subscribe(self, spec: SubscriptionSpec, start: StartPosition) -> WireConsumer:
        consumer = WireConsumer(self._shared, spec, start, hand_on=self._acknowledge_by_another)
        self._open(consumer)
        return consumer

    def begin(
        self,
        topic_partition: TopicPartition,
        subscription: str,
        start: MessageId | int,
        batch_size: int = 1,
    ) -> EntryId:
        with self._lock:
            self._check_open()
        return WireBeginning(self._shared, topic_partition, subscription).move(start, batch_size)

    def reader(
        self,
        topic_partition: TopicPartition,
        start: EntryId,
        how: ReadOptions = DEFAULT_READ_OPTIONS,
    ) -> WireReader:
        reader = WireReader(self._shared, topic_partition, start, how)
        self._open(reader)
        return reader

    def entry_producer(self, topic_partition: TopicPartition, how: PublishOptions) -> WireProducer:
        producer = WireProducer(self._shared, topic_partition, how)
        self._open(producer)
        return producer

    def producer(self, topic_partition: TopicPartition, *, send_timeout_ms: int) -> Producer:
        how = PublishOptions(send_timeout_s=send_timeout_ms / 1000)
        return WireMessageProducer(self.entry_producer(topic_partition, how))

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
            except BrokerError as exc:  # noqa: PERF203 - close the others nevertheless
                _log.debug(
                    "could not close what is open on %s: %s", handle.topic_partition, exc.summary
                )
        self._shared.pool.close(LEAVE_S)
        self._shared.reconnects.join(LEAVE_S)
        self._shared.nudges.join(LEAVE_S)

    def _acknowledge_by_another(self, closed: WireConsumer, entries: Sequence[EntryId]) -> None:
        with self._lock:
            handles = list(self._handles)
        for one in handles:
            if one is not closed and isinstance(one, WireConsumer) and one.stands_in_for(closed):
                with suppress(BrokerError):
                    one.acknowledge(entries)
                    return

    def _open(self, handle: WireConsumer | WireReader | WireProducer) -> None:
        with self._lock:
            self._check_open()
            self._handles.add(handle)
        handle.open()

    def _check_open(self) -> None:
        if self._closed:
            raise BrokerError(f"The connection to {self._connection.service_url} is closed.")


class WireMessageProducer:
    """Publishes messages, and waits until each is stored.

    Args:
        entries: Producer of entries, which is open.
    """

    def __init__(self, entries: WireProducer) -> None:
        self._entries = entries
        self._lock = threading.Lock()
        self._next_id = 0

    @property
    def topic_partition(self) -> TopicPartition:
        """The topic partition that it publishes to."""
        return self._entries.topic_partition

    def send(
        self,
        value: bytes | None,
        *,
        key: str | None = None,
        ordering_key: str | None = None,
        properties: Mapping[str, str] | None = None,
        event_ms: int = 0,
    ) -> EntryId:
        message = OutgoingMessage(value, key, ordering_key, properties, event_ms or None)
        with self._lock:
            sent = self._entries.publish((message,), self._next_id)
            self._next_id += 1
        # No timeout: the entry fails at its deadline.
        stored = sent.result()
        if stored is None:
            raise BrokerUnavailableError(
                f"{self.topic_partition} stored a message before its connection was lost, and "
                "does not say where.",
                "Publish it again.",
            )
        return stored

    def close(self) -> None:
        self._entries.close()
