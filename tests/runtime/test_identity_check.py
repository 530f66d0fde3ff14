"""A cluster that was wiped hands out the same ids again: named, and nothing is lost in silence."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from keyshard.broker.memory import MemoryBroker, MemoryCluster, Message
from keyshard.broker.port import StartPosition
from keyshard.consumers import identity_check, reconnector
from keyshard.consumers.identity_check import IdentityCheck
from keyshard.consumers.receive_state import ReceiveState
from keyshard.consumers.receiver import OwnedRange
from keyshard.consumers.subscribe import open_range_consumers
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.ring.hash_range import split_ring
from keyshard.core.topic_identity import CLOCK_SKEW_MS
from keyshard.core.window.receiver_queue_size import ReceiverQueueSize
from keyshard.errors import KeyShardError, TopicRecreatedError
from tests.helpers import commit, config, key_in, received, rows_of, started, wait_until
from tests.support.faulty_broker import Fault, ScriptedCall, faulty
from tests.support.rescaled_source import RescaledSource

pytestmark = pytest.mark.simulated(seeds=1)

LOW, HIGH = (key_in(hash_range) for hash_range in split_ring(2))
BEFORE_MS, AFTER_MS = 1_000, 100_000
TOPIC = "persistent://public/default/orders"


class RunningSource:
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
        """Let the source lose its connections, and compare the topic."""
        self.broker.drop()
        owned_ranges = self.coordinator.consumers.range_consumers.by_partition[self.where]
        wait_until(lambda: all(one.replace_at_s for one in owned_ranges))

    def wipe(self) -> None:
        self.cluster.wipe()
        self.lose()
        self.cluster.create_topic("orders")

    def reconnect(self, range_index: int) -> None:
        owned_ranges = self.coordinator.consumers.range_consumers.by_partition[self.where]
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
def running_source(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningSource]:
    monkeypatch.setattr(reconnector, "LOOK_S", 0.01)
    made = RunningSource()
    yield made
    made.coordinator.stop()


def test_entries_received_before_a_wipe_acknowledge_nothing_after_it(
    running_source: RunningSource,
) -> None:
    """1. Eight entries are in a batch. 2. The cluster is wiped. 3. Others have their ids, and
    nothing of them comes before the batch is durable."""
    end = running_source.coordinator.batches.cut()
    assert end is not None
    rows_of(running_source.coordinator, end)
    running_source.wipe()
    running_source.reconnect(1)
    running_source.publish(AFTER_MS, *[LOW] * 8)
    running_source.coordinator.batches.release(end)
    status = running_source.coordinator.status
    wait_until(lambda: running_source.error or not status()["entriesToAcknowledge"])
    assert running_source.backlog == 8
    assert isinstance(running_source.error, TopicRecreatedError)


def test_new_entries_under_delivered_ids_are_not_taken_for_redeliveries(
    running_source: RunningSource,
) -> None:
    """One range gets a new entry under a new id; then the other new ones under delivered ids."""
    commit(running_source.coordinator)
    wait_until(lambda: not running_source.backlog)
    running_source.wipe()
    running_source.reconnect(1)
    running_source.publish(AFTER_MS, *[LOW] * 8)
    running_source.publish(AFTER_MS + 1, HIGH)
    wait_until(
        lambda: running_source.error or running_source.coordinator.status()["rowsReceived"] == 9
    )
    if running_source.error is None:
        commit(running_source.coordinator)
    running_source.reconnect(0)
    status = running_source.coordinator.status
    wait_until(lambda: running_source.error or status()["duplicatesDropped"] >= 8)
    assert isinstance(running_source.error, TopicRecreatedError)
    assert running_source.backlog == 9


def test_an_unchanged_topic_continues_after_an_absence(running_source: RunningSource) -> None:
    end = running_source.coordinator.batches.cut()
    assert end is not None
    rows_of(running_source.coordinator, end)
    running_source.lose()
    running_source.coordinator.batches.release(end)
    running_source.publish(AFTER_MS, LOW, HIGH)
    running_source.broker.reconnect()
    received(running_source.coordinator, 10)
    commit(running_source.coordinator)
    wait_until(lambda: not running_source.backlog)
    assert running_source.error is None


def test_entries_buffered_before_a_wipe_are_not_delivered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No entry of the topic partition is known, and none is received before the connection ends."""
    monkeypatch.setattr(reconnector, "LOOK_S", 0.01)
    cluster = MemoryCluster()
    where = TopicPartition(cluster.create_topic("orders"))
    broker = MemoryBroker(cluster)
    coordinator = Coordinator(
        config(TOPIC, parallelism=2, discovery_interval_ms=86_400_000), lambda: broker
    )
    with started(coordinator):
        consumers = coordinator.consumers.range_consumers
        served = consumers.by_partition[where]
        wait_until(lambda: all(one.reception.state is ReceiveState.IDLE for one in served))
        consumers.suspend(consumers.owned)
        for key in (LOW, HIGH):
            cluster.publish(where, Message(b"old", key=key), publish_ms=BEFORE_MS)
        cluster.wipe()
        broker.drop()
        cluster.create_topic("orders")
        consumers.suspend(())
        wait_until(lambda: all(one.reception.state is ReceiveState.IDLE for one in served))
        broker.reconnect()
        for key in (LOW, HIGH):
            cluster.publish(where, Message(b"new", key=key), publish_ms=AFTER_MS)
        received(coordinator, 2)
        end = coordinator.batches.cut()
        assert end is not None
        rows = rows_of(coordinator, end).values()
        assert [row["value"] for part in rows for row in part] == [b"new"] * 2


