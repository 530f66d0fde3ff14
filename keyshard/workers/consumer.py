"""A ``Consumer`` whose subscription is in a worker."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from keyshard.broker.port import SubscriptionSpec
from keyshard.broker.unreadable_entries import entry_of
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.ring.hash_range import HashRange
from keyshard.errors import BrokerError, UnreadableEntryError
from keyshard.workers.encoding import DeliveredTotals, WorkerDelivery


class EntryHolders:
    """Records which consumer of a topic partition received which entries.

    An acknowledgement must go through the worker that received the entry. If that worker loses its
    connection, the same consumer gets the entry again and acknowledges it again. Through another
    worker, the acknowledgement could be lost, while the broker waits for the consumer that holds
    the entry.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: dict[EntryId, RemoteConsumer] = {}
        self._held: dict[RemoteConsumer, set[EntryId]] = {}
        """The same entries by consumer, so that all entries of a lost consumer can be forgotten."""

    def took(self, consumer: RemoteConsumer, entries: Iterable[EntryId]) -> None:
        """Record that a consumer handed out entries."""
        with self._lock:
            own = self._held.setdefault(consumer, set())
            for entry_id in entries:
                before = self._holders.get(entry_id)
                if before is not None:
                    self._held[before].discard(entry_id)
                self._holders[entry_id] = consumer
                own.add(entry_id)

    def acknowledge(self, entries: Sequence[EntryId], other: RemoteConsumer) -> None:
        """Acknowledge each entry through its holder, or through ``other`` if there is none.

        A holder keeps an entry until its worker accepted the acknowledgement. After an error the
        caller acknowledges all of them again, through the same holders.
        """
        held: defaultdict[RemoteConsumer | None, list[EntryId]] = defaultdict(list)
        shares: defaultdict[RemoteConsumer, list[EntryId]] = defaultdict(list)
        through: dict[RemoteConsumer, RemoteConsumer] = {}
        with self._lock:
            for entry_id in dict.fromkeys(entries):
                held[self._holders.get(entry_id)].append(entry_id)
            for holder, own in held.items():
                by = other if holder is None or not holder.is_connected() else holder
                shares[by] += own
                if holder is not None:
                    through[holder] = by
        for by, share in shares.items():
            by.hand_on(share)
            with self._lock:
                for holder in (one for one, its in through.items() if its is by):
                    self._give_up(holder, held[holder])

    def _give_up(self, holder: RemoteConsumer, entries: Sequence[EntryId]) -> None:
        """Forget those entries that a consumer still holds."""
        own = self._held.get(holder, set())
        for entry_id in own.intersection(entries):
            own.discard(entry_id)
            del self._holders[entry_id]

    def forget(self, consumer: RemoteConsumer) -> None:
        """Forget the entries of a consumer: they are redelivered, or were acknowledged."""
        with self._lock:
            for entry_id in self._held.pop(consumer, ()):
                del self._holders[entry_id]


class Supervisor(Protocol):
    """The interface of a worker to its consumers."""

    def acknowledge(self, number: int, entries: Sequence[EntryId]) -> None: ...

    def last_entry(self, number: int) -> EntryId | None: ...

    def close_consumer(self, number: int, *, for_another: bool) -> None: ...

    def took(self, number: int, taken: DeliveredTotals) -> None: ...


