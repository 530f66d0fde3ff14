"""A sink on the in-memory broker: batches exactly once, and what it refuses."""

from __future__ import annotations

import pickle
import re
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from keyshard import KeyShardSink
from keyshard.broker.memory import MemoryBroker
from keyshard.broker.port import PublishOptions
from keyshard.config.sink import SinkConfig
from keyshard.core.publishing import key_partition
from keyshard.errors import (
    BatchMismatchError,
    BrokerError,
    ConfigError,
    DeduplicationError,
    MessageTooLargeError,
    ProducerBusyError,
    ProducerFencedError,
    QuotaExceededError,
)
from tests.support.copied_topic import PARTITIONS, SinkTopic
from tests.support.sink_rows import Rows, batch_of, expected, rows_of


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
