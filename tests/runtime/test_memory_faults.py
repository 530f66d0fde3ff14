"""The in-memory broker: what goes wrong on request, and time that only moves when it is told to."""

from __future__ import annotations

import pytest

from keyshard.broker.memory import (
    Batching,
    LookAhead,
    MemoryBroker,
    MemoryCluster,
    Message,
    UnackedLimits,
)
from keyshard.broker.memory.admin import MemoryAdmin
from keyshard.broker.memory.client import MemoryConsumer
from keyshard.broker.memory.cursor import Cursor
from keyshard.broker.memory.log import MARKER_SLOT
from keyshard.broker.port import StartPosition
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.ring.hash_range import HashRange, split_ring
from keyshard.core.ring.key_slot import key_slot
from keyshard.errors import BrokerError, ChunkedMessageError, RangeConflictError

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


class World:
    """A cluster with one plain topic and a clock."""

    def __init__(self, **settings: object) -> None:
        self.clock = Clock()
        self.cluster = MemoryCluster(now_ms=self.clock, **settings)  # type: ignore[arg-type]
        self.where = TopicPartition(self.cluster.create_topic("topic"))

    def subscribe(
        self, hash_range: HashRange = RING, *, broker: MemoryBroker | None = None, queue: int = 100
    ) -> MemoryConsumer:
        return (broker or MemoryBroker(self.cluster)).subscribe(
            self.where,
            SUBSCRIPTION,
            hash_range,
            start=StartPosition.EARLIEST,
            consumer_name=str(hash_range),
            receiver_queue_size=queue,
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


def test_a_crash_forgets_what_was_acknowledged_since_the_cursor_was_written() -> None:
    world = World(cursor_write_ms=10_000)
    consumer = world.subscribe()
    sent = world.publish(*"abcdef")
    assert ids(consumer) == sent
    consumer.acknowledge(sent[:1])
    world.clock.now_ms += 9_999
    consumer.acknowledge(sent[2:4])
    world.clock.now_ms += 1
    consumer.acknowledge(sent[1:2])  # what came before is written now, this is not
    assert world.backlog == 2
    world.cluster.crash()
    assert consumer.is_connected()
    assert world.backlog == 3
    assert ids(consumer) == [sent[1], sent[4], sent[5]]


def test_without_a_moving_clock_only_the_first_acknowledgement_is_written() -> None:
    world = World()
    consumer = world.subscribe()
    sent = world.publish(*"abc")
    consumer.acknowledge(sent[:1])
    consumer.acknowledge(sent[1:])
    world.cluster.crash()
    assert ids(consumer) == sent[1:]


def test_a_crash_rolls_ledgers_and_empties_the_queues_of_clients() -> None:
    world = World()
    consumer = world.subscribe(queue=4)
    (batch,) = world.publish(*"aaaaaa", batching=Batching.BY_KEY)
    assert consumer.receive(0)[0].indices == [0, 1, 2, 3]
    world.cluster.crash()
    assert [block.indices for block in everything(consumer)] == [[0, 1, 2, 3], [4, 5]]
    (later,) = world.publish("a")
    assert later.ledger > batch.ledger
    world.cluster.validate()


def test_an_unload_forgets_nothing_and_concerns_one_topic_partition() -> None:
    world = World()
    other = TopicPartition(world.cluster.create_topic("other"))
    broker = MemoryBroker(world.cluster)
    consumer = world.subscribe(broker=broker)
    elsewhere = broker.subscribe(
        other,
        SUBSCRIPTION,
        RING,
        start=StartPosition.EARLIEST,
        consumer_name="elsewhere",
        receiver_queue_size=10,
    )
    world.cluster.publish(other, Message(b"x"))
    sent = world.publish(*"abc")
    assert ids(consumer) == sent
    assert len(ids(elsewhere)) == 1
    consumer.acknowledge(sent[:1])
    consumer.acknowledge(sent[2:])
    world.cluster.unload(world.where)
    assert ids(consumer) == sent[1:2]
    assert ids(elsewhere) == []
    assert world.publish("a")[0].ledger > sent[0].ledger
    world.cluster.crash()
    assert world.backlog == 2


def test_acknowledgements_are_grouped_and_lost_with_the_process_but_not_by_a_close() -> None:
    world = World(ack_group_ms=100)
    killed, closed = MemoryBroker(world.cluster), MemoryBroker(world.cluster)
    low, high = world.subscribe(LOW, broker=killed), world.subscribe(HIGH, broker=closed)
    sent = world.publish(LOW_KEY, LOW_KEY, HIGH_KEY)
    low.acknowledge(sent[:1])
    assert world.backlog == 3
    world.clock.now_ms += 100
    assert world.backlog == 2, "sent when it was due"
    low.acknowledge(sent[1:2])
    high.acknowledge(sent[2:])
    killed.kill()
    closed.close()
    world.clock.now_ms += 1_000
    assert world.backlog == 1
    with pytest.raises(BrokerError):
        low.receive(0)
    assert ids(world.subscribe()) == sent[1:2]


def test_a_full_group_is_sent_at_once_and_a_due_one_without_connection_is_lost() -> None:
    world = World(ack_group_ms=100)
    broker = MemoryBroker(world.cluster)
    consumer = world.subscribe(broker=broker, queue=2_000)
    sent = world.publish(*["a"] * 1_001)
    consumer.acknowledge(sent[:1_000])
    assert world.backlog == 1
    consumer.acknowledge(sent[1_000:])
    broker.drop()
    world.clock.now_ms += 100
    assert world.backlog == 1
    broker.reconnect()
    world.clock.now_ms += 100
    assert world.backlog == 1, "the client was told that all is well"
    assert ids(consumer) == sent[1_000:]


def test_one_consumer_reconnects_in_the_middle_of_an_entry_and_the_others_do_not() -> None:
    world = World()
    broker = MemoryBroker(world.cluster)
    low, high = world.subscribe(LOW, broker=broker, queue=2), world.subscribe(HIGH, broker=broker)
    world.publish(*[LOW_KEY] * 5, batching=Batching.BY_KEY)
    world.publish(HIGH_KEY)
    assert low.receive(0)[0].indices == [0, 1]
    assert len(ids(high)) == 1
    low.disconnect()
    assert [block.indices for block in everything(low)] == [[0, 1], [2, 3], [4]]
    assert ids(high) == []


def test_a_newcomer_takes_the_range_of_a_frozen_client_and_the_thawed_one_stays_out() -> None:
    world = World()
    frozen = MemoryBroker(world.cluster)
    holder, neighbour = world.subscribe(LOW, broker=frozen), world.subscribe(HIGH, broker=frozen)
    sent = world.publish(LOW_KEY, HIGH_KEY)
    with pytest.raises(RangeConflictError):
        world.subscribe(LOW)
    frozen.freeze()
    newcomer = world.subscribe(LOW)
    assert ids(newcomer) == sent[:1]
    assert not neighbour.is_connected(), "the whole connection was closed"
    frozen.thaw()
    assert neighbour.is_connected()
    assert not holder.is_connected()
    newcomer.close()
    frozen.reconnect()
    assert holder.is_connected()
    world.cluster.validate()


def test_a_frozen_client_that_nobody_asked_for_keeps_its_ranges() -> None:
    world = World(ack_group_ms=100)
    broker = MemoryBroker(world.cluster)
    consumer = world.subscribe(broker=broker)
    sent = world.publish(*"ab")
    consumer.acknowledge(sent[:1])
    broker.freeze()
    world.clock.now_ms += 1_000
    assert world.backlog == 2, "a stopped process sends nothing"
    broker.thaw()
    assert world.backlog == 1
    assert consumer.is_connected()


def test_a_frozen_client_does_not_reconnect_after_a_crash_until_it_is_thawed() -> None:
    world = World()
    broker = MemoryBroker(world.cluster)
    consumer = world.subscribe(broker=broker)
    broker.freeze()
    world.cluster.crash()
    assert not consumer.is_connected()
    broker.thaw()
    assert consumer.is_connected()


@pytest.mark.parametrize("alone", [True, False])
def test_a_consumer_at_its_limit_gets_no_more_and_alone_only_from_the_half_on(alone: bool) -> None:
    world = World(unacked_limits=UnackedLimits(per_consumer=4))
    consumer = world.subscribe(LOW)
    if not alone:
        world.subscribe(HIGH)
    sent = world.publish(*[LOW_KEY] * 10)
    assert ids(consumer) == sent[:4]
    consumer.acknowledge(sent[:1])
    # The broker looks only while somebody is not blocked, and then finds that there is room.
    assert ids(consumer) == ([] if alone else sent[4:5])
    consumer.acknowledge(sent[1:2])
    assert ids(consumer) == (sent[4:6] if alone else sent[5:6])
    consumer.acknowledge(sent[2:6])
    assert ids(consumer) == sent[6:10]
    world.cluster.validate()


def test_a_limit_counts_messages_and_an_entry_may_pass_it() -> None:
    world = World(unacked_limits=UnackedLimits(per_consumer=4))
    consumer = world.subscribe()
    entries = [world.publish(*"kkk", batching=Batching.BY_KEY)[0] for _ in range(3)]
    assert ids(consumer) == entries[:2]
    consumer.acknowledge(entries[:1])
    assert ids(consumer) == []
    consumer.acknowledge(entries[1:2])
    assert ids(consumer) == entries[2:]


def test_at_the_limit_of_a_subscription_nobody_gets_anything_new_until_below_the_half() -> None:
    world = World(unacked_limits=UnackedLimits(per_subscription=4))
    low, high = world.subscribe(LOW), world.subscribe(HIGH)
    sent = world.publish(*[LOW_KEY] * 4, HIGH_KEY)
    assert ids(low) == sent[:4]
    assert ids(high) == []
    low.acknowledge(sent[:2])
    assert ids(high) == []
    low.acknowledge(sent[2:3])
    assert ids(high) == sent[4:]
    assert MemoryAdmin(world.cluster).unacknowledged_limits(world.where.topic) == (50_000, 4)


def test_what_a_closed_consumer_left_does_not_count_any_more() -> None:
    world = World(unacked_limits=UnackedLimits(per_subscription=4))
    low, high = world.subscribe(LOW), world.subscribe(HIGH)
    sent = world.publish(*[LOW_KEY] * 4, HIGH_KEY)
    low.close()
    assert ids(high) == sent[4:]
    world.cluster.validate()


def test_parts_that_somebody_else_acknowledged_do_not_come_again_and_a_crash_brings_them_back() -> (
    None
):
    world = World()
    consumer = world.subscribe()
    (batch,) = world.publish(*"kkkk", batching=Batching.BY_KEY)
    world.cluster.acknowledge_indices(world.where, SUBSCRIPTION, batch, [0])
    world.cluster.acknowledge_indices(world.where, SUBSCRIPTION, batch, [2])
    consumer.disconnect()
    everything(consumer)
    consumer.disconnect()
    (block,) = everything(consumer)
    assert (block.indices, block.values, block.whole) == ([1, 3], [b"1", b"3"], False)
    world.cluster.crash()
    (block,) = everything(consumer)
    assert block.indices == [1, 2, 3]
    world.cluster.acknowledge_indices(world.where, SUBSCRIPTION, batch, [1, 2, 3])
    assert world.backlog == 0
    world.cluster.crash()
    assert [block.indices for block in everything(consumer)] == [[1, 2, 3]]
    consumer.acknowledge([batch])
    assert world.backlog == 0


def test_aborted_messages_and_markers_are_backlog_until_their_owner_is_there() -> None:
    world = World()
    consumer = world.subscribe(HIGH)
    world.cluster.publish_aborted(world.where, Message(b"", LOW_KEY), Message(b"", HIGH_KEY))
    world.publish(HIGH_KEY)
    marker_is_low = MARKER_SLOT in LOW
    assert len(ids(consumer)) == 1
    assert world.backlog == 2 + marker_is_low
    world.subscribe(LOW)
    assert world.backlog == 1
    reader = MemoryBroker(world.cluster).reader(world.where, FIRST)
    assert len(reader.read(0)) == 1
    assert reader.at_end()


def test_a_chunked_message_is_refused_when_it_is_whole() -> None:
    world = World(entries_per_ledger=4)
    consumer = world.subscribe(queue=2)
    rung: list[bool] = []
    consumer.when_ready(lambda: rung.append(True))
    chunks = world.cluster.publish_chunked(world.where, Message(b"0123456789", "k"), 6)
    assert len(chunks) == 6
    assert rung == [True]
    with pytest.raises(ChunkedMessageError) as raised:
        consumer.receive(0)
    assert EntryId(raised.value.facts["ledger"], raised.value.facts["entry"]) == chunks[-1]
    assert world.backlog == 6
    broker = MemoryBroker(world.cluster)
    with pytest.raises(ChunkedMessageError):
        broker.reader(world.where, FIRST).read(0)
    assert broker.reader(world.where, chunks[1]).read(0) == [], "its first part is before the start"


def test_entries_come_twice_on_request() -> None:
    world = World()
    consumer = world.subscribe(LOW)
    sent = world.publish(LOW_KEY, LOW_KEY, HIGH_KEY)
    assert ids(consumer) == sent[:2]
    assert world.cluster.deliver_again(world.where, SUBSCRIPTION, sent[0], sent[2]) == 1
    assert ids(consumer) == sent[:1]
    consumer.acknowledge(sent[:1])
    assert world.cluster.deliver_again(world.where, SUBSCRIPTION, sent[0]) == 1
    assert ids(consumer) == sent[:1], "even what was acknowledged"
    assert world.backlog == 2


def test_what_waits_for_its_owner_is_not_sent_early_on_request() -> None:
    world = World()
    consumer = world.subscribe(LOW, queue=1)
    sent = world.publish(LOW_KEY, LOW_KEY, LOW_KEY)
    world.subscribe(HIGH)
    assert world.cluster.deliver_again(world.where, SUBSCRIPTION, sent[1], sent[2]) == 0
    assert ids(consumer) == sent


def test_a_wiped_cluster_hands_out_the_same_ids_again() -> None:
    world = World()
    world.subscribe()
    before = world.publish(*"ab")
    world.cluster.wipe()
    assert world.cluster.topics() == {}
    world.cluster.create_topic("topic")
    assert world.publish(*"ab") == before
    assert ids(world.subscribe()) == before


def test_a_reader_that_waits_for_a_ledger_after_a_crash_gets_it() -> None:
    world = World(look_ahead=LookAhead(1))
    reader = MemoryBroker(world.cluster).reader(world.where, FIRST)
    world.publish("a")
    assert len(reader.read(0)) == 1
    world.cluster.crash()
    world.publish("b")
    assert [block.values for block in reader.read(0)] == [[b"0"]]


def test_a_cursor_goes_back_exactly_to_what_was_written() -> None:
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
