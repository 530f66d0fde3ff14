"""``ray_adapter.read`` on a real Ray and a real broker."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
import ray

import ray_adapter
from keyshard import KeyShardSource
from keyshard.broker.memory import Batching, Message
from keyshard.columns.record_batches import SCHEMA
from keyshard.config.segments import Segments
from keyshard.core.position.entry import TopicPartition
from keyshard.errors import ConfigError, KeyShardError
from keyshard.testing.devbroker import DevBroker
from tests.contract.pulsar_harness import PulsarHarness
from tests.helpers import wait_until
from tests.support.deadlines import deadline, in_time
from tests.support.scalable_topic import ScalableTopic
from tests.support.tested_pulsar import PULSAR

pytestmark = [
    pytest.mark.usefixtures("quiet_data"),
    pytest.mark.ray,
    pytest.mark.broker,
    pytest.mark.timeout(240),
    # Ray sets its own deprecated options.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data.context"),
]

EACH = 90
"""Messages of a topic partition."""
DAY = timedelta(days=1)


def source_of(dev_broker: DevBroker, topic: str, **options: Any) -> KeyShardSource:
    return KeyShardSource(
        topic,
        service_url=dev_broker.service_url,
        admin_url=dev_broker.admin_url,
        subscription="unused",
        **options,
    )


def filled(harness: PulsarHarness, partitions: int = 5) -> str:
    """A topic with single messages, mixed batches and a second ledger in each partition."""
    topic = harness.create_topic(partitions)
    for number in range(partitions):
        where = TopicPartition(topic, number)
        messages = [Message(b"%d:%d" % (number, i), key=f"k{i % 7}") for i in range(EACH)]
        harness.publish(where.name, messages[:30])
        harness.publish(where.name, messages[30:60], Batching.MIXED)
        harness.roll_ledger(where)
        harness.publish(where.name, messages[60:])
    return topic


def check_each_once(blocks: list[pa.Table], partitions: int = 5) -> None:
    """Every message once; in each block those of a partition in their order."""
    values = [tuple(map(int, v.split(b":"))) for one in blocks for v in one["value"].to_pylist()]
    expected = [(number, i) for number in range(partitions) for i in range(EACH)]
    assert Counter(values) == Counter(expected)
    for one in blocks:
        rows = [tuple(map(int, value.split(b":"))) for value in one["value"].to_pylist()]
        assert rows == sorted(rows)


def blocks_of(dataset: ray.data.Dataset) -> list[pa.Table]:
    return [ray.get(ref) for ref in dataset.materialize().to_arrow_refs()]


def test_five_partitions_with_13_splits_have_every_message_once_and_leave_nothing(
    dev_broker: DevBroker, harness: PulsarHarness
) -> None:
    topic = filled(harness)
    dataset = ray_adapter.read(source_of(dev_broker, topic), override_num_blocks=13)
    assert dataset.schema().names == SCHEMA.names
    harness.publish(topic, [Message(b"9:9", key="later")])
    blocks = blocks_of(dataset)
    assert len(blocks) == 13
    check_each_once(blocks)
    assert all(block.schema.equals(SCHEMA) for block in blocks)
    assert dataset.count() == 5 * EACH
    for number in range(5):
        where = TopicPartition(topic, number)
        wait_until(lambda where=where: harness.admin().subscriptions(where) == {})  # type: ignore[misc]
        path = where.name.replace("://", "/")
        stats = httpx.get(f"{dev_broker.admin_url}/admin/v2/{path}/internalStats").json()
        assert stats["cursors"] == {}


def test_the_statistics_of_ray_and_the_reports_tell_bookies_from_the_broker(
    dev_broker: DevBroker, harness: PulsarHarness
) -> None:
    topic = filled(harness, 2)
    reports = ray_adapter.ReadReports()
    dataset = ray_adapter.read(
        source_of(dev_broker, topic), segments=Segments("auto", dev_broker.bookies_map),
        reports=reports, override_num_blocks=3,
    )  # fmt: skip
    for _ in range(2):
        assert dataset.count() == 2 * EACH
        total = reports.total()
        assert total.reasons == {"it is not closed": total.by_broker}
        assert total.by_bookies > 60 <= total.by_broker, "a task that runs again counts once"
        assert total.by_bookies + total.by_broker <= 2 * EACH
    assert "2/4 ledgers from bookies" in dataset.materialize().stats()


def test_a_second_read_by_key_fetches_only_entries_that_the_index_leaves(
    dev_broker: DevBroker, harness: PulsarHarness, tmp_path: Path
) -> None:
    topic = filled(harness, 2)
    harness.publish(TopicPartition(topic, 1).name, [Message(b"2:0", key="seldom")])
    source, index = source_of(dev_broker, topic), str(tmp_path / "index")
    found = ray_adapter.read(source, keys=["seldom"], ledger_index=index).take_all()
    assert [row["value"] for row in found] == [b"2:0"]
    reports = ray_adapter.ReadReports()
    again = ray_adapter.read(source, keys=["seldom"], ledger_index=index, reports=reports)
    assert again.take_all() == found
    assert reports.total().skipped > 60, "the closed ledgers of both partitions"
    early = datetime(2001, 1, 1, tzinfo=timezone.utc)
    harness.roll_ledger(TopicPartition(topic, 0))
    harness.roll_ledger(TopicPartition(topic, 1))
    assert ray_adapter.read(source, ledger_index=index).count() == 2 * EACH + 1
    reports = ray_adapter.ReadReports()
    nothing = ray_adapter.read(source, end=early, ledger_index=index, reports=reports)
    assert nothing.take_all() == []
    assert reports.total().skipped > reports.total().by_broker == 0, "the index rules out all"
    assert ray_adapter.read(source, ledger_index=index).count() == 2 * EACH + 1


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_fewer_tasks_than_partitions_read_all_of_them(
    dev_broker: DevBroker, harness: PulsarHarness, blocks: int
) -> None:
    topic = filled(harness)
    dataset = ray_adapter.read(
        source_of(dev_broker, topic), override_num_blocks=blocks, concurrency=min(blocks, 2)
    )
    found = blocks_of(dataset)
    assert len(found) <= blocks
    check_each_once(found)


def test_columns_are_pruned_by_name_and_by_selection(
    dev_broker: DevBroker, harness: PulsarHarness
) -> None:
    topic = filled(harness, 1)
    source = source_of(dev_broker, topic)
    named = ray_adapter.read(source, columns=["__partition", "value"])
    assert named.schema().names == ["__partition", "value"]
    assert set(named.take(1)[0]) == {"__partition", "value"}
    assert list(named.select_columns(["value", "__partition"]).take(1)[0]) == [
        "value",
        "__partition",
    ]
    selected = ray_adapter.read(source).select_columns(["__key"])
    assert set(selected.take(1)[0]) == {"__key"}
    assert selected.count() == EACH
    renamed = ray_adapter.read(source).rename_columns({"__key": "user"}).select_columns(["user"])
    assert Counter(row["user"] for row in renamed.take_all()) == Counter(
        f"k{i % 7}" for i in range(EACH)
    )
    assert named.select_columns(["value"]).count() == EACH
    metadata = ("__sequenceId", "__producer", "__keyBytes", "__orderingKey")
    row = ray_adapter.read(source, columns=metadata).take(1)[0]
    assert tuple(row) == metadata
    assert row["__keyBytes"].startswith(b"k")
    own = replace(source, metadata_columns=["__producer"])
    assert ray_adapter.read(own).schema().names == [*SCHEMA.names, "__producer"]


def test_yesterday_is_read_by_time(dev_broker: DevBroker, harness: PulsarHarness) -> None:
    """Publish times go back and forth, and no producer's clock is right."""
    topic = harness.create_topic(2)
    today = datetime.now(timezone.utc).replace(hour=0, minute=0, second=0, microsecond=0)
    midnight, day = round(today.timestamp()) * 1000, 86_400_000
    times = {
        TopicPartition(topic, 0): [midnight - day - 1, midnight - day, midnight + 5, midnight - 1],
        TopicPartition(topic, 1): [midnight, midnight - 7, 1, midnight - day + 3, 2 * midnight],
    }
    for where, own in times.items():
        harness.publish_at(where.name, own)
    source = source_of(dev_broker, topic)
    dataset = ray_adapter.read(source, start=today - DAY, end=today, override_num_blocks=4)
    expected = sorted(
        one for own in times.values() for one in own if midnight - day <= one < midnight
    )
    assert sorted(int(row["value"]) for row in dataset.take_all()) == expected
    text = ray_adapter.read(source, start=str(today - DAY)[:10], end=str(today)[:10])
    assert sorted(int(row["value"]) for row in text.take_all()) == expected


