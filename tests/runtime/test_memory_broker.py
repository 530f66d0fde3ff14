"""The in-memory broker: behaviour that contract cases cannot set up on a real broker."""

from __future__ import annotations

import random
import threading

import pytest

from keyshard.broker.memory import (
    Batching,
    LookAhead,
    MemoryBroker,
    MemoryCluster,
    Message,
    UnackedLimits,
)
from keyshard.broker.memory.client import MemoryConsumer
from keyshard.broker.port import StartPosition, SubscriptionSpec
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.ring.hash_range import HashRange, split_ring
from keyshard.core.ring.key_slot import key_slot
from keyshard.errors import BrokerError, ConfigError, RangeConflictError, TopicNotFoundError
from tests.helpers import DEADLINE_S

SUBSCRIPTION = "unit"
LOW, HIGH = split_ring(2)
RING = split_ring(1)[0]
LOW_KEY = next(key for key in map(str, range(100)) if key_slot(key) in LOW)
LOW_KEY_2 = next(key for key in map(str, range(100)) if key_slot(key) in LOW and key != LOW_KEY)
HIGH_KEY = next(key for key in map(str, range(100)) if key_slot(key) in HIGH)


def subscribe(
    broker: MemoryBroker,
    where: TopicPartition,
    hash_range: HashRange = RING,
    *,
    start: StartPosition = StartPosition.EARLIEST,
    queue: int = 100,
) -> MemoryConsumer:
    return broker.subscribe(
        SubscriptionSpec(
            where,
            SUBSCRIPTION,
            hash_range,
            consumer_name=str(hash_range),
            receiver_queue_size=queue,
        ),
        start,
    )


def values(blocks: list[EntryBlock]) -> list[bytes | None]:
    return [value for block in blocks for value in block.values]


def plain(cluster: MemoryCluster) -> TopicPartition:
    return TopicPartition(cluster.create_topic("topic"))


def messages(*pairs: tuple[str, int]) -> list[Message]:
    return [Message(b"%d" % number, key=key) for key, number in pairs]


def test_positions_of_a_range_are_not_monotonic_and_those_of_a_key_are() -> None:
    cluster = MemoryCluster()
    where = plain(cluster)
    broker = MemoryBroker(cluster)
    consumers = [subscribe(broker, where, hash_range, queue=5) for hash_range in (LOW, HIGH)]
    cluster.publish(where.name, *messages(*((str(number % 200), number) for number in range(500))))
    got: dict[MemoryConsumer, list[EntryBlock]] = {consumer: [] for consumer in consumers}
    while sum(map(len, got.values())) < 500:
        for consumer in consumers:
            got[consumer] += consumer.receive(0)
            cluster.validate()
    for blocks in got.values():
        ids = [block.id for block in blocks]
        assert ids != sorted(ids), "some slots overtake others"
        for key in {block.partition_keys[0] for block in blocks}:
            of_key = [block.id for block in blocks if block.partition_keys == [key]]
            assert of_key == sorted(of_key)


def test_later_entries_of_a_slot_wait_behind_earlier_ones_for_a_narrower_owner() -> None:
    cluster = MemoryCluster()
    where = plain(cluster)
    broker = MemoryBroker(cluster)
    keep = subscribe(broker, where, HIGH)
    owner = subscribe(broker, where, LOW, queue=2)
    cluster.publish(where.name, *messages((LOW_KEY, 0), (LOW_KEY, 1), (LOW_KEY, 2), (LOW_KEY_2, 3)))
    owner.close()
    slot = key_slot(LOW_KEY_2)
    narrow = subscribe(broker, where, HashRange(slot, slot))
    cluster.publish(where.name, *messages((LOW_KEY, 4), (LOW_KEY_2, 5)))
    assert values(narrow.receive(0)) == [b"3", b"5"]
    narrow.close()
    again = values(subscribe(broker, where, LOW).receive(0))
    assert [value for value in again if value in {b"0", b"1", b"2", b"4"}] == [
        b"0", b"1", b"2", b"4",
    ]  # fmt: skip
    assert [value for value in again if value in {b"3", b"5"}] == [b"3", b"5"]
    assert keep.receive(0) == []
    cluster.validate()


