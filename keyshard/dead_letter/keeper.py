"""The subscription that keeps the letters of a source: a topic without one loses them.

It is held from the start where the dead-letter topic exists. Where it does not, looking creates
nothing: topic and subscription are created together, just before the first letter is written.
"""

from __future__ import annotations

import socket
import threading

from keyshard.broker.port import Broker, Consumer, StartPosition
from keyshard.config.source import SourceConfig
from keyshard.coordinator.topics import PARKED
from keyshard.core.dead_letter.parked import Parked
from keyshard.core.position.entry import TopicPartition
from keyshard.core.ring.hash_range import split_ring
from keyshard.dead_letter.reading import fold
from keyshard.errors import ConfigError, SubscriptionInUseError

RECEIVER_QUEUE_SIZE = 8
"""Messages that the client asks for ahead; each may be as large as the broker takes."""


class LetterKeeper:
    """Holds the subscription. Any thread may call it; nothing is tried again here."""

    def __init__(self, broker: Broker, where: TopicPartition, config: SourceConfig) -> None:
        self._broker = broker
        self._where = where
        self._config = config
        self._lock = threading.Lock()
        self.consumer: Consumer | None = None
        """Acknowledges what is finished with; ``None``: no topic yet."""

    def is_missing(self) -> bool:
        """Whether there is no dead-letter topic; an old broker cannot tell, and says no."""
        return bool(self._broker.missing([self._where.topic]))

    def hold(self) -> Consumer:
        """Hold the subscription; Pulsar creates what is missing.

        Raises:
            ConfigError: The topic is partitioned.
            RangeConflictError: Another source parks there as the same subscription.
            BrokerError: The broker cannot be reached, or refused.
        """
        with self._lock:
            if self.consumer is None:
                self.consumer = self._subscribe()
            return self.consumer

    def hold_for_the_first(self) -> Consumer:
        """Before each letter: when there was no topic at the start, hold what is there now.

        Raises:
            SubscriptionInUseError: Letters of the source are there, and it did not write them.
            KeyShardError: As :meth:`hold`, or what is there cannot be read.
        """
        with self._lock:
            if self.consumer is not None:
                return self.consumer
            consumer, found = self._subscribe(), Parked()
            try:
                finished = fold(self._broker, self._where, found, consumer, self._config)
                if found.keys:
                    raise SubscriptionInUseError(
                        f"Another process has parked keys of {self._config.subscription!r} in "
                        f"{self._where} since this source started. Stop it, and start this source "
                        "again: it then knows those keys.",
                        holders=[],
                    )
                if finished:
                    consumer.acknowledge(finished)
            except BaseException:
                consumer.close()
                raise
            self.consumer = consumer
            return consumer

    def close(self) -> None:
        """Free the consumer. Idempotent."""
        if self.consumer is not None:
            self.consumer.close()

    def in_use(self) -> SubscriptionInUseError:
        """What a conflict over the subscription means."""
        return SubscriptionInUseError(
            f"Subscription '{self._config.subscription}{PARKED}' of {self._where} is in use: "
            "another source parks there as the same subscription. Stop it, or name another "
            "dead_letter_topic.",
            holders=[],
        )

    def _subscribe(self) -> Consumer:
        if self._broker.partitions(self._where.topic) != (self._where,):
            raise ConfigError(
                f"The dead-letter topic {self._where} is partitioned, and dead letters need one "
                "order. Name a topic without partitions as dead_letter_topic."
            )
        return self._broker.subscribe(
            self._where,
            f"{self._config.subscription}{PARKED}",
            split_ring(1)[0],
            start=StartPosition.EARLIEST,
            consumer_name=f"keyshard-{socket.gethostname()}-parked",
            receiver_queue_size=RECEIVER_QUEUE_SIZE,
        )
