"""Bounded runs on the in-memory broker: exactly the messages published before their start."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from keyshard import KeyShardSource
from keyshard.broker.memory import (
    LookAhead,
    MemoryBroker,
    MemoryConsumer,
    Message,
    UnackedLimits,
)
from keyshard.broker.memory.admin import MemoryAdmin
from keyshard.broker.port import StartPosition
from keyshard.config.source import SourceConfig
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import EntryBlock
from keyshard.errors import AvailableNowTimeoutError, BrokerUnavailableError, TopicRecreatedError
from tests.helpers import keys_of, rows_of, running
from tests.support.deadlines import deadline
from tests.support.faulty_broker import ScriptedCall, faulty
from tests.support.memory_topic import SUBSCRIPTION, MemoryTopic

pytestmark = pytest.mark.simulated(seeds=1)

KEYS = keys_of(4)
QUIET_MS, TIMEOUT_MS = int(deadline(1.5) * 1_000), int(deadline(20) * 1_000)
HOUR_MS = 3_600_000


class BoundedTopic(MemoryTopic):
    """A topic of three partitions, the last of them always empty."""

    def __init__(self, **options: Any) -> None:
        super().__init__(3, entries_per_ledger=30, **options)
        self.count = 0

    def publish(self, count: int, partitions: int = 2) -> list[str]:
        values = []
        for _ in range(count):
            value = f"{KEYS[self.count % 4]}:{self.count}"
            message = Message(value.encode(), key=KEYS[self.count % 4])
            self.cluster.publish(self.where[self.count % partitions], message)
            self.count += 1
            values.append(value)
        return values

    def source(self, **changes: Any) -> KeyShardSource:
        fields = {"available_now_timeout_ms": TIMEOUT_MS, "available_now_quiet_ms": QUIET_MS}
        return super().source(**fields | changes)


@contextmanager
def bounded(
    topic: BoundedTopic,
    source: SourceConfig | None = None,
    checkpoint: Checkpoint | None = None,
    admin: MemoryAdmin | None = None,
) -> Iterator[Coordinator]:
    source = source or topic.source()
    with running(topic.cluster, source, checkpoint, available_now=True, admin=admin) as coordinator:
        yield coordinator
    topic.cluster.validate()


def run(coordinator: Coordinator, rows_max: int | None = None) -> list[str]:
    """All rows of a bounded run, as a host takes them."""
    got: list[str] = []
    while (end := coordinator.batches.cut_available(rows_max)) is not None:
        got += [
            row["value"].decode() for part in rows_of(coordinator, end).values() for row in part
        ]
        coordinator.batches.release(end)
    return got


@pytest.fixture(params=[False, True], ids=["client only", "admin"])
def with_admin(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def admin_of(topic: BoundedTopic, wanted: bool) -> MemoryAdmin | None:
    return MemoryAdmin(topic.cluster) if wanted else None


def test_a_run_ends_with_the_messages_present_at_its_start(with_admin: bool) -> None:
    topic = BoundedTopic()
    before = topic.publish(100)
    with bounded(topic, admin=admin_of(topic, with_admin)) as coordinator:
        topic.publish(50)
        assert sorted(run(coordinator, 30)) == sorted(before)
        assert coordinator.batches.cut_available() is None
        assert topic.backlog() == 50


def test_an_empty_topic_ends_at_once(with_admin: bool) -> None:
    topic = BoundedTopic()
    with bounded(topic, admin=admin_of(topic, with_admin)) as coordinator:
        assert run(coordinator) == []


def test_markers_and_the_ends_of_ledgers_are_not_waited_for(with_admin: bool) -> None:
    topic = BoundedTopic()
    before = topic.publish(20)
    for where in topic.where:
        topic.cluster.publish_marker(where)
    before += topic.publish(40)
    topic.cluster.roll_ledger(topic.where[0])
    for where in topic.where:
        topic.cluster.publish_marker(where)
        topic.cluster.publish_marker(where)
    # With nothing quiet for an hour: the Reader alone decides.
    source = topic.source(available_now_quiet_ms=3_600_000)
    with bounded(topic, source, admin=admin_of(topic, with_admin)) as coordinator:
        assert sorted(run(coordinator, 25)) == sorted(before)
    assert topic.backlog() == 0


def test_a_subscription_that_begins_behind_the_data_has_nothing_to_wait_for(
    with_admin: bool,
) -> None:
    topic = BoundedTopic()
    topic.publish(30)
    source = topic.source(starting_position="latest")
    with bounded(topic, source, admin=admin_of(topic, with_admin)) as coordinator:
        assert run(coordinator) == []


def test_entries_acknowledged_by_another_client_are_not_waited_for(with_admin: bool) -> None:
    topic = BoundedTopic()
    values = topic.publish(40)
    topic.cluster.publish(topic.where[0], Message(b"tail", key=KEYS[0]))
    with topic.cluster.lock:
        log = topic.cluster.log(topic.where[0])
        other = topic.cluster.open_subscription(
            topic.where[0], SUBSCRIPTION, StartPosition.EARLIEST
        )
        other.acknowledge([3, 7, len(log) - 1])
    with bounded(topic, admin=admin_of(topic, with_admin)) as coordinator:
        got = run(coordinator)
    assert sorted(got) == sorted(set(values) - {values[6], values[14]})
    assert topic.backlog() == 0


def test_a_restart_continues_and_takes_a_new_target(with_admin: bool) -> None:
    topic = BoundedTopic()
    first = topic.publish(60)
    with bounded(topic, admin=admin_of(topic, with_admin)) as coordinator:
        assert sorted(run(coordinator)) == sorted(first)
        end = coordinator.newest
    second = topic.publish(44, partitions=3)
    with bounded(topic, checkpoint=end, admin=admin_of(topic, with_admin)) as coordinator:
        assert sorted(run(coordinator)) == sorted(second)
    assert topic.backlog() == 0


@pytest.mark.parametrize("queue", [3, 50])
def test_an_endless_producer_neither_stops_nor_lengthens_a_run(
    queue: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keyshard.coordinator.available_now.ROWS_BEHIND_MAX", 20)
    monkeypatch.setattr("keyshard.coordinator.available_now.REST_S", (0.05, 0.4))
    topic = BoundedTopic(look_ahead=LookAhead(20, 80))
    before = topic.publish(400)
    source = topic.source(receiver_queue_size=queue, window_rows_max=60)
    stop = threading.Event()

    def produce() -> None:
        while not stop.is_set():
            topic.publish(5)
            stop.wait(0.002)

    with bounded(topic, source) as coordinator:
        producer = threading.Thread(target=produce)
        producer.start()
        try:
            got = run(coordinator)
        finally:
            stop.set()
            producer.join()
    assert sorted(got) == sorted(before)
    assert topic.backlog() == topic.count - len(before)


def withholding(monkeypatch: pytest.MonkeyPatch, value: str) -> list[MemoryConsumer]:
    """Let one entry wait at the broker until its range subscribes again.

    Returns:
        The consumer that does not get it, once the entry was due there.
    """
    waiting: list[MemoryConsumer] = []
    receive = MemoryConsumer.receive

    def without_one(consumer: MemoryConsumer, timeout_ms: int) -> list[EntryBlock]:
        blocks = receive(consumer, timeout_ms)
        late = [block for block in blocks if block.values == [value.encode()]]
        waiting.extend([consumer] if late and not waiting else [])
        return [block for block in blocks if block not in late or consumer not in waiting]

    monkeypatch.setattr(MemoryConsumer, "receive", without_one)
    return waiting


def test_a_range_behind_its_target_asks_again_for_earlier_entries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("keyshard.coordinator.available_now.ROWS_BEHIND_MAX", 5)
    monkeypatch.setattr("keyshard.coordinator.available_now.REST_S", (0.05, 0.4))
    topic = BoundedTopic()
    before = topic.publish(8, partitions=1)
    waiting = withholding(monkeypatch, before[2])
    with bounded(topic, admin=MemoryAdmin(topic.cluster)) as coordinator:
        topic.publish(60, partitions=1)
        assert sorted(run(coordinator)) == sorted(before)
    assert waiting
    assert topic.backlog() == 60


@pytest.mark.parametrize(
    "limits", [UnackedLimits(40, 1_000), UnackedLimits(1_000, 80)], ids=["consumer", "subscription"]
)
def test_rows_behind_the_target_do_not_reach_the_limits_of_the_broker(
    limits: UnackedLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker at its limit sends nothing, and no batch acknowledges rows behind the target."""
    monkeypatch.setattr("keyshard.coordinator.available_now.REST_S", (0.05, 0.4))
    topic = BoundedTopic(unacked_limits=limits)
    before = topic.publish(8, partitions=1)
    waiting = withholding(monkeypatch, before[2])
    with bounded(topic, admin=MemoryAdmin(topic.cluster)) as coordinator:
        topic.publish(400, partitions=1)
        assert sorted(run(coordinator)) == sorted(before)
    assert waiting
    assert topic.backlog() == 400


