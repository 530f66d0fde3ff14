"""Threads that receive: each goes round its share of the consumers and fills the window."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from keyshard.broker.port import Consumer
from keyshard.core.assembly import EntryAssembly, RedeliveryNeeded
from keyshard.core.client_queue import ClientQueue
from keyshard.core.entry import EntryBlock, TopicPartition
from keyshard.core.hash_range import HashRange
from keyshard.errors import BrokerError, KeyShardError, RuntimeStoppedError

RECEIVE_WAIT_MS = 10
"""Longest wait for one consumer before the next has its turn, milliseconds."""
PAUSED_WAIT_S = 0.02
"""Pause of a thread whose topic partitions are all full, seconds."""
ENTRY_QUIET_S = 1.0
"""Silence after which an entry without its last index is doubted, seconds."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Seat:
    """What one consumer owns: a hash range of a topic partition."""

    topic_partition: TopicPartition
    range_index: int
    hash_range: HashRange


@dataclass(slots=True)
class Lane:
    """A seat, the consumer that has it now, and what it has received in part."""

    seat: Seat
    consumer: Consumer
    queue: ClientQueue
    assembly: EntryAssembly = field(default_factory=EntryAssembly)
    last_block_s: float = 0.0
    silent_from_s: float = 0.0
    """Since when it was seen connected, and nothing has come; 0: it was not seen yet."""
    rest_until_s: float = 0.0
    """Until this time it takes nothing, and then it subscribes again; 0: it does not rest."""
    ringing: Consumer | None = None
    """The consumer that was asked to ring and has not yet: it must not be received from."""


class Sink(Protocol):
    """Where received entries go; implemented by the coordinator."""

    def is_paused(self, seat: Seat) -> bool:
        """Whether the consumer of a seat pauses."""

    def deliver(self, lane: Lane, entries: Sequence[EntryBlock]) -> None:
        """Take entries of one lane, in delivery order."""

    def reopen(self, lane: Lane) -> None:
        """Close the lane's consumer and subscribe again; everything unacknowledged comes again."""

    def fail(self, error: KeyShardError) -> None:
        """Remember the error that ends the source."""


@dataclass(slots=True)
class _Drop:
    """Topic partitions whose consumers a receiver closes between two rounds."""

    topic_partitions: Collection[TopicPartition]
    done: threading.Event


def close_quietly(lane: Lane) -> None:
    """Close a lane's consumer; a broker that is away or refuses forgets it by itself."""
    try:
        lane.consumer.close()
    except BrokerError as exc:
        _log.debug("closing a consumer of %s failed: %s", lane.seat.topic_partition, exc)


