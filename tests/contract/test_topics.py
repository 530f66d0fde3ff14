"""Contract: topics that grow and are deleted, also in the admin interface."""

from __future__ import annotations

import pytest

from keyshard.broker.memory import Message
from keyshard.core.position.entry import TopicPartition
from keyshard.core.ring.hash_range import split_ring
from keyshard.errors import AdminError, BrokerError
from tests.contract.contract_harness import SUBSCRIPTION, Harness, receive, subscribe
from tests.helpers import wait_until


def namespace_of(topic: str) -> tuple[str, str]:
    tenant, namespace, _ = topic.removeprefix("persistent://").split("/")
    return tenant, namespace


def test_new_partitions_have_the_subscription_from_their_beginning(harness: Harness) -> None:
    topic, broker = harness.create_topic(partitions=2), harness.broker()
    for where in broker.partitions(topic):
        subscribe(broker, where)
    harness.grow_topic(topic, 3)
    assert broker.partitions(topic) == tuple(TopicPartition(topic, i) for i in range(3))
    assert harness.admin().partition_count(topic) == 3
    new = TopicPartition(topic, 2)
    harness.publish(new.name, [Message(b"early", key="k")])
    assert receive([subscribe(broker, new)], 1).values == [b"early"]


def test_partition_counts_distinguish_missing_plain_and_partitioned_topics(
    harness: Harness,
) -> None:
    admin = harness.admin()
    topic = harness.create_topic(partitions=4)
    assert admin.partition_count(topic) == 4
    assert admin.partition_count(f"{topic}-partition-3") == 0, "a topic by itself"
    assert admin.partition_count(harness.create_topic()) == 0
    assert admin.partition_count("persistent://public/default/contract-missing") is None


def test_a_request_that_fails_does_not_spoil_the_next_one(harness: Harness) -> None:
    admin = harness.admin()
    missing = TopicPartition("persistent://public/default/contract-missing")
    for _ in range(30):
        with pytest.raises(BrokerError):
            admin.created(missing)
        assert admin.partition_count(missing.topic) is None


def test_topics_are_reported_when_they_are_created_or_deleted(harness: Harness) -> None:
    broker, known = harness.broker(), harness.create_topic(partitions=2)
    namespace = known.rpartition("/")[0] + "/"
    reported: list[str] = []
    watch = broker.watch_topics(f"{namespace}contract-", reported.extend)
    of_known: list[str] = []
    exact = broker.watch_topics(known, of_known.extend)
    assert (watch is not None) is (exact is not None) is harness.reports_topics
    if watch is None or exact is None:
        return
    plain = harness.create_topic()
    wait_until(lambda: plain in reported)
    harness.grow_topic(known, 3)
    wait_until(lambda: f"{known}-partition-2" in reported)
    wait_until(lambda: of_known == [f"{known}-partition-2"])
    reported.clear()
    harness.delete_topic(plain)
    wait_until(lambda: plain in reported)
    exact.close()
    wait_until(lambda: not exact.is_open)
    assert watch.is_open
    broker.close()
    wait_until(lambda: not watch.is_open)
    assert of_known == [f"{known}-partition-2"]


def test_the_topics_of_a_namespace_come_without_their_partitions(harness: Harness) -> None:
    mine = {harness.create_topic(partitions=2), harness.create_topic()}
    found = harness.admin().topics(*namespace_of(min(mine)))
    assert mine <= found
    assert not any(name.endswith("-partition-0") for name in found)


def test_the_namespaces_of_a_tenant_come_without_it(harness: Harness) -> None:
    tenant, namespace = namespace_of(harness.create_topic())
    assert namespace in harness.admin().namespaces(tenant)
    with pytest.raises(AdminError, match="no-such-tenant"):
        harness.admin().namespaces("no-such-tenant")


@pytest.mark.parametrize("partitions", [0, 2])
def test_consumers_bring_a_deleted_topic_back_and_the_rest_can_be_removed(
    harness: Harness, partitions: int
) -> None:
    if partitions and harness.release.partitions_need_topic:
        pytest.skip("the broker refuses a partition of a deleted topic")
    topic, broker, admin = harness.create_topic(partitions), harness.broker(), harness.admin()
    wheres = broker.partitions(topic)
    harness.publish(topic, [Message(b"%d" % i, key=f"k{i}") for i in range(20)])
    consumers = [subscribe(broker, where, part) for where in wheres for part in split_ring(2)]
    assert len(receive(consumers, 20).values) == 20
    created = admin.created(wheres[0])
    assert not any(admin.remove_leftover(where, SUBSCRIPTION) for where in wheres), "in use"

    harness.delete_topic(topic)
    wait_until(lambda: all(consumer.is_connected() for consumer in consumers))
    wait_until(lambda: all(admin.subscription(where, SUBSCRIPTION) for where in wheres))
    assert broker.partitions(topic) == (TopicPartition(topic),), "its metadata is gone for good"
    assert admin.created(wheres[0]) != created
    assert admin.partition_count(topic) == (0 if not partitions else None)
    assert [harness.backlog(where) for where in wheres] == [0] * len(wheres)
    for consumer in consumers:
        consumer.close()
    for where in wheres:
        assert admin.remove_leftover(where, "other") is False, "it is not ours"
        assert admin.remove_leftover(where, SUBSCRIPTION) is True
        assert admin.remove_leftover(where, SUBSCRIPTION) is True, "idempotent"
        assert admin.subscription(where, SUBSCRIPTION) is None
        with pytest.raises(BrokerError):
            admin.created(where)
    assert admin.partition_count(topic) is None


