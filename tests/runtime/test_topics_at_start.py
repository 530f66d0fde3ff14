"""Which topics a source starts with: checkpoint, existing subscription, starting position."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from helpers import received, wait_until
from keyshard.broker.memory import MemoryBroker
from keyshard.broker.port import Consumer
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import TopicPartition
from keyshard.errors import DataLossTrimmedError, TopicNotFoundError
from topic_world import PREFIX, World


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.cluster.validate()


def planned_over(world: World, *topics: str) -> Checkpoint:
    """A planned batch of everything in some topics, whose run then ended."""
    with world.running(world.source(list(topics))) as first:
        received(first, world.sent.total())
        end = first.batches.cut()
        assert end is not None
    return end


def test_a_topic_no_longer_configured_ends_its_planned_batch_only(world: World) -> None:
    for name in ("old", "new"):
        world.cluster.create_topic(name, 2)
        world.publish(name, 4)
    end = planned_over(world, "old", "new")
    with world.running(world.source("new"), end, planned=True) as second:
        world.publish("old", 3)
        world.read(second, end)
        assert world.got.total() == 16
        second.batches.release(end)
        wait_until(lambda: world.backlog("new") == 0)
        wait_until(lambda: world.backlog("old") == 6)
        second.discovery.round()
        world.publish("new", 2)
        received(second, 4)
        after = world.take(second)
        assert sum("old" in value for value in world.got) == 8, "it is not consumed further"
        assert second.status()["topicPartitions"] == 2
        assert {where.topic for where in after.partitions} == {PREFIX + "old", PREFIX + "new"}
        with world.running(world.source("old"), after) as third:
            received(third, 6)
            world.take(third)
    assert world.got == world.sent


def test_a_topic_and_one_of_its_partitions_are_consumed_once(world: World) -> None:
    world.cluster.create_topic("orders", 2)
    world.publish("orders", 8)
    with world.running(world.source(["orders-partition-1", "orders"])) as running:
        received(running, 16)
        world.take(running)
        assert running.status()["topicPartitions"] == 2
        running.discovery.round()
    assert world.got == world.sent


def test_a_topic_no_longer_configured_and_taken_by_others_does_not_block(world: World) -> None:
    for name in ("old", "new"):
        world.cluster.create_topic(name, 2)
        world.publish(name, 4)
    end = planned_over(world, "old", "new")
    source = world.source("new", subscribe_timeout_ms=20)
    with world.running(world.source("old")), world.running(source, end, planned=True) as second:
        world.read(second, end)
        second.batches.release(end)
        wait_until(lambda: not second.status()["entriesToAcknowledge"])
        second.check()
        assert world.backlog("new") == 0


def test_a_deleted_topic_in_the_checkpoint_does_not_block_the_start(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("gone", "stays"):
        world.cluster.create_topic(name, 2)
        world.publish(name, 4)
    end = planned_over(world, "gone", "stays")
    world.cluster.delete_topic(PREFIX + "gone")
    with world.running(world.source(["gone", "stays"]), end) as second:
        assert "gone does not exist" in caplog.text
        assert second.status()["topicPartitions"] == 2
        world.publish("stays", 1)
        received(second, 2)
        after = world.take(second)
        assert {where.topic for where in after.partitions} == {PREFIX + "stays"}
    assert world.names() == {"stays"}


def test_a_planned_batch_of_a_deleted_topic_is_data_loss(world: World) -> None:
    world.cluster.create_topic("gone", 2)
    world.publish("gone", 4)
    end = planned_over(world, "gone")
    world.cluster.delete_topic(PREFIX + "gone")
    for admin in (True, False):
        with world.running(world.source("gone"), end, planned=True, admin=admin) as second:
            with pytest.raises(DataLossTrimmedError, match="4 entries of a planned batch"):
                second.batches.plan(end)
            assert world.names() == set(), "no Reader created it again"


def test_a_missing_topic_is_refused_at_the_first_start_only(world: World) -> None:
    with pytest.raises(TopicNotFoundError), world.running(world.source("missing")):
        pass
    with world.running(world.source("missing"), Checkpoint("", "unit", 4)) as coordinator:
        assert coordinator.status()["topicPartitions"] == 0
        world.cluster.create_topic("missing")
        world.publish("missing", 2)
        coordinator.discovery.round()
        received(coordinator, 2)


def test_an_existing_subscription_comes_before_the_starting_position(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Precedence: checkpoint, existing subscription, startingOffsets."""
    world.cluster.create_topic("t", 2)
    with world.running(world.source("t")):
        pass
    assert "exists on" not in caplog.text
    world.publish("t", 5)
    with world.running(world.source("t", starting_position="latest")) as second:
        assert "'unit' exists on 2 of 2 topic partitions, with a backlog of 10" in caplog.text
        received(second, 10)
        end = world.take(second)
        wait_until(lambda: world.backlog("t") == 0)
    caplog.clear()
    with world.running(world.source("t", starting_position="latest"), end) as third:
        assert "exists on" not in caplog.text
        world.publish("t", 1)
        received(third, 2)
        world.take(third)
    assert world.got == world.sent


def test_a_reconnect_to_a_recreated_topic_never_starts_at_latest(world: World) -> None:
    world.cluster.create_topic("t", 2)
    world.publish("t", 1)
    with world.running(world.source("t", starting_position="latest")) as coordinator:
        for client in world.cluster._clients:
            client.drop()
        world.cluster.delete_topic(PREFIX + "t")
        world.cluster.create_topic("t", 2)
        world.sent.clear()
        world.publish("t", 3)
        for client in world.cluster._clients:
            client.reconnect()
        received(coordinator, 6)
        world.take(coordinator)
        assert world.got == world.sent


def test_a_topic_that_matches_and_goes_while_the_source_starts_is_left_out(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("stays", "goes"):
        world.cluster.create_topic(name)
        world.publish(name, 4)
    subscribe, goes = MemoryBroker.subscribe, PREFIX + "goes"

    def gone(self: MemoryBroker, where: TopicPartition, *what: Any, **how: Any) -> Consumer:
        if where.topic == goes and world.cluster.partitions(goes):
            world.cluster.delete_topic(goes)
            raise TopicNotFoundError("gone")
        return subscribe(self, where, *what, **how)

    monkeypatch.setattr(MemoryBroker, "subscribe", gone)
    with world.running(world.matching(".*")) as coordinator:
        received(coordinator, 4)
        world.take(coordinator)
    assert set(world.got) == {value for value in world.sent if "stays" in value}
