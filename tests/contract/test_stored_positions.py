"""Contract: stored entries and positions of times, in the admin interface."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping

import pytest

from keyshard.broker.admin.port import BEGINS_PROPERTY, Admin
from keyshard.broker.memory import Batching, Message
from keyshard.core.message import MessageId
from keyshard.core.position.entry import EntryId, TopicPartition
from tests.contract.contract_harness import SUBSCRIPTION, Harness, read_to_end, receive, subscribe

T0 = 1_700_000_000_000


def test_ledgers_are_reported_with_their_entries_and_bytes(harness: Harness) -> None:
    where = TopicPartition(harness.create_topic(2), 1)
    admin = harness.admin()
    for count in (3, 2):
        harness.publish(where.name, [Message(b"m" * 100, key="k")] * count)
        harness.roll_ledger(where)
    harness.publish(where.name, [Message(b"m" * 100, key="k")])
    ledgers = [ledger for ledger in admin.ledgers(where) or () if ledger.entries]
    assert [ledger.entries for ledger in ledgers] == [3, 2, 1]
    assert [ledger.id for ledger in ledgers] == sorted(ledger.id for ledger in ledgers)
    for ledger in ledgers:
        assert 100 * ledger.entries <= ledger.size_bytes < 400 * ledger.entries
    ids = read_to_end(harness.broker().reader(where, EntryId(0, 0))).ids
    assert ids == [EntryId(one.id, entry) for one in ledgers for entry in range(one.entries)]


def test_an_empty_topic_partition_has_no_entries_and_no_topic_has_no_ledgers(
    harness: Harness,
) -> None:
    where = TopicPartition(harness.create_topic())
    admin = harness.admin()
    assert sum(ledger.entries for ledger in admin.ledgers(where) or ()) == 0
    nowhere = TopicPartition(f"{where.topic}-no")
    assert admin.ledgers(nowhere) is None
    assert admin.position_at(nowhere, T0) is None


def test_the_last_entry_that_was_written_is_reported(harness: Harness) -> None:
    where = TopicPartition(harness.create_topic())
    admin = harness.admin()
    assert admin.last_written(TopicPartition(f"{where.topic}-no")) is None
    (empty,) = admin.ledgers(where) or ()
    assert admin.last_written(where) == EntryId(empty.id, -1)
    harness.publish(where.name, [Message(b"m", key="k")] * 3)
    (ledger,) = (one for one in admin.ledgers(where) or () if one.entries)
    last = EntryId(ledger.id, 2)
    assert admin.last_written(where) == last
    harness.roll_ledger(where)
    assert admin.last_written(where) == last


def test_the_ledger_list_counts_each_published_entry_at_once(harness: Harness) -> None:
    where = TopicPartition(harness.create_topic())
    admin = harness.admin()
    for count in range(1, 4):
        harness.publish(where.name, [Message(b"m", key="k")])
        assert [one.entries for one in admin.ledgers(where) or ()][-1] == count


@pytest.mark.parametrize("rolled", [False, True])
def test_in_order_a_time_is_at_the_first_entry_that_is_not_earlier(
    harness: Harness, rolled: bool
) -> None:
    where, admin = TopicPartition(harness.create_topic()), harness.admin()
    times = [T0 + 10 * number for number in range(8)]
    harness.publish_at(where.name, times[:4])
    if rolled:
        harness.roll_ledger(where)
    harness.publish_at(where.name, times[4:])
    ids = read_to_end(harness.broker().reader(where, EntryId(0, 0))).ids
    for time_ms, entry_id in zip(times, ids, strict=True):
        assert admin.position_at(where, time_ms) == entry_id
        assert admin.position_at(where, time_ms - 9) == entry_id
    at_zero = EntryId(-1, -1) if harness.release.zero_is_before_all else ids[0]
    assert admin.position_at(where, 0) == at_zero
    assert admin.position_at(where, 1) == ids[0]
    assert admin.position_at(where, T0 - 10**9) == ids[0]
    behind = admin.position_at(where, times[-1] + 1)
    assert behind == EntryId(ids[-1].ledger, ids[-1].entry + 1)
    assert admin.position_at(where, 2**53) == behind


@pytest.mark.parametrize("seed", range(4))
def test_out_of_order_a_time_is_after_an_earlier_entry_and_at_one_not_earlier(
    harness: Harness, seed: int
) -> None:
    """A plan of a read may rely only on the two entries beside a position."""
    where, admin = TopicPartition(harness.create_topic()), harness.admin()
    random_one = random.Random(seed)
    times = [T0 + random_one.randrange(100) for _ in range(12)]
    harness.publish_at(where.name, times[:7])
    harness.roll_ledger(where)
    harness.publish_at(where.name, times[7:])
    received = read_to_end(harness.broker().reader(where, EntryId(0, 0)))
    assert [block.publish_ms for block in received.blocks] == times
    misleading = 0
    for time_ms in range(T0 - 1, T0 + 102, 3):
        at = admin.position_at(where, time_ms)
        assert at is not None
        before = [block.publish_ms for block in received.blocks if block.id < at]
        behind = [block.publish_ms for block in received.blocks if block.id >= at]
        assert not before or before[-1] < time_ms
        assert not behind or behind[0] >= time_ms
        misleading += any(one < time_ms for one in behind)
        misleading += any(one >= time_ms for one in before)
    assert misleading, "in no case an entry lies on the other side"


def test_publish_times_are_those_of_the_producer(harness: Harness) -> None:
    where = TopicPartition(harness.create_topic())
    times = [T0, 1, T0 * 2, T0 - 1]
    harness.publish_at(where.name, times)
    received = read_to_end(harness.broker().reader(where, EntryId(0, 0)))
    assert list(itertools.chain(*([one.publish_ms] * one.rows for one in received.blocks))) == times


def test_a_subscription_is_created_where_it_begins_and_only_once(harness: Harness) -> None:
    where, admin = TopicPartition(harness.create_topic()), harness.admin()
    harness.publish(where.name, [Message(b"m", key="k")] * 4)
    harness.roll_ledger(where)
    harness.publish(where.name, [Message(b"m", key="k")] * 3)
    first, second = (ledger.id for ledger in admin.ledgers(where) or () if ledger.entries)
    places = [(first, 0, 7), (first, 2, 5), (first, 4, 3), (second, 0, 3), (second, 2, 1),
              (second, 3, 0), (second + 9, 0, 0), (first - 1, 5, 7)]  # fmt: skip
    for number, (ledger, entry, entries) in enumerate(places):
        name = f"{SUBSCRIPTION}-{number}"
        assert admin.begin(where, name, MessageId(ledger, entry, 0))
        assert not admin.begin(where, name, MessageId(first, 0, 1)), "it stays as it is"
        assert begins_inside(admin, where, name) is None
        assert harness.backlog(where, name) == entries
    assert admin.begin(where, SUBSCRIPTION, MessageId(second, 3, 0))
    consumer = subscribe(harness.broker(), where)
    harness.publish(where.name, [Message(b"next", key="k")])
    assert receive([consumer], 1).values == [b"next"]


def begins_inside(admin: Admin, where: TopicPartition, subscription: str) -> str | None:
    found = admin.subscription(where, subscription)
    assert found is not None
    properties: Mapping[str, str] = found["subscriptionProperties"]
    return properties.get(BEGINS_PROPERTY)


def test_a_start_inside_a_batch_stays_a_property_of_its_subscription(
    harness: Harness,
) -> None:
    where, admin = TopicPartition(harness.create_topic()), harness.admin()
    key = Message(b"m", key="k")
    harness.publish(where.name, [key])
    harness.publish(where.name, [key] * 5, Batching.BY_KEY)
    (ledger,) = (ledger.id for ledger in admin.ledgers(where) or () if ledger.entries)
    assert admin.begin(where, SUBSCRIPTION, MessageId(ledger, 1, 3))
    assert begins_inside(admin, where, SUBSCRIPTION) == f"{ledger}:1:3"
    assert harness.backlog(where, SUBSCRIPTION) == 1
    # The broker itself begins with the whole entry.
    consumer = subscribe(harness.broker(), where)
    assert receive([consumer], 5).values == [b"m"] * 5
    consumer.acknowledge([EntryId(ledger, 1)])
    consumer.close()
    harness.unload(where)
    assert begins_inside(admin, where, SUBSCRIPTION) == f"{ledger}:1:3"
    assert admin.set_property(where, SUBSCRIPTION, "a", "1=2, ü")
    for _ in range(2):
        assert admin.set_property(where, SUBSCRIPTION, BEGINS_PROPERTY, None)
        assert begins_inside(admin, where, SUBSCRIPTION) is None
    harness.unload(where)
    found = admin.subscription(where, SUBSCRIPTION)
    assert found is not None
    assert found["subscriptionProperties"] == {"a": "1=2, ü"}
    assert not admin.set_property(where, "nobody", "a", "1")