def test_a_partition_of_a_deleted_topic_is_gone_until_the_topic_is_back(harness: Harness) -> None:
    if not harness.release.partitions_need_topic:
        pytest.skip("a consumer brings the partition back")
    topic, broker, admin = harness.create_topic(1), harness.broker(), harness.admin()
    where = TopicPartition(topic, 0)
    old = subscribe(broker, where)
    harness.publish(topic, [Message(b"old", key="k")])
    assert receive([old], 1).values == [b"old"]
    harness.delete_topic(topic)
    wait_until(lambda: not old.is_connected())
    with pytest.raises(BrokerError):
        subscribe(broker, where)
    assert admin.subscription(where, SUBSCRIPTION) is None
    assert admin.ledgers(where) is None
    assert admin.partition_count(topic) is None
    assert admin.remove_leftover(where, SUBSCRIPTION) is True
    old.close()
    harness.create_again(topic, 1)
    harness.publish(topic, [Message(b"new", key="k")])
    assert receive([subscribe(broker, where)], 1).values == [b"new"]


def test_a_leftover_that_holds_messages_stays(harness: Harness) -> None:
    topic, broker, admin = harness.create_topic(), harness.broker(), harness.admin()
    where = TopicPartition(topic)
    subscribe(broker, where).close()
    harness.publish(topic, [Message(b"kept", key="k")])
    harness.close_producers()
    assert admin.remove_leftover(where, SUBSCRIPTION) is False
    assert harness.backlog(where) == 1


def test_a_leftover_with_another_subscription_stays(harness: Harness) -> None:
    where, broker = TopicPartition(harness.create_topic()), harness.broker()
    subscribe(broker, where).close()
    assert harness.admin().remove_leftover(where, "another") is False
    assert harness.admin().remove_leftover(where, SUBSCRIPTION) is True


def test_a_topic_without_a_subscription_is_not_judged_yet(harness: Harness) -> None:
    """The broker is deleting it, or a consumer that comes back is just creating it."""
    where, broker = TopicPartition(harness.create_topic()), harness.broker()
    assert harness.admin().remove_leftover(where, SUBSCRIPTION) is None
    subscribe(broker, where).close()
    assert harness.admin().remove_leftover(where, SUBSCRIPTION) is True


def test_the_creation_time_outlives_a_change_of_the_broker(harness: Harness) -> None:
    topic, admin = harness.create_topic(), harness.admin()
    harness.publish(topic, [Message(b"x", key="k")])
    created = admin.created(TopicPartition(topic))
    harness.roll_ledger(TopicPartition(topic))
    harness.publish(topic, [Message(b"y", key="k")])
    assert admin.created(TopicPartition(topic)) == created


def test_statistics_name_backlog_and_consumers(harness: Harness) -> None:
    topic, broker, admin = harness.create_topic(), harness.broker(), harness.admin()
    where = TopicPartition(topic)
    assert admin.subscription(where, SUBSCRIPTION) is None
    consumer = subscribe(broker, where)
    harness.publish(topic, [Message(b"x", key="k")])
    receive([consumer], 1)
    stats = admin.subscription(where, SUBSCRIPTION)
    assert stats is not None
    assert (stats["msgBacklog"], len(stats["consumers"])) == (1, 1)


def test_a_missing_topic_is_reported_and_asking_creates_nothing(harness: Harness) -> None:
    plain, parted = harness.create_topic(), harness.create_topic(partitions=2)
    there = [plain, parted, f"{parted}-partition-1"]
    typing_error = [f"{plain}-typo", f"{parted}s"]
    broker = harness.broker()
    before = harness.admin().topics("public", "default")
    assert broker.missing([*there, *typing_error]) == set(typing_error)
    assert broker.missing(()) == frozenset()
    assert harness.admin().topics("public", "default") == before
