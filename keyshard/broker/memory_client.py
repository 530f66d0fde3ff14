"""The client's side of the in-memory broker: consumer and reader handles.

Private to :mod:`keyshard.broker.memory`, which documents the whole and re-exports the public names.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from keyshard.broker.memory_dispatch import Member, Subscription
from keyshard.broker.memory_log import EntryLog
from keyshard.core.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.hash_range import HashRange
from keyshard.errors import BrokerError, RangeConflictError, TopicNotFoundError

READ_MESSAGES_MAX = 1_000
"""Messages one read returns at most, unless its first entry is larger."""


class MemoryConsumer:
    """Implements the ``Consumer`` port; made by ``MemoryBroker.subscribe``.

    One receive returns at most ``receiver_queue_size`` messages, so a larger batch comes in parts.
    """

    def __init__(
        self,
        *,
        lock: threading.RLock,
        find: Callable[[], Subscription],
        topic_partition: TopicPartition,
        hash_range: HashRange,
        name: str,
        receiver_queue_size: int,
    ) -> None:
        self._changed = threading.Condition(lock)
        self._find = find
        self._subscription = find()
        self._topic_partition = topic_partition
        self._hash_range = hash_range
        self._name = name
        self._queue_size = receiver_queue_size
        self._member = self._new_member()
        self._next_index = 0
        self._unreturned_permits = 0
        self._connected = False
        self._closed = False
        self._ready_callback: Callable[[], None] | None = None

    @property
    def topic_partition(self) -> TopicPartition:
        return self._topic_partition

    @property
    def hash_range(self) -> HashRange:
        return self._hash_range

    def receive(self, timeout_ms: int) -> list[EntryBlock]:
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or bool(self._member.inbox), timeout_ms / 1000
            )
            self._check_open()
            blocks: list[EntryBlock] = []
            room = self._queue_size
            while room and self._member.inbox:
                blocks.append(self._take(room))
                room -= blocks[-1].rows
            self._return_permits(self._queue_size - room)
        return blocks

    def when_ready(self, callback: Callable[[], None]) -> None:
        with self._changed:
            self._check_open()
            self._ready_callback = callback
            if self._member.inbox:
                self._arrived()

    def acknowledge(self, entries: Sequence[EntryId]) -> None:
        with self._changed:
            self._check_open()
            if not self._connected:
                return
            found = [self._subscription.log.ordinal(entry_id) for entry_id in entries]
            self._subscription.acknowledge(ordinal for ordinal in found if ordinal is not None)

    def last_entry(self) -> EntryId | None:
        with self._changed:
            self._check_open()
            return self._subscription.log.last_id

    def is_connected(self) -> bool:
        with self._changed:
            return self._connected

    def close(self) -> None:
        with self._changed:
            self.drop()
            self._closed = True
            self._ready_callback = None
            self._changed.notify_all()

    def connect(self) -> None:
        """Join the subscription with an empty queue.

        Raises:
            RangeConflictError: Another consumer holds a part of the range.
        """
        with self._changed:
            self._member = self._new_member()
            self._next_index = self._unreturned_permits = 0
            # Another one when the topic was deleted meanwhile.
            self._subscription = self._find()
            self._subscription.join(self._member)
            self._connected = True

    def reconnect(self) -> None:
        """Join again after :meth:`drop`, unless the range is taken or the partition no more is."""
        with self._changed, suppress(RangeConflictError, TopicNotFoundError):
            if not self._closed and not self._connected:
                self.connect()

    def drop(self) -> None:
        """Let the broker forget this consumer; the queue stays."""
        with self._changed:
            if self._connected:
                self._connected = False
                self._subscription.leave(self._member)

    def _arrived(self) -> None:
        """Something came into the queue; called with the lock held."""
        self._changed.notify_all()
        callback, self._ready_callback = self._ready_callback, None
        if callback is not None:
            callback()

    def _new_member(self) -> Member:
        return Member(self._hash_range, self._name, self._queue_size, self._arrived)

    def _take(self, room: int) -> EntryBlock:
        entry = self._member.inbox[0]
        block = entry.block(self._next_index, room)
        self._next_index += block.rows
        if self._next_index == block.batch_size:
            self._member.inbox.popleft()
            self._next_index = 0
        return block

    def _return_permits(self, messages: int) -> None:
        """Ask for more once half the queue was taken, as Pulsar's client does."""
        self._unreturned_permits += messages
        if self._connected and self._unreturned_permits >= max(1, self._queue_size // 2):
            self._member.permits += self._unreturned_permits
            self._unreturned_permits = 0
            self._subscription.dispatch()

    def _check_open(self) -> None:
        if self._closed:
            raise BrokerError(f"Consumer {self._name!r} of {self._topic_partition} is closed.")


class MemoryReader:
    """Implements the ``Reader`` port; made by ``MemoryBroker.reader``."""

    def __init__(
        self,
        lock: threading.RLock,
        log: EntryLog,
        topic_partition: TopicPartition,
        start: EntryId,
    ) -> None:
        self._changed = threading.Condition(lock)
        self._log = log
        self._topic_partition = topic_partition
        self._next = log.first_from(start)
        self._closed = False
        self._notify: Callable[[], None] = self._changed.notify_all
        log.on_append.append(self._notify)

    def read(self, timeout_ms: int) -> list[EntryBlock]:
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._next < len(self._log), timeout_ms / 1000
            )
            self._check_open()
            blocks: list[EntryBlock] = []
            rows = 0
            self._next = max(self._next, self._log.first)
            while self._next < len(self._log) and rows < READ_MESSAGES_MAX:
                entry = self._log.get(self._next)
                assert entry is not None, "only entries before the first are trimmed"
                self._next += 1
                if not entry.is_marker:
                    blocks.append(entry.block())
                    rows += blocks[-1].rows
        return blocks

    def at_end(self) -> bool:
        with self._changed:
            self._check_open()
            return self._log.only_markers_from(self._next)

    def close(self) -> None:
        with self._changed:
            if not self._closed:
                self._closed = True
                self._log.on_append.remove(self._notify)
                self._changed.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise BrokerError(f"A reader of {self._topic_partition} is closed.")
