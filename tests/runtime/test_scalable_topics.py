"""Scalable topics: segments that split and merge while a source consumes them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tenacity import stop_never, wait_fixed

from keyshard import KeyShardSource, Message, RetryPolicy
from keyshard.broker.memory import MemoryBroker, MemoryCluster
from keyshard.broker.memory import Message as Stored
from keyshard.broker.memory.admin import MemoryAdmin
from keyshard.broker.memory.scalable_topics import MemorySegmentWatch
from keyshard.broker.port import StartPosition
from keyshard.broker.scalable_topics import ScalableTopics
from keyshard.broker.topics import Catalog, look
from keyshard.consumers import range_consumers
from keyshard.consumers.range_consumers import RangeConsumers, _AbsentConsumer
from keyshard.consumers.receiver import OwnedRange, RangeConsumer
from keyshard.coordinator.coordinator import Coordinator
from keyshard.coordinator.partition_lifecycle import BoundedSegments
from keyshard.core.diagnosis import Level
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import TopicPartition
from keyshard.core.ring.assignment import assign
from keyshard.core.ring.hash_range import HashRange, range_index
from keyshard.core.topic_segments import HASHES, SegmentGraph, SegmentOrder, TopicSegment
from keyshard.core.window.receiver_queue_size import ReceiverQueueSize
from keyshard.errors import (
    AdminError,
    BrokerError,
    BrokerUnavailableError,
    ConfigError,
    KeyShardError,
    TopicNotFoundError,
)
from keyshard.observe.doctor import Expected
from keyshard.testing import run_until_idle
from tests.helpers import DEADLINE_S, received, rows_of, started, wait_until
from tests.support.deadlines import deadline
from tests.support.memory_scalable_topic import KEYS, TOPIC, ScalableTopic, source_of


@pytest.fixture
def topic() -> ScalableTopic:
    return ScalableTopic()


def waiting(coordinator: object) -> int:
    found: int = coordinator.status()["segmentsWaiting"]  # type: ignore[attr-defined]
    return found


@pytest.mark.simulated
def test_rows_of_children_come_after_those_of_the_parent_in_one_batch(
    topic: ScalableTopic,
) -> None:
    topic.publish(16)
    with topic.running(source_of(parallelism=3)) as coordinator:
        received(coordinator, 16)
        topic.split(0)
        topic.publish(24)
        received(coordinator, 40)
        assert waiting(coordinator) == 0
        end = coordinator.batches.cut()
        assert end is not None
        laid_out = rows_of(coordinator, end)
        stored = Checkpoint.from_json(end.to_json())
    topic.take(laid_out)
    topic.check()
    with topic.running(source_of(), stored, planned=True) as again:
        assert rows_of(again, stored) == laid_out, "a batch that runs again has the same rows"


@pytest.mark.simulated
def test_a_batch_has_no_rows_of_children_while_the_parent_has_more(topic: ScalableTopic) -> None:
    topic.publish(16)
    with topic.running(source_of()) as coordinator:
        received(coordinator, 16)
        topic.split(0)
        topic.publish(24)
        received(coordinator, 40)
        topic.drain(coordinator, 10)
    topic.check()


def test_children_wait_until_the_parent_is_received(topic: ScalableTopic) -> None:
    topic.publish(16)
    with topic.running(source_of()) as coordinator:
        coordinator.consumers.intake.paused = True
        topic.publish(16)
        topic.split(0)
        topic.publish(16)
        coordinator.discovery.round()
        assert waiting(coordinator) == 2
        coordinator.consumers.intake.paused = False
        topic.drain(coordinator)
    topic.check()


def test_a_delayed_message_of_the_parent_holds_its_children_up(topic: ScalableTopic) -> None:
    topic.publish(16)
    topic.cluster.publish(TOPIC, Stored(b"99", key=KEYS[0], deliver_at_ms=2**42))
    with topic.running(source_of()) as coordinator:
        received(coordinator, 16)
        topic.split(0)
        topic.publish(8)
        coordinator.discovery.round()
        assert waiting(coordinator) == 2


def test_a_parent_whose_held_entries_expire_is_not_taken_for_received(
    topic: ScalableTopic,
) -> None:
    """The backlog then has as many entries as the source holds, but they are others."""
    (parent,) = topic.cluster.scalable.graph(TOPIC).partitions
    topic.publish(8)
    with topic.running(source_of()) as coordinator:
        received(coordinator, 8)
        coordinator.consumers.intake.paused = True
        topic.publish(8)
        topic.split(0)
        with coordinator.consumers.shared.lock:
            window = coordinator.consumers.shared.window.known[parent]
            held = sorted(window.held)
            assert window.has_rest(len(held))
        topic.cluster.acknowledge(parent, "unit", held)
        assert topic.cluster.backlog(parent, "unit") == len(held)
        coordinator.discovery.round()
        assert waiting(coordinator) == 2


def test_a_slow_key_of_the_parent_holds_only_itself_up() -> None:
    topic, source = handled("slow-key-of-segments", 1, parallelism=3)
    held = threading.Event()

    def handle(message: Message) -> None:
        if message.key == KEYS[0]:
            held.wait(DEADLINE_S)
        topic.handle(message)

    topic.publish(16)
    with source.running(handle):
        try:
            wait_until(lambda: len(topic.got) == 14)
            topic.split(0)
            topic.publish(16)
            topic.cluster.scalable.merge(TOPIC, 1, 2)
            topic.publish(16)
            wait_until(lambda: len(topic.got) == 42)
            assert all(key != KEYS[0] for key, _ in topic.got)
        finally:
            held.set()
        wait_until(lambda: len(topic.got) == topic.sent)
    topic.check()


def test_a_split_while_the_source_is_down_keeps_the_order(topic: ScalableTopic) -> None:
    source = source_of()
    topic.publish(16)
    with topic.running(source) as coordinator:
        received(coordinator, 16)
        end = coordinator.batches.cut()
        assert end is not None
        topic.take(rows_of(coordinator, end))
    topic.split(0)
    topic.publish(8)
    topic.cluster.scalable.merge(TOPIC, 1, 2)
    topic.publish(8)
    # Committed, and not acknowledged.
    with topic.running(source, Checkpoint.from_json(end.to_json())) as coordinator:
        topic.drain(coordinator)
    topic.check()


def handled(name: str, segments: int, **options: Any) -> tuple[ScalableTopic, KeyShardSource]:
    """A topic of a named cluster, and a source of it."""
    topic = ScalableTopic()
    topic.cluster = MemoryCluster.named(name)
    topic.cluster.scalable.create(TOPIC, segments)
    url = f"memory://{name}"
    source = KeyShardSource(
        TOPIC, subscription="s", service_url=url, admin_url=url, starting_position="earliest",
        discovery_interval_ms=50, **options,
    )  # fmt: skip
    return topic, source


def test_handlers_keep_the_order_of_keys_across_splits_and_merges() -> None:
    topic, source = handled("handlers-of-segments", 2, parallelism=3)
    cluster = topic.cluster
    topic.publish(40)
    with source.running(topic.handle):
        wait_until(lambda: len(topic.got) == 40)
        for change in (
            lambda: topic.split(0),
            lambda: cluster.scalable.merge(TOPIC, 2, 3),
            lambda: topic.split(4),
            lambda: topic.split(1),
        ):
            topic.publish(20)
            change()
            topic.publish(20)
        wait_until(lambda: len(topic.got) == topic.sent)
    topic.check()


@pytest.mark.simulated
def test_a_sealed_segment_stays_at_the_broker_until_it_is_acknowledged(
    topic: ScalableTopic,
) -> None:
    topic.publish(8)
    with topic.running(source_of()) as coordinator:
        received(coordinator, 8)
        topic.split(0)
        assert topic.cluster.scalable.collect(TOPIC) == []
        end = coordinator.batches.cut()
        assert end is not None
        topic.take(rows_of(coordinator, end))
        assert topic.cluster.scalable.collect(TOPIC) == [], "it is not committed"
        coordinator.batches.release(end)
        wait_until(lambda: topic.cluster.scalable.collect(TOPIC) == [0])
        wait_until(lambda: coordinator.status()["partitionsGone"] == 1)
        topic.publish(8)
        received(coordinator, 16)
        end = coordinator.batches.cut()
        assert end is not None
        assert {where.name[-1] for where in end.partitions} <= {"1", "2"}
        topic.take(rows_of(coordinator, end))
    topic.check()


def test_segments_that_appear_while_no_source_runs_keep_their_messages(
    topic: ScalableTopic,
) -> None:
    with topic.running(source_of(starting_position="latest")):
        pass
    topic.split(0)
    topic.publish(8)
    topic.split(1)
    topic.split(2)
    topic.publish(8)
    topic.cluster.scalable.collect(TOPIC)
    with topic.running(source_of(starting_position="latest")) as coordinator:
        topic.drain(coordinator)
    topic.check()


@pytest.mark.simulated
def test_the_backlog_counts_the_segments_that_wait(topic: ScalableTopic) -> None:
    topic.publish(12)
    with topic.running(source_of()) as coordinator:
        received(coordinator, 12)
        coordinator.consumers.intake.paused = True
        topic.publish(4)
        topic.split(0)
        topic.publish(8)
        wait_until(lambda: coordinator.status()["backlogEntries"] == 24)
        assert waiting(coordinator) == 2
        coordinator.consumers.intake.paused = False
        received(coordinator, 16)
        end = coordinator.batches.cut(16)
        assert end is not None
        topic.take(rows_of(coordinator, end))
        coordinator.batches.release(end)
        wait_until(lambda: coordinator.status()["entriesToAcknowledge"] == 0)
        coordinator.discovery.round()
        assert coordinator.status()["backlogEntries"] == 8
        assert coordinator.status()["entriesLost"] is None, "the cursor of a segment is unknown"


@pytest.mark.simulated
def test_consumers_that_the_broker_forgot_are_subscribed_again(topic: ScalableTopic) -> None:
    clients: list[MemoryBroker] = []

    def connect() -> MemoryBroker:
        clients.append(MemoryBroker(topic.cluster))
        return clients[-1]

    with started(Coordinator(source_of(), connect, MemoryAdmin(topic.cluster))) as coordinator:
        topic.publish(8)
        received(coordinator, 8)
        (where,) = topic.cluster.scalable.graph(TOPIC).partitions
        for member in topic.cluster.subscriptions(where)["unit"].members:
            clients[0].forget(where, member.hash_range)
        topic.publish(8)
        coordinator.discovery.round()
        received(coordinator, 16)


def test_the_status_shows_the_backlog_of_segments_and_what_is_unknown() -> None:
    name, held = "status-of-segments", threading.Event()
    cluster = MemoryCluster.named(name)
    cluster.scalable.create(TOPIC, 2)
    source = KeyShardSource(
        TOPIC, subscription="s", service_url=f"memory://{name}", admin_url=f"memory://{name}",
        starting_position="earliest", parallelism=2, discovery_interval_ms=60_000,
    )  # fmt: skip
    for number, key in enumerate(KEYS):
        cluster.publish(TOPIC, Stored(b"%d" % number, key=key))

    def handle(_: Message) -> None:
        held.wait(DEADLINE_S)

    with source.running(handle) as run:
        try:
            wait_until(lambda: run.status()["lag"]["entries"] == len(KEYS))
            for one in run.status()["partitions"]:
                where = TopicPartition(one["topic"], one["partition"])
                backlog = cluster.subscriptions(where)["s"].backlog
                assert (one["backlog"], one["lag"]["entries"]) == (backlog, backlog)
                assert (one["ackGaps"], one["replay"], one["stalled"]) == (None, None, None)
                assert (one["covered"], one["unknown"]) == (True, "")
        finally:
            held.set()


def test_a_deleted_parent_holds_no_child_up(topic: ScalableTopic) -> None:
    topic.publish(8)
    topic.split(0)
    assert topic.cluster.scalable.collect(TOPIC) == [0], "no subscription is registered"
    with topic.running(source_of()) as coordinator:
        assert waiting(coordinator) == 0
        topic.publish(8)
        received(coordinator, 8)


@pytest.mark.simulated
def test_a_new_subscription_at_the_latest_position_skips_what_was_sealed_before(
    topic: ScalableTopic,
) -> None:
    topic.publish(8)
    topic.split(0)
    topic.publish(8)
    source = source_of(starting_position="latest")
    with topic.running(source) as coordinator:
        topic.publish(16)
        wait_until(lambda: waiting(coordinator) == 0)
        received(coordinator, 16)


@pytest.mark.simulated
def test_a_push_of_the_broker_is_enough_to_find_new_segments(topic: ScalableTopic) -> None:
    source = source_of()
    with topic.running(source) as coordinator:
        topic.split(0)
        topic.publish(8)
        received(coordinator, 8)


def test_an_older_graph_of_another_broker_deletes_nothing(topic: ScalableTopic) -> None:
    class LateBroker(MemoryBroker):
        """Its second look-up is answered with the graph of the first."""

        first: SegmentGraph | None = None

        def watch_segments(self, topic: str, changed: Callable[[], None]) -> MemorySegmentWatch:
            watch = super().watch_segments(topic, changed)
            self.first = self.first or watch.graph
            watch.graph = self.first
            return watch

    with closing(LateBroker(topic.cluster)) as broker:
        scalable = ScalableTopics(broker, None, "s")
        assert len(scalable.partitions(TOPIC)) == 1
        topic.split(0)
        assert len(scalable.partitions(TOPIC)) == 3
        for watch in broker._watches:
            watch.close()
        assert len(scalable.partitions(TOPIC)) == 3
        assert len(scalable.parents()) == 2


class BehindBroker(MemoryBroker):
    """Answers its first look-ups with the segments of before."""

    before: SegmentGraph
    looks = 3

    def watch_segments(self, topic: str, changed: Callable[[], None]) -> MemorySegmentWatch:
        watch = super().watch_segments(topic, changed)
        if self.looks:
            self.looks -= 1
            watch.graph = self.before
            watch.close()
        return watch


@pytest.mark.simulated
def test_a_start_waits_for_a_broker_that_has_not_heard_of_segments_of_the_checkpoint(
    topic: ScalableTopic,
) -> None:
    source, before = source_of(), topic.cluster.scalable.graph(TOPIC)
    topic.split(0)
    topic.publish(16)
    with topic.running(source) as coordinator:
        received(coordinator, 16)
        end = coordinator.batches.cut()
        assert end is not None
    with closing(BehindBroker(topic.cluster)) as broker:
        broker.before = before
        catalog = Catalog(broker, MemoryAdmin(topic.cluster), source)
        found = look(catalog, end, 1.0)
    assert {where.name[-1] for where in found.consumed} == {"0", "1", "2"}
    assert not found.gone


@pytest.mark.simulated
def test_segments_of_a_checkpoint_are_gone_after_their_topic_was_created_again(
    topic: ScalableTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keyshard.broker.topics.CATCH_UP_S", 0.1)
    source = source_of()
    topic.split(0)
    topic.publish(16)
    with topic.running(source) as coordinator:
        received(coordinator, 16)
        end = coordinator.batches.cut()
        assert end is not None
    topic.cluster.scalable.delete(TOPIC)
    topic.cluster.scalable.create(TOPIC)
    with closing(MemoryBroker(topic.cluster)) as broker:
        found = look(Catalog(broker, MemoryAdmin(topic.cluster), source), end, 1.0)
    assert {where.name[-1] for where in found.consumed} == {"0"}
    assert {where.name[-1] for where in found.gone} == {"1", "2"}


def test_a_deleted_topic_has_no_segments(
    topic: ScalableTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(MemoryBroker(topic.cluster)) as broker:
        scalable = ScalableTopics(broker, None, "s")
        (where,) = scalable.partitions(TOPIC)
        assert scalable.topic_of(where) == TOPIC
        topic.cluster.scalable.delete(TOPIC)
        assert scalable.partitions(TOPIC) == (where,), "the watch is not told"
        monkeypatch.setattr("keyshard.broker.scalable_topics.LOOK_AGAIN_S", 0.0)
        assert scalable.partitions(TOPIC) == ()
        assert scalable.parents() == {}


def test_a_topic_that_is_created_again_is_consumed_from_its_beginning(
    topic: ScalableTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keyshard.broker.scalable_topics.LOOK_AGAIN_S", 0.0)
    topic.publish(8)
    source = source_of(starting_position="latest", discovery_interval_ms=50)
    with topic.running(source) as coordinator:
        topic.cluster.scalable.delete(TOPIC)
        topic.cluster.scalable.create(TOPIC)
        wait_until(lambda: coordinator.status()["partitionsGone"] == 1)
        topic.publish(8)
        received(coordinator, 8)


def test_a_topic_that_is_created_again_after_its_first_segments_is_another_one() -> None:
    old = ScalableTopic()
    old.split(0)
    assert old.cluster.scalable.collect(TOPIC) == [0]
    before = old.cluster.scalable.graph(TOPIC)
    old.cluster.scalable.delete(TOPIC)
    old.cluster.scalable.create(TOPIC)
    assert not old.cluster.scalable.graph(TOPIC).precedes(before)


def test_segments_of_a_topic_that_is_created_again_wait_for_its_own_parents() -> None:
    order = SegmentOrder()
    parent, child = (TopicPartition(f"segment://a/b/c/0000-ffff-{number}") for number in (0, 1))
    order.parents = {child: frozenset({parent})}
    assert (order.waits(child), order.awaited()) == (True, {parent})
    order.end(parent)
    assert (order.waits(child), order.awaited()) == (False, set())
    order.forget([parent])
    assert order.waits(child)


def test_a_broker_that_fails_to_look_a_topic_up_deletes_nothing(topic: ScalableTopic) -> None:
    class FailingBroker(MemoryBroker):
        fails = False

        def watch_segments(self, topic: str, changed: Callable[[], None]) -> MemorySegmentWatch:
            if self.fails:
                raise BrokerUnavailableError("It is moving.")
            return super().watch_segments(topic, changed)

    with closing(FailingBroker(topic.cluster)) as broker:
        scalable = ScalableTopics(broker, None, "s")
        topic.split(0)
        assert len(scalable.partitions(TOPIC)) == 3
        for watch in broker._watches:
            watch.close()
        broker.fails = True
        with pytest.raises(BrokerUnavailableError):
            scalable.partitions(TOPIC)
        assert len(scalable.parents()) == 2, "children wait on"


def test_a_refused_registration_is_repeated(
    topic: ScalableTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    register, asked = MemoryAdmin.register, [0]

    def refuses(self: MemoryAdmin, name: str, subscription: str) -> None:
        asked[0] += 1
        if asked[0] in (2, 3):
            raise AdminError("Not now.")
        register(self, name, subscription)

    monkeypatch.setattr(MemoryAdmin, "register", refuses)
    with topic.running(source_of(discovery_interval_ms=50)) as coordinator:
        topic.split(0)
        wait_until(lambda: asked[0] >= 4)
        wait_until(lambda: not coordinator.status()["discoveryError"])


@pytest.mark.simulated
def test_a_registration_that_another_client_deleted_is_made_again(topic: ScalableTopic) -> None:
    with topic.running(source_of(starting_position="latest")) as coordinator:
        topic.cluster.scalable.unregister(TOPIC, "unit")
        coordinator.discovery.round()
    topic.split(0)
    topic.publish(8)
    with topic.running(source_of(starting_position="latest")) as coordinator:
        received(coordinator, 8)


@pytest.mark.parametrize(
    "error", [BrokerError("The broker is away."), ConfigError("The proxy refuses: status 407.")]
)
def test_a_question_that_fails_while_segments_wait_ends_nothing(
    topic: ScalableTopic, monkeypatch: pytest.MonkeyPatch, error: KeyShardError
) -> None:
    asked = [0]
    backlog = ScalableTopics.backlog

    def fails(self: ScalableTopics, segment: TopicPartition) -> int | None:
        asked[0] += 1
        if asked[0] < 4:
            raise error
        return backlog(self, segment)

    monkeypatch.setattr(ScalableTopics, "backlog", fails)
    topic.publish(8)
    topic.split(0)
    topic.publish(8)
    with topic.running(source_of()) as coordinator:
        topic.drain(coordinator)
    topic.check()


def test_a_rescale_moves_keys_and_subscribes_nothing() -> None:
    topic, source = handled("rescale-of-segments", 1, parallelism=2)
    topic.publish(16)
    with source.running(topic.handle):
        topic.split(0)
        topic.publish(16)
        wait_until(lambda: len(topic.got) == 32)
        for count in (5, 1, 3):
            report = source.rescale(count)
            assert report.ranges_after == count
            assert report.pauses == (), "no consumer was subscribed again"
            topic.publish(16)
            wait_until(lambda: len(topic.got) == topic.sent)
            status = source.status()
            assert all(one["hashRanges"] for one in status["ranges"])
            assert all(one["covered"] for one in status["partitions"])
    topic.check()


@pytest.mark.simulated
def test_a_segment_that_is_deleted_once_it_is_subscribed_stops_nothing(
    topic: ScalableTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    subscribe = MemoryBroker.subscribe

    def collects(self: MemoryBroker, *spec: Any) -> Any:
        made = subscribe(self, *spec)
        topic.cluster.scalable.collect(TOPIC)
        return made

    topic.split(0)
    monkeypatch.setattr(MemoryBroker, "subscribe", collects)
    with topic.running(source_of()) as coordinator:
        assert not topic.cluster.scalable.graph(TOPIC).parents, "the parent is deleted"
        topic.publish(16)
        received(coordinator, 16)
        end = coordinator.batches.cut()
        assert end is not None
        topic.take(rows_of(coordinator, end))
    topic.check()


def test_batches_of_mixed_keys_keep_their_order_in_a_stream(topic: ScalableTopic) -> None:
    """Java's producer batches keys of an entry bucket; the broker routes by the first key."""
    source, end = source_of(parallelism=4), None
    for first in range(3):
        stored = None if end is None else Checkpoint.from_json(end.to_json())
        with topic.running(source, stored) as coordinator:
            for _ in range(4):
                topic.publish_mixed(20)
                # A cut may come in the middle of what is delivered.
                while (cut := coordinator.batches.cut(7)) is not None:
                    end = cut
                    topic.take(rows_of(coordinator, cut))
                    coordinator.batches.release(cut)
            if first == 1:
                topic.split(0)
    with topic.running(source, end) as coordinator:
        topic.drain(coordinator, 7)
        assert coordinator.status()["misrouted"] == 0
    topic.check()


