"""Bounded runs of scalable topics: the segments at the start, parents before children."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from keyshard.broker.memory import Message
from keyshard.broker.memory.client import MemoryConsumer
from keyshard.broker.scalable_topics import ScalableTopics
from keyshard.config.source import SourceConfig
from keyshard.coordinator.coordinator import Coordinator
from keyshard.coordinator.partition_lifecycle import PartitionLifecycle
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import TopicPartition
from keyshard.errors import AvailableNowTimeoutError, BrokerUnavailableError
from tests.helpers import rows_of
from tests.support.deadlines import deadline
from tests.support.memory_scalable_topic import KEYS, TOPIC, ScalableTopic, source_of

QUIET_MS, TIMEOUT_MS = int(deadline(1.5) * 1_000), int(deadline(20) * 1_000)
HOUR_MS = 3_600_000


@pytest.fixture
def topic() -> ScalableTopic:
    return ScalableTopic()


def bounded_source(**changes: object) -> SourceConfig:
    fields = {"available_now_timeout_ms": TIMEOUT_MS, "available_now_quiet_ms": QUIET_MS}
    return source_of(TOPIC, **fields | changes)


@contextmanager
def bounded(
    topic: ScalableTopic,
    checkpoint: Checkpoint | None = None,
    *,
    planned: bool = False,
    **changes: object,
) -> Iterator[Coordinator]:
    source = bounded_source(**changes)
    with topic.running(source, checkpoint, available_now=True, planned=planned) as coordinator:
        yield coordinator
    topic.cluster.validate()


def batches(
    topic: ScalableTopic,
    coordinator: Coordinator,
    rows_max: int | None = None,
    between: Callable[[], object] = lambda: None,
) -> list[Checkpoint]:
    """Take all batches of a run, as a host does; call ``between`` before each is committed."""
    ends = []
    while (end := coordinator.batches.cut_available(rows_max)) is not None:
        topic.take(rows_of(coordinator, end))
        between()
        coordinator.batches.release(end)
        ends.append(end)
    return ends


@pytest.mark.simulated
def test_a_run_takes_each_generation_of_segments_after_the_one_before(
    topic: ScalableTopic,
) -> None:
    topic.publish(16)
    topic.split(0)
    topic.publish(16)
    topic.split(1)
    topic.cluster.scalable.merge(TOPIC, 4, 2)
    topic.publish(16)
    with bounded(topic, available_now_quiet_ms=HOUR_MS) as coordinator:
        batches(topic, coordinator, 10)
        assert coordinator.batches.cut_available() is None
    topic.check()


@pytest.mark.simulated
def test_an_empty_topic_ends_at_once(topic: ScalableTopic) -> None:
    topic.split(0)
    with bounded(topic, available_now_quiet_ms=HOUR_MS) as coordinator:
        assert batches(topic, coordinator) == []


@pytest.mark.simulated
def test_messages_and_segments_after_the_start_are_left_for_the_next_run(
    topic: ScalableTopic,
) -> None:
    topic.publish(16)

    def more() -> None:
        if topic.sent == 16:
            topic.publish(4)
            topic.split(0)
            topic.publish(16)

    with bounded(topic, available_now_quiet_ms=HOUR_MS) as coordinator:
        last = batches(topic, coordinator, 4, more)[-1]
        assert sorted(number for _, number in topic.got) == list(range(16))
        assert coordinator.status()["topicPartitions"] == 1
    with bounded(topic, Checkpoint.from_json(last.to_json())) as coordinator:
        batches(topic, coordinator)
    topic.check()


@pytest.mark.simulated
def test_a_segment_that_is_deleted_after_it_was_drained_is_not_waited_for(
    topic: ScalableTopic,
) -> None:
    topic.publish(16)
    topic.split(0)
    topic.publish(16)
    collected: list[int] = []

    def collect() -> None:
        collected.extend(topic.cluster.scalable.collect(TOPIC))

    with bounded(topic, available_now_quiet_ms=HOUR_MS) as coordinator:
        while (end := coordinator.batches.cut_available(8)) is not None:
            topic.take(rows_of(coordinator, end))
            coordinator.batches.release(end)
            coordinator.consumers.acknowledger.flush(deadline(5))
            collect()
    assert collected == [0]
    topic.check()


@pytest.mark.simulated
def test_a_question_that_fails_after_a_segment_was_closed_does_not_forget_it(
    topic: ScalableTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic.publish(8)
    topic.split(0)
    topic.publish(8)
    topic.split(1)
    shrink, parents, failed = PartitionLifecycle.shrink, ScalableTopics.parents, [0]

    def fails(self: ScalableTopics) -> Any:
        if failed[0] == 1:
            failed[0] += 1
            raise BrokerUnavailableError("The broker is away.")
        return parents(self)

    def shrinks(self: PartitionLifecycle, *of: Any, **how: Any) -> None:
        shrink(self, *of, **how)
        failed[0] += 1

    monkeypatch.setattr(ScalableTopics, "parents", fails)
    monkeypatch.setattr(PartitionLifecycle, "shrink", shrinks)
    with bounded(topic, available_now_quiet_ms=HOUR_MS) as coordinator:
        while (end := coordinator.batches.cut_available(8)) is not None:
            topic.take(rows_of(coordinator, end))
            coordinator.batches.release(end)
            coordinator.consumers.acknowledger.flush(deadline(5))
            topic.cluster.scalable.collect(TOPIC)
    assert failed[0] >= 2
    topic.check()


@pytest.mark.simulated
def test_a_topic_that_is_deleted_ends_its_run(
    topic: ScalableTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keyshard.broker.scalable_topics.LOOK_AGAIN_S", 0.0)
    topic.publish(16)
    topic.split(0)
    topic.publish(16)
    with bounded(topic, available_now_quiet_ms=HOUR_MS) as coordinator:
        end = coordinator.batches.cut_available(8)
        assert end is not None
        topic.cluster.scalable.delete(TOPIC)
        coordinator.batches.release(end)
        batches(topic, coordinator)


@pytest.mark.simulated
def test_segments_that_are_acknowledged_before_the_run_are_not_waited_for(
    topic: ScalableTopic,
) -> None:
    topic.publish(16)
    topic.split(0)
    topic.publish(16)
    with bounded(topic) as coordinator:
        batches(topic, coordinator)
    topic.publish(8)
    topic.got.clear()
    with bounded(topic, available_now_quiet_ms=HOUR_MS) as coordinator:
        batches(topic, coordinator)
    assert {number for _, number in topic.got} >= set(range(32, 40))


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.simulated
def test_a_run_that_is_killed_is_continued_by_the_next(
    topic: ScalableTopic, committed: bool
) -> None:
    topic.publish(16)
    topic.split(0)
    topic.publish(16)
    with bounded(topic) as coordinator:
        end = coordinator.batches.cut_available(10)
        assert end is not None
        if committed:
            topic.take(rows_of(coordinator, end))
    topic.split(1)
    topic.publish(8)
    again = Checkpoint.from_json(end.to_json())
    with bounded(topic, again, planned=not committed) as coordinator:
        if not committed:
            topic.take(rows_of(coordinator, end))
            coordinator.batches.release(end)
        batches(topic, coordinator, 10)
    topic.check()


@pytest.mark.simulated
def test_children_of_a_segment_with_a_delayed_message_are_left_for_a_later_run(
    topic: ScalableTopic, caplog: pytest.LogCaptureFixture
) -> None:
    topic.publish(8)
    later = int(time.time() * 1_000) + HOUR_MS
    topic.cluster.publish(TOPIC, Message(b"99", key=KEYS[0], deliver_at_ms=later))
    topic.split(0)
    topic.publish(8)
    with bounded(topic) as coordinator:
        batches(topic, coordinator)
        assert coordinator.status()["entriesNotDue"] == 1
        assert coordinator.status()["segmentsWaiting"] == 2
    assert sorted(number for _, number in topic.got) == list(range(8))
    assert "2 segments, such as segment://" in caplog.text


@pytest.mark.simulated
def test_a_question_about_the_segments_that_fails_leaves_nothing_out(
    topic: ScalableTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    backlog, asked = ScalableTopics.backlog, [0]

    def fails(self: ScalableTopics, segment: TopicPartition) -> int | None:
        asked[0] += 1
        if asked[0] < 5:
            raise BrokerUnavailableError("The broker is away.")
        return backlog(self, segment)

    monkeypatch.setattr(ScalableTopics, "backlog", fails)
    topic.publish(8)
    topic.split(0)
    topic.publish(8)
    with bounded(topic) as coordinator:
        batches(topic, coordinator)
    topic.check()


@pytest.mark.simulated
def test_a_run_whose_segments_stay_unknown_fails_with_the_reason(
    topic: ScalableTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: ScalableTopics, segment: TopicPartition) -> int | None:
        raise BrokerUnavailableError("The broker is away.")

    monkeypatch.setattr(ScalableTopics, "backlog", fails)
    topic.publish(8)
    topic.split(0)
    topic.publish(8)
    with (
        bounded(topic, available_now_timeout_ms=1_000, available_now_quiet_ms=1) as coordinator,
        pytest.raises(AvailableNowTimeoutError, match="the segments are unknown: The broker is"),
    ):
        batches(topic, coordinator)


def test_a_silent_broker_ends_no_run_while_a_segment_has_a_backlog(
    topic: ScalableTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic.publish(16)
    topic.split(0)
    topic.publish(16)
    monkeypatch.setattr(MemoryConsumer, "receive", lambda _self, _timeout_ms: ())
    with bounded(topic, available_now_timeout_ms=4 * QUIET_MS) as coordinator:
        with pytest.raises(AvailableNowTimeoutError, match=r"entry .* of segment://"):
            coordinator.batches.cut_available()
        monkeypatch.undo()
