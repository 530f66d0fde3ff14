"""The live check on the in-memory broker: a right source passes, a wrong one is found out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keyshard.broker.memory import Batching, MemoryBroker, MemoryCluster, MemoryConsumer, Message
from keyshard.broker.port import Broker
from keyshard.coordinator.batches import Batches
from keyshard.core.position.entry import EntryBlock
from keyshard.errors import BrokerError, BrokerUnavailableError, ConfigError
from keyshard.testing.verify import live
from keyshard.testing.verify.checkers import Verdict, check
from keyshard.testing.verify.history import Event, HistoryWriter, read_history
from keyshard.testing.verify.live import LiveReport, consume, require_empty
from keyshard.testing.verify.workloads import ProduceReport, Workload
from tests.helpers import config
from tests.support.deadlines import deadline

LOAD = Workload(600, 20, entry_messages=3)


class CheckedTopic:
    def __init__(self, path: Path) -> None:
        self.cluster = MemoryCluster(entries_per_ledger=50)
        self.topic = self.cluster.create_topic("orders", partitions=3)
        self.path = path / "history.jsonl"
        self.batching = Batching.BY_KEY
        self.told: list[tuple[int, int]] = []

    def connect(self) -> Broker:
        return MemoryBroker(self.cluster)

    def publish(self, progress: Callable[[int], None]) -> ProduceReport:
        load = list(LOAD.sequence())
        for start in range(0, len(load), 50):
            messages = [
                Message(f"{key}:{seq}:".encode(), key=key) for key, seq in load[start : start + 50]
            ]
            self.cluster.publish(self.topic, *messages, batching=self.batching)
            progress(50)
        return ProduceReport(len(load), 1.0, Counter(key for key, _ in load))

    def run(self, timeout_s: float = 20.0) -> LiveReport:
        source = config(self.topic, batch_rows_max=60)
        with HistoryWriter(self.path) as history:
            return consume(
                source, self.connect, lambda: None, self.publish, history,
                timeout_s=timeout_s, progress=lambda *counts: self.told.append(counts),
            )  # fmt: skip

    def events(self) -> list[Event]:
        return list(read_history(self.path))

    def verdicts(self) -> dict[str, Verdict]:
        return {verdict.name: verdict for verdict in check(self.events())}

    def broken(self) -> set[str]:
        return {name for name, verdict in self.verdicts().items() if not verdict.holds}


@pytest.fixture
def topic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckedTopic:
    monkeypatch.setattr(live, "QUIET_S", 0.2)
    return CheckedTopic(tmp_path)


def test_every_promise_holds_over_two_restarts(topic: CheckedTopic) -> None:
    report = topic.run()
    assert report.in_time
    assert (report.sent, report.rows, report.restarts) == (600, 600, 2)
    assert topic.broken() == set()
    verdicts = topic.verdicts()
    unchecked = {name for name, verdict in verdicts.items() if not verdict.checked}
    assert unchecked == {"one handler per key"}
    assert verdicts["re-runs are equal"].checked == 1
    assert topic.told[-1] == (600, 600)
    assert report.duplicates_dropped > 0
    crashes = [event for event in topic.events() if event.kind == "crashed"]
    assert len(crashes) == 2


def test_events_at_the_broker_are_recorded(topic: CheckedTopic) -> None:
    topic.run()
    events = topic.events()
    count = Counter(event.kind for event in events)
    assert count["sent"] == 600
    # A range whose consumer was replaced meanwhile is gained again without being lost.
    assert count["range_gained"] >= count["range_lost"] >= 3 * (4 + 5 + 6)
    ranges = [event for event in events if event.kind in {"range_gained", "range_lost"}]
    ends = {(one.topic, one.partition, one.range): one.kind for one in ranges}
    assert set(ends.values()) == {"range_lost"}
    acked = {event.entry_name for event in events if event.kind == "acked"}
    rows = {event.entry_name for event in events if event.batch and event.kind == "delivered"}
    assert acked == rows
    received = [event for event in events if event.kind == "delivered" and not event.batch]
    assert {event.worker for event in received} == {"host"}
    assert all(event.seq is not None and event.range for event in received)


def test_acknowledging_at_the_cut_is_found_out(
    topic: CheckedTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = Batches.cut

    def hasty(self: Batches, rows_max: int | None = None) -> Any:
        end = cut(self, rows_max)
        if end is not None:
            for topic_partition, entries in self._window.batches[end.batch_id].entries.items():
                consumer = self._consumers.range_consumers.consumer_of(topic_partition)
                assert consumer is not None
                consumer.acknowledge([block.id for block in entries])
        return end

    monkeypatch.setattr(Batches, "cut", hasty)
    topic.run()
    assert "acknowledged after the checkpoint" in topic.broken()


def test_default_batching_is_found_out(topic: CheckedTopic) -> None:
    topic.batching = Batching.MIXED
    topic.run()
    assert "routed by key" in topic.broken()


def test_a_broker_that_withholds_a_message_is_found_out_at_the_deadline(
    topic: CheckedTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = MemoryConsumer.receive

    def withholding(self: MemoryConsumer, timeout_ms: int) -> list[EntryBlock]:
        return [block for block in receive(self, timeout_ms) if b"k7:6:" not in block.values]

    monkeypatch.setattr(MemoryConsumer, "receive", withholding)
    report = topic.run(timeout_s=deadline(3.0))
    assert not report.in_time
    assert report.sent == 600
    assert {"no loss", "exactly once into the checkpoint"} <= topic.broken()


def test_a_producer_that_fails_ends_the_check(topic: CheckedTopic) -> None:
    def publish(progress: Callable[[int], None]) -> ProduceReport:
        raise BrokerError("It refused.")

    topic.publish = publish  # type: ignore[method-assign]
    with pytest.raises(BrokerError, match="It refused"):
        topic.run()
    gained = [event for event in topic.events() if event.kind == "range_gained"]
    lost = [event for event in topic.events() if event.kind == "range_lost"]
    assert len(gained) == len(lost) == 3 * 4, "the ranges are given back"


@pytest.mark.simulated
def test_a_producer_is_not_waited_for_longer_than_the_deadline(topic: CheckedTopic) -> None:
    def publish(progress: Callable[[int], None]) -> ProduceReport:
        while True:
            progress(1)

    topic.publish = publish  # type: ignore[method-assign]
    with pytest.raises(BrokerUnavailableError, match=r"did not end within 0.5 s; [1-9].* sent"):
        topic.run(timeout_s=0.5)


def test_a_topic_that_holds_data_is_refused(topic: CheckedTopic) -> None:
    require_empty(topic.connect(), topic.topic)
    topic.cluster.publish(topic.topic, Message(b"x", key="k"))
    with pytest.raises(ConfigError, match=f"(?s)Topic {topic.topic} contains messages.*--append"):
        require_empty(topic.connect(), topic.topic)
