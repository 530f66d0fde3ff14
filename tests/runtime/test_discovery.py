"""Topics that come, grow and go while a source runs, on the in-memory broker."""

from __future__ import annotations

import logging
import threading
from contextlib import closing

import pytest

from keyshard.broker.memory import MemoryBroker
from keyshard.broker.port import Consumer, StartPosition, SubscriptionSpec
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import TopicPartition
from keyshard.core.ring.hash_range import HashRange
from keyshard.errors import AdminError, BrokerUnavailableError, SubscriptionInUseError
from keyshard.testing.verify.history import Event
from keyshard.testing.verify.recording_broker import RecordingBroker
from tests.helpers import received, started, wait_until
from tests.support.changing_topics import PREFIX, ChangingTopics
from tests.support.faulty_broker import ScriptedCall, after, faulty


def test_a_topic_filled_before_it_is_found_is_read_from_its_beginning(
    changing: ChangingTopics,
) -> None:
    changing.cluster.create_topic("a-1", 2)
    changing.publish("a-1", 3)
    with changing.running(changing.matching("a-.*", starting_position="latest")) as coordinator:
        for name, partitions in (("a-2", 3), ("a-3", 0), ("b-1", 2), ("__a-4", 0)):
            changing.cluster.create_topic(name, partitions)
        before = changing.sent.copy()
        for name in ("a-1", "a-2", "a-3"):
            changing.publish(name, 8)
        coordinator.discovery.round()
        received(coordinator, 8 * (2 + 3 + 1))
        changing.take(coordinator)
        assert changing.got == changing.sent - before
        assert coordinator.status()["topicPartitions"] == 6
        assert coordinator.status()["partitionsDiscovered"] == 4
        wait_until(lambda: not coordinator.status()["entriesToAcknowledge"])
        assert changing.backlog("a-2") == changing.backlog("a-3") == 0


@pytest.mark.parametrize("admin", [True, False])
def test_one_partition_is_read_alone_and_is_the_same_after_a_restart(
    changing: ChangingTopics, admin: bool
) -> None:
    topic = changing.cluster.create_topic("a", 2)
    one = TopicPartition(topic, 1)
    source = changing.source(one.name, admin_url="http://memory" if admin else None)
    changing.publish(one, 5)
    with changing.running(source, admin=admin) as coordinator:
        received(coordinator, 5)
        end = coordinator.batches.cut()
        assert end is not None
        assert set(end.partitions) == {one}
        changing.read(coordinator, end)
    # Committed, and not acknowledged: the broker delivers it again.
    with changing.running(source, Checkpoint.from_json(end.to_json()), admin=admin) as coordinator:
        changing.publish(one, 3)
        received(coordinator, 3)
        changing.take(coordinator)
    assert changing.got == changing.sent


def test_a_round_counts_the_backlog_of_the_broker(changing: ChangingTopics) -> None:
    changing.cluster.create_topic("a-1", 2)
    changing.publish("a-1", 3)
    with changing.running(changing.matching("a-.*", starting_position="earliest")) as coordinator:
        assert coordinator.status()["backlogEntries"] is None
        received(coordinator, 6)
        coordinator.discovery.round()
        assert coordinator.status()["backlogEntries"] == 6
        changing.take(coordinator)
        wait_until(lambda: not coordinator.status()["entriesToAcknowledge"])
        coordinator.discovery.round()
        assert coordinator.status()["backlogEntries"] == 0


def test_the_thread_finds_topics_by_itself(changing: ChangingTopics) -> None:
    with changing.running(changing.matching(".*", discovery_interval_ms=10)) as coordinator:
        assert coordinator.status()["topicPartitions"] == 0
        changing.cluster.create_topic("late", 2)
        changing.publish("late", 4)
        received(coordinator, 8)


def test_partitions_that_grow_are_read_from_their_beginning(changing: ChangingTopics) -> None:
    changing.cluster.create_topic("t", 5)
    with changing.running(changing.source("t", receive_threads=3)) as coordinator:
        changing.cluster.grow_topic(PREFIX + "t", 8)
        changing.publish("t", 5)
        coordinator.discovery.round()
        received(coordinator, 40)
        changing.take(coordinator)
        assert changing.got == changing.sent
        assert coordinator.status()["topicPartitions"] == 8
        assert len(coordinator.consumers.range_consumers.receivers) == 3
        assert [r.range_consumers for r in coordinator.consumers.range_consumers.receivers] == [
            11,
            11,
            10,
        ]
        wait_until(lambda: changing.backlog("t") == 0)


