"""Contract: messages that shared subscriptions get later.

The source of the rules is Pulsar's ``InMemoryDelayedDeliveryTracker``.
"""

from __future__ import annotations

import time
from dataclasses import replace

from keyshard.broker.memory import Batching, Message
from keyshard.broker.port import ReadOptions
from keyshard.columns.content import content_columns
from keyshard.core.metadata_columns import DELIVER_AT
from keyshard.core.position.entry import EntryId, TopicPartition
from tests.contract.contract_harness import (
    SUBSCRIPTION,
    Harness,
    Received,
    read_to_end,
    receive,
    receive_until_idle,
    subscribe,
)
from tests.helpers import present, wait_until

FIRST = EntryId(0, 0)


def messages(*late: int, count: int, due_ms: int) -> list[Message]:
    """Messages of one key, some of them delayed; each value is its number."""
    plain = [Message(b"%d" % number, key="k") for number in range(count)]
    return [
        replace(one, deliver_at_ms=due_ms) if number in late else one
        for number, one in enumerate(plain)
    ]


def due(harness: Harness) -> int:
    """A time that is not reached soon, milliseconds since the epoch."""
    return time.time_ns() // 1_000_000 + harness.delay_ms


def delayed(harness: Harness, where: TopicPartition) -> int:
    """The broker's count of delayed messages."""
    stats = present(harness.admin().subscription(where, SUBSCRIPTION))
    return int(stats["msgDelayed"])


def test_a_delayed_message_is_overtaken_by_its_key_and_comes_when_it_is_due(
    harness: Harness,
) -> None:
    where, due_ms = TopicPartition(harness.create_topic()), due(harness)
    consumer = subscribe(harness.broker(), where)
    harness.publish(where.name, messages(1, count=4, due_ms=due_ms))
    assert receive([consumer], 3).values == [b"0", b"2", b"3"]
    harness.pass_time(due_ms)
    assert receive([consumer], 1).values == [b"1"]


def test_a_message_whose_time_has_passed_keeps_its_place(harness: Harness) -> None:
    where = TopicPartition(harness.create_topic())
    consumer = subscribe(harness.broker(), where)
    harness.publish(where.name, [Message(b"first", key="another", deliver_at_ms=1_000)])
    assert receive([consumer], 1).values == [b"first"]
    harness.publish(where.name, messages(1, count=3, due_ms=1_000))
    assert receive([consumer], 3).values == [b"0", b"1", b"2"]


def test_the_first_message_with_a_time_that_has_passed_may_come_last(harness: Harness) -> None:
    where, broker = TopicPartition(harness.create_topic()), harness.broker()
    subscribe(broker, where).close()
    harness.publish(where.name, messages(1, count=4, due_ms=1_000))
    order = receive([subscribe(broker, where)], 4).values
    late = harness.release.first_delayed_waits
    assert order == ([b"0", b"2", b"3", b"1"] if late else [b"0", b"1", b"2", b"3"])


def test_a_delayed_message_is_an_entry_of_its_own(harness: Harness) -> None:
    where, due_ms = TopicPartition(harness.create_topic()), due(harness)
    broker = harness.broker()
    consumer = subscribe(broker, where)
    harness.publish(where.name, messages(2, count=4, due_ms=due_ms), Batching.BY_KEY)
    early = receive([consumer], 3)
    assert early.values == [b"0", b"1", b"3"]
    stored = read_to_end(broker.reader(where, FIRST))
    (alone,) = (block for block in stored.blocks if b"2" in block.values)
    assert (alone.values, alone.batched) == ([b"2"], False)


def test_a_reader_gets_delayed_messages_at_once_with_their_time(harness: Harness) -> None:
    where, due_ms = TopicPartition(harness.create_topic()), due(harness)
    harness.publish(where.name, messages(1, count=3, due_ms=due_ms))
    how = ReadOptions(columns=content_columns([DELIVER_AT]))
    found = read_to_end(harness.broker().reader(where, FIRST, how))
    assert found.values == [b"0", b"1", b"2"]
    time_s = None if DELIVER_AT in harness.not_handed_out else due_ms / 1_000
    times = [time for block in found.blocks for time in block.column(DELIVER_AT)]
    assert [time and time.timestamp() for time in times] == [None, time_s, None]


def test_delayed_messages_are_backlog_and_are_counted(harness: Harness) -> None:
    where, due_ms = TopicPartition(harness.create_topic()), due(harness)
    consumer = subscribe(harness.broker(), where)
    harness.publish(where.name, messages(0, 2, count=4, due_ms=due_ms))
    consumer.acknowledge(receive([consumer], 2).ids)
    wait_until(lambda: harness.backlog(where) == 2)
    assert delayed(harness, where) == 2
    harness.pass_time(due_ms)
    consumer.acknowledge(receive([consumer], 2).ids)
    wait_until(lambda: harness.backlog(where) == 0)
    assert delayed(harness, where) == 0


def test_after_a_reconnect_a_delayed_message_still_waits(harness: Harness) -> None:
    where, due_ms = TopicPartition(harness.create_topic()), due(harness)
    consumer = subscribe(harness.broker(), where)
    harness.publish(where.name, messages(1, count=3, due_ms=due_ms))
    assert receive([consumer], 2).values == [b"0", b"2"]
    harness.drop_connections(where)
    again = Received()
    receive_until_idle([consumer], again, harness.idle_s / 2, at_least=2)
    assert again.values == [b"0", b"2"]
    harness.pass_time(due_ms)
    assert receive([consumer], 1).values == [b"1"]


def test_a_delayed_message_that_is_acknowledged_early_never_comes(harness: Harness) -> None:
    where, due_ms = TopicPartition(harness.create_topic()), due(harness)
    broker = harness.broker()
    consumer = subscribe(broker, where)
    harness.publish(where.name, messages(1, 2, count=4, due_ms=due_ms))
    receive([consumer], 2)
    consumer.acknowledge([read_to_end(broker.reader(where, FIRST)).ids[1]])
    wait_until(lambda: harness.backlog(where) == 3)
    harness.pass_time(due_ms)
    late = Received()
    receive_until_idle([consumer], late, harness.idle_s, at_least=1)
    assert late.values == [b"2"]


def test_many_delays_of_ascending_times_stop_all_that_follows(harness: Harness) -> None:
    where, due_ms = TopicPartition(harness.create_topic()), due(harness) + 3_600_000
    consumer = subscribe(harness.broker(), where)
    limit = harness.delayed_look_ahead
    late = [Message(b"", key=f"{number}", deliver_at_ms=due_ms) for number in range(2 * limit)]
    harness.publish(where.name, [*late, Message(b"plain", key="k")])
    wait_until(lambda: delayed(harness, where) >= limit)
    received = Received()
    receive_until_idle([consumer], received, harness.idle_s)
    assert not received.values
    assert delayed(harness, where) < 2 * limit
