"""Scalable topics as tables, beside persistent topics of the same name."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from pulsar.schema import JsonSchema, Record, String
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame

from keyshard.broker.port import PublishOptions
from keyshard.broker.schemas import schema_of
from keyshard.broker.wire.broker import WireBroker
from keyshard.columns.outgoing import OutgoingMessage
from keyshard.config.connection import Connection
from spark_adapter import catalog
from spark_adapter.preflight import is_before
from tests.spark.spark_tenant import Tenant
from tests.spark.spark_topic import ended
from tests.support.scalable_topic import ScalableTopic
from tests.support.tested_pulsar import PULSAR

pytestmark = [
    pytest.mark.spark,
    pytest.mark.broker,
    pytest.mark.skipif(int(PULSAR.split(".")[0]) < 5, reason="needs scalable topics"),
]


class Order(Record):  # type: ignore[misc]
    item = String()


def scalable(tenant: Tenant, name: str) -> ScalableTopic:
    topic = ScalableTopic(tenant.broker, 2, name=f"topic://{tenant.name}/default/{name}")
    topic.keep()
    return topic


@pytest.fixture
def events(tenant: Tenant) -> Iterator[ScalableTopic]:
    """Messages in segments that split and merged."""
    with closing(scalable(tenant, "events")) as topic:
        draw = random.Random(7)
        for _ in range(3):
            topic.publish(60)
            topic.change(draw)
        topic.publish(60)
        yield topic


def send_order(tenant: Tenant, topic: ScalableTopic, item: str) -> None:
    """Publish an order to the first segment, with the schema of the persistent topic."""
    connection = Connection(tenant.broker.service_url, tenant.broker.admin_url)
    how = PublishOptions(schema=schema_of(connection, tenant.topic("orders")))
    with closing(WireBroker(connection)) as client:
        where = client.watch_segments(topic.name, lambda: None).graph.partition(0)
        with closing(client.entry_producer(where, how)) as producer:
            message = OutgoingMessage(b'{"item": "%s"}' % item.encode(), "k", None, None, None)
            producer.publish([message], 0).result()


def test_a_scalable_and_a_persistent_topic_of_one_name_are_two_tables(tenant: Tenant) -> None:
    spark, database = tenant.spark, tenant.database
    tenant.send("orders", JsonSchema(Order), Order(item="persistent"), partition_key="k")
    with closing(scalable(tenant, "orders")) as orders, closing(scalable(tenant, "Odd-name.v1")):
        send_order(tenant, orders, "scalable")
        for name in ("__system", "a b"):
            ScalableTopic(tenant.broker, name=f"topic://{tenant.name}/default/{name}").close()
        found = tenant.sync()
        tables = ["orders", "topic://odd-name.v1", "topic://orders"]
        assert found.created == tuple(f"{database}.`{name}`" for name in tables)
        assert list(found.left) == [f"topic://{tenant.name}/default/a b"]
        assert tenant.tables() == tables
        assert tenant.sync().created == tenant.sync().changed == tenant.sync().dropped == ()

        described = spark.sql(f"DESCRIBE {database}.`topic://orders`").collect()
        assert ("item", "string") in {(row["col_name"], row["data_type"]) for row in described}
        for table, item in (("`topic://orders`", "scalable"), ("orders", "persistent")):
            rows = spark.sql(f"SELECT item, __key FROM {database}.{table}").collect()
            assert [tuple(row) for row in rows] == [(item, "k")]
        both = f"SELECT a.item, b.item FROM {database}.orders a, {database}.`topic://orders` b"
        assert [tuple(row) for row in spark.sql(both).collect()] == [("persistent", "scalable")]

        url = f"{tenant.broker.admin_url}{orders.path}?force=true"
        httpx.delete(url).raise_for_status()
        assert tenant.sync().dropped == (f"{database}.`topic://orders`",)
        assert spark.table(f"{database}.orders").count() == 1


@pytest.mark.pyspark(4, 2)
def test_batch_reads_and_streams_of_a_table_have_all_segments(
    tenant: Tenant, events: ScalableTopic, tmp_path: Path
) -> None:
    spark = tenant.spark
    tenant.sync()
    table = f"{tenant.database}.`topic://events`"
    rows = spark.sql(f"SELECT cast(value AS string) AS v, __topic FROM {table}").collect()
    events.check([row["v"] for row in rows])
    assert all(row["__topic"].startswith("segment://") for row in rows)
    assert spark.read.option("endingOffsets", "earliest").table(table).count() == 0

    got: list[str] = []

    def note(batch: DataFrame, _number: int) -> None:
        got.extend(row["v"] for row in batch.collect())

    draw = random.Random(8)
    for _ in range(2):
        events.change(draw)
        events.publish(40)
        query = (
            spark.readStream.option("subscription", "mine")
            .table(table)
            .selectExpr("cast(value as string) as v")
            .writeStream.foreachBatch(
                lambda rows, _: got.extend(one["v"] for one in rows.collect())
            )
            .option("checkpointLocation", str(tmp_path))
            .trigger(availableNow=True)
            .start()
        )
        ended(query)
        events.check(got)


def test_writes_to_a_table_of_a_scalable_topic_are_refused(
    tenant: Tenant, events: ScalableTopic
) -> None:
    spark = tenant.spark
    tenant.sync()
    table = f"{tenant.database}.`topic://events`"
    refusal = "INSERT INTO a table of keyshard is not supp"
    if is_before(4, 1):  # Spark 4.0 compares the columns first
        refusal += "|INCOMPATIBLE_DATA_FOR_TABLE"
    with pytest.raises(AnalysisException, match=refusal):
        spark.sql(f"INSERT INTO {table} SELECT * FROM {table}")
    with pytest.raises(AnalysisException, match=refusal):
        spark.table(table).write.insertInto(table)
    options = {"service.url": tenant.broker.service_url, "topic": events.name}
    rows = spark.createDataFrame([(b"x", "k")], "value binary, __key string")
    for name in ("keyshard", "pulsar"):
        with pytest.raises(AnalysisException, match="is a scalable topic, which keyshard consumes"):
            rows.write.format(name).options(**options).mode("append").save()
    assert spark.table(table).count() == len(events.sent)


def test_a_table_that_a_topic_cannot_have_is_left_out_with_the_reason(tenant: Tenant) -> None:
    with closing(scalable(tenant, "events")) as topic:
        found = tenant.sync(transport="client")
    assert found == catalog.Synced(left=found.left)
    assert "transport is 'client'" in found.left[topic.name]
