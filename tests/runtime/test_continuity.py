"""A cluster that was wiped hands out the same ids again: named, and nothing is lost in silence."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from helpers import commit, config, key_in, received, rows_of, wait_until
from keyshard.broker.memory import MemoryBroker, MemoryCluster, Message
from keyshard.broker.port import StartPosition
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.position.fingerprint import CLOCK_SKEW_MS
from keyshard.core.reception import State
from keyshard.core.ring.hash_range import split_ring
from keyshard.core.window.client_queue import ClientQueue
from keyshard.errors import KeyShardError, TopicRecreatedError
from keyshard.worker import continuity, reconnector
from keyshard.worker.continuity import Continuity
from keyshard.worker.receiver import OwnedRange
from keyshard.worker.subscribe import open_range_consumers
from rescale_world import RescaleWorld

LOW, HIGH = (key_in(hash_range) for hash_range in split_ring(2))
BEFORE_MS, AFTER_MS = 1_000, 100_000
TOPIC = "persistent://public/default/orders"


class World:
    """A running source with two ranges of one topic partition, and eight messages in each."""

    def __init__(self) -> None:
        self.cluster = MemoryCluster()
        self.where = TopicPartition(self.cluster.create_topic("orders"))
        self.broker = MemoryBroker(self.cluster)
        self.coordinator = Coordinator(
            config(TOPIC, parallelism=2, discovery_interval_ms=86_400_000), lambda: self.broker
        )
        self.coordinator.start()
        self.publish(BEFORE_MS, *[LOW, HIGH] * 4)
        received(self.coordinator, 8)

    def publish(self, publish_ms: int, *keys: str) -> None:
        for key in keys:
            self.cluster.publish(self.where, Message(b"", key=key), publish_ms=publish_ms)

    def lose(self) -> None:
        """The source loses its connections, and somebody looks at them."""
        self.broker.drop()
        owned_ranges = self.coordinator.worker.range_consumers.by_partition[self.where]
        wait_until(lambda: all(one.replace_at_s for one in owned_ranges))

    def wipe(self) -> None:
        self.cluster.wipe()
        self.lose()
        self.cluster.create_topic("orders")

    def reconnect(self, range_index: int) -> None:
        owned_ranges = self.coordinator.worker.range_consumers.by_partition[self.where]
        self.broker.reconnect([owned_ranges[range_index].consumer])  # type: ignore[list-item]

    @property
    def backlog(self) -> int:
        return self.cluster.backlog(self.where, "unit")

    @property
    def error(self) -> KeyShardError | None:
        try:
            self.coordinator.check()
        except KeyShardError as exc:
            return exc
        return None


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(reconnector, "LOOK_S", 0.01)
    made = World()
    yield made
    made.coordinator.stop()


def test_what_was_received_before_a_wipe_acknowledges_nothing_after_it(world: World) -> None:
    """1. Eight entries are in a batch. 2. The cluster is wiped. 3. Others have their ids, and
    nothing of them comes before the batch is durable."""
    end = world.coordinator.batches.cut()
    assert end is not None
    rows_of(world.coordinator, end)
    world.wipe()
    world.reconnect(1)
    world.publish(AFTER_MS, *[LOW] * 8)
    world.coordinator.batches.release(end)
    status = world.coordinator.status
    wait_until(lambda: world.error or not status()["entriesToAcknowledge"])
    assert world.backlog == 8
    assert isinstance(world.error, TopicRecreatedError)


def test_new_entries_under_delivered_ids_are_not_taken_for_redeliveries(world: World) -> None:
    """One range gets a new entry under a new id; then the other new ones under delivered ids."""
    commit(world.coordinator)
    wait_until(lambda: not world.backlog)
    world.wipe()
    world.reconnect(1)
    world.publish(AFTER_MS, *[LOW] * 8)
    world.publish(AFTER_MS + 1, HIGH)
    wait_until(lambda: world.error or world.coordinator.status()["rowsReceived"] == 9)
    if world.error is None:
        commit(world.coordinator)
    world.reconnect(0)
    status = world.coordinator.status
    wait_until(lambda: world.error or status()["duplicatesDropped"] >= 8)
    assert isinstance(world.error, TopicRecreatedError)
    assert world.backlog == 9


def test_what_is_the_same_goes_on_after_an_absence(world: World) -> None:
    end = world.coordinator.batches.cut()
    assert end is not None
    rows_of(world.coordinator, end)
    world.lose()
    world.coordinator.batches.release(end)
    world.publish(AFTER_MS, LOW, HIGH)
    world.broker.reconnect()
    received(world.coordinator, 10)
    commit(world.coordinator)
    wait_until(lambda: not world.backlog)
    assert world.error is None


def test_what_a_client_kept_from_before_a_wipe_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is known of the topic partition yet, and receiving pauses until it is away."""
    monkeypatch.setattr(reconnector, "LOOK_S", 0.01)
    cluster = MemoryCluster()
    where = TopicPartition(cluster.create_topic("orders"))
    broker = MemoryBroker(cluster)
    coordinator = Coordinator(
        config(TOPIC, parallelism=2, discovery_interval_ms=86_400_000), lambda: broker
    )
    coordinator.start()
    try:
        consumers = coordinator.worker.range_consumers
        served = consumers.by_partition[where]
        wait_until(lambda: all(one.reception.state is State.IDLE for one in served))
        consumers.suspend(consumers.owned)
        for key in (LOW, HIGH):
            cluster.publish(where, Message(b"old", key=key), publish_ms=BEFORE_MS)
        cluster.wipe()
        broker.drop()
        cluster.create_topic("orders")
        consumers.suspend(())
        wait_until(lambda: all(one.reception.state is State.IDLE for one in served))
        broker.reconnect()
        for key in (LOW, HIGH):
            cluster.publish(where, Message(b"new", key=key), publish_ms=AFTER_MS)
        received(coordinator, 2)
        end = coordinator.batches.cut()
        assert end is not None
        rows = rows_of(coordinator, end).values()
        assert [row["value"] for part in rows for row in part] == [b"new"] * 2
    finally:
        coordinator.stop()