@pytest.mark.parametrize(
    ("look_ahead", "expected"),
    [(LookAhead(3, 100), 3), (LookAhead(3, 2), 2), (LookAhead(1, 100), 1)],
)
def test_the_look_ahead_limit_counts_entries_that_wait(
    look_ahead: LookAhead, expected: int
) -> None:
    cluster = MemoryCluster(look_ahead=look_ahead)
    where = plain(cluster)
    consumer = subscribe(MemoryBroker(cluster), where, LOW)
    pairs = [pair for number in range(10) for pair in ((LOW_KEY, number), (HIGH_KEY, number))]
    cluster.publish(where.name, *messages(*pairs))
    assert values(consumer.receive(0)) == [b"%d" % number for number in range(expected)]
    subscribe(MemoryBroker(cluster), where, HIGH)
    assert values(consumer.receive(0)) == [b"%d" % number for number in range(expected, 10)]
    cluster.validate()


def test_more_consumers_raise_the_look_ahead_limit() -> None:
    assert LookAhead().limit(1) == 2_000
    assert LookAhead().limit(9) == 18_000
    assert LookAhead().limit(50) == 20_000
    with pytest.raises(ConfigError, match="below 1"):
        LookAhead(0)


def test_permits_count_messages_and_a_batch_may_overdraw_them() -> None:
    cluster = MemoryCluster()
    where = plain(cluster)
    consumer = subscribe(MemoryBroker(cluster), where, queue=4)
    for first in (0, 10):
        batch = messages(*((LOW_KEY, number) for number in range(first, first + 10)))
        cluster.publish(where.name, *batch, batching=Batching.BY_KEY)
    assert [block.indices for _ in range(3) for block in consumer.receive(0)] == [
        [0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1],
    ]  # fmt: skip


def test_a_dropped_consumer_keeps_its_queue_and_loses_its_acknowledgements() -> None:
    cluster = MemoryCluster()
    where = plain(cluster)
    broker = MemoryBroker(cluster)
    consumer = subscribe(broker, where)
    cluster.publish(where.name, *messages((LOW_KEY, 0)))
    broker.drop()
    assert not consumer.is_connected()
    (stale,) = consumer.receive(0)
    consumer.acknowledge([stale.id])
    assert cluster.backlog(where, SUBSCRIPTION) == 1
    assert consumer.receive(0) == []
    broker.reconnect()
    assert consumer.is_connected()
    assert [block.id for block in consumer.receive(0)] == [stale.id]


def test_a_dropped_consumer_whose_range_was_taken_stays_silent_until_it_is_free() -> None:
    cluster = MemoryCluster()
    where = plain(cluster)
    broker = MemoryBroker(cluster)
    zombie = subscribe(broker, where)
    broker.drop()
    owner = subscribe(MemoryBroker(cluster), where)
    broker.reconnect()
    cluster.publish(where.name, *messages((LOW_KEY, 0)))
    assert not zombie.is_connected()
    assert zombie.receive(0) == []
    owner.close()
    broker.reconnect()
    assert zombie.is_connected()
    assert values(zombie.receive(0)) == [b"0"]


def test_a_closed_consumer_does_not_come_back_with_the_connection() -> None:
    cluster = MemoryCluster()
    where = plain(cluster)
    broker = MemoryBroker(cluster)
    consumer = subscribe(broker, where)
    consumer.close()
    broker.disconnect()
    assert not consumer.is_connected()
    assert subscribe(broker, where).is_connected()


def test_ledgers_roll_over_and_ids_ascend() -> None:
    cluster = MemoryCluster(entries_per_ledger=2)
    where = plain(cluster)
    other = TopicPartition(cluster.create_topic("other"))
    ids = [entry_id for _, entry_id in cluster.publish(where.name, *[Message(b"")] * 5)]
    assert [entry_id.entry for entry_id in ids] == [0, 1, 0, 1, 0]
    assert ids == sorted(ids)
    assert len({entry_id.ledger for entry_id in ids}) == 3
    ((_, elsewhere),) = cluster.publish(other.name, Message(b""))
    assert elsewhere.ledger not in {entry_id.ledger for entry_id in ids}
    cluster.validate()


def test_trimmed_entries_are_gone_for_readers_consumers_and_backlog() -> None:
    cluster = MemoryCluster(look_ahead=LookAhead(2))
    where = plain(cluster)
    broker = MemoryBroker(cluster)
    consumer = subscribe(broker, where, LOW, queue=1)
    pairs = [(HIGH_KEY, 0), (LOW_KEY, 1), (HIGH_KEY, 2), (LOW_KEY, 3), (LOW_KEY, 4)]
    ids = [entry_id for _, entry_id in cluster.publish(where.name, *messages(*pairs))]
    cluster.trim(where, before=ids[3])
    cluster.validate()
    assert cluster.backlog(where, SUBSCRIPTION) == 2
    assert values(broker.reader(where, EntryId(0, 0)).read(0)) == [b"3", b"4"]
    assert values([block for _ in range(3) for block in consumer.receive(0)]) == [b"1", b"3", b"4"]
    late = broker.subscribe(
        SubscriptionSpec(where, "late", RING, consumer_name="late", receiver_queue_size=10),
        StartPosition.EARLIEST,
    )
    assert values(late.receive(0)) == [b"3", b"4"]


