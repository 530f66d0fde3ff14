"""What a consumer and a Reader share: a subscription on the broker that has the topic partition.

It is lost with its connection, and when the broker ends it; then it is made again. What was not
taken by then is forgotten, because it comes again.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from keyshard.broker.pulsar.credentials import Credentials
from keyshard.broker.refused_entries import entry_of
from keyshard.broker.retrier import Retrier, Steps
from keyshard.broker.wire.cluster import Cluster
from keyshard.broker.wire.connection import WireConnection
from keyshard.broker.wire.dialling import Address
from keyshard.broker.wire.entries import ENTRY_MESSAGES_MAX, PAYLOAD_AT_ONCE, Decoded, RawEntry
from keyshard.broker.wire.errors import NOT_AUTHENTICATED, RefusedError, error_of, migrated
from keyshard.broker.wire.frames import api
from keyshard.broker.wire.permits import GRANT_MAX, Permits
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.refusals import Refusals
from keyshard.core.window.client_queue import RAW_ENTRY_BYTES, SentAhead
from keyshard.errors import (
    BrokerError,
    BrokerUnavailableError,
    KeyShardError,
    UnreadableEntryError,
)

TAKEN_BYTES_MAX = 4 * 1024 * 1024
"""Bytes of entries, as they are stored, after which one call takes no more."""
ENDED_REST_S = 0.2
"""Longest rest before the first attempt where the broker ended it, seconds. A topic that is being
deleted may take a consumer in and forget it without a word."""
UNASKED_MAX = 200
"""Entries beside twice the queue after which a broker does not mind permits."""
EXCESS_BYTES_MAX = 64 * 1024 * 1024
"""Most bytes that all queues of a connection together hold beyond their sizes. Permits count
messages, and messages may be larger than those before."""
WAITS_S = 5.0
"""Time without an answer to an attempt after which that is worth a word, seconds."""
RETRY_S = 0.1
"""Time between two attempts of a request while there is no connection, seconds."""

_ids = itertools.count(1)
_log = logging.getLogger(__name__)


class Excess:
    """Bytes that queues hold beyond their sizes. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.bytes = 0

    def change(self, by: int) -> None:
        """Count more, or less, bytes."""
        with self._lock:
            self.bytes += by


@dataclass(frozen=True, slots=True)
class Shared:
    """What all handles of one broker have in common."""

    cluster: Cluster
    reconnects: Retrier
    """Subscribes again; its lanes are the addresses of brokers."""
    nudges: Retrier
    """Says a word to brokers that may have forgotten to go on."""
    credentials: Credentials
    timeout_s: float
    """Longest time of one request, seconds."""
    excess: Excess = field(default_factory=Excess)
    """Of the queues of all handles."""


