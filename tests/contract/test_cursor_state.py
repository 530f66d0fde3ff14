"""Ledgers and cursors in the admin interface, in memory and on a real broker."""

from __future__ import annotations

import pytest

from keyshard.broker.memory import Message
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.subscription_state import CursorState
from tests.contract.contract_harness import SUBSCRIPTION, Harness, subscribe
from tests.helpers import wait_until


def test_ledgers_and_acknowledged_entries_are_reported(harness: Harness) -> None:
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


def test_ledgers_are_reported_in_order_with_sizes_of_closed_ones(harness: Harness) -> None:
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
    assert admin.broker_state(TopicPartition(f"{where.topic}-no"), "nobody") is None


@pytest.mark.parametrize("name", ["a b/c+d", "50%2F~*._-é"])
def test_a_name_with_special_characters_has_its_cursor(harness: Harness, name: str) -> None:
    where = TopicPartition(harness.create_topic())
    consumer = subscribe(harness.broker(), where, subscription=name)
    admin = harness.admin()
    harness.publish(where.name, [Message(b"%d" % i, key="k") for i in range(5)])
    ledger = max((admin.broker_state(where, name) or CursorState({})).ledgers)
    consumer.acknowledge([EntryId(ledger, entry) for entry in (0, 1, 3)])
    wait_until(lambda: harness.backlog(where, name) == 2)
    state = admin.broker_state(where, name)
    assert state is not None
    assert str(state.acknowledged()) == f"{ledger}:0-1,3"


def test_the_cursor_of_a_name_with_a_space_is_not_that_of_the_name_with_a_plus(
    harness: Harness,
) -> None:
    where = TopicPartition(harness.create_topic())
    subscribe(harness.broker(), where, subscription="a b")
    state = harness.admin().broker_state(where, "a+b")
    assert state is not None
    assert state.mark_delete is None
