"""Receive threads: each one serves its share of the consumers and fills the window."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Protocol

from keyshard.broker.port import Consumer
from keyshard.consumers.receive_state import ReceiveEvent, Receiving, Rest, Turn
from keyshard.core.position.entry import EntryBlock, TopicPartition
from keyshard.core.position.entry_assembly import EntryAssembly, RedeliveryNeeded
from keyshard.core.refusal_timer import RefusalTimer
from keyshard.core.ring.hash_range import HashRange
from keyshard.core.window.receiver_queue_size import ReceiverQueueSize
from keyshard.errors import BrokerError, KeyShardError, UnreadableEntryError
from keyshard.threads import begin

PAUSED_WAIT_S = 0.02
"""Wait of a thread whose range consumers are all paused, seconds."""
ENTRY_QUIET_S = 2.0
"""Silence after which an entry without its last message is doubted, seconds. The silence is checked
four times in that time."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OwnedRange:
    """A hash range of a topic partition that one consumer owns, since an epoch.

    An owner may have several hash ranges; each has an owned range in each topic partition.
    """

    topic_partition: TopicPartition
    range_index: int
    """Index of its owner."""
    hash_range: HashRange
    epoch: int = 0
    """Number of the assignment in which it was subscribed."""


@dataclass(slots=True)
class RangeConsumer:
    """An owned range, its consumer, and its partly received entry."""

    owned_range: OwnedRange
    consumer: Consumer
    queue: ReceiverQueueSize
    assembly: EntryAssembly = field(default_factory=EntryAssembly)
    reception: Receiving = field(default_factory=Receiving)
    """State of the reception; only the receive thread uses it."""
    successor: Consumer | None = None
    """A consumer that will replace ``consumer``, which has no connection."""
    wake: Callable[[], None] = lambda: None
    """Makes the receive thread take the successor, also while it waits for the client."""
    forgotten: Consumer | None = None
    """A connected consumer that the broker did not list."""
    replace_at_s: float = 0.0
    """Monotonic time at which a successor is due; 0 if it was connected at the last check."""
    refusals: RefusalTimer = field(default_factory=RefusalTimer)
    """Outcomes of the attempts to subscribe again."""
    lacking: bool = False
    """Whether ``consumer`` is closed and there is no successor yet."""
    dropped: bool = False
    """Whether it no longer owns its range. Set under ``changing``."""
    changing: threading.Lock = field(default_factory=threading.Lock)
    """Held while a successor is set, or the range is dropped."""
    subscribed_s: float | None = field(default_factory=time.monotonic)
    """Monotonic time of its first subscription; ``None`` if its topic partition did not exist."""

    def succeeded_by(self, consumer: Consumer) -> bool:
        """Set the successor, unless the range was dropped; return whether it was set."""
        with self.changing:
            if not self.dropped:
                self.successor = consumer
            return not self.dropped

    def problem(self) -> str:
        """Return one sentence on a refusal or a silent broker, or ``""``."""
        error = self.refusals.error
        return self.consumer.problem() if error is None else error.message


class Sink(Protocol):
    """Takes received entries; implemented by the intake."""

    def is_paused(self, owned_range: OwnedRange) -> bool:
        """Whether the consumer of an owned range pauses."""

    def deliver(self, range_consumer: RangeConsumer, entries: Sequence[EntryBlock]) -> Rest | None:
        """Take entries of one range consumer, in delivery order.

        Returns:
            A rest, if some entries were not taken or the range is to pause.
        """

    def refused(self, range_consumer: RangeConsumer, error: UnreadableEntryError) -> Rest | None:
        """Skip an entry that cannot be read, or raise its error.

        Returns:
            A rest, if the entry must come again or the range is to pause.
        """

    def reopen(self, range_consumer: RangeConsumer) -> bool:
        """Give a range consumer a new consumer, so that unacknowledged entries come again.

        Never waits.

        Returns:
            Whether the new consumer is there now. Otherwise a successor follows.
        """

    def fail(self, error: KeyShardError) -> None:
        """End the source with an error."""