class Receiver:
    """One daemon thread over some lanes.

    A lane is ready (it is received from), paused (its topic partition is full), or idle: then the
    client rings when something comes, and the lane costs nothing until then.
    """

    def __init__(self, name: str, lanes: Sequence[Lane], sink: Sink) -> None:
        self._sink = sink
        self._stopping = False
        self._changed = threading.Condition()
        self._ready: deque[Lane] = deque(lanes)
        self._paused: list[Lane] = []
        self._paused_looked_s = 0.0
        self._idle: dict[int, Lane] = {}
        self._drops: deque[_Drop] = deque()
        self.lanes = len(lanes)
        """Lanes it serves."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, lanes: Sequence[Lane]) -> None:
        """Serve more lanes."""
        with self._changed:
            self.lanes += len(lanes)
            self._ready.extend(lanes)
            self._changed.notify_all()

    def drop(self, topic_partitions: Collection[TopicPartition]) -> threading.Event:
        """Close the consumers of some topic partitions, between two rounds; set when it is done.

        The thread does it itself, so that no consumer is closed while it is received from or
        re-opened.
        """
        drop = _Drop(topic_partitions, threading.Event())
        with self._changed:
            self._drops.append(drop)
            self._changed.notify_all()
        return drop.done

    def stop(self) -> None:
        """Take nothing more; returns without waiting."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end, at most ``timeout_s`` seconds."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while not self._stopping:
                while self._drops:
                    self._apply(self._drops.popleft())
                self._round()
        except RuntimeStoppedError:
            pass
        except KeyShardError as exc:
            self._sink.fail(exc)
        except Exception as exc:  # noqa: BLE001 - the loop's end must reach the user as an event
            _log.exception("receiving ended unexpectedly")
            self._sink.fail(KeyShardError(f"Receiving ended unexpectedly: {exc!r}."))

    def _apply(self, drop: _Drop) -> None:
        def stays(lane: Lane) -> bool:
            return lane.seat.topic_partition not in drop.topic_partitions

        with self._changed:
            known = [*self._ready, *self._paused, *self._idle.values()]
            self._ready = deque(filter(stays, self._ready))
            self._paused = list(filter(stays, self._paused))
            self._idle = {id(lane): lane for lane in filter(stays, self._idle.values())}
            dropped = {id(lane): lane for lane in known if not stays(lane)}
            for lane in dropped.values():
                lane.ringing = None
        for lane in dropped.values():
            close_quietly(lane)
            self.lanes -= 1
        drop.done.set()

    def _round(self) -> None:
        """Serve every ready lane once; without one, wait until a lane rings or may go on."""
        with self._changed:
            if not self._ready and not self._drops:
                self._changed.wait(PAUSED_WAIT_S if self._paused else ENTRY_QUIET_S / 2)
            serving = list(self._ready)
            self._ready.clear()
        now = time.monotonic()
        if now - self._paused_looked_s >= PAUSED_WAIT_S:
            self._paused_looked_s = now
            serving += self._paused
            self._paused.clear()
        for lane in serving:
            if self._stopping:
                return
            self._serve(lane)
        if not serving:
            self._look_for_early_ends()

    def _serve(self, lane: Lane) -> None:
        if lane.ringing is lane.consumer:
            return
        resting = time.monotonic() < lane.rest_until_s
        if resting or self._sink.is_paused(lane.seat):
            self._paused.append(lane)
            return
        if lane.rest_until_s:
            lane.rest_until_s = 0.0
            self._sink.reopen(lane)
        blocks = lane.consumer.receive(RECEIVE_WAIT_MS)
        if not blocks:
            self._rest(lane)
            return
        lane.last_block_s, lane.silent_from_s = time.monotonic(), 0.0
        if not lane.queue.suits(
            sum(block.rows for block in blocks), sum(block.payload_bytes for block in blocks)
        ):
            # Nothing of it was taken: the new consumer gets it again.
            self._reopen(lane)
            return
        entries: list[EntryBlock] = []
        try:
            for i, block in enumerate(blocks):
                entries.extend(lane.assembly.add(block, after_gap=i == 0))
        except RedeliveryNeeded as need:
            self._ask_again(lane, entries, need)
            return
        if entries:
            self._sink.deliver(lane, entries)
        with self._changed:
            self._ready.append(lane)

    def _rest(self, lane: Lane) -> None:
        """Let the client ring for a lane that has nothing."""
        consumer = lane.consumer

        def ring() -> None:
            with self._changed:
                if lane.ringing is consumer:
                    lane.ringing = None
                    self._idle.pop(id(lane), None)
                    self._ready.append(lane)
                    self._changed.notify_all()

        with self._changed:
            lane.ringing = consumer
            self._idle[id(lane)] = lane
        consumer.when_ready(ring)

    def _look_for_early_ends(self) -> None:
        """Doubt entries whose last index does not come though their consumer is connected.

        The silence counts from when the consumer is seen connected: before that, a reconnect may
        have cut the entry off, and its redelivery is on the way.
        """
        now = time.monotonic()
        with self._changed:
            quiet = [
                lane
                for lane in self._idle.values()
                if lane.assembly.open is not None and now - lane.last_block_s > ENTRY_QUIET_S
            ]
        for lane in quiet:
            if not lane.consumer.is_connected():
                lane.silent_from_s = 0.0
            elif not lane.silent_from_s:
                lane.silent_from_s = now
            elif now - lane.silent_from_s > ENTRY_QUIET_S:
                self._end_early(lane)

    def _end_early(self, lane: Lane) -> None:
        # Its consumer was asked to ring, so nobody receives from it meanwhile.
        try:
            self._sink.deliver(lane, [lane.assembly.end_early()])
        except RedeliveryNeeded as need:
            self._ask_again(lane, [], need)

    def _ask_again(self, lane: Lane, entries: list[EntryBlock], need: RedeliveryNeeded) -> None:
        """Deliver what is whole, then make the broker deliver everything unacknowledged again."""
        _log.debug("entry %s ended early in %s", need.entry_id, lane.seat.topic_partition)
        if entries:
            self._sink.deliver(lane, entries)
        self._reopen(lane)

    def _reopen(self, lane: Lane) -> None:
        """Make the broker deliver everything unacknowledged again, and serve the lane."""
        self._sink.reopen(lane)
        with self._changed:
            lane.ringing = None
            self._idle.pop(id(lane), None)
            self._ready.append(lane)


def routing_of(block: EntryBlock, lane: Lane) -> tuple[int, int]:
    """Messages of an entry that lie outside the lane's range, and that have no key."""
    hash_range, slots = lane.seat.hash_range, block.mixed_slots
    if slots is not None:
        known = [slot for slot in slots if slot is not None]
        return sum(slot not in hash_range for slot in known), len(slots) - len(known)
    if block.slot is None:
        return 0, block.rows
    return (0 if block.slot in hash_range else block.rows), 0