def test_threads_grow_with_the_lanes_up_to_their_limit(changing: ChangingTopics) -> None:
    source = changing.matching(".*", parallelism=1, receive_threads=2)
    with changing.running(source) as coordinator:
        for count in range(4):
            receivers = coordinator.consumers.range_consumers.receivers
            assert len(receivers) == min(count, 2)
            changing.cluster.create_topic(f"t-{count}")
            coordinator.discovery.round()
        assert [r.range_consumers for r in coordinator.consumers.range_consumers.receivers] == [
            2,
            2,
        ]


@pytest.mark.parametrize("changing", ["4.0.8", "5.0.1"], indirect=True)
@pytest.mark.parametrize("partitions", [0, 3])
def test_a_deleted_topic_stays_deleted_and_the_others_continue(
    changing: ChangingTopics, partitions: int
) -> None:
    changing.cluster.create_topic("gone", partitions)
    changing.cluster.create_topic("stays", 2)
    with changing.running(changing.source(["gone", "stays"])) as coordinator:
        assert len(coordinator.in_flight.positions) == 2 + max(1, partitions)
        changing.publish("gone", 4)
        changing.publish("stays", 4)
        received(coordinator, changing.sent.total())
        planned = coordinator.batches.cut(4)
        assert planned is not None
        changing.cluster.delete_topic(PREFIX + "gone")
        refused = partitions and changing.cluster.release.partitions_need_topic
        brought_back = 0 if refused else max(1, partitions)
        assert len(changing.names()) == 1 + brought_back, "by our reconnects"
        coordinator.discovery.round()
        assert changing.names() == {"stays"}
        assert coordinator.status()["topicPartitions"] == 2
        assert coordinator.status()["partitionsGone"] == max(1, partitions)
        changing.read(coordinator, planned)
        assert changing.got.total() == 4, "what was planned is delivered from memory"
        coordinator.batches.release(planned)
        wait_until(lambda: not coordinator.status()["entriesToAcknowledge"])
        coordinator.consumers.shared.window.validate()
        end = changing.take(coordinator)
        assert coordinator.batches.cut() is None, "what was only received of it is forgotten"
        assert {where.topic for where in end.partitions} == {PREFIX + "stays"}
        assert coordinator.in_flight.positions == end.partitions, "it is gone from there, too"
        changing.publish("stays", 3)
        received(coordinator, changing.sent.total())
        changing.take(coordinator)
        assert {v for v in changing.sent if "stays" in v} <= set(changing.got)
        assert max(changing.got.values()) == 1
        for _ in range(4):
            coordinator.discovery.round()
        assert changing.names() == {"stays"}


def late_consumer(broker: MemoryBroker) -> Consumer:
    """Subscribe as a consumer of the source that comes back late."""
    where = TopicPartition(PREFIX + "t")
    spec = SubscriptionSpec(
        where, "unit", HashRange(0, 9), consumer_name="late", receiver_queue_size=1
    )
    return broker.subscribe(spec, StartPosition.EARLIEST)


def test_a_consumer_that_comes_back_late_does_not_keep_a_deleted_topic(
    changing: ChangingTopics,
) -> None:
    """Issue: it was taken for a foreign topic, so the deleted topic was consumed again."""
    changing.cluster.create_topic("t")
    broker = MemoryBroker(changing.cluster)
    with closing(broker), changing.running(changing.source("t")) as coordinator:
        changing.cluster.delete_topic(PREFIX + "t")
        coordinator.discovery.round()
        assert changing.names() == set()
        late = late_consumer(broker)
        coordinator.discovery.round()
        assert changing.names() == {"t"}
        late.close()
        coordinator.discovery.round()
        assert changing.names() == set()
        assert coordinator.status()["partitionsGone"] == 1


def test_a_topic_that_a_consumer_is_just_creating_does_not_stay(changing: ChangingTopics) -> None:
    """Issue: it has no subscription yet, so it was taken for a foreign topic and stayed."""
    changing.cluster.create_topic("t")
    with changing.running(changing.source("t")) as coordinator:
        changing.cluster.delete_topic(PREFIX + "t")
        coordinator.discovery.round()
        changing.cluster.create_topic("t")
        coordinator.discovery.round()
        assert coordinator.status()["topicPartitions"] == 0
        with closing(MemoryBroker(changing.cluster)) as broker:
            late_consumer(broker).close()
        coordinator.discovery.round()
        assert changing.names() == set()


