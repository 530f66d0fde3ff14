"""``format("keyshard")`` as a sink: rows of streams and batch writes, stored once."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
from pyarrow import parquet
from pyspark.errors import AnalysisException, SparkRuntimeException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import expr
from pyspark.sql.streaming.query import StreamingQuery

from keyshard.testing.devbroker import DevBroker
from spark_adapter import KeyShardDataSource
from spark_adapter.adaptive_execution import ADAPTIVE_STREAMS
from spark_adapter.options import SINK_OPTIONS
from tests.helpers import wait_until
from tests.spark.spark_topic import SparkTopic, ended, failed, without_last_commit
from tests.spark.test_write_batch import stored, target
from tests.support.deadlines import deadline

__all__ = ["target"]
pytestmark = [pytest.mark.spark, pytest.mark.broker]


def by_key(values: list[str]) -> dict[str | None, list[str]]:
    """Values ``key:number`` of each key, in their order."""
    found: dict[str | None, list[str]] = {}
    for value in values:
        found.setdefault(value.partition(":")[0], []).append(value)
    return found


def copy(rows: DataFrame, checkpoint: Path, broker: DevBroker, **options: str) -> StreamingQuery:
    """Start a bounded query that writes to a topic."""
    writer = rows.writeStream.format("keyshard").option("service.url", broker.service_url)
    writer = writer.option("checkpointLocation", str(checkpoint)).options(**options)
    return writer.trigger(availableNow=True).start()


@pytest.mark.usefixtures("fixed")
def test_a_stream_whose_batch_is_repeated_stores_every_row_once(
    spark: SparkSession, dev_broker: DevBroker, tmp_path: Path, topic_name: str, target: str
) -> None:
    source = SparkTopic(dev_broker, topic_name, tmp_path, partitions=2)
    source.produce(300, keys=20)

    def run(**options: str) -> None:
        rows = source.rows(spark, maxOffsetsPerTrigger="100").select("value", "__key")
        ended(copy(rows, source.checkpoint, dev_broker, topic=target, **options))

    run()
    assert stored(dev_broker, target) == by_key(source.sent)
    last = without_last_commit(source.checkpoint)
    run(entryMaxMessages="3", compression="zstd")
    assert last.exists(), "the batch was not repeated"
    assert stored(dev_broker, target) == by_key(source.sent)
    source.produce(60, keys=20)
    run()
    assert stored(dev_broker, target) == by_key(source.sent)


@pytest.mark.usefixtures("fixed")
def test_a_stream_with_the_options_of_the_jvm_connector_stores_every_row_once(
    spark: SparkSession, dev_broker: DevBroker, tmp_path: Path, topic_name: str, target: str
) -> None:
    source = SparkTopic(dev_broker, topic_name, tmp_path, partitions=2)
    source.produce(100, keys=20)
    urls = {"service.url": dev_broker.service_url, "admin.url": dev_broker.admin_url}
    given = {"predefinedSubscription": "copies", "startingOffsets": "earliest"}
    rows = spark.readStream.format("pulsar").options(topic=topic_name, **urls, **given).load()

    def run() -> None:
        texts = rows.selectExpr("value", "cast(__key as string) as __key")  # a key of text
        writer = texts.writeStream.format("pulsar").options(**urls)
        writer = writer.options(**{"topic": target, "pulsar.producer.compressionType": "ZSTD"})
        writer = writer.option("checkpointLocation", str(source.checkpoint))
        ended(writer.trigger(availableNow=True).start())

    run()
    last = without_last_commit(source.checkpoint)
    run()
    assert last.exists(), "the batch was not repeated"
    assert stored(dev_broker, target) == by_key(source.sent)


@pytest.mark.usefixtures("fixed")
def test_a_checkpoint_without_the_id_of_its_query_stores_nothing_twice(
    spark: SparkSession, dev_broker: DevBroker, tmp_path: Path, topic_name: str, target: str
) -> None:
    """Names of producers have the id, so with another one the rows of a batch would be new."""
    source = SparkTopic(dev_broker, topic_name, tmp_path, partitions=2)
    source.produce(100, keys=20)
    rows = source.rows(spark).select("value", "__key")
    ended(copy(rows, source.checkpoint, dev_broker, topic=target))
    without_last_commit(source.checkpoint)
    kept = (source.checkpoint / "metadata").read_bytes()
    (source.checkpoint / "metadata").unlink()
    with pytest.raises(SparkRuntimeException, match="MISSING_METADATA_FILE"):
        copy(rows, source.checkpoint, dev_broker, topic=target)
    (source.checkpoint / "metadata").write_bytes(kept)
    ended(copy(rows, source.checkpoint, dev_broker, topic=target))
    assert stored(dev_broker, target) == by_key(source.sent)


@pytest.mark.usefixtures("fixed")
def test_a_query_that_is_stopped_while_it_writes_leaves_no_producer(
    spark: SparkSession, dev_broker: DevBroker, tmp_path: Path, target: str
) -> None:
    rate = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 20_000).load()
    rows = rate.selectExpr("cast(value as string) as value", "cast(value % 20 as string) as __key")
    writer = rows.writeStream.format("keyshard").option("service.url", dev_broker.service_url)
    # So many entries that it writes nearly all the time.
    writer = writer.options(topic=target, entryMaxMessages="1", compression="none")
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    try:
        wait_until(lambda: producers(dev_broker, target), deadline(120))
    finally:
        query.stop()
    wait_until(lambda: not producers(dev_broker, target), deadline(60))


@pytest.mark.usefixtures("fixed")
def test_a_broker_that_is_away_for_longer_than_a_message_may_wait_fails_the_task_by_name(
    spark: SparkSession, dev_broker: DevBroker, tmp_path: Path, target: str
) -> None:
    """The repeated batch completes what the failed task had stored."""
    count, keys = 20_000, 20
    folder = tmp_path / "rows"
    folder.mkdir()
    sent = [f"key-{row % keys}:{row}" for row in range(count)]
    table = pa.table({"value": sent, "__key": [one.partition(":")[0] for one in sent]})
    parquet.write_table(table, folder / "rows.parquet")

    def run() -> StreamingQuery:
        rows = spark.readStream.schema("value string, __key string").parquet(str(folder))
        # So many entries that a task needs seconds for them.
        options = {"entryMaxMessages": "1", "compression": "none", "sendTimeoutMillis": "2000"}
        return copy(rows, tmp_path / "checkpoint", dev_broker, topic=target, **options)

    assert isinstance(dev_broker, DevBroker)
    assert dev_broker.pid is not None
    query = run()
    try:
        wait_until(lambda: entries(dev_broker, target) > 100, deadline(60))
        os.kill(dev_broker.pid, signal.SIGSTOP)
        # The job ends while the broker is away: no job is left.
        wait_until(lambda: not spark.sparkContext.statusTracker().getActiveJobsIds(), deadline(60))
    finally:
        os.kill(dev_broker.pid, signal.SIGCONT)
    text = failed(query)
    assert "KEYSHARD_BROKER_UNAVAILABLE" in text
    before = stored(dev_broker, target)
    assert 100 < sum(map(len, before.values())) < count
    ended(run())
    assert stored(dev_broker, target) == by_key(sent)


@pytest.mark.usefixtures("fixed")
def test_of_two_queries_with_one_sink_id_the_second_is_refused_and_the_first_goes_on(
    spark: SparkSession, dev_broker: DevBroker, tmp_path: Path, target: str
) -> None:
    rate = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 30).load()

    def start(name: str, **trigger: Any) -> StreamingQuery:
        value = f"concat('{name}:', value) as value"
        writer = rate.selectExpr(value, f"'{name}' as __key").writeStream.format("keyshard")
        options = {"service.url": dev_broker.service_url, "topic": target, "sinkId": "copies"}
        writer = writer.options(**options).option("checkpointLocation", str(tmp_path / name))
        return writer.trigger(**trigger).start() if trigger else writer.start()

    # Keys "a" and "c" belong to different topic partitions.
    at_once = {name: start(name) for name in ("a", "c")}

    def was_slow(text: str) -> bool:
        """Whether a query failed because a slow broker did not let it check its sink id."""
        if "KEYSHARD_SINK_ID_IN_USE" in text:
            return False
        assert re.search("KEYSHARD_(PRODUCER_BUSY|BROKER_UNAVAILABLE)", text), text
        return True

    def any_stores() -> bool:
        # A slow broker may fail the checks of both.
        for name, one in at_once.items():
            if not one.isActive and was_slow(failed(one)):
                at_once[name] = start(name)
        return bool(stored(dev_broker, target))

    try:
        wait_until(any_stores, deadline(120))
        (first,) = {*at_once} & {*stored(dev_broker, target)}
        (second,) = {*at_once} - {first}
        for name, query in ((second, at_once[second]), ("d", start("d"))):
            while was_slow(text := failed(query)):
                query = start(name)  # noqa: PLW2901 - the same query again
            assert f"sink id 'copies' belongs to query {at_once[first].id}" in text
        before = len(stored(dev_broker, target)[first])
        wait_until(lambda: len(stored(dev_broker, target)[first]) > before, deadline(60))
    finally:
        for one in at_once.values():
            one.stop()
    ended(start(first, availableNow=True))
    ((key, values),) = stored(dev_broker, target).items()
    numbers = sorted(int(one.removeprefix(f"{first}:")) for one in values)
    assert (key, numbers) == (first, list(range(len(numbers))))


def entries(broker: DevBroker, topic: str) -> int:
    """Number of entries that were published to a topic since it was loaded."""
    path = topic.partition("://")[2]
    url = f"{broker.admin_url}/admin/v2/persistent/{path}/partitioned-stats"
    found = httpx.get(url, timeout=deadline(20)).raise_for_status().json()["msgInCounter"]
    assert isinstance(found, int)
    return found


def producers(broker: DevBroker, topic: str) -> list[str]:
    """Names of the producers that a topic has now."""
    path = topic.partition("://")[2]
    url = f"{broker.admin_url}/admin/v2/persistent/{path}/partitioned-stats"
    stats = (
        httpx.get(url, params={"perPartition": "true"}, timeout=deadline(20))
        .raise_for_status()
        .json()
    )
    parts = stats["partitions"].values()
    return [one["producerName"] for part in parts for one in part["publishers"]]


def test_a_stream_whose_spark_partitions_may_change_is_refused_by_name(
    spark: SparkSession, dev_broker: DevBroker, tmp_path: Path, target: str
) -> None:
    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 9).load()
    shuffled = rows.selectExpr("cast(value as string) as value").repartition("value")
    text = failed(copy(shuffled, tmp_path / "checkpoint", dev_broker, topic=target))
    assert f"Set {ADAPTIVE_STREAMS}=false" in text
    assert stored(dev_broker, target) == {}


@pytest.mark.usefixtures("fixed")
def test_rows_of_a_repeated_batch_go_to_the_topic_that_each_names_once(
    spark: SparkSession, dev_broker: DevBroker, tmp_path: Path, topic_name: str, target: str
) -> None:
    source = SparkTopic(dev_broker, topic_name, tmp_path, partitions=2)
    source.produce(300, keys=20)
    topics = [f"{target}{number}" for number in range(3)]

    def run(**options: str) -> None:
        rows = source.rows(spark).select("value", "__key")
        number = "cast(split(cast(value as string), ':')[1] as int)"
        rows = rows.withColumn("__topic", expr(f"concat('{target}', {number} % 3)"))
        ended(copy(rows, source.checkpoint, dev_broker, **options))

    run()
    last = without_last_commit(source.checkpoint)
    run(entryMaxMessages="3")
    assert last.exists(), "the batch was not repeated"
    for number, topic in enumerate(topics):
        mine = [one for one in source.sent if int(one.partition(":")[2]) % 3 == number]
        assert stored(dev_broker, topic) == by_key(mine)


NONE = "not given"
ROWS: list[Any] = [(f"k{number % 7}", f"{number}", number) for number in range(400)]
EXPECTED = {f"k{key}": [str(number) for number in range(key, 400, 7)] for key in range(7)}


def frame(spark: SparkSession) -> DataFrame:
    """Rows in the order of column ``n`` per key."""
    backwards = spark.createDataFrame(ROWS[::-1], "__key string, value string, n int")
    return backwards.repartition(3, "__key")


def test_a_batch_write_stores_every_row_once_in_the_order_that_is_asked_for(
    spark: SparkSession, dev_broker: DevBroker, target: str
) -> None:
    options = {"service.url": dev_broker.service_url, "topic": target, "orderBy": "n"}
    frame(spark).write.format("keyshard").mode("append").options(**options).save()
    assert stored(dev_broker, target) == EXPECTED
    # A second write is not a repetition of the first.
    frame(spark).write.format("keyshard").mode("append").options(**options).save()
    assert stored(dev_broker, target) == {key: both * 2 for key, both in EXPECTED.items()}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PySpark warns about pandas
def test_a_task_of_a_batch_write_that_runs_again_stores_nothing_twice(
    spark: SparkSession, dev_broker: DevBroker, target: str
) -> None:
    rows = frame(spark)
    options = {"service.url": dev_broker.service_url, "topic": target, "orderBy": "n"}
    writer = KeyShardDataSource(options).writer(rows.schema, overwrite=False)

    def attempt(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        report = writer.write(batches).report  # type: ignore[attr-defined]
        yield pa.record_batch({"rows": [report.rows], "known": [report.already_stored]})

    for known in (0, len(ROWS)):
        found = rows.mapInArrow(attempt, "rows bigint, known bigint").collect()
        assert sum(one["rows"] for one in found) == len(ROWS)
        assert sum(one["known"] for one in found) == known
    assert stored(dev_broker, target) == EXPECTED


@pytest.mark.parametrize(
    ("options", "columns", "text"),
    [
        ({"entryMaxMesages": "3"}, "value", "Did you mean 'entryMaxMessages'"),
        ({"subscription": "s"}, "value", "'subscription' is not an option of a write"),
        ({"entryMaxMessages": "many"}, "value", "'many'; it must be an integer"),
        ({"entryMaxMessages": "0"}, "value", "entryMaxMessages is 0"),
        ({"service.url": "memory://x"}, "value", "in-memory cluster"),
        ({"sinkId": "x" * 190}, "value", "sinkId has 190 characters"),
        ({"orderBy": "m"}, "value", "orderBy names m"),
        ({"orderBy": "m"}, "value, map(value, value) as m", "have no order"),
        ({"topic": ""}, "value", "topic"),
        ({}, "value, 't' as __topic", "'topic' and column __topic are both given"),
        ({}, "value, 't' as __topik", "Did you mean '__topic'"),
        ({}, "value, value as __keys", "Did you mean '__key'"),
        ({"valueFormat": "raw"}, "value as __key", "Column value is missing"),
        ({"valueFormat": "raw"}, "1 as value", "Column value has .*int32"),
        ({"valueFormat": "xml"}, "value", "valueFormat is 'xml'"),
        # All values of these columns are null, so only the types can be wrong.
        ({}, "value, int(null) as __key", "Column __key has the type int32; it must be text"),
        ({}, "value, string(null) as __keyBytes", "Column __keyBytes .* must be binary"),
        ({}, "value, binary(null) as __orderingKey", "Column __orderingKey .* must be text"),
        ({}, "value, bigint(null) as __eventTime", "Column __eventTime .* must be a timestamp"),
        ({}, "value, date(null) as __deliverAt", "Column __deliverAt .* must be a timestamp"),
        ({}, "value, map('a', 1) as __properties", "must be a map of text to text"),
        ({"topic": NONE}, "value, 1 as __topic", "Column __topic has the type int32"),
        (
            {},
            "value, cast(null as timestamp_ntz) as __eventTime",
            "no time zone.\nRemedy: Cast it to timestamp",
        ),
        ({}, "value, localtimestamp() as __deliverAt", "Column __deliverAt has the type times"),
        ({}, "value, interval 1 month as __key", "Column '__key' has the type interval month"),
        ({}, "array() as c", "Column 'c' has the type array<void>, which cannot be written"),
        ({}, "named_struct('a', parse_json('1')) as v", "Column 'v' .*\nRemedy: Write to_json"),
        ({"registerSchema": "yes"}, "value", "registerSchema"),
        ({"valueFormat": "raw", "registerSchema": "true"}, "value", "registerSchema needs"),
        ({"deliveryGuarantee": "once"}, "value", "deliveryGuarantee is 'once'"),
        ({}, "value", "No broker answers at .*\nRemedy: Check service.url"),
    ],
)
def test_rows_of_a_wrong_schema_are_refused_before_the_first_row(
    spark: SparkSession, options: dict[str, str], columns: str, text: str
) -> None:
    rows = spark.sql(f"select {columns} from (select 'v' as value)")
    given = {"topic": "never", "service.url": "pulsar://127.0.0.1:1"} | options
    given = {name: text for name, text in given.items() if text != NONE}
    with pytest.raises(AnalysisException, match=text):
        rows.write.format("keyshard").mode("append").options(**given).save()


def test_other_modes_are_refused_by_name(
    spark: SparkSession, dev_broker: DevBroker, tmp_path: Path
) -> None:
    writer = spark.sql("select 'v' as value").write.format("keyshard").option("topic", "never")
    with pytest.raises(AnalysisException, match=r"cannot write with mode\('overwrite'\)"):
        writer.mode("overwrite").save()
    for mode in ("error", "ignore"):
        with pytest.raises(AnalysisException, match="SAVE_MODE"):
            writer.mode(mode).save()
    rate = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load()
    counts = rate.groupBy("value").count().selectExpr("cast(value as string) as value")
    stream = counts.writeStream.format("keyshard").outputMode("complete")
    stream = stream.option("checkpointLocation", str(tmp_path / "checkpoint"))
    text = failed(stream.option("topic", "never").start())
    assert "cannot write with outputMode('complete')" in text


def test_the_page_of_publishing_names_every_option() -> None:
    page = (Path(__file__).parents[2] / "docs" / "publishing.md").read_text()
    assert [option.name for option in SINK_OPTIONS if f"`{option.name}`" not in page] == []
