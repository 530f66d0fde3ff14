"""Contract: acknowledgement, and redelivery after a close or a reconnect."""

from __future__ import annotations

from keyshard.broker.memory import Batching, Message
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.ring.hash_range import split_ring
from tests.contract.contract_harness import Harness, Received, receive, subscribe
from tests.helpers import present, wait_until

KEYS = [f"key-{number}" for number in range(20)]


def numbered(count: int, first: int = 0) -> list[Message]:
    """Messages whose values are their numbers, over twenty keys in turn."""
    return [
        Message(b"%d" % number, key=KEYS[number % len(KEYS)])
        for number in range(first, first + count)
    ]


def numbers_by_key(count: int) -> dict[str | None, list[bytes]]:
    """The values of ``numbered(count)``, by key."""
    return {
        key: [b"%d" % number for number in range(index, count, len(KEYS))]
        for index, key in enumerate(KEYS)
    }


def test_unacknowledged_entries_go_to_the_next_owner_in_order_per_key(harness: Harness) -> None:
    where, broker = TopicPartition(harness.create_topic()), harness.broker()
    low, high = (subscribe(broker, where, hash_range) for hash_range in split_ring(2))
    harness.publish(where.name, numbered(200))
    harness.publish(where.name, numbered(200, first=200), Batching.BY_KEY)
    first = receive([low, high], 400)
    low.close()
    next_owner = subscribe(harness.broker(), where, low.hash_range)
    harness.publish(where.name, numbered(100, first=400))
    moved = sum(block.rows for consumer, block in first.deliveries if consumer is low)
    second = receive([next_owner, high], 100 + moved)

    expected = numbers_by_key(500)
    before, after = first.by_key(), second.by_key()
    for key, values in expected.items():
        comes_again = after[key][0] == values[0]
        assert after[key] == (values if comes_again else values[20:])
        assert before[key] == values[:20]
    assert {consumer for consumer, _ in second.deliveries} == {next_owner, high}


def test_new_ranges_get_each_key_from_its_oldest_unacknowledged_entry(harness: Harness) -> None:
    where, broker = TopicPartition(harness.create_topic()), harness.broker()
    consumers = [subscribe(broker, where, hash_range) for hash_range in split_ring(2)]
    harness.publish(where.name, numbered(300))
    received = receive(consumers, 300)
    ids = _numbers_by_id(received)
    consumers[0].acknowledge([entry_id for entry_id, number in ids.items() if number < 100])
    wait_until(lambda: harness.backlog(where) == 200)
    for consumer in consumers:
        consumer.close()
    consumers = [subscribe(harness.broker(), where, hash_range) for hash_range in split_ring(3)]
    again = receive(consumers, 200)
    assert again.by_key() == {key: values[5:] for key, values in numbers_by_key(300).items()}


def test_acknowledged_entries_do_not_come_again_after_close(harness: Harness) -> None:
    where, broker = TopicPartition(harness.create_topic()), harness.broker()
    consumer = subscribe(broker, where)
    harness.publish(where.name, numbered(100))
    ids = _numbers_by_id(receive([consumer], 100))
    consumer.acknowledge([entry_id for entry_id, number in ids.items() if number % 3])
    consumer.close()
    consumer = subscribe(broker, where)
    again = receive([consumer], 34)
    assert sorted(int(present(value)) for value in again.values) == list(range(0, 100, 3))
    assert again.ids == sorted(again.ids)
    consumer.acknowledge(again.ids)
    wait_until(lambda: harness.backlog(where) == 0)
    consumer.close()
    assert receive([subscribe(broker, where)], 0).blocks == []


