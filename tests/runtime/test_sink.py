"""A sink on the in-memory broker: batches exactly once, and single messages."""

from __future__ import annotations

import asyncio
import pickle
import random
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from keyshard import KeyShardSink, MessageId
from keyshard.broker.connect import connect
from keyshard.broker.memory import MemoryBroker
from keyshard.broker.memory import Message as StoredMessage
from keyshard.broker.memory.publishing import Write
from keyshard.broker.port import Broker, PublishOptions
from keyshard.columns.canonical import canonical
from keyshard.columns.outgoing import outgoing_of
from keyshard.config.connection import Connection
from keyshard.config.sink import SinkConfig
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.publishing import batch_layout, key_partition, layout_of, sequence_id
from keyshard.core.releases import release_of
from keyshard.errors import (
    BatchMismatchError,
    BrokerError,
    BrokerUnavailableError,
    ConfigError,
    DeduplicationError,
    MessageTooLargeError,
    NotRunningError,
    ProducerBusyError,
    ProducerFencedError,
    QuotaExceededError,
)
from keyshard.publishing.batch_writer import WriteReport
from keyshard.publishing.topic_tail import last_stored_id
from tests.helpers import wait_until
from tests.support.copied_topic import SinkTopic
from tests.support.deadlines import deadline

PARTITIONS = 3
Rows = list[tuple[str | None, bytes]]


@pytest.fixture
def world() -> Iterator[SinkTopic]:
    made = SinkTopic(PARTITIONS, send_timeout_ms=2_000)
    yield made
    made.close()


def batch_of(rows: Rows) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "value": pa.array([value for _, value in rows], pa.binary()),
            "__key": pa.array([key for key, _ in rows], pa.string()),
        }
    )


def rows_of(batch: int, count: int = 200, keys: int = 7) -> Rows:
    return [(f"k{number % keys}", b"%d:%d" % (batch, number)) for number in range(count)]


def expected(*batches: Rows) -> dict[str | None, list[bytes]]:
    found: dict[str | None, list[bytes]] = {}
    for rows in batches:
        for key, value in rows:
            found.setdefault(key, []).append(value)
    return found


def test_a_batch_is_stored_by_key_in_entries_of_one_key(world: SinkTopic) -> None:
    rows = rows_of(0)
    report = world.sink().write_batch(batch_of(rows), 0)
    assert (report.rows, report.entries, report.already_stored) == (200, 7, 0)
    assert world.by_key() == expected(rows)
    for one in world.stored():
        assert one.key is not None
        assert one.partition == key_partition(one.key, PARTITIONS)


def test_a_batch_that_is_written_again_is_stored_once(world: SinkTopic) -> None:
    rows = rows_of(0)
    world.sink().write_batch(batch_of(rows), 0)
    again = list(rows)
    # Another order of the keys, and another cut of the entries.
    again.sort(key=lambda row: hash(row[0]))
    report = world.sink(entry_messages_max=3).write_batch(batch_of(again), 0)
    assert report.already_stored == 200
    assert world.by_key() == expected(rows)


def test_batches_follow_one_another_and_an_old_one_is_refused(world: SinkTopic) -> None:
    sink = world.sink()
    sink.write_batch(batch_of(rows_of(0)), 0)
    sink.write_batch(batch_of(rows_of(1)), 1)
    with pytest.raises(ProducerFencedError, match="Batch 0 of 's-0' is older"):
        sink.write_batch(batch_of(rows_of(0)), 0)
    assert world.by_key() == expected(rows_of(0), rows_of(1))


def test_a_batch_with_fewer_rows_than_were_written_is_refused(world: SinkTopic) -> None:
    sink = world.sink()
    sink.write_batch(batch_of(rows_of(0)), 0)
    with pytest.raises(BatchMismatchError, match="otherwise than in an earlier attempt"):
        sink.write_batch(batch_of(rows_of(0, 100)), 0)


def test_other_rows_in_the_same_numbers_are_not_noticed(world: SinkTopic) -> None:
    """A limit: the rows of the first attempt stay."""
    sink = world.sink()
    sink.write_batch(batch_of(rows_of(0)), 0)
    others = [(key, b"other") for key, _ in rows_of(0)]
    assert sink.write_batch(batch_of(others), 0).already_stored == 200
    assert world.by_key() == expected(rows_of(0))


