"""A source on the in-memory broker whose ranges move while messages come, and its history."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from keyshard.broker.memory import MemoryBroker
from keyshard.consumers.receiver import RangeConsumer
from keyshard.coordinator.coordinator import Coordinator
from keyshard.coordinator.rescale import Blocking, Rescaler
from keyshard.core.position.entry import TopicPartition
from keyshard.core.ring.hash_range import RING_SIZE, HashRange
from keyshard.errors import KeyShardError
from keyshard.source_stream import SourceBatch
from keyshard.testing.verify.history import Event
from keyshard.testing.verify.recorder import Recorder
from tests.helpers import config, wait_until
from tests.support.deadlines import deadline, joined
from tests.support.faulty_broker import ScriptedCall, faulty
from tests.support.recorded_handler import NumberedMessages
from tests.support.recorded_source import held

AHEAD_MAX = 1_000
"""Messages that are published and not committed, at which a producer waits."""


class FakeWork:
    """Works on keys until the test says that it ends."""

    def __init__(self, blocking: Blocking | None = None) -> None:
        self.blocking = blocking
        self.holds: list[Sequence[HashRange]] = []
        self.held = False
        self.owners: Sequence[int] = ()
        self.waiting = threading.Event()

    def hold(self, slots: Sequence[HashRange]) -> None:
        self.holds.append(slots)
        self.held = True

    def wait_idle(self, timeout_s: float) -> Blocking | None:
        self.waiting.set()
        end = time.monotonic() + timeout_s
        while self.blocking is not None and time.monotonic() < end:
            threading.Event().wait(0.002)
        return self.blocking

    def reassign(self, owners: Sequence[int]) -> None:
        self.owners = owners

    def resume(self) -> None:
        self.held = False


class RescaledSource(NumberedMessages):
    """A topic that a thread consumes in batches; stopped by :meth:`end`."""

    def __init__(self, ranges: int = 4, drain_timeout_s: float = 5.0, **settings: Any) -> None:
        super().__init__(entries_per_ledger=50)
        self.subscribes = ScriptedCall()
        self.broker = faulty(MemoryBroker(self.cluster), subscribe=self.subscribes)
        self.events: list[Event] = []
        self.recorder = Recorder(self, "host")
        self.work = FakeWork()
        settings = {"parallelism": ranges, "discovery_interval_ms": 20} | settings
        self.coordinator = Coordinator(
            config(self.topic, **settings),
            lambda: self.recorder.broker(self.broker, lambda: self.coordinator.epoch),
        )
        self.coordinator.measures_load = True
        self.coordinator.start()
        self.rescaler: Rescaler = self.coordinator.rescaler(self.work, drain_timeout_s)
        self.rows = 0
        self.ranges_of_batches: list[int] = []
        self.error: KeyShardError | None = None
        """The error that ended the source."""
        self._host = threading.Thread(target=self._run, name="host", daemon=True)
        self._host.start()

    def write_all(self, events: Iterable[Event]) -> None:
        self.events.extend(events)

    def publish_many(self, messages: int) -> None:
        self.publish(*(f"k{number % 40}" for number in range(messages)))

    def has_room(self) -> bool:
        """A simulated producer is faster than the source: waits take no time."""
        return self.per_key.total() - self.rows < AHEAD_MAX

    def more(self, rows: int = 200) -> None:
        """Wait until more rows are committed."""
        target = self.rows + rows
        wait_until(lambda: self.rows >= target)

    @property
    def consumers(self) -> dict[TopicPartition, list[RangeConsumer]]:
        return self.coordinator.consumers.range_consumers.by_partition

    def ring(self, partition: int = 0) -> list[tuple[int, HashRange]]:
        """Owners and hash ranges of one topic partition, as the consumers have them."""
        where = TopicPartition(self.topic, partition)
        found = [
            (one.owned_range.range_index, one.owned_range.hash_range)
            for one in self.consumers[where]
        ]
        ranges = sorted(hash_range for _, hash_range in found)
        assert sum(map(len, ranges)) == RING_SIZE, "the ring has a gap or an overlap"
        assert all(one.consumer.is_connected() for one in self.consumers[where])
        return sorted(found)

    def end(self) -> None:
        """Stop publishing, let everything be committed, and stop."""
        self.stop_publishing()
        try:
            joined(self._host, deadline(30))
        finally:
            self.coordinator.stop()

    def check(self) -> None:
        """End, and let every checker judge the history."""
        self.end()
        assert self.error is None
        self.recorder.sent(self.topic, self.per_key)
        assert held(self.events) >= {
            "no loss", "order per key", "exactly once into the checkpoint", "routed by key",
            "acknowledged after the checkpoint", "ring covered without overlap",
        }  # fmt: skip

    def _run(self) -> None:
        try:
            self._consume()
        except KeyShardError as exc:
            self.error = exc

    def _consume(self) -> None:
        quiet = 0
        while quiet < 20:
            complete = self.rows >= self.per_key.total()
            quiet = quiet + 1 if self.stopping.is_set() and complete else 0
            if not self.coordinator.batches.wait_for_rows(0.01):
                continue
            end = self.coordinator.batches.cut()
            if end is None:
                continue
            batch = SourceBatch(self.coordinator, end)
            rows = sum(part.num_rows for part in self.recorder.rows(batch))
            self.recorder.checkpointed(batch)
            self.coordinator.batches.release(end)
            self.ranges_of_batches.append(end.ranges)
            self.rows += rows
