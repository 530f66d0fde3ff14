"""Contract: bounded reading from a position."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest

from keyshard.broker.memory import Batching, Message
from keyshard.broker.port import ReadOptions
from keyshard.columns.entry_rows import only
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.errors import BrokerError, BrokerUnavailableError, ChunkedMessageError
from keyshard.reading.scan import Scan
from tests.contract.contract_harness import Harness, Received, read_to_end, receive, subscribe
from tests.helpers import wait_until

FIRST = EntryId(0, 0)


def publish_mix(harness: Harness, where: TopicPartition) -> None:
    """Three single messages, a keyed batch of 5, a mixed batch of 4, a single message."""
    harness.publish(where.name, [Message(b"%d" % number, key="a") for number in range(3)])
    batch = [Message(b"%d" % number, key="b") for number in range(3, 8)]
    harness.publish(where.name, batch, Batching.BY_KEY)
    batch = [Message(b"%d" % number, key=f"c{number}") for number in range(8, 12)]
    harness.publish(where.name, batch, Batching.MIXED)
    harness.publish(where.name, [Message(b"12")])


def sizes(received: Received) -> list[int]:
    """Messages received of each entry, in the order of entries."""
    counts: dict[EntryId, int] = {}
    for block in received.blocks:
        assert block.indices[0] == counts.get(block.id, 0)
        counts[block.id] = counts.get(block.id, 0) + block.rows
    return list(counts.values())


@pytest.mark.parametrize("partitions", [0, 2])
def test_a_reader_gives_whole_entries_in_order_from_its_start(
    harness: Harness, partitions: int
) -> None:
    where = TopicPartition(harness.create_topic(partitions), 1 if partitions else -1)
    publish_mix(harness, where)
    broker = harness.broker()
    everything = read_to_end(broker.reader(where, FIRST))
    assert everything.values == [b"%d" % number for number in range(13)]
    assert sizes(everything) == [1, 1, 1, 5, 4, 1]
    assert everything.ids == sorted(everything.ids)

    for skipped, start in enumerate(everything.ids):
        rest = read_to_end(broker.reader(where, start))
        assert rest.ids == everything.ids[skipped:]
        assert sizes(rest) == sizes(everything)[skipped:]


def test_a_reader_ignores_acknowledgements(harness: Harness) -> None:
    where, broker = TopicPartition(harness.create_topic()), harness.broker()
    consumer = subscribe(broker, where)
    publish_mix(harness, where)
    ids = receive([consumer], 13).ids
    consumer.acknowledge(ids)
    wait_until(lambda: harness.backlog(where) == 0)
    assert read_to_end(broker.reader(where, ids[0])).ids == ids


def test_a_reader_acknowledges_nothing(harness: Harness) -> None:
    where, broker = TopicPartition(harness.create_topic()), harness.broker()
    consumer = subscribe(broker, where)
    publish_mix(harness, where)
    reader = broker.reader(where, FIRST)
    assert len(read_to_end(reader).values) == 13
    reader.close()
    assert harness.backlog(where) == 6
    assert len(receive([consumer], 13).values) == 13


def test_a_start_that_is_not_stored_gives_the_next_entry(harness: Harness) -> None:
    where, broker = TopicPartition(harness.create_topic()), harness.broker()
    harness.publish(where.name, [Message(b"0", key="k"), Message(b"1", key="k")])
    harness.roll_ledger(where)
    harness.publish(where.name, [Message(b"2", key="k"), Message(b"3", key="k")])
    ids = read_to_end(broker.reader(where, FIRST)).ids
    assert ids[1].ledger < ids[2].ledger
    behind_the_ledger = EntryId(ids[1].ledger, ids[1].entry + 100)
    assert read_to_end(broker.reader(where, behind_the_ledger)).ids == ids[2:]
    assert read_to_end(broker.reader(where, EntryId(ids[0].ledger - 1, 5))).ids == ids


def test_a_start_behind_everything_is_at_the_end_and_gets_later_entries(harness: Harness) -> None:
    where, broker = TopicPartition(harness.create_topic()), harness.broker()
    harness.publish(where.name, [Message(b"0", key="k")])
    (last,) = read_to_end(broker.reader(where, FIRST)).ids
    reader = broker.reader(where, EntryId(last.ledger, last.entry + 1))
    assert reader.at_end()
    assert reader.read(20) == []
    harness.publish(where.name, [Message(b"1", key="k")])
    assert not reader.at_end()
    assert read_to_end(reader).values == [b"1"]


def test_a_reader_of_an_empty_partition_is_at_the_end_until_something_comes(
    harness: Harness,
) -> None:
    where = TopicPartition(harness.create_topic())
    reader = harness.broker().reader(where, FIRST)
    assert reader.at_end()
    assert reader.read(20) == []
    harness.publish(where.name, [Message(b"0", key="k")])
    assert read_to_end(reader).values == [b"0"]
    assert reader.at_end()


def test_without_values_all_else_is_the_same(harness: Harness) -> None:
    where, broker = TopicPartition(harness.create_topic()), harness.broker()
    publish_mix(harness, where)
    everything = read_to_end(broker.reader(where, FIRST)).blocks
    found = read_to_end(broker.reader(where, FIRST, ReadOptions(2, columns=["__key"]))).blocks
    assert len(found) == len(everything)
    for one, other in zip(found, everything, strict=True):
        assert one.partition_keys == other.partition_keys
        assert (one.id, one.indices, one.slots) == (other.id, other.indices, other.slots)
        assert (one.payload_bytes, one.publish_ms) == (other.payload_bytes, other.publish_ms)
        part = only(one, frozenset(one.indices[:1]))
        assert part.partition_keys == other.partition_keys[:1]
        assert one.values in ([None] * one.rows, other.values)


def test_entries_before_a_chunked_message_can_be_read(harness: Harness) -> None:
    where = TopicPartition(harness.create_topic())
    harness.publish(where.name, [Message(b"0", key="k"), Message(b"1", key="k")])
    harness.publish_chunked(where.name, "k")
    reader = harness.broker().reader(where, FIRST)
    read: list[bytes | None] = []

    def refused() -> bool:
        try:
            read.extend(value for block in reader.read(20) for value in block.values)
        except ChunkedMessageError:
            return True
        return False

    wait_until(refused)
    assert read == [b"0", b"1"]
    with pytest.raises(ChunkedMessageError):
        reader.read(20)


def test_a_closed_reader_refuses_work_and_closes_again(harness: Harness) -> None:
    reader = harness.broker().reader(TopicPartition(harness.create_topic()), FIRST)
    reader.close()
    reader.close()
    with pytest.raises(BrokerError):
        reader.read(10)
    with pytest.raises(BrokerError):
        reader.at_end()


def test_a_reader_misses_nothing_if_a_time_to_live_moves_its_cursor(harness: Harness) -> None:
    """1. Part of the messages was read. 2. Older ones expire. 3. The rest has to come in order."""
    if not harness.whole_entries and harness.may_repeat:
        pytest.skip("pulsar-client does not notice it")
    where, broker = TopicPartition(harness.create_topic()), harness.broker()
    subscribe(broker, where).close()
    now_ms = time.time_ns() // 1_000_000
    old = [now_ms - 3_600_000 + number for number in range(900)]
    harness.publish_at(where.name, [*old, *range(now_ms, now_ms + 100)])
    found: list[EntryBlock] = []
    with Scan(broker, where, FIRST, None, ReadOptions(receiver_queue_size=20, first=20)) as scan:

        def began() -> bool:
            found.extend(scan.read())
            return bool(found)

        wait_until(began)
        harness.expire(where, now_ms - 60_000)
        wait_until(lambda: harness.backlog(where) == 100)

        def finished() -> bool:
            with suppress(BrokerUnavailableError):
                found.extend(scan.read())
            return scan.done

        wait_until(finished)
    assert [int(block.values[0] or b"") for block in found] == [
        *old, *range(now_ms, now_ms + 100)
    ]  # fmt: skip
