"""A client's producer at the in-memory broker.

Private to :mod:`keyshard.broker.memory`, which documents the package and re-exports public names.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Protocol

from keyshard.broker.memory.log import Message
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.errors import BrokerError, BrokerUnavailableError, MessageTooLargeError


class _Publish(Protocol):
    def __call__(
        self, topic: TopicPartition, /, *messages: Message
    ) -> list[tuple[TopicPartition, EntryId]]: ...


class MemoryProducer:
    """Implements the ``Producer`` port; created by ``MemoryBroker.producer``.

    Without a connection, a send waits in real time for one, until its timeout.
    """

    def __init__(
        self,
        lock: threading.RLock,
        publish: _Publish,
        topic_partition: TopicPartition,
        send_timeout_ms: int,
        *,
        message_bytes_max: int,
    ) -> None:
        self._changed = threading.Condition(lock)
        self._publish = publish
        self.topic_partition = topic_partition
        self._send_timeout_s = send_timeout_ms / 1000
        self._message_bytes_max = message_bytes_max
        self._connected = True
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
        message = Message(value, key, ordering_key, dict(properties or {}), event_ms)
        texts = [key or "", ordering_key or "", *message.properties, *message.properties.values()]
        if len(value or b"") + sum(len(text.encode()) for text in texts) > self._message_bytes_max:
            raise MessageTooLargeError(
                f"A message to {self.topic_partition} exceeds the size limit.",
                "Send a smaller message.",
            )
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._connected, self._send_timeout_s)
            if self._closed:
                raise BrokerError(f"A producer of {self.topic_partition} is closed.")
            if not self._connected:
                raise BrokerUnavailableError(
                    f"Could not send to {self.topic_partition}: the in-memory broker was "
                    f"unavailable for {self._send_timeout_s:g} s."
                )
            ((_, entry_id),) = self._publish(self.topic_partition, message)
        return entry_id

    def is_connected(self) -> bool:
        """Whether a send reaches the broker."""
        with self._changed:
            return self._connected

    def drop(self) -> None:
        """Lose the connection."""
        with self._changed:
            self._connected = False

    def reconnect(self) -> None:
        """Reconnect after :meth:`drop`."""
        with self._changed:
            self._connected = not self._closed
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._connected, self._closed = False, True
            self._changed.notify_all()
