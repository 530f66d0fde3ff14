"""Topics that come, grow and go while a source runs, on the in-memory broker."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from helpers import received, wait_until
from keyshard.broker.memory import MemoryBroker, MemoryCluster
from keyshard.broker.memory.admin import MemoryAdmin
from keyshard.broker.port import StartPosition
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import TopicPartition
from keyshard.core.ring.hash_range import HashRange
from keyshard.errors import AdminError, BrokerError, BrokerUnavailableError, SubscriptionInUseError
from keyshard.testing.verify.history import Event
from keyshard.testing.verify.recording_broker import RecordingBroker
from topic_world import PREFIX, World


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.cluster.validate()


def test_a_topic_filled_before_it_is_found_is_read_from_its_beginning(world: World) -> None:
    world.cluster.create_topic("a-1", 2)
    world.publish("a-1", 3)
    with world.running(world.matching("a-.*", starting_position="latest")) as coordinator:
        for name, partitions in (("a-2", 3), ("a-3", 0), ("b-1", 2), ("__a-4", 0)):
            world.cluster.create_topic(name, partitions)
        before = world.sent.copy()
        for name in ("a-1", "a-2", "a-3"):
            world.publish(name, 8)
        coordinator.discovery.round()
        received(coordinator, 8 * (2 + 3 + 1))
        world.take(coordinator)
        assert world.got == world.sent - before
        assert coordinator.status()["topicPartitions"] == 6
        assert coordinator.status()["partitionsDiscovered"] == 4
        wait_until(lambda: not coordinator.status()["entriesToAcknowledge"])
        assert world.backlog("a-2") == world.backlog("a-3") == 0


@pytest.mark.parametrize("admin", [True, False])
def test_one_partition_is_read_alone_and_is_the_same_after_a_restart(
    world: World, admin: bool
) -> None:
    topic = world.cluster.create_topic("a", 2)
    one = TopicPartition(topic, 1)
    source = world.source(one.name, admin_url="http://memory" if admin else None)
    world.publish(one, 5)
    with world.running(source, admin=admin) as coordinator:
        received(coordinator, 5)
        end = coordinator.batches.cut()
        assert end is not None
        assert set(end.partitions) == {one}
        world.read(coordinator, end)
    # Committed, and not acknowledged: the broker delivers it again.
    with world.running(source, Checkpoint.from_json(end.to_json()), admin=admin) as coordinator:
        world.publish(one, 3)
        received(coordinator, 3)
        world.take(coordinator)
    assert world.got == world.sent


def test_a_round_counts_what_the_broker_still_holds(world: World) -> None:
    world.cluster.create_topic("a-1", 2)
    world.publish("a-1", 3)
    with world.running(world.matching("a-.*", starting_position="earliest")) as coordinator:
        assert coordinator.status()["backlogEntries"] is None
        received(coordinator, 6)
        coordinator.discovery.round()
        assert coordinator.status()["backlogEntries"] == 6
        world.take(coordinator)
        wait_until(lambda: not coordinator.status()["entriesToAcknowledge"])
        coordinator.discovery.round()
        assert coordinator.status()["backlogEntries"] == 0


def test_the_thread_finds_topics_by_itself(world: World) -> None:
    with world.running(world.matching(".*", discovery_interval_ms=10)) as coordinator:
        assert coordinator.status()["topicPartitions"] == 0
        world.cluster.create_topic("late", 2)
        world.publish("late", 4)
        received(coordinator, 8)


def test_partitions_that_grow_are_read_from_their_beginning(world: World) -> None:
    world.cluster.create_topic("t", 5)
    with world.running(world.source("t", receive_threads=3)) as coordinator:
        world.cluster.grow_topic(PREFIX + "t", 8)
        world.publish("t", 5)
        coordinator.discovery.round()
        received(coordinator, 40)
        world.take(coordinator)
        assert world.got == world.sent
        assert coordinator.status()["topicPartitions"] == 8
        assert len(coordinator.worker.range_consumers.receivers) == 3
        assert [r.range_consumers for r in coordinator.worker.range_consumers.receivers] == [
            11,
            11,
            10,
        ]
        wait_until(lambda: world.backlog("t") == 0)


def test_threads_grow_with_the_lanes_up_to_their_limit(world: World) -> None:
    source = world.matching(".*", parallelism=1, receive_threads=2)
    with world.running(source) as coordinator:
        for count in range(4):
            receivers = coordinator.worker.range_consumers.receivers
            assert len(receivers) == min(count, 2)
            world.cluster.create_topic(f"t-{count}")
            coordinator.discovery.round()
        assert [r.range_consumers for r in coordinator.worker.range_consumers.receivers] == [2, 2]


@pytest.mark.parametrize("partitions", [0, 3])
def test_a_deleted_topic_stays_deleted_and_the_others_go_on(world: World, partitions: int) -> None:
    world.cluster.create_topic("gone", partitions)
    world.cluster.create_topic("stays", 2)
    with world.running(world.source(["gone", "stays"])) as coordinator:
        assert len(coordinator.handed_out.positions) == 2 + max(1, partitions)
        world.publish("gone", 4)
        world.publish("stays", 4)
        received(coordinator, world.sent.total())
        planned = coordinator.batches.cut(4)
        assert planned is not None
        world.cluster.delete_topic(PREFIX + "gone")
        assert len(world.names()) == 1 + max(1, partitions), "our reconnects brought it back"
        coordinator.discovery.round()
        assert world.names() == {"stays"}
        assert coordinator.status()["topicPartitions"] == 2
        assert coordinator.status()["partitionsGone"] == max(1, partitions)
        world.read(coordinator, planned)
        assert world.got.total() == 4, "what was planned is delivered from memory"
        coordinator.batches.release(planned)
        wait_until(lambda: not coordinator.status()["entriesToAcknowledge"])
        coordinator.worker.shared.window.validate()
        end = world.take(coordinator)
        assert coordinator.batches.cut() is None, "what was only received of it is forgotten"
        assert {where.topic for where in end.partitions} == {PREFIX + "stays"}
        assert coordinator.handed_out.positions == end.partitions, "it is gone from there, too"
        world.publish("stays", 3)
        received(coordinator, world.sent.total())
        world.take(coordinator)
        assert {v for v in world.sent if "stays" in v} <= set(world.got)
        assert max(world.got.values()) == 1
        for _ in range(4):
            coordinator.discovery.round()
        assert world.names() == {"stays"}


def test_a_consumer_that_comes_back_late_does_not_keep_a_deleted_topic(world: World) -> None:
    """Issue: it was taken for somebody else's, so the deleted topic was consumed again."""
    world.cluster.create_topic("t")
    broker = MemoryBroker(world.cluster)
    with closing(broker), world.running(world.source("t")) as coordinator:
        world.cluster.delete_topic(PREFIX + "t")
        coordinator.discovery.round()
        assert world.names() == set()
        late = broker.subscribe(
            TopicPartition(PREFIX + "t"), "unit", HashRange(0, 9), start=StartPosition.EARLIEST,
            consumer_name="late", receiver_queue_size=1,
        )  # fmt: skip
        coordinator.discovery.round()
        assert world.names() == {"t"}
        late.close()
        coordinator.discovery.round()
        assert world.names() == set()
        assert coordinator.status()["partitionsGone"] == 1


