"""A consumer that a worker hosts, as everybody else sees it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from keyshard.broker.hosted.wire import Delivery, Taken
from keyshard.broker.refused_entries import entry_of
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.ring.hash_range import HashRange
from keyshard.errors import BrokerError, UnreadableEntryError


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a consumer was subscribed with: what it takes to subscribe it again."""

    topic_partition: TopicPartition
    subscription: str
    hash_range: HashRange
    consumer_name: str
    receiver_queue_size: int
    receiver_queue_bytes: int | None = None
    columns: Collection[str] | None = None


class Holders:
    """Which consumer of a topic partition has which entries in hand.

    An acknowledgement has to go the way that the entry came: what a worker loses with its
    connection then comes again through the same consumer, and is acknowledged again. Through
    another worker it would be lost, while the broker waits for the consumer that has the entry.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: dict[EntryId, HostedConsumer] = {}
        self._held: dict[HostedConsumer, set[EntryId]] = {}
        """The same by consumer: one that loses its worker is forgotten beside all others."""

    def took(self, consumer: HostedConsumer, entries: Iterable[EntryId]) -> None:
        """A consumer has handed out entries."""
        with self._lock:
            own = self._held.setdefault(consumer, set())
            for entry_id in entries:
                before = self._holders.get(entry_id)
                if before is not None:
                    self._held[before].discard(entry_id)
                self._holders[entry_id] = consumer
                own.add(entry_id)

    def release(
        self, entries: Sequence[EntryId], other: HostedConsumer
    ) -> dict[HostedConsumer, list[EntryId]]:
        """Who acknowledges which of some entries; the other one what nobody has."""
        shares: dict[HostedConsumer, list[EntryId]] = {}
        with self._lock:
            for entry_id in entries:
                holder = self._holders.pop(entry_id, None)
                if holder is None:
                    holder = other
                else:
                    self._held[holder].discard(entry_id)
                shares.setdefault(holder if holder.is_connected() else other, []).append(entry_id)
        return shares

    def forget(self, consumer: HostedConsumer) -> None:
        """A consumer has nothing in hand any more: it comes again, or was acknowledged."""
        with self._lock:
            for entry_id in self._held.pop(consumer, ()):
                del self._holders[entry_id]


class Hosting(Protocol):
    """The side of a worker that its consumers know."""

    def acknowledge(self, number: int, entries: Sequence[EntryId]) -> None: ...

    def last_entry(self, number: int) -> EntryId | None: ...

    def close_consumer(self, number: int, *, for_another: bool) -> None: ...

    def took(self, number: int, taken: Taken) -> None: ...


class HostedConsumer:
    """Implements the ``Consumer`` port.

    Args:
        wanted: What it consumes.
        hosting: The worker that has it.
        number: Its number there.
        holders: Of its topic partition, for the consumers of all workers.
    """

    def __init__(self, wanted: Wanted, hosting: Hosting, number: int, holders: Holders) -> None:
        self.wanted = wanted
        self._holders = holders
        self._hosting = hosting
        self.number = number
        self._changed = threading.Condition()
        self._queue: deque[Delivery] = deque()
        self._taken = Taken()
        self._connected = True
        self._trouble = ""
        self._gave_all = False
        """Whether its worker says so, of all that came here."""
        self._callback: Callable[[], None] | None = None
        self.closed = False

    @property
    def topic_partition(self) -> TopicPartition:
        return self.wanted.topic_partition

    @property
    def hash_range(self) -> HashRange:
        return self.wanted.hash_range

    def receive(self, timeout_ms: int) -> list[EntryBlock]:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self.closed, timeout_ms / 1000)
            self._check_open()
            if not self._queue:
                return []
            # One delivery of the worker's: a reconnect lies between them.
            delivery = self._queue.popleft()
            self._taken = self._taken.plus(delivery)
            number, taken = self.number, self._taken
        error = delivery.error
        refused = [entry_of(error)] if isinstance(error, UnreadableEntryError) else []
        self._holders.took(self, [*(block.id for block in delivery.blocks), *refused])
        self._hosting.took(number, taken)
        if error is not None:
            raise error
        return list(delivery.blocks)

    def when_ready(self, callback: Callable[[], None]) -> None:
        with self._changed:
            self._check_open()
            if not self._queue:
                self._callback = callback
                return
        callback()

    def acknowledge(self, entries: Sequence[EntryId]) -> None:
        self._check_open()
        for consumer, share in self._holders.release(entries, self).items():
            consumer.hand_on(share)

    def hand_on(self, entries: Sequence[EntryId]) -> None:
        """Acknowledge entries through this consumer's worker."""
        self._hosting.acknowledge(self.number, entries)

    def last_entry(self) -> EntryId | None:
        self._check_open()
        return self._hosting.last_entry(self.number)

    def is_connected(self) -> bool:
        return self._connected and not self.closed

    def has_given_all(self) -> bool:
        # Not from silence: a worker that stands still has what came to it, and tells nothing.
        return self._gave_all and self.is_connected()

    def trouble(self) -> str:
        return "" if self.closed else self._trouble

    def close(self, *, for_another: bool = False) -> None:
        if self.ended():
            self._hosting.close_consumer(self.number, for_another=for_another)

    def _check_open(self) -> None:
        if self.closed:
            raise BrokerError(f"A consumer of {self.topic_partition} is closed.")

    def ended(self) -> bool:
        """It is to give nothing more; whether that is new."""
        with self._changed:
            new, self.closed = not self.closed, True
            self._callback = None
            self._queue.clear()
            self._changed.notify_all()
        if new:
            self._holders.forget(self)
        return new

    # -- told by its worker -----------------------------------------------------------------------

    def arrived(self, delivery: Delivery) -> None:
        """The worker gave something."""
        with self._changed:
            if self.closed:
                return
            self._gave_all = delivery.gave_all
            if delivery.connected is not None:
                self._connected, self._trouble = delivery.connected, delivery.trouble
            elif not delivery.gave_all:
                self._queue.append(delivery)
            if not self._connected:
                self._let_pass()
            number, taken, callback = self.number, self._taken, None
            if self._queue:
                callback, self._callback = self._callback, None
                self._changed.notify_all()
        if not self._connected:
            self._hosting.took(number, taken)
        if callback is not None:
            callback()

    def _let_pass(self) -> None:
        """Without a connection: what is here comes again with the next one."""
        passed, self._queue = self._queue, deque()
        for delivery in passed:
            if delivery.goes_on:
                self._taken = self._taken.plus(delivery)
            else:
                self._queue.append(delivery)

    def troubled(self, trouble: str) -> None:
        """Set the trouble that keeps it from coming back."""
        self._trouble = trouble

    def lost(self) -> None:
        """Its worker is gone: what is unacknowledged comes again, through another one."""
        with self._changed:
            self._connected = self._gave_all = False
            self._queue.clear()
        self._holders.forget(self)

    def regaining(self, number: int) -> None:
        """A worker is about to have it, under another number."""
        with self._changed:
            self.number, self._taken, self._gave_all = number, Taken(), False
