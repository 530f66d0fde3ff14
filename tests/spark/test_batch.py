"""Batch reads through Spark: ``spark.read.format("keyshard")`` on a real broker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import pyspark
import pytest
from pyspark.sql import DataFrame, SparkSession, datasource
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.functions import col
from pyspark.sql.types import StructType

import spark_adapter
from examples.backfill_then_stream import back_fill, run
from keyshard import KeyShardSource
from keyshard.broker.memory import Batching, Message
from keyshard.core.position.entry import TopicPartition
from keyshard.errors import ConfigError
from keyshard.reading.split_planner import plan_read
from keyshard.testing.devbroker import DevBroker
from spark_adapter.batch_reader import FilteringBatchReader
from spark_adapter.option_parsing import parse_bounded
from spark_adapter.task_rows import Rows
from tests.contract.pulsar_harness import PulsarHarness

pytestmark = [pytest.mark.broker, pytest.mark.spark]

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


def load(
    spark: SparkSession, dev_broker: DevBroker, topic: str, schema: str = "", **options: str
) -> DataFrame:
    reader = spark.read.format("keyshard").options(
        **{"service.url": dev_broker.service_url, "admin.url": dev_broker.admin_url},
        topic=topic,
        **options,
    )
    return (reader.schema(schema) if schema else reader).load()


@pytest.mark.pyspark(4, 2)
def test_one_partition_feeds_three_tasks_each_message_once_and_nothing_is_left(
    spark: SparkSession, dev_broker: DevBroker, harness: PulsarHarness
) -> None:
    topic = harness.create_topic(1)
    messages = [Message(b"%d" % number, key=f"k{number % 7}") for number in range(90)]
    where = TopicPartition(topic, 0)
    harness.publish(where.name, messages[:30])
    harness.publish(where.name, messages[30:60], Batching.MIXED)
    harness.roll_ledger(where)
    harness.publish(where.name, messages[60:])
    rows = load(spark, dev_broker, topic, minPartitions="3")
    parts = [[int(row["value"]) for row in part] for part in rows.rdd.glom().collect()]
    assert len(parts) == 3
    assert [number for part in parts for number in part] == list(range(90)), "in order"

    harness.publish(where.name, [Message(b"90", key="later")])
    assert rows.count() == 90, "what is read is fixed at the first action"
    assert load(spark, dev_broker, topic, "__partition int").count() == 91
    one = load(spark, dev_broker, topic, "value binary", keys='["k3", "later"]').collect()
    assert [int(row["value"]) for row in one] == [*range(3, 90, 7), 90]

    spark.conf.set(PUSHDOWN, "true")
    try:
        fresh = load(spark, dev_broker, topic)
        with pytest.raises(ConfigError, match="Spark plans each query with a filter again"):
            spark_adapter.positions(fresh)
        assert fresh.filter("__key = 'k3'").count() == 13
        assert fresh.count() == 91, "what was planned for a filter is right without it"
    finally:
        spark.conf.unset(PUSHDOWN)
    by_time = load(spark, dev_broker, topic, endingTime="2026-11-21T08:00:00Z")
    for rows_of, sentence in (
        (by_time, "(?s)The end of .* is '2026-11-21T08:00:00.*Use endingOffsets"),
        (spark.range(1), "has no batch read of format"),
        (spark.readStream.format("rate").load(), "Pass the DataFrame of a batch read"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            spark_adapter.positions(rows_of)
    path = where.name.replace("://", "/")
    stats = httpx.get(f"{dev_broker.admin_url}/admin/v2/{path}/internalStats").json()
    assert stats["cursors"] == {}


@pytest.mark.pyspark(4, 1)
def test_the_plan_and_the_tasks_count_entries_of_bookies_and_of_the_broker(
    spark: SparkSession, dev_broker: DevBroker, harness: PulsarHarness
) -> None:
    topic = harness.create_topic(1)
    where = TopicPartition(topic, 0)
    harness.publish(where.name, [Message(b"%d" % number, key="k") for number in range(40)])
    harness.roll_ledger(where)
    harness.publish(where.name, [Message(b"%d" % number, key="k") for number in range(40, 50)])
    reports = spark_adapter.ReadReports(spark)
    options = {
        "segments": "auto", "bookies.map": json.dumps(dev_broker.bookies_map), "minPartitions": "3",
        "readReports": str(reports.id),
    }  # fmt: skip
    rows = load(spark, dev_broker, topic, **options)
    plan = spark_adapter.read_plan(rows.select("value"))
    assert (plan.by_bookies, plan.by_broker) == (40, 10)
    assert plan.reasons == {"it is not closed": 10}
    for _ in range(2):
        assert rows.count() == 50
        assert reports.total == plan, "a task that runs again is not counted twice"
    by_broker = spark_adapter.ReadReports(spark)
    assert load(spark, dev_broker, topic, readReports=str(by_broker.id)).count() == 50
    assert by_broker.total.reasons == {"its bookies were not asked for": 50}
    assert reports.total == plan
    for wrong, sentence in ((spark.range(1), "has no batch read"), (topic, "Pass the DataFrame")):
        with pytest.raises(ConfigError, match=sentence):
            spark_adapter.read_plan(wrong)  # type: ignore[arg-type]


@pytest.mark.pyspark(4, 1)
def test_a_second_read_fetches_only_entries_that_the_index_leaves(
    spark: SparkSession, dev_broker: DevBroker, harness: PulsarHarness, tmp_path: Path
) -> None:
    topic = harness.create_topic(1)
    where = TopicPartition(topic, 0)
    for start in range(0, 40, 10):
        numbers = range(start, start + 10)
        harness.publish(where.name, [Message(b"%d" % one, key=f"k{one}") for one in numbers])
        harness.roll_ledger(where)
    index = {"ledgerIndex": str(tmp_path / "index")}
    (first,) = load(spark, dev_broker, topic, **index, keys='["k15"]').collect()
    for segments in ("broker", "auto"):
        reports = spark_adapter.ReadReports(spark)
        options = {**index, "segments": segments, "readReports": str(reports.id)}
        if segments == "auto":
            options["bookies.map"] = json.dumps(dev_broker.bookies_map)
        rows = load(spark, dev_broker, topic, **options, keys='["k15"]')
        plan = spark_adapter.read_plan(rows)
        assert (plan.by_bookies + plan.by_broker, plan.skipped) == (10, 30)
        assert [int(row["value"]) for row in rows.collect()] == [15]
        assert reports.total.by_bookies == (10 if segments == "auto" else 0)
        assert reports.total.skipped == 30
    nothing = load(spark, dev_broker, topic, **index, keys='["k99"]')
    assert spark_adapter.read_plan(nothing).skipped == 40
    assert nothing.count() == 0
    one_day = load(
        spark,
        dev_broker,
        topic,
        **index,
        startingTime=first["__publishTime"].astimezone().isoformat(),
    )
    assert spark_adapter.read_plan(one_day).skipped == 10
    assert one_day.where("value >= '15'").count() >= 25

    spark.conf.set(PUSHDOWN, "true")
    try:
        filtered = load(spark, dev_broker, topic, **index, pushFilters="true")
        assert filtered.where("__key = 'k3'").count() == 1
    finally:
        spark.conf.unset(PUSHDOWN)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"readReports": "all"}, "Give the id of a spark_adapter.ReadReports"),
        ({"startingTime": "2026-11-21T08:00"}, "which has no time zone"),
        pytest.param(
            {"subscription": "s"},
            "'subscription' belongs to streams",
            marks=pytest.mark.pyspark(4, 2),
        ),
        ({"endingOffsets": '{"other": "1:1"}'}, "endingOffsets names"),
    ],
)
def test_an_error_is_raised_before_any_job_runs(
    spark: SparkSession, dev_broker: DevBroker, harness: PulsarHarness,
    options: dict[str, str], sentence: str,
) -> None:  # fmt: skip
    topic = harness.create_topic()
    with pytest.raises(pyspark.errors.PySparkException) as caught:
        load(spark, dev_broker, topic, **options).count()
    found = str(caught.value).rsplit("[KEYSHARD_", maxsplit=1)[1]
    assert found.startswith("BAD_OPTION]")
    assert sentence in found
    assert "Job aborted" not in str(caught.value)


@pytest.mark.pyspark(4, 1)
def test_filters_select_messages_if_the_option_is_set(
    spark: SparkSession, dev_broker: DevBroker, harness: PulsarHarness
) -> None:
    topic = harness.create_topic(2)
    messages = [Message(b"%d" % number, key=f"k{number % 7}") for number in range(140)]
    harness.publish(topic, messages[:70])
    harness.publish(topic, messages[70:], Batching.MIXED)

    def loaded(**options: str) -> DataFrame:
        return load(spark, dev_broker, topic, minPartitions="8", pushFilters="true", **options)

    with pytest.raises(pyspark.errors.PySparkException, match=PUSHDOWN):
        loaded().count()
    everything = load(spark, dev_broker, topic).collect()
    middle = sorted(row["__publishTime"] for row in everything)[70]
    spark.conf.set(PUSHDOWN, "true")
    try:
        chosen = loaded().where("__key in ('k3', 'k5') and __partition = 1 and value <> '3'")
        chosen = chosen.where(col("__publishTime") >= middle)
        with redirect_stdout(StringIO()) as plan:
            chosen.explain(mode="formatted")
        for pushed in ("In(__key, [k3,k5])", "EqualTo(__partition,1)", "GreaterThanOrEqual(__pub"):
            assert pushed in plan.getvalue()
        rows = chosen.collect()
        wanted = [
            row
            for row in everything
            if row["__key"] in ("k3", "k5") and row["__partition"] == 1
            and row["__publishTime"] >= middle and row["value"] != b"3"
        ]  # fmt: skip
        assert sorted(rows) == sorted(wanted)
        assert wanted
        # Times are in order here. Of all entries, those before the middle are not read.
        sizes = []
        for options in ({}, {"maxTimeDisorder": "0ms"}):
            reader = FilteringBatchReader(
                parse_bounded({"topic": topic, "service.url": dev_broker.service_url,
                               "admin.url": dev_broker.admin_url} | options),
                Rows(["value"]),
            )  # fmt: skip
            for bound in (
                (),
                (datasource.GreaterThanOrEqual(("__publishTime",), middle.astimezone()),),
            ):
                list(reader.pushFilters([datasource.EqualTo(("__partition",), 1), *bound]))
                parts = reader.partitions()
                sizes.append(sum(one.entries for part in parts for one in part.splits))
        assert sizes[0] == sizes[1] == sizes[2] > sizes[3] > 0
    finally:
        spark.conf.unset(PUSHDOWN)


def three() -> type[DataSource]:
    """Return a source of three partitions with one row each; it takes filters from Spark.

    It is defined in a function, so that Spark's workers get it by value without this module.
    """

    class ThreeReader(DataSourceReader):
        wanted: Any = None

        def pushFilters(self, filters: list[datasource.Filter]) -> Iterator[datasource.Filter]:  # type: ignore[override]  # noqa: N802
            for one in filters:
                if isinstance(one, datasource.EqualTo):
                    self.wanted = one.value
                else:
                    yield one

        def partitions(self) -> list[InputPartition]:
            return [InputPartition(number) for number in range(3)]

        def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
            if self.wanted in (None, partition.value):
                yield (partition.value,)

    class Three(DataSource):
        @classmethod
        def name(cls) -> str:
            return "three"

        def schema(self) -> str:
            return "number int"

        def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002
            return ThreeReader()

    return Three


@pytest.mark.skipif(not pyspark.__version__.startswith("4.3"), reason="this was seen in 4.3")
@pytest.mark.pyspark(4, 1)
def test_filters_pushed_by_spark_leave_too_few_rows_for_a_query_without_one(
    spark: SparkSession,
) -> None:
    """1. Run a query with a filter. 2. Run one without it, on the same DataFrame.

    If this test fails, Spark plans both on their own, and ``pushFilters`` suits every query.
    """
    spark.dataSource.register(three())
    spark.conf.set(PUSHDOWN, "true")
    try:
        rows = spark.read.format("three").load()
        assert rows.filter("number = 1").count() == 1
        assert rows.count() == 1, "Spark is mended: these are three"
        one, two = rows.filter("number = 1"), rows.filter("number = 2")
        assert sorted(row["number"] for row in one.union(two).collect()) == [2, 2], "1 and 2"
    finally:
        spark.conf.unset(PUSHDOWN)


@pytest.mark.pyspark(4, 2)
def test_a_back_fill_and_the_stream_behind_it_have_every_message_once(
    spark: SparkSession, dev_broker: DevBroker, harness: PulsarHarness, tmp_path: Path
) -> None:
    topic = harness.create_topic(2)
    options = {"service.url": dev_broker.service_url, "admin.url": dev_broker.admin_url,
               "topic": topic}  # fmt: skip

    def publish(start: int) -> None:
        messages = [
            Message(b"%d" % number, key=f"k{number % 7}") for number in range(start, start + 50)
        ]
        harness.publish(topic, messages, Batching.BY_KEY)

    publish(0)
    stored = plan_read(KeyShardSource(
        topic, service_url=dev_broker.service_url, admin_url=dev_broker.admin_url
    ))  # fmt: skip
    # Inside a producer batch of each.
    inside = {one.topic_partition.name: f"{one.first.ledger}:1:3" for one in stored}
    ends = {"endingOffsets": json.dumps(inside)}
    behind = back_fill(spark, options | ends, tmp_path)
    assert json.loads(behind) == inside
    publish(50)
    reached = run(spark, options, "live", tmp_path, str(tmp_path / "checkpoint"))
    assert back_fill(spark, options, tmp_path) == behind, "the batch is not read again"
    history = [int(row["value"]) for row in spark.read.parquet(str(tmp_path / "history")).collect()]
    live = [int(row["value"]) for row in spark.read.parquet(str(tmp_path / "live")).collect()]
    assert len(live) > 50
    assert sorted(history + live) == list(range(100))
    assert json.loads(reached) == {
        one.topic_partition.name: str(one.end)
        for one in plan_read(
            KeyShardSource(
                topic, service_url=dev_broker.service_url, admin_url=dev_broker.admin_url
            )
        )
    }
