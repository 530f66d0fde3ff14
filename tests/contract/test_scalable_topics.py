"""Contract: the segments of scalable topics, and the end of a sealed one."""

from __future__ import annotations

from contextlib import closing

import pytest

from keyshard.broker.port import Broker, Consumer, StartPosition
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.ring.hash_range import split_ring
from keyshard.core.subscription_state import SubscriptionState
from keyshard.core.topic_segments import SegmentGraph
from keyshard.errors import BrokerError, TopicNotFoundError
from keyshard.reading.segment_ledgers import first_stored, segment_ledgers
from tests.contract.contract_harness import (
    DEADLINE_S,
    SUBSCRIPTION,
    ScalableHarness,
    receive,
    subscribe,
)
from tests.helpers import wait_until


def segments_of(broker: Broker, topic: str) -> SegmentGraph:
    watch = broker.watch_segments(topic, lambda: None)
    watch.close()
    return watch.graph


def consumers_of(broker: Broker, where: TopicPartition) -> list[Consumer]:
    return [subscribe(broker, where, part) for part in split_ring(2)]


def publish(broker: Broker, where: TopicPartition, start: int, stop: int) -> None:
    with closing(broker.producer(where, send_timeout_ms=int(DEADLINE_S * 1_000))) as producer:
        for number in range(start, stop):
            producer.send(b"%d" % number, key=f"k{number}")


def test_the_segments_of_a_topic_share_all_hashes(scalable: ScalableHarness) -> None:
    topic = scalable.create_scalable(2)
    graph = segments_of(scalable.broker(), topic)
    found = [
        (number, one.first_hash, one.last_hash, one.is_sealed, one.parents)
        for number, one in sorted(graph.segments.items())
    ]
    assert found == [
        (0, 0x0000, 0x7FFF, False, frozenset()),
        (1, 0x8000, 0xFFFF, False, frozenset()),
    ]
    base = topic.removeprefix("topic://")
    assert [where.name for where in graph.partitions] == [
        f"segment://{base}/0000-7fff-0", f"segment://{base}/8000-ffff-1"
    ]  # fmt: skip


def test_a_missing_topic_is_reported_and_asking_creates_none(scalable: ScalableHarness) -> None:
    broker, missing = scalable.broker(), scalable.create_scalable(1) + "-missing"
    for _ in range(2):
        with pytest.raises(TopicNotFoundError, match="missing"):
            broker.watch_segments(missing, lambda: None)


def test_the_scalable_topics_of_a_namespace_come_without_its_other_topics(
    scalable: ScalableHarness,
) -> None:
    mine, admin = {scalable.create_scalable(1), scalable.create_scalable(2)}, scalable.admin()
    persistent = scalable.create_topic()
    tenant, namespace, _ = persistent.removeprefix("persistent://").split("/")

    def found() -> set[str]:
        return admin.scalable_topics(tenant, namespace) or set()

    wait_until(lambda: mine <= found())
    assert all(name.startswith("topic://") for name in found())
    assert not mine & admin.topics(tenant, namespace)
    assert namespace in admin.namespaces(tenant)
    gone = min(mine)
    scalable.delete_scalable(gone)
    wait_until(lambda: mine & found() == mine - {gone})


def test_scalable_topics_are_reported_when_they_are_created_or_deleted(
    scalable: ScalableHarness,
) -> None:
    topic, broker = scalable.create_scalable(1), scalable.broker()
    reported: list[str] = []
    watch = broker.watch_topics(f"{topic.rpartition('/')[0]}/contract-", reported.extend)
    of_topic: list[str] = []
    exact = broker.watch_topics(topic, of_topic.extend)
    assert watch is not None
    assert exact is not None
    assert of_topic == [], "what exists is not reported"
    persistent, new = scalable.create_topic(), scalable.create_scalable(2)
    wait_until(lambda: new in reported)
    scalable.split(new, 0)
    scalable.delete_scalable(topic)
    wait_until(lambda: of_topic == [topic])
    scalable.create_again_scalable(topic)
    wait_until(lambda: of_topic == [topic, topic])
    wait_until(lambda: reported.count(topic) == 2)
    assert persistent not in reported
    assert not any(name.startswith("segment://") for name in reported)
    exact.close()
    wait_until(lambda: not exact.is_open)
    scalable.delete_scalable(topic)
    wait_until(lambda: reported.count(topic) == 3)
    assert of_topic == [topic, topic], "it was closed"
    assert watch.is_open
    broker.close()
    wait_until(lambda: not watch.is_open)


