"""Batches of the embedded runtime on the in-memory broker: cut, plan, read, release."""

from __future__ import annotations

import json
import threading

import pytest

from keyshard.broker.memory import Batching, Message
from keyshard.consumers.receiver import OwnedRange
from keyshard.core.position.entry import TopicPartition
from keyshard.core.ring.hash_range import split_ring
from keyshard.core.ring.key_slot import key_slot
from keyshard.core.window.backpressure import Backpressure
from keyshard.errors import BatchReleasedError, BatchUnknownError, MisroutedError
from tests.helpers import (
    DEADLINE_S,
    config,
    key_in,
    keys_of,
    received,
    rows_of,
    running,
    wait_until,
)
from tests.support.coordinated_topic import CoordinatedTopic, assert_in_order, cut, values

pytestmark = pytest.mark.simulated(seeds=1)


@pytest.mark.parametrize("batching", [Batching.NONE, Batching.BY_KEY])
def test_every_message_comes_once_in_key_order_and_is_acknowledged(
    coordinated: CoordinatedTopic, batching: Batching
) -> None:
    got: list[str] = []
    last: dict[str, int] = {}
    with running(coordinated.cluster, coordinated.source) as coordinator:
        for _ in range(5):
            coordinated.publish(48, batching=batching)
            received(coordinator, coordinated.count)
            while (end := coordinator.batches.cut(20)) is not None:
                rows = rows_of(coordinator, end)
                assert_in_order(rows, last)
                got += values(rows)
                coordinator.batches.release(end)
        wait_until(lambda: coordinated.backlog == 0)
        status = coordinator.status()
    assert sorted(got) == coordinated.all_values()
    assert status["windowRows"] == status["plannedBatches"] == 0
    assert status["misrouted"] == status["keyless"] == status["duplicatesDropped"] == 0


def test_nothing_is_acknowledged_before_its_release(coordinated: CoordinatedTopic) -> None:
    coordinated.publish(24)
    with running(coordinated.cluster, coordinated.source) as coordinator:
        received(coordinator, 24)
        end = cut(coordinator, 10)
        rows_of(coordinator, end)
        taken = coordinator.status()["plannedBatches"], coordinated.backlog
        assert taken == (1, 24)
        coordinator.batches.release(end)
        rows = sum(len(state.batch) for state in end.partitions.values())
        wait_until(lambda: coordinated.backlog == 24 - rows)
    assert coordinated.backlog == 24 - rows, "stopping acknowledges nothing else"


def test_every_range_has_rows_with_any_number_of_partitions(coordinated: CoordinatedTopic) -> None:
    source = config(coordinated.topic, parallelism=10, batch_tasks=10)
    for key in keys_of(10):
        coordinated.cluster.publish(coordinated.topic, Message(b"x:0", key=key))
    with running(coordinated.cluster, source) as coordinator:
        received(coordinator, 10)
        assert coordinator.batches.plan(cut(coordinator)) == list(range(10))


def test_a_small_batch_puts_several_ranges_into_one_partition_and_reports_it(
    coordinated: CoordinatedTopic,
) -> None:
    source = config(coordinated.topic, parallelism=10)
    for key in keys_of(10):
        coordinated.cluster.publish(coordinated.topic, Message(b"x:0", key=key))
    with running(coordinated.cluster, source) as coordinator:
        received(coordinator, 10)
        end = cut(coordinator)
        assert coordinator.batches.plan(end) == [0]
        assert end.merged == 1
        rows = rows_of(coordinator, end)
    with running(
        coordinated.cluster, config(coordinated.topic, parallelism=3), end, planned=True
    ) as again:
        assert again.batches.plan(end) == [0]
        assert rows_of(again, end) == rows


def test_reading_again_gives_the_same_rows(coordinated: CoordinatedTopic) -> None:
    coordinated.publish(30)
    with running(coordinated.cluster, coordinated.source) as coordinator:
        received(coordinator, 30)
        end = cut(coordinator)
        assert rows_of(coordinator, end) == rows_of(coordinator, end)
        assert coordinator.batches.plan(end) == coordinator.batches.plan(end)


def test_a_read_selects_columns(coordinated: CoordinatedTopic) -> None:
    coordinated.publish(1)
    with running(coordinated.cluster, coordinated.source) as coordinator:
        received(coordinator, 1)
        end = cut(coordinator)
        (index,) = coordinator.batches.plan(end)
        (part,) = coordinator.batches.read(end.batch_id, index, ["__slot", "__key"])
        assert part.to_pylist() == [{"__slot": key_slot("key-0"), "__key": "key-0"}]