def test_a_read_with_a_known_disorder_reads_less_and_finds_all_rows(
    dev_broker: DevBroker, harness: PulsarHarness
) -> None:
    topic = harness.create_topic()
    base = 1_700_000_000_000
    times = [base + 1000 * i - 900 * (i % 3) for i in range(200)]
    harness.publish_at(topic, times)
    source = source_of(dev_broker, topic)
    start, end = base + 100_000, base + 110_000
    dataset = ray_adapter.read(source, start=start, end=end, disorder_max_s=2)
    (task,) = dataset._logical_plan.dag.datasource.get_read_tasks(1)
    everything = ray_adapter.read(source)._logical_plan.dag.datasource
    assert task.metadata.size_bytes < everything.estimate_inmemory_data_size() / 8
    expected = [one for one in times if start <= one < end]
    # Blocks come in any order.
    assert sorted(int(row["value"]) for row in dataset.take_all()) == sorted(expected)


def test_by_positions_reads_join_without_gap_or_overlap(
    dev_broker: DevBroker, harness: PulsarHarness
) -> None:
    topic = filled(harness, 2)
    source = source_of(dev_broker, topic)
    rows = ray_adapter.read(source, columns=["__partition", "__messageId", "value"]).take_all()
    own = [[row for row in rows if row["__partition"] == number] for number in (0, 1)]
    # Both lie inside a batch.
    middle = {
        TopicPartition(topic, number).name: sorted(found, key=_position)[41 + number]["__messageId"]
        for number, found in enumerate(own)
    }
    before = ray_adapter.read(source, end=middle, override_num_blocks=5).take_all()
    after = ray_adapter.read(source, start=middle, override_num_blocks=5).take_all()
    assert len(before) == 41 + 42
    assert Counter(row["value"] for row in before + after) == Counter(row["value"] for row in rows)