def test_splits_and_merges_are_reported_with_parents(scalable: ScalableHarness) -> None:
    topic, broker = scalable.create_scalable(1), scalable.broker()
    reports: list[None] = []
    watch = broker.watch_segments(topic, lambda: reports.append(None))
    first = watch.graph
    scalable.split(topic, 0)
    wait_until(lambda: len(watch.graph.segments) == 3)
    assert reports
    split = watch.graph
    assert [split.segments[number].is_sealed for number in (0, 1, 2)] == [True, False, False]
    assert split.segments[1].parents == split.segments[2].parents == {0}
    assert split.parents == {split.partition(child): {split.partition(0)} for child in (1, 2)}
    scalable.merge(topic, 1, 2)
    wait_until(lambda: len(watch.graph.segments) == 4)
    merged = watch.graph.segments[3]
    assert (merged.first_hash, merged.last_hash, merged.parents) == (0, 0xFFFF, {1, 2})
    assert first.precedes(split)
    assert split.precedes(watch.graph)
    assert not watch.graph.precedes(split)
    assert segments_of(broker, topic) == watch.graph, "a later look sees the same"


def test_a_deleted_topic_is_missed_by_the_next_look(scalable: ScalableHarness) -> None:
    """The broker reports nothing to a watch that is open."""
    topic, broker = scalable.create_scalable(1), scalable.broker()
    watch = broker.watch_segments(topic, lambda: None)
    scalable.delete_scalable(topic)
    with pytest.raises(TopicNotFoundError):
        broker.watch_segments(topic, lambda: None)
    watch.close()


def test_a_watch_ends_with_its_connection(scalable: ScalableHarness) -> None:
    topic, broker = scalable.create_scalable(1), scalable.broker()
    closed, standing = (broker.watch_segments(topic, lambda: None) for _ in range(2))
    closed.close()
    wait_until(lambda: not closed.is_open)
    assert standing.is_open
    broker.close()
    wait_until(lambda: not standing.is_open)


def test_a_topic_that_was_created_again_does_not_follow_the_deleted_one(
    scalable: ScalableHarness,
) -> None:
    topic, broker = scalable.create_scalable(1), scalable.broker()
    scalable.split(topic, 0)
    deleted = segments_of(broker, topic)
    assert len(deleted.segments) == 3
    scalable.delete_scalable(topic)
    scalable.create_again_scalable(topic)
    assert not segments_of(broker, topic).precedes(deleted)


def test_the_backlog_of_a_sealed_segment_ends_while_its_successors_take_messages(
    scalable: ScalableHarness,
) -> None:
    topic, broker, admin = scalable.create_scalable(1), scalable.broker(), scalable.admin()
    where = segments_of(broker, topic).partition(0)
    consumers = consumers_of(broker, where)
    publish(broker, where, 0, 20)
    received = receive(consumers, 20)
    scalable.split(topic, 0)
    consumers[0].acknowledge(received.ids[1:])
    graph = segments_of(broker, topic)
    children = [subscribe(broker, graph.partition(number)) for number in (1, 2)]
    publish(broker, graph.partition(1), 20, 30)
    assert len(receive(children, 10).values) == 10

    def backlog(number: int) -> int:
        stats = admin.subscription(graph.partition(number), SUBSCRIPTION)
        assert stats is not None
        return int(stats["msgBacklog"])

    wait_until(lambda: backlog(0) == 1)
    assert [backlog(number) for number in (1, 2)] == [10, 0]
    consumers[0].acknowledge(received.ids[:1])
    wait_until(lambda: backlog(0) == 0)
    for one in consumers:
        one.close()
    scalable.split(topic, 1)
    assert backlog(0) == 0, "it stays so"


