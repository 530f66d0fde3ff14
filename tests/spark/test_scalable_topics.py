"""A Spark query of a scalable topic whose segments split and merge, also while it is down."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pulsar
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from keyshard.testing.devbroker import DevBroker
from spark_adapter import positions
from tests.helpers import wait_until
from tests.support.deadlines import deadline
from tests.support.scalable_topic import ScalableTopic
from tests.support.tested_pulsar import PULSAR

pytestmark = [
    pytest.mark.spark,
    pytest.mark.skipif(int(PULSAR.split(".")[0]) < 5, reason="needs scalable topics"),
]
END_S = deadline(180)
OF_JVM = ["value", "__key", "__topic", "__messageId", "__publishTime", "__eventTime"]


class Query:
    """A query that notes the values of its batches, in the order of their tasks."""

    source = "keyshard"
    options = {"subscription": "spark", "startingOffsets": "earliest"}  # noqa: RUF012 - constant

    def __init__(
        self,
        spark: SparkSession,
        broker: DevBroker,
        topic: ScalableTopic | str,
        folder: Path,
    ) -> None:
        """Takes a topic, or a pattern as text."""
        self._spark, self._broker, self._folder = spark, broker, folder
        self._topics = {"topicsPattern": topic} if isinstance(topic, str) else {"topic": topic.name}
        self.batches: dict[int, list[str]] = {}

    def note(self, rows: DataFrame, number: int) -> None:
        found = rows.selectExpr("cast(value as string) as value").collect()
        self.batches[number] = [row["value"] for row in found]

    @property
    def got(self) -> list[str]:
        return [value for number in sorted(self.batches) for value in self.batches[number]]

    @property
    def _where(self) -> dict[str, str]:
        return {
            "service.url": self._broker.service_url, "admin.url": self._broker.admin_url,
            **self._topics,
        }  # fmt: skip

    def table(self, **options: str | None) -> DataFrame:
        """A bounded read of the topic; Spark leaves out an option that is ``None``."""
        return self._spark.read.format(self.source).options(**self._where | options).load()

    def _start(self, parallelism: int, start: str = "earliest", **trigger: Any) -> StreamingQuery:
        options = {
            **self._where, **self.options, "startingOffsets": start, "parallelism": str(parallelism)
        }  # fmt: skip
        rows = self._spark.readStream.format(self.source).options(**options).load()
        return (
            rows.writeStream.foreachBatch(self.note)
            .option("checkpointLocation", str(self._folder / "checkpoint"))
            .trigger(**trigger)
            .start()
        )

    @contextmanager
    def running(self, parallelism: int, start: str = "earliest") -> Iterator[StreamingQuery]:
        query = self._start(parallelism, start, processingTime="0 seconds")
        try:
            yield query
        finally:
            query.stop()

    def available_now(self, parallelism: int) -> None:
        """Take what is stored now."""
        query = self._start(parallelism, availableNow=True)
        try:
            assert query.awaitTermination(int(END_S))
        finally:
            query.stop()


class PulsarQuery(Query):
    """The same with the names of the JVM connector, and the subscription of the checkpoint."""

    source = "pulsar"
    options = {"startingOffsets": "earliest"}  # noqa: RUF012 - constant


def test_each_message_is_in_one_batch_in_order_while_segments_split_and_merge(
    spark: SparkSession, dev_broker: DevBroker, tmp_path: Path
) -> None:
    draw = random.Random(3)
    with closing(ScalableTopic(dev_broker, segments=2)) as topic:
        query = Query(spark, dev_broker, topic, tmp_path)
        topic.publish(200)
        for parallelism in (4, 6):
            with query.running(parallelism):
                for _ in range(3):
                    topic.publish(100)
                    topic.change(draw)
                    topic.publish(100)
                # Spark fails with a stack overflow if foreachBatch is interrupted by a stop.
                wait_until(lambda: len(query.got) >= len(topic.sent), END_S)
            topic.change(draw)
            topic.publish(100)
            topic.change(draw)
            topic.publish(100)
        with query.running(5):
            wait_until(lambda: len(query.got) >= len(topic.sent), END_S)
        topic.check(query.got)


def test_available_now_takes_all_segments_that_exist_and_continues_with_the_next(
    spark: SparkSession, dev_broker: DevBroker, tmp_path: Path
) -> None:
    draw = random.Random(4)
    with closing(ScalableTopic(dev_broker, segments=2)) as topic:
        topic.keep()
        query = Query(spark, dev_broker, topic, tmp_path)
        for parallelism in (4, 3):
            for _ in range(3):
                topic.publish(100)
                topic.change(draw)
            query.available_now(parallelism)
            topic.check(query.got)
        query.available_now(3)
        topic.check(query.got)


def test_a_bounded_read_has_all_segments_and_takes_filters(
    spark: SparkSession, dev_broker: DevBroker, tmp_path: Path
) -> None:
    draw = random.Random(5)
    with closing(ScalableTopic(dev_broker, segments=2)) as topic:
        topic.keep()
        query = Query(spark, dev_broker, topic, tmp_path)
        assert query.table().count() == 0
        for _ in range(3):
            topic.publish(100)
            topic.change(draw)
        table = query.table(minPartitions="12")
        assert table.rdd.getNumPartitions() == 12
        rows = [row["v"] for row in table.selectExpr("cast(value as string) as v").collect()]
        topic.check(rows)
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
        try:
            filtered = query.table(pushFilters="true").where("__key = 'k1'")
            assert filtered.count() == sum(value.startswith("k1:") for value in topic.sent)
            later = query.table(pushFilters="true").where("__publishTime > '2000-01-01'")
            assert later.count() == len(topic.sent)
        finally:
            spark.conf.unset("spark.sql.python.filterPushdown.enabled")
        with pytest.raises(AnalysisException, match="is no segment of"):
            query.table(startingOffsets='{"a": "3:7"}').count()


def test_a_pattern_takes_all_matching_topics_in_streams_bounded_runs_and_reads(
    spark: SparkSession, dev_broker: DevBroker, tmp_path: Path
) -> None:
    prefix, draw = f"spark-{uuid.uuid4().hex[:12]}", random.Random(6)
    query = Query(spark, dev_broker, f"topic://public/default/{prefix}-.*", tmp_path)

    def rows() -> int:
        return len(query.got)

    with ExitStack() as open_topics:
        topics: list[ScalableTopic] = []
        for segments in (2, 1):
            made = ScalableTopic(dev_broker, segments, prefix=prefix)
            topics.append(open_topics.enter_context(closing(made)))
            made.keep()
            made.publish(50)
        with query.running(4):
            wait_until(lambda: rows() == 100, END_S)
            topics.append(
                open_topics.enter_context(closing(ScalableTopic(dev_broker, 2, prefix=prefix)))
            )
            topics[-1].keep()
            topics[-1].publish(50)
            wait_until(lambda: rows() == 150, END_S)
        for topic in topics:
            topic.change(draw)
            topic.publish(50)
        query.available_now(3)
        assert rows() == 300
        table = query.table()
        assert table.count() == 300
        assert {row["__topic"].rpartition("/")[0] for row in table.select("__topic").collect()} == {
            topic.name.replace("topic://", "segment://") for topic in topics
        }


def test_a_stream_goes_on_where_a_read_ends_though_segments_split_in_between(
    spark: SparkSession, dev_broker: DevBroker, tmp_path: Path
) -> None:
    with closing(ScalableTopic(dev_broker, segments=2)) as topic:
        topic.keep()
        query = Query(spark, dev_broker, topic, tmp_path)
        topic.publish(100)
        history = query.table()
        behind = positions(history)
        topic.split(0)
        topic.publish(100)
        read = [row["v"] for row in history.selectExpr("cast(value as string) as v").collect()]
        with query.running(3, behind) as running:
            wait_until(lambda: len(query.got) >= 100, END_S)
            topic.check([*read, *query.got])
            topic.publish(50)
            wait_until(lambda: sum(one["numInputRows"] for one in running.recentProgress) >= 150)
        end = positions(running)
        between = query.table(startingOffsets=behind, endingOffsets=end)
        rows = [row["v"] for row in between.selectExpr("cast(value as string) as v").collect()]
        assert sorted(rows) == sorted(query.got)


def test_format_pulsar_reads_a_scalable_topic_as_any_other(
    spark: SparkSession, dev_broker: DevBroker, tmp_path: Path
) -> None:
    draw = random.Random(6)
    with closing(ScalableTopic(dev_broker)) as topic, closing(ScalableTopic(dev_broker)) as other:
        topic.keep()
        query = PulsarQuery(spark, dev_broker, topic, tmp_path)
        topic.publish(100)
        topic.change(draw)
        topic.publish(100)
        table = query.table()
        assert table.columns == [*OF_JVM, "__messageProperties"]
        rows = table.collect()
        topic.check([bytes(row["value"]).decode() for row in rows])
        assert all(row["__key"] == bytes(row["value"]).partition(b":")[0] for row in rows)
        assert all(
            row["__topic"].startswith(f"{topic.name.replace('topic:', 'segment:')}/")
            for row in rows
        )
        ids = {bytes(row["__messageId"]) for row in rows}
        assert len({(row["__topic"], bytes(row["__messageId"])) for row in rows}) == len(rows)
        assert all(pulsar.MessageId.deserialize(one).ledger_id() >= 0 for one in ids)
        assert query.table(startingOffsets="latest").count() == 0

        other.publish(30)
        both = query.table(topics=f"{topic.name}, {other.name}", topic=None)
        assert both.select("__topic").distinct().count() == 4
        assert both.count() == len(rows) + 30


def test_a_stream_of_format_pulsar_goes_on_over_splits_with_the_subscription_of_its_checkpoint(
    spark: SparkSession, dev_broker: DevBroker, tmp_path: Path
) -> None:
    draw = random.Random(7)
    with closing(ScalableTopic(dev_broker, segments=2)) as topic:
        query = PulsarQuery(spark, dev_broker, topic, tmp_path)
        topic.publish(100)
        for parallelism in (3, 5):
            with query.running(parallelism):
                wait_until(lambda: query.got, END_S)
                topic.change(draw)
                topic.publish(100)
                wait_until(lambda: len(query.got) >= len(topic.sent), END_S)
            topic.change(draw)
            topic.publish(100)
        query.available_now(3)
        topic.check(query.got)
        stats = httpx.get(f"{dev_broker.admin_url}{topic.path}/stats").json()
        assert len(stats["subscriptions"]) == 1, "each start had the same one"
