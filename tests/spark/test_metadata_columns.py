"""Metadata columns in Spark: the same in a stream and in a batch read."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pulsar.schema import Integer, JsonSchema, Record
from pyspark.sql import DataFrame, SparkSession

from keyshard.testing.devbroker import DevBroker
from tests.spark.spark_topic import SparkTopic, ended

pytestmark = [pytest.mark.spark, pytest.mark.broker]

NAMED = ("__orderingKey", "__keyBytes", "__sequenceId", "__producer", "__brokerPublishTime")
TYPES = "__orderingKey string, __keyBytes binary, __sequenceId bigint, __producer string"


class Order(Record):
    id = Integer()


def test_stream_and_batch_have_exactly_the_named_columns(
    spark: SparkSession, dev_broker: DevBroker, tmp_path: Path, topic_name: str
) -> None:
    topic = SparkTopic(dev_broker, topic_name, tmp_path, partitions=1)
    with closing(topic.client()) as client:
        producer = client.create_producer(
            topic.name, schema=JsonSchema(Order), producer_name="shop",
            initial_sequence_id=40, batching_enabled=False,
        )  # fmt: skip
        producer.send(Order(id=1), partition_key="é", ordering_key="o")
        producer.send(Order(id=2))
    wanted = [
        (1, "o", bytearray("é".encode()), 41, "shop", None),
        (2, None, None, 42, "shop", None),
    ]
    found: list[tuple[Any, ...]] = []

    def take(batch: DataFrame, _number: int) -> None:
        found.extend(map(tuple, batch.select("id", *NAMED).collect()))

    options = {"metadataColumns": ", ".join(NAMED), "workers": "processes:1"}
    rows = topic.rows(spark, parallelism="2", **options)
    assert rows.columns[0] == "id"
    assert tuple(rows.columns[-5:]) == NAMED
    checkpoint = str(topic.checkpoint)
    writer = rows.writeStream.foreachBatch(take).option("checkpointLocation", checkpoint)
    ended(writer.trigger(availableNow=True).start())
    assert sorted(found) == wanted

    options = {name: topic.options()[name] for name in ("service.url", "admin.url", "topic")}
    reader = spark.read.format("keyshard").options(**options)
    assert not set(NAMED) & set(reader.load().columns)
    schema = f"id int, {TYPES}, __brokerPublishTime timestamp"
    assert sorted(map(tuple, reader.schema(schema).load().collect())) == wanted
    raw = reader.schema("__producer string, value binary").load().collect()
    assert sorted((name, json.loads(value)["id"]) for name, value in raw) == [
        ("shop", 1), ("shop", 2),
    ]  # fmt: skip
