"""Triggers and shapes of queries: exact ones, and those refused by name."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from keyshard.control import running_source
from keyshard.core.ring.key_slot import key_slot
from keyshard.testing.devbroker import DevBroker
from tests.spark.spark_process import eventually
from tests.spark.spark_topic import SparkTopic, ended, failed, in_order
from tests.support.deadlines import deadline, in_time

pytestmark = [pytest.mark.broker, pytest.mark.spark]


@pytest.fixture
def topic(dev_broker: DevBroker, topic_name: str, tmp_path: Path) -> SparkTopic:
    return SparkTopic(dev_broker, topic_name, tmp_path)


@pytest.fixture(autouse=True)
def _no_query_left(spark: SparkSession) -> Iterator[None]:
    yield
    for query in spark.streams.active:
        query.stop()


def test_available_now_ends_at_its_target_under_an_endless_producer(
    spark: SparkSession, topic: SparkTopic
) -> None:
    topic.produce(3_000)
    before, stop = set(topic.sent), threading.Event()

    def endless() -> None:
        while not stop.is_set():
            topic.produce(200)

    producer = threading.Thread(target=endless)
    name = f"endless-{topic.name}"
    shown = {"queryName": name, "ui.port": "0"}
    query = topic.start(topic.rows(spark, maxOffsetsPerTrigger="1500", **shown))
    try:
        # The targets are frozen before the first row is seen; later messages come too late.
        eventually(lambda: bool(topic.seen), deadline(120), "a first batch")
        found = running_source(name)
        status = found.ask("status")
        assert (found.kind, status["kind"], status["name"]) == ("spark", "spark", name)
        assert len(status["partitions"]) == 3
        assert status["window"]["rowsReceived"] > 0
        producer.start()
        ended(query)
    finally:
        stop.set()
        if producer.ident is not None:
            producer.join()
    assert set(topic.values()) == before
    assert set(topic.values().values()) == {1}
    assert all(map(in_order, topic.seen))
    assert len(topic.seen) > 1
    assert topic.backlog() == len(topic.sent) - len(before)


def test_available_now_ends_without_new_rows_and_names_foreign_acknowledgements(
    spark: SparkSession, topic: SparkTopic
) -> None:
    topic.produce(400, keys=1)  # one of three partitions has data
    ended(topic.start(topic.rows(spark)))
    assert topic.backlog() == 0
    assert len(topic.values()) == 400
    ended(topic.start(topic.rows(spark)))  # nothing new
    topic.produce(100, keys=1)
    ended(topic.start(topic.rows(spark)))
    assert set(topic.values()) == set(topic.sent)
    topic.produce(30, keys=1)
    (where,) = [i for i in range(3) if topic.backlog_of(i)]
    topic.skip(where, 30)
    with pytest.raises(PySparkException, match=r"KEYSHARD_DATA_LOSS_ACKED_ELSEWHERE.* 30 entries"):
        ended(topic.start(topic.rows(spark)))
    began = time.monotonic()
    ended(topic.start(topic.rows(spark, failOnDataLoss="false")))
    print(f"\na run with nothing but foreign acknowledgements: {time.monotonic() - began:.1f} s")
    assert set(topic.values()) == set(topic.sent[:500])
    assert set(topic.values().values()) == {1}
    assert topic.backlog() == 0


@pytest.mark.parametrize("transport", ["wire", "client"])
def test_available_now_leaves_delayed_messages_that_are_not_due(
    spark: SparkSession, topic: SparkTopic, transport: str
) -> None:
    """1. A topic has a message of deliver_after=3h among others. 2. A bounded query reads it.

    The query waited for availableNowTimeoutMillis and failed with "Check the broker".
    """
    topic.produce(60)
    with closing(topic.client()) as client:
        producer = client.create_producer(topic.name)
        for key in ("key-1", "key-2"):
            producer.send(b"late", partition_key=key, deliver_after=timedelta(hours=3))
    topic.produce(60)
    for _ in range(2):
        ended(topic.start(topic.rows(spark, transport=transport)))
        assert set(topic.values()) == set(topic.sent)
        assert set(topic.values().values()) == {1}
        assert topic.backlog() == 2
        topic.produce(30)


def test_available_now_reads_all_rows_without_admin_url(
    spark: SparkSession, topic: SparkTopic
) -> None:
    topic.produce(300)
    ended(topic.start(topic.rows(spark, admin_url="")))
    assert set(topic.values()) == set(topic.sent)
    assert topic.backlog() == 0


def test_worker_processes_receive_for_a_query(spark: SparkSession, topic: SparkTopic) -> None:
    topic.produce(2_000)
    ended(topic.start(topic.rows(spark, workers="processes:2")))
    assert set(topic.values()) == set(topic.sent)
    assert set(topic.values().values()) == {1}
    assert all(map(in_order, topic.seen))
    assert topic.backlog() == 0


def test_a_self_union_gives_each_row_twice_in_order(spark: SparkSession, topic: SparkTopic) -> None:
    topic.produce(500)
    rows = topic.rows(spark)
    one = rows.selectExpr("value", "__key", "1 as side")
    two = rows.selectExpr("value", "__key", "2 as side")
    sides: dict[int, list[tuple[str, str]]] = {1: [], 2: []}

    def look(batch: DataFrame, _number: int) -> None:
        for row in batch.collect():
            sides[row["side"]].append((row["__key"], row["value"].decode()))

    query = (
        one.union(two)
        .writeStream.foreachBatch(look)
        .option("checkpointLocation", str(topic.checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    ended(query)
    assert sides[1] == sides[2]
    assert sorted(value for _, value in sides[1]) == sorted(topic.sent)
    assert in_order(sides[1])
    assert topic.backlog() == 0


def test_two_actions_of_foreach_batch_read_the_same_rows_in_the_same_order(
    spark: SparkSession, topic: SparkTopic
) -> None:
    topic.produce(500)

    def twice(batch: DataFrame, number: int) -> None:
        topic.note(batch, number)
        topic.note(batch, number)

    ended(topic.start(topic.rows(spark, maxOffsetsPerTrigger="200"), twice))
    assert topic.seen[::2] == topic.seen[1::2]
    assert len(topic.seen) >= 6
    assert topic.values() == dict.fromkeys(topic.sent, 2)


def test_a_self_join_and_a_second_query_on_one_subscription_are_refused(
    spark: SparkSession, topic: SparkTopic
) -> None:
    topic.produce(10)
    rows = topic.rows(spark, subscribeTimeoutMillis="2000")
    left, right = rows.alias("left"), rows.alias("right")
    joined = left.join(right, "__key").select("left.value", "left.__key")
    message = failed(topic.start(joined, checkpoint=f"{topic.checkpoint}-join"))
    assert "[KEYSHARD_SUBSCRIPTION_IN_USE]" in message

    first = topic.start(rows, trigger={"processingTime": "0 seconds"})
    eventually(lambda: bool(topic.seen), deadline(60), "a first batch")
    began = time.monotonic()
    message = failed(topic.start(rows, checkpoint=f"{topic.checkpoint}-second"))
    in_time(began + deadline(17), "the refusal took as long as the default of 20 s")
    took = time.monotonic() - began
    assert "[KEYSHARD_SUBSCRIPTION_IN_USE]" in message
    assert "is in use by /127.0.0.1:" in message
    assert "its ranges were not free within 2000 ms" in message
    print(f"\na second query is refused after {took:.1f} s")
    assert first.isActive
    first.stop()


def test_the_file_manager_for_short_triggers_keeps_rows_exactly_once(
    spark: SparkSession, topic: SparkTopic
) -> None:
    """The setting of docs/how-to/short-triggers.md, over a restart."""
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "short-triggers.md").read_text()
    name, manager = next(
        line.split() for line in page.splitlines() if "checkpointFileManagerClass org." in line
    )
    spark.conf.set(name, manager)
    try:
        for _ in range(2):
            topic.produce(60)
            ended(topic.start(topic.rows(spark, maxOffsetsPerTrigger="20")))
    finally:
        spark.conf.unset(name)
    assert topic.values() == dict.fromkeys(topic.sent, 1)


def test_once_is_refused(spark: SparkSession, topic: SparkTopic) -> None:
    topic.produce(10)
    message = failed(topic.start(topic.rows(spark), trigger={"once": True}))
    assert "[KEYSHARD_UNSUPPORTED_TRIGGER]" in message
    assert "availableNow" in message
    assert topic.acknowledged() == [], "it subscribed"


def test_async_progress_is_refused_before_anything_is_acknowledged(
    spark: SparkSession, topic: SparkTopic
) -> None:
    topic.produce(600)
    query = (
        topic.rows(spark, maxOffsetsPerTrigger="100")
        .writeStream.format("noop")
        .option("asyncProgressTrackingEnabled", "true")
        .option("checkpointLocation", str(topic.checkpoint))
        .start()
    )
    message = failed(query)
    assert "[KEYSHARD_ASYNC_PROGRESS]" in message
    assert "asyncProgressTrackingEnabled" in message
    assert topic.backlog() == 600


@pytest.mark.parametrize("check", ["true", "false"])
def test_real_time_mode_is_refused_by_spark_itself(
    spark: SparkSession, topic: SparkTopic, check: str
) -> None:
    # Spark asks no Python source whether it supports this mode: it names those that do.
    spark.conf.set("spark.sql.streaming.realTimeMode.allowlistCheck", check)
    writer = topic.rows(spark).writeStream.format("memory").outputMode("update")
    writer = writer.queryName(topic.name.replace("-", "_"))
    writer = writer.trigger(realTime="5 seconds")  # type: ignore[call-overload]
    writer = writer.option("checkpointLocation", str(topic.checkpoint))
    with pytest.raises(PySparkException) as caught:
        writer.start().awaitTermination(30)
    print(f"\n{caught.value}"[:300])
    assert "STREAMING_REAL_TIME_MODE" in str(caught.value)


def test_a_schema_selects_columns(spark: SparkSession, topic: SparkTopic) -> None:
    topic.produce(50)
    rows = (
        spark.readStream.format("keyshard")
        .schema("__slot int, value binary")
        .options(**topic.options())
        .load()
    )
    seen: list[tuple[int, str]] = []

    def look(batch: DataFrame, _number: int) -> None:
        seen.extend((row["__slot"], row["value"].decode()) for row in batch.collect())

    writer = rows.writeStream.foreachBatch(look).trigger(availableNow=True)
    ended(writer.option("checkpointLocation", str(topic.checkpoint)).start())
    assert sorted(value for _, value in seen) == sorted(topic.sent)
    assert all(slot == key_slot(value.split(":")[0]) for slot, value in seen)


def test_an_unknown_column_is_refused_by_name(spark: SparkSession, topic: SparkTopic) -> None:
    topic.produce(1)
    rows = (
        spark.readStream.format("keyshard")
        .schema("value binary, colour string")
        .options(**topic.options())
        .load()
    )
    writer = rows.writeStream.format("noop").trigger(availableNow=True)
    with pytest.raises(PySparkException, match=r"KEYSHARD_BAD_OPTION.*'colour'"):
        ended(writer.option("checkpointLocation", str(topic.checkpoint)).start())


def test_messages_deleted_without_the_subscription_fail_the_query_or_are_counted(
    spark: SparkSession, topic: SparkTopic
) -> None:
    """The subscription of one partition is deleted while the query is down."""
    topic.produce(60)
    ended(topic.start(topic.rows(spark)))
    topic.delete_subscription(0)
    topic.produce(60)
    topic.trim(0)
    lost = set(topic.sent) - set(topic.values())
    topic.produce(60)
    message = failed(topic.start(topic.rows(spark)))
    assert "KEYSHARD_DATA_LOSS_TRIMMED" in message
    assert f"{topic.name}-partition-0 has retained entries" in message
    query = topic.start(topic.rows(spark, failOnDataLoss="false"))
    ended(query)
    (offset,) = (one["latestOffset"] for one in query.recentProgress[-1]["sources"])
    assert json.loads(offset)["entriesLost"] == 1
    missing = set(topic.sent) - set(topic.values())
    assert missing
    assert missing < lost, "only those that were deleted"
    assert set(topic.values().values()) == {1}
    ended(topic.start(topic.rows(spark)))
