"""The producer port on pulsar-client."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import pulsar

from keyshard.broker.pulsar.calls import Calls
from keyshard.broker.pulsar.errors import translated
from keyshard.core.position.entry import EntryId, TopicPartition


class PulsarProducer:
    """Sends one message after the other, without batches."""

    def __init__(
        self, producer: pulsar.Producer, topic_partition: TopicPartition, calls: Calls
    ) -> None:
        self._producer = producer
        self._calls = calls
        self._topic_partition = topic_partition
        self._closed = False

    def send(
        self,
        value: bytes,
        *,
        key: str | None = None,
        ordering_key: str | None = None,
        properties: Mapping[str, str] | None = None,
        event_ms: int = 0,
    ) -> EntryId:
        with translated("send to", self._topic_partition):
            sent = self._calls.answer_of(
                lambda take: self._producer.send_async(
                    value,
                    take,
                    partition_key=key,
                    ordering_key=ordering_key,
                    properties=dict(properties or {}),
                    event_timestamp=event_ms,
                )
            )
            if sent.entry_id() < 0:
                # What the client gives when it lost the connection for good while it waited.
                raise pulsar.NotConnected("the connection was lost")
        return EntryId(sent.ledger_id(), sent.entry_id())

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with translated("close", self._topic_partition), suppress(pulsar.AlreadyClosed):
            self._producer.close()