@pytest.mark.parametrize("partitions", [0, 3])
def test_a_topic_that_comes_back_is_read_from_its_beginning(
    changing: ChangingTopics, partitions: int
) -> None:
    changing.cluster.create_topic("t", partitions)
    changing.publish("t", 2)
    with changing.running(changing.source("t")) as coordinator:
        received(coordinator, changing.sent.total())
        changing.take(coordinator)
        changing.cluster.delete_topic(PREFIX + "t")
        coordinator.discovery.round()
        assert changing.names() == set()
        changing.cluster.create_topic("t", partitions)
        changing.publish("t", 2)
        coordinator.discovery.round()
        received(coordinator, changing.sent.total())
        changing.take(coordinator)
        assert changing.got == changing.sent
        wait_until(lambda: changing.backlog("t") == 0)


@pytest.mark.parametrize("partitions", [0, 2])
def test_entries_committed_before_a_new_topic_is_noticed_come_once(
    changing: ChangingTopics, partitions: int
) -> None:
    """1. A topic is deleted and created again. 2. Its consumers are back; their entries are
    committed. 3. The broker crashes and forgets the acknowledgements. 4. A round sees another
    topic, and batches of another one are cut meanwhile."""
    changing.cluster.create_topic("other")
    changing.cluster.create_topic("t", partitions)
    changing.publish("t", 4)
    with changing.running(changing.source(["t", "other"])) as coordinator:
        client = changing.cluster._clients[0]
        received(coordinator, changing.sent.total())
        changing.take(coordinator)
        client.drop()
        changing.cluster.delete_topic(PREFIX + "t")
        changing.cluster.create_topic("t", partitions)
        client.reconnect()
        changing.cluster.unload(PREFIX + "t")  # its cursor is written, and then not for a while
        changing.publish("t", 4)
        received(coordinator, changing.sent.total())
        changing.take(coordinator)
        wait_until(lambda: not coordinator.status()["entriesToAcknowledge"])
        changing.publish("other", 9)
        received(coordinator, changing.sent.total())
        client.drop()
        changing.cluster.crash()
        assert changing.backlog("t") == max(1, partitions) * 4, "acknowledgements are forgotten"
        ends: list[Checkpoint] = []

        def cut() -> None:
            if meanwhile and (end := coordinator.batches.cut(1)) is not None:
                ends.append(end)

        meanwhile = True
        faulty(changing.admin, partition_count=after(cut), remove_leftover=after(cut))
        coordinator.discovery.round()
        meanwhile = False
        client.reconnect()
        assert ends, "nothing was cut meanwhile"
        for end in ends:
            changing.read(coordinator, end)
        coordinator.batches.release(ends[-1])
        changing.publish("t", 1)
        received(coordinator, changing.sent.total())
        wait_until(lambda: changing.take(coordinator) and changing.got >= changing.sent)
        wait_until(lambda: changing.backlog("t") == changing.backlog("other") == 0)
        assert coordinator.batches.cut() is None
        assert changing.got == changing.sent


@pytest.mark.parametrize("again", [True, False])
def test_ranges_of_a_recreated_topic_keep_their_owners(
    changing: ChangingTopics, again: bool
) -> None:
    """Handlers continue with their messages; the source gives up only ranges of a deleted topic."""
    events: list[Event] = []
    coordinator = Coordinator(
        changing.source("t"),
        lambda: RecordingBroker(MemoryBroker(changing.cluster), events.extend, "w", lambda: 0.0),
        changing.admin,
    )
    changing.cluster.create_topic("t", 2)
    with started(coordinator):
        client = changing.cluster._clients[0]
        client.drop()
        changing.cluster.delete_topic(PREFIX + "t")
        if again:
            changing.cluster.create_topic("t", 2)
        client.reconnect()
        coordinator.discovery.round()
        kinds = [event.kind for event in events]
        assert kinds == ["range_gained"] * 8 + ["range_gained" if again else "range_lost"] * 8
    assert [event.kind for event in events].count("range_lost") == 8


def test_a_topic_that_another_client_writes_to_again_is_kept(changing: ChangingTopics) -> None:
    changing.cluster.create_topic("t")
    with changing.running(changing.source("t")) as coordinator:
        changing.cluster.delete_topic(PREFIX + "t")
        changing.publish("t", 5)
        coordinator.discovery.round()
        assert changing.names() == {"t"}
        received(coordinator, 5)
        wait_until(lambda: coordinator.status()["windowRows"] == 5)
        changing.take(coordinator)
        assert changing.got == changing.sent


