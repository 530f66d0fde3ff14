"""Threads that receive: each goes round its share of the consumers and fills the window."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from keyshard.broker.port import Consumer
from keyshard.core.position.assembly import EntryAssembly, RedeliveryNeeded
from keyshard.core.position.entry import EntryBlock, TopicPartition
from keyshard.core.reception import Event, Reception, Rest, Turn
from keyshard.core.refusals import Refusals
from keyshard.core.ring.hash_range import HashRange
from keyshard.core.window.client_queue import ClientQueue
from keyshard.errors import BrokerError, KeyShardError, UnreadableEntryError
from keyshard.threads import begin

PAUSED_WAIT_S = 0.02
"""Pause of a thread whose topic partitions are all full, seconds."""
ENTRY_QUIET_S = 2.0
"""Silence after which an entry without its last index is doubted, seconds; a quarter of it lies
between two looks."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OwnedRange:
    """What one consumer owns: a hash range of a topic partition, since an epoch.

    A range may own several hash ranges; each has an owned range in each topic partition.
    """

    topic_partition: TopicPartition
    range_index: int
    """Who owns it."""
    hash_range: HashRange
    epoch: int = 0
    """Number of the assignment generation in which it was subscribed."""


@dataclass(slots=True)
class RangeConsumer:
    """An owned range, the consumer that has it now, and what it has received in part."""

    owned_range: OwnedRange
    consumer: Consumer
    queue: ClientQueue
    assembly: EntryAssembly = field(default_factory=EntryAssembly)
    reception: Reception = field(default_factory=Reception)
    """When it is received from; the receive thread's."""
    successor: Consumer | None = None
    """A consumer that is to take the place of ``consumer``, which has no connection."""
    ring: Callable[[], None] = lambda: None
    """Makes the receive thread take the successor, also while it waits for the client."""
    forgotten: Consumer | None = None
    """The consumer of it that the broker did not know when it was asked, though it is connected."""
    replace_at_s: float = 0.0
    """When a successor is due for want of a connection; 0: it was connected when last seen."""
    refusals: Refusals = field(default_factory=Refusals)
    """Outcome of the attempts to give it another consumer."""
    lacking: bool = False
    """Whether ``consumer`` is closed, and a successor is to come."""
    dropped: bool = False
    """Whether it no longer owns its range; set under ``changing``."""
    changing: threading.Lock = field(default_factory=threading.Lock)
    """Held while a successor comes, or it is dropped."""
    subscribed_s: float = field(default_factory=time.monotonic)
    """When its first consumer was there, on the monotonic clock."""

    def succeeded_by(self, consumer: Consumer) -> bool:
        """A consumer is there to take the place; whether it is still wanted."""
        with self.changing:
            if not self.dropped:
                self.successor = consumer
            return not self.dropped

    def trouble(self) -> str:
        """One sentence on the trouble with its broker; empty if none is known."""
        error = self.refusals.error
        return self.consumer.trouble() if error is None else error.message


class Sink(Protocol):
    """Where received entries go; implemented by the intake."""

    def is_paused(self, owned_range: OwnedRange) -> bool:
        """Whether the consumer of an owned range pauses."""

    def deliver(self, range_consumer: RangeConsumer, entries: Sequence[EntryBlock]) -> Rest | None:
        """Take entries of one range consumer, in delivery order; an answer where some are not."""

    def refused(self, range_consumer: RangeConsumer, error: UnreadableEntryError) -> Rest | None:
        """Skip an entry that cannot be read, or raise that; an answer where it is to come again."""

    def reopen(self, range_consumer: RangeConsumer) -> bool:
        """Give it a new consumer: everything unacknowledged comes again. Never waits.

        Whether it has one now; else it lacks one until it has a successor.
        """

    def fail(self, error: KeyShardError) -> None:
        """Remember the error that ends the source."""