def test_acknowledgements_that_the_broker_forgot_are_repeated_before_the_end() -> None:
    topic = BoundedTopic()
    before = topic.publish(20)
    admin = MemoryAdmin(topic.cluster)
    with bounded(topic, admin=admin) as coordinator:
        got: list[str] = []
        while len(got) < len(before):
            end = coordinator.batches.cut_available()
            assert end is not None
            rows = rows_of(coordinator, end)
            got += [row["value"].decode() for part in rows.values() for row in part]
            with coordinator.consumers.shared.lock:  # as if the broker had lost them in a crash
                coordinator.consumers.shared.window.release(end)
        assert coordinator.batches.cut_available() is None
    assert sorted(got) == sorted(before)
    assert topic.backlog() == 0


def test_a_cluster_that_was_wiped_before_the_end_is_named_at_once() -> None:
    """Its acknowledgements never show: there is nothing that could be acknowledged."""
    topic = BoundedTopic()
    before = topic.publish(20)
    with bounded(topic, admin=MemoryAdmin(topic.cluster)) as coordinator:
        got = 0
        while got < len(before):
            end = coordinator.batches.cut_available()
            assert end is not None
            got += sum(map(len, rows_of(coordinator, end).values()))
            with coordinator.consumers.shared.lock:
                coordinator.consumers.shared.window.release(end)
        topic.cluster.wipe()
        topic.cluster.create_topic("orders", partitions=3)
        for consumers in coordinator.consumers.range_consumers.by_partition.values():
            for one in consumers:
                assert isinstance(one.consumer, MemoryConsumer)
                one.consumer.reconnect()
        with pytest.raises(TopicRecreatedError, match=r"has 0 entries|newest ledger"):
            coordinator.batches.cut_available()


