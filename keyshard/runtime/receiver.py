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
    assembly: EntryAssembly = field(default_factory=EntryAssembly)
    last_block_s: float = 0.0


class Sink(Protocol):
    """Where received entries go; implemented by the coordinator."""

    def is_full(self, topic_partition: TopicPartition) -> bool:
        """Whether the consumers of a topic partition pause."""

    def deliver(self, lane: Lane, entries: Sequence[EntryBlock]) -> None:
        """Take entries of one lane, in delivery order."""

    def reopen(self, lane: Lane) -> None:
        """Close the lane's consumer and subscribe again; everything unacknowledged comes again."""

    def fail(self, error: KeyShardError) -> None:
        """Remember the error that ends the source."""


@dataclass(slots=True)
class _Change:
    """What a receiver does between two rounds."""

    added: Sequence[Lane] = ()
    dropped: Collection[TopicPartition] = ()
    done: threading.Event = field(default_factory=threading.Event)


def close_quietly(lane: Lane) -> None:
    """Close a lane's consumer; a broker that is away or refuses forgets it by itself."""
    try:
        lane.consumer.close()
    except BrokerError as exc:
        _log.debug("closing a consumer of %s failed: %s", lane.seat.topic_partition, exc)


class Receiver:
    """One daemon thread over some lanes.

    Lanes that had data are served every round; of the quiet ones, one per round has its turn, so
    that a busy range does not wait for the receive time-out of every idle one.
    """

    def __init__(self, name: str, lanes: Sequence[Lane], sink: Sink) -> None:
        self._sink = sink
        self._stopping = threading.Event()
        self._busy: deque[Lane] = deque()
        self._quiet: deque[Lane] = deque(lanes)
        self._changes: deque[_Change] = deque()
        self.lanes = len(lanes)
        """Lanes it serves."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, lanes: Sequence[Lane]) -> None:
        """Serve more lanes, from the next round on."""
        self.lanes += len(lanes)
        self._changes.append(_Change(added=lanes))

    def drop(self, topic_partitions: Collection[TopicPartition]) -> threading.Event:
        """Close the consumers of some topic partitions, between two rounds; set when it is done.

        The thread does it itself, so that no consumer is closed while it is received from or
        re-opened.
        """
        change = _Change(dropped=topic_partitions)
        self._changes.append(change)
        return change.done

    def stop(self) -> None:
        """Take nothing more; returns without waiting."""
        self._stopping.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end, at most ``timeout_s`` seconds."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                while self._changes:
                    self._apply(self._changes.popleft())
                if not self._round():
                    self._stopping.wait(PAUSED_WAIT_S)
        except RuntimeStoppedError:
            pass
        except KeyShardError as exc:
            self._sink.fail(exc)
        except Exception as exc:  # noqa: BLE001 - the loop's end must reach the user as an event
            _log.exception("receiving ended unexpectedly")
            self._sink.fail(KeyShardError(f"Receiving ended unexpectedly: {exc!r}."))

    def _apply(self, change: _Change) -> None:
        self._quiet.extend(change.added)
        for lanes in (self._busy, self._quiet) if change.dropped else ():
            for _ in range(len(lanes)):
                lane = lanes.popleft()
                if lane.seat.topic_partition in change.dropped:
                    close_quietly(lane)
                    self.lanes -= 1
                else:
                    lanes.append(lane)
        change.done.set()

    def _round(self) -> bool:
        """Serve each busy lane and one quiet lane; whether any could receive."""
        open_for_receipt = False
        for _ in range(len(self._busy)):
            open_for_receipt |= self._serve(self._busy.popleft())
        for _ in range(len(self._quiet)):
            lane = self._quiet.popleft()
            if self._serve(lane):
                return True
        return open_for_receipt

    def _serve(self, lane: Lane) -> bool:
        """Receive once from a lane and queue it again; whether it was open for receipt."""
        if self._stopping.is_set() or self._sink.is_full(lane.seat.topic_partition):
            self._quiet.append(lane)
            return False
        blocks = lane.consumer.receive(RECEIVE_WAIT_MS)
        now = time.monotonic()
        entries: list[EntryBlock] = []
        try:
            for block in blocks:
                entries.extend(lane.assembly.add(block))
            if blocks:
                lane.last_block_s = now
            elif self._ended_early(lane, now):
                entries.append(lane.assembly.end_early())
        except RedeliveryNeeded as need:
            _log.debug("entry %s ended early in %s", need.entry_id, lane.seat.topic_partition)
            self._sink.deliver(lane, entries)
            entries = []
            self._sink.reopen(lane)
        if entries:
            self._sink.deliver(lane, entries)
        (self._busy if blocks else self._quiet).append(lane)
        return True

    @staticmethod
    def _ended_early(lane: Lane, now: float) -> bool:
        return (
            lane.assembly.open is not None
            and now - lane.last_block_s > ENTRY_QUIET_S
            and lane.consumer.is_connected()
        )
