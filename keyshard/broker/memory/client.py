"""The client's side of the in-memory broker: consumer and reader handles.

Private to :mod:`keyshard.broker.memory`, which documents the package and re-exports public names.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from keyshard.broker.memory.dispatch import Delivery, Member, Subscription
from keyshard.broker.memory.log import EntryLog, StoredEntry
from keyshard.broker.unreadable_entries import of_entry
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.ring.hash_range import HashRange
from keyshard.errors import (
    BrokerError,
    BrokerUnavailableError,
    ChunkedMessageError,
    KeyShardError,
    RangeConflictError,
    TopicNotFoundError,
)

READ_MESSAGES_MAX = 1_000
"""Maximum number of messages of one read, unless its first entry is larger."""
GROUP_MAX = 1_000
"""Maximum number of acknowledgements that a client groups."""


@dataclass(frozen=True, slots=True)
class MemoryConnection:
    """The parts of the client and of the cluster that a consumer uses."""

    lock: threading.RLock
    now_ms: Callable[[], int]
    answers: Callable[[], bool]
    """Whether the client answers; if not, it loses its connection."""
    frozen: Callable[[], bool]
    """Whether the client is suspended."""
    group_ms: int
    """How long the client groups acknowledgements, milliseconds."""
    grouped: Callable[[MemoryConsumer], None]
    """Called when a consumer groups acknowledgements."""
    catch_up: Callable[[], None]
    """Sends the groups of acknowledgements and the delayed messages that are due in the cluster."""
    send_due: Callable[[], None]
    """Sends the delayed messages that are due."""


class MemoryConsumer:
    """Implements the ``Consumer`` port; created by ``MemoryBroker.subscribe``.

    One receive returns at most ``receiver_queue_size`` messages, so a larger batch is split.
    """

    def __init__(
        self,
        *,
        connection: MemoryConnection,
        find: Callable[[], Subscription],
        topic_partition: TopicPartition,
        hash_range: HashRange,
        name: str,
        receiver_queue_size: int,
        columns: Collection[str] | None = None,
    ) -> None:
        self._connection = connection
        self._changed = threading.Condition(connection.lock)
        self._find = find
        self._subscription = find()
        self._topic_partition = topic_partition
        self._hash_range = hash_range
        self._name = name
        self._queue_size = receiver_queue_size
        self._columns = columns
        self._queue: deque[Delivery] = deque()
        self._taken = 0
        self._chunks = ChunkAssembly()
        self._member = self._new_member()
        self._unreturned_permits = 0
        self._group: list[EntryId] = []
        self._group_due_ms = 0
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
            self._connection.catch_up()
            self._changed.wait_for(lambda: self._closed or bool(self._queue), timeout_ms / 1000)
            self._connection.catch_up()
            self._check_open()
            blocks: list[EntryBlock] = []
            room = self._queue_size
            while room and self._queue:
                if self._queue[0].entry.chunk is not None:
                    chunked = self._queue.popleft().entry
                    raise refused(chunked, self._topic_partition)
                if error := self._subscription.log.refused(
                    self._queue[0].entry, self._topic_partition
                ):
                    if blocks:
                        break
                    self._pass(self._queue.popleft())
                    raise error
                blocks.append(self._take(room))
                room -= blocks[-1].rows
            self._return_permits(self._queue_size - room)
        return blocks

    def when_ready(self, callback: Callable[[], None]) -> None:
        with self._changed:
            self._check_open()
            self._ready_callback = callback
            if self._queue:
                self._arrived()

    def acknowledge(self, entries: Sequence[EntryId]) -> None:
        with self._changed:
            self._check_open()
            if not self._group:
                self._group_due_ms = self._connection.now_ms() + self._connection.group_ms
            self._group += entries
            if not self._connection.group_ms or len(self._group) >= GROUP_MAX:
                self.flush()
            else:
                self._connection.grouped(self)
                self._connection.catch_up()

    def last_entry(self) -> EntryId | None:
        with self._changed:
            self._check_open()
            if not self._connected:
                raise BrokerUnavailableError(
                    f"Consumer {self._name!r} of {self._topic_partition} has no connection."
                )
            return self._subscription.log.last_id

    def is_connected(self) -> bool:
        with self._changed:
            self._connection.send_due()
            return self._connected

    def has_given_all(self) -> bool:
        return self.is_connected()

    def problem(self) -> str:
        return ""

    def close(self, *, for_another: bool = False) -> None:  # noqa: ARG002 - the broker cannot know
        with self._changed:
            if not self._closed:
                self.flush()
            self.abandon()

    def abandon(self) -> None:
        """End at once, as if the process died: grouped acknowledgements are lost."""
        with self._changed:
            self._group.clear()
            self.drop()
            self._closed = True
            self._ready_callback = None
            self._changed.notify_all()

    def flush(self, due_by_ms: int | None = None) -> bool:
        """Send grouped acknowledgements. Without a connection they are silently lost.

        Args:
            due_by_ms: If given, send them only if they are due by then, milliseconds.

        Returns:
            Whether the group is empty now.
        """
        with self._changed:
            if due_by_ms is not None and (
                self._connection.frozen() or self._group_due_ms > due_by_ms
            ):
                return not self._group
            group, self._group = self._group, []
            if self._connected and group:
                found = [self._subscription.log.ordinal(entry_id) for entry_id in group]
                known = [ordinal for ordinal in found if ordinal is not None]
                self._subscription.acknowledge(known)
            return True

    def connect(self) -> None:
        """Join the subscription with an empty queue.

        Raises:
            RangeConflictError: Another consumer holds a part of the range.
        """
        with self._changed:
            self._member = self._new_member()
            self._queue.clear()
            self._chunks = ChunkAssembly()
            self._taken = self._unreturned_permits = 0
            # A new one if the topic was deleted meanwhile.
            self._subscription = self._find()
            self._subscription.join(self._member)
            self._connected = True

    def reconnect(self) -> None:
        """Join again after :meth:`drop`, unless the range is taken or the partition is gone."""
        with self._changed, suppress(RangeConflictError, TopicNotFoundError):
            if not self._closed and not self._connected:
                self.connect()

    def drop(self) -> None:
        """Make the broker forget this consumer; the queue is kept."""
        with self._changed:
            if self._connected:
                self._connected = False
                self._subscription.leave(self._member)

    def forget(self) -> None:
        """Make the broker forget this consumer silently, without closing its connection.

        Its acknowledgements still count, as if only the dispatcher of the topic forgot it.
        """
        with self._changed:
            self._subscription.leave(self._member)

    def disconnect(self) -> None:
        """Reconnect only this consumer, with an empty queue; entries begin at their first index."""
        with self._changed:
            self.drop()
            self.reconnect()

    def _deliver(self, delivery: Delivery) -> None:
        """Accept a delivery of the broker, during a dispatch. Call it under the lock."""
        if self._chunks.is_incomplete(delivery.entry):
            self._member.return_permits(1)
            return
        self._queue.append(delivery)
        self._arrived()

    def _arrived(self) -> None:
        """Notify waiters of new messages. Call it under the lock."""
        self._changed.notify_all()
        callback, self._ready_callback = self._ready_callback, None
        if callback is not None:
            callback()

    def _new_member(self) -> Member:
        return Member(
            self._hash_range,
            self._name,
            self._queue_size,
            deliver=self._deliver,
            answers=self._connection.answers,
        )

    def _pass(self, delivery: Delivery) -> None:
        self._return_permits(len(delivery.indices) - self._taken)
        self._taken = 0

    def _take(self, room: int) -> EntryBlock:
        entry, indices = self._queue[0]
        chosen = indices[self._taken : self._taken + room]
        block = entry.block(chosen, self._hash_range, self._columns)
        self._taken += block.rows
        if self._taken == len(indices):
            self._queue.popleft()
            self._taken = 0
        return block

    def _return_permits(self, messages: int) -> None:
        """Return permits once half the queue was taken, as Pulsar's client does."""
        self._unreturned_permits += messages
        if self._connected and self._unreturned_permits >= max(1, self._queue_size // 2):
            self._member.return_permits(self._unreturned_permits)
            self._unreturned_permits = 0
            self._subscription.dispatch()

    def _check_open(self) -> None:
        if self._closed:
            raise BrokerError(f"Consumer {self._name!r} of {self._topic_partition} is closed.")


class MemoryReader:
    """Implements the ``Reader`` port; created by ``MemoryBroker.reader``.

    Without a connection it behaves as Pulsar's client, whose answers then prove nothing: it returns
    no messages, reports once that it is at the end, and then that the broker is unavailable. After
    a reconnect with nothing left to read, it reports that messages are left until one arrives.
    """

    def __init__(
        self,
        lock: threading.RLock,
        log: EntryLog,
        topic_partition: TopicPartition,
        start: EntryId,
        columns: Collection[str] | None,
    ) -> None:
        self._columns = columns
        self._changed = threading.Condition(lock)
        self._log = log
        self._topic_partition = topic_partition
        self._next = log.first_from(start)
        self._chunks = ChunkAssembly()
        self._closed = False
        self._connected = self._stayed_connected = True
        self._asked_without = False
        self._refused: KeyShardError | None = None
        self._expects = -1
        self._notify: Callable[[], None] = self._changed.notify_all
        log.on_append.append(self._notify)

    @property
    def topic_partition(self) -> TopicPartition:
        """The topic partition that it reads."""
        return self._topic_partition

    def read(self, timeout_ms: int) -> list[EntryBlock]:
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or (self._connected and self._next < len(self._log)),
                timeout_ms / 1000,
            )
            self._check_open()
            blocks: list[EntryBlock] = []
            rows = 0
            if self._refused is not None:
                raise self._refused
            self._next = max(self._next, self._log.first)
            while self._connected and self._next < len(self._log) and rows < READ_MESSAGES_MAX:
                entry = self._log.get(self._next)
                assert entry is not None, "only entries before the first are trimmed"
                if not entry.hidden and (error := self._log.refused(entry, self._topic_partition)):
                    if blocks:
                        break
                    self._next += 1
                    raise error
                self._next += 1
                if entry.hidden or self._chunks.is_incomplete(entry):
                    continue
                if entry.chunk is not None:
                    self._refused = refused(entry, self._topic_partition)
                    break
                blocks.append(entry.block(columns=self._columns))
                rows += blocks[-1].rows
            if self._refused is not None and not blocks:
                raise self._refused
        return blocks

    def at_end(self) -> bool:
        with self._changed:
            self._check_open()
            if self._connected:
                return self._log.only_hidden_from(self._next) and self._expects < self._next
            if self._asked_without:
                raise BrokerUnavailableError(
                    f"A reader of {self._topic_partition} has no connection."
                )
            self._asked_without = True
            return True

    def is_connected(self) -> bool:
        """Whether it is connected now."""
        with self._changed:
            return self._connected and not self._closed

    def stayed_connected(self) -> bool:
        with self._changed:
            return self._stayed_connected

    def drop(self) -> None:
        """Lose the connection."""
        with self._changed:
            self._connected = self._stayed_connected = False
            self._asked_without = False

    def reconnect(self) -> None:
        """Reconnect after :meth:`drop`, and continue after the last entry handed out."""
        with self._changed:
            if not self._connected and not self._closed:
                self._connected = True
                self._chunks = ChunkAssembly()
                self._expects = self._next
                self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            if not self._closed:
                self._closed = True
                self._log.on_append.remove(self._notify)
                self._changed.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise BrokerError(f"A reader of {self._topic_partition} is closed.")


# -- Chunked messages ------------------------------------------------------------------------------


class ChunkAssembly:
    """Joins the parts of chunked messages; skips a message whose first part is missing."""

    def __init__(self) -> None:
        self._parts: dict[EntryId, int] = {}

    def is_incomplete(self, entry: StoredEntry) -> bool:
        """Accept an entry. Return whether it belongs to a message that is still incomplete."""
        chunk = entry.chunk
        if chunk is None:
            return False
        if chunk.number == 0:
            self._parts[chunk.first] = 0
        if self._parts.get(chunk.first) != chunk.number:
            return True
        self._parts[chunk.first] += 1
        if self._parts[chunk.first] < chunk.count:
            return True
        del self._parts[chunk.first]
        return False


def refused(entry: StoredEntry, where: TopicPartition) -> ChunkedMessageError:
    """Create the error for the last entry of a chunked message."""
    return of_entry(
        ChunkedMessageError,
        where,
        entry.id,
        f"Message {entry.id.ledger}:{entry.id.entry} of {where} is chunked. Nothing of it was "
        "acknowledged.",
        "Disable chunking at the producer.",
    )