def test_a_row_that_never_comes_ends_in_a_named_error() -> None:
    topic = BoundedTopic()
    topic.publish(1)
    source = topic.source(available_now_timeout_ms=1_000)
    admin = MemoryAdmin(topic.cluster)
    with bounded(topic, source, admin=admin) as coordinator:
        end = coordinator.batches.cut_available()
        assert end is not None
        # The host never says that the batch is committed.
        with pytest.raises(AvailableNowTimeoutError, match="a planned batch is not committed"):
            coordinator.batches.cut_available()


class DelayingTopic(BoundedTopic):
    """A topic on a broker whose clock can be put forward."""

    def __init__(self) -> None:
        self.ahead_ms = 0
        super().__init__(now_ms=lambda: time.time_ns() // 1_000_000 + self.ahead_ms)

    def publish_delayed(self, key: str = "late") -> str:
        """Publish a message of the first partition for one hour later."""
        due_ms = time.time_ns() // 1_000_000 + HOUR_MS
        value = f"{key}:{self.count}"
        self.count += 1
        self.cluster.publish(self.where[0], Message(value.encode(), key, deliver_at_ms=due_ms))
        return value


@pytest.mark.parametrize("with_admin", [True, False])
def test_a_message_that_is_not_due_is_left_for_a_later_run(with_admin: bool) -> None:
    """1. A topic has one delayed message among others. 2. A bounded run begins.

    With admin_url it waited for its timeout and failed.
    """
    topic = DelayingTopic()
    admin = MemoryAdmin(topic.cluster) if with_admin else None
    values = topic.publish(20)
    late = [topic.publish_delayed(), topic.publish_delayed()]
    values += topic.publish(20)
    with bounded(topic, admin=admin) as coordinator:
        assert sorted(run(coordinator)) == sorted(values)
        assert coordinator.status()["entriesNotDue"] == 2
        end = coordinator.newest
    assert topic.backlog() == 2
    topic.ahead_ms = HOUR_MS
    with bounded(topic, checkpoint=end, admin=admin) as coordinator:
        assert sorted(run(coordinator)) == late
        assert coordinator.status()["entriesNotDue"] == 0
    assert topic.backlog() == 0


@pytest.mark.parametrize("with_admin", [True, False])
def test_a_skipped_entry_between_gaps_does_not_end_a_later_run(with_admin: bool) -> None:
    """1. A run skips a corrupt entry between two messages that are not due. 2. ``on_corrupt`` is
    ``fail`` again, and another run looks for the two messages.
    """
    topic = DelayingTopic()
    admin = admin_of(topic, with_admin)
    topic.publish_delayed()
    ((_, corrupt),) = topic.cluster.publish(topic.where[0], Message(b"?", key=KEYS[0]))
    topic.cluster.corrupt(topic.where[0], corrupt)
    topic.publish_delayed()
    topic.publish(20)
    with bounded(topic, topic.source(on_corrupt="skip"), admin=admin) as coordinator:
        assert len(run(coordinator)) == 20
        assert coordinator.status()["corruptSkipped"] == 1
        end = coordinator.newest
    values = topic.publish(20)
    with bounded(topic, checkpoint=end, admin=admin) as coordinator:
        assert sorted(run(coordinator)) == sorted(values)
        assert coordinator.status()["entriesNotDue"] == 2


@pytest.mark.parametrize("with_admin", [True, False])
def test_the_rows_of_a_run_do_not_wait_for_more(with_admin: bool) -> None:
    """1. A topic has fewer rows than batch_rows_min. 2. A bounded run reads it.

    The run ended with no row, as if everything had been read.
    """
    topic = BoundedTopic()
    values = topic.publish(50)
    source = topic.source(batch_rows_min=1_000, batch_delay_max_ms=60_000)
    with bounded(topic, source, admin=admin_of(topic, with_admin)) as coordinator:
        assert sorted(run(coordinator)) == sorted(values)
    assert topic.backlog() == 0


def test_rows_without_room_in_the_checkpoint_do_not_end_a_run_in_silence() -> None:
    """1. Every second message is delayed. 2. The gaps in the checkpoint reach its limit.

    The run ended, and its host took the rows so far for all.
    """
    topic = DelayingTopic()
    for _ in range(3_000):
        topic.publish(1, partitions=1)
        topic.publish_delayed()
    source = topic.source(
        checkpoint_bytes_max=4_096, window_rows_max=100, available_now_timeout_ms=1_000
    )
    with (
        bounded(topic, source, admin=MemoryAdmin(topic.cluster)) as coordinator,
        pytest.raises(AvailableNowTimeoutError),
    ):
        run(coordinator)


def test_many_messages_that_are_not_due_need_few_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    topic = DelayingTopic()
    opened = []
    reader = MemoryBroker.reader

    def counted(*asked: Any) -> Any:
        opened.append(asked)
        return reader(*asked)

    monkeypatch.setattr(MemoryBroker, "reader", counted)
    values = []
    for _ in range(200):
        values += topic.publish(1, partitions=1)
        topic.publish_delayed()
    with bounded(topic, admin=MemoryAdmin(topic.cluster)) as coordinator:
        assert sorted(run(coordinator)) == sorted(values)
        assert coordinator.status()["entriesNotDue"] == 200
    # 400 entries are 14 ledgers.
    assert len(opened) < 60


def test_an_undelivered_entry_behind_delayed_ones_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topic = DelayingTopic()
    topic.publish_delayed()
    topic.publish(1, partitions=1)
    monkeypatch.setattr(MemoryConsumer, "receive", lambda *_: threading.Event().wait(0.01) or [])
    source = topic.source(available_now_timeout_ms=1_000)
    with (
        bounded(topic, source, admin=MemoryAdmin(topic.cluster)) as coordinator,
        pytest.raises(AvailableNowTimeoutError) as caught,
    ):
        coordinator.batches.cut_available()
    assert "entry 1:1 of" in str(caught.value.facts["missing"])


@pytest.mark.parametrize("what", ["reader", "admin"])
def test_a_failed_question_does_not_end_a_run(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. Nothing arrives. 2. The broker cannot be asked what is missing. 3. It stays quiet.

    The run ended as if everything had been acknowledged before it.
    """
    topic = BoundedTopic()
    topic.publish(10)
    monkeypatch.setattr(MemoryConsumer, "receive", lambda *_: threading.Event().wait(0.01) or [])
    monkeypatch.setattr("keyshard.reading.gap_reader.READER_TIMEOUT_S", 0.1)
    source = topic.source(available_now_timeout_ms=2_000)
    asks = ScriptedCall()
    broker, admin = MemoryBroker(topic.cluster), admin_of(topic, what == "admin")
    if admin is None:
        faulty(broker, reader=asks)
    else:
        faulty(admin, broker_state=asks)
    coordinator = Coordinator(source, lambda: broker, admin)
    coordinator.start(None, available_now=True)
    asks.raises = BrokerUnavailableError("away")
    try:
        with pytest.raises(AvailableNowTimeoutError, match="away"):
            coordinator.batches.cut_available()
    finally:
        coordinator.stop()


def test_an_undelivered_entry_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    topic = BoundedTopic()
    topic.publish(1)

    def receive(*_: object) -> list[EntryBlock]:
        threading.Event().wait(0.01)
        return []

    monkeypatch.setattr(MemoryConsumer, "receive", receive)
    source = topic.source(available_now_timeout_ms=1_000)
    with (
        bounded(topic, source, admin=MemoryAdmin(topic.cluster)) as coordinator,
        pytest.raises(AvailableNowTimeoutError) as caught,
    ):
        coordinator.batches.cut_available()
    assert str(caught.value).startswith("[KEYSHARD_AVAILABLE_NOW_TIMEOUT]")
    assert f"of {topic.where[0]}" in str(caught.value.facts["missing"])


def test_a_run_whose_consumers_are_away_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic was deleted, or the broker does not come back: there was nothing to ask."""
    topic = BoundedTopic()
    topic.publish(1)
    broker = MemoryBroker(topic.cluster)
    monkeypatch.setattr(MemoryConsumer, "receive", lambda *_: threading.Event().wait(0.01) or [])
    monkeypatch.setattr(MemoryConsumer, "problem", lambda _: "The topic does not exist.")
    source = topic.source(available_now_timeout_ms=1_000)
    coordinator = Coordinator(source, lambda: broker, None)
    coordinator.start(None, available_now=True)
    broker.drop([topic.where[1]])
    away = f"consumer of {topic.where[1]} is not connected: The topic does not exist. Committed"
    try:
        with pytest.raises(AvailableNowTimeoutError, match=away):
            coordinator.batches.cut_available()
    finally:
        coordinator.stop()
