"""format("pulsar") on a real broker, as pipelines of the JVM connector use it."""

from __future__ import annotations

import json
import uuid
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pulsar
import pyspark
import pytest
from pyspark.sql import DataFrame, Row, SparkSession

import spark_adapter
from keyshard.broker.memory import Batching, Message
from keyshard.core.position.entry import TopicPartition
from keyshard.testing.devbroker import DevBroker
from spark_adapter import PulsarDataSource
from spark_adapter.preflight import is_before
from tests.contract.pulsar_harness import PulsarHarness
from tests.helpers import wait_until
from tests.spark.spark_topic import ended, failed

pytestmark = [pytest.mark.broker, pytest.mark.spark]

EVENT_MS = 1_700_000_000_123
COLUMNS = (
    "value binary, __key binary, __topic string, __messageId binary, __publishTime timestamp, "
    "__eventTime timestamp, __messageProperties map<string,string>"
)


@pytest.fixture
def topic(harness: PulsarHarness) -> str:
    """Two partitions: five messages as they are, five in producer batches."""
    name = harness.create_topic(2)
    first = Message(b"0", key="k0", properties={"p": "q"}, event_ms=EVENT_MS)
    rest = [Message(b"%d" % number, key=f"k{number % 3}") for number in range(1, 10)]
    harness.publish(TopicPartition(name, 0).name, [first, *rest[:3], Message(b"keyless")])
    harness.publish(TopicPartition(name, 1).name, rest[4:], Batching.MIXED)
    return name


def options(broker: DevBroker, topic: str, **more: str) -> dict[str, str]:
    urls = {"service.url": broker.service_url, "admin.url": broker.admin_url}
    return {**urls, "topic": topic, **more}


def ids(rows: list[Row]) -> str:
    """Offsets as ``JsonUtils.topicOffsets`` writes them: of the last row of each partition."""
    signed = {
        row["__topic"]: [one - 256 if one > 127 else one for one in row["__messageId"]]
        for row in rows
    }
    return json.dumps(signed)


def as_the_client_has_them(broker: DevBroker, partition: str, count: int) -> list[tuple[Any, ...]]:
    logger = pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
    with closing(pulsar.Client(broker.service_url, logger=logger)) as client:
        reader = client.create_reader(partition, pulsar.MessageId.earliest)
        messages = [reader.read_next(10_000) for _ in range(count)]
        return [
            (one.data(), one.partition_key().encode() or None, one.topic_name(), one.message_id(),
             one.publish_timestamp(), one.event_timestamp(), one.properties())
            for one in messages
        ]  # fmt: skip


def milliseconds(moment: Any) -> int:
    return round(moment.timestamp() * 1000) if moment else 0


def as_spark_has_them(rows: list[Row]) -> list[tuple[Any, ...]]:
    return [
        (bytes(row["value"]), row["__key"] and bytes(row["__key"]), row["__topic"],
         pulsar.MessageId.deserialize(bytes(row["__messageId"])),
         milliseconds(row["__publishTime"]), milliseconds(row["__eventTime"]),
         row["__messageProperties"])
        for row in rows
    ]  # fmt: skip


def stream(
    spark: SparkSession, directory: Path, given: dict[str, str], schema: str = ""
) -> tuple[Any, list[Row]]:
    """A bounded query, and its rows, once it ended."""
    found: list[Row] = []

    def take(batch: DataFrame, _number: int) -> None:
        found.extend(batch.collect())

    reader = spark.readStream.format("pulsar").options(**given)
    rows = (reader.schema(schema) if schema else reader).load()
    writer = rows.writeStream.foreachBatch(take).trigger(availableNow=True)
    return writer.option("checkpointLocation", str(directory)).start(), found