def test_a_registered_subscription_has_new_segments_from_their_beginning(
    scalable: ScalableHarness,
) -> None:
    topic, broker, admin = scalable.create_scalable(1), scalable.broker(), scalable.admin()
    where = segments_of(broker, topic).partition(0)
    subscribe(broker, where, start=StartPosition.LATEST).close()
    for _ in range(2):
        admin.register(topic, SUBSCRIPTION)
    scalable.split(topic, 0)
    scalable.split(topic, 1)
    graph = segments_of(broker, topic)
    for number in (2, 3):
        publish(broker, graph.partition(number), 10 * number, 10 * number + 5)
        found = subscribe(broker, graph.partition(number), start=StartPosition.LATEST)
        assert len(receive([found], 5).values) == 5


def test_to_register_keeps_a_subscription_where_it_is(scalable: ScalableHarness) -> None:
    topic, broker, admin = scalable.create_scalable(1), scalable.broker(), scalable.admin()
    where = segments_of(broker, topic).partition(0)
    publish(broker, where, 0, 5)
    late = subscribe(broker, where, start=StartPosition.LATEST)
    admin.register(topic, SUBSCRIPTION)
    publish(broker, where, 5, 8)
    assert receive([late], 3).values == [b"5", b"6", b"7"]


def test_a_missing_topic_registers_nothing(scalable: ScalableHarness) -> None:
    missing = scalable.create_scalable(1) + "-missing"
    with pytest.raises(TopicNotFoundError, match="-missing does not exist"):
        scalable.admin().register(missing, SUBSCRIPTION)
    with pytest.raises(TopicNotFoundError):
        scalable.broker().watch_segments(missing, lambda: None)


def test_statistics_of_a_segment_name_its_consumers_and_count_its_backlog(
    scalable: ScalableHarness,
) -> None:
    topic, broker, admin = scalable.create_scalable(2), scalable.broker(), scalable.admin()
    first, other = segments_of(broker, topic).partitions
    consumers = consumers_of(broker, first)
    publish(broker, first, 0, 10)
    received = receive(consumers, 10)
    consumers[0].acknowledge(received.ids[:4])

    def state() -> SubscriptionState:
        stats = admin.subscription(first, SUBSCRIPTION, oldest=True)
        assert stats is not None
        return SubscriptionState.from_stats(stats)

    wait_until(lambda: (state().backlog, state().unacknowledged) == (6, 6))
    found, (lower, upper) = state(), split_ring(2)
    assert SubscriptionState.from_stats(admin.subscriptions(first)[SUBSCRIPTION]) == found
    assert (found.kind, found.blocked) == ("Key_Shared", False)
    assert all(one.permits > 0 and one.address for one in found.consumers)
    assert not found.lacks(lower, f"range-{lower}")
    assert not found.lacks(upper, f"range-{upper}")
    assert found.lacks(upper, "another name")
    consumers[1].close()
    wait_until(lambda: state().lacks(upper, f"range-{upper}"))
    assert not state().lacks(lower, f"range-{lower}")
    assert admin.subscription(other, SUBSCRIPTION) is None
    assert admin.subscriptions(other) == {}


def test_what_the_broker_does_not_report_of_a_segment_is_unknown(
    scalable: ScalableHarness,
) -> None:
    topic, broker, admin = scalable.create_scalable(1), scalable.broker(), scalable.admin()
    (where,) = segments_of(broker, topic).partitions
    consumer = subscribe(broker, where)
    publish(broker, where, 0, 3)
    receive([consumer], 3)
    state = SubscriptionState.from_stats(admin.subscriptions(where)[SUBSCRIPTION])
    assert [one.ranges for one in state.consumers] == [None]
    assert (state.sticky, state.in_replay, state.ack_gaps) == (None, None, None)
    assert (state.delayed, state.delivered, state.oldest_ms) == (None, None, None)
    assert admin.broker_state(where, SUBSCRIPTION) is None
    assert (admin.ledgers(where), admin.placed_ledgers(where), admin.offloads(where)) == (None,) * 3
    assert (admin.last_written(where), admin.held_back_behind(where)) == (None, None)
    assert admin.position_at(where, 0) is None
    assert not admin.set_property(where, SUBSCRIPTION, "a", "b")


