"""Entries that the broker delivers again to the embedded runtime, and batches that run again."""

from __future__ import annotations

from collections import Counter

import pytest

from keyshard.broker.memory import Batching, MemoryBroker, MemoryConsumer, Message
from keyshard.broker.port import StartPosition, SubscriptionSpec
from keyshard.columns.entry_rows import only
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.position.checkpoint import Checkpoint, PartitionCheckpoint
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.ring.hash_range import HashRange
from keyshard.errors import DataLossTrimmedError, TopicRecreatedError
from tests.helpers import config, received, rows_of, running, started, wait_until
from tests.support.coordinated_topic import CoordinatedTopic, assert_in_order, cut, values
from tests.support.faulty_broker import Fault, faulty

pytestmark = pytest.mark.simulated(seeds=1)


@pytest.mark.parametrize("parallelism", [1, 3, 16])
def test_a_planned_batch_runs_again_the_same_under_another_parallelism(
    coordinated: CoordinatedTopic, parallelism: int
) -> None:
    coordinated.publish(60, batching=Batching.BY_KEY)
    with running(coordinated.cluster, coordinated.source) as first:
        received(first, 60)
        committed = cut(first, 15)
        before = values(rows_of(first, committed))
        first.batches.release(committed)
        wait_until(lambda: not first.status()["entriesToAcknowledge"])
        planned = cut(first, 15)
        rows = rows_of(first, planned)
    backlog = coordinated.backlog

    again = config(coordinated.topic, parallelism=parallelism)
    last: dict[str, int] = {}
    with running(coordinated.cluster, again, planned, planned=True) as second:
        wait_until(lambda: second.status()["duplicatesDropped"] >= len(values(rows)))
        wait_until(lambda: not second.status()["entriesToAcknowledge"])
        assert coordinated.backlog == backlog, (
            "redeliveries of a planned batch are not acknowledged"
        )
        second.consumers.shared.window.validate()
        assert rows_of(second, planned) == rows
        second.consumers.shared.window.validate()
        received(second, 60 - len(before) - len(values(rows)))
        second.batches.release(planned)
        assert_in_order(rows, last)
        rest: list[str] = []
        while (end := second.batches.cut(15)) is not None:
            assert end.ranges == parallelism
            found = rows_of(second, end)
            assert_in_order(found, last)
            rest += values(found)
            second.batches.release(end)
        wait_until(lambda: coordinated.backlog == 0)
    assert sorted(before + values(rows) + rest) == coordinated.all_values()


def test_committed_entries_that_come_again_are_dropped_and_acknowledged(
    coordinated: CoordinatedTopic,
) -> None:
    coordinated.publish(40)
    with running(coordinated.cluster, coordinated.source) as first:
        received(first, 40)
        end = cut(first)
    assert coordinated.backlog == 40, "the host committed, then the process was killed"

    with running(coordinated.cluster, coordinated.source, end) as second:
        assert second.newest.partitions == end.partitions, "it continues what was delivered"
        wait_until(lambda: coordinated.backlog == 0)
        assert second.batches.cut() is None
        assert second.status()["duplicatesDropped"] == 40
        assert second.status()["rowsReceived"] == 0
        coordinated.publish(3)
        received(second, 3)
        assert len(values(rows_of(second, cut(second)))) == 3


def test_a_reconnect_delivers_nothing_twice(coordinated: CoordinatedTopic) -> None:
    coordinated.publish(40)
    made: list[MemoryBroker] = []

    def connect() -> MemoryBroker:
        made.append(MemoryBroker(coordinated.cluster))
        return made[-1]

    coordinator = Coordinator(coordinated.source, connect)
    with started(coordinator):
        received(coordinator, 40)
        first = cut(coordinator, 20)
        made[0].disconnect()
        wait_until(lambda: coordinator.status()["duplicatesDropped"] >= 40)
        wait_until(lambda: not coordinator.status()["entriesToAcknowledge"])
        assert coordinated.backlog == 40, "what is held must not be acknowledged"
        got = values(rows_of(coordinator, first))
        coordinator.batches.release(first)
        second = cut(coordinator)
        got += values(rows_of(coordinator, second))
        coordinator.batches.release(second)
        assert coordinator.batches.cut() is None
        wait_until(lambda: coordinated.backlog == 0)
    assert sorted(got) == coordinated.all_values()