@dataclass(frozen=True, slots=True, eq=False)
class Drop:
    """A request to a receiver to close the consumers of some owned ranges between two rounds."""

    owned_ranges: Collection[OwnedRange]
    for_another: bool = False
    """Whether the ranges are subscribed again at once."""
    closed: set[OwnedRange] = field(default_factory=set)
    """Owned ranges that the receiver had and has closed, even if the broker refused."""
    done: threading.Event = field(default_factory=threading.Event)
    """Set when the receiver has finished."""


def close_quietly(consumer: Consumer, *, for_another: bool = False) -> None:
    """Close a consumer; only log an error, because the broker removes a lost consumer by itself."""
    try:
        consumer.close(for_another=for_another)
    except BrokerError as exc:
        _log.debug("closing a consumer of %s failed: %s", consumer.topic_partition, exc.summary)


class Receiver:
    """Receives from some range consumers in one daemon thread; see :mod:`.receive_state`.

    An idle consumer costs nothing until its client calls the callback of ``when_ready``.
    """

    def __init__(self, name: str, range_consumers: Sequence[RangeConsumer], sink: Sink) -> None:
        self._sink = sink
        self._stopping = False
        self._changed = threading.Condition()
        self._ready: deque[RangeConsumer] = deque()
        self._paused: list[RangeConsumer] = []
        """Paused and resting range consumers."""
        self._paused_looked_s = 0.0
        self._early_ends_looked_s = 0.0
        self._idle: dict[int, RangeConsumer] = {}
        self._drops: deque[Drop] = deque()
        self.range_consumers = 0
        """Number of range consumers that it serves."""
        self.add(range_consumers)
        self._thread = begin(name, self._run, fail=sink.fail)

    def add(self, range_consumers: Sequence[RangeConsumer]) -> None:
        """Serve more range consumers."""
        for range_consumer in range_consumers:
            range_consumer.wake = partial(self._wake, range_consumer)
        with self._changed:
            self.range_consumers += len(range_consumers)
            self._ready.extend(range_consumers)
            self._changed.notify_all()

    def drop(self, owned_ranges: Collection[OwnedRange], *, for_another: bool = False) -> Drop:
        """Close the consumers of some owned ranges between two rounds.

        Ranges of other receivers are ignored. The receive thread closes its own, so that none is
        closed while it is received from or opened again.
        """
        drop = Drop(owned_ranges, for_another)
        with self._changed:
            self._drops.append(drop)
            self._changed.notify_all()
        return drop

    def keep(self, drop: Drop) -> bool:
        """Withdraw a :meth:`drop`; return whether it had not started."""
        with self._changed:
            try:
                self._drops.remove(drop)
            except ValueError:
                return False
        return True

    def stop(self) -> None:
        """End the thread; returns without waiting."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end, at most ``timeout_s`` seconds."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stopping:
            while self._drops:
                self._apply_next_drop()
            self._round()

    def _apply_next_drop(self) -> None:
        with self._changed:
            if not self._drops:
                return
            drop = self._drops.popleft()

            def stays(range_consumer: RangeConsumer) -> bool:
                return range_consumer.owned_range not in drop.owned_ranges

            known = [*self._ready, *self._paused, *self._idle.values()]
            self._ready = deque(filter(stays, self._ready))
            self._paused = list(filter(stays, self._paused))
            self._idle = {
                id(range_consumer): range_consumer
                for range_consumer in filter(stays, self._idle.values())
            }
            dropped = {
                id(range_consumer): range_consumer
                for range_consumer in known
                if not stays(range_consumer)
            }
            for range_consumer in dropped.values():
                range_consumer.reception.apply(ReceiveEvent.CLOSE)
        try:
            for range_consumer in dropped.values():
                self.range_consumers -= 1
                drop.closed.add(range_consumer.owned_range)
                with range_consumer.changing:
                    range_consumer.dropped = True
                for consumer in (range_consumer.consumer, range_consumer.successor):
                    if consumer is not None:
                        close_quietly(consumer, for_another=drop.for_another)
        finally:
            drop.done.set()

    def _round(self) -> None:
        """Serve each ready range consumer once. If none is ready, wait for one."""
        with self._changed:
            if not self._ready and not self._drops:
                self._changed.wait(PAUSED_WAIT_S if self._paused else ENTRY_QUIET_S / 4)
            serving = list(self._ready)
            self._ready.clear()
        now = time.monotonic()
        if now - self._paused_looked_s >= PAUSED_WAIT_S:
            self._paused_looked_s = now
            serving += self._paused
            self._paused.clear()
        for range_consumer in serving:
            if self._stopping:
                return
            self._serve(range_consumer)
        if not serving or now - self._early_ends_looked_s >= ENTRY_QUIET_S / 4:
            self._early_ends_looked_s = now
            self._look_for_early_ends()

    def _serve(self, range_consumer: RangeConsumer) -> None:
        reception = range_consumer.reception
        if range_consumer.successor is not None:
            # A paused range takes its successor, too, because acknowledgements need a connection.
            self._reopen(range_consumer)
        room = not self._sink.is_paused(range_consumer.owned_range)
        turn = reception.turn(time.monotonic(), room=room)
        if turn is Turn.LOOK_AGAIN:
            self._paused.append(range_consumer)
            return
        if turn is Turn.RECEIVE_ANEW and not range_consumer.lacking:
            self._reopen(range_consumer)
        if range_consumer.lacking:
            self._wait_for_successor(range_consumer)
            return
        connected = range_consumer.consumer.is_connected()
        blocks: Sequence[EntryBlock] = ()
        refused: UnreadableEntryError | None = None
        try:
            blocks = range_consumer.consumer.receive(0)
        except UnreadableEntryError as exc:
            refused = exc
        if not blocks and refused is None:
            self._wait_for_entries(range_consumer)
            return
        reception.received(time.monotonic())
        if refused is not None and connected:
            rest = self._sink.refused(range_consumer, refused)
        else:
            rest = (self._take if connected else self._drop_stale)(range_consumer, blocks)
        if rest is not None:
            self._rest(range_consumer, rest)
            return
        with self._changed:
            reception.apply(ReceiveEvent.DONE)
            self._ready.append(range_consumer)

    def _take(self, range_consumer: RangeConsumer, blocks: Sequence[EntryBlock]) -> Rest | None:
        """Hand over complete entries; the broker redelivers those that may lack messages."""
        queue = range_consumer.queue
        if not queue.adapts and not queue.suits(
            sum(block.rows for block in blocks), sum(block.column_bytes for block in blocks)
        ):
            # The new consumer has a smaller queue, and receives these messages again.
            self._reopen(range_consumer)
            return None
        assembly = range_consumer.assembly
        if assembly.is_empty and all(block.complete for block in blocks):
            return self._sink.deliver(range_consumer, blocks)
        entries: list[EntryBlock] = []
        polled = queue.polled
        try:
            for i, block in enumerate(blocks):
                entries.extend(assembly.add(block, after_gap=polled or i == 0))
        except RedeliveryNeeded as need:
            return self._redeliver(range_consumer, entries, need)
        return self._sink.deliver(range_consumer, entries) if entries else None

    def _drop_stale(self, range_consumer: RangeConsumer, _: Sequence[EntryBlock]) -> None:
        """Drop entries that the client received before it lost its connection.

        They come again with the next connection. If the cluster was wiped meanwhile, other entries
        have their ids.
        """
        if range_consumer.consumer.is_connected():
            # The dropped entries may have come with the new connection: receive them again.
            self._reopen(range_consumer)

    def _wait_for_entries(self, range_consumer: RangeConsumer) -> None:
        """Let the client wake a range consumer that has received nothing."""
        consumer = range_consumer.consumer
        with self._changed:
            if range_consumer.successor is not None:
                range_consumer.reception.apply(ReceiveEvent.DONE)
                self._ready.append(range_consumer)
                return
            range_consumer.reception.apply(ReceiveEvent.NOTHING)
            self._idle[id(range_consumer)] = range_consumer
        consumer.when_ready(partial(self._wake, range_consumer, consumer))

    def _wait_for_successor(self, range_consumer: RangeConsumer) -> None:
        """Queue a range consumer without a consumer; it is served when it has a successor."""
        with self._changed:
            if range_consumer.successor is None:
                range_consumer.reception.apply(ReceiveEvent.NOTHING)
                self._idle[id(range_consumer)] = range_consumer
            else:
                range_consumer.reception.apply(ReceiveEvent.DONE)
                self._ready.append(range_consumer)

    def _wake(self, range_consumer: RangeConsumer, of: Consumer | None = None) -> None:
        """Serve a range consumer whose client has entries, or that has a successor.

        Called from any thread.

        Args:
            range_consumer: The range consumer; nothing happens unless it is idle.
            of: The consumer that has entries; ``None``: there is a successor.
        """
        with self._changed:
            current = range_consumer.successor if of is None else range_consumer.consumer is of
            if current and range_consumer.reception.rings():
                self._make_ready(range_consumer)

    def _make_ready(self, range_consumer: RangeConsumer) -> None:
        """Make an idle range consumer ready. The caller holds the lock."""
        del self._idle[id(range_consumer)]
        self._ready.append(range_consumer)
        self._changed.notify_all()

    def _rest(self, range_consumer: RangeConsumer, rest: Rest) -> None:
        with self._changed:
            if range_consumer.reception.rest(rest):
                self._idle.pop(id(range_consumer), None)
                self._paused.append(range_consumer)

    def _look_for_early_ends(self) -> None:
        """End entries whose last messages do not come, although the client has no more messages.

        Either another application acknowledged these messages, or a reconnect cut the entry off.
        See :mod:`keyshard.core.position.entry_assembly`.
        """
        now = time.monotonic()
        with self._changed:
            open_ended = [
                range_consumer
                for range_consumer in self._idle.values()
                if range_consumer.assembly.open is not None and not range_consumer.lacking
            ]
        for range_consumer in open_ended:
            consumer, reception = range_consumer.consumer, range_consumer.reception
            silent = reception.is_silent(now, ENTRY_QUIET_S, connected=consumer.is_connected())
            if silent and consumer.has_given_all():
                self._end_early(range_consumer)

    def _end_early(self, range_consumer: RangeConsumer) -> None:
        # It waits for its client, so no thread receives from it now.
        try:
            entry = range_consumer.assembly.end_early(unsure=range_consumer.reception.may_be_cut)
            rest = self._sink.deliver(range_consumer, [entry])
        except RedeliveryNeeded as need:
            rest = self._redeliver(range_consumer, [], need)
        if rest is not None:
            self._rest(range_consumer, rest)

    def _redeliver(
        self, range_consumer: RangeConsumer, entries: list[EntryBlock], need: RedeliveryNeeded
    ) -> Rest | None:
        """Deliver complete entries, then let the broker redeliver all unacknowledged ones."""
        _log.debug(
            "entry %s ended early in %s", need.entry_id, range_consumer.owned_range.topic_partition
        )
        rest = self._sink.deliver(range_consumer, entries) if entries else None
        self._reopen(range_consumer)
        return rest

    def _reopen(self, range_consumer: RangeConsumer) -> None:
        """Let the broker redeliver all unacknowledged entries."""
        if not self._sink.reopen(range_consumer):
            return
        with self._changed:
            if range_consumer.reception.anew():
                self._make_ready(range_consumer)


def routing_of(blocks: Sequence[EntryBlock], hash_range: HashRange) -> tuple[int, int]:
    """Return the number of messages outside a range, and the number without a key."""
    first = list(map(_slot, blocks))
    if None not in first and not any(map(_mixed_slots, blocks)):
        low, high = min(first), max(first)
        if low in hash_range and high in hash_range:
            return 0, 0
    slots = [slot for block in blocks for slot in block.slots]
    known = [slot for slot in slots if slot is not None]
    return sum(slot not in hash_range for slot in known), len(slots) - len(known)


_slot = attrgetter("slot")
_mixed_slots = attrgetter("mixed_slots")
