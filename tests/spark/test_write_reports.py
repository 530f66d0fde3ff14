"""Counts of the batches that ``format("keyshard")`` writes, in the program of the driver."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

import spark_adapter
from keyshard.testing.devbroker import DevBroker
from tests.spark.spark_topic import ended
from tests.spark.test_write_batch import stored, target

__all__ = ["target"]
pytestmark = [pytest.mark.spark, pytest.mark.broker]


@pytest.mark.usefixtures("fixed")
@pytest.mark.pyspark(4, 2)
@pytest.mark.parametrize("staged", [False, True])
def test_each_batch_of_a_stream_is_reported_when_it_is_committed(
    spark: SparkSession, dev_broker: DevBroker, tmp_path: Path, target: str, *, staged: bool
) -> None:
    reports = spark_adapter.WriteReports(spark)
    assert (reports.batches, reports.total) == ((), None)
    rate = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 40).load()
    rows = rate.selectExpr("cast(value as string) as value", "cast(value % 5 as string) as __key")
    options = {"service.url": dev_broker.service_url, "topic": target}
    if staged:
        (tmp_path / "staging").mkdir()
        options["staging"] = str(tmp_path / "staging")

    def run() -> None:
        writer = rows.writeStream.format("keyshard").options(**options, writeReports=reports.id)
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        ended(writer.trigger(availableNow=True).start())

    run()
    run()
    first, second = reports.batches
    assert (first.batch_id, second.batch_id) == (0, 1)
    for one in (first, second):
        assert (one.guarantee, one.rows, one.already_stored) == ("exactly-once", 40, 0)
        assert 5 <= one.entries <= 40
        assert one.bytes > 40
        assert one.slowest.startswith(target)
        assert 0 < one.slowest_s < 60
    assert reports.total is not None
    assert (reports.total.rows, reports.total.batch_id) == (80, None)
    assert reports.total.entries == first.entries + second.entries
    assert sum(map(len, stored(dev_broker, target).values())) == 80


@pytest.mark.pyspark(4, 1)
def test_a_batch_write_is_reported_and_a_wrong_id_is_refused(
    spark: SparkSession, dev_broker: DevBroker, target: str
) -> None:
    reports = spark_adapter.WriteReports(spark)
    writer = spark.sql("select 'v' as value, 'k' as __key").write.format("keyshard")
    writer = writer.mode("append").option("service.url", dev_broker.service_url)
    writer = writer.option("topic", target).option("deliveryGuarantee", "at-least-once")
    writer.option("writeReports", reports.id).save()
    (one,) = reports.batches
    assert (one.batch_id, one.guarantee, one.rows, one.entries) == (None, "at-least-once", 1, 1)
    text = re.escape("writeReports is 'all'.\nRemedy: Give the id of a spark_adapter.WriteReports")
    with pytest.raises(AnalysisException, match=text):
        writer.option("writeReports", "all").save()