def test_a_key_of_a_mixed_batch_is_in_the_layout_partition_of_its_slot(
    topic: ScalableTopic,
) -> None:
    source = source_of(parallelism=4)
    with topic.running(source) as coordinator:
        coordinator.consumers.shared.window.task_costs.tasks = lambda *_: 4  # type: ignore[method-assign]
        topic.publish_mixed(80)
        received(coordinator, 80)
        end = coordinator.batches.cut()
        assert end is not None
        laid_out = rows_of(coordinator, end)
        assert {
            (index, range_index(row["__slot"], 4)) for index in laid_out for row in laid_out[index]
        } == {(index, index) for index in range(4)}
        stored = Checkpoint.from_json(end.to_json())
    with topic.running(source, stored, planned=True) as again:
        assert rows_of(again, stored) == laid_out, "a batch that runs again has the same rows"
        again.batches.release(stored)
    topic.take(laid_out)
    topic.check()


def test_batches_of_mixed_keys_keep_their_order_in_handlers() -> None:
    topic, source = handled("mixed-batches-of-segments", 1, parallelism=3)
    with source.running(topic.handle):
        for number in range(3):
            topic.publish_mixed(100)
            topic.split(number)
            topic.publish_mixed(100)
        wait_until(lambda: len(topic.got) == topic.sent)
        status = source.status()
        assert status["window"] is not None
        assert status["window"]["misrouted"] == 0
        assert all(one["handled"] for one in status["ranges"]), "each range has its keys"
    topic.check()