def test_a_segment_has_a_creation_time_until_it_is_deleted(scalable: ScalableHarness) -> None:
    topic, broker, admin = scalable.create_scalable(1), scalable.broker(), scalable.admin()
    (where,) = segments_of(broker, topic).partitions
    created = admin.created(where)
    scalable.split(topic, 0)
    subscribe(broker, where)
    assert admin.created(where) == created
    scalable.delete_scalable(topic)
    with pytest.raises(BrokerError):
        admin.created(where)
    assert admin.subscription(where, SUBSCRIPTION) is None


def test_limits_of_a_scalable_topic_are_those_of_its_namespace(scalable: ScalableHarness) -> None:
    topic, admin = scalable.create_scalable(1), scalable.admin()
    (where,) = segments_of(scalable.broker(), topic).partitions
    for name in (topic, where.topic):
        assert admin.consumer_limits(name) == (0, 0)
        assert admin.unacknowledged_limits(name) == (50_000, 200_000)
        assert admin.retention_min(name) == 0


def test_readers_show_where_the_ledgers_of_a_segment_end(scalable: ScalableHarness) -> None:
    topic, broker, admin = scalable.create_scalable(1), scalable.broker(), scalable.admin()
    where = segments_of(broker, topic).partition(0)
    subscribe(broker, where).close()  # The broker deletes ledgers that no subscription needs.
    assert segment_ledgers(broker, admin, where, DEADLINE_S) == ()
    counts = [10, 7, 5]
    for count in counts:
        publish(broker, where, 0, count)
        scalable.roll_segments(topic)
    found = segment_ledgers(broker, admin, where, DEADLINE_S)
    assert [one.entries for one in found] == counts
    assert all(one.size_bytes > 0 for one in found)
    assert first_stored(broker, where, DEADLINE_S) == EntryId(found[0].id, 0)
    scalable.split(topic, 0)
    assert segment_ledgers(broker, admin, where, DEADLINE_S) == found, "as before the split"


def test_the_storage_of_a_segment_has_a_size_and_a_creation_time(
    scalable: ScalableHarness,
) -> None:
    topic, broker, admin = scalable.create_scalable(1), scalable.broker(), scalable.admin()
    where = segments_of(broker, topic).partition(0)
    created = admin.created(where)
    subscribe(broker, where).close()
    publish(broker, where, 0, 10)
    scalable.roll_segments(topic)
    assert (admin.stored_bytes(where) or 0) > 0
    assert admin.created(where) == created
    scalable.delete_scalable(topic)
    assert admin.stored_bytes(where) is None
    scalable.create_again_scalable(topic)
    assert admin.created(where) != created


def test_a_reader_of_a_deleted_segment_says_that_it_is_missing(scalable: ScalableHarness) -> None:
    topic, broker = scalable.create_scalable(1), scalable.broker()
    where = segments_of(broker, topic).partition(0)
    scalable.delete_scalable(topic)
    with pytest.raises(TopicNotFoundError):
        first_stored(broker, where, DEADLINE_S)


def test_the_backlog_of_a_topic_is_that_of_all_its_segments(scalable: ScalableHarness) -> None:
    topic, broker, admin = scalable.create_scalable(1), scalable.broker(), scalable.admin()

    def backlog() -> int | None:
        stats = admin.subscription(TopicPartition(topic), SUBSCRIPTION)
        return None if stats is None else int(stats["msgBacklog"])

    assert backlog() is None
    admin.register(topic, SUBSCRIPTION)
    publish(broker, segments_of(broker, topic).partition(0), 0, 5)
    scalable.split(topic, 0)
    graph = segments_of(broker, topic)
    for number in (1, 2):
        publish(broker, graph.partition(number), 5, 8)
    assert backlog() == 5 + 2 * 3
