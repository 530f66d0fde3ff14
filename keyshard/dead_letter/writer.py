"""Writes to the dead-letter topic: dead letters, in parts where one is too large, and markers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

from keyshard.broker.port import Broker, Consumer, Producer
from keyshard.broker.retry import retry_until
from keyshard.config.source import SourceConfig
from keyshard.core.dead_letter.letters import HEAD, PART, PARTS, PREFIX, Letter
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.dead_letter.keeper import LetterKeeper
from keyshard.errors import (
    BrokerError,
    BrokerUnavailableError,
    MessageTooLargeError,
    RangeConflictError,
)

PART_BYTES = 1024 * 1024
"""Size of the parts of a letter that is too large; a quarter where that is still too large."""
PART_BYTES_MIN = 4 * 1024
"""No smaller parts than this are tried."""


class DeadLetterWriter:
    """One producer, opened for the first letter. Any thread may call it.

    Args:
        broker: Connection to write through.
        where: The dead-letter topic.
        config: The source.
        keeper: Holds the subscription that keeps what is written; before anything is.
        held: Gets the consumer that does.
    """

    def __init__(
        self,
        broker: Broker,
        where: TopicPartition,
        config: SourceConfig,
        keeper: LetterKeeper,
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

    def letter(self, letter: Letter, claim: Mapping[str, str]) -> tuple[EntryId, EntrySet]:
        """Write a letter; where it lies, and its parts, if it has some.

        Args:
            letter: It.
            claim: Properties beside its own.

        Raises:
            BrokerUnavailableError: No confirmation before ``acknowledge_timeout_ms``.
            BrokerError: The broker refused it.
        """
        message = letter.message
        try:
            position = self._send(
                message.value,
                key=message.key,
                ordering_key=message.ordering_key,
                properties={**letter.properties(), **claim},
                event_ms=letter.event_ms,
            )
        except MessageTooLargeError:
            return self._in_parts(letter, claim)
        return position, EntrySet()

    def marker(self, key: str | None, properties: dict[str, str]) -> EntryId:
        """Write a message that only says something; raises as :meth:`letter`."""
        return self._send(b"", key=key, properties=properties)

    def stop(self) -> None:
        """Try nothing again."""
        self._stopping.set()

    def close(self) -> None:
        """Free the producer. Idempotent."""
        self.stop()
        if self._producer is not None:
            self._producer.close()

    @property
    def timeout_s(self) -> float:
        """As patient as acknowledging: a broker that is away a while must not end the source."""
        return self._config.acknowledge_timeout_ms / 1000

    def _in_parts(self, letter: Letter, claim: Mapping[str, str]) -> tuple[EntryId, EntrySet]:
        """Write a letter that is larger than the broker takes: its parts, then the letter."""
        packed, head = letter.packed()
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
        parts, message = EntrySet.of(found), letter.message
        position = self._send(
            None if message.value is None else b"",
            key=message.key,
            ordering_key=message.ordering_key,
            properties={**letter.own_properties(), PARTS: str(parts), HEAD: str(head), **claim},
            event_ms=letter.event_ms,
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
                    # Another thread has dropped it meanwhile.
                    raise BrokerUnavailableError(exc.message) from exc
                raise

        try:
            return retry_until(attempt, self.timeout_s, stop=self._stopping)
        except RangeConflictError as exc:
            raise self._keeper.in_use() from exc

    def _open_producer(self) -> Producer:
        with self._lock:
            if self._producer is None:
                self._held(self._keeper.hold_for_the_first())
                self._producer = self._broker.producer(
                    self._where, send_timeout_ms=self._config.operation_timeout_ms
                )
            return self._producer

    def _drop(self, producer: Producer) -> None:
        """Let the next attempt open another producer, which the broker may refuse by name.

        One that is refused when it comes back only says that time is up.
        """
        with self._lock:
            if self._producer is not producer:
                return
            self._producer = None
        with suppress(BrokerError):  # what it sends is sent again
            producer.close()