def _position(row: dict[str, Any]) -> list[int]:
    return [int(part) for part in row["__messageId"].split(":")]


def test_an_empty_read_is_a_dataset_with_columns_and_no_rows(
    dev_broker: DevBroker, harness: PulsarHarness
) -> None:
    source = source_of(dev_broker, filled(harness, 1))
    for bounds in ({"start": "latest"}, {"start": datetime.now(timezone.utc) + DAY}):
        dataset = ray_adapter.read(source, **bounds)  # type: ignore[arg-type]
        assert dataset.count() == 0
        assert dataset.take_all() == []
        assert dataset.schema().names == SCHEMA.names
        assert dataset.select_columns(["value"]).take_all() == []


class Killer:
    """Kills the first process that asks, and counts."""

    def __init__(self) -> None:
        self.killed: list[int] = []

    def kill(self, process: int) -> None:
        if len(self.killed) < 2 and process not in self.killed:
            self.killed.append(process)
            os.kill(process, signal.SIGKILL)

    def count(self) -> int:
        return len(self.killed)


def test_a_killed_worker_neither_loses_nor_duplicates_rows(
    dev_broker: DevBroker, harness: PulsarHarness
) -> None:
    """A read task ends after some of its blocks were taken, and runs again from its beginning."""
    topic = harness.create_topic(2)
    value = b"x" * 20_000
    messages = [Message(b"%d:%s" % (i, value), key=f"k{i % 7}") for i in range(3_000)]
    harness.publish(topic, messages)
    source = source_of(dev_broker, topic)
    killer = ray.remote(Killer).remote()
    context = ray.data.DataContext.get_current()
    before, context.target_max_block_size = context.target_max_block_size, 4 * 1024 * 1024

    def number(table: pa.Table) -> pa.Table:
        numbers = [int(one.split(b":", 1)[0]) for one in table["value"].to_pylist()]
        if 1_500 in numbers:
            ray.get(killer.kill.remote(os.getpid()))
        return pa.table({"number": numbers})

    try:
        dataset = ray_adapter.read(source, columns=["value"], override_num_blocks=2)
        # Fused with the read, so that the reading worker is killed.
        numbers = dataset.map_batches(number, batch_format="pyarrow", batch_size=None)
        found = [row["number"] for row in numbers.take_all()]
    finally:
        context.target_max_block_size = before
    assert ray.get(killer.count.remote()) >= 1
    assert Counter(found) == Counter(range(3_000))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": "yesterday"}, "start is 'yesterday'"),
        ({"start": 1_795_219_200}, "multiply it by 1000"),
        ({"start": "2026-02-01", "end": "2026-01-01"}, "after its end"),
        ({"columns": "value"}, "columns is 'value'"),
        ({"columns": ["nothing"]}, "no column 'nothing'"),
        ({"columns": []}, "columns is []"),
        ({"columns": [["value"]]}, "no column ['value']"),
        ({"columns": ["__range"]}, "Column __range does not exist: the range of a key"),
        ({"columns": ["value", "value"]}, "a column twice"),
        ({"disorder_max_s": -1}, "disorder_max_s"),
    ],
)
def test_an_unreadable_topic_is_reported_at_the_call(
    dev_broker: DevBroker, harness: PulsarHarness, options: dict[str, Any], message: str
) -> None:
    source = source_of(dev_broker, harness.create_topic())
    with pytest.raises(ConfigError) as raised:
        ray_adapter.read(source, **options)
    assert message in str(raised.value)