class RemoteConsumer:
    """Implements :class:`~keyshard.broker.port.Consumer` for a consumer that a worker hosts.

    Args:
        spec: Its subscription.
        supervisor: The worker that hosts it.
        number: Its number in the worker.
        holders: Holders of its topic partition, shared by the consumers of all workers.
    """

    def __init__(
        self, spec: SubscriptionSpec, supervisor: Supervisor, number: int, holders: EntryHolders
    ) -> None:
        self.spec = spec
        self._holders = holders
        self._supervisor = supervisor
        self.number = number
        self._changed = threading.Condition()
        self._queue: deque[WorkerDelivery] = deque()
        self._taken = DeliveredTotals()
        self._connected = True
        self._problem = ""
        self._gave_all = False
        """Whether its worker reports that all messages have arrived here."""
        self._callback: Callable[[], None] | None = None
        self.closed = False

    @property
    def topic_partition(self) -> TopicPartition:
        return self.spec.topic_partition

    @property
    def hash_range(self) -> HashRange:
        return self.spec.hash_range

    def receive(self, timeout_ms: int) -> list[EntryBlock]:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self.closed, timeout_ms / 1000)
            self._check_open()
            if not self._queue:
                return []
            # Only one delivery per call, because a reconnect may lie between two of them.
            delivery = self._queue.popleft()
            self._taken = self._taken.plus(delivery)
            number, taken = self.number, self._taken
        error = delivery.error
        refused = [entry_of(error)] if isinstance(error, UnreadableEntryError) else []
        self._holders.took(self, [*(block.id for block in delivery.blocks), *refused])
        self._supervisor.took(number, taken)
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
        self._holders.acknowledge(entries, self)

    def hand_on(self, entries: Sequence[EntryId]) -> None:
        """Acknowledge entries through this consumer's worker."""
        self._supervisor.acknowledge(self.number, entries)

    def last_entry(self) -> EntryId | None:
        self._check_open()
        return self._supervisor.last_entry(self.number)

    def is_connected(self) -> bool:
        return self._connected and not self.closed

    def has_given_all(self) -> bool:
        # Silence proves nothing: messages may wait in a suspended worker.
        return self._gave_all and self.is_connected()

    def problem(self) -> str:
        return "" if self.closed else self._problem

    def close(self, *, for_another: bool = False) -> None:
        if self.ended():
            self._supervisor.close_consumer(self.number, for_another=for_another)

    def _check_open(self) -> None:
        if self.closed:
            raise BrokerError(f"A consumer of {self.topic_partition} is closed.")

    def ended(self) -> bool:
        """Stop handing out messages. Return whether it was still open."""
        with self._changed:
            new, self.closed = not self.closed, True
            self._callback = None
            self._queue.clear()
            self._changed.notify_all()
        if new:
            self._holders.forget(self)
        return new

    # -- Called by the supervisor of its worker ---------------------------------------------------

    def arrived(self, delivery: WorkerDelivery) -> None:
        """Accept a delivery of the worker."""
        with self._changed:
            if self.closed:
                return
            self._gave_all = delivery.gave_all
            if delivery.connected is not None:
                self._connected, self._problem = delivery.connected, delivery.problem
            elif not delivery.gave_all:
                self._queue.append(delivery)
            if not self._connected:
                self._drop_stale()
            number, taken, callback = self.number, self._taken, None
            if self._queue:
                callback, self._callback = self._callback, None
                self._changed.notify_all()
        if not self._connected:
            self._supervisor.took(number, taken)
        if callback is not None:
            callback()

    def _drop_stale(self) -> None:
        """Drop queued deliveries after a disconnect; the next connection redelivers them."""
        passed, self._queue = self._queue, deque()
        for delivery in passed:
            if delivery.continues:
                self._taken = self._taken.plus(delivery)
            else:
                self._queue.append(delivery)

    def report_problem(self, problem: str) -> None:
        """Set the problem that keeps it from reconnecting."""
        self._problem = problem

    def lost(self) -> None:
        """Handle the loss of its worker: another one receives all unacknowledged entries again."""
        with self._changed:
            self._connected = self._gave_all = False
            self._queue.clear()
        self._holders.forget(self)

    def regaining(self, number: int) -> None:
        """Prepare for a new worker, under a new number.

        The new spec has the mean size of the messages so far, so that the new consumer starts with
        many permits. Pulsar 4.2 and 5.0 drop acknowledged entries from their replay queue only as
        fast as a consumer has permits, and send nothing else meanwhile. If the consumer started
        with one permit, this could take a minute.
        """
        with self._changed:
            messages, size_bytes = self._taken
            if messages:
                self.spec = replace(self.spec, message_bytes=size_bytes // messages)
            self.number, self._taken, self._gave_all = number, DeliveredTotals(), False
