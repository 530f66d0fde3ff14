"""Ranges move while a source runs: nothing is lost, comes twice or out of order; no gap stays."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest

from keyshard.broker.memory import MemoryBroker, Message
from keyshard.broker.port import Consumer, SubscriptionSpec
from keyshard.consumers import range_consumers
from keyshard.coordinator import rescale
from keyshard.coordinator.rescale import Blocking
from keyshard.core.position.entry import TopicPartition
from keyshard.core.ring.assignment import (
    assign,
    fewest_moved,
    joined,
    moved_ranges,
    moved_slots,
    reassign,
)
from keyshard.core.ring.hash_range import split_ring
from keyshard.errors import (
    BrokerUnavailableError,
    DrainTimeoutError,
    RangeConflictError,
    RescaleError,
    RuntimeStoppedError,
)
from tests.helpers import DEADLINE_S, key_in, received, running, wait_until
from tests.support.changing_topics import PREFIX, ChangingTopics
from tests.support.deadlines import deadline
from tests.support.faulty_broker import faulty
from tests.support.rescaled_source import FakeWork, RescaledSource

MakeRescaled = Callable[..., RescaledSource]


def test_ranges_come_and_go_under_load(make_rescaled: MakeRescaled) -> None:
    rescaled = make_rescaled(4)
    rescaled.keep_publishing()
    now = assign(4)
    for epoch, count in enumerate((8, 3, 11, 1, 4), start=1):
        rescaled.more()
        before, now = now, reassign(now, count)
        report = rescaled.rescaler.rescale(count)
        assert (report.epoch, report.ranges_before, report.ranges_after) == (
            epoch, len(before), count,
        )  # fmt: skip
        assert report.moved_fraction == report.optimum_fraction
        assert report.moved_slots > 0
        assert report.pauses
        assert 0 < max(pause.pause_ms for pause in report.pauses) < 1_000 * deadline(5)
        assert report.consumers == sum(map(len, now))
        for partition in range(3):
            assert rescaled.ring(partition) == sorted(
                (owner, part) for owner, ranges in enumerate(now) for part in ranges
            )
        assert rescaled.coordinator.status()["ranges"] == count
    rescaled.more()
    rescaled.check()
    assert set(rescaled.ranges_of_batches) == {4, 8, 3, 11, 1}


def test_a_consumer_that_keeps_its_hash_range_is_not_touched(make_rescaled: MakeRescaled) -> None:
    rescaled = make_rescaled(8)
    where = TopicPartition(rescaled.topic, 1)
    before = {one.owned_range: one.consumer for one in rescaled.consumers[where]}
    report = rescaled.rescaler.rescale(7)
    after = {one.owned_range: one.consumer for one in rescaled.consumers[where]}
    kept = before.keys() & after.keys()
    assert {owned_range.range_index for owned_range in kept} == set(range(7)), "the eighth left"
    assert all(before[owned_range] is after[owned_range] for owned_range in kept)
    assert {owned_range.epoch for owned_range in after.keys() - kept} == {1}
    assert {pause.hash_range for pause in report.pauses} == {
        owned_range.hash_range for owned_range in after.keys() - kept
    }
    rescaled.publish_many(100)
    rescaled.check()


def test_nothing_changes_when_nothing_has_to(make_rescaled: MakeRescaled) -> None:
    rescaled = make_rescaled(4)
    report = rescaled.rescaler.rescale(4)
    assert (report.epoch, report.moved_slots, report.pauses) == (0, 0, ())
    assert report.to_dict()["moved_fraction"] == 0


@pytest.mark.parametrize("line", ["_pauses", "RescaleReport"])
def test_an_interrupt_after_the_move_leaves_a_rescale_that_moved_and_runs_no_more(
    make_rescaled: MakeRescaled, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue: the rescale ran for ever in the status, or had kept the ranges that it had moved."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    rescaled = make_rescaled(4)
    with monkeypatch.context() as patch:
        patch.setattr(rescale, line, interrupt)
        with pytest.raises(KeyboardInterrupt):
            rescaled.rescaler.rescale(8)
    history = rescaled.coordinator.history()
    assert history["rescaling"] is None
    (one,) = history["rescales"]
    assert (one["end"], one["epoch"], one["movedFraction"]) == ("moved", 1, 0.5)
    rescaled.publish_many(100)
    rescaled.check()


def test_a_balance_gives_the_busy_range_less_and_names_the_hot_key(
    make_rescaled: MakeRescaled,
) -> None:
    rescaled = make_rescaled(4)
    first = split_ring(4)[0]
    keys = [key_in(first, number) for number in range(40)]
    for number in range(800):
        rescaled.cluster.publish(rescaled.topic, Message(b"-", key=keys[number % 40]))
    wait_until(lambda: rescaled.rows == 800)
    report = rescaled.rescaler.balance()
    assert report.balance is not None
    assert report.balance.messages == 800
    assert report.balance.max_over_mean_before == 4
    assert report.balance.max_over_mean_after < 1.3
    assert report.optimum_fraction is None
    assert report.to_dict()["balance"]["hot_key_floor"] is None
    for _ in range(2_000):
        rescaled.cluster.publish(rescaled.topic, Message(b"-", key=keys[3]))
    wait_until(lambda: rescaled.rows == 2_800)
    again = rescaled.rescaler.balance()
    assert again.balance is not None
    assert again.balance.hot_key == keys[3]
    assert again.balance.hot_key_floor == pytest.approx(4 * 2_020 / 2_800)
    assert sorted({owner for owner, _ in rescaled.ring()}) == [0, 1, 2, 3]


@pytest.mark.simulated
def test_a_handler_that_hangs_leaves_everything_as_it_was(make_rescaled: MakeRescaled) -> None:
    rescaled = make_rescaled(4, 0.2)
    rescaled.keep_publishing()
    before, owned_ranges = (
        rescaled.ring(),
        [one.owned_range for one in rescaled.consumers[TopicPartition(rescaled.topic, 0)]],
    )
    rescaled.work.blocking = Blocking("k7", "3:4:0", 12.5)
    with pytest.raises(DrainTimeoutError, match=r"key 'k7' .*3:4:0 for 12\.5 s") as caught:
        rescaled.rescaler.rescale(8)
    assert caught.value.facts == {"key": "k7", "message_id": "3:4:0", "running_s": 12.5}
    assert not rescaled.work.held, "everything is begun again"
    assert rescaled.ring() == before
    assert [
        one.owned_range for one in rescaled.consumers[TopicPartition(rescaled.topic, 0)]
    ] == owned_ranges
    rescaled.more()
    rescaled.work.blocking = None
    assert rescaled.rescaler.rescale(8).epoch == 1
    rescaled.check()


def test_moved_slots_are_held_before_the_rest_of_their_consumers(
    make_rescaled: MakeRescaled,
) -> None:
    rescaled = make_rescaled(8, 0.05)
    rescaled.work.blocking = Blocking(None, "1:1:0", 1.0)
    with pytest.raises(DrainTimeoutError):
        rescaled.rescaler.rescale(11)
    assert rescaled.work.holds == [moved_ranges(assign(8), reassign(assign(8), 11))]
    rescaled.work.blocking = None
    rescaled.rescaler.rescale(11)
    assert rescaled.work.holds[1:] == [rescaled.work.holds[0], split_ring(1)]
    assert max(rescaled.work.owners) == 10
    del rescaled.work.holds[:]
    rescaled.rescaler.rescale(10)
    leaving = joined(reassign(assign(8), 11)[10])
    assert rescaled.work.holds[0] == leaving
    assert sum(map(len, rescaled.work.holds[1])) < 65_536 / 2, "most consumers are not touched"


@pytest.mark.simulated
def test_the_broker_may_be_away_for_a_while(make_rescaled: MakeRescaled) -> None:
    rescaled = make_rescaled(4)
    rescaled.keep_publishing()
    rescaled.more()
    rescaled.subscribes.errors.extend([BrokerUnavailableError("away")] * 30)
    assert rescaled.rescaler.rescale(6).epoch == 1
    assert rescaled.subscribes.raised == 30
    rescaled.more()
    rescaled.check()


@pytest.mark.simulated
def test_ranges_that_another_client_holds_go_back_to_their_owners(
    make_rescaled: MakeRescaled,
) -> None:
    rescaled = make_rescaled(4, subscribe_timeout_ms=200)
    rescaled.keep_publishing()
    rescaled.more()
    old = set(split_ring(4))
    rescaled.subscribes.raises = lambda spec, _: (
        None if spec.hash_range in old else RangeConflictError("taken")
    )
    with pytest.raises(RescaleError, match="hold them again"):
        rescaled.rescaler.rescale(8)
    assert rescaled.ring() == [(owner, part) for owner, part in enumerate(split_ring(4))]
    assert rescaled.coordinator.epoch == 2
    rescaled.more()
    rescaled.subscribes.raises = None
    assert rescaled.rescaler.rescale(8).ranges_after == 8
    rescaled.more()
    rescaled.check()


@pytest.mark.simulated
def test_client_queues_keep_their_size_if_no_range_moved(make_rescaled: MakeRescaled) -> None:
    """Issue: later consumers had the queues of the assignment that never came."""
    rescaled = make_rescaled(4, 0.2, subscribe_timeout_ms=200)
    ranges = rescaled.coordinator.consumers.range_consumers
    before = ranges.queue_max
    rescaled.work.blocking = Blocking("k7", "3:4:0", 12.5)
    with pytest.raises(DrainTimeoutError):
        rescaled.rescaler.rescale(400)
    assert ranges.queue_max == before
    rescaled.work.blocking = None
    rescaled.subscribes.raises = lambda spec, _: (
        None if spec.hash_range in split_ring(4) else RangeConflictError("taken")
    )
    with pytest.raises(RescaleError, match="hold them again"):
        rescaled.rescaler.rescale(400)
    assert ranges.queue_max == before
    assert {
        one.queue.messages_max for one in rescaled.consumers[TopicPartition(rescaled.topic, 0)]
    } == {before}


def test_ranges_that_get_no_consumer_in_a_rescale_end_the_source(
    make_rescaled: MakeRescaled,
) -> None:
    rescaled = make_rescaled(4, subscribe_timeout_ms=50)
    rescaled.subscribes.raises = BrokerUnavailableError("gone")
    with pytest.raises(RescaleError, match="have no consumer, so the source ends"):
        rescaled.rescaler.rescale(8)
    with pytest.raises(RescaleError, match="have no consumer"):
        rescaled.coordinator.check()


@pytest.mark.parametrize("again", [False, True])
def test_a_topic_that_was_deleted_just_before_a_rescale_does_not_end_the_others(
    again: bool,
) -> None:
    """Since Pulsar 4.1, no consumer brings its partitions back."""
    changing = ChangingTopics()
    for topic in ("gone", "stays"):
        changing.cluster.create_topic(topic, 2)
    with changing.running(changing.source(["gone", "stays"])) as coordinator:
        changing.cluster.delete_topic(PREFIX + "gone")
        report = coordinator.rescaler(FakeWork(), 5.0).rescale(8)
        assert (report.ranges_after, report.consumers) == (8, 8)
        if again:
            wait_until(lambda: "does not exist" in coordinator.status()["connectionError"])
            changing.cluster.create_topic("gone", 2)
            changing.publish("gone", 4)
        else:
            coordinator.discovery.round()
            assert coordinator.status()["topicPartitions"] == 2
        changing.publish("stays", 4)
        received(coordinator, changing.sent.total())
        wait_until(lambda: not coordinator.status()["connectionError"])


@pytest.mark.simulated
def test_a_deleted_topic_does_not_count_in_the_pauses_of_a_rescale() -> None:
    """Its ranges have no consumer, and one range of another topic is subscribed late."""
    changing = ChangingTopics()
    for topic in ("gone", "stays"):
        changing.cluster.create_topic(topic, 2)

    def subscribe(call: Callable[..., Consumer], spec: SubscriptionSpec, *args: object) -> Consumer:
        made = call(spec, *args)
        if spec.hash_range.start == 0:
            time.sleep(2.0)
        return made

    broker = faulty(MemoryBroker(changing.cluster), subscribe=subscribe)
    source = changing.source(["gone", "stays"])
    with running(changing.cluster, source, connect=lambda: broker) as coordinator:
        changing.cluster.delete_topic(PREFIX + "gone")
        report = coordinator.rescaler(FakeWork(), 5.0).rescale(8)
        assert len(report.pauses) == 8
        late = {pause.hash_range.start for pause in report.pauses if pause.pause_ms >= 2_000}
        assert late == {0}


def test_a_topic_that_is_deleted_while_a_rescale_subscribes_holds_up_no_other() -> None:
    """A consumer of it was subscribed, and is disconnected when the others are, too."""
    changing = ChangingTopics()
    for topic in ("gone", "stays"):
        changing.cluster.create_topic(topic, 2)
    deletes: list[str] = []

    def subscribe(call: Callable[..., Consumer], spec: SubscriptionSpec, *args: object) -> Consumer:
        made = call(spec, *args)
        if deletes and spec.topic_partition.topic == deletes[0]:
            changing.cluster.delete_topic(deletes.pop())
        return made

    broker = faulty(MemoryBroker(changing.cluster), subscribe=subscribe)
    source = changing.source(["gone", "stays"])
    with running(changing.cluster, source, connect=lambda: broker) as coordinator:
        deletes.append(PREFIX + "gone")
        report = coordinator.rescaler(FakeWork(), 5.0).rescale(8)
        assert not deletes
        assert (report.ranges_after, report.consumers) == (8, 8)
        coordinator.discovery.round()
        assert coordinator.status()["topicPartitions"] == 2
        changing.publish("stays", 4)
        received(coordinator, 4 * 2)


@pytest.mark.parametrize("error", [RuntimeError("a bug"), SystemExit(1)], ids=repr)
def test_a_gap_that_a_defect_leaves_ends_the_source(
    make_rescaled: MakeRescaled, error: BaseException
) -> None:
    rescaled = make_rescaled(4)
    rescaled.subscribes.raises = error
    with pytest.raises(RescaleError, match=r"have no consumer, so the source ends") as caught:
        rescaled.rescaler.rescale(8)
    assert repr(error) in caught.value.message
    with pytest.raises(RescaleError, match="have no consumer"):
        rescaled.coordinator.check()


def test_a_window_that_cannot_adopt_the_new_ranges_ends_the_source(
    make_rescaled: MakeRescaled, monkeypatch: pytest.MonkeyPatch
) -> None:
    rescaled = make_rescaled(4)

    def broken(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(rescaled.coordinator.consumers, "adopt", broken)
    with pytest.raises(RescaleError, match="the window does not match them: unexpectedly"):
        rescaled.rescaler.rescale(8)
    with pytest.raises(RescaleError, match="the window does not match them"):
        rescaled.coordinator.check()


def test_a_receive_thread_that_is_stuck_keeps_its_consumers(
    make_rescaled: MakeRescaled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_consumers, "DROP_TIMEOUT_S", 0.3)
    rescaled = make_rescaled(4, receive_threads=3)
    stuck = rescaled.consumers[TopicPartition(rescaled.topic, 0)][0]
    entered, leave = threading.Event(), threading.Event()
    receive = stuck.consumer.receive

    def receive_late(timeout_ms: int) -> object:
        entered.set()
        leave.wait(4 * DEADLINE_S)
        return receive(timeout_ms)

    stuck.consumer.receive = receive_late  # type: ignore[method-assign,assignment]
    rescaled.cluster.publish(
        TopicPartition(rescaled.topic, 0), Message(b"-", key=key_in(stuck.owned_range.hash_range))
    )
    assert entered.wait(DEADLINE_S)
    with pytest.raises(RescaleError, match="were not closed"):
        rescaled.rescaler.rescale(8)
    leave.set()
    assert [part for _, part in rescaled.ring()] == list(split_ring(4))
    assert stuck in rescaled.consumers[TopicPartition(rescaled.topic, 0)]
    rescaled.publish_many(100)
    wait_until(lambda: rescaled.rows == 101)
    assert rescaled.rescaler.rescale(8).ranges_after == 8


def test_topic_partitions_that_come_have_the_current_assignment(
    make_rescaled: MakeRescaled,
) -> None:
    rescaled = make_rescaled(4)
    rescaled.rescaler.rescale(6)
    rescaled.cluster.grow_topic(rescaled.topic, 4)
    wait_until(lambda: TopicPartition(rescaled.topic, 3) in rescaled.consumers)
    assert rescaled.ring(3) == rescaled.ring(0)
    rescaled.work.blocking = Blocking("k", "1:1:0", 0.1)
    with ThreadPoolExecutor(1) as pool:
        rescaling = pool.submit(rescaled.rescaler.rescale, 3)
        assert rescaled.work.waiting.wait(DEADLINE_S)
        rescaled.cluster.grow_topic(rescaled.topic, 5)
        wait_until(lambda: len(rescaled.broker.partitions(rescaled.topic)) == 5)
        rescaled.work.blocking = None
        rescaling.result(DEADLINE_S)
    wait_until(lambda: TopicPartition(rescaled.topic, 4) in rescaled.consumers)
    assert rescaled.ring(4) == rescaled.ring(0)
    assert len({owner for owner, _ in rescaled.ring(4)}) == 3
    rescaled.publish_many(200)
    rescaled.check()


def test_a_stop_ends_a_drain(make_rescaled: MakeRescaled) -> None:
    rescaled = make_rescaled(4, 30.0)
    rescaled.work.blocking = Blocking("k", "1:1:0", 0.1)
    with ThreadPoolExecutor(1) as pool:
        rescaling = pool.submit(rescaled.rescaler.rescale, 8)
        assert rescaled.work.waiting.wait(DEADLINE_S)
        rescaled.coordinator.stop()
        with pytest.raises(RuntimeStoppedError):
            rescaling.result(DEADLINE_S)


def test_two_rescales_at_once_follow_each_other(make_rescaled: MakeRescaled) -> None:
    rescaled = make_rescaled(4)
    rescaled.keep_publishing()
    rescaled.more()
    with ThreadPoolExecutor(2) as pool:
        reports = [
            each.result(deadline(30))
            for each in [pool.submit(rescaled.rescaler.rescale, n) for n in (9, 2)]
        ]
    assert sorted(report.epoch for report in reports) == [1, 2]
    rescaled.more()
    rescaled.check()


@pytest.mark.simulated
@pytest.mark.parametrize("seed", range(4))
def test_any_sequence_of_changes_keeps_the_ring_covered(
    make_rescaled: MakeRescaled, seed: int
) -> None:
    random = Random(seed)
    rescaled = make_rescaled(random.randint(1, 6))
    rescaled.keep_publishing()
    partitions, owners = 3, assign(len(rescaled.ring()))
    for _ in range(6):
        rescaled.more(60)
        step = random.choice(["rescale", "rescale", "balance", "crash", "grow"])
        if step == "rescale":
            count = random.randint(1, 12)
            report = rescaled.rescaler.rescale(count)
            assert report.moved_slots == fewest_moved(owners, count)
        elif step == "balance":
            report = rescaled.rescaler.balance()
            assert report.balance is not None
            found = report.balance
            assert found.max_over_mean_after <= max(found.max_over_mean_before, 1.1)
        elif step == "crash":
            rescaled.cluster.crash()
        else:
            partitions += 1
            rescaled.cluster.grow_topic(rescaled.topic, partitions)
            added = TopicPartition(rescaled.topic, partitions - 1)

            def is_read(where: TopicPartition = added) -> bool:
                return where in rescaled.consumers

            wait_until(is_read)
        before, owners = owners, rescaled.coordinator.consumers.range_consumers.assignment
        assert moved_slots(before, owners) == (report.moved_slots if before != owners else 0)
        rings = {tuple(rescaled.ring(partition)) for partition in range(partitions)}
        assert rings == {
            tuple(sorted((owner, part) for owner, ranges in enumerate(owners) for part in ranges))
        }
    rescaled.more(60)
    rescaled.check()