@pytest.mark.parametrize("partitions", [0, 3])
def test_a_topic_that_comes_back_is_read_from_its_beginning(world: World, partitions: int) -> None:
    world.cluster.create_topic("t", partitions)
    world.publish("t", 2)
    with world.running(world.source("t")) as coordinator:
        received(coordinator, world.sent.total())
        world.take(coordinator)
        world.cluster.delete_topic(PREFIX + "t")
        coordinator.discovery.round()
        assert world.names() == set()
        world.cluster.create_topic("t", partitions)
        world.publish("t", 2)
        coordinator.discovery.round()
        received(coordinator, world.sent.total())
        world.take(coordinator)
        assert world.got == world.sent
        wait_until(lambda: world.backlog("t") == 0)


class CutsMeanwhile(MemoryAdmin):
    """Has a row cut whenever it is asked something, once it knows the source."""

    def __init__(self, cluster: MemoryCluster) -> None:
        super().__init__(cluster)
        self.coordinator: Coordinator | None = None
        self.ends: list[Checkpoint] = []

    def cut(self) -> None:
        end = None if self.coordinator is None else self.coordinator.batches.cut(1)
        if end is not None:
            self.ends.append(end)

    def partition_count(self, topic: str) -> int | None:
        self.cut()
        return super().partition_count(topic)

    def remove_leftover(self, topic_partition: TopicPartition, subscription: str) -> bool | None:
        self.cut()
        return super().remove_leftover(topic_partition, subscription)