def unless_broken(
    topic: ScalableTopic, broken: Collection[str], folder: Path
) -> tuple[Callable[[Message], None], dict[str, Any]]:
    """Return a handler whose broken keys wait for their next attempt, and how it is run."""

    def handle(message: Message) -> None:
        if message.key in broken:
            raise ValueError("not yet")
        topic.handle(message)

    return handle, {
        "checkpoint": f"file://{folder / 'c.json'}",
        "retry": RetryPolicy(wait=wait_fixed(3_600), stop=stop_never),
    }


def test_a_restart_repeats_no_message_that_was_handled_before_another_key_of_its_entry(
    tmp_path: Path,
) -> None:
    """It would come after newer messages of its key, whose entries are committed."""
    topic, source = handled("half-entries-of-segments", 1, parallelism=3)
    broken: set[str] = set()
    handle, how = unless_broken(topic, broken, tmp_path)
    topic.publish_mixed(40)
    broken.update((KEYS[0], KEYS[7]))
    for heals, count in ((None, 30), (KEYS[0], 35), (KEYS[7], 40)):
        broken.discard(str(heals))
        with source.running(handle, **how):
            wait_until(lambda count=count: len(topic.got) == count)  # type: ignore[misc]
    topic.check()


def test_a_restart_repeats_no_message_of_a_parent_after_those_of_its_children(
    tmp_path: Path,
) -> None:
    """The entries of the parent are not completed, those of the children are."""
    topic, source = handled("half-parents-of-segments", 1, parallelism=3)
    broken = {KEYS[0]}
    handle, how = unless_broken(topic, broken, tmp_path)
    topic.publish_mixed(5)
    with source.running(handle, **how):
        wait_until(lambda: len(topic.got) == 4)
        topic.split(0)
        topic.publish(11)
        wait_until(lambda: len(topic.got) == 14)
    broken.clear()
    with source.running(handle, **how):
        topic.publish(8)
        wait_until(lambda: len(topic.got) == topic.sent)
    topic.check()


