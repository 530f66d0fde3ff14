"""Structured values in Spark: each format from a real broker, as real clients wrote it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from functools import partial, reduce
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx
import pulsar
import pyarrow as pa
import pytest
from pulsar.schema import AvroSchema, Integer, Long, Record, String, StringSchema
from pyarrow import compute
from pyspark.errors import AnalysisException, PythonException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StringType, StructField, StructType

import keyshard
from keyshard import KeyShardSource
from keyshard.errors import SchemaError
from keyshard.testing.devbroker import DevBroker
from tests.spark.schema_matrix import KINDS, LABELS, Kind, add_schema, schema_url, write
from tests.spark.spark_topic import SparkTopic, ended, failed
from tests.support.deadlines import deadline, in_time
from tests.support.java_client import JavaClient

pytestmark = [pytest.mark.spark, pytest.mark.broker]
DEADLINE_S = deadline(120)


@pytest.fixture
def topic(dev_broker: DevBroker, tmp_path: Path, request: pytest.FixtureRequest) -> SparkTopic:
    name = f"schemas-{abs(hash(request.node.name))}"
    return SparkTopic(dev_broker, name, tmp_path, partitions=1)


BY_TOPIC = {kind.topic: kind for kind in KINDS}


def in_groups(kinds: Iterable[Kind], group_of: Callable[[Kind], str]) -> list[list[Kind]]:
    """Kinds that one source can have together: each costs processes and a connection."""
    return [list(group) for _, group in groupby(sorted(kinds, key=group_of), group_of)]


def united(groups: Iterable[tuple[DataFrame, list[Kind]]]) -> DataFrame:
    """Rows of several sources as one, each with columns of its own."""
    frames = [
        frame.select(
            "__topic",
            "__messageId",
            *(sql.col(name).alias(f"{number}_{name}") for name in kinds[0].columns),
        )
        for number, (frame, kinds) in enumerate(groups)
    ]
    return reduce(lambda one, other: one.unionByName(other, allowMissingColumns=True), frames)


def rows_by_topic(tables: Iterable[pa.Table], groups: list[list[Kind]]) -> dict[str, list[Any]]:
    """The result of :func:`united`, in the order of each topic."""
    number_of = {kind.topic: number for number, kinds in enumerate(groups) for kind in kinds}
    rows = [row for table in tables for row in table.to_pylist()]
    found: dict[str, list[Any]] = {}
    for row in sorted(rows, key=lambda row: [int(part) for part in row["__messageId"].split(":")]):
        topic = row["__topic"]
        values = {name: row[f"{number_of[topic]}_{name}"] for name in BY_TOPIC[topic].columns}
        found.setdefault(topic, []).append(values)
    return found


@pytest.fixture(scope="session")
def matrix(dev_broker: DevBroker, tmp_path_factory: pytest.TempPathFactory) -> DevBroker:
    """The broker, with everything that the table has."""
    java = JavaClient(dev_broker.service_url, tmp_path_factory.mktemp("java") / "log")
    with closing(java):
        write(java, dev_broker, [*KINDS, LABELS])
    return dev_broker


def test_batch_reads_have_every_type_as_java_means_it(
    spark: SparkSession, matrix: DevBroker
) -> None:
    # A time of day is a number in Spark only.
    by_columns = in_groups(KINDS, lambda kind: f"{kind.columns} {kind.name == 'LOCAL_TIME'}")
    rows = united((batch(spark, matrix, kinds), kinds) for kinds in by_columns)
    found = rows_by_topic([rows.toArrow()], by_columns)
    assert found == {kind.topic: kind.spark_rows(projected=False) for kind in KINDS}


@pytest.mark.pyspark(4, 2)
def test_streams_decoders_and_handlers_have_every_type_as_java_means_it(
    spark: SparkSession, matrix: DevBroker, tmp_path: Path
) -> None:
    by_type = in_groups(KINDS, lambda kind: kind.projected or str(kind.columns))
    frames = [(stream(spark, matrix, kinds), kinds) for kinds in by_type]
    tables: list[pa.Table] = []
    query = united(frames).writeStream.foreachBatch(lambda rows, _: tables.append(rows.toArrow()))
    checkpoint = query.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True)
    ended(checkpoint.start(), DEADLINE_S)
    assert rows_by_topic(tables, by_type) == {
        kind.topic: kind.spark_rows(projected=bool(kind.projected)) for kind in KINDS
    }
    assert decoded(matrix) == {kind.topic: kind.rows() for kind in KINDS}
    assert handled(matrix) == {kind.topic: kind.data() for kind in KINDS}


def test_a_field_without_numbers_is_named_and_the_others_are_read(
    spark: SparkSession, matrix: DevBroker
) -> None:
    def table(schema: str = "", **how: str) -> DataFrame:
        where = {"service.url": matrix.service_url, "admin.url": matrix.admin_url}
        reader = spark.read.format("keyshard").options(topic=LABELS.topic, **where, **how)
        return (reader.schema(schema) if schema else reader).load()

    source = source_of(matrix, [LABELS.topic], "labels")
    asked: list[Callable[[], Any]] = [
        table,
        lambda: table("value_type string").collect(),
        source.decoder,
        lambda: source.decoder(["key", "value_type"]),
    ]
    for ask in asked:
        with pytest.raises((AnalysisException, SchemaError)) as caught:
            ask()
        for part in ("'value_type'", LABELS.topic, "enumeration", "schema(...)", "valueFormat=raw"):
            assert part in str(caught.value)
    found = [row.asDict() for row in table("key string, description string").collect()]
    assert sorted(found, key=str) == sorted(LABELS.rows(), key=str)
    assert source.decoder(["description"]).raw_columns[0] == "value"
    assert table("value binary").count() == table(valueFormat="raw").count() == 3


def batch(spark: SparkSession, broker: DevBroker, kinds: list[Kind]) -> DataFrame:
    """The rows of topics; their columns are those of their schema."""
    options = {
        "service.url": broker.service_url,
        "admin.url": broker.admin_url,
        "topics": ",".join(kind.topic for kind in kinds),
    }
    rows = spark.read.format("keyshard").options(**options).load()
    for name, wanted in kinds[0].columns.items():
        assert rows.schema[name].dataType.simpleString() == wanted, kinds[0].name
    return rows


def stream(spark: SparkSession, broker: DevBroker, kinds: list[Kind]) -> DataFrame:
    """Return columns that hold those of all topics; the schemas come from the broker."""
    reader = spark.readStream.format("keyshard").options(**{
        "service.url": broker.service_url,
        "topics": ",".join(kind.topic for kind in kinds),
        "subscription": "matrix",
        "startingOffsets": "earliest",
        "parallelism": "1",
    })  # fmt: skip
    if kinds[0].projected:
        reader = reader.schema(f"value {kinds[0].projected}, __topic string, __messageId string")
    return reader.load()


def source_of(broker: DevBroker, topics: list[str], subscription: str) -> KeyShardSource:
    return KeyShardSource(
        topics, service_url=broker.service_url, admin_url=broker.admin_url,
        subscription=subscription, starting_position="earliest", parallelism=1,
        metadata_columns=["__keyBytes"],
    )  # fmt: skip


def decoded(broker: DevBroker) -> dict[str, list[Any]]:
    """Rows of an embedded stream over all topics, by the decoder of each."""
    left = sum(len(kind.rows()) for kind in KINDS)
    raw: list[pa.RecordBatch] = []
    with source_of(broker, list(BY_TOPIC), "embedded").open() as rows:
        while left:
            found = rows.next_batch(timeout_s=DEADLINE_S)
            assert found is not None, f"{left} rows are missing"
            raw += found
            left -= sum(one.num_rows for one in found)
    columns: dict[str, list[Any]] = {}
    for topic, kind in BY_TOPIC.items():
        decoder = source_of(broker, [topic], "embedded").decoder(list(kind.columns))
        own = [one.filter(compute.equal(one.column("__topic"), topic)) for one in raw]
        columns[topic] = [row for one in decoder.decoded(own) for row in one.to_pylist()]
    return columns


def handled(broker: DevBroker) -> dict[str, list[Any]]:
    """The data of all messages in a handler."""
    left = sum(len(kind.rows()) for kind in KINDS)
    found: list[tuple[Any, str, Any]] = []
    source = source_of(broker, list(BY_TOPIC), "handled")

    def note(message: keyshard.Message) -> None:
        found.append((tuple(message.message_id), message.topic, message.data))
        if len(found) == left:
            source.stop()

    late = threading.Timer(DEADLINE_S, source.stop)
    late.start()
    try:
        source.run(note)
    finally:
        late.cancel()
    data: dict[str, list[Any]] = {}
    for _, topic, value in sorted(found, key=lambda one: one[0]):
        data.setdefault(topic, []).append(value)
    return data


def send(topic: SparkTopic, schema: Any, *values: Any) -> None:
    with closing(topic.client()) as client:
        producer = client.create_producer(topic.name, schema=schema)
        for value in values:
            producer.send(value, partition_key="k")


def table(
    spark: SparkSession, topic: SparkTopic, schema: str | StructType = "", **options: str
) -> DataFrame:
    """The content of a topic."""
    reader = spark.read.format("keyshard").option("service.url", topic.broker.service_url)
    given = {"admin.url": topic.broker.admin_url, "topic": topic.name} | options
    reader = reader.options(**given)
    return (reader.schema(schema) if schema else reader).load()


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


class Third(Record):
    _avro_namespace = "shop"
    id = Integer()
    name = String()
    count = Long(required_default=True)
    item = Inner(required_default=True)
    more = String(required_default=True)


# The next versions of the same record.
Second.__name__ = Third.__name__ = "First"
MALFORMED = b"\x01"


def test_two_versions_and_a_malformed_message_are_read(
    spark: SparkSession, topic: SparkTopic
) -> None:
    send(topic, AvroSchema(First), First(id=1, name="a"))
    send(topic, AvroSchema(Second), Second(id=2, name="b", count=2**40, item=Inner(sku="s")))
    send(topic, pulsar.schema.BytesSchema(), MALFORMED)
    rows = table(spark, topic, mode="permissive")
    assert rows.columns[:4] == ["id", "name", "count", "item"]
    assert rows.columns[-1] == "_corrupt_record"
    columns = ("id", "name", "count", "item.sku", "__schemaVersion", "_corrupt_record")
    assert sorted(map(tuple, rows.select(*columns).collect()), key=str) == [
        (1, "a", None, None, 0, None),
        (2, "b", 2**40, "s", 1, None),
        (None, None, None, None, None, bytearray(MALFORMED)),
    ]
    left = table(spark, topic, mode="DROPMALFORMED").collect()
    assert [(row["name"], row["item"]) for row in left] == [("a", None), ("b", ("s",))]
    raw = table(spark, topic, valueFormat="raw").select("value").collect()
    assert len(raw) == 3
    assert raw[-1]["value"] == MALFORMED
    # Columns and fields declared NOT NULL are read; a null in one of them is an error.
    sure = "value binary NOT NULL, __key string NOT NULL, __topic string NOT NULL"
    assert table(spark, topic, schema=sure).count() == 3
    inner = StructType([StructField("sku", StringType(), nullable=False)])
    some = StructType(
        [StructField("name", StringType(), nullable=False), StructField("item", inner)]
    )
    assert len(table(spark, topic, schema=some, mode="DROPMALFORMED").collect()) == 2
    with pytest.raises(PythonException, match=r"'name' is NOT NULL in schema\(\.\.\.\)"):
        table(spark, topic, schema="name string NOT NULL", mode="PERMISSIVE").collect()
    with pytest.raises(PythonException) as caught:
        table(spark, topic, schema="id bigint, __key string").collect()
    for part in ("KEYSHARD_MALFORMED_MESSAGE", topic.name, "AVRO", "mode=PERMISSIVE"):
        assert part in str(caught.value)


@pytest.mark.pyspark(4, 2)
def test_a_topic_partition_read_by_name_has_the_rows_of_every_schema_version(
    spark: SparkSession, topic: SparkTopic
) -> None:
    send(topic, AvroSchema(First), First(id=1, name="a"))
    send(topic, AvroSchema(Second), Second(id=2, name="b", count=2**40, item=Inner(sku="s")))
    (number,) = {row["__partition"] for row in table(spark, topic).collect()}
    named = f"{topic.name}-partition-{number}"
    options = topic.options(topic=named, subscription="", startingOffsets="", parallelism="")
    rows = spark.read.format("keyshard").options(mode="DROPMALFORMED", **options).load()
    query = topic.rows(spark, topic=named, mode="DROPMALFORMED", subscription="by-name")
    send(topic, AvroSchema(Third), Third(id=3, name="c"))  # the plan has the versions before
    wanted = [(1, "a", None), (2, "b", 2**40), (3, "c", None)]
    columns = ("id", "name", "count")
    assert sorted(map(tuple, rows.select(*columns).collect())) == wanted
    seen: list[Any] = []
    writer = query.select(*columns).writeStream.trigger(availableNow=True)
    writer = writer.foreachBatch(lambda batch, _: seen.extend(map(tuple, batch.collect())))
    running = writer.option("checkpointLocation", str(topic.checkpoint)).start()
    until(running, lambda: len(seen) == 3)
    running.stop()
    assert sorted(seen) == wanted


@pytest.mark.pyspark(4, 2)
def test_a_query_decodes_new_schema_versions_and_fails_by_name_at_a_deleted_one(
    spark: SparkSession, topic: SparkTopic
) -> None:
    names: list[str | None] = []
    with closing(topic.client()) as client:
        of = partial(client.create_producer, topic.name)
        first = of(schema=AvroSchema(First))
        first.send(First(id=1, name="a"), partition_key="k")
        reader = spark.readStream.format("keyshard")
        rows = reader.options(**topic.options(parallelism="1", mode="DROPMALFORMED")).load()

        def take(batch: DataFrame, _number: int) -> None:
            names.extend(row["name"] for row in batch.select("name").collect())

        writer = rows.writeStream.foreachBatch(take)
        query = writer.option("checkpointLocation", str(topic.checkpoint)).start()
        try:
            until(query, lambda: names == ["a"])
            of(schema=AvroSchema(Second)).send(Second(id=2, name="b"), partition_key="k")
            of(schema=pulsar.schema.BytesSchema()).send(MALFORMED, partition_key="k")
            third = of(schema=AvroSchema(Third))
            first.send(First(id=3, name="c"), partition_key="k")
            until(query, lambda: names == ["a", "b", "c"])
            until(query, lambda: left_out(query) == 1)
            httpx.delete(schema_url(topic.broker, topic.name)).raise_for_status()
            # What the query decodes with is fixed in its plan.
            first.send(First(id=4, name="d"), partition_key="k")
            until(query, lambda: names == ["a", "b", "c", "d"])
            third.send(Third(id=5, name="e"), partition_key="k")
            text = failed(query)
        finally:
            query.stop()
    assert "Version 2 of the schema of" in text
    assert topic.name in text
    assert "Register it again, or set valueFormat=raw" in text
    assert names == ["a", "b", "c", "d"]


@pytest.mark.pyspark(4, 2)
def test_a_bounded_query_shows_the_rows_that_its_only_batch_left_out(
    spark: SparkSession, topic: SparkTopic
) -> None:
    send(topic, AvroSchema(First), First(id=1, name="a"))
    send(topic, pulsar.schema.BytesSchema(), MALFORMED, MALFORMED)
    # docs/options.md names this setting: without it, Spark leaves out the last progress.
    interval = "spark.sql.streaming.noDataProgressEventInterval"
    spark.conf.set(interval, "0")
    try:
        writer = topic.rows(spark, mode="DROPMALFORMED").writeStream.format("noop")
        writer = writer.option("checkpointLocation", str(topic.checkpoint))
        query = writer.trigger(availableNow=True).start()
        ended(query)
    finally:
        spark.conf.unset(interval)
    assert sum(one["numInputRows"] for one in query.recentProgress) == 1
    assert left_out(query) == 2


class Alike(Record):
    _avro_namespace = "shop"
    number = Integer()
    text = String()


Alike.__name__ = "First"


def reading_names(
    spark: SparkSession, topic: SparkTopic, names: list[str | None], **options: str
) -> StreamingQuery:
    """A query that adds what is in the column ``name``."""
    how = topic.options(parallelism="1", **options)
    rows = spark.readStream.format("keyshard").options(**how).load().select("name")
    query = rows.writeStream.option("checkpointLocation", str(topic.checkpoint))
    return query.foreachBatch(
        lambda batch, _: names.extend(row["name"] for row in batch.collect())
    ).start()


@pytest.mark.pyspark(4, 2)
def test_a_topic_that_is_created_again_is_not_read_by_its_old_schema(
    spark: SparkSession, topic: SparkTopic
) -> None:
    names: list[str | None] = []
    send(topic, AvroSchema(First), First(id=1, name="a"))
    before = table(spark, topic)
    query = reading_names(spark, topic, names, partitionDiscoveryIntervalMillis="300")
    try:
        until(query, lambda: names == ["a"])
        url = f"{topic.broker.admin_url}/admin/v2/persistent/public/default/{topic.name}/partitions"
        httpx.delete(url, params={"force": True}).raise_for_status()
        until(query, lambda: partitions(query, "partitionsGone") >= 1)
        until(query, lambda: is_created(url))
        # The new schema is version 0 again, and its bytes also decode by the old version 0.
        send(topic, AvroSchema(Alike), Alike(number=2, text="b"))
        text = failed(query)
    finally:
        query.stop()
    assert names == ["a"]
    with pytest.raises(AnalysisException) as caught:
        before.collect()
    for output in (text, str(caught.value)):
        assert f"{topic.name} was created again after the query was built" in output
    assert [row["text"] for row in table(spark, topic).collect()] == ["b"]


@pytest.mark.pyspark(4, 2)
def test_a_topic_created_again_before_a_check_is_not_read_by_its_old_schema(
    spark: SparkSession, topic: SparkTopic
) -> None:
    names: list[str | None] = []
    url = f"{topic.broker.admin_url}/admin/v2/persistent/public/default/{topic.name}"
    httpx.delete(f"{url}/partitions", params={"force": True}).raise_for_status()
    httpx.put(url).raise_for_status()
    send(topic, AvroSchema(First), First(id=1, name="a"))
    query = reading_names(spark, topic, names, partitionDiscoveryIntervalMillis="600000")
    try:
        until(query, lambda: names == ["a"])
        # A reconnect makes it again at once, so that no request has to.
        httpx.delete(url, params={"force": True}, timeout=deadline(30)).raise_for_status()
        send(topic, AvroSchema(Alike), Alike(number=2, text="b"))
        text = failed(query, DEADLINE_S)
    finally:
        query.stop()
    assert f"{topic.name} was created again after the query was built" in text
    assert names == ["a"]


@pytest.mark.pyspark(4, 2)
def test_a_topic_that_begins_to_match_and_does_not_fit_can_be_left_out(
    spark: SparkSession, topic: SparkTopic, tmp_path: Path
) -> None:
    names: list[str | None] = []

    def start(pattern: str, **options: str) -> StreamingQuery:
        how = topic.options(topic="", topicsPattern=pattern, parallelism="1", **options)
        how["partitionDiscoveryIntervalMillis"] = "300"
        rows = spark.readStream.format("keyshard").options(**how).load().select("name")
        query = rows.writeStream.option("checkpointLocation", str(topic.checkpoint))
        return query.foreachBatch(
            lambda batch, _: names.extend(row["name"] for row in batch.collect())
        ).start()

    send(topic, AvroSchema(First), First(id=1, name="a"))
    query = start(f"{topic.name}.*")
    try:
        until(query, lambda: names == ["a"])
        other = SparkTopic(topic.broker, f"{topic.name}-other", tmp_path / "other", partitions=1)
        send(other, AvroSchema(Alike), Alike(number=2, text="b"))
        text = failed(query, DEADLINE_S)
    finally:
        query.stop()
    for part in (other.name, "A topic that was discovered later", "mode=DROPMALFORMED"):
        assert part in text
    # Its row is in the batch that is planned.
    send(topic, AvroSchema(First), First(id=3, name="c"))
    query = start(topic.name, mode="DROPMALFORMED")
    try:
        until(query, lambda: names == ["a", "c"])
        until(query, lambda: left_out(query) == 1)
    finally:
        query.stop()


def is_created(url: str) -> bool:
    """Create a topic of one partition. Return whether it exists, even if the request failed."""
    if httpx.put(url, json=1, timeout=deadline(30)).is_success:
        return True
    if httpx.get(url, timeout=deadline(30)).json().get("partitions") == 1:
        return True
    # A reconnect of the query may have made the partition by itself.
    leftover = url.removesuffix("/partitions") + "-partition-0"
    httpx.delete(leftover, params={"force": True}, timeout=deadline(30))
    return False


def partitions(query: StreamingQuery, count: str) -> int:
    """A count of topic partitions, as the newest progress tells."""
    output = query.lastProgress
    return int(json.loads((output and output["sources"][0]["latestOffset"]) or "{}").get(count, 0))


def until(query: StreamingQuery, holds: Callable[[], bool]) -> None:
    """Wait for what a running query does."""
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert query.isActive, str(query.exception())
        in_time(deadline, "the query does not get on")
        time.sleep(0.02)


def left_out(query: StreamingQuery) -> int | None:
    """Malformed rows, as the newest progress tells."""
    output = query.lastProgress
    # Before its source began, it is null.
    offset = json.loads((output and output["sources"][0]["latestOffset"]) or "{}") or {}
    found: int | None = offset.get("malformedDropped")
    return found


@pytest.mark.pyspark(4, 2)
def test_a_failed_plan_is_an_error_of_the_query(spark: SparkSession, topic: SparkTopic) -> None:
    other = f"{topic.name}-other"
    send(topic, AvroSchema(First), First(id=1, name="a"))
    with closing(topic.client()) as client:
        client.create_producer(other, schema=StringSchema())
    protobuf = f"{topic.name}-protobuf"
    definition = '{"type": "record", "name": "M", "fields": []}'
    add_schema(topic.broker, protobuf, "PROTOBUF", definition)
    away = {"admin.url": "http://127.0.0.1:1", "operationTimeoutMillis": "1000"}
    for asked, parts in [
        ({"topics": f"{topic.name},{other}"}, (topic.name, other, "have different schemas")),
        ({"topics": protobuf}, (protobuf, "neither a descriptor", "PROTOBUF_NATIVE")),
        ({"topics": topic.name, **away}, ("127.0.0.1:1", "KEYSHARD_BROKER_UNAVAILABLE")),
    ]:
        options = {"service.url": topic.broker.service_url, "admin.url": topic.broker.admin_url}
        with pytest.raises(AnalysisException) as caught:
            spark.read.format("keyshard").options(**(options | asked)).load()
        for part in parts:
            assert part in str(caught.value)
    rows = spark.readStream.format("keyshard").options(**topic.options()).schema("id smallint")
    query = rows.load().writeStream.format("noop")
    text = failed(query.option("checkpointLocation", str(topic.checkpoint)).start())
    assert "'id' has type int32, which cannot be cast to int16" in text