@dataclass(frozen=True, slots=True, eq=False)
class Drop:
    """Seats whose consumers a receiver closes between two rounds."""

    owned_ranges: Collection[OwnedRange]
    for_another: bool = False
    """Whether they are subscribed again at once."""
    closed: set[OwnedRange] = field(default_factory=set)
    """Those of them that the receiver had, and has closed, whatever the broker said."""
    done: threading.Event = field(default_factory=threading.Event)
    """Set when nothing more is to be closed."""


def close_quietly(consumer: Consumer, *, for_another: bool = False) -> None:
    """Close a consumer; a broker that is away or refuses forgets it by itself."""
    try:
        consumer.close(for_another=for_another)
    except BrokerError as exc:
        _log.debug("closing a consumer of %s failed: %s", consumer.topic_partition, exc)


class Receiver:
    """One daemon thread over some range consumers; their states are those of ``core.reception``.

    Who is idle costs nothing until its client rings.
    """

    def __init__(self, name: str, range_consumers: Sequence[RangeConsumer], sink: Sink) -> None:
        self._sink = sink
        self._stopping = False
        self._changed = threading.Condition()
        self._ready: deque[RangeConsumer] = deque()
        self._paused: list[RangeConsumer] = []
        """Also those that rest."""
        self._paused_looked_s = 0.0
        self._early_ends_looked_s = 0.0
        self._idle: dict[int, RangeConsumer] = {}
        self._drops: deque[Drop] = deque()
        self.range_consumers = 0
        """RangeConsumers it serves."""
        self.add(range_consumers)
        self._thread = begin(name, self._run, fail=sink.fail)

    def add(self, range_consumers: Sequence[RangeConsumer]) -> None:
        """Serve more range consumers."""
        for range_consumer in range_consumers:
            range_consumer.ring = partial(self._ring, range_consumer)
        with self._changed:
            self.range_consumers += len(range_consumers)
            self._ready.extend(range_consumers)
            self._changed.notify_all()

    def drop(self, owned_ranges: Collection[OwnedRange], *, for_another: bool = False) -> Drop:
        """Close the consumers of some owned ranges, between two rounds; others' pass by.

        The thread does it itself, so that no consumer is closed while it is received from or
        re-opened.
        """
        drop = Drop(owned_ranges, for_another)
        with self._changed:
            self._drops.append(drop)
            self._changed.notify_all()
        return drop

    def keep(self, drop: Drop) -> bool:
        """Take an order to close back; whether nothing of it has begun."""
        with self._changed:
            try:
                self._drops.remove(drop)
            except ValueError:
                return False
        return True

    def stop(self) -> None:
        """Take nothing more; returns without waiting."""
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
                range_consumer.reception.tell(Event.CLOSE)
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
        """Serve every ready range consumer once; without one, wait until one rings or may go on."""
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
            # Also while it pauses: acknowledgements need a connection.
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
            self._ask_to_ring(range_consumer)
            return
        reception.heard(time.monotonic())
        if refused is not None and connected:
            rest = self._sink.refused(range_consumer, refused)
        else:
            rest = (self._take if connected else self._let_pass)(range_consumer, blocks)
        if rest is not None:
            self._rest(range_consumer, rest)
            return
        with self._changed:
            reception.tell(Event.DONE)
            self._ready.append(range_consumer)

    def _take(self, range_consumer: RangeConsumer, blocks: Sequence[EntryBlock]) -> Rest | None:
        """Hand over what is whole; what cannot be judged comes again."""
        queue = range_consumer.queue
        if not queue.adapts and not queue.suits(
            sum(block.rows for block in blocks), sum(block.column_bytes for block in blocks)
        ):
            # Nothing of it was taken: the new consumer gets it again.
            self._reopen(range_consumer)
            return None
        entries: list[EntryBlock] = []
        polled = queue.polled
        try:
            for i, block in enumerate(blocks):
                after_gap = polled or i == 0
                entries.extend(range_consumer.assembly.add(block, after_gap=after_gap))
        except RedeliveryNeeded as need:
            return self._ask_again(range_consumer, entries, need)
        return self._sink.deliver(range_consumer, entries) if entries else None

    def _let_pass(self, range_consumer: RangeConsumer, _: Sequence[EntryBlock]) -> None:
        """Take nothing of what a client kept from before it lost its connection.

        It comes again with the next connection, unless the cluster was wiped meanwhile: then others
        have its ids.
        """
        if range_consumer.consumer.is_connected():
            # It may have come since.
            self._reopen(range_consumer)

    def _ask_to_ring(self, range_consumer: RangeConsumer) -> None:
        """Let the client ring for a range consumer that has nothing."""
        consumer = range_consumer.consumer
        with self._changed:
            if range_consumer.successor is not None:
                range_consumer.reception.tell(Event.DONE)
                self._ready.append(range_consumer)
                return
            range_consumer.reception.tell(Event.NOTHING)
            self._idle[id(range_consumer)] = range_consumer
        consumer.when_ready(partial(self._ring, range_consumer, consumer))

    def _wait_for_successor(self, range_consumer: RangeConsumer) -> None:
        """It was served, and has no consumer: it lines up again when it has one."""
        with self._changed:
            if range_consumer.successor is None:
                range_consumer.reception.tell(Event.NOTHING)
                self._idle[id(range_consumer)] = range_consumer
            else:
                range_consumer.reception.tell(Event.DONE)
                self._ready.append(range_consumer)

    def _ring(self, range_consumer: RangeConsumer, of: Consumer | None = None) -> None:
        """Serve a range consumer, because its client has something, or for its successor.

        Called by any thread.

        Args:
            range_consumer: Whom to serve, if it is idle.
            of: The consumer that has something; ``None``: there is a successor.
        """
        with self._changed:
            current = range_consumer.successor if of is None else range_consumer.consumer is of
            if current and range_consumer.reception.rings():
                self._line_up(range_consumer)

    def _line_up(self, range_consumer: RangeConsumer) -> None:
        """It was idle, and is ready now; under the lock."""
        del self._idle[id(range_consumer)]
        self._ready.append(range_consumer)
        self._changed.notify_all()

    def _rest(self, range_consumer: RangeConsumer, rest: Rest) -> None:
        with self._changed:
            if range_consumer.reception.rest(rest):
                self._idle.pop(id(range_consumer), None)
                self._paused.append(range_consumer)

    def _look_for_early_ends(self) -> None:
        """Doubt entries whose last index does not come though their consumer has given all."""
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
        # Its consumer was asked to ring, so nobody receives from it meanwhile.
        try:
            entry = range_consumer.assembly.end_early(unsure=range_consumer.reception.may_be_cut)
            rest = self._sink.deliver(range_consumer, [entry])
        except RedeliveryNeeded as need:
            rest = self._ask_again(range_consumer, [], need)
        if rest is not None:
            self._rest(range_consumer, rest)

    def _ask_again(
        self, range_consumer: RangeConsumer, entries: list[EntryBlock], need: RedeliveryNeeded
    ) -> Rest | None:
        """Deliver what is whole, then make the broker deliver everything unacknowledged again."""
        _log.debug(
            "entry %s ended early in %s", need.entry_id, range_consumer.owned_range.topic_partition
        )
        rest = self._sink.deliver(range_consumer, entries) if entries else None
        self._reopen(range_consumer)
        return rest

    def _reopen(self, range_consumer: RangeConsumer) -> None:
        """Make the broker deliver everything unacknowledged again."""
        if not self._sink.reopen(range_consumer):
            return
        with self._changed:
            if range_consumer.reception.anew():
                self._line_up(range_consumer)


def routing_of(block: EntryBlock, range_consumer: RangeConsumer) -> tuple[int, int]:
    """Messages of an entry that lie outside the range consumer's range, and that have no key."""
    hash_range, slots = range_consumer.owned_range.hash_range, block.mixed_slots
    if slots is not None:
        known = [slot for slot in slots if slot is not None]
        return sum(slot not in hash_range for slot in known), len(slots) - len(known)
    if block.slot is None:
        return 0, block.rows
    return (0 if block.slot in hash_range else block.rows), 0
