"""Option ``staging``: a repeated batch may have other rows, in other Spark partitions."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from keyshard.testing.devbroker import DevBroker
from spark_adapter import KeyShardDataSource
from spark_adapter.adaptive_execution import ADAPTIVE_STREAMS
from spark_adapter.stream_writer import KeyShardStreamWriter
from spark_adapter.topic_writer import Staged
from tests.spark.spark_topic import ended, failed, without_last_commit
from tests.spark.test_topic_writer import EXPECTED, frame
from tests.spark.test_write_batch import stored, target

__all__ = ["target"]
pytestmark = [pytest.mark.spark, pytest.mark.broker]
SHUFFLE = "spark.sql.shuffle.partitions"


@pytest.fixture
def settings(spark: SparkSession) -> Iterator[None]:
    """Settings of shuffles that the test changes."""
    partitions = str(spark.conf.get(SHUFFLE))
    yield
    spark.conf.set(SHUFFLE, partitions)
    spark.conf.unset(ADAPTIVE_STREAMS)


@pytest.mark.usefixtures("settings")
def test_a_repeated_batch_with_other_rows_is_stored_once_as_it_was_first_staged(
    spark: SparkSession, dev_broker: DevBroker, tmp_path: Path, target: str
) -> None:
    class DyingSource(KeyShardDataSource):
        """A sink whose commit is killed between the manifest and the first row."""

        @classmethod
        def name(cls) -> str:
            return "dying"

        def streamWriter(  # noqa: N802
            self,
            schema: StructType,
            overwrite: bool,  # noqa: ARG002
        ) -> DataSourceStreamArrowWriter:
            class DyingWriter(KeyShardStreamWriter):
                def commit(
                    self,
                    messages: list[WriterCommitMessage | None],
                    batchId: int,  # noqa: N803
                ) -> None:
                    staged = [one for one in messages if isinstance(one, Staged)]
                    batch = self._write.batch(staged[0].identity, batchId)
                    batch.decide([one.file for one in staged if one.file is not None])
                    os.kill(os.getpid(), signal.SIGKILL)

            return DyingWriter(self._write(schema))

    spark.dataSource.register(DyingSource)
    staging, lines, checkpoint = (tmp_path / name for name in ("staging", "lines", "checkpoint"))
    staging.mkdir()
    lines.mkdir()
    first = [f"key-{number % 20}:{number}" for number in range(200)]
    (lines / "0.txt").write_text("\n".join(first))

    def copy(kind: str, partitions: int, *, adaptive: bool = True) -> StreamingQuery:
        # A shuffle whose number of Spark partitions is that of the settings.
        spark.conf.set(SHUFFLE, str(partitions))
        spark.conf.set(ADAPTIVE_STREAMS, str(adaptive).lower())
        rows = spark.readStream.text(str(lines)).repartition("value")
        rows = rows.selectExpr("value", "split(value, ':')[0] as __key")
        writer = rows.writeStream.format(kind).option("service.url", dev_broker.service_url)
        writer = writer.options(topic=target, staging=str(staging), orderBy="value")
        return (
            writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
        )

    failed(copy("dying", 3, adaptive=False))
    assert stored(dev_broker, target) == {}
    assert len(list(staging.rglob("*.arrow"))) == 3
    (lines / "0.txt").write_text("\n".join(f"other{line}" for line in first[:150]))
    ended(copy("keyshard", 2))
    found = stored(dev_broker, target)
    assert sorted(value for values in found.values() for value in values) == sorted(first)
    last = without_last_commit(checkpoint)
    (lines / "0.txt").write_text("third:0")
    (lines / "1.txt").write_text("next:0")
    ended(copy("keyshard", 1))
    assert last.exists(), "the batch was not repeated"
    assert stored(dev_broker, target) == found | {"next": ["next:0"]}
    assert not list(staging.rglob("*.arrow"))


def test_a_staged_batch_write_stores_every_row_once_and_leaves_nothing(
    spark: SparkSession, dev_broker: DevBroker, tmp_path: Path, target: str
) -> None:
    options = {"service.url": dev_broker.service_url, "topic": target, "orderBy": "n"}
    writer = frame(spark).write.format("keyshard").mode("append").options(**options)
    writer.option("staging", tmp_path.as_uri()).save()
    assert stored(dev_broker, target) == EXPECTED
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("{}/missing", "KEYSHARD_STAGING.*does not exist"),
        ("memory://x", "the driver and all tasks must reach it"),
        ("nothing://x", "staging is 'nothing://x'"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_before_the_first_row(
    spark: SparkSession, tmp_path: Path, url: str, error: str
) -> None:
    writer = spark.sql("select 'v' as value").write.format("keyshard").mode("append")
    options = {"topic": "never", "service.url": "pulsar://127.0.0.1:1"}
    with pytest.raises(AnalysisException, match=error):
        writer.options(staging=url.format(tmp_path), **options).save()