def test_a_released_batch_cannot_be_read_or_planned(coordinated: CoordinatedTopic) -> None:
    coordinated.publish(1)
    with running(coordinated.cluster, coordinated.source) as coordinator:
        received(coordinator, 1)
        end = cut(coordinator)
        (index,) = coordinator.batches.plan(end)
        coordinator.batches.release(end)
        coordinator.batches.release(end)
        with pytest.raises(BatchReleasedError) as caught:
            coordinator.batches.read(end.batch_id, index)
        assert caught.value.facts == {"batch_id": end.batch_id}
        with pytest.raises(BatchReleasedError):
            coordinator.batches.plan(end)


def test_times_of_batches_end_with_their_release(coordinated: CoordinatedTopic) -> None:
    """Times of batches that were released with a later one were kept for ever, and a release
    dropped those of batches that were still read."""
    coordinated.publish(24)
    with running(coordinated.cluster, coordinated.source) as coordinator:
        received(coordinator, 24)
        batches, costs = coordinator.batches, coordinator.consumers.shared.window.task_costs
        learned: list[int] = []
        costs.learn = lambda rows, *_: learned.append(rows)  # type: ignore[method-assign]
        ends = [cut(coordinator, 6) for _ in range(3)]
        for end in ends:
            rows_of(coordinator, end)
        rows = [batches.rows(end.batch_id) for end in ends]
        batches.release(ends[1])
        batches.release(ends[2])
        assert learned == rows[1:]
        assert (batches._cut_ms, batches._began_s) == ({}, {})


def test_an_unknown_batch_or_partition_is_refused(coordinated: CoordinatedTopic) -> None:
    coordinated.publish(1)
    with running(coordinated.cluster, coordinated.source) as coordinator:
        received(coordinator, 1)
        end = cut(coordinator)
        (index,) = coordinator.batches.plan(end)
        for batch_id, part in (("nope", index), (end.batch_id, index + 1)):
            with pytest.raises(BatchUnknownError, match="planned no batch"):
                coordinator.batches.read(batch_id, part)


def test_a_full_window_pauses_receiving_and_release_resumes_it(
    coordinated: CoordinatedTopic,
) -> None:
    coordinated.publish(120)
    source = config(coordinated.topic, window_rows_max=40, receiver_queue_size=1)
    got: list[str] = []
    with running(coordinated.cluster, source) as coordinator:
        most = 0
        while len(got) < 120:
            wait_until(lambda: coordinator.batches.wait_for_rows(5))
            most = max(most, coordinator.status()["windowRows"])
            end = cut(coordinator)
            assert len(values(rows_of(coordinator, end))) <= 20 + 4
            got += values(rows_of(coordinator, end))
            coordinator.batches.release(end)
    assert sorted(got) == coordinated.all_values()
    assert most <= 40 + 4 * 2


def test_waiting_ends_with_the_first_row_or_the_time(coordinated: CoordinatedTopic) -> None:
    with running(coordinated.cluster, coordinated.source) as coordinator:
        assert not coordinator.batches.wait_for_rows(0.0)
        waited: list[bool] = []
        thread = threading.Thread(
            target=lambda: waited.append(coordinator.batches.wait_for_rows(10))
        )
        thread.start()
        coordinated.publish(1)
        thread.join(DEADLINE_S)
        assert waited == [True]


def test_misrouted_and_keyless_messages_are_counted(coordinated: CoordinatedTopic) -> None:
    low, high = split_ring(2)
    mixed = [Message(b"", key=key_in(low)), Message(b"", key=key_in(high)), Message(b"")]
    with running(coordinated.cluster, config(coordinated.topic, parallelism=2)) as coordinator:
        coordinated.cluster.publish(coordinated.where[0], *mixed, batching=Batching.MIXED)
        coordinated.cluster.publish(coordinated.where[0], Message(b""), Message(b""))
        received(coordinator, 5)
        wait_until(lambda: coordinator.status()["keyless"] == 3)
        assert coordinator.status()["misrouted"] == 1


