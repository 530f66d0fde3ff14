"""Consumers and Readers of pulsar-client.

An id built by hand acknowledges its whole entry, from any consumer of the subscription on that
topic partition.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import _pulsar
import pulsar

from keyshard.broker.client.calls import Calls
from keyshard.broker.client.entries import Decrypted, readable_before, to_blocks
from keyshard.broker.client.errors import translated
from keyshard.broker.port import ReadOptions, SubscriptionSpec
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.ring.hash_range import HashRange
from keyshard.core.window.receiver_queue_size import POLLED_MAX
from keyshard.errors import ChunkedMessageError, KeyShardError

RECEIVE_WAIT_MS = 10
"""Length of one batch receive of the client if its queue is not full, milliseconds."""
RECEIVE_BYTES_MAX = 4 * 1024 * 1024
"""Maximum payload bytes of one batch receive."""
READ_MESSAGES_MAX = 1_000
"""Maximum number of messages of one :meth:`ClientReader.read`."""
READ_BYTES_MAX = 8 * 1024 * 1024
"""Payload after which it returns, bytes."""


class ClientConsumer:
    """A plain single-topic consumer; it clears its queue on a reconnect."""

    def __init__(
        self,
        consumer: pulsar.Consumer,
        spec: SubscriptionSpec,
        calls: Calls,
    ) -> None:
        self._consumer = consumer
        self._calls = calls
        self._raw = consumer._consumer
        self._spec = spec
        self._topic_partition = spec.topic_partition
        self._first: deque[Any] = deque()
        self._decrypted = Decrypted(spec.topic_partition)
        self._closed = False

    @property
    def topic_partition(self) -> TopicPartition:
        return self._topic_partition

    @property
    def hash_range(self) -> HashRange:
        return self._spec.hash_range

    def receive(self, timeout_ms: int) -> list[EntryBlock]:
        messages = self._decrypted.next(lambda: self._take(timeout_ms))
        return to_blocks(messages, self._topic_partition, self._spec.hash_range, self._spec.columns)

    def _take(self, timeout_ms: int) -> list[Any]:
        deadline = time.monotonic() + timeout_ms / 1000
        with translated("receive from", self._topic_partition):
            # Messages of when_ready() are returned alone: a reconnect may lie between them and the
            # client's queue.
            messages = self._take_first()
            if not messages:
                polled = self._spec.receiver_queue_size <= POLLED_MAX
                messages = self._poll() if polled else self._batch()
            while not messages and time.monotonic() + RECEIVE_WAIT_MS / 1000 < deadline:
                messages = self._batch()
        return messages

    def _batch(self) -> list[Any]:
        """Run one batch receive of the client."""
        with self._calls.inside():
            messages: list[Any] = self._raw.batch_receive()
        return messages

    def _poll(self) -> list[Any]:
        """Take the client's queue without waiting."""
        messages: list[Any] = []
        with self._calls.inside(), suppress(pulsar.Timeout):
            while len(messages) < self._spec.receiver_queue_size:
                messages.append(self._raw.receive(0))
        return messages

    def when_ready(self, callback: Callable[[], None]) -> None:
        def arrived(result: pulsar.Result, message: Any) -> None:
            # Runs in the client's thread. Any result but Ok means that the consumer is closed.
            if result == pulsar.Result.Ok:
                self._first.append(message)
            if not self._closed:
                callback()

        if self._decrypted.waits:
            callback()
            return
        with translated("receive from", self._topic_partition):
            self._raw.receive_async(self._calls.lent(arrived))

    def _take_first(self) -> list[Any]:
        """Take the messages that :meth:`when_ready` received; they precede the client's queue."""
        return [self._first.popleft() for _ in range(len(self._first))]

    def acknowledge(self, entries: Sequence[EntryId]) -> None:
        partition = self._topic_partition.partition
        acknowledge, message_id = self._raw.acknowledge, _pulsar.MessageId
        with translated("acknowledge in", self._topic_partition), self._calls.inside():
            for ledger, entry in entries:
                acknowledge(message_id(partition, ledger, entry, -1))

    def last_entry(self) -> EntryId | None:
        with translated("ask for the last entry of", self._topic_partition):
            last = self._calls.answer_of(self._raw.get_last_message_id_async)
        return EntryId(last.ledger_id(), last.entry_id()) if last.entry_id() >= 0 else None

    def is_connected(self) -> bool:
        return not self._closed and bool(self._consumer.is_connected())

    def has_given_all(self) -> bool:
        return self.is_connected()

    def problem(self) -> str:
        return ""

    def close(self, *, for_another: bool = False) -> None:  # noqa: ARG002 - the broker cannot know
        if self._closed:
            return
        self._closed = True
        with translated("close", self._topic_partition), suppress(pulsar.AlreadyClosed):
            self._consumer.close()


class ClientReader:
    """A plain Reader; the client offers no batch receive for it."""

    def __init__(
        self, reader: pulsar.Reader, topic_partition: TopicPartition, calls: Calls, how: ReadOptions
    ) -> None:
        self._how = how
        self._refused: KeyShardError | None = None
        self._reader = reader
        self._calls = calls
        self._raw = reader._reader
        self._topic_partition = topic_partition
        self._decrypted = Decrypted(topic_partition)
        self._closed = False
        self._stayed_connected = True

    def read(self, timeout_ms: int) -> list[EntryBlock]:
        if self._refused is not None:
            raise self._refused
        messages = self._decrypted.next(lambda: self._take(timeout_ms))
        try:
            return self._to_blocks(messages)
        except ChunkedMessageError as exc:
            # Deferred: a caller that needs only the entries before it gets no error.
            self._refused = exc
            before = readable_before(messages, exc)
            if not before:
                raise
            return self._to_blocks(before)

    def _take(self, timeout_ms: int) -> list[Any]:
        messages: list[Any] = []
        wait_ms, size, read_next = timeout_ms, 0, self._raw.read_next
        with translated("read from", self._topic_partition), self._calls.inside():
            try:
                while len(messages) < READ_MESSAGES_MAX and size < READ_BYTES_MAX:
                    message = read_next(wait_ms)
                    messages.append(message)
                    size += message.length()
                    wait_ms = 1
            except pulsar.Timeout:
                pass
        return messages

    def _to_blocks(self, messages: Sequence[Any]) -> list[EntryBlock]:
        return to_blocks(messages, self._topic_partition, columns=self._how.columns)

    def at_end(self) -> bool:
        if self._decrypted.waits:
            return False
        with translated("look for the end of", self._topic_partition):
            return not self._calls.answer_of(self._raw.has_message_available_async)

    def stayed_connected(self) -> bool:
        # The client reports only its current state. A reconnect takes at least 90 ms.
        self._stayed_connected = self._stayed_connected and bool(self._raw.is_connected())
        return self._stayed_connected

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with translated("close", self._topic_partition), suppress(pulsar.AlreadyClosed):
            self._reader.close()
