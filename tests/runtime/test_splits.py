"""Bounded reads of the in-memory broker: planned, cut, and read split by split."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import pyarrow as pa
import pytest

from keyshard import KeyShardSource
from keyshard.broker.memory import MemoryBroker, MemoryCluster, Message
from keyshard.broker.memory.admin import MemoryAdmin
from keyshard.columns import record_batches
from keyshard.columns.record_batches import SCHEMA
from keyshard.config.segments import Segments
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.position.ledger import Ledger
from keyshard.core.position.read_bounds import parse_bounds
from keyshard.core.position.replicas import UNKNOWN, LedgerReplicas
from keyshard.core.position.split import cut
from keyshard.errors import (
    AuthorizationError,
    BrokerUnavailableError,
    ChunkedMessageError,
    ConfigError,
    EncryptedMessageError,
    KeyShardError,
    ReplayTimeoutError,
    TopicNotFoundError,
)
from keyshard.reading.split_planner import plan_read, stretches
from keyshard.reading.split_reader import read_split, read_splits
from tests.helpers import present
from tests.support.disconnecting_readers import DisconnectingBroker, every_disconnect
from tests.support.faulty_broker import Fault, ScriptedCall, answering, faulty, giving
from tests.support.split_topic import IDS, T0, SplitTopic

pytestmark = pytest.mark.usefixtures("reads_in_no_time")


@pytest.mark.parametrize("limit", [1024 * 1024, 64 * 1024 * 1024])
def test_readers_receive_ahead_as_many_bytes_as_the_read_says(
    split_topic: SplitTopic, limit: int
) -> None:
    opens = ScriptedCall()
    broker = faulty(MemoryBroker(split_topic.cluster), reader=opens)
    assert (
        split_topic.read(split_topic.plan(), broker, bytes_in_flight_max=limit) == split_topic.ids
    )
    assert {how.receiver_queue_bytes for _, _, how in opens.asked} == {limit}


@pytest.mark.parametrize("splits", [1, 3, 4, 13, 63, 10_000])
def test_any_number_of_splits_has_every_message_once_in_order(
    split_topic: SplitTopic, splits: int
) -> None:
    planned = cut(split_topic.plan(), splits)
    assert len(planned) == max(3, min(splits, 63))
    assert split_topic.read(planned) == split_topic.ids


def test_a_read_ends_at_an_encrypted_message_with_an_error_and_one_up_to_it_does_not() -> None:
    topic = SplitTopic(partitions=1, entries=6)
    ((_, at),) = topic.cluster.publish(topic.partitions[0], Message(b"?", key="a"), encrypted=True)
    topic.publish(topic.partitions[0], 1, T0)
    with pytest.raises(EncryptedMessageError, match=f"{at.ledger}:{at.entry} of"):
        topic.read(topic.plan())
    before = topic.read(topic.plan(end=f"{at.ledger}:{at.entry}"))
    behind = topic.read(topic.plan(f"{at.ledger}:{at.entry + 1}"))
    assert (len(before), len(behind)) == (len(topic.ids) - 1, 1)


def test_messages_published_after_planning_are_not_read(split_topic: SplitTopic) -> None:
    planned, before = cut(split_topic.plan(), 5), list(split_topic.ids)
    for where in split_topic.partitions:
        split_topic.publish(where, 3, T0)
        split_topic.cluster.roll_ledger(where)
        split_topic.publish(where, 1, T0)
    assert split_topic.read(planned) == before
    assert sorted(split_topic.read(split_topic.plan())) == sorted(split_topic.ids)


@pytest.mark.parametrize("seed", range(6))
def test_times_select_exactly_however_they_are_out_of_order(seed: int) -> None:
    topic, chance = SplitTopic(2, 0), random.Random(seed)
    for where in topic.partitions:
        for number in range(40):
            time_ms = chance.choice([T0 + number, T0 + chance.randrange(40), 10**12, 2 * T0])
            topic.publish(where, chance.randint(1, 3), time_ms)
    for start, end in ((T0, T0 + 40), (T0 + 10, T0 + 11), (0, T0), (T0 + 20, 3 * T0), (T0, T0)):
        expected = [one for one in topic.ids if start <= topic.times[one] < end]
        assert topic.read(cut(topic.plan(start, end), 7)) == expected
    moment = datetime.fromtimestamp(T0 // 1000, timezone.utc)
    assert topic.read(topic.plan(moment)) == [one for one in topic.ids if topic.times[one] >= T0]


@pytest.mark.parametrize("seed", range(6))
def test_a_read_with_a_known_disorder_is_pruned_and_loses_nothing(seed: int) -> None:
    disorder, chance = 15, random.Random(seed)
    topic = SplitTopic(1, 0)
    newest = 0
    for number in range(200):
        time_ms = max(T0 + number + chance.randint(-10, 10), newest - disorder)
        newest = max(newest, time_ms)
        topic.publish(topic.partitions[0], 1, time_ms)
    for start in range(T0 - 5, T0 + 205, 10):
        end = start + 12
        planned = topic.plan(start, end, disorder_ms=disorder)
        assert sum(split.entries for split in planned) < 90
        expected = [one for one in topic.ids if start <= topic.times[one] < end]
        assert topic.read(cut(planned, 3)) == expected


def test_a_message_without_a_publish_time_lies_in_no_bounds_of_time() -> None:
    topic = SplitTopic(1, 0)
    topic.publish(topic.partitions[0], 1, 0)
    topic.publish(topic.partitions[0], 1, T0)
    assert topic.read(topic.plan()) == topic.ids
    assert topic.read(topic.plan(0)) == topic.ids[1:]
    assert topic.read(topic.plan("earliest", 2 * T0)) == topic.ids[1:]


def test_bounds_without_entries_between_them_have_no_split(split_topic: SplitTopic) -> None:
    assert cut(split_topic.plan("latest"), 5) == []
    assert cut(split_topic.plan("earliest", "earliest"), 5) == []
    assert cut(SplitTopic(2, 0).plan(), 5) == []
    assert split_topic.read(cut(split_topic.plan(2 * T0), 5)) == []


@pytest.mark.parametrize("at_once", [1, 2])
def test_rows_are_exact_wherever_the_connection_is_cut(at_once: int) -> None:
    topic = SplitTopic(1)
    (whole,) = topic.plan()
    for split in cut([whole], 2):
        wanted = topic.read([split])
        broker = DisconnectingBroker(topic.cluster)
        assert topic.read([split], broker) == wanted
        for cutting in every_disconnect(topic.cluster, broker.steps, at_once):
            assert topic.read([split], cutting) == wanted


def test_a_reader_that_ends_inside_an_entry_is_followed_by_another() -> None:
    """Later entries do not prove that the rest of an entry is gone."""
    topic = SplitTopic(1)
    log = topic.cluster.log(topic.partitions[0])
    cut_off: list[EntryId] = []

    def partly(read: Fault, timeout_ms: int) -> list[EntryBlock]:
        blocks: list[EntryBlock] = read(timeout_ms)
        for i, block in enumerate(blocks):
            if block.batch_size == 3 and block.id not in cut_off:
                cut_off.append(block.id)
                blocks[i] = present(log.get(present(log.ordinal(block.id)))).block([0, 1])
                break
        return blocks

    broker = faulty(MemoryBroker(topic.cluster), reader=giving(read=partly))
    assert topic.read(topic.plan(), broker) == topic.ids
    assert len(cut_off) > 3


def test_an_entry_that_always_ends_early_is_a_retriable_error() -> None:
    topic = SplitTopic(1)

    def longer(read: Fault, timeout_ms: int) -> list[EntryBlock]:
        blocks: list[EntryBlock] = read(timeout_ms)
        for block in blocks:
            if block.batch_size == 3:
                block.batch_size, block.complete = 4, False
        return blocks

    broker = faulty(MemoryBroker(topic.cluster), reader=giving(read=longer))
    with pytest.raises(BrokerUnavailableError, match="lose their connection inside entry"):
        topic.read(topic.plan(), broker)


def test_a_read_that_receives_nothing_raises_an_error_and_does_not_end(
    split_topic: SplitTopic,
) -> None:
    (split,) = cut(split_topic.plan(), 3)[:1]
    silent = giving(read=answering([]), at_end=lambda _: False)
    broker = faulty(MemoryBroker(split_topic.cluster), reader=silent)
    with pytest.raises(ReplayTimeoutError, match="returned nothing for"):
        list(read_split(broker, split_topic.admin, split, IDS, 0.05))


def test_a_broker_that_is_away_is_waited_for_until_the_deadline(split_topic: SplitTopic) -> None:
    broker = DisconnectingBroker(split_topic.cluster, range(10**6))
    with pytest.raises(KeyShardError) as raised:
        list(read_split(broker, split_topic.admin, split_topic.plan()[0], IDS, 0.05))
    assert raised.value.retriable


@pytest.mark.parametrize("placed", [False, True])
def test_without_permission_to_ask_for_transactions_the_broker_reads_everything(
    split_topic: SplitTopic, placed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Bookies would return messages that the broker holds back behind an open transaction."""

    def placed_ledgers(_call: Fault, topic_partition: TopicPartition) -> tuple[Ledger, ...]:
        found = split_topic.admin.ledgers(topic_partition) or ()
        stored = LedgerReplicas(0, 6, 1, "CRC32C", ((0, ("b:1",)),))
        return tuple(replace(one, placement=replace(stored, ledger=one.id)) for one in found)

    refuses = ScriptedCall(raises=lambda where: AuthorizationError(f"{where} is refused."))
    faulty(split_topic.admin, held_back_behind=refuses, placed_ledgers=placed_ledgers)
    planned = split_topic.plan(segments=Segments("auto" if placed else "broker"))
    why = {span.placement for split in planned for span in split.spans}
    held = "it is unknown whether transactions hold back its entries"
    assert why == {held if placed else UNKNOWN}
    assert split_topic.read(planned) == split_topic.ids
    assert f"hold back entries of {split_topic.partitions[0]}: " in caplog.text