def test_publish_times_come_from_the_argument_else_from_the_cluster() -> None:
    ticks = iter(range(1_000, 2_000))
    cluster = MemoryCluster(now_ms=lambda: next(ticks))
    where = plain(cluster)
    cluster.publish(where.name, Message(b""), Message(b""))
    cluster.publish(where.name, Message(b""), publish_ms=7)
    cluster.publish(where.name, Message(b""))
    blocks = MemoryBroker(cluster).reader(where, EntryId(0, 0)).read(0)
    assert [block.publish_ms for block in blocks] == [1_000, 1_000, 7, 1_001]


def test_a_key_is_always_in_one_partition_and_keyless_messages_go_in_turn() -> None:
    cluster = MemoryCluster()
    topic = cluster.create_topic("topic", partitions=3)
    keyed = {
        key: {where for _ in range(3) for where, _ in cluster.publish(topic, Message(b"", key))}
        for key in map(str, range(20))
    }
    assert {len(wheres) for wheres in keyed.values()} == {1}
    assert len(set().union(*keyed.values())) == 3
    keyless = [where.partition for where, _ in cluster.publish(topic, *[Message(b"")] * 6)]
    assert sorted(keyless) == [0, 0, 1, 1, 2, 2]


def test_batches_hold_no_more_messages_than_allowed() -> None:
    cluster = MemoryCluster()
    where = plain(cluster)
    batch = messages(("a", 0), ("b", 1), ("a", 2), ("a", 3), ("a", 4))
    for batching in (Batching.BY_KEY, Batching.MIXED):
        cluster.publish(where.name, *batch, batching=batching, batch_messages_max=2)
    blocks = MemoryBroker(cluster).reader(where, EntryId(0, 0)).read(0)
    assert [values([block]) for block in blocks] == [
        [b"0", b"2"], [b"1"], [b"3", b"4"], [b"0", b"1"], [b"2", b"3"], [b"4"],
    ]  # fmt: skip


def test_bad_requests_are_refused_with_named_errors() -> None:
    cluster = MemoryCluster()
    where = plain(cluster)
    broker = MemoryBroker(cluster)
    with pytest.raises(ConfigError):
        MemoryCluster(entries_per_ledger=0)
    with pytest.raises(ConfigError):
        cluster.create_topic("topic")
    with pytest.raises(ConfigError):
        subscribe(broker, where, queue=0)
    with pytest.raises(TopicNotFoundError):
        cluster.publish("persistent://public/default/missing", Message(b""))
    with pytest.raises(TopicNotFoundError):
        subscribe(broker, TopicPartition(where.topic, 3))
    with pytest.raises(BrokerError):
        cluster.backlog(where, "nobody")
    subscribe(broker, where, LOW)
    with pytest.raises(RangeConflictError, match="overlaps range 0-32767 of consumer"):
        subscribe(broker, where, HashRange(20, 30))


def test_closing_wakes_a_receive_that_waits() -> None:
    cluster = MemoryCluster()
    consumer = subscribe(MemoryBroker(cluster), plain(cluster))
    refused = threading.Event()

    def wait() -> None:
        with pytest.raises(BrokerError):
            consumer.receive(120_000)
        refused.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    consumer.close()
    assert refused.wait(DEADLINE_S)


def test_publishing_wakes_a_receive_and_a_read_that_wait() -> None:
    cluster = MemoryCluster()
    where = plain(cluster)
    broker = MemoryBroker(cluster)
    consumer, reader = subscribe(broker, where), broker.reader(where, EntryId(0, 0))
    got: list[bytes | None] = []
    threads = [
        threading.Thread(target=lambda: got.extend(values(consumer.receive(120_000))), daemon=True),
        threading.Thread(target=lambda: got.extend(values(reader.read(120_000))), daemon=True),
    ]
    for thread in threads:
        thread.start()
    cluster.publish(where.name, Message(b"0"))
    for thread in threads:
        thread.join(DEADLINE_S)
    assert got == [b"0", b"0"]


