"""Batches of a stream and of a session, written to a topic exactly once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

import spark_adapter
from keyshard.errors import ConfigError
from keyshard.publishing.batch_writer import WriteReport
from keyshard.testing.devbroker import DevBroker
from tests.spark.spark_topic import SparkTopic, ended
from tests.support.stored_topic import admin_of, keeping_namespace, messages_of_topic

pytestmark = [pytest.mark.spark, pytest.mark.broker]
PARTITIONS = 3


@pytest.fixture
def target(dev_broker: DevBroker) -> Iterator[str]:
    """A topic with deduplication that keeps everything."""
    with admin_of(dev_broker) as admin:
        namespace = keeping_namespace(admin, "spark")
        admin.put(f"/persistent/{namespace}/t/partitions", json=PARTITIONS).raise_for_status()
        yield f"persistent://{namespace}/t"


def stored(dev_broker: DevBroker, topic: str) -> dict[str | None, list[str]]:
    """Values of each key, in their order."""
    found: dict[str | None, list[str]] = {}
    for one in messages_of_topic(dev_broker.service_url, topic):
        found.setdefault(one.key, []).append((one.value or b"").decode())
    return found


@pytest.mark.pyspark(4, 2)
def test_a_stream_that_fails_after_its_write_stores_every_row_once(
    spark: SparkSession, dev_broker: DevBroker, tmp_path: Path, topic_name: str, target: str
) -> None:
    source = SparkTopic(dev_broker, topic_name, tmp_path, partitions=2)
    source.produce(300, keys=20)
    reports: list[tuple[int, WriteReport]] = []
    failures = [RuntimeError("after the write"), RuntimeError("and again")]

    def store(rows: DataFrame, batch_id: int) -> None:
        # Another cut of the entries in each attempt.
        report = spark_adapter.write_batch(
            rows.select("value", "__key"), batch_id, topic=target, sink_id="copy",
            service_url=dev_broker.service_url, entry_messages_max=1 + len(failures),
        )  # fmt: skip
        reports.append((batch_id, report))
        if failures:
            raise failures.pop()

    def run() -> None:
        rows = source.rows(spark, maxOffsetsPerTrigger="100")
        writer = rows.writeStream.foreachBatch(store)
        writer = writer.option("checkpointLocation", str(source.checkpoint))
        ended(writer.trigger(availableNow=True).start())

    for message in ("and again", "after the write"):
        with pytest.raises(StreamingQueryException, match=message):
            run()
    run()
    first = reports[0][0]
    known = [report.already_stored for batch_id, report in reports if batch_id == first]
    assert known == [0, reports[0][1].rows, reports[0][1].rows]
    expected: dict[str | None, list[str]] = {}
    for value in source.sent:
        expected.setdefault(value.partition(":")[0], []).append(value)
    assert stored(dev_broker, target) == expected


def test_a_query_with_a_new_checkpoint_does_not_take_its_rows_for_stored_ones(
    spark: SparkSession, dev_broker: DevBroker, tmp_path: Path, target: str
) -> None:
    """Batch 0 of both queries has as many rows of each key. The second lost its rows in silence."""
    (tmp_path / "lines").mkdir()
    sink_id = "copy"

    def store(rows: DataFrame, batch_id: int) -> None:
        spark_adapter.write_batch(
            rows, batch_id, topic=target, sink_id=sink_id, service_url=dev_broker.service_url
        )

    def run(checkpoint: str) -> None:
        rows = spark.readStream.text(str(tmp_path / "lines"))
        rows = rows.selectExpr("value", "split(value, ':')[0] as __key")
        writer = rows.writeStream.foreachBatch(store).trigger(availableNow=True)
        ended(writer.option("checkpointLocation", str(tmp_path / checkpoint)).start())

    (tmp_path / "lines" / "0").write_text("k:first\n")
    run("old")
    (tmp_path / "lines" / "0").rename(tmp_path / "0")
    (tmp_path / "lines" / "1").write_text("k:second\n")
    with pytest.raises(StreamingQueryException, match=r"KEYSHARD_SINK_ID_IN_USE.*'copy'"):
        run("new")
    assert stored(dev_broker, target) == {"k": ["k:first"]}
    run("old")
    assert stored(dev_broker, target) == {"k": ["k:first", "k:second"]}
    sink_id = "another"
    run("new")
    assert stored(dev_broker, target) == {"k": ["k:first", "k:second", "k:second"]}


def test_rows_after_a_shuffle_are_stored_once_in_the_order_that_is_asked_for(
    spark: SparkSession, dev_broker: DevBroker, target: str
) -> None:
    rows: list[Any] = [(f"k{number % 7}", f"{number}", number) for number in range(500)]
    for attempt in range(2):
        frame = spark.createDataFrame(
            rows[:: 1 if attempt else -1], "__key string, value string, n int"
        )
        report = spark_adapter.write_batch(
            frame.repartition(3, "__key"), 5, topic=target, sink_id="shuffled", order_by="n",
            service_url=dev_broker.service_url, compression="zstd",
        )  # fmt: skip
        assert (report.rows, report.already_stored) == (500, 500 * attempt)
    expected = {f"k{key}": [str(number) for number in range(key, 500, 7)] for key in range(7)}
    assert stored(dev_broker, target) == expected


def test_rows_of_a_wrong_schema_are_refused_before_a_task_starts(
    spark: SparkSession, dev_broker: DevBroker, target: str
) -> None:
    rows = spark.createDataFrame([("k", b"v", 1)], "__key string, value binary, n int")

    def refused(frame: DataFrame, said: str, batch_id: Any = 0, **options: Any) -> None:
        with pytest.raises(ConfigError, match=said):
            spark_adapter.write_batch(
                frame, batch_id, **({"topic": target, "sink_id": "s"} | options)
            )

    refused(rows, "Column n is not a column of a message")
    refused(rows.select("__key"), "Column value is missing")
    refused(rows.selectExpr("n as value"), "Column value has .*int32")
    refused(rows, "order_by names m", order_by=["m"])
    refused(rows, "batch_id", batch_id=-1)
    refused(rows, "sink_id", sink_id="")
    refused(rows, "sink_id has 200 characters", sink_id="s" * 200)
    grouped = rows.groupBy("__key").agg({"value": "first"}).toDF("__key", "value")
    refused(grouped, "Spark may divide the rows", service_url=dev_broker.service_url)
    refused(rows, "Did you mean 'compression'", compresion="lz4")
    assert stored(dev_broker, target) == {}