def test_a_batch_read_and_a_stream_have_the_columns_of_the_jvm_connector(
    spark: SparkSession, dev_broker: DevBroker, harness: PulsarHarness, topic: str, tmp_path: Path
) -> None:
    given = options(dev_broker, topic, predefinedSubscription="billing", pollTimeoutMs="6000")
    of_bytes = Message(b"a key of bytes", key="AP8=", key_is_base64=True)
    harness.publish(TopicPartition(topic, 0).name, [of_bytes])
    told_nothing = spark.newSession()
    table = told_nothing.read.format("pulsar").options(**given).load()
    assert ", ".join(f"{one.name} {one.dataType.simpleString()}" for one in table.schema) == COLUMNS
    first, second = (TopicPartition(topic, number).name for number in range(2))
    wanted = as_the_client_has_them(dev_broker, first, 6)
    assert wanted[-1][1] == b"AP8=", "pulsar-client hides that it is one"
    wanted[-1] = (wanted[-1][0], b"\x00\xff", *wanted[-1][2:])
    wanted += as_the_client_has_them(dev_broker, second, 5)
    rows = table.collect()
    assert sorted(as_spark_has_them(rows)) == sorted(wanted)
    assert {row[3].batch_index() for row in as_spark_has_them(rows)} == {-1, 0, 1, 2, 3, 4}

    query, found = stream(
        spark, tmp_path, {**given, "startingOffsets": "earliest", "parallelism": "2"}
    )
    ended(query)
    assert sorted(as_spark_has_them(found)) == sorted(wanted)
    assert spark_adapter.positions(query) == spark_adapter.positions(table)
    assert {bytes(row["__messageId"]) for row in found} == (
        {bytes(row["__messageId"]) for row in rows}
    )


@pytest.mark.pyspark(4, 1)
def test_history_is_read_from_bookies_and_with_an_index(
    spark: SparkSession, dev_broker: DevBroker, harness: PulsarHarness, topic: str, tmp_path: Path
) -> None:
    for number in range(2):
        harness.roll_ledger(TopicPartition(topic, number))
    by_broker = spark.read.format("pulsar").options(**options(dev_broker, topic)).load().collect()
    own = {
        "segments": "bookies", "bookies.map": json.dumps(dev_broker.bookies_map),
        "ledgerIndex": str(tmp_path / "index"),
    }  # fmt: skip

    def read(**more: str) -> tuple[list[Row], spark_adapter.ReadReport]:
        reports = spark_adapter.ReadReports(spark)
        given = options(dev_broker, topic, readReports=str(reports.id), **own, **more)
        rows = spark.read.format("pulsar").options(**given).load()
        found = rows.collect()
        assert reports.total == spark_adapter.read_plan(rows)
        return found, reports.total

    rows, report = read()
    assert sorted(as_spark_has_them(rows)) == sorted(as_spark_has_them(by_broker))
    # Five messages are an entry each, and five are a producer batch.
    assert (report.by_bookies, report.by_broker, report.skipped) == (6, 0, 0)
    rows, report = read(keys='["k0"]')
    assert {bytes(row["__key"]) for row in rows} == {b"k0"}
    assert len(rows) == sum(row["__key"] == b"k0" for row in by_broker)
    first = min(row["__publishTime"] for row in by_broker)
    rows, report = read(endingTime=str(milliseconds(first)))
    assert (rows, report.by_bookies, report.skipped) == ([], 0, 6)


def test_offsets_of_the_jvm_connector_mean_the_same_positions_here(
    spark: SparkSession, dev_broker: DevBroker, topic: str, tmp_path: Path
) -> None:
    given = options(dev_broker, topic)
    reader = spark.read.format("pulsar").options(**given)
    rows = sorted(reader.load().collect(), key=lambda row: (row["__topic"], row["__messageId"]))
    plain, batched = rows[:5], rows[5:]
    assert len({row["__topic"] for row in plain}) == 1
    bounds = {
        "startingOffsets": ids([plain[1], batched[1]]),
        "endingOffsets": ids([plain[2], batched[1]]),
    }
    between = reader.options(**bounds).load().collect()
    # A message id selects all messages of its producer batch.
    assert sorted(map(tuple, between)) == sorted(map(tuple, plain[1:3] + batched))

    query, found = stream(
        spark, tmp_path / "some", {
            **given, "subscriptionPrefix": "audit", "parallelism": "2",
            "startingOffsets": bounds["startingOffsets"],
        }, "__messageId binary, __slot int",
    )  # fmt: skip
    ended(query)
    assert [len(row) for row in found] == [2] * len(found)
    assert sorted(bytes(row[0]) for row in found) == (
        sorted(bytes(row["__messageId"]) for row in plain[1:] + batched)
    )

    query, _ = stream(spark, tmp_path / "none", {**given, "predefinedSubscription": ""})
    assert (
        "Option 'predefinedSubscription' is empty.\nRemedy: Give the subscription a name"
        in failed(query)
    )
    sure = reader.schema("value binary NOT NULL, __topic string NOT NULL").load()
    assert sure.count() == len(between)
    everything = spark.read.format("pulsar").options(**given)  # one has no key
    with pytest.raises(pyspark.errors.PySparkException, match="Column '__key' is NOT NULL"):
        everything.schema("__topic string, __key binary NOT NULL").load().count()
    with pytest.raises(pyspark.errors.PySparkException, match="'__key' has type string"):
        reader.schema("__key string").load().count()


