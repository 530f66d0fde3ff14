"""Structured values in Spark: each format from a real broker, as real clients wrote it."""

from __future__ import annotations

import json
import struct
from base64 import b64encode
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pulsar
import pytest
from google.protobuf import timestamp_pb2
from pulsar.schema import AvroSchema, Integer, JsonSchema, Long, Map, Record, String, StringSchema
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession

from keyshard.testing.devbroker import DevBroker
from spark_topic import SparkTopic, ended, failed

pytestmark = [pytest.mark.spark, pytest.mark.broker]


@pytest.fixture
def topic(dev_broker: DevBroker, tmp_path: Path, request: pytest.FixtureRequest) -> SparkTopic:
    name = f"schemas-{abs(hash(request.node.name))}"
    return SparkTopic(dev_broker, name, tmp_path, partitions=1)


def add_schema(topic: SparkTopic, kind: str, definition: str = "", **properties: str) -> None:
    body = {"type": kind, "schema": definition, "properties": properties}
    url = f"{topic.broker.admin_url}/admin/v2/schemas/public/default/{topic.name}/schema"
    httpx.post(url, json=body).raise_for_status()


def send(topic: SparkTopic, schema: Any, *values: Any) -> None:
    with closing(topic.client()) as client:
        producer = client.create_producer(topic.name, schema=schema)
        for value in values:
            producer.send(value, partition_key="k")


def read(
    spark: SparkSession, topic: SparkTopic, *columns: str, schema: str = "", **options: str
) -> list[tuple[Any, ...]]:
    """Columns of all rows, by a bounded query."""
    found: list[tuple[Any, ...]] = []

    def take(batch: DataFrame, _number: int) -> None:
        found.extend(map(tuple, batch.collect()))

    ended(start(topic, frame(spark, topic, schema, **options).select(*columns), take))
    return found


def frame(spark: SparkSession, of: SparkTopic, schema: str = "", **options: str) -> DataFrame:
    reader = spark.readStream.format("keyshard").options(**of.options(parallelism="2", **options))
    return (reader.schema(schema) if schema else reader).load()


def start(topic: SparkTopic, rows: DataFrame, take: Any) -> Any:
    return (
        rows.writeStream.foreachBatch(take)
        .option("checkpointLocation", str(topic.checkpoint))
        .trigger(availableNow=True)
        .start()
    )


class Inner(Record):
    sku = String()


class First(Record):
    _avro_namespace = "shop"
    id = Integer()
    name = String()


class Second(Record):
    _avro_namespace = "shop"
    id = Integer()
    name = String()
    count = Long(required_default=True)
    item = Inner(required_default=True)


Second.__name__ = "First"
"""The next version of the same record."""


def test_avro_of_two_versions_and_a_message_that_is_none(
    spark: SparkSession, topic: SparkTopic
) -> None:
    send(topic, AvroSchema(First), First(id=1, name="a"))
    send(topic, AvroSchema(Second), Second(id=2, name="b", count=2**40, item=Inner(sku="s")))
    send(topic, pulsar.schema.BytesSchema(), b"\x01")
    rows = frame(spark, topic, mode="permissive", subscription="other")
    assert rows.columns[:4] == ["id", "name", "count", "item"]
    assert rows.columns[-1] == "_corrupt_record"
    columns = ("id", "name", "count", "item.sku", "__schemaVersion", "_corrupt_record")
    assert read(spark, topic, *columns, mode="permissive") == [
        (1, "a", None, None, 0, None),
        (2, "b", 2**40, "s", 1, None),
        (None, None, None, None, None, bytearray(b"\x01")),
    ]
    again = frame(spark, topic, schema="id bigint, __key string", subscription="again")
    batch = spark.read.format("keyshard").option("service.url", topic.broker.service_url)
    given = batch.options(**{"admin.url": topic.broker.admin_url, "topic": topic.name})
    table = given.option("mode", "DROPMALFORMED").load()
    assert [(row["name"], row["item"]) for row in table.collect()] == [("a", None), ("b", ("s",))]
    topic.checkpoint = topic.checkpoint.with_name("again")
    text = failed(start(topic, again, lambda batch, _: batch.collect()))
    for part in ("KEYSHARD_MALFORMED_MESSAGE", topic.name, "AVRO", "mode=PERMISSIVE"):
        assert part in text


