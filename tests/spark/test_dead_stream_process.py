"""A query whose stream process dies says so, whatever Spark was doing."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import Workload, create_partitioned_topic, produce
from spark_adapter.watched_process import RUNNER
from tests.helpers import wait_until
from tests.support.deadlines import deadline, joined

pytestmark = pytest.mark.spark

ENDED_S = deadline(90)


class DyingQuery:
    """A query on a topic with messages, and its stream process."""

    def __init__(
        self, spark: SparkSession, broker: DevBroker, topic: str, folder: Path, kind: str
    ) -> None:
        self._broker, self._topic, self._folder = broker, topic, folder
        create_partitioned_topic(broker.admin_url, topic, 1)
        self.produce()
        self._rows = (
            spark.readStream.format(kind)
            .option("topic", topic)
            .option("subscription", "dying")
            .option("service.url", broker.service_url)
            .option("admin.url", broker.admin_url)
            .option("startingOffsets", "earliest")
            .option("parallelism", 2)
            .load()
        )
        self._before = {one.pid for one in _stream_processes()}
        self.query: StreamingQuery

    def produce(self) -> None:
        workload = Workload(messages=50, keys=10, batching="none")
        produce(workload, self._broker.service_url, self._topic)

    def start(self, take: Callable[[DataFrame, int], None]) -> None:
        writer = self._rows.writeStream.foreachBatch(take)
        writer = writer.option("checkpointLocation", str(self._folder / "checkpoint"))
        self.query = writer.trigger(processingTime="200 milliseconds").start()

    def kill(self) -> None:
        """Kill the stream process; it must be there or come."""
        wait_until(self._killed, deadline(60))

    def _killed(self) -> bool:
        new = [one for one in _stream_processes() if one.pid not in self._before]
        parents = {one.pid for one in new}
        for one in new:
            with suppress(psutil.NoSuchProcess):
                if one.ppid() in parents:
                    one.send_signal(signal.SIGKILL)
                    return True
        return False

    def error(self) -> str:
        with pytest.raises(StreamingQueryException) as raised:
            self.query.awaitTermination(int(ENDED_S))
        return str(raised.value)

    def is_gone(self) -> bool:
        """Whether Spark has ended all processes of the query."""
        return {one.pid for one in _stream_processes()} <= self._before


def _stream_processes() -> list[psutil.Process]:
    found = []
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if RUNNER in one.cmdline():
                found.append(one)
    return found


@pytest.fixture(params=["keyshard", "pulsar"])
def dying(
    request: pytest.FixtureRequest,
    spark: SparkSession, dev_broker: DevBroker, topic_name: str, tmp_path: Path,
) -> Iterator[DyingQuery]:  # fmt: skip
    made = DyingQuery(spark, dev_broker, topic_name, tmp_path, request.param)
    yield made
    made.query.stop()
    for one in _stream_processes():
        with suppress(psutil.NoSuchProcess):
            one.terminate()


def count(rows: DataFrame, _: int) -> None:
    rows.count()


def check(error: str) -> None:
    assert "[KEYSHARD_STREAM_PROCESS] Stream process " in error
    assert "was killed by SIGKILL (9)" in error
    assert "memory limit" in error
    assert "standard error of the driver" in error


def test_a_query_whose_stream_process_dies_at_its_start_says_so(dying: DyingQuery) -> None:
    killing = threading.Thread(target=dying.kill)
    killing.start()
    dying.start(count)
    joined(killing, deadline(60))
    check(dying.error())


def test_a_query_whose_stream_process_dies_between_batches_says_so(dying: DyingQuery) -> None:
    """Issue: the error was ``java.io.EOFException``."""
    dying.start(count)
    wait_until(lambda: any(one["numInputRows"] for one in dying.query.recentProgress), deadline(60))
    dying.kill()
    check(dying.error())
    wait_until(dying.is_gone, deadline(15))


def test_a_query_whose_stream_process_dies_while_tasks_read_says_so(dying: DyingQuery) -> None:
    """Issue: the error named an option of the network, though the process was dead."""

    def kill_and_count(rows: DataFrame, _: int) -> None:
        dying.kill()
        rows.count()

    dying.start(kill_and_count)
    check(dying.error())
    wait_until(dying.is_gone, deadline(15))
