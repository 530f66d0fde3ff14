"""Contract: entries without a receiver, and messages that are more or less than an entry."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from keyshard.broker.memory import Batching, Message
from keyshard.broker.memory.log import MARKER_SLOT
from keyshard.broker.unreadable_entries import entry_of
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.ring.hash_range import HashRange, split_ring
from keyshard.core.ring.key_slot import key_slot
from keyshard.errors import ChunkedMessageError, CorruptEntryError, EncryptedMessageError
from tests.contract.contract_harness import (
    RECEIVE_MS,
    WHOLE_RING,
    BreakableHarness,
    Harness,
    read_to_end,
    receive,
    subscribe,
)
from tests.helpers import wait_until

FIRST = EntryId(0, 0)
LOW, HIGH = split_ring(2)
LOW_KEY = next(key for key in map(str, range(100)) if key_slot(key) in LOW)
HIGH_KEY = next(key for key in map(str, range(100)) if key_slot(key) in HIGH)


def test_an_aborted_transaction_leaves_entries_that_are_never_delivered(
    breakable: BreakableHarness,
) -> None:
    where, broker = TopicPartition(breakable.create_topic()), breakable.broker()
    consumer = subscribe(broker, where)
    breakable.transaction(where, [LOW_KEY, HIGH_KEY])
    breakable.publish(where.name, [Message(b"after", key=LOW_KEY)])
    received = receive([consumer], 1)
    assert received.values == [b"after"]
    # Two messages and the marker at the end.
    assert received.ids[0].entry == 3
    wait_until(lambda: breakable.backlog(where) == 1)
    assert read_to_end(broker.reader(where, FIRST)).values == [b"after"]


def test_markers_of_an_aborted_transaction_wait_for_the_owner_of_their_slot(
    breakable: BreakableHarness,
) -> None:
    where, broker = TopicPartition(breakable.create_topic()), breakable.broker()
    marker = HashRange(MARKER_SLOT, MARKER_SLOT)
    subscribe(broker, where, marker)
    breakable.transaction(where, [LOW_KEY, HIGH_KEY])
    wait_until(lambda: breakable.backlog(where) == 2)
    subscribe(broker, where, LOW)
    wait_until(lambda: breakable.backlog(where) == 1)
    subscribe(broker, where, HashRange(HIGH.start, marker.start - 1))
    subscribe(broker, where, HashRange(marker.end + 1, HIGH.end))
    wait_until(lambda: breakable.backlog(where) == 0)


def test_behind_the_last_message_nothing_is_left_to_read(breakable: BreakableHarness) -> None:
    where, broker = TopicPartition(breakable.create_topic()), breakable.broker()
    consumer = subscribe(broker, where)
    breakable.transaction(where, [LOW_KEY])
    assert consumer.last_entry() is None
    breakable.publish(where.name, [Message(b"before", key=LOW_KEY)])
    breakable.transaction(where, [LOW_KEY])
    reader = broker.reader(where, FIRST)
    received = read_to_end(reader)
    assert received.values == [b"before"]
    assert reader.at_end()
    assert consumer.last_entry() == received.ids[0]


def test_the_error_of_a_chunked_message_names_its_first_or_last_entry(harness: Harness) -> None:
    where, broker = TopicPartition(harness.create_topic()), harness.broker()
    consumer = subscribe(broker, where)
    first, last = harness.publish_chunked(where.name, "k")
    with pytest.raises(ChunkedMessageError) as raised:
        receive([consumer], 1)
    named = first if harness.whole_entries else last
    assert (raised.value.facts["ledger"], raised.value.facts["entry"]) == named
    assert harness.backlog(where) == 2
    with pytest.raises(ChunkedMessageError):
        read_to_end(broker.reader(where, first))
    part_alone = broker.reader(where, last)
    if harness.whole_entries:
        with pytest.raises(ChunkedMessageError):
            read_to_end(part_alone)
    else:
        assert part_alone.read(RECEIVE_MS) == [], "a part alone is no message"


def test_a_partly_acknowledged_batch_is_delivered_without_acknowledged_messages(
    breakable: BreakableHarness,
) -> None:
    where, broker = TopicPartition(breakable.create_topic()), breakable.broker()
    batch = [Message(b"%d" % number, key="k") for number in range(6)]
    breakable.publish(where.name, batch, Batching.BY_KEY)
    other = breakable.other_client(where, WHOLE_RING)
    (entry_id,) = other.receive(6)
    other.acknowledge_indices(entry_id, [0, 2, 3])
    consumer = subscribe(broker, where)
    (block,) = receive([consumer], 3).blocks
    assert (block.id, block.batch_size, block.indices) == (entry_id, 6, [1, 4, 5])
    assert block.values == [b"1", b"4", b"5"]
    assert len(read_to_end(broker.reader(where, FIRST)).values) == 6
    assert breakable.backlog(where) == 1
    consumer.acknowledge([entry_id])
    wait_until(lambda: breakable.backlog(where) == 0)


def test_an_entry_whose_last_messages_are_acknowledged_is_complete_if_entries_come_whole(
    breakable: BreakableHarness,
) -> None:
    where, broker = TopicPartition(breakable.create_topic()), breakable.broker()
    batch = [Message(b"%d" % number, key="k") for number in range(6)]
    breakable.publish(where.name, batch, Batching.BY_KEY)
    other = breakable.other_client(where, WHOLE_RING)
    (entry_id,) = other.receive(6)
    other.acknowledge_indices(entry_id, [1, 4, 5])
    breakable.publish(where.name, batch[:1])
    consumer = subscribe(broker, where)
    rest, whole = receive([consumer], 4).blocks
    assert (rest.id, rest.batch_size, list(rest.indices)) == (entry_id, 6, [0, 2, 3])
    assert (rest.complete, rest.whole) == (breakable.whole_entries, False)
    assert (whole.complete, whole.whole) == (True, True)


def test_an_unreadable_entry_is_named_once_and_later_entries_come(
    harness: Harness, request: pytest.FixtureRequest
) -> None:
    if "pulsar" in request.node.callspec.params.values():
        pytest.skip("pulsar-client acknowledges it, and tells nobody")
    where, broker = TopicPartition(harness.create_topic()), harness.broker()
    consumer = subscribe(broker, where)
    for number in range(3):
        harness.publish(where.name, [Message(b"%d" % number, key="k")])
        harness.publish_corrupt(where.name)
    reader = broker.reader(where, FIRST)
    for take in (consumer.receive, reader.read):
        found: list[bytes | int | None] = []

        def taken(
            take: Callable[[int], list[EntryBlock]] = take,
            found: list[bytes | int | None] = found,
        ) -> bool:
            try:
                found.extend(value for block in take(RECEIVE_MS) for value in block.values)
            except CorruptEntryError as exc:
                found.append(entry_of(exc).entry)
            return len(found) == 6

        wait_until(taken)
        assert found == [b"0", 1, b"1", 3, b"2", 5]
    assert reader.at_end()
    assert harness.backlog(where) == 6
    ledger = consumer.last_entry()
    assert ledger is not None
    consumer.acknowledge([EntryId(ledger.ledger, number) for number in range(6)])
    wait_until(lambda: harness.backlog(where) == 0)


def test_an_encrypted_entry_is_named_once_and_later_entries_come(harness: Harness) -> None:
    where, broker = TopicPartition(harness.create_topic()), harness.broker()
    consumer = subscribe(broker, where)
    for number in range(3):
        harness.publish(where.name, [Message(b"%d" % number, key="k")])
        harness.publish_encrypted(where.name, "k", 1 + 2 * number)
    harness.publish(where.name, [Message(b"3", key="k")])
    reader = broker.reader(where, FIRST)
    for take in (consumer.receive, reader.read):
        found: list[bytes | EntryId | None] = []

        def taken(
            take: Callable[[int], list[EntryBlock]] = take,
            found: list[bytes | EntryId | None] = found,
        ) -> bool:
            try:
                found.extend(value for block in take(RECEIVE_MS) for value in block.values)
            except EncryptedMessageError as exc:
                found += [entry_of(exc)] if exc.stored else []
            return len(found) == 7

        wait_until(taken)
        encrypted = [one for one in found if isinstance(one, EntryId)]
        assert [one.entry for one in encrypted] == [1, 3, 5]
        assert found[::2] == [b"0", b"1", b"2", b"3"]
    assert reader.at_end()
    assert harness.backlog(where) == 7
    consumer.acknowledge([EntryId(encrypted[0].ledger, number) for number in range(7)])
    wait_until(lambda: harness.backlog(where) == 0)
