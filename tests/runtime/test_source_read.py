"""``source.read`` on the in-memory broker: a plan that is read once or more, in one thread."""

from __future__ import annotations

import gc
import json
import pickle
import threading
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from keyshard import KeyShardSource, Segments, SourceRead
from keyshard.broker.memory import Batching, MemoryBroker, Message
from keyshard.columns.record_batches import SCHEMA
from keyshard.core.position import zones
from keyshard.errors import (
    ConfigError,
    DataLossTrimmedError,
    EncryptedMessageError,
    TopicNotFoundError,
)
from keyshard.reading import split_planner
from keyshard.reading.split_reader import read_splits
from tests.support.deadlines import deadline
from tests.support.memory_topic import MemoryTopic

pytestmark = pytest.mark.usefixtures("reads_in_no_time")

T0 = 1_700_000_000_000
EACH = 20
"""Entries of a topic partition."""


class Topic(MemoryTopic):
    """Partitions with ledgers of seven entries; each third entry is a batch of two messages."""

    def __init__(self, partitions: int = 3, entries: int = EACH) -> None:
        super().__init__(partitions, entries_per_ledger=7)
        self.number = 0
        self.publish(entries)

    def publish(self, entries: int) -> None:
        for where in self.where:
            for number in range(entries):
                messages = [Message(b"m" * 100, key=f"k{number % 5}")] * (
                    2 if number % 3 == 0 else 1
                )
                self.cluster.publish(
                    where, *messages, batching=Batching.BY_KEY, publish_ms=T0 + self.number
                )
                self.number += 1

    def read(self, **options: Any) -> SourceRead:
        return self.bounded().read(**options)

    def bounded(self, **changes: Any) -> KeyShardSource:
        """A source without a subscription."""
        return KeyShardSource(self.topic, service_url=self.url, admin_url=self.url, **changes)

    @property
    def connected(self) -> int:
        """Clients of the cluster."""
        return len(self.cluster._clients)


@pytest.fixture
def topic() -> Iterator[Topic]:
    made = Topic()
    before = made.connected
    yield made
    made.cluster.validate()
    assert made.connected == before, "each read closes its connection"


def ids(rows: Iterable[pa.RecordBatch]) -> list[tuple[int, str]]:
    names = ("__partition", "__messageId")
    return [
        one
        for batch in rows
        for one in zip(*(batch.column(name).to_pylist() for name in names), strict=True)
    ]


def test_a_read_has_the_rows_columns_and_batches_of_the_other_bounded_reads(topic: Topic) -> None:
    source = topic.bounded()
    rows = source.read()
    raw = read_splits(source.how_to_connect(), split_planner.plan_read(source), SCHEMA.names)
    assert list(rows) == list(raw)
    assert rows.schema == SCHEMA
    assert all(batch.schema == SCHEMA for batch in rows)
    assert not any(topic.cluster.subscriptions(where) for where in topic.where)


def test_the_call_fixes_the_rows_of_every_iteration(topic: Topic) -> None:
    rows = topic.read()
    topic.publish(5)
    first = ids(rows)
    assert len(first) == 3 * (EACH + 7)
    assert ids(rows) == first
    assert len(ids(topic.read())) == 3 * (EACH + 7 + 5 + 2)


def test_the_end_of_a_read_is_the_start_of_the_next_and_of_a_subscription(topic: Topic) -> None:
    history = topic.read()
    topic.publish(4)
    behind = topic.read(start=history.ends)
    assert sorted(ids(history) + ids(behind)) == sorted(ids(topic.read()))
    source = topic.source(starting_position=json.dumps(history.ends), admin_url=topic.url)
    live: list[tuple[int, str]] = []
    with source.open() as stream:
        while len(live) < 3 * 6 and (batch := stream.next_batch(deadline(30))) is not None:
            live += ids(batch)
            stream.commit(batch)
    assert sorted(live) == sorted(ids(behind))


def test_a_time_is_no_end_that_a_next_read_can_start_at(topic: Topic) -> None:
    """Messages that came between the plan and a time in the future were in neither read."""
    rows = topic.read(end="2999-01-01")
    assert len(ids(rows)) == 3 * (EACH + 7)
    with pytest.raises(ConfigError, match=r"(?s)ends at 2999-01-01T00:00.*Use a position or 'late"):
        _ = rows.ends


