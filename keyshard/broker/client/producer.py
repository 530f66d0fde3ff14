"""The producer port on pulsar-client."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import _pulsar
import pulsar

from keyshard.broker.client.calls import Calls
from keyshard.broker.client.errors import translated
from keyshard.core.position.entry import EntryId, TopicPartition


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
