"""Delayed messages leave gaps in a checkpoint: a source takes what fits, and holds no more.

On the in-memory broker, whose clock can be put forward.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest

from keyshard import KeyShardSource
from keyshard.broker.memory import Message
from keyshard.broker.memory.admin import MemoryAdmin
from keyshard.coordinator.coordinator import Coordinator
from keyshard.errors import NotRunningError
from tests.helpers import config, present, running, wait_until
from tests.support.deadlines import deadline
from tests.support.memory_topic import MemoryTopic, Run

HOUR_MS = 3_600_000
QUEUE = 20
"""Messages in a client queue, which come in addition to those of the window."""


class Delaying(MemoryTopic):
    """A topic on a broker whose clock can be put forward."""

    def __init__(self, *, entries_per_ledger: int) -> None:
        self.ahead_ms = 0
        super().__init__(
            partitions=1,
            entries_per_ledger=entries_per_ledger,
            now_ms=lambda: time.time_ns() // 1_000_000 + self.ahead_ms,
        )

    def publish_pairs(self, count: int, *, keyless: bool = False) -> None:
        """Publish pairs: a message, and one for an hour later, perhaps without a key."""
        due_ms = time.time_ns() // 1_000_000 + HOUR_MS
        messages = [
            Message(
                b"%d" % n,
                None if n % 2 and keyless else f"k{n % 50}",
                deliver_at_ms=due_ms if n % 2 else None,
            )
            for n in range(2 * count)
        ]
        self.cluster.publish(self.where[0], *messages)


def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keyshard.consumers.intake.ROOM_AGAIN_S", 0.05)
    for name, value in ("ACK_GAP_AGE_MS", 20), ("ROUND_S", 0.02), ("WARN_AFTER_S", 0.05):
        monkeypatch.setattr(f"keyshard.coordinator.gap_resolver.{name}", value)


class Consuming:
    """A source that commits each batch, and what it got."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.values: list[int] = []
        self.rows_held = 0
        self.bytes_max = 0

    def step(self) -> None:
        """Commit a batch, if there is one."""
        end = self.coordinator.batches.cut()
        self.rows_held = max(self.rows_held, self.coordinator.status()["windowRows"])
        if end is None:
            self.coordinator.batches.wait_for_rows(0.02)
            return
        self.bytes_max = max(self.bytes_max, len(end.to_json()))
        for index in self.coordinator.batches.plan(end):
            for part in self.coordinator.batches.read(end.batch_id, index):
                self.values += map(int, part.column("value").to_pylist())
        self.coordinator.batches.release(end)

    def until(self, rows: int) -> None:
        """Commit batches until there are this many rows."""

        def all_came() -> bool:
            self.step()
            return len(self.values) >= rows

        wait_until(all_came, deadline(60))


@pytest.mark.simulated(seeds=1)
def test_a_gap_for_each_second_message_fits_into_the_smallest_checkpoint() -> None:
    """With a run for each gap, 855 of 1,500 messages came, and then none."""
    topic = Delaying(entries_per_ledger=50_000)
    topic.publish_pairs(1_500)
    source = config(topic.topic, parallelism=4, checkpoint_bytes_max=4_096)
    with running(topic.cluster, source, admin=MemoryAdmin(topic.cluster)) as coordinator:
        got = Consuming(coordinator)
        got.until(1_500)
        assert got.bytes_max < 4_096
        assert coordinator.status()["partitionsWithoutRoom"] == 0
        topic.ahead_ms = HOUR_MS
        got.until(3_000)
        assert sorted(got.values) == list(range(3_000))