@pytest.mark.parametrize("early", [True, False])
def test_what_is_known_and_stored_no_more_keeps_nothing_waiting(
    world: World, *, early: bool
) -> None:
    """Retention has removed all that was delivered; what comes has higher ids."""
    commit(world.coordinator)
    wait_until(lambda: not world.backlog)
    world.lose()
    world.cluster.roll_ledger(world.where)
    world.cluster.trim(world.where, EntryId(2**40, 0))
    if early:
        world.publish(AFTER_MS, LOW)
    world.broker.reconnect()
    if not early:
        world.publish(AFTER_MS, LOW)
    received(world.coordinator, 9)
    commit(world.coordinator)
    wait_until(lambda: not world.backlog)
    assert world.error is None


def test_entries_below_all_that_is_known_keep_nothing_waiting(world: World) -> None:
    """A topic created again may begin with lower ids, and a slow range has late entries."""
    commit(world.coordinator)
    known = world.coordinator.newest.partitions[world.where]
    first = known.delivered.first
    assert first is not None
    window = world.coordinator.worker.shared.window.known[world.where]
    later = EntryId(first.ledger + 1, 0)
    window.state = replace(known, delivered=EntrySet.of([later]), batch=EntrySet())
    world.coordinator.worker.shared.window.known[world.where].doubt()
    world.publish(BEFORE_MS, LOW)
    received(world.coordinator, 9)
    assert world.error is None


def known_ahead(world: World, entries: int) -> Continuity:
    """Only the entry that is so many after the last one that is stored is known, from now on.

    Nothing comes to the window by itself any more: who compares is given back.
    """
    commit(world.coordinator)
    wait_until(lambda: not world.backlog)
    consumers, shared = world.coordinator.worker.range_consumers, world.coordinator.worker.shared
    served = consumers.by_partition[world.where]
    wait_until(lambda: all(one.reception.state is State.IDLE for one in served))
    consumers.suspend(consumers.owned)
    partition = shared.window.known[world.where]
    last = partition.state.delivered.last
    assert last is not None
    only = EntrySet.of([EntryId(last.ledger, last.entry + entries)])
    partition.state = replace(partition.state, delivered=only, batch=only)
    partition.doubt()
    return Continuity(world.broker, consumers, shared)


