"""Ranges move while a source runs: nothing is lost, comes twice or out of order; no gap stays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest

from helpers import key_in, wait_until
from keyshard.broker.memory import Message
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
    ConfigError,
    DrainTimeoutError,
    RangeConflictError,
    RescaleError,
    RuntimeStoppedError,
)
from keyshard.worker import range_consumers
from rescale_world import RescaleWorld

MakeWorld = Callable[..., RescaleWorld]


@pytest.fixture
def make_world() -> Iterator[MakeWorld]:
    made: list[RescaleWorld] = []

    def make(*args: int, **settings: object) -> RescaleWorld:
        made.append(RescaleWorld(*args, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for world in made:
        world.end()


def test_ranges_come_and_go_under_load(make_world: MakeWorld) -> None:
    world = make_world(4)
    world.keep_publishing()
    now = assign(4)
    for epoch, count in enumerate((8, 3, 11, 1, 4), start=1):
        world.more()
        before, now = now, reassign(now, count)
        report = world.rescaler.rescale(count)
        assert (report.epoch, report.ranges_before, report.ranges_after) == (
            epoch, len(before), count,
        )  # fmt: skip
        assert report.moved_fraction == report.optimum_fraction > 0
        assert report.pauses
        assert 0 < max(pause.pause_ms for pause in report.pauses) < 5_000
        assert report.consumers == sum(map(len, now))
        for partition in range(3):
            assert world.ring(partition) == sorted(
                (owner, part) for owner, ranges in enumerate(now) for part in ranges
            )
        assert world.coordinator.status()["ranges"] == count
    world.more()
    world.check()
    assert set(world.ranges_of_batches) == {4, 8, 3, 11, 1}


def test_who_keeps_its_hash_range_is_not_touched(make_world: MakeWorld) -> None:
    world = make_world(8)
    where = TopicPartition(world.topic, 1)
    before = {one.owned_range: one.consumer for one in world.consumers[where]}
    report = world.rescaler.rescale(7)
    after = {one.owned_range: one.consumer for one in world.consumers[where]}
    kept = before.keys() & after.keys()
    assert {owned_range.range_index for owned_range in kept} == set(range(7)), "the eighth left"
    assert all(before[owned_range] is after[owned_range] for owned_range in kept)
    assert {owned_range.epoch for owned_range in after.keys() - kept} == {1}
    assert {pause.hash_range for pause in report.pauses} == {
        owned_range.hash_range for owned_range in after.keys() - kept
    }
    world.publish(100)
    world.check()


def test_nothing_changes_when_nothing_has_to(make_world: MakeWorld) -> None:
    world = make_world(4)
    report = world.rescaler.rescale(4)
    assert (report.epoch, report.moved_slots, report.pauses) == (0, 0, ())
    assert report.to_dict()["moved_fraction"] == 0


def test_a_number_outside_its_limits_is_refused(make_world: MakeWorld) -> None:
    world = make_world(4)
    with pytest.raises(ConfigError, match="1 to 65536"):
        world.rescaler.rescale(0)
    assert len(world.ring()) == 4


def test_a_balance_gives_the_busy_range_less_and_names_the_hot_key(make_world: MakeWorld) -> None:
    world = make_world(4)
    first = split_ring(4)[0]
    keys = [key_in(first, number) for number in range(40)]
    for number in range(800):
        world.cluster.publish(world.topic, Message(b"-", key=keys[number % 40]))
    wait_until(lambda: world.rows == 800)
    report = world.rescaler.balance()
    assert report.balance is not None
    assert report.balance.messages == 800
    assert report.balance.max_over_mean_before == 4
    assert report.balance.max_over_mean_after < 1.3
    assert report.optimum_fraction is None
    assert report.to_dict()["balance"]["hot_key_floor"] is None
    for _ in range(2_000):
        world.cluster.publish(world.topic, Message(b"-", key=keys[3]))
    wait_until(lambda: world.rows == 2_800)
    again = world.rescaler.balance()
    assert again.balance is not None
    assert again.balance.hot_key == keys[3]
    assert again.balance.hot_key_floor == pytest.approx(4 * 2_020 / 2_800)
    assert sorted({owner for owner, _ in world.ring()}) == [0, 1, 2, 3]


def test_a_handler_that_hangs_leaves_everything_as_it_was(make_world: MakeWorld) -> None:
    world = make_world(4, 0.2)
    world.keep_publishing()
    before, owned_ranges = (
        world.ring(),
        [one.owned_range for one in world.consumers[TopicPartition(world.topic, 0)]],
    )
    world.work.blocking = Blocking("k7", "3:4:0", 12.5)
    with pytest.raises(DrainTimeoutError, match=r"key 'k7' .*3:4:0 for 12\.5 s") as caught:
        world.rescaler.rescale(8)
    assert caught.value.facts == {"key": "k7", "message_id": "3:4:0", "running_s": 12.5}
    assert not world.work.held, "everything is begun again"
    assert world.ring() == before
    assert [
        one.owned_range for one in world.consumers[TopicPartition(world.topic, 0)]
    ] == owned_ranges
    world.more()
    world.work.blocking = None
    assert world.rescaler.rescale(8).epoch == 1
    world.check()


def test_what_moves_is_held_first_and_then_the_rest_of_its_consumers(make_world: MakeWorld) -> None:
    world = make_world(8, 0.05)
    world.work.blocking = Blocking(None, "1:1:0", 1.0)
    with pytest.raises(DrainTimeoutError):
        world.rescaler.rescale(11)
    assert world.work.holds == [moved_ranges(assign(8), reassign(assign(8), 11))]
    world.work.blocking = None
    world.rescaler.rescale(11)
    assert world.work.holds[1:] == [world.work.holds[0], split_ring(1)]
    assert max(world.work.owners) == 10
    del world.work.holds[:]
    world.rescaler.rescale(10)
    leaving = joined(reassign(assign(8), 11)[10])
    assert world.work.holds[0] == leaving
    assert sum(map(len, world.work.holds[1])) < 65_536 / 2, "most consumers are not touched"


def test_the_broker_may_be_away_for_a_while(make_world: MakeWorld) -> None:
    world = make_world(4)
    world.keep_publishing()
    world.more()

    def refuse(_: object) -> BrokerUnavailableError | None:
        return BrokerUnavailableError("away") if world.broker.refused < 30 else None

    world.broker.refuse = refuse
    assert world.rescaler.rescale(6).epoch == 1
    assert world.broker.refused == 30
    world.more()
    world.check()


def test_a_broker_that_restarts_in_the_middle_costs_nothing(make_world: MakeWorld) -> None:
    world = make_world(4)
    world.keep_publishing()
    world.more()
    world.work.blocking = Blocking("k1", "1:1:0", 0.1)
    with ThreadPoolExecutor(1) as pool:
        rescaling = pool.submit(world.rescaler.rescale, 9)
        assert world.work.waiting.wait(10)
        world.cluster.crash()
        refusing = threading.Event()
        world.broker.refuse = lambda _: (
            None if refusing.is_set() else BrokerUnavailableError("restarts")
        )
        world.work.blocking = None
        wait_until(lambda: world.broker.refused > 3)
        world.cluster.crash()
        refusing.set()
        assert rescaling.result(30).epoch == 1
    world.cluster.crash()
    world.more()
    assert len(world.ring(2)) == sum(map(len, reassign(assign(4), 9)))
    world.check()


def test_ranges_that_somebody_else_has_go_back_to_their_owners(make_world: MakeWorld) -> None:
    world = make_world(4, subscribe_timeout_ms=200)
    world.keep_publishing()
    world.more()
    old = set(split_ring(4))
    world.broker.refuse = lambda part: None if part in old else RangeConflictError("taken")
    with pytest.raises(RescaleError, match="have them again"):
        world.rescaler.rescale(8)
    assert world.ring() == [(owner, part) for owner, part in enumerate(split_ring(4))]
    assert world.coordinator.epoch == 2
    world.more()
    world.broker.refuse = lambda _: None
    assert world.rescaler.rescale(8).ranges_after == 8
    world.more()
    world.check()


def test_a_gap_that_cannot_be_closed_ends_the_source(make_world: MakeWorld) -> None:
    world = make_world(4, subscribe_timeout_ms=50)
    world.broker.refuse = lambda _: BrokerUnavailableError("gone")
    with pytest.raises(RescaleError, match="have no consumer, so the source ends"):
        world.rescaler.rescale(8)
    with pytest.raises(RescaleError, match="have no consumer"):
        world.coordinator.check()


@pytest.mark.parametrize("error", [RuntimeError("a bug"), SystemExit(1)], ids=repr)
def test_a_gap_that_a_defect_leaves_ends_the_source(
    make_world: MakeWorld, error: BaseException
) -> None:
    world = make_world(4)
    world.broker.refuse = lambda _: error  # type: ignore[assignment,return-value]
    with pytest.raises(RescaleError, match=r"have no consumer, so the source ends") as caught:
        world.rescaler.rescale(8)
    assert repr(error) in caught.value.message
    with pytest.raises(RescaleError, match="have no consumer"):
        world.coordinator.check()


def test_a_window_that_cannot_follow_ends_the_source(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(4)

    def broken(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(world.coordinator.worker, "adopt", broken)
    with pytest.raises(RescaleError, match="the window did not follow: unexpectedly"):
        world.rescaler.rescale(8)
    with pytest.raises(RescaleError, match="the window did not follow"):
        world.coordinator.check()


def test_a_receive_thread_that_is_stuck_keeps_its_consumers(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_consumers, "DROP_TIMEOUT_S", 0.3)
    world = make_world(4, receive_threads=3)
    stuck = world.consumers[TopicPartition(world.topic, 0)][0]
    entered, leave = threading.Event(), threading.Event()
    receive = stuck.consumer.receive

    def receive_late(timeout_ms: int) -> object:
        entered.set()
        leave.wait(20)
        return receive(timeout_ms)

    stuck.consumer.receive = receive_late  # type: ignore[method-assign,assignment]
    world.cluster.publish(
        TopicPartition(world.topic, 0), Message(b"-", key=key_in(stuck.owned_range.hash_range))
    )
    assert entered.wait(10)
    with pytest.raises(RescaleError, match="could not be closed"):
        world.rescaler.rescale(8)
    leave.set()
    assert [part for _, part in world.ring()] == list(split_ring(4))
    assert stuck in world.consumers[TopicPartition(world.topic, 0)]
    world.publish(100)
    wait_until(lambda: world.rows == 101)
    assert world.rescaler.rescale(8).ranges_after == 8


def test_topic_partitions_that_come_have_the_current_assignment(make_world: MakeWorld) -> None:
    world = make_world(4)
    world.rescaler.rescale(6)
    world.cluster.grow_topic(world.topic, 4)
    wait_until(lambda: TopicPartition(world.topic, 3) in world.consumers)
    assert world.ring(3) == world.ring(0)
    world.work.blocking = Blocking("k", "1:1:0", 0.1)
    with ThreadPoolExecutor(1) as pool:
        rescaling = pool.submit(world.rescaler.rescale, 3)
        assert world.work.waiting.wait(10)
        world.cluster.grow_topic(world.topic, 5)
        wait_until(lambda: len(world.broker.partitions(world.topic)) == 5)
        world.work.blocking = None
        rescaling.result(20)
    wait_until(lambda: TopicPartition(world.topic, 4) in world.consumers)
    assert world.ring(4) == world.ring(0)
    assert len({owner for owner, _ in world.ring(4)}) == 3
    world.publish(200)
    world.check()


def test_a_stop_ends_a_drain(make_world: MakeWorld) -> None:
    world = make_world(4, 30.0)
    world.work.blocking = Blocking("k", "1:1:0", 0.1)
    with ThreadPoolExecutor(1) as pool:
        rescaling = pool.submit(world.rescaler.rescale, 8)
        assert world.work.waiting.wait(10)
        world.coordinator.stop()
        with pytest.raises(RuntimeStoppedError):
            rescaling.result(10)


def test_two_rescales_at_once_follow_each_other(make_world: MakeWorld) -> None:
    world = make_world(4)
    world.keep_publishing()
    world.more()
    with ThreadPoolExecutor(2) as pool:
        reports = [
            each.result(30) for each in [pool.submit(world.rescaler.rescale, n) for n in (9, 2)]
        ]
    assert sorted(report.epoch for report in reports) == [1, 2]
    world.more()
    world.check()


@pytest.mark.parametrize("seed", range(4))
def test_any_sequence_of_changes_keeps_the_ring_covered(make_world: MakeWorld, seed: int) -> None:
    random = Random(seed)
    world = make_world(random.randint(1, 6))
    world.keep_publishing()
    partitions, owners = 3, assign(len(world.ring()))
    for _ in range(6):
        world.more(60)
        step = random.choice(["rescale", "rescale", "balance", "crash", "grow"])
        if step == "rescale":
            count = random.randint(1, 12)
            report = world.rescaler.rescale(count)
            assert report.moved_slots == fewest_moved(owners, count)
        elif step == "balance":
            report = world.rescaler.balance()
            assert report.balance is not None
            found = report.balance
            assert found.max_over_mean_after <= max(found.max_over_mean_before, 1.1)
        elif step == "crash":
            world.cluster.crash()
        else:
            partitions += 1
            world.cluster.grow_topic(world.topic, partitions)
            added = TopicPartition(world.topic, partitions - 1)
            wait_until(lambda where=added: where in world.consumers)
        before, owners = owners, world.coordinator.worker.range_consumers.assignment
        assert moved_slots(before, owners) == (report.moved_slots if before != owners else 0)
        rings = {tuple(world.ring(partition)) for partition in range(partitions)}
        assert rings == {
            tuple(sorted((owner, part) for owner, ranges in enumerate(owners) for part in ranges))
        }
    world.more(60)
    world.check()
