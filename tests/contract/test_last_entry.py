"""Contract: the last entry of a topic partition."""

from __future__ import annotations

import pytest

from keyshard.broker.memory import Batching, Message
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.errors import BrokerError
from tests.contract.contract_harness import Harness, read_to_end, receive, subscribe


def test_an_empty_partition_has_no_last_entry(harness: Harness) -> None:
    where = TopicPartition(harness.create_topic(partitions=1), 0)
    assert subscribe(harness.broker(), where).last_entry() is None


@pytest.mark.parametrize("batching", [Batching.NONE, Batching.BY_KEY])
def test_the_last_entry_is_the_last_one_published(harness: Harness, batching: Batching) -> None:
    where, broker = TopicPartition(harness.create_topic()), harness.broker()
    consumer = subscribe(broker, where)
    harness.publish(where.name, [Message(b"0", key="k"), Message(b"1", key="k")], batching)
    (*_, last) = read_to_end(broker.reader(where, EntryId(0, 0))).ids
    assert consumer.last_entry() == last


def test_the_last_entry_does_not_depend_on_subscription_or_ledger(harness: Harness) -> None:
    where, broker = TopicPartition(harness.create_topic()), harness.broker()
    consumer = subscribe(broker, where)
    harness.publish(where.name, [Message(b"0", key="k"), Message(b"1", key="k")])
    ids = receive([consumer], 2).ids
    consumer.acknowledge(ids[1:])
    consumer.close()
    harness.roll_ledger(where)
    consumer = subscribe(broker, where)
    assert consumer.last_entry() == ids[-1]
    harness.publish(where.name, [Message(b"2", key="k")])
    assert consumer.last_entry() == receive([consumer], 2).ids[-1] > ids[-1]


def test_the_last_entry_may_be_gone_after_every_subscription_acknowledged_it(
    harness: Harness,
) -> None:
    where, broker = TopicPartition(harness.create_topic()), harness.broker()
    consumer = subscribe(broker, where)
    harness.publish(where.name, [Message(b"0", key="k")])
    ids = receive([consumer], 1).ids
    consumer.acknowledge(ids)
    consumer.close()
    harness.roll_ledger(where)
    assert subscribe(broker, where).last_entry() in {None, ids[-1]}


def test_a_closed_consumer_returns_no_last_entry(harness: Harness) -> None:
    consumer = subscribe(harness.broker(), TopicPartition(harness.create_topic()))
    consumer.close()
    with pytest.raises(BrokerError):
        consumer.last_entry()
