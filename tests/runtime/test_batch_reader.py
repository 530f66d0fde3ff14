"""The batch reader on the in-memory broker, called as Spark calls it."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)
from pyspark.sql.types import BinaryType, StructField, StructType

from keyshard.broker.memory import Batching, Message
from keyshard.columns.record_batches import SCHEMA
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.errors import ConfigError, DataLossTrimmedError
from spark_adapter.batch_reader import FilteringBatchReader, KeyShardBatchReader, KeyShardSplits
from spark_adapter.data_source import KeyShardDataSource
from spark_adapter.option_parsing import parse_bounded
from spark_adapter.task_rows import Rows
from tests.support.memory_topic import MemoryTopic

pytestmark = pytest.mark.usefixtures("reads_in_no_time")

T0 = 1_700_000_000_000
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


class Topic(MemoryTopic):
    """Two partitions with single messages and batches of mixed keys, in ledgers of ten entries."""

    def __init__(self) -> None:
        super().__init__(2, entries_per_ledger=10)
        self.sent: dict[tuple[int, str], bytes] = {}
        """Key of each message, by its partition and id."""
        for where in self.where:
            for number in range(30):
                self.publish(where, 4 if number % 3 == 0 else 1, T0 + number)

    def publish(self, where: TopicPartition, count: int, time_ms: int) -> EntryId:
        keys = [f"k{(time_ms + i) % 5}" for i in range(count)]
        ((_, entry),) = self.cluster.publish(
            where, *(Message(key.encode(), key=key) for key in keys),
            batching=Batching.MIXED, publish_ms=time_ms,
        )  # fmt: skip
        for index, key in enumerate(keys):
            self.sent[where.partition, f"{entry.ledger}:{entry.entry}:{index}"] = key.encode()
        return entry

    def reader(self, columns: Sequence[str] = SCHEMA.names, **options: str) -> KeyShardBatchReader:
        given = {"topic": self.topic, **options}
        read = parse_bounded(given | {"admin.url": "http://127.0.0.1:1"})
        # Spark reads in other processes, so its options refuse a cluster of this one.
        source = type(read.source)(
            self.topic, service_url=self.url, admin_url=self.url,
            fail_on_data_loss=read.source.fail_on_data_loss, operation_timeout_ms=5_000,
        )  # fmt: skip
        object.__setattr__(read, "source", source)
        return KeyShardBatchReader(read, Rows(columns))

    def rows(self, reader: KeyShardBatchReader) -> list[tuple[int, str]]:
        """Partition and id of each row, part by part, as Spark's workers read them."""
        found = []
        for part in reader.partitions():
            for batch in pickle.loads(pickle.dumps(reader)).read(pickle.loads(pickle.dumps(part))):
                ids = (batch.column(name).to_pylist() for name in ("__partition", "__messageId"))
                found += list(zip(*ids, strict=True))
        return found


@pytest.fixture
def topic() -> Topic:
    return Topic()


def test_every_message_comes_once_in_any_number_of_parts(topic: Topic) -> None:
    for options in ({}, {"minPartitions": "13"}, {"maxRowsPerPartition": "1"}):
        reader = topic.reader(**options)
        assert topic.rows(reader) == list(topic.sent)
    assert len(topic.reader().partitions()) == 2
    assert len(topic.reader(minPartitions="13").partitions()) == 13
    for part in topic.reader(maxRowsPerPartition="7").partitions():
        assert isinstance(part, KeyShardSplits)
        (split,) = part.splits
        assert split.entries <= 7


def test_the_first_part_has_the_end_of_the_read_and_the_next_read_begins_there(
    topic: Topic,
) -> None:
    first, *others = topic.reader(minPartitions="5").partitions()
    assert isinstance(first, KeyShardSplits)
    assert set(first.ends) == {one.name for one in topic.cluster.partitions(topic.topic)}
    assert not any(one.ends for one in others)  # type: ignore[attr-defined]
    before = set(topic.sent)
    for where in topic.cluster.partitions(topic.topic):
        topic.publish(where, 3, T0)
    positions = str(first.ends).replace("'", '"')
    assert set(topic.rows(topic.reader(endingOffsets=positions))) == before
    assert set(topic.rows(topic.reader(startingOffsets=positions))) == topic.sent.keys() - before


