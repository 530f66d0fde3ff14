"""The subscription that keeps the dead letters of a source; without one, a topic loses them.

If the dead-letter topic exists, it is subscribed from the start. If not, a check creates nothing:
topic and subscription are created together, just before the first dead letter is written.
"""

from __future__ import annotations

import socket
import threading
from contextlib import closing, suppress
from dataclasses import replace

from keyshard.broker.admin.port import Admin
from keyshard.broker.connect import connect
from keyshard.broker.port import Broker, Consumer, StartPosition, SubscriptionSpec
from keyshard.broker.topics import PARKED
from keyshard.config.connection import WIRE
from keyshard.config.source import SourceConfig
from keyshard.core.creation import (
    dead_letter_subscription_missing,
    dead_letter_topic_missing,
    dead_letter_topic_partitioned,
)
from keyshard.core.position.entry import TopicPartition
from keyshard.core.ring.hash_range import split_ring
from keyshard.dead_letters.topic_scan import fold
from keyshard.dead_letters.topic_state import TopicState
from keyshard.errors import (
    BrokerError,
    SubscriptionInUseError,
    SubscriptionNotFoundError,
    TopicNotFoundError,
)

RECEIVER_QUEUE_SIZE = 8
"""Messages that the client requests ahead; each may have the broker's maximum size."""


class DeadLetterSubscription:
    """Holds the subscription. Any thread may call it; it does not retry."""

    def __init__(self, broker: Broker, where: TopicPartition, config: SourceConfig) -> None:
        self._broker = broker
        self._where = where
        self._config = config
        self._name = f"{config.subscription}{PARKED}"
        self._lock = threading.Lock()
        self.consumer: Consumer | None = None
        """Acknowledges entries that nothing needs; ``None``: there is no topic yet."""

    def is_missing(self) -> bool:
        """Whether there is no dead-letter topic; ``False`` if an old broker cannot tell."""
        return bool(self._broker.missing([self._where.topic]))

    def check_creation(self, admin: Admin | None) -> None:
        """Check that the broker will create the missing topic and its subscription.

        It creates nothing. Without an admin interface, the subscription is not checked.

        Raises:
            TopicNotFoundError: The broker creates no topics.
            SubscriptionNotFoundError: The broker creates no subscriptions.
            BrokerError: The broker cannot be reached, or refused.
        """
        topic = self._where.topic
        if admin is not None and not admin.creates_subscriptions(topic):
            raise dead_letter_subscription_missing(topic, self._name, topic_is_missing=True)
        try:
            # The broker applies its policy for the creation of the topic, but creates nothing for
            # the name of a partition.
            self._broker.partitions(f"{topic}-partition-0", create=True)
        except TopicNotFoundError:
            raise dead_letter_topic_missing(topic) from None

    def hold(self) -> Consumer:
        """Subscribe, unless that is done; Pulsar creates a missing topic.

        Raises:
            ConfigError: The topic is partitioned.
            RangeConflictError: Another source parks there with the same subscription.
            TopicNotFoundError: The topic is missing, and the broker does not create it.
            SubscriptionNotFoundError: As before, for the subscription.
            BrokerError: The broker cannot be reached, or refused.
        """
        with self._lock:
            if self.consumer is None:
                self.consumer = self._subscribe()
            return self.consumer

    def hold_for_the_first(self) -> Consumer:
        """Subscribe before the first dead letter, if there was no topic at the start.

        Raises:
            SubscriptionInUseError: Another process has written dead letters of this source there.
            KeyShardError: As :meth:`hold`, or the topic cannot be read.
        """
        with self._lock:
            if self.consumer is not None:
                return self.consumer
            consumer, found = self._subscribe(), TopicState()
            try:
                finished = fold(self._broker, self._where, found, consumer, self._config)
                if found.keys:
                    raise SubscriptionInUseError(
                        f"Another process has parked keys of {self._config.subscription!r} in "
                        f"{self._where} since this source started.",
                        "Stop that process, and start this source again to read those keys.",
                        holders=[],
                    )
                if finished:
                    consumer.acknowledge(finished)
            except BaseException:
                with suppress(BrokerError):
                    consumer.close()
                raise
            self.consumer = consumer
            return consumer

    def close(self) -> None:
        """Close the consumer. Idempotent."""
        if self.consumer is not None:
            self.consumer.close()

    def in_use(self) -> SubscriptionInUseError:
        """Make the error of a conflict over the subscription."""
        return SubscriptionInUseError(
            f"Subscription {self._name!r} of {self._where} is in use: another source with the "
            "same subscription parks keys there.",
            "Stop that source, or name another dead_letter_topic.",
            holders=[],
        )

    def _subscribe(self) -> Consumer:
        if self._broker.partitions(self._where.topic) != (self._where,):
            raise dead_letter_topic_partitioned(self._where.topic)
        spec = SubscriptionSpec(
            self._where,
            self._name,
            split_ring(1)[0],
            consumer_name=f"keyshard-{socket.gethostname()}-parked",
            receiver_queue_size=RECEIVER_QUEUE_SIZE,
        )
        connection = self._config.how_to_connect()
        try:
            if connection.by_client:
                # pulsar-client creates a missing topic with the partitions of the broker's policy,
                # and repeats a refused subscription.
                with closing(connect(replace(connection, transport=WIRE))) as by_wire:
                    by_wire.subscribe(spec, StartPosition.EARLIEST).close()
            return self._broker.subscribe(spec, StartPosition.EARLIEST)
        except TopicNotFoundError:
            raise dead_letter_topic_missing(self._where.topic) from None
        except SubscriptionNotFoundError:
            raise dead_letter_subscription_missing(
                self._where.topic, self._name, topic_is_missing=False
            ) from None