def moved(rows: Rows) -> Rows:
    """Give a row the key of the row before it."""
    return [rows[0], (rows[0][0], rows[1][1]), *rows[2:]]


@pytest.mark.parametrize(
    ("change", "again"),
    [
        ("another hashing scheme", {"hashing_scheme": "murmur3"}),
        ("more topic partitions", {}),
        ("a row has another key", {}),
        ("a row more", {}),
        ("no row for a topic partition", {}),
    ],
)
def test_a_repeated_batch_that_is_distributed_otherwise_is_refused(
    world: SinkTopic, change: str, again: dict[str, Any]
) -> None:
    rows = rows_of(0)
    world.sink().write_batch(batch_of(rows), 0)
    repeated = list(rows)
    match change:
        case "more topic partitions":
            world.cluster.grow_topic(world.topic, PARTITIONS + 2)
        case "a row has another key":
            repeated = moved(rows)
        case "a row more":
            repeated.append(("new", b"new"))
        case "no row for a topic partition":
            repeated = [row for row in rows if key_partition(row[0] or "", PARTITIONS) != 1]
            assert len(repeated) < len(rows)
    with pytest.raises(BatchMismatchError, match="Batch 0 of 's-0' is distributed otherwise"):
        world.sink(**again).write_batch(batch_of(repeated), 0)
    assert world.by_key() == expected(rows)


