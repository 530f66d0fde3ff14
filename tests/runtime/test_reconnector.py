"""Who takes long to reconnect is replaced, and nothing ends, is lost or out of order by it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest

from helpers import wait_until
from keyshard.core.position.entry import TopicPartition
from keyshard.core.ring.assignment import assign
from keyshard.errors import BrokerError, BrokerUnavailableError, RangeConflictError
from keyshard.worker import reconnector
from keyshard.worker.receiver import RangeConsumer
from rescale_world import RescaleWorld

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
