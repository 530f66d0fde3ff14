"""Bounded reads of scalable topics: all segments of the graph at one moment."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from keyshard import KeyShardSource
from keyshard.broker.memory import MemoryBroker, MemoryCluster, Message
from keyshard.config.segments import Segments
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.errors import (
    ChunkedMessageError,
    ConfigError,
    CorruptEntryError,
    DataLossTrimmedError,
    TopicNotFoundError,
    TopicRecreatedError,
)
from keyshard.reading import split_planner
from keyshard.reading.segment_ledgers import UNLISTED, segment_ledgers
from tests.support.memory_scalable_topic import KEYS, TOPIC, ScalableTopic


class ReadTopic(ScalableTopic):
    """A scalable topic with ledgers of seven entries, and reads of it."""

    def __init__(self) -> None:
        self.name = uuid.uuid4().hex
        super().__init__(2, MemoryCluster.named(self.name, entries_per_ledger=7))

    def source(self, **changes: Any) -> KeyShardSource:
        url = f"memory://{self.name}"
        return KeyShardSource(TOPIC, service_url=url, admin_url=url, **changes)


@pytest.fixture
def topic() -> Iterator[ReadTopic]:
    made = ReadTopic()
    made.publish(40)
    yield made
    made.cluster.validate()


def rows_of(read: Iterable[pa.RecordBatch]) -> list[tuple[str, int]]:
    return [
        (key, int(value))
        for batch in read
        for key, value in zip(
            batch.column("__key").to_pylist(), batch.column("value").to_pylist(), strict=True
        )
    ]


def change(topic: ReadTopic) -> None:
    """Make four generations of segments."""
    topic.split(0)
    topic.publish(20)
    topic.cluster.scalable.merge(TOPIC, 3, 1)
    topic.publish(20)
    topic.split(4)
    topic.publish(20)


def test_a_read_has_each_message_of_all_generations_in_the_order_of_its_key(
    topic: ReadTopic,
) -> None:
    change(topic)
    topic.got = rows_of(topic.source().read())
    topic.check()
    where = topic.cluster.scalable.graph(TOPIC).partitions
    assert not any(topic.cluster.subscriptions(one) for one in where)


@pytest.mark.parametrize("parts", [1, 5, 1_000])
def test_parts_of_a_read_are_that_read_whatever_the_number_of_segments(
    topic: ReadTopic, parts: int
) -> None:
    change(topic)
    reads = topic.source().read().split(parts)
    assert (len(reads) == parts) or parts == 1_000
    assert len(reads) > 5 or parts < 1_000
    topic.got = [row for one in reads for row in rows_of(one)]
    topic.check()


def test_a_read_keeps_the_segments_and_ends_of_its_call(topic: ReadTopic) -> None:
    read, sent = topic.source().read(), topic.sent
    change(topic)
    topic.got, topic.sent = rows_of(read), sent
    topic.check()


def test_an_empty_topic_has_no_rows() -> None:
    assert rows_of(ReadTopic().source().read()) == []


def test_keys_and_times_choose_rows_as_in_other_reads(topic: ReadTopic) -> None:
    before_ms = topic.cluster.now_ms()
    change(topic)
    of_key = rows_of(topic.source().read(keys=[KEYS[0]]))
    assert [number for _, number in of_key] == list(range(0, topic.sent, len(KEYS)))
    assert len(rows_of(topic.source().read(start=before_ms + 3_600_000))) == 0
    assert len(rows_of(topic.source().read(end=before_ms + 3_600_000))) == topic.sent


def test_options_that_need_a_list_of_ledgers_read_everything_and_say_so(
    topic: ReadTopic, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    how: dict[str, Any] = {
        "segments": Segments("auto"),
        "ledger_index": str(tmp_path),
        "disorder_max_s": 1.0,
    }
    read = topic.source().read(start=0, **how)
    topic.got = rows_of(read)
    topic.check()
    for name in ("ledger_index", "disorder_max_s"):
        assert f"{name} leaves out no entries of a scalable topic: {UNLISTED}" in caplog.text
    assert read.report.reasons == {UNLISTED: topic.sent}


@pytest.mark.parametrize("name", ["start", "end"])
def test_a_position_without_a_segment_is_refused_by_name(topic: ReadTopic, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is .*a position belongs to one segment"):
        topic.source().read(**{name: "3:7"})  # type: ignore[arg-type]


def test_a_missing_topic_is_named(topic: ReadTopic) -> None:
    topic.cluster.scalable.delete(TOPIC)
    with pytest.raises(TopicNotFoundError, match=TOPIC):
        topic.source().read()


def test_a_segment_that_is_deleted_while_a_read_is_planned_is_not_read(
    topic: ReadTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic.split(0)
    topic.publish(20)
    calls = [0]

    def deletes(*of: Any) -> Any:
        calls[0] += 1
        if calls[0] == 1:
            assert topic.cluster.scalable.collect(TOPIC) == [0]
        return segment_ledgers(*of)

    monkeypatch.setattr(split_planner, "segment_ledgers", deletes)
    found = rows_of(topic.source().read())
    assert {number for _, number in found} >= set(range(40, 60))
    assert len(found) < topic.sent


@pytest.mark.parametrize("strict", [True, False])
def test_a_segment_that_is_deleted_after_the_plan_is_named_or_left_out(
    topic: ReadTopic, strict: bool
) -> None:
    topic.split(0)
    topic.publish(20)
    read = topic.source(fail_on_data_loss=strict).read()
    assert topic.cluster.scalable.collect(TOPIC) == [0]
    if strict:
        with pytest.raises(DataLossTrimmedError, match=r"-0, from .*the broker deleted the segm"):
            rows_of(read)
    else:
        assert {number for _, number in rows_of(read)} >= set(range(40, 60))


def test_a_segment_that_is_deleted_during_the_read_is_named(
    topic: ReadTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic.split(0)
    read = topic.source().read()
    opened, reader = [0], MemoryBroker.reader

    def deletes(self: MemoryBroker, *of: Any) -> Any:
        opened[0] += 1
        if opened[0] == 2:
            topic.cluster.scalable.collect(TOPIC)
        return reader(self, *of)

    monkeypatch.setattr(MemoryBroker, "reader", deletes)
    with pytest.raises(DataLossTrimmedError, match="the broker deleted the segment"):
        rows_of(read)


def test_a_topic_that_is_created_again_after_the_plan_is_named(topic: ReadTopic) -> None:
    read = topic.source().read()
    topic.cluster.scalable.delete(TOPIC)
    topic.cluster.scalable.create(TOPIC, 2)
    topic.publish(40)
    with pytest.raises(TopicRecreatedError, match="created again after the read was planned"):
        rows_of(read)


def test_entries_that_retention_removes_after_the_plan_are_named(topic: ReadTopic) -> None:
    read = topic.source().read()
    where = TopicPartition("segment://public/default/orders/0000-7fff-0")
    topic.cluster.trim(where, topic.cluster.log(where).last_written)
    with pytest.raises(DataLossTrimmedError, match="of segment://public/default/orders/0000"):
        rows_of(read)


def test_corrupt_entries_do_not_hide_where_ledgers_end(topic: ReadTopic) -> None:
    (plan, _) = split_planner.plan_read(topic.source())
    where, ends = plan.topic_partition, [EntryId(one.ledger, one.end - 1) for one in plan.spans]
    topic.cluster.corrupt(where, EntryId(ends[0].ledger, 0), *ends)
    (again, _) = split_planner.plan_read(topic.source())
    assert again.spans == plan.spans
    with pytest.raises(CorruptEntryError):
        rows_of(topic.source().read())


def test_chunked_and_aborted_messages_do_not_end_the_plan(topic: ReadTopic) -> None:
    (plan, _) = split_planner.plan_read(topic.source())
    where = plan.topic_partition
    topic.cluster.publish_aborted(where, *[Message(b"", KEYS[0])] * 9)
    topic.publish(40)
    topic.cluster.publish_aborted(where, Message(b"", KEYS[0]))
    topic.got = rows_of(topic.source().read())
    topic.check()
    topic.cluster.publish_chunked(where, Message(b"x" * 10, KEYS[0]), 2)
    with pytest.raises(ChunkedMessageError):
        rows_of(topic.source().read())
