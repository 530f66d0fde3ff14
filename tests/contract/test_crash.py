"""Contract: a broker that is killed, unloaded or wiped, and clients that are killed or stopped."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest

from keyshard.broker.memory import Batching, Message
from keyshard.broker.port import Consumer
from keyshard.broker.retry import retry_until
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.ring.hash_range import split_ring
from keyshard.errors import BrokerUnavailableError, RangeConflictError
from tests.contract.contract_harness import (
    WHOLE_RING,
    BreakableHarness,
    Harness,
    Received,
    receive,
    subscribe,
)
from tests.helpers import DEADLINE_S, wait_until
from tests.support.deadlines import DeadlineError

LOW, HIGH = split_ring(2)


def numbered(count: int) -> list[Message]:
    return [Message(b"%d" % number, key=f"key-{number % 7}") for number in range(count)]


GROUPED_S = 0.15
"""Time after which a client has sent the acknowledgements that it grouped, seconds."""
ROUNDS = 3


def crashed(
    breakable: BreakableHarness,
) -> tuple[TopicPartition, Consumer, Consumer, list[EntryId], Received]:
    """Acknowledge, crash, and receive again; return the messages that came.

    A broker writes a cursor at most once a second, or twice after a pause. So of several
    acknowledgements within a second it forgets the last, unless the machine rested between them.
    """
    where, broker = TopicPartition(breakable.create_topic()), breakable.broker()
    low, high = subscribe(broker, where, LOW), subscribe(broker, where, HIGH)
    breakable.publish(where.name, numbered(60))
    breakable.publish(where.name, numbered(10), Batching.BY_KEY)
    ids = sorted(set(receive([low, high], 70).ids))
    low.acknowledge(ids[:10])
    wait_until(lambda: breakable.backlog(where) == len(ids) - 10)
    for part in (ids[20:22], ids[22:24], ids[24:26], ids[26:]):
        low.acknowledge(part)
        time.sleep(GROUPED_S)
    wait_until(lambda: breakable.backlog(where) == 10)
    breakable.crash()
    # A client waits longer before each attempt, so the test opens a new one.
    with suppress(BrokerUnavailableError):  # close() fails if the client has not reconnected
        broker.close()
    broker = breakable.broker()
    # The old client may have come back just before it was closed, and its ranges are free soon.
    low = retry_until(lambda: subscribe(broker, where, LOW), DEADLINE_S)
    high = retry_until(lambda: subscribe(broker, where, HIGH), DEADLINE_S)
    again = Received()
    wait_until(lambda: again.take([low, high]) >= 0 and set(again.ids) >= set(ids[10:20]))
    with suppress(DeadlineError):
        wait_until(lambda: again.take([low, high]) >= 0 and set(again.ids) >= set(ids[26:]))
    return where, low, high, ids, again


def test_a_killed_broker_forgets_acknowledgements_since_it_wrote_the_cursor(
    breakable: BreakableHarness,
) -> None:
    for _ in range(ROUNDS):
        where, low, high, ids, again = crashed(breakable)
        forgotten = set(again.ids) >= set(ids[26:])
        if forgotten:
            break
    if not forgotten:
        raise DeadlineError(f"the broker wrote the cursor in time in all {ROUNDS} rounds")
    assert all(block.indices[0] == 0 for block in again.blocks)
    breakable.publish(where.name, numbered(1))
    (later,) = receive([low, high], 1).ids
    assert later.ledger > ids[-1].ledger, "a ledger that was open is closed"
    low.acknowledge([*ids, later])
    wait_until(lambda: breakable.backlog(where) == 0)


def test_an_unloaded_topic_redelivers_only_unacknowledged_entries(
    harness: Harness,
) -> None:
    where = TopicPartition(harness.create_topic())
    consumer = subscribe(harness.broker(), where)
    harness.publish(where.name, numbered(30))
    ids = receive([consumer], 30).ids
    consumer.acknowledge(ids[:1])
    wait_until(lambda: harness.backlog(where) == 29)
    consumer.acknowledge(ids[10:])
    wait_until(lambda: harness.backlog(where) == 9)
    harness.unload(where)
    again = Received()
    wait_until(lambda: again.take([consumer]) >= 0 and len(set(again.ids)) >= 9)
    assert set(again.ids) == set(ids[1:10])
    harness.publish(where.name, numbered(1))
    (later,) = receive([consumer], 1).ids
    assert later.ledger > ids[-1].ledger


def test_a_wiped_cluster_hands_out_its_ledger_ids_again(breakable: BreakableHarness) -> None:
    topics = [breakable.create_topic() for _ in range(30)]
    where = TopicPartition(topics[-1])
    for topic in topics:
        breakable.publish(topic, numbered(1))
    consumer = subscribe(breakable.broker(), where)
    (before,) = receive([consumer], 1).ids
    consumer.close()
    breakable.close_producers()
    breakable.wipe()
    where = TopicPartition(breakable.create_topic())
    breakable.publish(where.name, numbered(1))
    (after,) = receive([subscribe(breakable.broker(), where)], 1).ids
    assert after.ledger < before.ledger
    assert after.entry == before.entry == 0


def test_a_killed_client_loses_the_acknowledgements_it_grouped(harness: Harness) -> None:
    where = TopicPartition(harness.create_topic())
    harness.publish(where.name, numbered(20))
    other = harness.other_client(where, WHOLE_RING)
    ids = other.receive(20)
    other.acknowledge_and_die(ids)
    # The broker checks that the holder is there, so that no consumer waits for it.
    consumer = subscribe(harness.broker(), where)
    assert set(receive([consumer], 20).ids) == set(ids)
    consumer.acknowledge(ids)
    consumer.close()
    wait_until(lambda: harness.backlog(where) == 0)


def test_a_closed_client_sends_the_acknowledgements_it_grouped(harness: Harness) -> None:
    where, broker = TopicPartition(harness.create_topic()), harness.broker()
    consumer = subscribe(broker, where)
    harness.publish(where.name, numbered(20))
    consumer.acknowledge(receive([consumer], 20).ids)
    consumer.close()
    assert harness.backlog(where) == 0


def test_a_stopped_client_loses_its_range_to_a_newcomer_and_waits_in_silence(
    breakable: BreakableHarness,
) -> None:
    where, broker = TopicPartition(breakable.create_topic()), breakable.broker()
    other = breakable.other_client(where, LOW)
    with pytest.raises(RangeConflictError):
        subscribe(broker, where, LOW)
    other.freeze()
    # For a broker, all bytes of the holder are a sign of life, also those sent before the stop.
    newcomer = retry_until(lambda: subscribe(broker, where, LOW), DEADLINE_S)
    high = subscribe(broker, where, HIGH)
    other.thaw()
    wait_until(lambda: not other.is_connected())
    breakable.publish(where.name, numbered(20))
    assert len(receive([newcomer, high], 20).values) == 20
    assert newcomer.is_connected()
    newcomer.close()
    wait_until(other.is_connected)