class RandomRun:
    """Random publishing, receiving, acknowledging, closing and dropping on one topic partition."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_ms = 0
        self.cluster = MemoryCluster(
            entries_per_ledger=7,
            look_ahead=LookAhead(self.random.randint(2, 8)),
            unacked_limits=UnackedLimits(
                self.random.choice([0, 4, 20]), self.random.choice([0, 8, 30])
            ),
            cursor_write_ms=self.random.choice([0, 5, 100]),
            ack_group_ms=self.random.choice([0, 3]),
            now_ms=lambda: self.now_ms,
        )
        self.where = plain(self.cluster)
        self.ranges = split_ring(self.random.randint(1, 4))
        self.owners: dict[HashRange, tuple[MemoryBroker, MemoryConsumer]] = {}
        self.open(self.ranges[0])
        self.published: list[EntryId] = []
        self.acked: set[EntryId] = set()
        self.last: dict[tuple[MemoryConsumer, str], EntryId] = {}
        self.unacked: list[EntryId] = []

    def open(self, hash_range: HashRange) -> None:
        broker = MemoryBroker(self.cluster)
        queue = self.random.randint(1, 6)
        self.owners[hash_range] = broker, subscribe(broker, self.where, hash_range, queue=queue)

    def step(self) -> None:
        hash_range = self.random.choice(self.ranges)
        actions = ["publish", "receive", "receive", "ack", "close", "drop", "reconnect", "fault"]
        action = self.random.choice(actions)
        self.now_ms += self.random.randrange(3)
        if action == "fault" and self.random.random() < 0.2:
            self.random.choice([self.cluster.crash, lambda: self.cluster.unload(self.where)])()
            self.last.clear()
        elif action == "publish":
            batch = messages(*((str(self.random.randrange(9)), n) for n in range(4)))
            batching = self.random.choice([Batching.NONE, Batching.BY_KEY])
            if self.random.random() < 0.1:
                self.cluster.publish_aborted(self.where, *batch[:1])
            found = self.cluster.publish(self.where.name, *batch, batching=batching)
            self.published += [entry_id for _, entry_id in found]
        elif hash_range not in self.owners:
            self.open(hash_range)
        elif action == "receive":
            self.receive(self.owners[hash_range][1])
        elif action == "ack" and self.unacked:
            entry_id = self.unacked.pop(self.random.randrange(len(self.unacked)))
            self.owners[hash_range][1].acknowledge([entry_id])
            self.acked.add(entry_id)
        elif action == "close" and self.random.random() < 0.3:
            self.owners.pop(hash_range)[1].close()
        elif action == "drop" and self.random.random() < 0.3:
            self.owners[hash_range][0].disconnect()
            self.forget_order(self.owners[hash_range][1])
        elif action == "reconnect" and self.random.random() < 0.3:
            self.owners[hash_range][1].disconnect()
            self.forget_order(self.owners[hash_range][1])

    def forget_order(self, consumer: MemoryConsumer) -> None:
        """A new delivery of every key begins at its oldest unacknowledged entry."""
        self.last = {pair: last for pair, last in self.last.items() if pair[0] is not consumer}

    def receive(self, consumer: MemoryConsumer) -> int:
        blocks = consumer.receive(0)
        for block in blocks:
            key = block.partition_keys[0]
            assert key is not None
            last = self.last.get((consumer, key), EntryId(0, 0))
            assert block.id >= last, "entries of a key came out of order"
            self.last[consumer, key] = block.id
            if block.indices[-1] == block.batch_size - 1:
                self.unacked.append(block.id)
        return len(blocks)

    def finish(self) -> None:
        """Cover the ring, receive and acknowledge all there is."""
        for hash_range in self.ranges:
            if hash_range not in self.owners:
                self.open(hash_range)
        consumers = [consumer for _, consumer in self.owners.values()]
        for _ in range(1_000):
            # Acknowledgements are sent when they are due; that sets further entries free.
            self.now_ms += 100
            if not self.cluster.backlog(self.where, SUBSCRIPTION):
                return
            while sum(map(self.receive, consumers)):
                pass
            consumers[0].acknowledge(self.unacked)
            self.acked.update(self.unacked)
            self.unacked.clear()
            self.cluster.validate()


@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_lost_and_each_key_stays_in_order(seed: int) -> None:
    run = RandomRun(seed)
    for _ in range(150):
        run.step()
        run.cluster.validate()
    run.finish()
    assert run.acked == set(run.published)
    assert run.cluster.backlog(run.where, SUBSCRIPTION) == 0
