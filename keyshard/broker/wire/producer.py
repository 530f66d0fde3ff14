"""Publishes entries to one topic partition, in order, until each is confirmed.

A producer is lost with its connection, or when the broker ends it. It is then opened again, and
unconfirmed entries are sent again. Deduplication by name and sequence id prevents duplicates.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from keyshard.base_error import AGAIN
from keyshard.broker.port import PublishOptions, ReadOptions
from keyshard.broker.unconfirmed import (
    BeginAgainError,
    Pending,
    Unconfirmed,
    failed_entry,
)
from keyshard.broker.wire.compression import UNPACKED_BYTES_MAX
from keyshard.broker.wire.connect import Address
from keyshard.broker.wire.connection import FRAME_BYTES_MAX, WireConnection
from keyshard.broker.wire.consumer import WireReader
from keyshard.broker.wire.encoding import EncodedRows, EntryHead, check_readable, encoded
from keyshard.broker.wire.errors import RefusedError, order_broken, producing_error, unfit
from keyshard.broker.wire.frames import api
from keyshard.broker.wire.native_encoder import encode_all, frames
from keyshard.broker.wire.reconnect import RETRY_S, ReconnectingHandle, Shared
from keyshard.broker.wire.schema import declared
from keyshard.columns.outgoing import Outgoing, OutgoingMessage
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.publishing import ForgottenError, UnfitError
from keyshard.core.releases import knows_every_id
from keyshard.errors import (
    BrokerError,
    BrokerUnavailableError,
    DeduplicationError,
    KeyShardError,
    MessageTooLargeError,
    ProducerBusyError,
    ProducerFencedError,
)

PUMP_BYTES = 1 << 20
"""Bytes of frames after which a connection turns to its next producer."""
ASK_AGAIN_S = 0.1
"""Pause before an undecided duplicate is asked for again, seconds."""
SEQUENCE_ID_MAX = (1 << 63) - 1
"""Largest sequence id, and the one with the longest encoding."""
BEYOND = EntryId((1 << 63) - 1, (1 << 63) - 1)
"""Position after all entries."""
_COMPRESSIONS = {"none": 0, "lz4": 1, "zlib": 2, "zstd": 3, "snappy": 4}
_DUPLICATE = 1 << 63
"""Ledger ids from here on say that a message was stored before."""
_UNDECIDED = "Cannot determine whether the message is a duplicate"

_log = logging.getLogger(__name__)


class WireProducer(ReconnectingHandle):
    """A producer of one topic partition.

    Args:
        shared: State that all handles share.
        topic_partition: The topic partition.
        how: Name, limits and format.
    """

    request_name = "producer"
    action = "publish to"
    rest_s = RETRY_S

    def __init__(
        self, shared: Shared, topic_partition: TopicPartition, how: PublishOptions
    ) -> None:
        super().__init__(shared, topic_partition)
        self._how = how
        self._name = (how.name or "").encode()
        self._schema_version = b""
        self._bytes_max = FRAME_BYTES_MAX
        self._knows_every_id = True
        self._made_s = time.monotonic()
        self._queue = Unconfirmed(named=how.name is not None, encode=self._encoded)
        self._leaving: tuple[WireConnection, int] | None = None
        """A producer to close before the next is opened."""
        self._last_error: KeyShardError | None = None
        """Why the last attempt to open or to publish failed."""
        self._watched = False
        """Whether the deadline of the oldest entry is watched."""
        self._resolving: list[int] = []
        """Numbers of entries that have left the queue, while futures are being resolved: the lowest
        one of each call that resolves some."""

    @property
    def last_sequence_id(self) -> int:
        with self._changed:
            return self._queue.last_sequence_id

    @property
    def knows_every_id(self) -> bool:
        with self._changed:
            return self._knows_every_id

    @property
    def message_bytes_max(self) -> int:
        with self._changed:
            return min(self._bytes_max, UNPACKED_BYTES_MAX)

    def has_ended(self) -> bool:
        return self._ended is not None

    def last_entry(self) -> EntryId | None:
        how = ReadOptions(receiver_queue_size=1, columns=())
        reader = WireReader(self._shared, self.topic_partition, BEYOND, how)
        reader.open()
        try:
            return reader.last_entry()
        finally:
            reader.close()

    def check(self, message: OutgoingMessage) -> None:
        self._encoded([message], SEQUENCE_ID_MAX)

    def publish(self, rows: Sequence[OutgoingMessage], sequence_id: int) -> Future[EntryId | None]:
        data = self._encoded(rows, sequence_id)
        entry = Pending(EncodedRows(data, len(rows)), sequence_id, data)
        self._publish((entry,))
        return entry.done

    def publish_all(
        self, columns: Outgoing, ends: Sequence[int], sequence_id: int
    ) -> list[Future[EntryId | None]]:
        entries: list[Pending] = []
        try:
            for some in encode_all(columns, ends, self._head(), sequence_id):
                entries += some
                self._publish(some)
        except KeyShardError as exc:
            late = [failed_entry(exc) for _ in range(len(ends) - len(entries))]
            return [*(entry.done for entry in entries), *late]
        return [entry.done for entry in entries]

    def _publish(self, entries: Sequence[Pending]) -> None:
        """Add entries as there is room. If that fails, those that were not added fail, too."""
        added = 0
        try:
            for entry in entries:
                self._checked(entry.data, entry.rows)
            while added < len(entries):
                added += self._add(entries[added:])
        except KeyShardError as exc:
            _fail(entries[added:], exc)
            raise

    def _add(self, entries: Sequence[Pending]) -> int:
        """Wait for room, and add as many entries as there is room for; return their number."""
        added = 0
        with self._changed:
            self._wait_for_room(entries[0])
            deadline_s = time.monotonic() + self._how.send_timeout_s
            for entry in entries:
                if self._is_full(entry):
                    break
                entry.deadline_s = deadline_s
                try:
                    self._queue.add(entry)
                except UnfitError as exc:
                    raise self._unfit(exc) from None
                added += 1
            at, producer_id = self._at, self._id
            watched, self._watched = self._watched, True
        if not watched:
            self._shared.nudges.until_true(self._expire, self._how.send_timeout_s)
        if at is not None:
            at.has_frames(producer_id)
        return added

    def flush(self) -> None:
        with self._changed:
            queue, below = self._queue, self._queue.added
            # A caller may look at its futures when this returns.
            while queue.holds(below) or any(number < below for number in self._resolving):
                # The loop ends: each entry is confirmed, or fails at its deadline.
                self._changed.wait(self._how.send_timeout_s)
            self._check_open()

    def close(self, timeout_s: float | None = None) -> None:
        """Close the producer; unconfirmed entries fail. Idempotent.

        Args:
            timeout_s: Longest wait for the broker, seconds; ``None``: the timeout of a request.

        Raises:
            BrokerUnavailableError: The broker did not answer in time.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            at, producer_id = self._at, self._id
            leaving, self._leaving = self._leaving, None
            failed = self._emptied()
        self._fail(failed, BrokerError(f"The producer of {self.topic_partition} is closed."))
        for one in (leaving, (at, producer_id) if at is not None else None):
            if one is not None:
                self._leave(*one, self._shared.timeout_s if timeout_s is None else timeout_s)

    # -- Called by the connection ------------------------------------------------------------------

    def next_frames(self) -> bytes | bytearray:
        with self._changed:
            if self._at is None:
                return b""
            return frames(self._id, self._queue.next(PUMP_BYTES))

    def receipts(self, commands: Sequence[Any]) -> None:
        done: list[tuple[Pending, EntryId | None]] = []
        broken: int | None = None
        with self._changed:
            at, producer_id = self._at, self._id
            if at is None:
                return
            for command in commands:
                if command.producer_id != producer_id:
                    continue
                where, first = command.message_id, command.sequence_id
                stored = None if where.ledger >= _DUPLICATE else EntryId(where.ledger, where.entry)
                try:
                    confirmed = self._queue.confirm(first, duplicate=stored is None)
                except ForgottenError:
                    broken = first
                    break
                done += [(entry, stored) for entry in confirmed]
            to_prove, has_next = self._queue.to_prove, self._queue.has_next
            entries = [entry for entry, _ in done]
            self._resolve(entries)
        for entry, stored in done:
            with suppress(InvalidStateError):
                entry.done.set_result(stored)
        self._resolved(entries)
        if broken is not None:
            self._end(order_broken(self.topic_partition, self._how.name, broken))
        elif to_prove:
            self._open_again()
        elif has_next:
            at.has_frames(producer_id)

    def refused(self, command: Any) -> None:
        refused = RefusedError(command.error, command.message)
        with self._changed:
            if command.producer_id != self._id:
                return
            probing = self._queue.probing
        if probing and _UNDECIDED in refused.said:
            self._shared.nudges.until_true(self._ask_again, ASK_AGAIN_S)
            return
        error = self._refusal(self.action, refused)
        if not error.retriable:
            self._refuse(command.sequence_id, error)
            return
        self._last_error = error
        self._open_again()

    # -- The queue: call these under the lock ------------------------------------------------------

    def _wait_for_room(self, entry: Pending) -> None:
        queue, end_s = self._queue, time.monotonic() + self._how.send_timeout_s
        while True:
            self._check_open()
            if not self._is_full(entry):
                return
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise self._late(f"{queue.messages} messages wait for their confirmation")
            self._changed.wait(left_s)

    def _is_full(self, entry: Pending) -> bool:
        """Return whether an entry must wait for room. An empty queue accepts any entry."""
        queue, how = self._queue, self._how
        return len(queue) > 0 and (
            queue.messages + len(entry.rows) > how.pending_messages_max
            or queue.bytes + entry.size > how.pending_bytes_max
        )

    def _emptied(self) -> list[Pending]:
        """Forget all entries, and return them."""
        failed = self._queue.clear()
        self._at, self._id = None, 0
        self._resolve(failed)
        return failed

    def _resolve(self, entries: Sequence[Pending]) -> None:
        """Note that the futures of entries that left the queue are being resolved."""
        if entries:
            self._resolving.append(min(one.number for one in entries))
        self._changed.notify_all()

    # -- Frames ------------------------------------------------------------------------------------

    def _head(self) -> EntryHead:
        return EntryHead(
            self._name, time.time_ns() // 1_000_000, _COMPRESSIONS[self._how.compression],
            self._schema_version,
        )  # fmt: skip

    def _encoded(self, rows: Sequence[OutgoingMessage], sequence_id: int) -> bytes:
        check_readable(rows, self.topic_partition)
        return self._checked(encoded(rows, self._head(), sequence_id), rows)

    def _checked(self, data: bytes, rows: Sequence[OutgoingMessage]) -> bytes:
        if len(data) > self._bytes_max:
            raise MessageTooLargeError(
                f"{len(rows)} message(s) with key {rows[0].key!r} to {self.topic_partition} have "
                f"{len(data)} bytes, more than the broker's limit of {self._bytes_max}.",
                "Make the value smaller, or raise the broker's maxMessageSize.",
            )
        return data

    # -- Opening, and its failures -----------------------------------------------------------------

    def _may_pass(self, error: KeyShardError) -> bool:
        busy_s = self._how.busy_timeout_s
        if busy_s is not None and isinstance(error, ProducerBusyError):
            return time.monotonic() < self._made_s + busy_s
        return error.retriable

    def _fails_for_good(self, error: KeyShardError) -> bool:
        self._last_error = error
        fatal = isinstance(error, DeduplicationError | BeginAgainError | ProducerFencedError)
        return fatal or super()._fails_for_good(error)

    def _before_opening(self, timeout_s: float) -> Generator[Address, None, None]:
        if (leaving := self._leaving) is not None:
            yield leaving[0].address
            with self._changed:
                # ``close`` may have closed that producer during the wait for a thread.
                leaving, self._leaving = self._leaving, None
            if leaving is not None:
                self._leave(*leaving, timeout_s)

    def _opened(self, at: WireConnection, handle_id: int, answer: Any) -> None:
        if self._taken_into_use(at, handle_id, answer):
            at.has_frames(handle_id)
        else:
            self._leave(at, handle_id, self._shared.timeout_s)

    def _taken_into_use(self, at: WireConnection, producer_id: int, response: Any) -> bool:
        """Start to use the new producer; return whether it is still needed."""
        with self._changed:
            if self._lost_id >= producer_id:
                raise BrokerUnavailableError(
                    f"Could not publish to {self.topic_partition}: it is being moved.", AGAIN
                )
            if self._is_over():
                return False
            self._name = response.producer_name
            self._schema_version = response.schema_version
            self._bytes_max = at.message_bytes_max
            self._knows_every_id = knows_every_id(at.server)
            try:
                self._queue.opened(response.last_sequence_id, knows_every_id=self._knows_every_id)
            except UnfitError as exc:
                self._leaving = at, producer_id
                raise self._unfit(exc) from None
            self._last_error = None
            self._at, self._id = at, producer_id
        return True

    def _request(self, handle_id: int) -> Any:
        request = api.Producer(
            topic=self.topic_partition.name.encode(), producer_id=handle_id, request_id=0,
            epoch=handle_id, user_provided_producer_name=self._how.name is not None,
        )  # fmt: skip
        if self._name:
            request.producer_name = self._name
        if self._how.schema is not None:
            request.schema.CopyFrom(declared(self._how.schema))
        return request

    def _open_again(self) -> None:
        """Close the producer at the broker, and open it again."""
        with self._changed:
            if self._at is None or self._is_over():
                return
            self._leaving = self._at, self._id
            at, producer_id = self._leaving
            self._at, self._id = None, 0
        at.unregister(producer_id)
        self._shared.reconnects.until_true(self._reconnect)

    def _leave(self, at: WireConnection, producer_id: int, timeout_s: float) -> None:
        """Close a producer at its broker, and wait for the answer."""
        at.unregister(producer_id)
        request = api.CloseProducer(producer_id=producer_id, request_id=0)
        try:
            at.ask("close_producer", request, timeout_s)
        except BrokerUnavailableError:
            if at.is_open:
                raise
            # The broker closes the producers of a lost connection.
        except RefusedError as exc:
            _log.debug("closing a producer of %s: %s", self.topic_partition, exc.said)

    def _forget(self, at: WireConnection, handle_id: int) -> None:
        with suppress(BrokerUnavailableError):
            at.send("close_producer", api.CloseProducer(producer_id=handle_id, request_id=0))

    def _ask_again(self) -> bool:
        with self._changed:
            self._queue.probe_again()
            at, producer_id = self._at, self._id
        if at is not None:
            at.has_frames(producer_id)
        return True

    def _expire(self) -> bool:
        """Fail entries that were not confirmed in time; watch the next."""
        with self._changed:
            now_s = time.monotonic()
            first_s = self._queue.deadline_s
            expired = first_s is not None and first_s <= now_s
            ends = expired and self._how.name is not None
            late = [] if ends else self._queue.drop_late(now_s)
            first_s = None if ends else self._queue.deadline_s
            self._watched = first_s is not None
            self._resolve(late)
        if first_s is not None:
            self._shared.nudges.until_true(self._expire, first_s - now_s)
        if expired:
            error = self._late(f"a message was not confirmed within {self._how.send_timeout_s:g} s")
            self._fail(late, error)
            if ends:
                self._end(error)
        return True

    def _refuse(self, sequence_id: int, error: KeyShardError) -> None:
        """Fail what the broker refuses for good, or the producer if it has a name."""
        if self._how.name is not None:
            self._end(error)
            return
        with self._changed:
            failed = self._queue.drop(sequence_id)
            self._resolve(failed)
            at, producer_id, has_next = self._at, self._id, self._queue.has_next
        self._fail(failed, error)
        if at is not None and has_next:
            at.has_frames(producer_id)

    def _end(self, error: KeyShardError) -> None:
        """End the producer: a later entry must not be stored before an earlier one."""
        with self._changed:
            if self._is_over():
                return
            self._ended = error
            at, producer_id = self._at, self._id
            failed = self._emptied()
        if at is not None:
            at.unregister(producer_id)
            self._forget(at, producer_id)
        self._fail(failed, error)

    def _fail(self, entries: Sequence[Pending], error: KeyShardError) -> None:
        """Fail entries that left the queue."""
        _fail(entries, error)
        self._resolved(entries)

    def _resolved(self, entries: Sequence[Pending]) -> None:
        """Note that the futures of entries that left the queue are resolved."""
        if entries:
            with self._changed:
                self._resolving.remove(min(one.number for one in entries))
                self._changed.notify_all()

    def _late(self, what: str) -> KeyShardError:
        error = self._last_error
        if error is not None and not isinstance(error, BrokerUnavailableError):
            return error
        if error is None:
            why, remedy = "", "Check the health of the broker."
        else:
            why, remedy = f" {error.problem}", error.remedy
        return BrokerUnavailableError(f"{self.topic_partition}: {what}.{why}", remedy)

    def _unfit(self, exc: UnfitError) -> KeyShardError:
        return unfit(exc, self.topic_partition, self._name, self._queue.last_sequence_id)

    def _refusal(self, action: str, refused: RefusedError) -> KeyShardError:
        return producing_error(
            refused, action, self.topic_partition, self._shared.credentials.who()
        )


def _fail(entries: Iterable[Pending], error: KeyShardError) -> None:
    for one in entries:
        with suppress(InvalidStateError):
            one.done.set_exception(error)
