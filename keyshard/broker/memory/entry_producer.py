"""A client's entry producer at the in-memory broker.

Private to :mod:`keyshard.broker.memory`, which documents the package and re-exports public names.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import pairwise

from keyshard.broker.memory.log import Message
from keyshard.broker.memory.publishing import Publishing, Write
from keyshard.broker.port import PublishOptions
from keyshard.broker.unconfirmed import (
    AcceptedLostError,
    BeginAgainError,
    MaybeStoredError,
    Pending,
    Unconfirmed,
    failed_entry,
)
from keyshard.columns.outgoing import Outgoing, OutgoingMessage, OutgoingSlice
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.publishing import ForgottenError, OtherWriterError, UnfitError, UnsureError
from keyshard.errors import (
    BrokerError,
    BrokerUnavailableError,
    DeduplicationError,
    KeyShardError,
    MessageTooLargeError,
    ProducerFencedError,
)

StoreEntry = Callable[[TopicPartition, Sequence[Message], str, int], EntryId]
"""Stores messages as one entry of a producer, by its name and the first sequence id."""


class _Confirmation(Future[EntryId | None]):
    """A future whose ``result`` checks its deadline, because no thread watches the time.

    Args:
        expire: Fails the entries whose deadline has passed.
        deadline_s: Monotonic seconds.
    """

    def __init__(self, expire: Callable[[], None], deadline_s: float) -> None:
        super().__init__()
        self._expire = expire
        self._deadline_s = deadline_s

    def result(self, timeout: float | None = None) -> EntryId | None:
        left_s = max(0.0, self._deadline_s - time.monotonic())
        with suppress(TimeoutError):
            self.exception(left_s if timeout is None else min(timeout, left_s))
        if not self.done() and time.monotonic() >= self._deadline_s:
            self._expire()
        return super().result(0)


class MemoryEntryProducer:
    """Implements the ``EntryProducer`` port; created by ``MemoryBroker.entry_producer``.

    Deadlines are noticed by the calls that wait: ``publish``, ``flush`` and the futures.
    """

    def __init__(
        self,
        lock: threading.RLock,
        publishing: Publishing,
        store: StoreEntry,
        topic_partition: TopicPartition,
        *,
        how: PublishOptions,
        name: str,
        message_bytes_max: int,
        knows_every_id: bool,
        answers: Callable[[], bool],
        last_entry: Callable[[], EntryId | None],
    ) -> None:
        self._changed = threading.Condition(lock)
        self._publishing = publishing
        self._store = store
        self.topic_partition = topic_partition
        self._how = how
        self._name = name
        self._message_bytes_max = message_bytes_max
        self.knows_every_id = knows_every_id
        self.answers = answers
        self._last_entry = last_entry
        self._queue = Unconfirmed(named=how.name is not None, encode=self._encoded)
        self._connected = self._closed = self._sending = False
        self._connections = 0
        """Connections so far; a confirmation counts on the connection that sent its entry."""
        self._ended: KeyShardError | None = None
        self._last_error: KeyShardError | None = None
        """Why the last attempt to open failed."""

    @property
    def last_sequence_id(self) -> int:
        with self._changed:
            return self._queue.last_sequence_id

    @property
    def message_bytes_max(self) -> int:
        return self._message_bytes_max

    def open(self) -> None:
        """Open the producer.

        Raises:
            ProducerBusyError: Another producer has the name.
            QuotaExceededError: The quota of the topic is exceeded.
            ProducerFencedError: Another program published under the name.
            DeduplicationError: The broker does not know what it confirmed.
        """
        with self._changed:
            last = self._publishing.open(self.topic_partition, self._name, self)
            try:
                self._queue.opened(last, knows_every_id=self.knows_every_id)
            except UnfitError as exc:
                self._publishing.leave(self.topic_partition, self._name, self)
                raise self._unfit(exc) from None
            self._connected, self._last_error = True, None
            self._connections += 1
            self._send()

    def has_ended(self) -> bool:
        return self._ended is not None

    def last_entry(self) -> EntryId | None:
        with self._changed:
            return self._last_entry()

    def check(self, message: OutgoingMessage) -> None:
        self._encoded([message], 0)

    def publish_all(
        self, columns: Outgoing, ends: Sequence[int], sequence_id: int
    ) -> list[Future[EntryId | None]]:
        found: list[Future[EntryId | None]] = []
        try:
            for start, stop in pairwise([0, *ends]):
                found.append(self.publish(OutgoingSlice(columns, start, stop), sequence_id + start))
        except KeyShardError as exc:
            found += (failed_entry(exc) for _ in range(len(ends) - len(found)))
        return found

    def publish(self, rows: Sequence[OutgoingMessage], sequence_id: int) -> Future[EntryId | None]:
        entry = Pending(rows, sequence_id, self._encoded(rows, sequence_id))
        end_s = time.monotonic() + self._how.send_timeout_s
        with self._changed:
            room = self._changed.wait_for(
                lambda: self._is_over() or not self._is_full(entry), self._how.send_timeout_s
            )
            self._check_open()
            if not room:
                raise self._late()
            entry.deadline_s = end_s
            entry.done = _Confirmation(self._expire, end_s)
            try:
                self._queue.add(entry)
            except UnfitError as exc:
                raise self._unfit(exc) from None
            self._send()
        return entry.done

    def flush(self) -> None:
        with self._changed:
            below = self._queue.added
            while self._queue.holds(below) and (end_s := self._queue.deadline_s) is not None:
                if end_s <= time.monotonic():
                    self._expire()
                else:
                    self._changed.wait(end_s - time.monotonic())
            self._check_open()

    def close(self, timeout_s: float | None = None) -> None:  # noqa: ARG002 - nothing waits
        with self._changed:
            if not self._closed:
                self._closed = True
                self.drop()
                self._fail(
                    self._queue.clear(),
                    BrokerError(f"The producer of {self.topic_partition} is closed."),
                )

    def is_connected(self) -> bool:
        """Whether the broker takes entries."""
        with self._changed:
            return self._connected

    def drop(self) -> None:
        """Lose the connection."""
        with self._changed:
            self._connected = False
            self._publishing.leave(self.topic_partition, self._name, self)

    def reconnect(self) -> None:
        """Reconnect after :meth:`drop`."""
        with self._changed:
            if self._is_over() or self._connected or not self._connections:
                return
            try:
                self.open()
            except KeyShardError as exc:
                self._last_error = exc
                if isinstance(exc, BeginAgainError) or not exc.retriable:
                    self._end(exc)

    def _confirmed(self, connection: int, sequence_id: int, stored: EntryId | None) -> None:
        """Accept a confirmation of the broker, unless its connection was lost."""
        with self._changed:
            if not self._connected or connection != self._connections:
                return
            try:
                done = self._queue.confirm(sequence_id, duplicate=stored is None)
            except ForgottenError:
                self._end(self._fenced())
                return
            for entry in done:
                entry.done.set_result(stored)
            self._changed.notify_all()
            if self._queue.to_prove:
                self.drop()
                self.reconnect()
            self._send()

    def _send(self) -> None:
        """Send the entries that are due. Confirmations may arrive while it runs."""
        if self._sending:
            return
        self._sending = True
        try:
            while self._connected and (entries := self._queue.next(1)):
                for entry in entries:
                    self._publishing.write(self.topic_partition, self._write(entry))
        finally:
            self._sending = False

    def _write(self, entry: Pending) -> Write:
        rows, first = entry.rows, entry.first

        def store() -> EntryId:
            return self._store(self.topic_partition, list(map(_stored, rows)), self._name, first)

        confirmed = partial(self._confirmed, self._connections)
        return Write(self, self._name, first, entry.last, store, confirmed)

    def _encoded(
        self,
        rows: Sequence[OutgoingMessage],
        sequence_id: int,  # noqa: ARG002 - nothing is encoded
    ) -> bytes:
        size = sum(one.size() for one in rows)
        if size > self._message_bytes_max:
            raise MessageTooLargeError(
                f"{len(rows)} message(s) with key {rows[0].key!r} to {self.topic_partition} have "
                f"{size} bytes, more than the broker's limit of {self._message_bytes_max}.",
                "Make the value smaller.",
            )
        return b"\0" * size

    def _is_full(self, entry: Pending) -> bool:
        queue, how = self._queue, self._how
        return len(queue) > 0 and (
            queue.messages + len(entry.rows) > how.pending_messages_max
            or queue.bytes + entry.size > how.pending_bytes_max
        )

    def _expire(self) -> None:
        with self._changed:
            now_s, end_s = time.monotonic(), self._queue.deadline_s
            if end_s is None or end_s > now_s:
                return
            error = self._late()
            if self._how.name is not None:
                self._end(error)
            else:
                self._fail(self._queue.drop_late(now_s), error)

    def _end(self, error: KeyShardError) -> None:
        self._ended = error
        self.drop()
        self._fail(self._queue.clear(), error)

    def _fail(self, entries: Sequence[Pending], error: KeyShardError) -> None:
        for entry in entries:
            entry.done.set_exception(error)
        self._changed.notify_all()

    def _late(self) -> KeyShardError:
        if self._last_error is not None:
            return self._last_error
        return BrokerUnavailableError(
            f"{self.topic_partition}: a message was not confirmed within "
            f"{self._how.send_timeout_s:g} s, because the in-memory broker is unavailable."
        )

    def _fenced(self) -> ProducerFencedError:
        return ProducerFencedError(
            f"Another program publishes to {self.topic_partition} as producer {self._name!r}: the "
            f"broker already has message {self._queue.last_sequence_id} of this name.",
            "If that was another attempt to write the same batch, repeat the call. Otherwise "
            "stop that program, or use another sink id.",
        )

    def _unfit(self, exc: UnfitError) -> KeyShardError:
        """Return the error for ids of the broker that do not fit those of the producer."""
        if isinstance(exc, OtherWriterError):
            return self._fenced()
        if isinstance(exc, ForgottenError):
            return DeduplicationError(
                f"Deduplication is disabled for {self.topic_partition}, so rows could be stored "
                "twice.",
                "Call deduplicate() of the cluster.",
            )
        if isinstance(exc, UnsureError):
            return MaybeStoredError(
                f"Producer {self._name!r} lost its connection to {self.topic_partition}, and this "
                "broker may not know which of its messages are stored.",
                "Repeat the call.",
            )
        return AcceptedLostError(
            f"{self.topic_partition} has lost messages of producer {self._name!r} that an "
            "earlier attempt had sent, because a write to its storage failed.",
            "Repeat the call.",
        )

    def _is_over(self) -> bool:
        return self._closed or self._ended is not None

    def _check_open(self) -> None:
        if self._ended is not None:
            raise self._ended
        if self._closed:
            raise BrokerError(f"The producer of {self.topic_partition} is closed.")


def _stored(message: OutgoingMessage) -> Message:
    return Message(
        message.value, message.key, message.ordering_key, dict(message.properties or {}),
        message.event_ms or 0, key_is_base64=message.key_is_base64,
        deliver_at_ms=message.deliver_at_ms,
    )  # fmt: skip