def test_an_empty_read_has_one_part_without_rows(topic: Topic) -> None:
    (part,) = topic.reader(startingOffsets="latest").partitions()
    assert isinstance(part, KeyShardSplits)
    assert part.splits == ()
    assert len(part.ends) == 2
    assert topic.rows(topic.reader(startingOffsets="latest")) == []


@pytest.mark.parametrize("columns", [[], ["value"], ["__key"]])
def test_keys_choose_exactly_in_every_producer_batch(topic: Topic, columns: list[str]) -> None:
    reader = topic.reader([*columns, "__partition", "__messageId"], keys='["k1", "k4", "none"]')
    rows = topic.rows(reader)
    assert rows == [one for one, key in topic.sent.items() if key in (b"k1", b"k4")]
    (part, *_) = reader.partitions()
    for batch in reader.read(part):
        assert batch.schema.names == [*columns, "__partition", "__messageId"]


def test_times_choose_by_publish_time(topic: Topic) -> None:
    for more in ({}, {"maxTimeDisorder": "1s"}):
        reader = topic.reader(startingTime=str(T0 + 5), endingTime=str(T0 + 9), **more)
        rows = topic.rows(reader)
        assert len(rows) == 2 * (1 + 4 + 1 + 1)
        assert set(rows) <= topic.sent.keys()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"startingOffsets": '{"orders-partition-0": "1:1"}'},
            "startingOffsets has no position for ",
        ),
        ({"endingOffsets": '{"a": "1:1"}'}, "endingOffsets names persistent://public/default/a, "),
        ({"endingOffsets": "{}"}, "endingOffsets has no position for "),
        ({"startingOffsets": '{"a b": "1:1"}'}, "startingOffsets has the key 'a b'"),
        ({"startingTime": str(T0 + 1), "endingTime": str(T0)}, "startingTime of persistent://"),
        ({"startingOffsets": "latest", "endingOffsets": "earliest"}, "after its end"),
        (
            {"maxTimeDisorder": "999999h"},
            "maxTimeDisorder is 3599996400.0; it must be a number of seconds from 0 to",
        ),
    ],
)
def test_a_wrong_option_is_reported_by_its_name_during_planning(
    topic: Topic, options: dict[str, str], sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        topic.reader(**options).partitions()
    assert sentence in caught.value.message


def test_trimmed_entries_are_named_or_left_out(topic: Topic) -> None:
    where, _ = topic.cluster.partitions(topic.topic)
    reader, lenient = topic.reader(), topic.reader(failOnDataLoss="false")
    parts = reader.partitions()
    first = parts[0].splits[0].first
    topic.cluster.trim(where, EntryId(first.ledger + 1, 0))
    with pytest.raises(DataLossTrimmedError):
        list(reader.read(parts[0]))
    assert list(lenient.read(parts[0]))
    assert topic.rows(topic.reader())


def test_filters_are_taken_only_if_configured() -> None:
    """Spark 4.3 would read what it planned for one filter for every other; see tests/spark."""
    assert KeyShardBatchReader.pushFilters is DataSourceReader.pushFilters
    options = {"topic": "t", "admin.url": "http://broker:8080", "valueFormat": "raw"}
    kinds = [
        type(
            KeyShardDataSource(options | more).reader(
                StructType([StructField("value", BinaryType())])
            )
        )
        for more in ({}, {"PUSHFILTERS": "True"})
    ]
    assert kinds == [KeyShardBatchReader, FilteringBatchReader]


_KEYS = st.sampled_from(["k0", "k3", "none", None])
_PARTITIONS = st.sampled_from([-1, 0, 1, 2, None])
_TIMES = st.integers(-3_000, 34_000).map(lambda us: EPOCH + timedelta(microseconds=T0 * 1000 + us))
_FILTERS = st.one_of(
    st.builds(EqualTo, st.just(("__key",)), _KEYS),
    st.builds(In, st.just(("__key",)), st.lists(_KEYS).map(tuple)),
    st.builds(EqualTo, st.just(("__partition",)), _PARTITIONS),
    st.builds(In, st.just(("__partition",)), st.lists(_PARTITIONS).map(tuple)),
    st.builds(
        EqualTo, st.just(("__topic",)), st.sampled_from(["persistent://public/default/orders", "x"])
    ),
    st.builds(IsNotNull, st.sampled_from([("__partition",), ("__topic",)])),
    *(
        st.builds(kind, st.just(("__publishTime",)), _TIMES)
        for kind in (GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual, EqualTo)
    ),
)


def _passes(row: dict[str, Any], one: Any) -> bool:
    value = row[one.attribute[0]]
    if value is None or (not isinstance(one, IsNotNull) and one.value is None):
        return False
    if isinstance(one, IsNotNull):
        return True
    compared: dict[type[Filter], Callable[[Any, Any], bool]] = {
        EqualTo: operator.eq,
        In: lambda left, right: left in right,
        GreaterThan: operator.gt,
        GreaterThanOrEqual: operator.ge,
        LessThan: operator.lt,
        LessThanOrEqual: operator.le,
    }
    return compared[type(one)](value, one.value)


@pytest.fixture(scope="module")
def filtered() -> tuple[Topic, Topic]:
    """One topic with times that go back by 23 ms at most; one with missing and invalid times."""
    made = Topic(), Topic()
    for topic, times in zip(made, ((T0 + 7, T0 + 29), (0, 2**62, T0 + 7)), strict=True):
        for time_ms in times:
            topic.publish(topic.cluster.partitions(topic.topic)[0], 3, time_ms)
    return made


@settings(max_examples=60, deadline=None)
@given(filters=st.lists(_FILTERS, max_size=4), prunes=st.booleans(), cuts=st.integers(1, 9))
def test_pushed_filters_select_the_same_rows_as_spark(
    filtered: tuple[Topic, Topic], filters: list[Filter], prunes: bool, cuts: int
) -> None:
    names = ["__partition", "__messageId", "__key", "__topic", "__publishTime"]
    topic = filtered[0] if prunes else filtered[1]
    every: Any = topic.reader(names)
    options = {"maxTimeDisorder": "23ms"} if prunes else {}
    plain = topic.reader(names, minPartitions=str(cuts), **options)
    reader = FilteringBatchReader(plain._read, plain._rows)
    assert list(reader.pushFilters(filters)) == [], "all of these are taken"
    rows = [
        row
        for part in every.partitions()
        for batch in every.read(part)
        for row in batch.to_pylist()
    ]
    left = [(row["__partition"], row["__messageId"]) for row in rows
            if all(_passes(row, one) for one in filters)]  # fmt: skip
    assert topic.rows(reader) == left
    (first, *_), (whole, *_) = reader.partitions(), every.partitions()
    assert first.ends == whole.ends


@pytest.mark.parametrize(
    "one",
    [
        Not(EqualTo(("__key",), "k1")),
        EqualTo(("value",), b"k1"),
        EqualTo(("__key",), b"k1"),
        EqualTo(("__key", "of"), "k1"),
        EqualTo(("__partition",), value=True),
        IsNotNull(("__key",)),
        GreaterThan(("__partition",), 0),
        StringStartsWith(("__topic",), "persistent"),
        EqualTo(("__publishTime",), datetime(2023, 11, 14)),  # noqa: DTZ001 - without a zone
        In(("__publishTime",), (EPOCH,)),
    ],
)
def test_other_filters_stay_with_spark(topic: Topic, one: Filter) -> None:
    plain = topic.reader()
    reader = FilteringBatchReader(plain._read, plain._rows)
    assert list(reader.pushFilters([one])) == [one]
    assert topic.rows(reader) == list(topic.sent)


def test_entries_of_other_times_and_partitions_are_not_read(topic: Topic) -> None:
    plain = topic.reader(maxTimeDisorder="2ms")
    reader = FilteringBatchReader(plain._read, plain._rows)
    at = EPOCH + timedelta(milliseconds=T0 + 9)
    list(reader.pushFilters([EqualTo(("__partition",), 1), EqualTo(("__publishTime",), at)]))
    (part,) = reader.partitions()
    assert part.splits[0].entries <= 6, "of 60"
    assert len(topic.rows(reader)) == 4
