"""The in-memory broker: faults on request, and time that only the test moves."""

from __future__ import annotations

from keyshard.broker.memory import (
    Batching,
    LookAhead,
    MemoryBroker,
    MemoryCluster,
    Message,
    UnackedLimits,
)
from keyshard.broker.memory.client import MemoryConsumer
from keyshard.broker.memory.cursor import Cursor
from keyshard.broker.port import StartPosition, SubscriptionSpec
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.ring.hash_range import HashRange, split_ring
from keyshard.core.ring.key_slot import key_slot

SUBSCRIPTION = "unit"
LOW, HIGH = split_ring(2)
RING = split_ring(1)[0]
FIRST = EntryId(0, 0)
LOW_KEY = next(key for key in map(str, range(100)) if key_slot(key) in LOW)
HIGH_KEY = next(key for key in map(str, range(100)) if key_slot(key) in HIGH)


class Clock:
    """Time in milliseconds, moved by hand."""

    def __init__(self) -> None:
        self.now_ms = 1_000_000

    def __call__(self) -> int:
        return self.now_ms


class ClockedTopic:
    """A cluster with one plain topic and a clock."""

    def __init__(self, **settings: object) -> None:
        self.clock = Clock()
        self.cluster = MemoryCluster(now_ms=self.clock, **settings)  # type: ignore[arg-type]
        self.where = TopicPartition(self.cluster.create_topic("topic"))

    def subscribe(
        self, hash_range: HashRange = RING, *, broker: MemoryBroker | None = None, queue: int = 100
    ) -> MemoryConsumer:
        return (broker or MemoryBroker(self.cluster)).subscribe(
            SubscriptionSpec(
                self.where,
                SUBSCRIPTION,
                hash_range,
                consumer_name=str(hash_range),
                receiver_queue_size=queue,
            ),
            StartPosition.EARLIEST,
        )

    def publish(
        self, *keys: str, batching: Batching = Batching.NONE, first: int = 0
    ) -> list[EntryId]:
        """One message for each key; values are numbers from ``first`` on."""
        messages = [Message(b"%d" % number, key) for number, key in enumerate(keys, first)]
        found = self.cluster.publish(self.where, *messages, batching=batching)
        return [entry_id for _, entry_id in found]

    @property
    def backlog(self) -> int:
        self.cluster.validate()
        return self.cluster.backlog(self.where, SUBSCRIPTION)


def ids(consumer: MemoryConsumer) -> list[EntryId]:
    """Entries of everything that is there."""
    return [block.id for block in everything(consumer)]


def everything(consumer: MemoryConsumer) -> list[EntryBlock]:
    found: list[EntryBlock] = []
    while blocks := consumer.receive(0):
        found += blocks
    return found


def test_a_crash_forgets_acknowledgements_since_the_cursor_was_written() -> None:
    topic = ClockedTopic(cursor_write_ms=10_000)
    consumer = topic.subscribe()
    sent = topic.publish(*"abcdef")
    assert ids(consumer) == sent
    consumer.acknowledge(sent[:1])
    topic.clock.now_ms += 9_999
    consumer.acknowledge(sent[2:4])
    topic.clock.now_ms += 1
    consumer.acknowledge(sent[1:2])  # what came before is written now, this is not
    assert topic.backlog == 2
    topic.cluster.crash()
    assert consumer.is_connected()
    assert topic.backlog == 3
    assert ids(consumer) == [sent[1], sent[4], sent[5]]


def test_without_a_moving_clock_only_the_first_acknowledgement_is_written() -> None:
    topic = ClockedTopic()
    consumer = topic.subscribe()
    sent = topic.publish(*"abc")
    consumer.acknowledge(sent[:1])
    consumer.acknowledge(sent[1:])
    topic.cluster.crash()
    assert ids(consumer) == sent[1:]


def test_a_crash_rolls_ledgers_and_empties_the_queues_of_clients() -> None:
    topic = ClockedTopic()
    consumer = topic.subscribe(queue=4)
    (batch,) = topic.publish(*"aaaaaa", batching=Batching.BY_KEY)
    assert consumer.receive(0)[0].indices == [0, 1, 2, 3]
    topic.cluster.crash()
    assert [block.indices for block in everything(consumer)] == [[0, 1, 2, 3], [4, 5]]
    (later,) = topic.publish("a")
    assert later.ledger > batch.ledger
    topic.cluster.validate()


def test_a_full_group_is_sent_at_once_and_a_due_one_without_connection_is_lost() -> None:
    topic = ClockedTopic(ack_group_ms=100)
    broker = MemoryBroker(topic.cluster)
    consumer = topic.subscribe(broker=broker, queue=2_000)
    sent = topic.publish(*["a"] * 1_001)
    consumer.acknowledge(sent[:1_000])
    assert topic.backlog == 1
    consumer.acknowledge(sent[1_000:])
    broker.drop()
    topic.clock.now_ms += 100
    assert topic.backlog == 1
    broker.reconnect()
    topic.clock.now_ms += 100
    assert topic.backlog == 1, "the client was told that all is well"
    assert ids(consumer) == sent[1_000:]