def test_a_missing_topic_or_broker_is_reported_at_the_call(dev_broker: DevBroker) -> None:
    with pytest.raises(KeyShardError, match="TOPIC_NOT_FOUND"):
        ray_adapter.read(source_of(dev_broker, "no-such-topic"))
    away = KeyShardSource(
        "t", service_url="pulsar://127.0.0.1:1", admin_url="http://127.0.0.1:1",
        operation_timeout_ms=1_000,
    )  # fmt: skip
    began_s = time.monotonic()
    with pytest.raises(KeyShardError, match="BROKER_UNAVAILABLE"):
        ray_adapter.read(away)
    in_time(began_s + deadline(20), "the refusal took longer")
    with pytest.raises(ConfigError, match="admin_url"):
        ray_adapter.read(KeyShardSource("t"))
    with pytest.raises(ConfigError, match="cluster of this process"):
        ray_adapter.read(KeyShardSource("t", service_url="memory://m", admin_url="memory://m"))
    with pytest.raises(ConfigError, match="Pass a KeyShardSource"):
        ray_adapter.read("topic")  # type: ignore[arg-type]


def test_a_topic_deleted_before_the_dataset_runs_fails_it_by_name(
    dev_broker: DevBroker, harness: PulsarHarness
) -> None:
    topic = filled(harness, 2)
    strict = ray_adapter.read(source_of(dev_broker, topic), override_num_blocks=4)
    lenient = ray_adapter.read(source_of(dev_broker, topic, fail_on_data_loss=False))
    harness.delete_topic(topic)
    with pytest.raises(Exception, match="KEYSHARD_DATA_LOSS_TRIMMED"):
        strict.take_all()
    assert lenient.count() == 0
    assert harness.admin().partition_count(topic) is None


@pytest.mark.skipif(int(PULSAR.split(".")[0]) < 5, reason="needs scalable topics")
def test_a_dataset_has_all_segments_of_a_scalable_topic(dev_broker: DevBroker) -> None:
    with closing(ScalableTopic(dev_broker, segments=2)) as topic:
        topic.keep()
        for number in range(3):
            topic.publish(100)
            topic.change(random.Random(number))
        dataset = ray_adapter.read(source_of(dev_broker, topic.name), override_num_blocks=9)
        blocks = blocks_of(dataset)
        assert len(blocks) == 9
        values = [str(value, "utf-8") for one in blocks for value in one["value"].to_pylist()]
        assert Counter(values) == Counter(topic.sent)  # Ray may return blocks in another order.