def test_the_status_is_of_plain_json_values(coordinated: CoordinatedTopic) -> None:
    coordinated.publish(8)
    with running(
        coordinated.cluster, config(coordinated.topic, window_rows_max=1_000)
    ) as coordinator:
        received(coordinator, 8)
        end = cut(coordinator, 4)
        status = coordinator.status()
        assert json.loads(json.dumps(status)) == status
        assert status == {
            "ranges": 4,
            "topicPartitions": 2,
            "rowsReceived": 8,
            "entriesReceived": status["entriesReceived"],
            "windowRows": 8,
            "windowFill": status["windowFill"],
            "keepsUpTriggerMillis": None,
            "oldestUnacknowledgedMillis": status["oldestUnacknowledgedMillis"],
            "duplicatesDropped": 0,
            "misrouted": 0,
            "keyless": 0,
            "unreadable": 0,
            "corruptSkipped": 0,
            "encryptedSkipped": 0,
            "ackGaps": 0,
            "ackGapsResolved": 0,
            "entriesNotDue": 0,
            "entriesLost": None,
            "rangesPaused": 0,
            "checkpointBytes": status["checkpointBytes"],
            "partitionsWithoutRoom": 0,
            "withoutRoomMillis": 0,
            "connectionError": "",
            "gapResolverError": "",
            "plannedBatches": 1,
            "entriesAcknowledged": 0,
            "entriesToAcknowledge": 0,
            "partitionsDiscovered": 0,
            "partitionsGone": 0,
            "segmentsWaiting": 0,
            "backlogEntries": None,
            "discoveryError": "",
            "sourceWorkers": [],
        }
        assert 0 < status["windowFill"] < 1
        coordinator.batches.release(end)
        wait_until(lambda: coordinator.status()["entriesAcknowledged"])


def test_a_cut_waits_for_the_fewest_rows_until_the_delay_is_over(
    coordinated: CoordinatedTopic,
) -> None:
    coordinated.publish(3)
    source = config(coordinated.topic, batch_rows_min=5, batch_delay_max_ms=60_000)
    with running(coordinated.cluster, source) as coordinator:
        received(coordinator, 3)
        assert coordinator.batches.cut() is None
        coordinated.publish(2)
        received(coordinator, 5)
        assert coordinator.batches.cut() is not None
    late = config(coordinated.topic, batch_rows_min=100, batch_delay_max_ms=1)
    with running(coordinated.cluster, late) as coordinator:
        received(coordinator, 5)
        wait_until(lambda: coordinator.batches.cut() is not None)


def test_a_cut_checks_no_backpressure_while_every_topic_partition_has_room(
    coordinated: CoordinatedTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[TopicPartition] = []
    fitted = Backpressure.fitted

    def noted(pauses: Backpressure, where: TopicPartition) -> None:
        looked.append(where)
        fitted(pauses, where)

    with running(coordinated.cluster, coordinated.source) as coordinator:
        coordinated.publish(10)
        received(coordinator, 10)
        monkeypatch.setattr(Backpressure, "fitted", noted)
        assert coordinator.batches.cut() is not None
        assert [coordinator.batches.cut() for _ in range(100)] == [None] * 100
        assert looked == [], "none waited for room"


def test_a_full_window_does_not_wait_for_the_fewest_rows(coordinated: CoordinatedTopic) -> None:
    coordinated.publish(40)
    source = config(coordinated.topic, batch_rows_min=100, window_rows_max=8)
    with running(coordinated.cluster, source) as coordinator:
        wait_until(lambda: coordinator.batches.cut() is not None)


def mixed_batch(coordinated: CoordinatedTopic) -> None:
    messages = [Message(b"x:0", key=key) for key in keys_of(4)]
    coordinated.cluster.publish(coordinated.where[0], *messages, batching=Batching.MIXED)


def test_a_misrouted_message_ends_the_source_if_configured(coordinated: CoordinatedTopic) -> None:
    mixed_batch(coordinated)
    with (
        running(coordinated.cluster, config(coordinated.topic, on_misrouted="fail")) as coordinator,
        pytest.raises(MisroutedError, match=r"BatchingType\.KeyBased"),
    ):
        wait_until(lambda: coordinator.batches.cut() is not None)
    assert coordinated.backlog == 1


def test_a_misrouted_message_is_counted_and_warned_of(
    coordinated: CoordinatedTopic, caplog: pytest.LogCaptureFixture
) -> None:
    mixed_batch(coordinated)
    with running(coordinated.cluster, coordinated.source) as coordinator:
        wait_until(lambda: coordinator.batches.cut() is not None)
        assert coordinator.status()["misrouted"] == 3
    assert "Enable batching by key" in caplog.text


def test_receiving_pauses_while_handlers_have_enough(coordinated: CoordinatedTopic) -> None:
    coordinated.publish(40)
    with running(coordinated.cluster, coordinated.source) as coordinator:
        coordinator.consumers.intake.ahead_rows_max = 40
        owned_range = OwnedRange(coordinated.where[0], 0, split_ring(4)[0])
        received(coordinator, 40)
        assert coordinator.consumers.intake.is_paused(owned_range)
        assert len(coordinator.in_flight.take(0, 10)) == 10
        assert not coordinator.consumers.intake.is_paused(owned_range)
        assert len(coordinator.in_flight.take(0)) == 30
