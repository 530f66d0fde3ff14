"""Threads that receive: each goes round its share of the consumers and fills the window."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from keyshard.broker.port import Consumer
from keyshard.core.assembly import EntryAssembly, RedeliveryNeeded
from keyshard.core.entry import EntryBlock, TopicPartition
from keyshard.core.hash_range import HashRange
from keyshard.errors import KeyShardError, RuntimeStoppedError

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
    rest_until_s: float = 0.0
    """Until this time it takes nothing, and then it subscribes again; 0: it does not rest."""


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
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take nothing more; returns without waiting."""
        self._stopping.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end, at most ``timeout_s`` seconds."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                if not self._round():
                    self._stopping.wait(PAUSED_WAIT_S)
        except RuntimeStoppedError:
            pass
        except KeyShardError as exc:
            self._sink.fail(exc)
        except Exception as exc:  # noqa: BLE001 - the loop's end must reach the user as an event
            _log.exception("receiving ended unexpectedly")
            self._sink.fail(KeyShardError(f"Receiving ended unexpectedly: {exc!r}."))

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
        if lane.rest_until_s:
            if time.monotonic() < lane.rest_until_s:
                self._quiet.append(lane)
                return False
            lane.rest_until_s = 0.0
            self._sink.reopen(lane)
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
