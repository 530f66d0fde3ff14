"""Rows written by the schema of their topic, and read again by Spark."""

from __future__ import annotations

import json
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import httpx
import pytest
from pulsar.schema import AvroSchema, Double, Integer, Record, String
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession

from examples import route_orders
from keyshard.testing.devbroker import DevBroker
from tests.spark.spark_topic import SparkTopic, ended, without_last_commit
from tests.spark.test_write_batch import stored, target
from tests.support.deadlines import deadline
from tests.unit.test_encoders import PROTOBUF

__all__ = ["target"]
pytestmark = [pytest.mark.spark, pytest.mark.broker]
RECORD = {
    "type": "record", "name": "Order", "fields": [
        {"name": "n", "type": "int"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "parts", "type": {"type": "array", "items": {
            "type": "record", "name": "Part", "fields": [
                {"name": "price", "type": ["null", "double"]}]}}},
        {"name": "tags", "type": {"type": "map", "values": "string"}},
    ],
}  # fmt: skip
COLUMNS = "n int, at timestamp, parts array<struct<price: double>>, tags map<string, string>"
AT = datetime(2024, 1, 1, 2, 3, 4, 5, timezone.utc)


def rows(spark: SparkSession, columns: str = COLUMNS) -> DataFrame:
    data: list[Any] = [(f"k{n % 3}", n, AT, [(n / 2,), (None,)], {"a": str(n)}) for n in range(60)]
    return spark.createDataFrame(data, f"__key string, {columns}")


def register(broker: DevBroker, topic: str, kind: str, definition: Any) -> None:
    """Register a schema for a topic."""
    path = topic.partition("://")[2]
    body = {"type": kind, "schema": json.dumps(definition), "properties": {}}
    url = f"{broker.admin_url}/admin/v2/schemas/{path}/schema"
    httpx.post(url, json=body, timeout=deadline(20)).raise_for_status()


def write(frame: DataFrame, broker: DevBroker, topic: str, **options: str) -> None:
    options = {"service.url": broker.service_url, "topic": topic} | options
    frame.write.format("keyshard").mode("append").options(**options).save()


def read(spark: SparkSession, broker: DevBroker, topic: str, columns: list[str]) -> list[Any]:
    options = {"service.url": broker.service_url, "admin.url": broker.admin_url, "topic": topic}
    found = spark.read.format("keyshard").options(**options).load()
    return sorted(map(tuple, found.select(*columns).collect()))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("AVRO", {}),
        ("JSON", {"valueFormat": "json"}),
        ("", {"valueFormat": "avro", "registerSchema": "true"}),
    ],
)
def test_rows_are_encoded_by_the_schema_of_the_topic(
    spark: SparkSession, dev_broker: DevBroker, target: str, kind: str, options: dict[str, str]
) -> None:
    if kind:
        register(dev_broker, target, kind, RECORD)
    frame = rows(spark)
    write(frame, dev_broker, target, **options)
    columns = ["__key", "n", "at", "parts", "tags"]
    found = read(spark, dev_broker, target, [*columns, "__schemaVersion"])
    assert [row[:-1] for row in found] == sorted(map(tuple, frame.select(*columns).collect()))
    assert {row[-1] for row in found} == {0}


def test_messages_of_protobuf_are_written(
    spark: SparkSession, dev_broker: DevBroker, target: str
) -> None:
    register(dev_broker, target, "PROTOBUF_NATIVE", json.loads(PROTOBUF.definition))
    frame = spark.sql("select 'k' as __key, 5 as n, 'B' as kind, array(named_struct('price', 1.5D))"
                      " as parts")  # fmt: skip
    write(frame, dev_broker, target, valueFormat="protobuf")
    assert read(spark, dev_broker, target, ["n", "kind", "parts"]) == [(5, "B", [(1.5,)])]