def test_a_topic_recreated_with_fewer_partitions_is_consumed(changing: ChangingTopics) -> None:
    changing.cluster.create_topic("t", 3)
    with changing.running(changing.source("t")) as coordinator:
        for client in changing.cluster._clients:
            client.drop()
        changing.cluster.delete_topic(PREFIX + "t")
        changing.cluster.create_topic("t", 2)
        for client in changing.cluster._clients:
            client.reconnect()
        changing.publish("t", 4)
        coordinator.discovery.round()
        received(coordinator, 8)
        assert coordinator.status()["topicPartitions"] == 2
        assert changing.names() == {"t"}


def test_without_admin_growth_and_deletion_of_partitioned_topics_are_seen(
    changing: ChangingTopics,
) -> None:
    changing.cluster.create_topic("t", 2)
    changing.cluster.create_topic("other", 2)
    with changing.running(changing.source(["t", "other"]), admin=False) as coordinator:
        changing.cluster.delete_topic(PREFIX + "t")
        changing.cluster.grow_topic(PREFIX + "other", 3)
        changing.publish("other", 2)
        for _ in range(5):
            coordinator.discovery.round()
        received(coordinator, 6)
        assert coordinator.status()["topicPartitions"] == 3
        assert PREFIX + "t" not in changing.cluster.topics(), (
            "not even as a topic without partitions"
        )


def test_a_round_that_fails_is_visible_and_made_again(
    changing: ChangingTopics, caplog: pytest.LogCaptureFixture
) -> None:
    asks = ScriptedCall()
    faulty(changing.admin, partition_count=asks)
    changing.cluster.create_topic("t", 2)
    with changing.running(changing.source("t", discovery_interval_ms=10)) as coordinator:
        asks.raises = BrokerUnavailableError("the interface is away")
        with caplog.at_level(logging.WARNING, "keyshard.coordinator.discovery"):
            wait_until(lambda: "is away" in coordinator.status()["discoveryError"])
        assert len([r for r in caplog.records if "is away" in r.message]) == 1
        changing.cluster.grow_topic(PREFIX + "t", 3)
        changing.publish("t", 2)
        received(coordinator, 4)
        coordinator.check()
        asks.raises = None
        received(coordinator, 6)
        wait_until(lambda: coordinator.status()["discoveryError"] == "")


def test_one_topic_that_fails_does_not_keep_the_others_waiting(changing: ChangingTopics) -> None:
    for name in ("a", "b"):
        changing.cluster.create_topic(name, 2)
    asks = ScriptedCall()
    faulty(changing.admin, partition_count=asks)
    with changing.running(changing.source(["a", "b"])) as coordinator:
        changing.cluster.grow_topic(PREFIX + "b", 3)
        asks.errors.append(AdminError("refused"))
        with pytest.raises(AdminError):
            coordinator.discovery.round()
        assert coordinator.status()["topicPartitions"] == 5


def test_a_new_topic_whose_ranges_are_taken_is_tried_again(changing: ChangingTopics) -> None:
    source = changing.matching(".*", subscribe_timeout_ms=20)
    with changing.running(source) as coordinator:
        changing.cluster.create_topic("a-taken")
        changing.cluster.create_topic("b-free")
        with changing.running(changing.source("a-taken")):
            with pytest.raises(SubscriptionInUseError):
                coordinator.discovery.round()
            coordinator.check()
            assert coordinator.status()["topicPartitions"] == 1, "the other one is consumed"
        changing.publish("a-taken", 2)
        coordinator.discovery.round()
        received(coordinator, 2)


def test_an_unforeseen_error_ends_the_source(changing: ChangingTopics) -> None:
    def error_of(_topic: str) -> RuntimeError | None:
        discovers = threading.current_thread().name == "keyshard-discovery"
        return RuntimeError("a bug") if discovers else None

    faulty(changing.admin, partition_count=ScriptedCall(raises=error_of))
    changing.cluster.create_topic("t")
    with changing.running(changing.source("t", discovery_interval_ms=10)) as coordinator:

        def ended() -> bool:
            try:
                coordinator.check()
            except Exception as exc:  # noqa: BLE001 - whatever it is
                return "Thread keyshard-discovery ended unexpectedly" in str(exc)
            return False

        wait_until(ended)