def test_a_topic_partition_takes_as_many_rows_as_ids_can_number(
    world: SinkTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keyshard.publishing.batch_writer.ROWS_MAX", 5)
    world.sink().write_batch(batch_of([("a", b"")] * 5), 0)
    with pytest.raises(ConfigError, match=r"The batch has 6 rows for .*; the most is 5"):
        world.sink().write_batch(batch_of([("a", b"")] * 6), 1)


@pytest.mark.parametrize("seed", range(30))
def test_an_attempt_that_dies_anywhere_is_completed_by_the_next(
    world: SinkTopic, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that stores no more after some writes, and a sink that gives up."""
    draw = random.Random(seed)
    rows = rows_of(0, 60)
    partitions = world.cluster.partitions(world.topic)
    written = draw.randrange(20)
    store = world.cluster.store_entry

    def store_some(where: Any, *how: Any) -> EntryId:
        nonlocal written
        if where in partitions:
            written -= 1
            if written == 0:
                for one in partitions:
                    world.cluster.hold_writes(one)
        return store(where, *how)

    monkeypatch.setattr(world.cluster, "store_entry", store_some)
    first = world.sink(send_timeout_ms=100, entry_messages_max=draw.randrange(1, 9))
    try:
        first.write_batch(batch_of(rows), 0)
    except BrokerUnavailableError:
        first._state.close()
    # What the broker accepted is written late, or lost.
    for one in partitions:
        how = draw.choice([world.cluster.release_writes, world.cluster.fail_writes])
        how(one)
    world.sink(entry_messages_max=draw.randrange(1, 9)).write_batch(batch_of(rows), 0)
    assert world.by_key() == expected(rows)


def test_accepted_and_unwritten_entries_are_waited_for(world: SinkTopic) -> None:
    """The second attempt must not count as stored what may still be lost."""
    rows: Rows = [("a", b"1"), ("a", b"2")]
    (where,) = {
        part for part in world.cluster.partitions(world.topic)
        if part.partition == key_partition("a", PARTITIONS)
    }  # fmt: skip
    world.sink().write_batch(batch_of([("a", b"0")]), 0)
    world.cluster.hold_writes(where)
    first = world.sink(send_timeout_ms=100)
    with pytest.raises(BrokerUnavailableError):
        first.write_batch(batch_of(rows), 1)
    second = world.sink(send_timeout_ms=100)
    with pytest.raises(BrokerUnavailableError):
        second.write_batch(batch_of(rows), 1)
    world.cluster.fail_writes(where)
    world.sink().write_batch(batch_of(rows), 1)
    assert world.by_key() == {"a": [b"0", b"1", b"2"]}


def test_rows_that_are_stored_in_part_are_not_taken_for_stored(world: SinkTopic) -> None:
    """The first id of an entry says nothing about its last: one row is asked for, the last."""
    rows: Rows = [("a", b"%d" % number) for number in range(8)]
    where = world.cluster.partitions(world.topic)[key_partition("a", PARTITIONS)]
    store = world.cluster.store_entry

    def store_one(*how: Any) -> EntryId:
        world.cluster.hold_writes(where)
        return store(*how)

    world.sink().write_batch(batch_of([("a", b"first")]), 0)
    world.cluster.store_entry = store_one  # type: ignore[method-assign, assignment]
    for _ in range(2):
        # Rows 0 and 1 are stored; the others are accepted.
        with pytest.raises(BrokerUnavailableError):
            world.sink(send_timeout_ms=100, entry_messages_max=2).write_batch(batch_of(rows), 1)
    world.cluster.store_entry = store  # type: ignore[method-assign]
    world.cluster.fail_writes(where)
    report = world.sink().write_batch(batch_of(rows), 1)
    assert report.already_stored == 2
    assert world.by_key() == {"a": [b"first", *(value for _, value in rows)]}


def send_first(world: SinkTopic, rows: Rows, batch_id: int, count: int) -> None:
    """Send the first rows for each topic partition, as an attempt that dies."""
    plans = canonical(outgoing_of(batch_of(rows)), PARTITIONS, keyless_from=0, scheme="java")
    for plan in plans:
        first_id = sequence_id(batch_id, 0, batch_layout([(world.topic, plan.checksum)]))
        where = world.cluster.partitions(world.topic)[plan.partition]
        with closing(MemoryBroker(world.cluster)) as broker:
            producer = broker.entry_producer(where, PublishOptions("s-0"))
            part = plan.rows(0, len(plan)).messages(0, min(count, len(plan)))
            for row, message in enumerate(part):
                producer.publish([message], first_id + row)


def test_rows_that_an_earlier_attempt_sent_and_a_failed_write_lost_are_sent_again(
    world: SinkTopic,
) -> None:
    """The second attempt begins behind them, and must not leave them out."""
    rows: Rows = [("a", b"%d" % number) for number in range(9)]
    where = world.cluster.partitions(world.topic)[key_partition("a", PARTITIONS)]
    world.sink().write_batch(batch_of([("a", b"first")]), 0)
    world.cluster.hold_writes(where)
    send_first(world, rows, 1, 7)
    reports: list[WriteReport] = []
    second = world.sink(send_timeout_ms=20_000)
    writing = threading.Thread(
        target=lambda: reports.append(second.write_batch(batch_of(rows), 1)), daemon=True
    )
    writing.start()
    wait_until(lambda: world.cluster.publishing._undecided)
    world.cluster.fail_writes(where)
    writing.join(deadline(20))
    assert [(one.rows, one.already_stored) for one in reports] == [(9, 0)]
    assert world.by_key() == {"a": [b"first", *(value for _, value in rows)]}
    counters = second.status()["counters"]
    assert counters["published"] > 9
    assert (counters["confirmed"], counters["failed"]) == (9, 0)


@pytest.mark.parametrize("seed", range(20))
def test_rows_of_a_name_that_the_broker_has_forgotten_are_found_at_the_end_of_the_topic(
    world: SinkTopic, seed: int
) -> None:
    """The earlier attempt died; other entries, ledgers and unreadable entries follow."""
    draw = random.Random(seed)
    batch_id = draw.choice((0, 3))
    rows = rows_of(batch_id, 60)
    before = [rows_of(one, 20) for one in range(batch_id)]
    for number, earlier in enumerate(before):
        world.sink().write_batch(batch_of(earlier), number)
    died = draw.randrange(61)
    if died:
        send_first(world, rows, batch_id, died)
    for where in world.cluster.partitions(world.topic):
        for _ in range(draw.randrange(3)):
            if draw.random() < 0.5:
                world.cluster.roll_ledger(where)
            for number in range(draw.choice((0, 3, 40))):
                other = StoredMessage(b"other:%d" % number, key="other")
                world.cluster.publish(where, other, corrupt=draw.random() < 0.05)
        world.cluster.forget_producer(where, "s-0")
    report = world.sink(entry_messages_max=draw.randrange(1, 9)).write_batch(
        batch_of(rows), batch_id
    )
    assert (report.already_stored > 0) == (died > 0)
    for where in world.cluster.partitions(world.topic):
        world.cluster.log(where).corrupt.clear()
    found = world.by_key()
    found.pop("other", None)
    assert found == expected(*before, rows)


@pytest.fixture
def old_world(world: SinkTopic) -> SinkTopic:
    """A broker before Pulsar 5.0: once it has loaded a topic, it may know too few ids."""
    world.cluster.release = release_of("4.2.4")
    return world


@pytest.mark.parametrize("seed", range(20))
def test_a_broker_that_recovered_too_few_ids_stores_nothing_twice(
    old_world: SinkTopic, seed: int
) -> None:
    """The earlier attempt died anywhere; then the broker loaded the topic."""
    world, draw = old_world, random.Random(seed)
    batch_id = draw.choice((0, 3))
    before = [rows_of(one, 20) for one in range(batch_id)]
    for number, earlier in enumerate(before):
        world.sink().write_batch(batch_of(earlier), number)
    rows, died = rows_of(batch_id, 60), draw.randrange(61)
    if died:
        send_first(world, rows, batch_id, died)
    for where in world.cluster.partitions(world.topic):
        known = sequence_id(draw.randrange(batch_id + 1), draw.randrange(20), draw.randrange(256))
        world.cluster.forget_producer(where, "s-0", draw.choice((-1, known)))
    sink = world.sink(entry_messages_max=draw.randrange(1, 9))
    report = sink.write_batch(batch_of(rows), batch_id)
    assert (report.already_stored > 0) == (died > 0)
    assert world.by_key() == expected(*before, rows)


def test_rows_that_a_broker_may_have_stored_are_looked_for_first(old_world: SinkTopic) -> None:
    """The connection is lost while rows are unconfirmed, and the broker loads the topic."""
    world = old_world
    rows: Rows = [("a", b"%d" % number) for number in range(9)]
    sink = world.sink(send_timeout_ms=20_000, entry_messages_max=1)
    sink.write_batch(batch_of([("a", b"first")]), 0)
    published = world.cluster.publishing.write
    loads: list[int] = []

    def store_and_load(where: TopicPartition, write: Write) -> None:
        if write.first == sequence_id(1, 4, layout_of(write.first)) and not loads:
            loads.append(write.first)
            write.store()  # stored, but the broker neither confirms it nor knows it later
            world.cluster.unload(where)
            world.cluster.forget_producer(where, "s-0", write.first - 3)
            return
        published(where, write)

    world.cluster.publishing.write = store_and_load  # type: ignore[method-assign]
    report = sink.write_batch(batch_of(rows), 1)
    assert loads
    assert (report.rows, report.already_stored) == (9, 0)
    assert world.by_key() == {"a": [b"first", *(value for _, value in rows)]}


@pytest.mark.parametrize("late", [False, True])
def test_rows_that_another_attempt_stored_after_the_search_are_searched_again(
    old_world: SinkTopic, monkeypatch: pytest.MonkeyPatch, *, late: bool
) -> None:
    """The producer of an attempt loses its connection after the search for stored rows.

    1. Another attempt stores all rows.
    2. A broker loads the topic, and knows no id of the batch.
    3. The producer of the first attempt reconnects to this broker.

    Args:
        late: Whether the producer reconnects only when rows wait in it, not before.
    """
    world, look = old_world, last_stored_id
    rows: Rows = [("a", b"%d" % number) for number in range(3)]
    first: Rows = [("a", b"first")]
    world.sink().write_batch(batch_of(first), 0)
    looks: list[int] = []
    others: list[WriteReport] = []

    def look_without_connection(broker: Any, producer: Any, *arguments: Any, **last: Any) -> int:
        found = look(broker, producer, *arguments, **last)
        if looks:
            return found
        looks.append(found)
        where = producer.topic_partition
        producer.drop()
        others.append(world.sink(entry_messages_max=1).write_batch(batch_of(rows), 1))
        world.cluster.unload(where)
        world.cluster.forget_producer(where, "s-0", found)
        flush = producer.flush

        def open_and_flush() -> None:
            producer.reconnect()
            flush()

        if late:
            producer.flush = open_and_flush
        else:
            producer.reconnect()
        return found

    monkeypatch.setattr("keyshard.publishing.batch_writer.last_stored_id", look_without_connection)
    report = world.sink(send_timeout_ms=20_000).write_batch(batch_of(rows), 1)
    assert [one.already_stored for one in others] == [0]
    assert report.rows == 3
    assert world.by_key() == expected(first, rows)


def test_a_batch_that_is_older_than_the_newest_stored_one_is_refused(world: SinkTopic) -> None:
    for batch_id in (3, 4):
        world.sink().write_batch(batch_of(rows_of(batch_id)), batch_id)
    for where in world.cluster.partitions(world.topic):
        world.cluster.forget_producer(where, "s-0")
    with pytest.raises(ProducerFencedError, match="is older than the newest batch"):
        world.sink().write_batch(batch_of(rows_of(3)), 3)
    with pytest.raises(BatchMismatchError):
        world.sink().write_batch(batch_of(rows_of(4, 100)), 4)
    assert world.by_key() == expected(rows_of(3), rows_of(4))


def test_writers_of_one_batch_have_names_of_their_own(world: SinkTopic) -> None:
    others: Rows = [(f"other{n % 3}", b"%d" % n) for n in range(50)]
    parts = [rows_of(0, 50, 3), others]
    for _ in range(2):
        for number, rows in enumerate(parts):
            world.sink().write_batch(batch_of(rows), 0, number)
    assert world.by_key() == expected(*parts)


def test_rows_without_a_key_are_spread_and_stored_once(world: SinkTopic) -> None:
    rows: Rows = [(None, b"%d" % number) for number in range(2_500)]
    for _ in range(2):
        world.sink().write_batch(batch_of(rows), 0)
    stored = world.stored()
    assert sorted(one.value or b"" for one in stored) == sorted(value for _, value in rows)
    assert {one.partition for one in stored} == {0, 1, 2}


def test_rows_go_to_the_topics_that_they_name_once(world: SinkTopic) -> None:
    topics = [world.cluster.create_topic(name, count) for name, count in (("a", 2), ("b", 0))]
    for topic in topics:
        world.cluster.deduplicate(topic)
    rows = rows_of(0, 300)
    batch = batch_of(rows).append_column(
        "__topic", pa.array([topics[n % 3] if n % 3 < 2 else " b" for n in range(300)])
    )
    for known in (0, 300):
        report = world.sink().write_batch(pa.Table.from_batches([batch]), 0)
        assert (report.rows, report.already_stored) == (300, known)
    assert world.stored() == []
    for topic, chosen in zip(topics, ({0}, {1, 2}), strict=True):
        assert world.by_key(topic) == expected([rows[n] for n in range(300) if n % 3 in chosen])


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["out", None, "out"], "__topic is null in 1 of 3 rows, first in row 1"),
        (["out", "a b", "out"], "'a b' is not a topic name"),
        ([1, 2, 3], "__topic has the type int64; it must be text"),
        ([f"t{number}" for number in range(1_001)], "1001 topics, more than the limit of 1000"),
    ],
)
def test_a_row_without_a_topic_is_refused_before_anything_is_sent(
    world: SinkTopic, names: list[Any], text: str
) -> None:
    batch = batch_of(rows_of(0, len(names))).append_column("__topic", pa.array(names))
    with pytest.raises(ConfigError, match=text):
        world.sink().write_batch(batch, 0)
    assert world.stored() == []


def test_an_empty_batch_writes_nothing(world: SinkTopic) -> None:
    report = world.sink().write_batch(batch_of([]), 0)
    assert (report.rows, report.entries, report.topic_partitions) == (0, 0, 0)
    table = pa.Table.from_batches([], schema=batch_of([]).schema)
    assert world.sink().write_batch(table, 0).rows == 0


def test_a_table_is_written_like_its_rows(world: SinkTopic) -> None:
    rows = rows_of(0, 50)
    table = pa.Table.from_batches([batch_of(rows[:20]), batch_of(rows[20:])])
    world.sink().write_batch(table, 0)
    assert world.by_key() == expected(rows)


def test_a_row_that_is_too_large_is_refused_before_anything_is_sent(world: SinkTopic) -> None:
    for number in range(7):
        rows: Rows = [*rows_of(0), (f"k{number}", b"x" * (world.cluster.message_bytes_max + 1))]
        with pytest.raises(MessageTooLargeError):
            world.sink().write_batch(batch_of(rows), 0)
    assert world.stored() == []


def test_a_sink_id_in_use_is_refused(world: SinkTopic) -> None:
    rows = rows_of(0, 10, 1)
    holder = MemoryBroker(world.cluster)
    where = world.cluster.partitions(world.topic)[key_partition("k0", PARTITIONS)]
    holder.entry_producer(where, PublishOptions("s-0"))
    with pytest.raises(ProducerBusyError, match="another sink id"):
        world.sink().write_batch(batch_of(rows), 0)
    holder.close()
    world.sink().write_batch(batch_of(rows), 0)
    assert world.by_key() == expected(rows)


def test_without_deduplication_a_batch_is_refused(world: SinkTopic) -> None:
    batches: list[Rows] = [rows_of(0), [("k", b"1")]]
    for number, rows in enumerate(batches):
        topic = world.cluster.create_topic(f"plain{number}")
        sink = KeyShardSink(topic, sink_id="s", service_url=world.url)
        with pytest.raises(DeduplicationError):
            sink.write_batch(batch_of(rows), 0)
        sink._state.close()


def test_the_guarantee_at_least_once_needs_neither_deduplication_nor_a_name(
    world: SinkTopic,
) -> None:
    topic = world.cluster.create_topic("plain", 2)
    how: Any = {"delivery_guarantee": "at-least-once", "service_url": world.url}
    with KeyShardSink(topic, **how) as sink:
        for _ in range(2):
            assert sink.write_batch(batch_of(rows_of(0)), 0).already_stored == 0
    stored = world.by_key(topic).items()
    found = {key: sorted(value or b"" for value in values) for key, values in stored}
    assert found == {key: sorted(values * 2) for key, values in expected(rows_of(0)).items()}


def test_a_quota_is_waited_for_and_then_named(world: SinkTopic) -> None:
    world.cluster.exceed_quota(world.topic, exceeded=True)
    with pytest.raises(QuotaExceededError):
        world.sink().write_batch(batch_of(rows_of(0)), 0)
    world.cluster.exceed_quota(world.topic, exceeded=False)
    world.sink().write_batch(batch_of(rows_of(0)), 0)
    assert world.by_key() == expected(rows_of(0))


def test_write_batch_needs_a_sink_id_and_a_batch_id(world: SinkTopic) -> None:
    with pytest.raises(ConfigError, match="sink_id"):
        world.sink(sink_id=None).write_batch(batch_of([]), 0)
    for wrong in (-1, 2**31, "7", True):
        with pytest.raises(ConfigError, match="batch_id"):
            world.sink().write_batch(batch_of([]), wrong)  # type: ignore[arg-type]


# -- Single messages -------------------------------------------------------------------------------


def test_sent_messages_are_stored_in_order_and_have_ids(world: SinkTopic) -> None:
    with world.sink(sink_id=None) as sink:
        sent = [sink.send(b"%d" % number, key=f"k{number % 5}") for number in range(500)]
        sink.flush()
        ids = [one.result(0) for one in sent]
    stored = world.stored()
    assert len(stored) == 500
    by_value = {one.value: (one.message_id, one.key) for one in stored}
    for number, message_id in enumerate(ids):
        assert by_value[b"%d" % number] == (message_id, f"k{number % 5}")
    assert world.by_key() == expected([(f"k{n % 5}", b"%d" % n) for n in range(500)])


def test_all_that_a_message_has_is_sent(world: SinkTopic) -> None:
    when = datetime(2026, 11, 24, 6, tzinfo=timezone.utc)
    with world.sink() as sink:
        sink.send(None, key="k", ordering_key="o", properties={"a": "b"}, event_time=when)
    (one,) = world.stored()
    assert (one.value, one.key, one.ordering_key, one.event_time) == (None, "k", "o", when)
    assert one.properties == {"a": "b"}


def test_a_message_is_published_without_a_flush(world: SinkTopic) -> None:
    sink = world.sink()
    assert isinstance(sink.send(b"x", key="k").result(deadline(5)), MessageId)


def test_coroutines_publish_in_the_order_in_which_they_start(world: SinkTopic) -> None:
    async def main() -> list[MessageId]:
        async with world.sink() as sink:
            sent = (sink.asend(b"%d" % number, key=f"k{number % 5}") for number in range(200))
            return await asyncio.gather(*sent)

    ids = asyncio.run(main())
    by_value = {one.value: one.message_id for one in world.stored()}
    assert by_value == {b"%d" % number: message_id for number, message_id in enumerate(ids)}
    assert world.by_key() == expected([(f"k{n % 5}", b"%d" % n) for n in range(200)])


def test_the_event_loop_goes_on_while_a_sink_connects(
    world: SinkTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_connect = threading.Event()

    def late(connection: Connection) -> Broker:
        assert may_connect.wait(deadline(5)), "the event loop waits for the connection"
        return connect(connection)

    monkeypatch.setattr("keyshard.broker.connect.connect", late)

    async def main() -> None:
        sink = world.sink()
        sent = [asyncio.create_task(sink.asend(b"%d" % number, key="k")) for number in range(3)]
        await asyncio.sleep(0)
        may_connect.set()
        await asyncio.gather(*sent)

    asyncio.run(main())
    assert [one.value for one in world.stored()] == [b"0", b"1", b"2"]


def test_the_end_of_an_async_with_waits_for_calls_that_have_begun(world: SinkTopic) -> None:
    async def main() -> MessageId:
        async with world.sink() as sink:
            sent = asyncio.create_task(sink.asend(b"x", key="k"))
            await asyncio.sleep(0)
        with pytest.raises(BrokerError, match="is closed"):
            await sink.asend(b"late", key="k")
        return await sent

    assert asyncio.run(main()) == world.stored()[0].message_id
    assert len(world.stored()) == 1


def test_calls_that_waited_for_longer_than_a_message_may_are_not_made(
    world: SinkTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_room, calls = threading.Event(), []

    def send(_: KeyShardSink, value: bytes, **_given: Any) -> Future[MessageId]:
        calls.append(value)
        assert has_room.wait(deadline(5))
        raise BrokerUnavailableError("no room")

    monkeypatch.setattr(KeyShardSink, "send", send)

    async def main() -> list[MessageId | BaseException]:
        sink = world.sink(send_timeout_ms=100)
        sent = [asyncio.create_task(sink.asend(b"%d" % number, key="k")) for number in range(9)]
        await asyncio.sleep(0.2)
        has_room.set()
        return await asyncio.gather(*sent, return_exceptions=True)

    errors = asyncio.run(main())
    assert calls == [b"0"]
    assert [str(error).count("waited for earlier ones") for error in errors] == [0] + [1] * 8


def test_a_sink_is_closed_although_the_wait_for_that_is_cancelled(world: SinkTopic) -> None:
    for where in world.cluster.partitions(world.topic):
        world.cluster.hold_writes(where)

    async def main() -> KeyShardSink:
        sink = world.sink()
        with suppress(asyncio.CancelledError):
            async with sink:
                sink.send(b"x", key="k")
                task = asyncio.current_task()
                assert task is not None
                asyncio.get_running_loop().call_later(0.05, task.cancel)
        return sink

    sink = asyncio.run(main())
    for where in world.cluster.partitions(world.topic):
        world.cluster.release_writes(where)

    def is_closed() -> bool:
        try:
            sink.status()
        except NotRunningError as exc:
            return "is closed" in str(exc)
        return False

    wait_until(is_closed)
    wait_until(lambda: not [one for one in threading.enumerate() if "sink-close" in one.name])


def test_a_coroutine_gets_the_error_of_its_message(world: SinkTopic) -> None:
    async def main() -> None:
        async with world.sink() as sink:
            with pytest.raises(MessageTooLargeError):
                await sink.asend(b"x" * 6_000_000, key="k")
            with pytest.raises(ConfigError, match="value"):
                await sink.asend(1, key="k")  # type: ignore[arg-type]
            await sink.asend(b"x", key="k")

    asyncio.run(main())
    assert [one.value for one in world.stored()] == [b"x"]


def test_a_failed_message_fails_its_future_and_the_next_flush(world: SinkTopic) -> None:
    sink = world.sink(send_timeout_ms=200)
    sink.send(b"before", key="k").result(deadline(5))
    for client in list(world.cluster._clients):
        client.drop()
    late: Future[MessageId] = sink.send(b"late", key="k")
    with pytest.raises(BrokerUnavailableError):
        sink.flush()
    assert isinstance(late.exception(0), BrokerUnavailableError)
    for client in list(world.cluster._clients):
        client.reconnect()
    sink.send(b"after", key="k")
    sink.close()
    assert [one.value for one in world.stored()] == [b"before", b"after"]


def test_a_producer_that_has_ended_is_opened_again(world: SinkTopic) -> None:
    sink = world.sink(linger_ms=200)
    sink.send(b"before", key="k").result(deadline(5))
    collected = sink.send(b"collected", key="k")
    (queue,) = sink._state.writer(sink)._queues.values()
    with world.cluster.lock:
        queue.producer._end(BrokerError("The topic is gone."))  # type: ignore[attr-defined]
    sink.send(b"after", key="k").result(deadline(5))
    with pytest.raises(BrokerError, match="gone"):
        collected.result(deadline(5))
    with pytest.raises(BrokerError, match="gone"):
        sink.flush()
    sink.close()
    assert [one.value for one in world.stored()] == [b"before", b"after"]


def test_a_closed_sink_refuses_work(world: SinkTopic) -> None:
    sink = world.sink()
    sink.send(b"x")
    sink.close()
    sink.close()
    with pytest.raises(BrokerError, match="closed"):
        sink.send(b"x")
    with pytest.raises(BrokerError, match="closed"):
        sink.write_batch(batch_of(rows_of(0)), 0)


def test_wrong_arguments_are_refused(world: SinkTopic) -> None:
    sink = world.sink()
    with pytest.raises(ConfigError, match="value"):
        sink.send("text")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="key"):
        sink.send(b"", key=b"k")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="properties"):
        sink.send(b"", properties={"a": 1})  # type: ignore[dict-item]
    half: list[dict[str, Any]] = [
        {"key": "\ud800"}, {"ordering_key": "\ud800"}, {"properties": {"a": "\ud800"}},
    ]  # fmt: skip
    for wrong in half:
        with pytest.raises(ConfigError, match="text"):
            sink.send(b"", **wrong)
    with pytest.raises(ConfigError, match="time zone"):
        sink.send(b"", event_time=datetime(2026, 1, 1))  # noqa: DTZ001 - this is refused
    with pytest.raises(MessageTooLargeError):
        sink.send(b"x" * (world.cluster.message_bytes_max + 1))


def test_a_sink_is_a_value_that_can_be_sent_to_other_processes(world: SinkTopic) -> None:
    sink = world.sink(compression="zstd")
    copy = pickle.loads(pickle.dumps(sink))
    assert copy == sink
    assert "compression='zstd'" in repr(copy)
    with pytest.raises(ConfigError, match="Did you mean 'sink_id'"):
        KeyShardSink("out", sinkid="s")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="compression"):
        KeyShardSink("out", compression="gzip")  # type: ignore[arg-type]


def test_the_program_of_the_documentation_runs(world: SinkTopic, capsys: Any) -> None:
    text = (Path(__file__).parents[2] / "docs" / "publishing.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    adapted = program.replace("pulsar://127.0.0.1:6650", world.url)
    exec(compile(adapted, "publishing.md", "exec"), {})  # noqa: S102 - it is ours
    printed = capsys.readouterr().out
    assert [int(one) for one in re.findall(r"already_stored=(\d+)", printed)] == [0, 3]
    assert world.by_key() == {"o-1": [b"paid", b"sent", b"refunded"], "o-2": [b"paid"]}


def test_the_documentation_has_every_option() -> None:
    text = (Path(__file__).parents[2] / "docs" / "publishing.md").read_text()
    text, _, _ = text.partition("\n## From Spark")
    rows = re.findall(r"^\| (`.*?`) \|", text, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == {one.name for one in fields(SinkConfig)} - {"topic"}