@pytest.mark.parametrize("early", [True, False])
def test_known_entries_that_were_trimmed_delay_nothing(
    running_source: RunningSource, *, early: bool
) -> None:
    """Retention has removed all delivered entries; new ones have higher ids."""
    commit(running_source.coordinator)
    wait_until(lambda: not running_source.backlog)
    running_source.lose()
    running_source.cluster.roll_ledger(running_source.where)
    running_source.cluster.trim(running_source.where, EntryId(2**40, 0))
    if early:
        running_source.publish(AFTER_MS, LOW)
    running_source.broker.reconnect()
    if not early:
        running_source.publish(AFTER_MS, LOW)
    received(running_source.coordinator, 9)
    commit(running_source.coordinator)
    wait_until(lambda: not running_source.backlog)
    assert running_source.error is None


def test_entries_below_all_that_is_known_keep_nothing_waiting(
    running_source: RunningSource,
) -> None:
    """A topic created again may begin with lower ids, and a slow range has late entries."""
    commit(running_source.coordinator)
    known = running_source.coordinator.newest.partitions[running_source.where]
    first = known.delivered.first
    assert first is not None
    window = running_source.coordinator.consumers.shared.window.known[running_source.where]
    later = EntryId(first.ledger + 1, 0)
    window.state = replace(known, delivered=EntrySet.of([later]), batch=EntrySet())
    running_source.coordinator.consumers.shared.window.known[running_source.where].doubt()
    running_source.publish(BEFORE_MS, LOW)
    received(running_source.coordinator, 9)
    assert running_source.error is None


def known_ahead(running_source: RunningSource, entries: int) -> IdentityCheck:
    """Make the entry that is ``entries`` behind the last stored one the only known entry.

    From now on, the window receives no entry by itself.

    Returns:
        The check that compares stored entries with the known one.
    """
    commit(running_source.coordinator)
    wait_until(lambda: not running_source.backlog)
    consumers, shared = (
        running_source.coordinator.consumers.range_consumers,
        running_source.coordinator.consumers.shared,
    )
    served = consumers.by_partition[running_source.where]
    wait_until(lambda: all(one.reception.state is ReceiveState.IDLE for one in served))
    consumers.suspend(consumers.owned)
    partition = shared.window.known[running_source.where]
    last = partition.state.delivered.last
    assert last is not None
    only = EntrySet.of([EntryId(last.ledger, last.entry + entries)])
    partition.state = replace(partition.state, delivered=only, batch=only)
    partition.doubt()
    return IdentityCheck(running_source.broker, consumers, shared)