class Order(Record):
    id = Long()
    name = String()
    tags = Map(Long())


def test_json(spark: SparkSession, topic: SparkTopic) -> None:
    send(topic, JsonSchema(Order), Order(id=5, name="x\ny", tags={"k": 1}))
    assert read(spark, topic, "id", "name", "tags") == [(5, "x\ny", {"k": 1})]


def test_text_and_its_bytes(spark: SparkSession, topic: SparkTopic) -> None:
    send(topic, StringSchema(), "né")
    assert frame(spark, topic).schema["value"].dataType.simpleString() == "string"
    assert read(spark, topic, "value", valueFormat="raw") == [(bytearray("né".encode()),)]


def native() -> tuple[str, bytes]:
    """A descriptor with a well-known type, and a message of it: a timestamp alone."""
    from google.protobuf import descriptor_pb2  # noqa: PLC0415 - generated

    known = descriptor_pb2.FileDescriptorProto.FromString(timestamp_pb2.DESCRIPTOR.serialized_pb)
    file = descriptor_pb2.FileDescriptorProto(name="o.proto", package="shop", syntax="proto3")
    file.dependency.append(known.name)
    order = file.message_type.add(name="Order")
    order.field.add(name="id", number=1, type=3, label=1)  # type: ignore[arg-type]
    order.field.add(name="at", number=2, type=11, label=1, type_name=".google.protobuf.Timestamp")  # type: ignore[arg-type]
    files = descriptor_pb2.FileDescriptorSet(file=[known, file]).SerializeToString()
    told = {
        "fileDescriptorSet": b64encode(files).decode(),
        "rootMessageTypeName": "shop.Order",
        "rootFileDescriptorName": "o.proto",
    }
    return json.dumps(told), b"\x08\x05\x12\x02\x08\x07"


PAIR = {
    "key.schema.type": "INT32",
    "key.schema.properties": "{}",
    "value.schema.type": "STRING",
    "value.schema.properties": "{}",
    "kv.encoding.type": "INLINE",
}
WRITTEN: list[tuple[tuple[str, str, dict[str, str]], bytes, Sequence[str], tuple[Any, ...]]] = [
    (("INT64", "", {}), struct.pack(">q", -5), ["value"], (-5,)),
    (
        ("PROTOBUF_NATIVE", native()[0], {}), native()[1], ["id", "unix_seconds(at)"], (5, 7),
    ),
    (
        ("KEY_VALUE", '{"key":"","value":""}', PAIR), struct.pack(">iii", 4, 7, 1) + b"x",
        ["key", "value"], (7, "x"),
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "value", "columns", "wanted"), WRITTEN, ids=[one[0][0] for one in WRITTEN]
)
def test_what_is_registered_is_what_rows_have(  # noqa: PLR0917 - a table of cases
    spark: SparkSession,
    topic: SparkTopic,
    schema: tuple[str, str, dict[str, str]],
    value: bytes,
    columns: Sequence[str],
    wanted: tuple[Any, ...],
) -> None:
    kind, definition, properties = schema
    add_schema(topic, kind, definition, **properties)
    send(topic, pulsar.schema.BytesSchema(), value)
    found: list[tuple[Any, ...]] = []

    def take(batch: DataFrame, _number: int) -> None:
        found.extend(map(tuple, batch.collect()))

    # Without the admin interface the broker is asked.
    rows = frame(spark, topic, admin_url="").selectExpr(*columns)
    ended(start(topic, rows, take))
    assert found == [wanted]


def test_what_cannot_be_planned_is_an_error_of_the_query(
    spark: SparkSession, topic: SparkTopic
) -> None:
    other = f"{topic.name}-other"
    send(topic, AvroSchema(First), First(id=1, name="a"))
    with closing(topic.client()) as client:
        client.create_producer(other, schema=JsonSchema(Order))
    with pytest.raises(AnalysisException, match="have different schemas") as caught:
        frame(spark, topic, topic="", topics=f"{topic.name},{other}")
    assert topic.name in str(caught.value)
    assert other in str(caught.value)
    text = failed(start(topic, frame(spark, topic, schema="id smallint"), lambda *_: None))
    assert "'id' is wanted as int16 and is int32" in text
