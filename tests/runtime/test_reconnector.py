"""Who takes long to reconnect is replaced, and nothing ends, is lost or out of order by it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from helpers import config, received, wait_until
from keyshard.broker.memory import MemoryBroker
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core import refusals
from keyshard.core.position.entry import EntryBlock, TopicPartition
from keyshard.core.ring.assignment import assign
from keyshard.core.ring.hash_range import HashRange
from keyshard.errors import (
    AuthenticationError,
    AuthorizationError,
    BrokerError,
    BrokerUnavailableError,
    RangeConflictError,
)
from keyshard.worker import reconnector
from keyshard.worker.range_consumers import RangeConsumers
from keyshard.worker.receiver import RangeConsumer
from keyshard.worker.troubles import Troubles
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


def newest(world: RescaleWorld) -> RangeConsumer:
    """The consumer that received last: not every range has a key."""
    return max(consumers(world), key=lambda one: one.reception._heard_s)


def subscribe_anew(one: RangeConsumer, world: RescaleWorld) -> None:
    """Let a range consumer find what a client kept from before it lost its connection."""
    kept = one.consumer
    is_connected, receive = kept.is_connected, kept.receive
    came: list[object] = []

    def away_until_something_came() -> bool:
        receives = threading.current_thread().name.startswith("keyshard-receive")
        return bool(came or not receives) and is_connected()

    def received_late(timeout_ms: int) -> list[EntryBlock]:
        blocks = receive(timeout_ms)
        came.extend(blocks)
        return blocks

    kept.is_connected = away_until_something_came  # type: ignore[method-assign]
    kept.receive = received_late  # type: ignore[method-assign]
    wait_until(lambda: one.consumer is not kept or one.lacking or world.error)


@pytest.mark.parametrize(
    "error", [BrokerUnavailableError("away"), RangeConflictError("taken for a moment")]
)
def test_an_outage_while_a_range_is_subscribed_anew_is_survived(
    make_world: MakeWorld, error: BrokerError
) -> None:
    """1. A range is to be subscribed anew. 2. The broker is away for long. 3. It is back."""
    conflict = isinstance(error, RangeConflictError)
    world = make_world(subscribe_timeout_ms=20_000 if conflict else 100, receive_threads=1)
    world.keep_publishing()
    world.more()
    one = newest(world)
    others = [other for other in consumers(world) if other is not one and other.reception._heard_s]
    world.broker.refuse = lambda part: error if part == one.owned_range.hash_range else None
    subscribe_anew(one, world)
    wait_until(lambda: world.broker.refused >= 5 or world.error)
    assert world.error is None
    before = {id(other): other.reception._heard_s for other in others}
    wait_until(lambda: all(other.reception._heard_s > before[id(other)] for other in others))
    troubles = world.coordinator.worker.troubles()
    assert str(error.message) in troubles[one.owned_range.topic_partition]
    assert error.message in world.coordinator.status()["connectionError"]
    world.broker.refuse = lambda _: None
    wait_until(lambda: all_connected(world))
    assert world.coordinator.worker.troubles() == {}
    world.more(300)
    world.check()


@pytest.mark.parametrize("anew", [True, False])
@pytest.mark.parametrize(
    "error", [AuthorizationError("revoked"), AuthenticationError("expired"), BrokerError("no")]
)
def test_a_refusal_that_does_not_pass_ends_the_source_by_name(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, error: BrokerError, anew: bool
) -> None:
    monkeypatch.setattr(refusals, "REFUSED_S", 0.2)
    monkeypatch.setattr(refusals, "UNAUTHENTICATED_S", 0.4)
    world = make_world()
    world.keep_publishing()
    world.more()
    world.broker.refuse = lambda _: error
    if anew:
        subscribe_anew(newest(world), world)
    else:
        world.broker.drop()
    wait_until(lambda: world.error is not None)
    assert world.error is error


def test_a_range_that_is_another_owners_for_long_ends_the_source(make_world: MakeWorld) -> None:
    world = make_world(subscribe_timeout_ms=200)
    world.keep_publishing()
    world.more()
    error = RangeConflictError("taken for good")
    world.broker.refuse = lambda _: error
    subscribe_anew(newest(world), world)
    wait_until(lambda: world.error is error)


def test_ranges_move_while_one_is_subscribed_anew(make_world: MakeWorld) -> None:
    world = make_world()
    world.keep_publishing()
    for count in (7, 3, 8, 2):
        world.more()
        one = newest(world)
        refused = world.broker.refused
        away = BrokerUnavailableError("away")
        world.broker.refuse = lambda part, mine=one.owned_range.hash_range, error=away: (  # type: ignore[misc]
            error if part == mine else None
        )
        subscribe_anew(one, world)
        wait_until(lambda refused=refused: world.broker.refused > refused)
        world.broker.refuse = lambda _: None
        assert world.rescaler.rescale(count).ranges_after == count
    wait_until(lambda: all_connected(world))
    world.more()
    world.check()


def test_a_consumer_that_takes_the_place_of_one_to_be_subscribed_anew_stays_open(
    make_world: MakeWorld,
) -> None:
    """1. A consumer is being replaced. 2. It reconnects, and is to be subscribed anew. 3. The first
    attempt at that fails. 4. The replacement takes its place.
    """
    world = make_world()
    world.keep_publishing()
    world.more()
    one = newest(world)
    replacing, go_on = threading.Event(), threading.Event()

    def refuse(part: HashRange) -> BrokerError | None:
        if part != one.owned_range.hash_range or go_on.is_set():
            return None
        if replacing.is_set():
            return BrokerUnavailableError("away")
        replacing.set()
        go_on.wait(10)
        return None

    world.broker.refuse = refuse
    world.broker.drop({one.owned_range.topic_partition})
    assert replacing.wait(10)
    world.broker.reconnect()
    subscribe_anew(one, world)
    wait_until(lambda: world.broker.refused > 0 or world.error)
    go_on.set()
    wait_until(lambda: not one.lacking or world.error)
    replacement = one.consumer
    retrier = world.coordinator.worker._reconnector._retrier
    wait_until(lambda: not retrier._due or world.error)
    world.more(300)
    assert one.consumer is replacement
    world.check()


def test_topic_partitions_may_come_while_another_thread_asks_which_are_consumed() -> None:
    found = RangeConsumers(None, None, config("orders"), assign(1))  # type: ignore[arg-type]
    here, later = TopicPartition("orders", 0), TopicPartition("orders", 1)
    found.by_partition[here] = []

    class Meanwhile(set[TopicPartition]):
        def __contains__(self, where: object) -> bool:
            found.by_partition[later] = []
            return False

    found._only_held = Meanwhile()
    assert found.consumed == [here]


def test_a_trouble_is_named_in_the_log_once_and_when_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "keyshard")
    troubles, one, other = Troubles(), TopicPartition("t", 0), TopicPartition("t", 1)
    for second in range(200):
        now = {one: f"It has been so for {second} s.", other: "It refuses."}
        troubles.look(float(second), now if second < 100 else {other: "It refuses."})
    assert [text for text in caplog.messages if "t-partition-0 is not received" in text] == [
        "t-partition-0 is not received from: It has been so for 2 s.",
        "t-partition-0 is not received from: It has been so for 62 s.",
    ]
    assert sum("t-partition-1 is not received" in text for text in caplog.messages) == 4
    assert sum("serves t-partition-0 again" in text for text in caplog.messages) == 1


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