def test_bounds_keys_and_columns_choose_rows_and_columns(topic: Topic) -> None:
    one = topic.read(start=T0 + 3, end=T0 + 5, columns=["__publishTime", "__key"], keys=["k3"])
    assert one.schema.names == ["__publishTime", "__key"]
    (batch,) = one
    assert batch.column("__key").to_pylist() == ["k3", "k3"]
    assert {round(at.timestamp() * 1000) for at in batch.column(0).to_pylist()} == {T0 + 3}
    assert topic.bounded(metadata_columns=["__producer"]).read().schema.names[-1] == "__producer"


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 1_000])
def test_parts_are_disjoint_and_together_the_read(topic: Topic, parts: int) -> None:
    rows = topic.read()
    found = rows.split(parts)
    assert len(found) == min(parts, 3 * EACH)
    copies = pickle.loads(pickle.dumps(found))
    assert [one for part in copies for one in ids(part)] == ids(rows)


def test_a_topic_without_messages_has_columns_an_end_and_no_rows() -> None:
    rows = Topic(partitions=0, entries=0).read()
    assert list(rows) == []
    assert pa.table(rows) == SCHEMA.empty_table()
    assert [len(part.ends) for part in rows.split(4)] == [1]
    assert rows.report.spans == ()


def test_a_read_is_an_arrow_stream(topic: Topic) -> None:
    rows = topic.read()
    expected = pa.Table.from_batches(rows)
    assert pa.table(rows) == expected
    with pa.RecordBatchReader.from_stream(rows) as stream:
        assert stream.schema == rows.schema
        stream.read_next_batch()


def test_values_are_decoded_as_those_of_a_stream(topic: Topic) -> None:
    source = topic.bounded()
    decoder = source.decoder(["__key"])
    rows = source.read(columns=decoder.raw_columns)
    keys = [key for batch in decoder.decoded(rows) for key in batch.column(0).to_pylist()]
    assert keys == pa.table(source.read(columns=["__key"])).column(0).to_pylist()


# -- Reports and the index -------------------------------------------------------------------------


def test_the_plan_and_the_report_say_which_way_entries_come(topic: Topic) -> None:
    rows = topic.read(segments=Segments("auto"))
    assert (rows.plan.by_bookies, rows.plan.by_broker) == (0, 3 * EACH)
    assert rows.report.by_broker == 0
    for _ in range(2):
        ids(rows)
        assert rows.report.by_broker == 3 * EACH, "another iteration counts once"
        assert sum(rows.report.reasons.values()) == 3 * EACH


def test_entries_that_an_index_rules_out_are_reported_even_if_none_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zones, "HOLE_BYTES", 0)
    topic = Topic(partitions=1, entries=21)
    topic.cluster.roll_ledger(topic.where[0])
    index = str(tmp_path / "index")
    assert len(ids(topic.read(ledger_index=index))) == 28
    later = topic.read(ledger_index=index, keys=["k3"], columns=["__key"])
    assert pa.table(later).column(0).unique().to_pylist() == ["k3"]
    for wanted in ({"start": T0 + 100}, {"keys": ["no such key"]}):
        nothing = topic.read(ledger_index=index, **wanted)
        for one in (nothing, *nothing.split(2)):
            assert list(one) == []
            assert one.plan.skipped == one.report.skipped == 21