def test_acknowledged_entries_do_not_come_again_at_another_range(harness: Harness) -> None:
    where, broker = TopicPartition(harness.create_topic()), harness.broker()
    low, high = (subscribe(broker, where, hash_range) for hash_range in split_ring(2))
    harness.publish(where.name, numbered(100))
    received = receive([low, high], 100)
    low_ids = [block.id for consumer, block in received.deliveries if consumer is low]
    low.acknowledge(low_ids[::2])
    low.close()
    next_owner = subscribe(broker, where, low.hash_range)
    assert receive([next_owner, high], len(low_ids) // 2).ids == sorted(low_ids[1::2])


def test_a_consumer_may_acknowledge_entries_of_another_range(harness: Harness) -> None:
    where = TopicPartition(harness.create_topic())
    receiver_broker, acknowledger_broker = harness.broker(), harness.broker()
    ranges = split_ring(2)
    receiver = subscribe(receiver_broker, where, ranges[0])
    acknowledger = subscribe(acknowledger_broker, where, ranges[1])
    harness.publish(where.name, numbered(100))
    received = receive([receiver, acknowledger], 100)
    assert {consumer for consumer, _ in received.deliveries} == {receiver, acknowledger}
    assert harness.backlog(where) == 100
    acknowledger.acknowledge(received.ids)
    wait_until(lambda: harness.backlog(where) == 0)


def test_an_id_built_by_hand_acknowledges_its_whole_batch(harness: Harness) -> None:
    where, broker = TopicPartition(harness.create_topic(partitions=2), 1), harness.broker()
    consumer = subscribe(broker, where, receiver_queue_size=4)
    batch = [Message(b"%d" % number, key="batch") for number in range(10)]
    harness.publish(where.name, batch, Batching.BY_KEY)
    harness.publish(where.name, [Message(b"single", key="single")])
    ids = receive([consumer], 11).ids
    assert harness.backlog(where) == 2
    consumer.acknowledge([EntryId(ids[0].ledger, ids[0].entry)])
    wait_until(lambda: harness.backlog(where) == 1)
    consumer.close()
    assert receive([subscribe(broker, where)], 1).values == [b"single"]


def test_acknowledging_twice_or_an_unpublished_id_does_no_harm(harness: Harness) -> None:
    where = TopicPartition(harness.create_topic())
    consumer = subscribe(harness.broker(), where)
    harness.publish(where.name, numbered(3))
    first, second, third = receive([consumer], 3).ids
    consumer.acknowledge([first])
    wait_until(lambda: harness.backlog(where) == 2)
    consumer.acknowledge([first])
    consumer.acknowledge([second])
    wait_until(lambda: harness.backlog(where) == 1)
    consumer.acknowledge([EntryId(third.ledger, third.entry + 1_000)])
    consumer.acknowledge([])
    consumer.close()
    consumer = subscribe(harness.broker(), where)
    assert receive([consumer], 1).ids == [third]
    assert harness.backlog(where) == 1


def test_after_a_reconnect_only_unacknowledged_entries_come_again(harness: Harness) -> None:
    where = TopicPartition(harness.create_topic())
    consumer = subscribe(harness.broker(), where)
    harness.publish(where.name, numbered(60))
    ids = receive([consumer], 60).ids
    # Not the first: a mark-delete that is being written may be lost when the topic moves.
    consumer.acknowledge(ids[1::2])
    wait_until(lambda: harness.backlog(where) == 30)
    harness.drop_connections(where)
    # A connection may drop more than once under load, and entries come again each time.
    again = Received()
    wait_until(lambda: again.take([consumer]) >= 0 and set(again.ids) >= set(ids[::2]))
    assert set(again.ids) == set(ids[::2])
    consumer.acknowledge(again.ids)
    wait_until(lambda: harness.backlog(where) == 0)


def test_after_a_reconnect_ids_received_before_it_can_be_acknowledged(harness: Harness) -> None:
    where = TopicPartition(harness.create_topic())
    consumer = subscribe(harness.broker(), where)
    harness.publish(where.name, numbered(10))
    before = receive([consumer], 10).ids
    harness.drop_connections(where)
    receive([consumer], 10)
    consumer.acknowledge(before)
    wait_until(lambda: harness.backlog(where) == 0)


def test_after_a_reconnect_a_batch_starts_again_at_its_first_index(harness: Harness) -> None:
    where = TopicPartition(harness.create_topic())
    consumer = subscribe(harness.broker(), where, receiver_queue_size=4)
    batch = [Message(b"%d" % number, key="k") for number in range(10)]
    harness.publish(where.name, batch, Batching.BY_KEY)
    part = Received()
    wait_until(lambda: part.take([consumer]) > 0)
    assert part.blocks[0].indices[0] == 0
    assert len(part.values) == 10 if harness.whole_entries else len(part.values) < 10
    harness.drop_connections(where)
    indices: list[int] = []

    def whole_again() -> bool:
        # Until it notices, the client may return entries of the first delivery.
        for block in consumer.receive(20):
            indices.extend(block.indices)
        return indices[-10:] == list(range(10))

    wait_until(whole_again)


def _numbers_by_id(received: Received) -> dict[EntryId, int]:
    """Number of each entry, for entries of one message."""
    return {block.id: int(present(block.values[0])) for block in received.blocks}
