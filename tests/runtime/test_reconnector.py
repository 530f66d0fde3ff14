"""Who takes long to reconnect is replaced, and nothing ends, is lost or out of order by it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from helpers import received, wait_until
from keyshard.broker.memory import MemoryBroker
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.position.entry import TopicPartition
from keyshard.core.ring.assignment import assign
from keyshard.core.ring.hash_range import HashRange
from keyshard.errors import BrokerError, BrokerUnavailableError, RangeConflictError
from keyshard.worker import reconnector
from keyshard.worker.receiver import RangeConsumer
from rescale_world import RescaleWorld
from topic_world import PREFIX, World

MakeWorld = Callable[..., RescaleWorld]
REPLACED = "subscribed anew"


@pytest.fixture
def make_world(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeWorld]:
    monkeypatch.setattr(reconnector, "LOOK_S", 0.01)
    monkeypatch.setattr(reconnector, "AWAY_S", (0.05, 0.1))
    made: list[RescaleWorld] = []

    def make(*args: int, **settings: object) -> RescaleWorld:
        made.append(RescaleWorld(*args, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for world in made:
        world.end()


def consumers(world: RescaleWorld) -> list[RangeConsumer]:
    return [one for found in world.consumers.values() for one in found]


def all_connected(world: RescaleWorld) -> bool:
    return all(one.consumer.is_connected() for one in consumers(world))


def test_who_is_away_for_long_is_subscribed_anew(
    make_world: MakeWorld, caplog: pytest.LogCaptureFixture
) -> None:
    """1. The broker was away, and is there. 2. The client waits for up to a minute."""
    caplog.set_level(logging.INFO, "keyshard")
    world = make_world()
    world.keep_publishing()
    world.more()
    before = [one.consumer for one in consumers(world)]
    world.broker.drop()
    world.more(600)
    wait_until(lambda: all_connected(world))
    assert not any(one.consumer in before for one in consumers(world))
    assert sorted(world.ring()) == [(i, part) for i, (part,) in enumerate(assign(4))]
    said = [record for record in caplog.records if REPLACED in record.getMessage()]
    assert 1 <= len(said) < 12
    assert all(record.levelno == logging.WARNING for record in said)
    world.check()


def test_one_topic_partition_is_enough(make_world: MakeWorld) -> None:
    world = make_world()
    world.keep_publishing()
    world.more()
    where = TopicPartition(world.topic, 1)
    others = [one.consumer for one in consumers(world) if one.owned_range.topic_partition != where]
    world.broker.drop({where})
    wait_until(lambda: all_connected(world))
    assert others == [
        one.consumer for one in consumers(world) if one.owned_range.topic_partition != where
    ]
    world.more(600)
    world.check()


def test_who_comes_back_by_itself_is_left_alone(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconnector, "AWAY_S", (60.0, 60.0))
    world = make_world()
    before = [one.consumer for one in consumers(world)]
    for _ in range(3):
        world.broker.drop()
        wait_until(lambda: all(one.replace_at_s for one in consumers(world)))
        world.broker.reconnect()
        wait_until(lambda: not any(one.replace_at_s for one in consumers(world)))
    assert [one.consumer for one in consumers(world)] == before
    world.publish(100)
    world.check()


@pytest.mark.parametrize(
    "error", [BrokerUnavailableError("away"), RangeConflictError("taken"), BrokerError("no")]
)
def test_an_attempt_that_fails_ends_nothing(make_world: MakeWorld, error: BrokerError) -> None:
    world = make_world()
    world.keep_publishing()
    world.more()
    before = [one.consumer for one in consumers(world)]
    world.broker.refuse = lambda _: error
    world.broker.drop()
    wait_until(lambda: world.broker.refused >= 5)
    assert world.error is None
    assert [one.consumer for one in consumers(world)] == before, "their clients go on trying"
    world.broker.refuse = lambda _: None
    world.more(600)
    world.check()


def test_while_the_broker_does_not_answer_nothing_is_tried(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    asked: list[object] = []

    def away(topics: object) -> frozenset[str]:
        asked.append(topics)
        raise BrokerUnavailableError("away")

    monkeypatch.setattr(world.broker, "missing", away)
    world.broker.refuse = lambda _: BrokerUnavailableError("away")
    world.broker.drop()
    wait_until(lambda: len(asked) >= 5)
    assert world.broker.refused == 0
    monkeypatch.undo()
    world.broker.refuse = lambda _: None
    world.broker.reconnect()
    world.publish(100)
    world.check()


def test_ranges_move_while_their_consumers_are_away(make_world: MakeWorld) -> None:
    world = make_world()
    world.keep_publishing()
    for count in (7, 3, 8, 2):
        world.more()
        world.broker.drop()
        assert world.rescaler.rescale(count).ranges_after == count
    wait_until(lambda: all_connected(world))
    world.more()
    world.check()


def test_topics_come_and_a_source_stops_while_consumers_are_away(make_world: MakeWorld) -> None:
    world = make_world()
    for _ in range(5):
        world.publish(200)
        world.broker.drop()
    world.check()


@pytest.fixture
def topics(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(reconnector, "LOOK_S", 0.01)
    world = World()
    world.cluster.create_topic("a", 2)
    yield world
    world.cluster.validate()


def served(coordinator: Coordinator) -> list[RangeConsumer]:
    by_partition = coordinator.worker.range_consumers.by_partition
    return [one for where in sorted(by_partition) for one in by_partition[where]]


@pytest.mark.parametrize("forgotten", [{1}, {0, 3}, {0, 1, 2, 3}])
def test_whom_its_broker_forgot_in_silence_is_subscribed_anew(
    topics: World, forgotten: set[int], caplog: pytest.LogCaptureFixture
) -> None:
    clients: list[MemoryBroker] = []
    source = topics.source(PREFIX + "a", parallelism=2, starting_position="earliest")
    coordinator = Coordinator(
        source, lambda: clients.append(MemoryBroker(topics.cluster)) or clients[-1], topics.admin
    )
    coordinator.start()
    try:
        topics.publish("a", 8)
        received(coordinator, 16)
        before = [one.consumer for one in served(coordinator)]
        for number in forgotten:
            seat = served(coordinator)[number].owned_range
            clients[0].forget(seat.topic_partition, seat.hash_range)
        assert all(one.is_connected() for one in before), "it says so"
        topics.publish("a", 8)
        coordinator.discovery.round()
        received(coordinator, 32)
        topics.take(coordinator)
        assert topics.got == topics.sent
        after = [one.consumer for one in served(coordinator)]
        assert {n for n, one in enumerate(after) if one is not before[n]} == forgotten
        wait_until(lambda: not topics.backlog("a"))
    finally:
        coordinator.stop()
    said = [one for one in caplog.messages if "had no consumer for range" in one]
    assert len(said) == len(forgotten)


def test_where_the_statistics_are_wrong_the_broker_keeps_whom_it_has(
    topics: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = topics.source(PREFIX + "a", parallelism=2, starting_position="earliest")
    ask, refused = topics.admin.subscription, list[HashRange]()
    subscribe = MemoryBroker.subscribe

    def wrong(where: TopicPartition, subscription: str) -> Any:
        stats = ask(where, subscription)
        return None if where.partition else dict(stats or {}, consumers=[])

    def counted(
        broker: MemoryBroker, where: TopicPartition, name: str, part: Any, **how: Any
    ) -> Any:
        try:
            return subscribe(broker, where, name, part, **how)
        except RangeConflictError:
            refused.append(part)
            raise

    with topics.running(source) as coordinator:
        before = [one.consumer for one in served(coordinator)]
        monkeypatch.setattr(MemoryBroker, "subscribe", counted)
        monkeypatch.setattr(topics.admin, "subscription", wrong)
        coordinator.discovery.round()
        wait_until(lambda: len(refused) == 4)
        wait_until(lambda: not any(one.forgotten for one in served(coordinator)))
        topics.publish("a", 8)
        received(coordinator, 16)
        assert [one.consumer for one in served(coordinator)] == before
        assert len(refused) == 4, "once for each round"
    assert not [one for one in caplog.messages if "subscribed anew" in one]