def test_messages_of_a_segment_without_a_key_use_the_lanes_of_all_ranges() -> None:
    topic, source = handled("keyless-in-segments", 1, parallelism=4)
    got = threading.Semaphore(0)
    with source.running(lambda _: got.release()):
        topic.cluster.publish(TOPIC, *[Stored(b"") for _ in range(40)])
        for _ in range(40):
            assert got.acquire(timeout=deadline(20))
        wait_until(lambda: all(one["handled"] for one in source.status()["ranges"]))


def test_the_doctor_examines_a_scalable_topic_and_names_what_is_unknown(
    topic: ScalableTopic,
) -> None:
    topic.split(0)
    found = topic.findings()
    assert found["segments"][:2] == (Level.OK, f"{TOPIC} has 3 segment(s), 1 of them sealed.")
    assert "ack gaps" in found["not examined"][1]
    assert "does not exist yet" in found["subscription"][1]
    assert "registration" not in found
    with topic.running(source_of()):
        topic.publish(8)
        found = topic.findings()
        assert found["coverage"][:2] == (Level.OK, "Every segment has a consumer.")
        assert found["registration"][0] is Level.OK
        assert "orphans" in found
    level, text, advice = topic.findings()["registration"]
    assert level is Level.WARNING
    assert "has a backlog of 8 entries and no consumer" in text
    assert advice.endswith("/admin/v2/scalable/public/default/orders/subscriptions/unit")