def test_newer_entries_under_lower_ids_wait_for_evidence_from_later_entries(
    running_source: RunningSource,
) -> None:
    """Found by the simulation: a new entry of a wiped cluster was lost in silence.

    It had the id of an old entry. Another new entry, which was taken, had shown at the next start
    that nothing had changed.
    """
    compares = known_ahead(running_source, 3)
    running_source.publish(BEFORE_MS + CLOCK_SKEW_MS, LOW)
    newest = running_source.cluster.log(running_source.where).last_id
    assert newest is not None
    assert not compares.may_receive(running_source.where, [newest])
    running_source.publish(BEFORE_MS + CLOCK_SKEW_MS, HIGH)
    assert not compares.may_receive(running_source.where, [newest])
    running_source.publish(BEFORE_MS + CLOCK_SKEW_MS, LOW)
    with pytest.raises(TopicRecreatedError, match="is delivered according to the checkpoint"):
        compares.may_receive(running_source.where, [newest])
    assert running_source.backlog == 3


def test_a_late_entry_of_a_fast_clock_is_taken_if_later_entries_are_known(
    running_source: RunningSource,
) -> None:
    compares = known_ahead(running_source, 2)
    running_source.publish(AFTER_MS, LOW)
    late = running_source.cluster.log(running_source.where).last_id
    assert late is not None
    running_source.publish(BEFORE_MS, HIGH)
    assert compares.may_receive(running_source.where, [late])


def test_an_unreadable_known_entry_delays_nothing_below_it(
    running_source: RunningSource,
) -> None:
    compares = known_ahead(running_source, 2)
    running_source.publish(AFTER_MS, LOW, HIGH)
    last = running_source.cluster.log(running_source.where).last_id
    assert last is not None
    running_source.cluster.corrupt(running_source.where, last)
    assert compares.may_receive(running_source.where, [EntryId(last.ledger, last.entry - 1)])


def test_much_newer_entries_in_the_place_of_known_ones_are_named_before_one_has_their_id(
    running_source: RunningSource,
) -> None:
    """Otherwise the source would wait for as long as the new cluster has fewer entries."""
    compares = known_ahead(running_source, 100)
    running_source.publish(AFTER_MS, LOW)
    newest = running_source.cluster.log(running_source.where).last_id
    assert newest is not None
    with pytest.raises(TopicRecreatedError, match="which is not stored any more"):
        compares.may_receive(running_source.where, [newest])
    assert running_source.backlog == 1


def test_a_process_that_stands_still_again_and_again_only_compares(
    make_rescaled: Callable[..., RescaledSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is known of the connections at any moment: everything is compared, nothing lost."""
    monkeypatch.setattr(identity_check, "CHECK_S", 0.0)
    rescaled = make_rescaled()
    rescaled.keep_publishing()
    rescaled.more(300)
    rescaled.check()


def test_entries_from_before_a_wipe_are_not_taken_by_an_opening_source() -> None:
    cluster = MemoryCluster()
    topic = cluster.create_topic("orders")
    where = TopicPartition(topic)
    ranges = split_ring(2)
    cluster.publish(topic, *(Message(b"old", key=key_in(one)) for one in ranges))
    wiped = threading.Lock()

    subscribes = ScriptedCall()

    def wipe_before_the_second(call: Fault, *what: Any) -> Any:
        with wiped:
            if len(subscribes.asked) == 1:
                cluster.wipe()
                cluster.create_topic("orders")
                cluster.publish(topic, *(Message(b"new", key=key_in(one)) for one in ranges))
            return subscribes(call, *what)

    broker = faulty(MemoryBroker(cluster), subscribe=wipe_before_the_second)
    opened = open_range_consumers(
        broker, None, config(topic, parallelism=2),
        [OwnedRange(where, i, one) for i, one in enumerate(ranges)], StartPosition.EARLIEST,
        make_queue=lambda: ReceiverQueueSize(2**20, 10),
    )  # fmt: skip
    came = [block.values for one in opened for block in one.consumer.receive(1_000)]
    assert came == [[b"new"], [b"new"]]
