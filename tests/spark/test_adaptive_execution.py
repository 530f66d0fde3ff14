"""Rows are refused that a repeated batch may divide in another way, and no others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import broadcast

from keyshard.errors import ConfigError
from spark_adapter.adaptive_execution import ADAPTIVE, ADAPTIVE_STREAMS, check_rows
from tests.spark.spark_topic import ended

pytestmark = pytest.mark.spark
Plan = Callable[[DataFrame, DataFrame], DataFrame]
"""Makes rows from those of a table with column ``k``, and from those of another one."""
FIXED: dict[str, Plan] = {
    "a read": lambda rows, _: rows,
    "a union": lambda rows, other: rows.union(other),
    "a broadcast join": lambda rows, other: rows.join(broadcast(other), "k"),
    "fewer partitions": lambda rows, _: rows.coalesce(1),
    "repartitioned to a number": lambda rows, _: rows.repartition(3, "k"),
    "sorted after that": lambda rows, _: rows.repartition(3, "k").sortWithinPartitions("k"),
    "grouped before that": lambda rows, _: rows.groupBy("k").count().repartition(3, "k"),
    "joined before that": lambda rows, other: (
        rows.hint("merge").join(other, "k").repartition(3, "k")
    ),
    "a round robin": lambda rows, _: rows.repartition(3),
    "one row of all": lambda rows, _: rows.groupBy().count(),
    "cached": lambda rows, _: rows.selectExpr("k + 1 AS k").cache(),
}
CHANGING: dict[str, Plan] = {
    "repartitioned by a column": lambda rows, _: rows.repartition("k"),
    "grouped": lambda rows, _: rows.groupBy("k").count(),
    "joined": lambda rows, other: rows.hint("merge").join(other, "k"),
    "a union with grouped rows": lambda rows, other: rows.union(
        other.groupBy("k").count().select("k")
    ),
    "a round robin after a shuffle": lambda rows, _: rows.groupBy("k").count().repartition(3),
    "a join of repartitioned rows": lambda rows, other: rows.repartition(8, "k").join(
        other.repartition(6, "k").hint("merge"), "k"
    ),
    "a checkpoint after a shuffle": lambda rows, _: rows.groupBy("k").count().localCheckpoint(),
    "cached after a shuffle": lambda rows, _: rows.groupBy("k").count().cache(),
    "executed after a shuffle": lambda rows, _: executed(rows.groupBy("k").count()),
}


SAMPLED: dict[str, Plan] = {
    "ordered": lambda rows, _: rows.orderBy("k"),
    "repartitioned by ranges": lambda rows, _: rows.repartitionByRange(3, "k"),
}


def executed(rows: DataFrame) -> DataFrame:
    return rows.sparkSession.createDataFrame(rows.rdd.map(tuple), rows.schema)


@pytest.fixture
def settings(spark: SparkSession) -> Iterator[None]:
    """Settings of adaptive execution that the test changes."""
    before = str(spark.conf.get(ADAPTIVE))
    spark.conf.set(ADAPTIVE, "true")
    yield
    spark.conf.set(ADAPTIVE, before)
    spark.conf.unset(ADAPTIVE_STREAMS)


def tables(spark: SparkSession) -> tuple[DataFrame, DataFrame]:
    rows = spark.range(0, 20, numPartitions=2).selectExpr("id % 7 AS k")
    return rows, spark.range(0, 30, numPartitions=2).selectExpr("id % 9 AS k")


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize("plan", FIXED.values(), ids=FIXED)
def test_rows_that_adaptive_execution_leaves_alone_are_written(
    spark: SparkSession, plan: Plan
) -> None:
    check_rows(plan(*tables(spark)), in_stream=False)


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize("plan", CHANGING.values(), ids=CHANGING)
def test_rows_that_adaptive_execution_may_move_are_refused(spark: SparkSession, plan: Plan) -> None:
    for on in ("true", "TRUE"):
        spark.conf.set(ADAPTIVE, on)
        with pytest.raises(ConfigError, match=rf"repartition\(8, '__key'\).*{ADAPTIVE}=false"):
            check_rows(plan(*tables(spark)), in_stream=False)
    spark.catalog.clearCache()
    spark.conf.set(ADAPTIVE, "False")
    check_rows(plan(*tables(spark)), in_stream=False)


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize("plan", SAMPLED.values(), ids=SAMPLED)
@pytest.mark.parametrize("adaptive", ["true", "false"])
def test_rows_of_ranges_that_a_sample_chooses_are_refused(
    spark: SparkSession, plan: Plan, adaptive: str
) -> None:
    """With equal settings, a repetition had other ranges, and rows were stored twice."""
    spark.conf.set(ADAPTIVE, adaptive)
    with pytest.raises(ConfigError, match=r"repartition\(8, '__key'\)"):
        check_rows(plan(*tables(spark)), in_stream=False)


@pytest.mark.pyspark(4, 3)
@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("adaptive", [False, True])
def test_a_stream_that_shuffles_needs_the_setting(
    spark: SparkSession, tmp_path: Path, *, adaptive: bool, shuffled: bool
) -> None:
    spark.conf.set(ADAPTIVE_STREAMS, str(adaptive).lower())
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines" / "0").write_text("a\nb\n")
    rows = spark.readStream.text(str(tmp_path / "lines"))
    rows = rows.repartition("value") if shuffled else rows
    batches: list[int] = []

    def store(batch: DataFrame, batch_id: int) -> None:
        check_rows(batch.selectExpr("value"), in_stream=True)
        batches.append(batch_id)

    writer = rows.writeStream.foreachBatch(store).trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    if adaptive and shuffled:
        with pytest.raises(
            StreamingQueryException, match=f"{ADAPTIVE}=false in the session, before"
        ):
            ended(query)
        assert not batches
    else:
        ended(query)
        assert batches == [0]