@pytest.mark.parametrize(
    ("ranges", "with_admin", "keyless"),
    [(1, True, False), (4, True, False), (4, False, False), (1, True, True)],
)
def test_a_source_without_room_fills_its_window_and_reports_it(
    ranges: int,
    with_admin: bool,
    keyless: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """1. Delayed messages fill the checkpoint. 2. They become due.

    Every range had a delayed message to receive, so no range paused, and the window held all
    published messages. If a delayed message has no key, its range is unknown. That range paused,
    and never received the message.
    """
    look_often(monkeypatch)
    # A ledger with one gap takes five bytes, so a few hundred fill the checkpoint.
    topic = Delaying(entries_per_ledger=2)
    topic.publish_pairs(1_500, keyless=keyless)
    source = config(
        topic.topic, parallelism=ranges, checkpoint_bytes_max=4_096, window_rows_max=400,
        receiver_queue_size=QUEUE, settle_after_ms=60_000,
    )  # fmt: skip
    admin = MemoryAdmin(topic.cluster) if with_admin else None
    with running(topic.cluster, source, admin=admin) as coordinator:
        got = Consuming(coordinator)

        def without_room() -> bool:
            got.step()
            named = "has had no room for" in caplog.text
            return named and coordinator.status()["withoutRoomMillis"] > 3_000

        with caplog.at_level(logging.WARNING):
            wait_until(without_room, deadline(60))
        assert 200 < len(got.values) < 1_200
        assert coordinator.status()["partitionsWithoutRoom"] == 1
        held_max = 400 + 8 * QUEUE
        assert got.rows_held <= held_max
        # Each row that the window holds beyond the limit may be one more ledger with a gap.
        assert 0 < coordinator.status()["checkpointBytes"] <= 4_096 + 5 * held_max
        if not with_admin:
            return  # Readers would have to find the end of each small ledger.
        topic.ahead_ms = HOUR_MS
        got.until(3_000)
        assert sorted(got.values) == list(range(3_000))
        assert got.rows_held <= 400 + 8 * QUEUE
        wait_until(lambda: coordinator.status()["withoutRoomMillis"] == 0)
    wait_until(lambda: topic.backlog("unit") == 0)


def numbers(topic: Delaying, path: Path, count: int, **changes: Any) -> list[int]:
    """The numbers that a run with a checkpoint handles until it has this many."""
    seen: list[int] = []
    source = topic.source(checkpoint_bytes_max=4_096, **changes)
    with Run(
        source, lambda message: seen.append(int(present(message.value))), {"checkpoint": path}
    ):
        wait_until(lambda: len(seen) >= count)
    return seen


@pytest.mark.simulated(seeds=1)
def test_a_stop_repeats_nothing_for_which_the_checkpoint_had_no_room(tmp_path: Path) -> None:
    topic, path = Delaying(entries_per_ledger=2), tmp_path / "checkpoint.json"
    topic.publish_pairs(1_000)
    first = numbers(topic, path, 1_000)
    topic.ahead_ms = HOUR_MS
    assert sorted(first + numbers(topic, path, 1_000)) == list(range(2_000))


@pytest.mark.simulated(seeds=1)
def test_a_stop_of_batches_repeats_nothing_either(tmp_path: Path) -> None:
    topic, path = Delaying(entries_per_ledger=2), tmp_path / "checkpoint.json"
    topic.publish_pairs(1_000)
    found: list[list[int]] = []
    for count in 1_000, 1_000:
        seen: list[int] = []
        source = topic.source(checkpoint_bytes_max=4_096)
        for batch in source.batches(checkpoint=path, max_wait_s=0.05):
            seen += map(int, batch.records["value"].to_pylist())
            batch.ack()
            if len(seen) >= count:
                source.stop()
        found.append(seen)
        topic.ahead_ms = HOUR_MS
    assert sorted(found[0] + found[1]) == list(range(2_000))


class Acknowledging(Run):
    """A thread that acknowledges each batch of a source at once."""

    def __init__(self, source: KeyShardSource) -> None:
        super().__init__(source, None, {})
        self.values: list[int] = []

    def consume(self) -> None:
        for batch in self.source.batches(max_wait_s=0.05):
            self.values += map(int, batch.records["value"].to_pylist())
            batch.ack()

    def __enter__(self) -> Acknowledging:
        super().__enter__()
        return self

    @property
    def without_room_ms(self) -> int:
        """Time for which the checkpoint has had no room, milliseconds; -1 before the start."""
        try:
            window = self.source.status()["window"]
        except NotRunningError:
            return -1
        return -1 if window is None else window["withoutRoomMillis"]


def test_batches_wait_for_room_beyond_the_timeout_of_a_full_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error asked to acknowledge batches, although all of them were acknowledged."""
    look_often(monkeypatch)
    topic = Delaying(entries_per_ledger=2)
    topic.publish_pairs(800)
    source = topic.source(
        checkpoint_bytes_max=4_096, window_rows_max=20, receiver_queue_size=20,
        operation_timeout_ms=1_000, admin_url=topic.url,
    )  # fmt: skip
    with Acknowledging(source) as run:
        wait_until(lambda: run.errors or run.without_room_ms > 1_500, deadline(60))
        assert run.errors == []
        topic.ahead_ms = HOUR_MS
        wait_until(lambda: run.errors or len(run.values) >= 1_600, deadline(60))
    assert run.errors == []
    assert sorted(run.values) == list(range(1_600))
    assert topic.backlog() == 0


def test_acknowledged_batches_without_room_are_committed_when_evidence_makes_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found by the simulation, seed 7028 of handlers: no later batch came to commit them with."""
    look_often(monkeypatch)
    topic = Delaying(entries_per_ledger=2)
    topic.cluster.publish(topic.where[0], *[Message(b"%d" % n, f"k{n}") for n in range(1_600)])
    with Acknowledging(topic.source(checkpoint_bytes_max=4_096, settle_after_ms=20)) as run:
        wait_until(lambda: len(run.values) >= 1_600, deadline(60))
        wait_until(lambda: topic.backlog() == 0, deadline(60))
    assert run.errors == []
