"""Writes to the dead-letter topic: dead letters, in parts if they are too large, and markers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

from keyshard.broker.port import Broker, Consumer, Producer
from keyshard.broker.retry import retry_until
from keyshard.config.source import SourceConfig
from keyshard.core.creation import dead_letter_topic_missing
from keyshard.core.dead_letter import HEAD, PART, PARTS, PREFIX, DeadLetter
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.dead_letters.subscription import DeadLetterSubscription
from keyshard.errors import (
    BrokerError,
    BrokerUnavailableError,
    MessageTooLargeError,
    RangeConflictError,
    TopicNotFoundError,
)

PART_BYTES = 1024 * 1024
"""Size of the parts of a large dead letter, bytes; divided by 4 while the broker refuses it."""
PART_BYTES_MIN = 4 * 1024
"""Smallest size of parts that is tried, bytes."""


class DeadLetterWriter:
    """Writes with one producer, opened for the first dead letter. Any thread may call it.

    Args:
        broker: Connection to write through.
        where: The dead-letter topic.
        config: Options of the source.
        keeper: Holds the subscription that keeps what is written; subscribes before the first
            write.
        held: Called with the consumer of the subscription.
    """

    def __init__(
        self,
        broker: Broker,
        where: TopicPartition,
        config: SourceConfig,
        keeper: DeadLetterSubscription,
        held: Callable[[Consumer], None],
    ) -> None:
        self._broker = broker
        self._where = where
        self._config = config
        self._keeper = keeper
        self._held = held
        self._producer: Producer | None = None
        self._lock = threading.Lock()
        self._stopping = threading.Event()

    def dead_letter(
        self, dead_letter: DeadLetter, claim: Mapping[str, str]
    ) -> tuple[EntryId, EntrySet]:
        """Write a dead letter; return its position and the entries of its parts.

        Args:
            dead_letter: The dead letter.
            claim: Properties to add to its own.

        Raises:
            BrokerUnavailableError: No confirmation within ``acknowledge_timeout_ms``.
            BrokerError: The broker refused it.
        """
        message = dead_letter.message
        try:
            position = self._send(
                message.value,
                key=message.key,
                ordering_key=message.ordering_key,
                properties={**dead_letter.properties(), **claim},
                event_ms=dead_letter.event_ms,
            )
        except MessageTooLargeError:
            return self._in_parts(dead_letter, claim)
        return position, EntrySet()

    def marker(self, key: str | None, properties: dict[str, str]) -> EntryId:
        """Write a message without content, such as a marker; raises as :meth:`dead_letter`."""
        return self._send(b"", key=key, properties=properties)

    def stop(self) -> None:
        """Retry nothing from now on."""
        self._stopping.set()

    def close(self) -> None:
        """Close the producer. Idempotent."""
        self.stop()
        if self._producer is not None:
            self._producer.close()

    @property
    def timeout_s(self) -> float:
        """Longest wait for the confirmation of a message, seconds.

        As long as for acknowledgements: a short outage of the broker must not end the source.
        """
        return self._config.acknowledge_timeout_ms / 1000

    def _in_parts(
        self, dead_letter: DeadLetter, claim: Mapping[str, str]
    ) -> tuple[EntryId, EntrySet]:
        """Write a dead letter that is too large for the broker: its parts first, then itself."""
        packed, head = dead_letter.packed()
        own = {f"{PREFIX}kind": PART, f"{PREFIX}subscription": self._config.subscription}
        size = PART_BYTES
        while True:
            try:
                found = [
                    self._send(packed[at : at + size], key=None, properties={**own, **claim})
                    for at in range(0, len(packed), size)
                ]
                break
            except MessageTooLargeError:
                if size <= PART_BYTES_MIN:
                    raise
                size //= 4
        parts, message = EntrySet.of(found), dead_letter.message
        position = self._send(
            None if message.value is None else b"",
            key=message.key,
            ordering_key=message.ordering_key,
            properties={
                **dead_letter.own_properties(),
                PARTS: str(parts),
                HEAD: str(head),
                **claim,
            },
            event_ms=dead_letter.event_ms,
        )
        return position, parts

    def _send(
        self,
        value: bytes | None,
        *,
        key: str | None,
        properties: dict[str, str],
        ordering_key: str | None = None,
        event_ms: int = 0,
    ) -> EntryId:
        def attempt() -> EntryId:
            producer = self._open_producer()
            try:
                return producer.send(
                    value, key=key, ordering_key=ordering_key, properties=properties,
                    event_ms=event_ms,
                )  # fmt: skip
            except BrokerError as exc:
                if exc.retriable:
                    self._drop(producer)
                elif producer is not self._producer:
                    # Another thread has closed it meanwhile.
                    raise BrokerUnavailableError(exc.problem, exc.remedy) from exc
                raise

        try:
            return retry_until(attempt, self.timeout_s, stop=self._stopping)
        except RangeConflictError as exc:
            raise self._keeper.in_use() from exc
        except TopicNotFoundError:
            raise dead_letter_topic_missing(self._where.topic) from None

    def _open_producer(self) -> Producer:
        with self._lock:
            if self._producer is None:
                self._held(self._keeper.hold_for_the_first())
                self._producer = self._broker.producer(
                    self._where, send_timeout_ms=self._config.operation_timeout_ms
                )
            return self._producer

    def _drop(self, producer: Producer) -> None:
        """Close a producer, so that the next attempt opens another, and gets the broker's error.

        A producer that is refused when it reconnects only reports a timeout.
        """
        with self._lock:
            if self._producer is not producer:
                return
            self._producer = None
        with suppress(BrokerError):  # unsent messages are sent again
            producer.close()