def test_one_consumer_reconnects_in_the_middle_of_an_entry_and_the_others_do_not() -> None:
    topic = ClockedTopic()
    broker = MemoryBroker(topic.cluster)
    low, high = topic.subscribe(LOW, broker=broker, queue=2), topic.subscribe(HIGH, broker=broker)
    topic.publish(*[LOW_KEY] * 5, batching=Batching.BY_KEY)
    topic.publish(HIGH_KEY)
    assert low.receive(0)[0].indices == [0, 1]
    assert len(ids(high)) == 1
    low.disconnect()
    assert [block.indices for block in everything(low)] == [[0, 1], [2, 3], [4]]
    assert ids(high) == []


def test_a_frozen_client_keeps_ranges_that_no_other_client_wants() -> None:
    topic = ClockedTopic(ack_group_ms=100)
    broker = MemoryBroker(topic.cluster)
    consumer = topic.subscribe(broker=broker)
    sent = topic.publish(*"ab")
    consumer.acknowledge(sent[:1])
    broker.freeze()
    topic.clock.now_ms += 1_000
    assert topic.backlog == 2, "a stopped process sends nothing"
    broker.thaw()
    assert topic.backlog == 1
    assert consumer.is_connected()


def test_a_frozen_client_does_not_reconnect_after_a_crash_until_it_is_thawed() -> None:
    topic = ClockedTopic()
    broker = MemoryBroker(topic.cluster)
    consumer = topic.subscribe(broker=broker)
    broker.freeze()
    topic.cluster.crash()
    assert not consumer.is_connected()
    broker.thaw()
    assert consumer.is_connected()


def test_entries_of_a_closed_consumer_do_not_count_as_unacknowledged() -> None:
    topic = ClockedTopic(unacked_limits=UnackedLimits(per_subscription=4))
    low, high = topic.subscribe(LOW), topic.subscribe(HIGH)
    sent = topic.publish(*[LOW_KEY] * 4, HIGH_KEY)
    low.close()
    assert ids(high) == sent[4:]
    topic.cluster.validate()


def test_parts_acknowledged_by_another_client_come_again_only_after_a_crash() -> None:
    topic = ClockedTopic()
    consumer = topic.subscribe()
    (batch,) = topic.publish(*"kkkk", batching=Batching.BY_KEY)
    topic.cluster.acknowledge_indices(topic.where, SUBSCRIPTION, batch, [0])
    topic.cluster.acknowledge_indices(topic.where, SUBSCRIPTION, batch, [2])
    consumer.disconnect()
    everything(consumer)
    consumer.disconnect()
    (block,) = everything(consumer)
    assert (block.indices, block.values, block.whole) == ([1, 3], [b"1", b"3"], False)
    topic.cluster.crash()
    (block,) = everything(consumer)
    assert block.indices == [1, 2, 3]
    topic.cluster.acknowledge_indices(topic.where, SUBSCRIPTION, batch, [1, 2, 3])
    assert topic.backlog == 0
    topic.cluster.crash()
    assert [block.indices for block in everything(consumer)] == [[1, 2, 3]]
    consumer.acknowledge([batch])
    assert topic.backlog == 0


def test_entries_come_twice_on_request() -> None:
    topic = ClockedTopic()
    consumer = topic.subscribe(LOW)
    sent = topic.publish(LOW_KEY, LOW_KEY, HIGH_KEY)
    assert ids(consumer) == sent[:2]
    assert topic.cluster.deliver_again(topic.where, SUBSCRIPTION, sent[0], sent[2]) == 1
    assert ids(consumer) == sent[:1]
    consumer.acknowledge(sent[:1])
    assert topic.cluster.deliver_again(topic.where, SUBSCRIPTION, sent[0]) == 1
    assert ids(consumer) == sent[:1], "even what was acknowledged"
    assert topic.backlog == 2


def test_entries_that_wait_for_their_owner_are_not_sent_early() -> None:
    topic = ClockedTopic()
    consumer = topic.subscribe(LOW, queue=1)
    sent = topic.publish(LOW_KEY, LOW_KEY, LOW_KEY)
    topic.subscribe(HIGH)
    assert topic.cluster.deliver_again(topic.where, SUBSCRIPTION, sent[1], sent[2]) == 0
    assert ids(consumer) == sent


def test_a_reader_that_waits_for_a_ledger_after_a_crash_gets_it() -> None:
    topic = ClockedTopic(look_ahead=LookAhead(1))
    reader = MemoryBroker(topic.cluster).reader(topic.where, FIRST)
    topic.publish("a")
    assert len(reader.read(0)) == 1
    topic.cluster.crash()
    topic.publish("b")
    assert [block.values for block in reader.read(0)] == [[b"0"]]


def test_a_cursor_goes_back_exactly_to_its_written_state() -> None:
    cursor = Cursor(-1, write_ms=100)
    for ordinal in (0, 1, 5):
        cursor.ack(ordinal)
    cursor.write_if_due(0)
    for ordinal in (2, 3, 4, 8):
        cursor.ack(ordinal)
    cursor.write_if_due(99)
    assert (cursor.mark_delete, cursor.acked) == (5, {8})
    cursor.forget()
    assert (cursor.mark_delete, cursor.acked) == (1, {5})
    cursor.ack(2)
    cursor.write_if_due(100)
    cursor.ack(3)
    cursor.forget()
    assert (cursor.mark_delete, cursor.acked) == (2, {5})