def test_the_doctor_finds_a_subscription_that_is_not_registered(topic: ScalableTopic) -> None:
    (where,) = topic.cluster.scalable.graph(TOPIC).partitions
    with topic.cluster.lock:
        topic.cluster.open_subscription(where, "unit", StartPosition.EARLIEST)
    assert topic.findings()["registration"][0] is Level.OK, "it cannot be seen yet"
    topic.split(0)
    level, text, advice = topic.findings()["registration"]
    assert level is Level.PROBLEM
    assert "'unit' is not registered" in text
    assert "within a minute, because there is no retention time" in text
    assert advice == "Start the source: it registers the subscription."
    with topic.running(source_of()):
        assert topic.findings()["registration"][0] is Level.OK


def test_the_doctor_compares_an_expected_load_with_the_widest_open_segment(
    topic: ScalableTopic,
) -> None:
    """It has half of the keys; the limit of 50,000 unacknowledged messages is that of a segment."""
    slow = topic.findings(Expected(1_000.0, 100.0))
    assert slow["limits"][0] is Level.OK
    assert "replay queue" not in topic.findings(Expected(5_000.0, 100.0))
    topic.split(0)
    topic.split(1)
    level, text, _ = topic.findings(Expected(5_000.0, 100.0))["unacknowledged"]
    assert level is Level.WARNING
    assert text.endswith("after 20.0 s.")
    assert "message size" in topic.findings(Expected(1_000.0))