@pytest.mark.parametrize("partitions", [0, 2])
def test_what_was_committed_of_the_new_topic_before_it_was_noticed_comes_once(
    world: World, partitions: int
) -> None:
    """1. A topic is deleted and created again. 2. Its consumers are back; what comes is committed.
    3. The broker crashes and forgets the acknowledgements. 4. A round sees another topic, and
    batches of another one are cut meanwhile."""
    world.admin = admin = CutsMeanwhile(world.cluster)
    world.cluster.create_topic("other")
    world.cluster.create_topic("t", partitions)
    world.publish("t", 4)
    with world.running(world.source(["t", "other"])) as coordinator:
        client = world.cluster._clients[0]
        received(coordinator, world.sent.total())
        world.take(coordinator)
        client.drop()
        world.cluster.delete_topic(PREFIX + "t")
        world.cluster.create_topic("t", partitions)
        client.reconnect()
        world.cluster.unload(PREFIX + "t")  # its cursor is written, and then not for a while
        world.publish("t", 4)
        received(coordinator, world.sent.total())
        world.take(coordinator)
        wait_until(lambda: not coordinator.status()["entriesToAcknowledge"])
        world.publish("other", 9)
        received(coordinator, world.sent.total())
        client.drop()
        world.cluster.crash()
        assert world.backlog("t") == max(1, partitions) * 4, "acknowledgements are forgotten"
        admin.coordinator = coordinator
        coordinator.discovery.round()
        admin.coordinator = None
        client.reconnect()
        assert admin.ends, "nothing was cut meanwhile"
        for end in admin.ends:
            world.read(coordinator, end)
        coordinator.batches.release(admin.ends[-1])
        world.publish("t", 1)
        received(coordinator, world.sent.total())
        wait_until(lambda: world.take(coordinator) and world.got >= world.sent)
        wait_until(lambda: world.backlog("t") == world.backlog("other") == 0)
        assert coordinator.batches.cut() is None
        assert world.got == world.sent


@pytest.mark.parametrize("again", [True, False])
def test_ranges_of_a_topic_created_again_are_owned_on(world: World, again: bool) -> None:
    """Handlers go on with what they have; only a deleted topic's ranges are given up."""
    events: list[Event] = []
    coordinator = Coordinator(
        world.source("t"),
        lambda: RecordingBroker(MemoryBroker(world.cluster), events.extend, "w", lambda: 0.0),
        world.admin,
    )
    world.cluster.create_topic("t", 2)
    coordinator.start()
    try:
        client = world.cluster._clients[0]
        client.drop()
        world.cluster.delete_topic(PREFIX + "t")
        if again:
            world.cluster.create_topic("t", 2)
        client.reconnect()
        coordinator.discovery.round()
        kinds = [event.kind for event in events]
        assert kinds == ["range_gained"] * 8 + ["range_gained" if again else "range_lost"] * 8
    finally:
        coordinator.stop()
    assert [event.kind for event in events].count("range_lost") == 8


def test_a_topic_that_somebody_else_writes_to_again_is_kept(world: World) -> None:
    world.cluster.create_topic("t")
    with world.running(world.source("t")) as coordinator:
        world.cluster.delete_topic(PREFIX + "t")
        world.publish("t", 5)
        coordinator.discovery.round()
        assert world.names() == {"t"}
        received(coordinator, 5)
        wait_until(lambda: coordinator.status()["windowRows"] == 5)
        world.take(coordinator)
        assert world.got == world.sent


def test_fewer_partitions_after_a_new_creation(world: World) -> None:
    world.cluster.create_topic("t", 3)
    with world.running(world.source("t")) as coordinator:
        for client in world.cluster._clients:
            client.drop()
        world.cluster.delete_topic(PREFIX + "t")
        world.cluster.create_topic("t", 2)
        for client in world.cluster._clients:
            client.reconnect()
        world.publish("t", 4)
        coordinator.discovery.round()
        received(coordinator, 8)
        assert coordinator.status()["topicPartitions"] == 2
        assert world.names() == {"t"}