def test_acknowledgements_go_through_a_consumer_that_is_connected(
    coordinated: CoordinatedTopic,
) -> None:
    coordinated.publish(40)
    with running(coordinated.cluster, coordinated.source) as coordinator:
        received(coordinator, 40)
        end = cut(coordinator)
        for where in coordinated.where:
            range_consumer = coordinator.consumers.range_consumers.by_partition[where][0]
            assert isinstance(range_consumer.consumer, MemoryConsumer)
            range_consumer.consumer.drop()
        coordinator.batches.release(end)
        wait_until(lambda: coordinated.backlog == 0)


def _without_last(block: EntryBlock) -> EntryBlock:
    if block.batch_size != 3 or block.rows < 3:
        return block
    return only(block, frozenset(block.indices[:-1]))


def test_entries_that_stay_partial_are_delivered_and_replayed_in_part(
    coordinated: CoordinatedTopic,
) -> None:
    where = coordinated.where[0]
    for number in range(3):
        batch = [Message(b"%d-%d" % (number, i), key="k") for i in range(3)]
        coordinated.cluster.publish(where, *batch, batching=Batching.BY_KEY)
    coordinated.cluster.publish(where, Message(b"end", key="k"))
    subscribed: list[tuple[TopicPartition, HashRange]] = []

    def subscribe(call: Fault, spec: SubscriptionSpec, start: StartPosition) -> MemoryConsumer:
        """Another client acknowledged the last message of every batch of three."""
        subscribed.append((spec.topic_partition, spec.hash_range))
        return faulty(
            call(spec, start), receive=lambda call, ms: [_without_last(one) for one in call(ms)]
        )

    broker = faulty(MemoryBroker(coordinated.cluster), subscribe=subscribe)
    # A queue so small that no consumer subscribes again to get a larger one.
    source = config(coordinated.topic, receiver_queue_size=100)
    first = Coordinator(source, lambda: broker)
    with started(first):
        received(first, 7)
        end = cut(first)
        rows = rows_of(first, end)
        assert first.status()["rowsReceived"] == 7
    assert values(rows) == ["0-0", "0-1", "1-0", "1-1", "2-0", "2-1", "end"]
    assert [*end.partitions[where].partial.values()] == [frozenset({0, 1})] * 3
    assert sorted(Counter(subscribed).values()) == [1] * 7 + [4], (
        "each partial entry is asked about once"
    )

    with running(coordinated.cluster, coordinated.source, end, planned=True) as second:
        assert rows_of(second, end) == rows
        second.batches.release(end)
        wait_until(lambda: coordinated.backlog == 0)


def test_reused_entry_ids_stop_the_source_before_it_acknowledges(
    coordinated: CoordinatedTopic,
) -> None:
    coordinated.publish(4, publish_ms=2_000)
    resolved = {
        where: PartitionCheckpoint(
            delivered=EntrySet.of(first_ids(coordinated, where)), published_ms=1_999
        )
        for where in coordinated.where
    }
    with running(
        coordinated.cluster, coordinated.source, Checkpoint("", "unit", 4, resolved)
    ) as coordinator:
        with pytest.raises(TopicRecreatedError):
            coordinator.batches.wait_for_rows(10)
        with pytest.raises(TopicRecreatedError):
            coordinator.batches.cut()
    assert coordinated.backlog == 4


def first_ids(coordinated: CoordinatedTopic, where: TopicPartition) -> list[EntryId]:
    reader = MemoryBroker(coordinated.cluster).reader(where, EntryId(0, 0))
    blocks = reader.read(0)
    reader.close()
    return [at.id for at in blocks]


def test_a_planned_batch_with_trimmed_entries_is_data_loss(coordinated: CoordinatedTopic) -> None:
    coordinated.publish(20)
    with running(coordinated.cluster, coordinated.source) as first:
        received(first, 20)
        planned = cut(first)
    for where in coordinated.where:
        last = planned.partitions[where].batch.last
        assert last is not None
        coordinated.cluster.trim(where, before=last)
    with (
        running(coordinated.cluster, coordinated.source, planned, planned=True) as second,
        pytest.raises(DataLossTrimmedError),
    ):
        second.batches.plan(planned)
