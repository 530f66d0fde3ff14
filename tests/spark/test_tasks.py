"""Tasks of a micro-batch: all for slow rows after the first batch, or what the option says."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from keyshard.testing.devbroker import DevBroker
from tests.spark.spark_process import eventually
from tests.spark.spark_topic import SparkTopic, ended
from tests.support.deadlines import deadline

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.timeout(300)]

ROWS_PER_BATCH = 800
ROW_S = 0.002


def slowly(parts: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Take some milliseconds for each row."""
    for part in parts:
        time.sleep(ROW_S * part.num_rows)
        yield part


@pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas")
@pytest.mark.parametrize(("fixed", "expected"), [("", [1, 2]), ("1", [1, 1])])
def test_slow_rows_have_all_tasks_unless_the_option_fixes_their_number(
    spark: SparkSession, dev_broker: DevBroker, topic_name: str, tmp_path: Path,
    *, fixed: str, expected: list[int],
) -> None:  # fmt: skip
    topic = SparkTopic(dev_broker, topic_name, tmp_path, partitions=1)
    topic.produce(3 * ROWS_PER_BATCH, keys=200)
    tasks: list[int] = []

    def look(batch: DataFrame, _number: int) -> None:
        tasks.append(batch.rdd.getNumPartitions())
        topic.seen.append([(row["__key"], row["value"]) for row in batch.collect()])

    rows = topic.rows(
        spark, maxOffsetsPerTrigger=str(ROWS_PER_BATCH), parallelism="2", tasksPerBatch=fixed
    )
    rows = rows.selectExpr("__key", "cast(value as string) as value")
    ended(topic.start(rows.mapInArrow(slowly, rows.schema), look))
    assert [tasks[0], max(tasks)] == expected, tasks
    assert sorted(topic.values()) == sorted(topic.sent)


def test_the_wait_of_a_trigger_interval_gives_cheap_rows_no_more_tasks(
    spark: SparkSession, dev_broker: DevBroker, topic_name: str, tmp_path: Path
) -> None:
    topic = SparkTopic(dev_broker, topic_name, tmp_path, partitions=1)
    topic.produce(4_000, keys=200)
    tasks: list[int] = []

    def look(batch: DataFrame, _number: int) -> None:
        tasks.append(batch.rdd.getNumPartitions())
        batch.write.format("noop").mode("overwrite").save()

    rows = topic.rows(spark, maxOffsetsPerTrigger="200", parallelism="4")
    query = topic.start(rows, look, trigger={"processingTime": "3 seconds"})
    try:
        # A busy machine may overrun a trigger, so the query gets some batches to settle.
        eventually(lambda: tasks[-4:] == [1] * 4 and len(tasks) > 8, deadline(90), "few tasks")
    finally:
        query.stop()