def test_a_chunked_message_is_refused_by_name() -> None:
    topic = SplitTopic(1, 3)
    topic.cluster.publish_chunked(topic.partitions[0], Message(b"x" * 10, "k"), 2)
    with pytest.raises(ChunkedMessageError):
        topic.read(topic.plan())


def test_a_chunked_message_after_the_planned_end_is_not_read() -> None:
    """A Reader returns no marker, so a read that ends with one goes on to the next entry."""
    topic = SplitTopic(1, 3)
    planned = topic.plan()
    topic.cluster.publish_chunked(topic.partitions[0], Message(b"x" * 10, "k"), 2)
    assert topic.read(planned) == topic.ids


def test_columns_that_are_not_selected_are_not_built(
    split_topic: SplitTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> Any:
        raise AssertionError("nobody asked for this column")

    (split,) = split_topic.plan()[:1]
    wanted = ("__key", "__partition")
    for name in set(record_batches._BUILDERS) - {*wanted}:
        monkeypatch.setitem(record_batches._BUILDERS, name, never)
    broker = MemoryBroker(split_topic.cluster)
    (batch,) = read_split(broker, split_topic.admin, split, wanted, 5.0)
    assert batch.schema.names == ["__key", "__partition"]
    assert batch.num_rows == len(split_topic.ids) // 3


def test_batches_are_the_same_however_the_entries_came(
    split_topic: SplitTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that runs a task again goes on at the block where it ended."""
    monkeypatch.setattr(record_batches, "ROWS_PER_BATCH_MAX", 7)
    (split,) = split_topic.plan()[:1]

    def batches(broker: MemoryBroker) -> list[pa.RecordBatch]:
        return list(read_split(broker, split_topic.admin, split, SCHEMA.names, 5.0))

    wanted = batches(MemoryBroker(split_topic.cluster))
    assert len(wanted) > 2
    for most in (1, 2, 5):
        monkeypatch.setattr("keyshard.broker.memory.client.READ_MESSAGES_MAX", most)
        assert batches(MemoryBroker(split_topic.cluster)) == wanted


def test_a_source_is_planned_by_its_topics_and_read_by_its_connection() -> None:
    url = "memory://bounded-source"
    cluster = MemoryCluster.named("bounded-source")
    names = [cluster.create_topic("a", 2), cluster.create_topic("b")]
    for name in names:
        cluster.publish(name, *(Message(b"%d" % i, key=f"{i}") for i in range(9)))
    source = KeyShardSource(names, service_url=url, admin_url=url)
    splits = cut(plan_read(source), 5)
    assert {split.topic_partition.topic for split in splits} == set(names)
    values = read_splits(source.how_to_connect(), splits, ["value"])
    found = [value for batch in values for value in batch.column(0).to_pylist()]
    assert sorted(found) == sorted([b"%d" % i for i in range(9)] * 2)
    assert all(
        not cluster.subscriptions(where) for name in names for where in cluster.partitions(name)
    )


def _source(**options: Any) -> KeyShardSource:
    url = "memory://bounded-errors"
    return KeyShardSource("t", **{"service_url": url, "admin_url": url, **options})


@pytest.mark.parametrize(
    ("source", "options", "error"),
    [
        ({"admin_url": None}, {}, ConfigError),
        ({}, {}, TopicNotFoundError),
        ({}, {"disorder_max_s": -1}, ConfigError),
        ({}, {"disorder_max_s": float("nan")}, ConfigError),
        ({}, {"disorder_max_s": "1"}, ConfigError),
        ({}, {"disorder_max_s": 10**12}, ConfigError),
    ],
)
def test_a_failed_plan_is_reported(
    source: dict[str, Any], options: dict[str, Any], error: type[KeyShardError]
) -> None:
    with pytest.raises(error):
        plan_read(_source(**source), **options)


def test_planning_1000_partitions_asks_each_once_and_several_at_a_time() -> None:
    cluster = MemoryCluster()
    topic = cluster.create_topic("wide", 1_000)
    partitions = cluster.partitions(topic)
    for where in partitions[::2]:
        cluster.publish(where, Message(b"m", key="k"))

    asks = ScriptedCall()
    admin = faulty(MemoryAdmin(cluster), ledgers=asks)
    starts, ends = (parse_bounds("start", one, partitions) for one in ("earliest", "latest"))
    planned = stretches(admin, starts, ends, 5.0)
    assert sorted(asks.asked) == [(where,) for where in sorted(partitions)]
    assert len(cut(planned, 8)) == 500