def test_a_read_saves_its_index_and_reports_as_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read of a large topic partition that was cut off had saved nothing."""
    monkeypatch.setattr("keyshard.source_read.SPLIT_BYTES", 1)
    topic = Topic(partitions=1)
    rows = topic.read(ledger_index=str(tmp_path / "index"))
    with rows:
        batches = iter(rows)
        for _ in range(10):
            next(batches)
    assert 0 < rows.report.by_broker < EACH
    assert list((tmp_path / "index").rglob("*.parquet"))
    assert len(ids(rows)) == EACH + 7


# -- Iterations that end early ---------------------------------------------------------------------


def many(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> SourceRead:
    """A read with several batches."""
    monkeypatch.setattr("keyshard.source_read.SPLIT_BYTES", 1)
    return topic.read()


def test_a_loop_that_ends_early_leaves_no_connection(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = topic.connected
    for _ in many(topic, monkeypatch):
        assert topic.connected > before
        break
    gc.collect()
    assert topic.connected == before


def test_an_error_in_the_block_of_a_read_leaves_no_connection(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, threads = topic.connected, set(threading.enumerate())
    rows = many(topic, monkeypatch)
    batches = iter(rows)

    def fail() -> None:
        with rows:
            for _ in batches:
                assert topic.connected > before
                raise KeyError("of the program")

    with pytest.raises(KeyError):
        fail()
    assert (topic.connected, set(threading.enumerate()) - threads) == (before, set())
    rows.close()
    assert len(ids(rows)) == 3 * (EACH + 7), "a closed read can be read again"


def test_a_read_that_ends_as_a_stream_leaves_no_connection(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = topic.connected
    stream = pa.RecordBatchReader.from_stream(many(topic, monkeypatch))
    stream.read_next_batch()
    assert topic.connected > before
    del stream
    gc.collect()
    assert topic.connected == before


def test_an_iteration_that_ended_is_not_kept(topic: Topic) -> None:
    rows = topic.read()
    batches = iter(rows)
    kept = weakref.ref(batches)
    list(batches)
    del batches
    gc.collect()
    assert kept() is None


def test_two_iterations_at_once_have_all_rows(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = many(topic, monkeypatch)
    pairs = list(zip(rows, rows, strict=True))
    assert all(one == other for one, other in pairs)
    assert sum(one.num_rows for one, _ in pairs) == 3 * (EACH + 7)


# -- Errors ----------------------------------------------------------------------------------------


def test_a_read_of_no_topic_is_an_error_and_makes_none() -> None:
    topic = Topic(entries=0)
    source = KeyShardSource("no-such-topic", service_url=topic.url, admin_url=topic.url)
    for _ in range(2):
        with pytest.raises(TopicNotFoundError, match="no-such-topic"):
            source.read()


def test_a_topic_that_is_deleted_before_or_during_the_read_is_a_named_loss(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = many(topic, monkeypatch)
    lenient = topic.bounded(fail_on_data_loss=False).read()
    batches = iter(rows)
    next(batches)
    topic.cluster.delete_topic(topic.topic)
    for read in (batches, rows):
        with pytest.raises(DataLossTrimmedError, match="no longer stored"):
            list(read)
    assert list(lenient) == []


@pytest.mark.parametrize("strict", [True, False])
def test_a_topic_that_is_deleted_before_a_reader_opens_is_named_or_left_out(
    strict: bool, topic: Topic, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The broker no longer knows the topic, after the read has seen its ledgers."""
    read, reader = topic.bounded(fail_on_data_loss=strict).read(), MemoryBroker.reader

    def deletes(self: MemoryBroker, *of: Any) -> Any:
        topic.cluster.delete_topic(topic.topic)
        return reader(self, *of)

    monkeypatch.setattr(MemoryBroker, "reader", deletes)
    if strict:
        with pytest.raises(DataLossTrimmedError, match="no longer stored"):
            list(read)
    else:
        assert list(read) == []
        warnings = [one.getMessage() for one in caplog.records if "left out" in one.getMessage()]
        assert sum(str(topic.where[0]) in one for one in warnings) == 1, "it is counted once"


def test_an_entry_that_cannot_be_read_ends_the_iteration_and_closes_it(topic: Topic) -> None:
    topic.cluster.publish(topic.where[0], Message(b"?", key="a"), encrypted=True)
    with pytest.raises(EncryptedMessageError, match="A bounded read can end before it"):
        list(topic.read())


def test_a_read_of_an_in_memory_cluster_is_refused_in_another_process(topic: Topic) -> None:
    """The read lost its rows: the other process has an empty cluster of the same name."""
    copy = pickle.loads(pickle.dumps(topic.read()))
    copy._pid += 1
    with pytest.raises(ConfigError, match="in-memory cluster of another process"):
        list(copy)


def test_a_read_without_the_admin_interface_is_refused() -> None:
    with pytest.raises(ConfigError, match="Set admin_url"):
        KeyShardSource("t").read()