def test_the_doctor_names_a_scalable_topic_that_is_missing(topic: ScalableTopic) -> None:
    topic.cluster.scalable.delete(TOPIC)
    level, text, _ = topic.findings()["broker"]
    assert level is Level.PROBLEM
    assert f"{TOPIC} does not exist. Create the topic" in text


def test_a_missing_topic_is_named_at_the_start(topic: ScalableTopic) -> None:
    with (
        pytest.raises(TopicNotFoundError, match="scalable-topics create topic://public/default/x"),
        topic.running(source_of("topic://public/default/x")),
    ):
        pass


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"transport": "client"}, "transport is 'client'"),
        ({"admin_url": None}, "needs the admin interface"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(
    options: dict[str, str | None], text: str
) -> None:
    reached = {"service_url": "pulsar://h:1", "admin_url": "http://h:1"}
    with pytest.raises(ConfigError, match=text):
        KeyShardSource(TOPIC, subscription="s", **reached | options)  # type: ignore[arg-type]


def test_scalable_and_persistent_topics_are_not_mixed() -> None:
    with pytest.raises(ConfigError, match="scalable topics and persistent topics"):
        KeyShardSource([TOPIC, "orders"], subscription="s", admin_url="http://h:1")


@pytest.mark.parametrize("name", ["topic://a", "topic://a/b", "topic://a/b/c/d", "topic://a/b/ c"])
def test_a_wrong_name_is_refused_at_once(name: str) -> None:
    with pytest.raises(ConfigError, match="is not the name of a scalable topic"):
        KeyShardSource(name, subscription="s")


def test_a_handler_runs_until_all_segments_are_acknowledged() -> None:
    name, lock = "idle-of-segments", threading.Lock()
    topic = ScalableTopic(2, MemoryCluster.named(name))
    topic.publish(20)
    topic.split(0)
    topic.publish(20)
    source = KeyShardSource(
        TOPIC, subscription="s", service_url=f"memory://{name}", admin_url=f"memory://{name}",
        starting_position="earliest",
    )  # fmt: skip

    def handle(message: Message) -> None:
        with lock:
            if topic.sent == 40:
                topic.publish(10)
                topic.split(1)
                topic.publish(10)
            topic.got.append((str(message.key), int(message.value or b"")))

    run_until_idle(source, handle)
    topic.check()


def test_dead_letters_of_a_scalable_topic_go_to_a_persistent_topic() -> None:
    source = KeyShardSource(TOPIC, subscription="s", admin_url="http://h:1")
    assert source.default_dead_letter_topics == ("persistent://public/default/orders-s-DLQ",)


def test_a_segment_is_named_as_a_topic_partition_of_its_own() -> None:
    name = "segment://public/default/orders-partition-1/0000-7fff-3"
    assert TopicPartition.parse(name) == TopicPartition(name)


def test_a_migrated_partition_belongs_to_its_topic_also_after_it_was_deleted(
    topic: ScalableTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = TopicPartition("persistent://public/default/orders", 0)
    legacy = TopicSegment(0, 0, HASHES - 1, is_sealed=True, stored_in=old.name)
    new = TopicSegment(1, 0, HASHES - 1, is_sealed=False, parents=frozenset([0]), created_ms=1)
    graphs = [SegmentGraph(TOPIC, 0, {0: legacy, 1: new}), SegmentGraph(TOPIC, 1, {1: new})]
    watch = MemorySegmentWatch(graphs[0], lambda: None)
    monkeypatch.setattr(MemoryBroker, "watch_segments", lambda *_: watch)
    scalable = ScalableTopics(MemoryBroker(topic.cluster), None, "s")
    assert scalable.partitions(TOPIC) == graphs[0].partitions
    watch.report(graphs[1])
    assert old not in scalable.partitions(TOPIC)
    assert scalable.topic_of(old) == TOPIC


SEGMENTS = [TopicPartition(f"segment://a/b/{name}/0000-ffff-0") for name in "cdefghijklmn"]


def test_parents_and_topics_are_looked_at_in_their_order(topic: ScalableTopic) -> None:
    """That of a set differs from process to process, and with it a simulated course."""
    asked: list[Any] = []

    class Scalable(ScalableTopics):
        def partitions(self, topic: str) -> tuple[TopicPartition, ...]:
            asked.append(topic)
            return ()

        def backlog(self, segment: TopicPartition) -> int | None:
            asked.append(segment)
            return 1

    with topic.running(source_of()) as coordinator:
        owned = coordinator.discovery._owned
        scalable = Scalable(MemoryBroker(topic.cluster), None, "s")
        owned.order({TopicPartition("segment://a/b/a/0000-ffff-0"): frozenset(SEGMENTS)})
        owned.look_at_ends(scalable.backlog)
        assert asked == SEGMENTS
        asked.clear()
        BoundedSegments(scalable, owned, SEGMENTS).look()
        assert asked == [f"topic://a/b/{name}" for name in "cdefghijklmn"]


def test_consumers_that_only_acknowledge_are_opened_and_closed_in_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(range_consumers, "THREADS_MAX", 1)
    done: list[Any] = []
    found = RangeConsumers(None, None, source_of(), assign(1), SegmentOrder())  # type: ignore[arg-type]

    def opened(where: TopicPartition) -> RangeConsumer:
        done.append(where)
        one = OwnedRange(where, 0, HashRange(0, 65_535))
        consumer = _AbsentConsumer(one)
        monkeypatch.setattr(consumer, "close", lambda **_: done.append(where))
        return RangeConsumer(one, consumer, ReceiverQueueSize(1, 1))

    monkeypatch.setattr(found, "_held", opened)
    found.hold(frozenset(SEGMENTS))
    found.let_go(frozenset(SEGMENTS))
    assert done == [*SEGMENTS, *SEGMENTS]
