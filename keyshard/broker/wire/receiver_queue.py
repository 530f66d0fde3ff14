"""The receiver queue of a subscription: entries that arrived and were not taken yet.

Permits bound it in messages, and its size bounds it in bytes. A broker that sends more than it has
permits for, or messages that are larger than earlier ones, may exceed both. Then the queue drops
entries, and everything from the first dropped one on must be sent again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from keyshard.broker.wire.entries import ENTRY_MESSAGES_MAX, RawEntry
from keyshard.broker.wire.permits import Permits
from keyshard.core.window.receiver_queue_size import RAW_ENTRY_BYTES, PrefetchSize

TAKEN_BYTES_MAX = 4 * 1024 * 1024
"""Stored bytes of entries after which :meth:`ReceiverQueue.take` returns."""
UNASKED_MAX = 200
"""Entries beyond twice the queue at which the broker is considered to ignore permits."""
EXCESS_BYTES_MAX = 64 * 1024 * 1024
"""Maximum bytes that all queues of a connection together hold beyond their sizes. Permits count
messages, and messages may be larger than earlier ones."""


class QueueOverflow:
    """The excess bytes of queues: those beyond their sizes. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.bytes = 0

    def change(self, by: int) -> None:
        """Add bytes; a negative number removes them."""
        with self._lock:
            self.bytes += by


class ReceiverQueue:
    """Entries of a subscription, oldest first. Not thread-safe: its owner calls it under its lock.

    Args:
        size: How many messages the broker may send ahead.
        excess: Excess bytes of all queues of the connection.
        ahead_max: Maximum number of messages that the broker may first send ahead, if that is
            less than the queue holds.
    """

    def __init__(
        self, size: PrefetchSize, excess: QueueOverflow, ahead_max: int | None = None
    ) -> None:
        self._size = size
        self._excess = excess
        self.permits = Permits(size.size if ahead_max is None else min(size.size, ahead_max))
        self._entries: deque[RawEntry] = deque()
        self.held_bytes = self._excess_bytes = 0
        """Memory of the entries, and the part of it beyond the size of the queue, bytes."""
        self.overflown = False
        """Whether entries were dropped. All entries from there on must be sent again."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bytes_max(self) -> int:
        """Memory that the queue is meant to hold, bytes."""
        return self._size.bytes_max

    def put(self, entries: Sequence[RawEntry]) -> None:
        """Add entries that arrived, until the memory is exhausted."""
        if len(self._entries) + len(entries) > self._most_waiting():
            self.overflown = True
        size = self.held_bytes + memory_of(entries)
        if not self.overflown and size <= self.bytes_max:
            self._entries.extend(entries)
            self.held_bytes = size
            return
        for one in entries:
            full = self.held_bytes > self.bytes_max
            if full and self._excess.bytes > EXCESS_BYTES_MAX:
                self.overflown = True
            if self.overflown:
                return
            self._entries.append(one)
            self._holds(self.held_bytes + memory_of((one,)))

    def take(self) -> list[RawEntry]:
        """Take the oldest entries."""
        found: list[RawEntry] = []
        size, size_max = 0, min(TAKEN_BYTES_MAX, self.bytes_max)
        while self._entries and size < size_max:
            one = self._entries.popleft()
            size += len(one.data)
            found.append(one)
        if found:
            self._holds(self.held_bytes - size - RAW_ENTRY_BYTES * len(found))
        return found

    def put_back(self, entries: Sequence[RawEntry]) -> None:
        """Put entries back that were taken last."""
        self._entries.extendleft(reversed(entries))
        self._holds(self.held_bytes + memory_of(entries))

    def clear(self) -> None:
        """Drop the entries; the broker sends them again."""
        self._entries.clear()
        self.overflown = False
        self._holds(0)

    def measure(
        self, messages: int, entries: Sequence[RawEntry], ahead_max: int | None = None
    ) -> None:
        """Adapt the permits to the size of the messages that were taken last.

        Args:
            messages: Number of the messages, as the broker counts them.
            entries: Entries of the messages.
            ahead_max: Maximum number of messages that the broker may send ahead from now on, if
                that is less than the queue holds.
        """
        # A producer batch may declare a wrong count, which tells nothing about message sizes.
        likely = 0 <= messages <= ENTRY_MESSAGES_MAX * len(entries)
        counted = messages if likely else len(entries)
        ahead = self._size.measure(counted, memory_of(entries)) if counted else self._size.size
        self.permits.resize(ahead if ahead_max is None else min(ahead, ahead_max))

    def use(self, messages: int) -> int:
        """Return the permits to grant for messages that were taken, as the broker counts them."""
        granted = self.permits.use(messages)
        self.overflown = self.overflown or self.permits.held > self._most_waiting()
        return granted

    def _most_waiting(self) -> int:
        """Number of waiting entries above which the broker is considered to ignore permits."""
        return 2 * self.permits.ahead_max + UNASKED_MAX

    def _holds(self, size_bytes: int) -> None:
        """Record the memory of the entries."""
        self.held_bytes = size_bytes
        excess = max(0, size_bytes - self.bytes_max)
        if excess != self._excess_bytes:
            self._excess.change(excess - self._excess_bytes)
            self._excess_bytes = excess


def memory_of(entries: Sequence[RawEntry]) -> int:
    """Memory that entries take before they are decoded, bytes."""
    return sum([len(one.data) for one in entries]) + RAW_ENTRY_BYTES * len(entries)