def test_rows_that_do_not_fit_the_schema_are_refused_before_the_first(
    spark: SparkSession, dev_broker: DevBroker, target: str, tmp_path: Path
) -> None:
    none = rows(spark)
    with pytest.raises(AnalysisException, match="has no schema, so the rows need the column value"):
        write(none, dev_broker, target)
    with pytest.raises(AnalysisException, match="has no schema, which valueFormat=json needs"):
        write(none, dev_broker, target, valueFormat="json")
    register(dev_broker, target, "AVRO", RECORD)
    for frame, text in [
        (none.withColumnRenamed("tags", "tgs"), "'tgs' is not a field .* Did you mean 'tags'"),
        (none.drop("n"), "'n' is missing"),
        (none.selectExpr("* except(parts)", "array(named_struct('price', 'x')) as parts"),
         r"'parts\[\].price' has the type string"),
    ]:  # fmt: skip
        with pytest.raises(AnalysisException, match=f"(?s){text}"):
            write(frame, dev_broker, target)
    with pytest.raises(AnalysisException, match="has type AVRO, so valueFormat=json does not fit"):
        write(none, dev_broker, target, valueFormat="json")
    nulls = none.selectExpr("* except(n)", "if(n = 59, null, n) as n")
    with pytest.raises(PySparkException, match="Column 'n' has a null"):
        write(nulls, dev_broker, target)
    # The tasks without the null may have stored their rows.
    assert all("k" in str(key) for key in stored_keys(spark, dev_broker, target))


def stored_keys(spark: SparkSession, broker: DevBroker, topic: str) -> set[str]:
    return {key for (key,) in read(spark, broker, topic, ["__key"])}


def test_the_guarantee_at_least_once_needs_no_deduplication(
    spark: SparkSession, dev_broker: DevBroker, topic_name: str
) -> None:
    frame = spark.sql("select 'a' as value, 'k' as __key")
    with pytest.raises(AnalysisException, match="set-deduplication public/default --enable"):
        write(frame, dev_broker, topic_name, **{"admin.url": dev_broker.admin_url})
    topic = f"persistent://public/default/{topic_name}"
    assert stored(dev_broker, topic) == {}
    with pytest.raises(PySparkException, match="KEYSHARD_DEDUPLICATION"):
        write(frame, dev_broker, f"{topic_name}-2")
    write(frame, dev_broker, f"{topic_name}-3", deliveryGuarantee="at-least-once")
    assert stored(dev_broker, f"{topic}-3") == {"k": ["a"]}


def test_a_write_with_format_pulsar_uses_the_writer_of_keyshard(
    spark: SparkSession, dev_broker: DevBroker, target: str
) -> None:
    options = {"service.url": dev_broker.service_url, "pulsar.producer.compressionType": "ZLIB"}
    frame = spark.sql(
        "select id, cast(id as string) as text, cast(concat('k', id % 2) as binary) as __key, "
        f"id + 1 as __eventTime, '{target}' as __topic, map('a', 'b') as __messageProperties "
        "from range(10)"
    )
    frame.write.format("pulsar").mode("append").options(**options).save()
    columns = ["id", "text", "cast(__eventTime as double) * 1000", "__properties['a']"]
    given = {"service.url": dev_broker.service_url, "admin.url": dev_broker.admin_url}
    found = spark.read.format("keyshard").options(**given, topic=target).load()
    wanted = [(n, str(n), n + 1.0, "b") for n in range(10)]
    assert sorted(map(tuple, found.selectExpr(*columns).collect())) == wanted
    options["pulsar.producer.encryptionKeys"] = "k"
    writer = frame.write.format("pulsar").mode("append").options(**options)
    with pytest.raises(AnalysisException, match="encryptionKeys' is not supported"):
        writer.save()


class Order(Record):  # type: ignore[misc] # pulsar has no types
    region = String()
    price = Double()
    count = Integer()


@pytest.mark.pyspark(4, 2)
def test_the_example_routes_orders_to_three_topics_once(
    spark: SparkSession, dev_broker: DevBroker, topic_name: str, target: str, tmp_path: Path
) -> None:
    source = SparkTopic(dev_broker, topic_name, tmp_path, partitions=2)
    regions = ["eu", "us", "asia", "africa"]
    with closing(source.client()) as client:
        sender = client.create_producer(
            topic_name, schema=AvroSchema(Order), batching_enabled=False
        )
        for number in range(60):
            order = Order(region=regions[number % 4], price=number / 2, count=number)
            sender.send_async(order, None, partition_key=f"k{number % 7}")
        sender.flush()

    def run() -> None:
        ended(route_orders.start(spark, source.options(), target, str(source.checkpoint)))

    run()
    last = without_last_commit(source.checkpoint)
    run()
    assert last.exists(), "the batch was not repeated"
    for name, wanted in (("eu", {"eu"}), ("us", {"us"}), ("other", {"asia", "africa"})):
        columns = ["region", "price", "count", "total"]
        found = read(spark, dev_broker, f"{target}-{name}", columns)
        assert found == sorted(
            (regions[n % 4], n / 2, n, n * n / 2) for n in range(60) if regions[n % 4] in wanted
        )