def test_without_admin_growth_and_deletion_of_partitioned_topics_are_seen(world: World) -> None:
    world.cluster.create_topic("t", 2)
    world.cluster.create_topic("other", 2)
    with world.running(world.source(["t", "other"]), admin=False) as coordinator:
        world.cluster.delete_topic(PREFIX + "t")
        world.cluster.grow_topic(PREFIX + "other", 3)
        world.publish("other", 2)
        for _ in range(5):
            coordinator.discovery.round()
        received(coordinator, 6)
        assert coordinator.status()["topicPartitions"] == 3
        assert PREFIX + "t" not in world.cluster.topics(), "not even as a topic without partitions"


class Flaky(MemoryAdmin):
    """Fails as often as it is told."""

    def __init__(self, cluster: MemoryCluster) -> None:
        super().__init__(cluster)
        self.errors: list[BrokerError] = []

    def partition_count(self, topic: str) -> int | None:
        if self.errors:
            raise self.errors.pop(0)
        return super().partition_count(topic)


def test_a_round_that_fails_is_visible_and_made_again(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.admin = flaky = Flaky(world.cluster)
    world.cluster.create_topic("t", 2)
    with world.running(world.source("t", discovery_interval_ms=10)) as coordinator:
        away = threading.Event()

        class Away(list[BrokerError]):
            def __bool__(self) -> bool:
                return not away.is_set()

            def pop(self, *_: Any) -> BrokerError:
                return BrokerUnavailableError("the interface is away")

        flaky.errors = Away()
        with caplog.at_level(logging.WARNING, "keyshard.coordinator.discovery"):
            wait_until(lambda: "is away" in coordinator.status()["discoveryError"])
        assert len([r for r in caplog.records if "is away" in r.message]) == 1
        world.cluster.grow_topic(PREFIX + "t", 3)
        world.publish("t", 2)
        received(coordinator, 4)
        coordinator.check()
        away.set()
        received(coordinator, 6)
        wait_until(lambda: coordinator.status()["discoveryError"] == "")


def test_one_topic_that_fails_does_not_keep_the_others_waiting(world: World) -> None:
    for name in ("a", "b"):
        world.cluster.create_topic(name, 2)
    world.admin = flaky = Flaky(world.cluster)
    with world.running(world.source(["a", "b"])) as coordinator:
        world.cluster.grow_topic(PREFIX + "b", 3)
        flaky.errors = [AdminError("refused")]
        with pytest.raises(AdminError):
            coordinator.discovery.round()
        assert coordinator.status()["topicPartitions"] == 5


def test_a_new_topic_whose_ranges_are_taken_is_tried_again(world: World) -> None:
    source = world.matching(".*", subscribe_timeout_ms=20)
    with world.running(source) as coordinator:
        world.cluster.create_topic("a-taken")
        world.cluster.create_topic("b-free")
        with world.running(world.source("a-taken")):
            with pytest.raises(SubscriptionInUseError):
                coordinator.discovery.round()
            coordinator.check()
            assert coordinator.status()["topicPartitions"] == 1, "the other one is consumed"
        world.publish("a-taken", 2)
        coordinator.discovery.round()
        received(coordinator, 2)


def test_an_unforeseen_error_ends_the_source(world: World) -> None:
    class Broken(MemoryAdmin):
        def created(self, topic_partition: TopicPartition) -> str:
            return super().created(topic_partition)

        def partition_count(self, topic: str) -> int | None:
            if threading.current_thread().name == "keyshard-discovery":
                raise RuntimeError("a bug")
            return super().partition_count(topic)

    world.admin = Broken(world.cluster)
    world.cluster.create_topic("t")
    with world.running(world.source("t", discovery_interval_ms=10)) as coordinator:

        def ended() -> bool:
            try:
                coordinator.check()
            except Exception as exc:  # noqa: BLE001 - whatever it is
                return "Thread keyshard-discovery ended unexpectedly" in str(exc)
            return False

        wait_until(ended)
