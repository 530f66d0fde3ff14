"""The topics that a source starts with: checkpoint, existing subscription, starting position."""

from __future__ import annotations

from contextlib import suppress

import pytest

from keyshard.broker.memory import MemoryBroker
from keyshard.broker.port import Consumer, StartPosition, SubscriptionSpec
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.errors import DataLossTrimmedError, TopicNotFoundError
from tests.helpers import received, wait_until
from tests.support.changing_topics import PREFIX, ChangingTopics

pytestmark = pytest.mark.simulated(seeds=1)


def planned_over(changing: ChangingTopics, *topics: str) -> Checkpoint:
    """Plan a batch of all messages of some topics, and end the run."""
    with changing.running(changing.source(list(topics))) as first:
        received(first, changing.sent.total())
        end = first.batches.cut()
        assert end is not None
    return end


def test_only_the_planned_batch_of_a_topic_no_longer_configured_is_delivered(
    changing: ChangingTopics,
) -> None:
    for name in ("old", "new"):
        changing.cluster.create_topic(name, 2)
        changing.publish(name, 4)
    end = planned_over(changing, "old", "new")
    with changing.running(changing.source("new"), end, planned=True) as second:
        changing.publish("old", 3)
        changing.read(second, end)
        assert changing.got.total() == 16
        second.batches.release(end)
        wait_until(lambda: changing.backlog("new") == 0)
        wait_until(lambda: changing.backlog("old") == 6)
        second.discovery.round()
        changing.publish("new", 2)
        received(second, 4)
        after = changing.take(second)
        assert sum("old" in value for value in changing.got) == 8, "it is not consumed further"
        assert second.status()["topicPartitions"] == 2
        assert {where.topic for where in after.partitions} == {PREFIX + "old", PREFIX + "new"}
        with changing.running(changing.source("old"), after) as third:
            received(third, 6)
            changing.take(third)
    assert changing.got == changing.sent


def test_a_topic_and_one_of_its_partitions_are_consumed_once(changing: ChangingTopics) -> None:
    changing.cluster.create_topic("orders", 2)
    changing.publish("orders", 8)
    with changing.running(changing.source(["orders-partition-1", "orders"])) as running:
        received(running, 16)
        changing.take(running)
        assert running.status()["topicPartitions"] == 2
        running.discovery.round()
    assert changing.got == changing.sent


def test_a_topic_no_longer_configured_and_taken_by_others_does_not_block(
    changing: ChangingTopics,
) -> None:
    for name in ("old", "new"):
        changing.cluster.create_topic(name, 2)
        changing.publish(name, 4)
    end = planned_over(changing, "old", "new")
    source = changing.source("new", subscribe_timeout_ms=20)
    with (
        changing.running(changing.source("old")),
        changing.running(source, end, planned=True) as second,
    ):
        changing.read(second, end)
        second.batches.release(end)
        wait_until(lambda: not second.status()["entriesToAcknowledge"])
        second.check()
        assert changing.backlog("new") == 0


def test_a_deleted_topic_in_the_checkpoint_does_not_block_the_start(
    changing: ChangingTopics, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("gone", "stays"):
        changing.cluster.create_topic(name, 2)
        changing.publish(name, 4)
    end = planned_over(changing, "gone", "stays")
    changing.cluster.delete_topic(PREFIX + "gone")
    with changing.running(changing.source(["gone", "stays"]), end) as second:
        assert "gone does not exist" in caplog.text
        assert second.status()["topicPartitions"] == 2
        changing.publish("stays", 1)
        received(second, 2)
        after = changing.take(second)
        assert {where.topic for where in after.partitions} == {PREFIX + "stays"}
    assert changing.names() == {"stays"}


def test_a_planned_batch_of_a_deleted_topic_is_data_loss(changing: ChangingTopics) -> None:
    changing.cluster.create_topic("gone", 2)
    changing.publish("gone", 4)
    end = planned_over(changing, "gone")
    changing.cluster.delete_topic(PREFIX + "gone")
    for admin in (True, False):
        with changing.running(changing.source("gone"), end, planned=True, admin=admin) as second:
            with pytest.raises(DataLossTrimmedError, match="4 entries of a planned batch"):
                second.batches.plan(end)
            assert changing.names() == set(), "no Reader created it again"


def test_a_missing_topic_is_refused_at_the_first_start_only(changing: ChangingTopics) -> None:
    with pytest.raises(TopicNotFoundError), changing.running(changing.source("missing")):
        pass
    with changing.running(changing.source("missing"), Checkpoint("", "unit", 4)) as coordinator:
        assert coordinator.status()["topicPartitions"] == 0
        changing.cluster.create_topic("missing")
        changing.publish("missing", 2)
        coordinator.discovery.round()
        received(coordinator, 2)


def test_an_existing_subscription_comes_before_the_starting_position(
    changing: ChangingTopics, caplog: pytest.LogCaptureFixture
) -> None:
    """Precedence: checkpoint, existing subscription, startingOffsets."""
    changing.cluster.create_topic("t", 2)
    with changing.running(changing.source("t")):
        pass
    assert "exists on" not in caplog.text
    changing.publish("t", 5)
    with changing.running(changing.source("t", starting_position="latest")) as second:
        assert "'unit' exists on 2 of 2 topic partitions, with a backlog of 10" in caplog.text
        received(second, 10)
        end = changing.take(second)
        wait_until(lambda: changing.backlog("t") == 0)
    caplog.clear()
    with changing.running(changing.source("t", starting_position="latest"), end) as third:
        assert "exists on" not in caplog.text
        changing.publish("t", 1)
        received(third, 2)
        changing.take(third)
    assert changing.got == changing.sent


def test_a_reconnect_to_a_recreated_topic_never_starts_at_latest(changing: ChangingTopics) -> None:
    changing.cluster.create_topic("t", 2)
    changing.publish("t", 1)
    with changing.running(changing.source("t", starting_position="latest")) as coordinator:
        for client in changing.cluster._clients:
            client.drop()
        changing.cluster.delete_topic(PREFIX + "t")
        changing.cluster.create_topic("t", 2)
        changing.sent.clear()
        changing.publish("t", 3)
        for client in changing.cluster._clients:
            client.reconnect()
        received(coordinator, 6)
        changing.take(coordinator)
        assert changing.got == changing.sent


def test_a_topic_that_matches_and_goes_while_the_source_starts_is_left_out(
    changing: ChangingTopics, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("stays", "goes"):
        changing.cluster.create_topic(name)
        changing.publish(name, 4)
    subscribe, goes = MemoryBroker.subscribe, PREFIX + "goes"

    def gone(self: MemoryBroker, spec: SubscriptionSpec, start: StartPosition) -> Consumer:
        if spec.topic_partition.topic == goes:
            with suppress(KeyError):  # consumers subscribe at the same time; one is the first
                changing.cluster.delete_topic(goes)
            raise TopicNotFoundError("gone")
        return subscribe(self, spec, start)

    monkeypatch.setattr(MemoryBroker, "subscribe", gone)
    with changing.running(changing.matching(".*")) as coordinator:
        received(coordinator, 4)
        changing.take(coordinator)
    assert set(changing.got) == {value for value in changing.sent if "stays" in value}
