"""The producer port on the wire: each message is an entry of its own."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from keyshard.broker.wire.producer import WireProducer
from keyshard.columns.outgoing import OutgoingMessage
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.errors import BrokerUnavailableError


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
        # Every entry has a deadline.
        stored = sent.result()
        if stored is None:
            raise BrokerUnavailableError(
                f"{self.topic_partition} stored a message before its connection was lost, and does "
                "not say where. Publish it again."
            )
        return stored

    def close(self) -> None:
        self._entries.close()
