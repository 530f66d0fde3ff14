"""A stream from a broker with TLS, tokens and permissions."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import Workload, create_partitioned_topic, produce
from tests.spark.spark_topic import ended
from tests.support.tested_pulsar import PULSAR

pytestmark = pytest.mark.spark


def test_a_stream_reads_over_tls_with_a_token(
    spark: SparkSession, topic_name: str, tmp_path: Path
) -> None:
    with DevBroker(PULSAR, tls=True, tokens=True) as broker:
        create_partitioned_topic(broker.connection, topic_name, 2)
        produce(Workload(500, 20), broker.connection, topic_name)
        token = tmp_path / "token"
        token.write_text(broker.signer.token("admin") + "\n")
        rows = (
            spark.readStream.format("keyshard")
            .option("service.url", broker.service_url)
            .option("admin.url", broker.admin_url)
            .option("pulsar.client.tlsTrustCertsFilePath", str(broker.authority.path))
            .option("pulsar.client.authPluginClassName", "token")
            .option("pulsar.client.authParams", f"file://{token}")
            .option("topic", topic_name)
            .option("subscription", "billing")
            .option("startingOffsets", "earliest")
            .load()
        )
        query = (
            rows.writeStream.format("parquet")
            .option("path", str(tmp_path / "rows"))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        ended(query)
        assert query.exception() is None
        assert spark.read.parquet(str(tmp_path / "rows")).count() == 500