def test_a_stream_that_names_no_subscription_keeps_one_with_its_checkpoint(
    spark: SparkSession, dev_broker: DevBroker, harness: PulsarHarness, topic: str, tmp_path: Path
) -> None:
    """Read a topic as the README of the JVM connector does: with URLs and the topic only."""
    given = options(dev_broker, topic, startingOffsets="earliest")
    query, found = stream(spark, tmp_path, given)
    ended(query)
    assert len(found) == 10
    where = TopicPartition(topic, 0).name
    harness.publish(where, [Message(b"meanwhile", key="k0")])
    query, found = stream(spark, tmp_path, given)
    ended(query)
    assert [bytes(row["value"]) for row in found] == [b"meanwhile"]
    assert topic in spark_adapter.positions(query)
    path = where.replace("://", "/")
    stats = httpx.get(f"{dev_broker.admin_url}/admin/v2/{path}/stats").json()
    ((name, subscription),) = stats["subscriptions"].items()
    assert name.startswith("spark-pulsar-")
    wait_until(lambda: backlog(dev_broker, path, name) == 0)
    assert subscription["type"] == "Key_Shared"


def backlog(broker: DevBroker, path: str, name: str) -> int:
    stats = httpx.get(f"{broker.admin_url}/admin/v2/{path}/stats").json()
    found: int = stats["subscriptions"][name]["msgBacklog"]
    return found


def write_checkpoint(directory: Path, offsets: list[str], committed: int) -> None:
    """A checkpoint as Spark 3.4 and the JVM connector leave it."""
    for name in ("offsets", "commits"):
        (directory / name).mkdir(parents=True)
    (directory / "metadata").write_text(json.dumps({"id": str(uuid.uuid4())}))
    settings = {"batchWatermarkMs": 0, "batchTimestampMs": EVENT_MS, "conf": {}}
    for number, offset in enumerate(offsets):
        lines = ["v1", json.dumps(settings), offset]
        (directory / "offsets" / str(number)).write_text("\n".join(lines))
    for number in range(committed):
        text = 'v1\n{"nextBatchWatermarkMs":0}'
        (directory / "commits" / str(number)).write_text(text)


def test_a_stream_continues_from_a_checkpoint_of_the_jvm_connector(
    spark: SparkSession, dev_broker: DevBroker, topic: str, tmp_path: Path
) -> None:
    given = options(dev_broker, topic)
    rows = spark.read.format("pulsar").options(**given).load().collect()
    rows.sort(key=lambda row: (row["__topic"], row["__messageId"]))
    plain, batched = rows[:5], rows[5:]
    nothing = "[8,-1,-1,-1,-1,-1,-1,-1,-1,-1,1,16,-1,-1,-1,-1,-1,-1,-1,-1,-1,1]"
    first = json.loads(ids([plain[1]])) | {batched[0]["__topic"]: json.loads(nothing)}
    offsets = [json.dumps(first, separators=(",", ":")), ids([plain[2], batched[-1]])]
    write_checkpoint(tmp_path, offsets, committed=1)
    seen: list[tuple[int, list[bytes]]] = []

    def take(batch: DataFrame, number: int) -> None:
        seen.append((number, sorted(bytes(row["__messageId"]) for row in batch.collect())))

    given |= {"predefinedSubscription": "goes-on", "parallelism": "2"}

    left = [bytes(row["__messageId"]) for row in (plain[2], *batched)]
    reader = spark.readStream.format("pulsar").options(**given)
    writer = reader.load().writeStream.foreachBatch(take).trigger(availableNow=True)
    ended(writer.option("checkpointLocation", str(tmp_path)).start())
    assert seen[0] == (1, sorted(left)), "the batch that was planned there"
    rest = [one for _, found in seen[1:] for one in found]
    assert sorted(rest) == sorted(bytes(row["__messageId"]) for row in plain[3:])


def test_format_pulsar_stays_the_jvm_connector_where_its_jar_is_present(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(PulsarDataSource, "name", staticmethod(lambda: "rate"))
    spark_adapter.register(spark)
    assert "The JVM connector keeps format" in caplog.text
    if not is_before(4, 1):
        spark_adapter.ReadReports(spark)  # it registers format keyshard again
