"""Topics as tables, and the source that Spark finds by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from keyshard.testing.devbroker import DevBroker
from spark_topic import SparkTopic

pytestmark = [pytest.mark.spark, pytest.mark.broker]


def test_a_session_that_was_told_nothing_finds_the_source(
    spark: SparkSession, dev_broker: DevBroker, tmp_path: Path
) -> None:
    topic = SparkTopic(dev_broker, "catalog-found", tmp_path, partitions=1)
    topic.produce(3)
    clean = spark.newSession()
    options = {"service.url": dev_broker.service_url, "admin.url": dev_broker.admin_url}
    options["topic"] = topic.name
    assert clean.read.format("keyshard").options(**options).load().count() == 3