def test_newer_entries_under_lower_ids_are_not_taken_before_what_follows_tells(
    world: World,
) -> None:
    """Found by the simulation: an entry of a wiped cluster that was taken showed at the next start
    that nothing had changed, and one under the id of an old one was lost in silence."""
    compares = known_ahead(world, 3)
    world.publish(BEFORE_MS + CLOCK_SKEW_MS, LOW)
    newest = world.cluster.log(world.where).last_id
    assert newest is not None
    assert not compares.may_receive(world.where, [newest])
    world.publish(BEFORE_MS + CLOCK_SKEW_MS, HIGH)
    assert not compares.may_receive(world.where, [newest])
    world.publish(BEFORE_MS + CLOCK_SKEW_MS, LOW)
    with pytest.raises(TopicRecreatedError, match="is delivered according to the checkpoint"):
        compares.may_receive(world.where, [newest])
    assert world.backlog == 3


def test_a_late_entry_of_a_fast_clock_is_taken_where_what_follows_it_is_known(
    world: World,
) -> None:
    compares = known_ahead(world, 2)
    world.publish(AFTER_MS, LOW)
    late = world.cluster.log(world.where).last_id
    assert late is not None
    world.publish(BEFORE_MS, HIGH)
    assert compares.may_receive(world.where, [late])


def test_a_known_entry_that_nobody_can_read_holds_up_nothing_below_it(world: World) -> None:
    compares = known_ahead(world, 2)
    world.publish(AFTER_MS, LOW, HIGH)
    last = world.cluster.log(world.where).last_id
    assert last is not None
    world.cluster.corrupt(world.where, last)
    assert compares.may_receive(world.where, [EntryId(last.ledger, last.entry - 1)])


def test_much_newer_entries_in_the_place_of_known_ones_are_named_before_one_has_their_id(
    world: World,
) -> None:
    """Else the source would wait, for as long as the new cluster has fewer entries."""
    compares = known_ahead(world, 100)
    world.publish(AFTER_MS, LOW)
    newest = world.cluster.log(world.where).last_id
    assert newest is not None
    with pytest.raises(TopicRecreatedError, match="which was known and is not stored"):
        compares.may_receive(world.where, [newest])
    assert world.backlog == 1


def test_a_process_that_stands_still_again_and_again_only_compares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is known of the connections at any moment: everything is compared, nothing lost."""
    monkeypatch.setattr(continuity, "LOOKS_S", 0.0)
    world = RescaleWorld()
    try:
        world.keep_publishing()
        world.more(300)
        world.check()
    finally:
        world.end()


def test_what_came_before_a_wipe_is_not_taken_by_a_source_that_was_still_opening() -> None:
    cluster = MemoryCluster()
    topic = cluster.create_topic("orders")
    where = TopicPartition(topic)
    ranges = split_ring(2)
    cluster.publish(topic, *(Message(b"old", key=key_in(one)) for one in ranges))
    wiped = threading.Lock()

    class Late(MemoryBroker):
        """The cluster is wiped after the first subscription."""

        done = 0

        def subscribe(self, *what: Any, **how: Any) -> Any:
            with wiped:
                Late.done += 1
                if Late.done == 2:
                    cluster.wipe()
                    cluster.create_topic("orders")
                    cluster.publish(topic, *(Message(b"new", key=key_in(one)) for one in ranges))
                return super().subscribe(*what, **how)

    opened = open_range_consumers(
        Late(cluster), None, config(topic, parallelism=2),
        [OwnedRange(where, i, one) for i, one in enumerate(ranges)], StartPosition.EARLIEST,
        make_queue=lambda: ClientQueue(2**20, 10),
    )  # fmt: skip
    came = [block.values for one in opened for block in one.consumer.receive(1_000)]
    assert came == [[b"new"], [b"new"]]
