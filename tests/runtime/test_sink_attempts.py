"""Batches whose earlier attempt died, or whose broker lost or forgot some of it."""

from __future__ import annotations

import random
import threading
from contextlib import closing
from typing import Any

import pytest

from keyshard.broker.memory import MemoryBroker
from keyshard.broker.memory import Message as StoredMessage
from keyshard.broker.memory.publishing import Write
from keyshard.broker.port import PublishOptions
from keyshard.columns.canonical import canonical
from keyshard.columns.outgoing import outgoing_of
from keyshard.config.sink import MIB
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.publishing import batch_layout, key_partition, layout_of, sequence_id
from keyshard.core.releases import release_of
from keyshard.errors import (
    BatchMismatchError,
    BrokerUnavailableError,
    KeyShardError,
    ProducerFencedError,
)
from keyshard.publishing.batch_writer import WriteReport, write
from keyshard.publishing.topic_tail import last_stored_id
from tests.helpers import wait_until
from tests.support.copied_topic import PARTITIONS, SinkTopic
from tests.support.deadlines import deadline
from tests.support.sink_rows import Rows, batch_of, expected, rows_of


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
    # The rows that the broker accepted are written late, or lost.
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


@pytest.mark.parametrize("recovers", [True, False])
@pytest.mark.simulated
def test_a_topic_partition_without_room_holds_up_no_other(*, recovers: bool) -> None:
    """The rows of the others are stored while it waits; if it waits for too long, it is named."""
    world = SinkTopic()
    keys = {key_partition(f"k{number}", PARTITIONS): f"k{number}" for number in range(20)}
    rows: Rows = [(keys[n % PARTITIONS], b"%d" % n + b"." * 100_000) for n in range(60)]
    stalled = world.cluster.partitions(world.topic)[0]
    world.cluster.hold_writes(stalled)
    sink = world.sink(pending_bytes_max=MIB, entry_messages_max=1, send_timeout_ms=20_000)
    errors: list[KeyShardError] = []

    def publish() -> None:
        topics = {world.topic: outgoing_of(batch_of(rows))}
        try:
            with closing(MemoryBroker(world.cluster)) as broker:
                write(broker, sink, topics, 0, name="s-0", partition=0)
        except KeyShardError as exc:
            errors.append(exc)

    writing = threading.Thread(target=publish)
    writing.start()
    others = expected([row for row in rows if row[0] != keys[0]])
    wait_until(lambda: world.by_key() == others, 10)
    assert writing.is_alive()
    if recovers:
        world.cluster.release_writes(stalled)
    writing.join(deadline(60))
    if recovers:
        assert (errors, world.by_key()) == ([], expected(rows))
    else:
        (error,) = errors
        assert isinstance(error, BrokerUnavailableError)
        assert str(stalled) in error.problem
        assert world.by_key() == others