class Subscribed:
    """A subscription, and the entries that came and nobody took yet.

    Args:
        shared: What it has in common with the others.
        topic_partition: Of which it is.
        queue: Size of what the broker may send ahead.
        request: What to subscribe with; asked anew each time.
        ahead_max: Most messages that may be sent ahead at first, where that is less than the
            queue holds.
    """

    def __init__(
        self,
        shared: Shared,
        topic_partition: TopicPartition,
        queue: SentAhead,
        request: Callable[[], Any],
        *,
        ahead_max: int | None = None,
    ) -> None:
        self.topic_partition = topic_partition
        self.losses = 0
        """How often the subscription was lost."""
        self._shared = shared
        self._queue = queue
        self._permits = Permits(queue.size if ahead_max is None else min(queue.size, ahead_max))
        self._request = request
        self._changed = threading.Condition()
        self._entries: deque[RawEntry] = deque()
        self._held_bytes = self._excess_bytes = 0
        """Memory of these entries; how much of it is beyond the size of the queue."""
        self._overflown = False
        """Whether entries were forgotten that came: everything from there on comes again."""
        self._at: WireConnection | None = None
        self._id = 0
        """Of the subscription that stands; 0 while there is none."""
        self._lost_id = 0
        """Of the newest one that was lost, perhaps before it stood."""
        self._taken_id = 0
        """Of the one that entries were taken from last."""
        self._ring: Callable[[], None] | None = None
        self._closed = False
        self._refused: KeyShardError | None = None
        """Why the entry is refused that lies behind what was handed out last."""
        self._ended: KeyShardError | None = None
        """Why it never comes back."""
        self._refusals = Refusals()
        """Of the attempts to subscribe again."""
        self._waits_for: tuple[Address, float] | None = None
        """The broker that the attempt under way waits for, and since when."""
        self._subscribing: tuple[int, Future[Any]] = 0, Future()
        """The attempt that was begun last, and where its answer goes."""

    def open(self) -> None:
        """Subscribe for the first time.

        Raises:
            BrokerError: The broker refuses, or does not answer in time.
        """
        end_s = time.monotonic() + self._shared.timeout_s
        told: BrokerUnavailableError | None = None
        while True:
            try:
                for _ in self._subscribe(max(0.001, end_s - time.monotonic())):
                    pass
                return
            except BrokerUnavailableError as exc:
                # A topic that moves is served in a moment by another broker.
                if time.monotonic() + RETRY_S >= end_s:
                    # The last attempt may have had no time to learn why.
                    raise told or exc from exc
                told = exc
            time.sleep(RETRY_S)

    def take(self, timeout_s: float) -> list[RawEntry]:
        """Entries that came, oldest first; ``[]`` when none came in time.

        Raises:
            BrokerError: It is closed.
        """
        end_s = time.monotonic() + timeout_s
        with self._changed:
            while not self._entries:
                self._check_open()
                if self._overflown:
                    break
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    return []
                self._changed.wait(left_s)
            self._check_open()
            self._taken_id = self._id
            found: list[RawEntry] = []
            size = 0
            while self._entries and size < min(TAKEN_BYTES_MAX, self._queue.bytes_max):
                one = self._entries.popleft()
                size += len(one.data)
                found.append(one)
            if found:
                self._holds(self._held_bytes - size - RAW_ENTRY_BYTES * len(found))
                return found
            at, consumer_id = self._at, self._id
        self._ask_again(at, consumer_id)
        return []

    @property
    def at_once_bytes(self) -> int:
        """Memory of what is decoded at once: no more than its queue may take, bytes."""
        return min(PAYLOAD_AT_ONCE, self._queue.bytes_max)

    def _holds(self, size_bytes: int) -> None:
        """Its queue takes so much memory now; under the lock."""
        self._held_bytes = size_bytes
        excess = max(0, size_bytes - self._queue.bytes_max)
        if excess != self._excess_bytes:
            self._shared.excess.change(excess - self._excess_bytes)
            self._excess_bytes = excess

    def _forget_entries(self) -> None:
        """Drop the entries that were not taken: the broker sends them again. Under the lock."""
        self._entries.clear()
        self._overflown = False
        self._holds(0)

    def _ask_again(self, at: WireConnection | None, consumer_id: int) -> None:
        """Subscribe anew for what was forgotten; with permits for messages as large as that."""
        if at is None:
            return
        _log.info(
            "the broker sends more of %s ahead than was asked for, or than there is memory for; "
            "the rest is asked for again",
            self.topic_partition,
        )
        at.unregister(consumer_id)
        with suppress(BrokerUnavailableError):
            at.send("close_consumer", api.CloseConsumer(consumer_id=consumer_id, request_id=0))
        self.lost(consumer_id, ended=False)

    def handed_out(self, decoded: Decoded, entries: Sequence[RawEntry]) -> list[EntryBlock]:
        """What is handed out of entries that were taken last.

        Raises:
            KeyShardError: The first of them is refused.
        """
        rest = entries[decoded.seen :]
        if rest:
            with self._changed:
                if self._taken_id == self._id and not self._closed:
                    self._entries.extendleft(reversed(rest))
                    self._holds(self._held_bytes + memory_of(rest))
        self._refused = decoded.refused
        if self._refused is not None and not decoded.blocks:
            self.raise_refused()
        return decoded.blocks

    def raise_refused(self) -> None:
        """Raise what is refused; an entry that cannot be read only once, and not if it comes again.

        Raises:
            KeyShardError: That.
        """
        refused = self._refused
        if refused is None:
            return
        self._check_open()
        if isinstance(refused, UnreadableEntryError):
            self._refused = None
            with self._changed:
                if self._taken_id != self._id:
                    return
            self.passed(entry_of(refused))
        raise refused

    def passed(self, entry_id: EntryId) -> None:
        """An entry that cannot be read was named."""

    def used(
        self, messages: int, entries: Sequence[RawEntry], ahead_max: int | None = None
    ) -> None:
        """Let the broker send as many messages more as were taken last.

        Args:
            messages: As the broker counts them.
            entries: Those that they were.
            ahead_max: Most messages that it may send ahead from now on, where that is less than
                its queue holds.
        """
        # A count that a batch only declares says nothing about the size of messages.
        likely = 0 <= messages <= ENTRY_MESSAGES_MAX * len(entries)
        counted = messages if likely else len(entries)
        ahead = self._queue.measure(counted, memory_of(entries)) if counted else self._queue.size
        if ahead_max is not None:
            ahead = min(ahead, ahead_max)
        with self._changed:
            self._permits.resize(ahead)
            if self._at is None or self._taken_id != self._id:
                return
            permits = self._permits.use(messages)
            at, consumer_id = self._at, self._id
            self._overflown = self._overflown or self._permits.held > self._most_waiting()
        self._permit(at, consumer_id, permits)

    def _permit(self, at: WireConnection, consumer_id: int, messages: int) -> None:
        try:
            while messages > 0:
                permits = min(messages, GRANT_MAX)
                at.send("flow", api.Flow(consumer_id=consumer_id, permits=permits))
                messages -= permits
        except BrokerUnavailableError:
            _log.debug("%s lost its connection", self.topic_partition)

    def _most_waiting(self) -> int:
        """Entries from which on a broker does not mind permits."""
        return 2 * self._permits.ahead_max + UNASKED_MAX

    def when_ready(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once when there is something to take."""
        with self._changed:
            if not self._entries:
                self._ring = callback
                return
        callback()

    def is_connected(self) -> bool:
        """Whether the broker holds the subscription, as far as is known."""
        at = self._at
        return not self._closed and at is not None and at.stands

    def trouble(self) -> str:
        at, error, waits_for = self._at, self._refusals.error, self._waits_for
        if at is not None:
            return at.unresponsive()
        if self._closed or self._ended is not None:
            return ""
        if error is not None:
            return error.message
        if waits_for is not None and time.monotonic() - waits_for[1] > WAITS_S:
            waited_s = time.monotonic() - waits_for[1]
            return f"The broker at {waits_for[0]} has not answered for {waited_s:.0f} s."
        return ""

    def has_given_all(self) -> bool:
        """As the port's: its own queue is all that there is."""
        return self.is_connected() and not self._overflown

    def standing(self) -> tuple[WireConnection | None, int]:
        """The connection, while there is one, and the consumer id there."""
        with self._changed:
            return self._at, self._id

    def unconfirmed(self, timeout_s: float) -> int:  # noqa: ARG002 - a Reader acknowledges nothing
        """Wait until the broker has taken what was acknowledged; of how many that is unknown."""
        return 0

    def last_entry(self) -> EntryId | None:
        """The last entry stored; ``None`` for none.

        Raises:
            BrokerUnavailableError: No answer before the deadline (retriable).
        """
        end_s = time.monotonic() + self._shared.timeout_s
        while True:
            with self._changed:
                self._check_open()
                at, consumer_id = self._at, self._id
            try:
                if at is None:
                    raise BrokerUnavailableError(
                        f"{self.topic_partition} has no connection to its broker."
                    )
                asked = api.GetLastMessageId(consumer_id=consumer_id, request_id=0)
                left_s = max(0.001, end_s - time.monotonic())
                found = at.ask("get_last_message_id", asked, left_s).last_message_id
                none = found.entry >= 1 << 63
                return None if none else EntryId(found.ledger, found.entry)
            except (BrokerUnavailableError, RefusedError) as exc:
                error = self._error("ask for the last entry of", exc)
                if not error.retriable or time.monotonic() + RETRY_S >= end_s:
                    raise error from exc
            time.sleep(RETRY_S)

    def close(self, timeout_s: float | None = None) -> None:
        """Give the subscription back; what was sent before is done before. Idempotent.

        Args:
            timeout_s: Longest wait for the broker, seconds; ``None``: that of a request.

        Raises:
            BrokerUnavailableError: The broker did not answer in time.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            at, consumer_id = self._at, self._id
            self._at = self._ring = None
            self._forget_entries()
            self._changed.notify_all()
        if at is not None:
            self._give_back(
                at, consumer_id, self._shared.timeout_s if timeout_s is None else timeout_s
            )

    def came(self, consumer_id: int, entries: Sequence[RawEntry]) -> None:
        with self._changed:
            if consumer_id != self._id or self._closed:
                return
            if len(self._entries) + len(entries) > self._most_waiting():
                self._overflown = True
            self._take_in(entries)
            ring, self._ring = self._ring, None
            self._changed.notify()
        if ring is not None:
            ring()

    def _take_in(self, entries: Sequence[RawEntry]) -> None:
        """Queue what came, up to the first entry that there is no memory for; under the lock."""
        size = self._held_bytes + memory_of(entries)
        if not self._overflown and size <= self._queue.bytes_max:
            self._entries.extend(entries)
            self._held_bytes = size
            return
        for one in entries:
            full = self._held_bytes > self._queue.bytes_max
            if full and self._shared.excess.bytes > EXCESS_BYTES_MAX:
                self._overflown = True
            if self._overflown:
                return
            self._entries.append(one)
            self._holds(self._held_bytes + memory_of((one,)))

    def lost(self, consumer_id: int, *, ended: bool) -> None:
        with self._changed:
            self._lost_id = max(self._lost_id, consumer_id)
            if self._closed or self._id != consumer_id:
                return
            self._at = None
            self._id = 0
            self.losses += 1
            self._forget_entries()
        self._shared.reconnects.until_true(self._reconnect, ENDED_REST_S if ended else 0.0)

    def migrated(self, consumer_id: int, url: str) -> None:
        with self._changed:
            subscribing_id, asked = self._subscribing
            if consumer_id not in (self._id, subscribing_id):
                return
        error = migrated(self.topic_partition, url)
        self._end(error)
        with suppress(InvalidStateError):
            asked.set_exception(error)

    def _end(self, error: KeyShardError) -> None:
        """It never comes back; the next call to take something raises why."""
        with self._changed:
            if self._closed or self._ended is not None:
                return
            self._ended = error
            self._at, self._id = None, 0
            self._forget_entries()
            ring, self._ring = self._ring, None
            self._changed.notify_all()
        if ring is not None:
            ring()

    def subscribed_again(self, at: WireConnection, consumer_id: int) -> None:
        """Called between a subscription and its first entry, and when it stands."""

    def _is_over(self) -> bool:
        return self._closed or self._ended is not None

    def _reconnect(self) -> Steps:
        try:
            for address in self._subscribe(self._shared.timeout_s):
                self._waits_for = address, time.monotonic()
                yield address
                if self._is_over():
                    return True
        except KeyShardError as exc:
            _log.debug("%s is not subscribed again yet: %s", self.topic_partition, exc)
            if self._refusals.failed(exc, time.monotonic()):
                self._end(exc)
            return self._is_over()
        finally:
            self._waits_for = None
        self._refusals.succeeded()
        return True

    def _subscribe(self, timeout_s: float) -> Generator[Address, None, None]:
        """Subscribe; yields the address of each broker before it waits for that one."""
        consumer_id, asked = self._subscribing = next(_ids), Future[Any]()
        at: WireConnection | None = None
        try:
            path = self._shared.cluster.path(self.topic_partition.name, timeout_s)
            at, left_s = yield from path
            at.register(consumer_id, self)
            request = self._request()
            request.consumer_id = consumer_id
            at.ask("subscribe", request, left_s, asked)
        except (RefusedError, BrokerUnavailableError) as exc:
            if at is not None:
                at.unregister(consumer_id)
                if isinstance(exc, RefusedError) and exc.code == NOT_AUTHENTICATED:
                    self._shared.cluster.retire(at)
                if isinstance(exc, BrokerUnavailableError) and at.stands:
                    # It may answer yet: then nobody must hold the range.
                    self._forget(at, consumer_id)
            raise self._error("subscribe to", exc) from exc
        self.subscribed_again(at, consumer_id)
        with self._changed:
            if self._lost_id >= consumer_id:
                raise BrokerUnavailableError(
                    f"Could not subscribe to {self.topic_partition}: it is being moved."
                )
            closed = self._closed or self._ended is not None
            if not closed:
                self._at, self._id = at, consumer_id
            permits = self._permits.begin()
        if closed:
            self._give_back(at, consumer_id, self._shared.timeout_s)
            return
        try:
            at.send("flow", api.Flow(consumer_id=consumer_id, permits=permits))
        except BrokerUnavailableError:
            # The reading thread may have told everybody before this one was there to be told.
            self.lost(consumer_id, ended=False)
        # What was acknowledged in between.
        self.subscribed_again(at, consumer_id)

    def _give_back(self, at: WireConnection, consumer_id: int, timeout_s: float) -> None:
        request = api.CloseConsumer(consumer_id=consumer_id, request_id=0)
        try:
            at.ask("close_consumer", request, timeout_s)
        except BrokerUnavailableError:
            if at.stands:
                raise
            # The broker lets go of whoever lost the connection.
        except RefusedError as exc:
            raise self._error("close", exc) from exc
        finally:
            at.unregister(consumer_id)

    def _forget(self, at: WireConnection, consumer_id: int) -> None:
        try:
            at.send("close_consumer", api.CloseConsumer(consumer_id=consumer_id, request_id=0))
        except BrokerUnavailableError:
            return

    def _error(self, action: str, exc: RefusedError | BrokerUnavailableError) -> BrokerError:
        if isinstance(exc, BrokerUnavailableError):
            return BrokerUnavailableError(
                f"Could not {action} {self.topic_partition}: {exc.message}"
            )
        where = self.topic_partition
        return error_of(exc, action, where, where.topic, self._shared.credentials.who())

    def _check_open(self) -> None:
        if self._ended is not None:
            raise self._ended
        if self._closed:
            raise BrokerError(f"The handle of {self.topic_partition} is closed.")


def memory_of(entries: Sequence[RawEntry]) -> int:
    """Memory that entries take before they are decoded, bytes."""
    return sum([len(one.data) for one in entries]) + RAW_ENTRY_BYTES * len(entries)
