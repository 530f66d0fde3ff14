"""What the admin interface tells of ledgers and cursors, in memory and on a real broker."""

from __future__ import annotations

from contract_harness import SUBSCRIPTION, Harness, subscribe, wait_until

from keyshard.broker.memory import Message
from keyshard.core.entry import EntryId, TopicPartition


def test_it_tells_ledgers_and_what_is_acknowledged(harness: Harness) -> None:
    where = TopicPartition(harness.create_topic())
    consumer = subscribe(harness.broker(), where)
    admin = harness.admin()
    harness.publish(where.name, [Message(b"%d" % i, key="k") for i in range(10)])
    state = admin.broker_state(where, SUBSCRIPTION)
    assert state is not None
    (ledger,) = state.ledgers
    assert state.ledgers == {ledger: 10}
    assert not state.acknowledged()
    consumer.acknowledge([EntryId(ledger, entry) for entry in (0, 1, 2, 5, 6, 8)])
    wait_until(lambda: harness.backlog(where) == 4)
    state = admin.broker_state(where, SUBSCRIPTION)
    assert state is not None
    assert state.mark_delete == EntryId(ledger, 2)
    assert str(state.individually) == f"{ledger}:5-6,8"
    assert str(state.acknowledged()) == f"{ledger}:0-2,5-6,8"
    cursor = admin.cursor(where, SUBSCRIPTION)
    assert cursor is not None
    assert cursor.mark_delete == EntryId(ledger, 2)
    assert str(cursor.acked) == f"{ledger}:5-6,8"


def test_it_tells_ledgers_in_their_order_and_how_long_closed_ones_are(harness: Harness) -> None:
    where = TopicPartition(harness.create_topic())
    broker = harness.broker()
    subscribe(broker, where)
    for count in (3, 2):
        harness.publish(where.name, [Message(b"m", key="k")] * count)
        harness.roll_ledger(where)
    harness.publish(where.name, [Message(b"m", key="k")])
    state = harness.admin().broker_state(where, SUBSCRIPTION)
    assert state is not None
    assert [size for size in state.ledgers.values() if size] == [3, 2, 1]
    assert list(state.ledgers) == sorted(state.ledgers)


def test_a_subscription_or_topic_that_is_not_there_has_no_cursor(harness: Harness) -> None:
    where = TopicPartition(harness.create_topic())
    admin = harness.admin()
    state = admin.broker_state(where, "nobody")
    assert state is not None
    assert state.mark_delete is None
    assert admin.cursor(where, "nobody") is None
    assert admin.broker_state(TopicPartition(f"{where.topic}-no"), "nobody") is None
