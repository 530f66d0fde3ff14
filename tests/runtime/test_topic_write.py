"""The writers of Spark outside of Spark: which ids the rows of a task get."""

from __future__ import annotations

import json
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

from keyshard import KeyShardSink
from keyshard.broker.memory import MemoryCluster
from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import SinkIdInUseError
from spark_adapter import writing
from spark_adapter.adaptive_execution import ADAPTIVE_STREAMS
from spark_adapter.stream_writer import KeyShardStreamWriter
from spark_adapter.topic_writer import NAMES_KEPT_S, KeyShardBatchWriter, TopicWrite
from spark_adapter.write_options import QUERY_ID, WriteOptions, fitted
from spark_adapter.writing import write_batch

ROWS = pa.record_batch({"value": [b"1", b"2", b"3"], "__key": ["a", "b", "a"]})


class Target:
    """A topic, and writes to it."""

    def __init__(self) -> None:
        name = f"write-{uuid.uuid4().hex}"
        self._cluster = MemoryCluster.named(name)
        self.topic = self._cluster.create_topic("out")
        self._cluster.deduplicate(self.topic)
        self.url = f"memory://{name}"
        sink = KeyShardSink(self.topic, sink_id="spark", service_url=self.url)
        self.write = TopicWrite(WriteOptions(sink, (), ("value", "__key")))

    @property
    def message_bytes_max(self) -> int:
        return self._cluster.message_bytes_max

    def forget(self) -> None:
        """Let the broker forget the names of all producers."""
        (where,) = self._cluster.partitions(self.topic)
        log = self._cluster.log(where)
        for ordinal in range(len(log)):
            entry = log.get(ordinal)
            assert entry is not None
            self._cluster.forget_producer(where, entry.producer)

    def create_topic(self, name: str, fields: list[str]) -> str:
        """Create a topic with a schema of JSON objects that have these integers."""
        topic = self._cluster.create_topic(name)
        self._cluster.deduplicate(topic)
        record = [{"name": one, "type": "long"} for one in fields]
        definition = json.dumps({"type": "record", "name": "R", "fields": record})
        self._cluster.schemas[topic] = [TopicSchema("JSON", definition.encode())]
        return topic

    def values(self, topic: str | None = None) -> list[bytes | None]:
        """All stored values of a topic."""
        (where,) = self._cluster.partitions(topic or self.topic)
        log = self._cluster.log(where)
        entries = [log.get(ordinal) for ordinal in range(len(log))]
        return [one.value for entry in entries if entry is not None for one in entry.messages]


@pytest.fixture
def target() -> Target:
    return Target()


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The context of a task of a stream."""
    context: Any = object.__new__(TaskContext)
    context._partitionId, context._attemptNumber = 3, 0
    context._localProperties = {
        QUERY_ID: "q", "streaming.sql.batchId": "7", ADAPTIVE_STREAMS: "false",
    }  # fmt: skip
    monkeypatch.setattr(TaskContext, "_taskContext", context)
    monkeypatch.setattr(writing, "check_rows", lambda *_, **__: None)  # without Spark, no plan
    return context


@pytest.mark.parametrize("kind", [KeyShardStreamWriter, KeyShardBatchWriter])
def test_each_attempt_of_a_task_gives_its_rows_the_same_ids(
    target: Target, task: Any, kind: Any
) -> None:
    writer = kind(target.write)
    for attempt, known in enumerate((0, 3, 3)):
        task._attemptNumber = attempt
        assert writer.write(iter([ROWS])).report.already_stored == known
    assert sorted(value or b"" for value in target.values()) == [b"1", b"2", b"3"]


@pytest.mark.parametrize("kind", [KeyShardStreamWriter, KeyShardBatchWriter])
def test_a_late_attempt_looks_for_rows_of_a_forgotten_name(
    target: Target, task: Any, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repeated stage counts attempts from 0 again, and a restarted stream does."""
    writer = kind(target.write)
    writer.write(iter([ROWS]))
    target.forget()
    later = time.time() + NAMES_KEPT_S
    monkeypatch.setattr(time, "time", lambda: later)
    assert writer.write(iter([ROWS])).report.already_stored == 3


def test_two_queries_or_batches_or_tasks_take_no_rows_from_each_other(
    target: Target, task: Any
) -> None:
    writer: Any = KeyShardStreamWriter(target.write)
    names = [("q", 7, 3), ("p", 7, 3), ("q", 8, 3), ("q", 8, 4)]
    for query, batch, partition in names:
        task._localProperties |= {
            QUERY_ID: query, "streaming.sql.batchId": str(batch),
        }  # fmt: skip
        task._partitionId = partition
        assert writer.write(iter([ROWS])).report.already_stored == 0
    for _ in range(2):
        other: Any = KeyShardBatchWriter(target.write)
        assert other.write(iter([ROWS])).report.already_stored == 0
    assert len(target.values()) == 3 * (len(names) + 2)


def test_a_task_without_rows_opens_no_producer(target: Target, task: Any) -> None:
    empty = pa.RecordBatch.from_pylist([], ROWS.schema)
    for batches in ([], [empty], [empty, empty]):
        writer: Any = KeyShardStreamWriter(target.write)
        report = writer.write(iter(batches)).report
        assert (report.rows, report.topic_partitions) == (0, 0)
    assert target.values() == []


class Rows:
    """A DataFrame of one Spark partition, whose task runs here.

    Args:
        query: Id of the streaming query that has it as a batch; ``None`` outside of queries.
    """

    def __init__(self, query: str | None = None) -> None:
        tells = SimpleNamespace(getLocalProperty={QUERY_ID: query}.get)
        self.sparkSession = SimpleNamespace(sparkContext=tells)

    schema = StructType([StructField("value", BinaryType()), StructField("__key", StringType())])
    columns = schema.names

    def select(self, *_names: str) -> Rows:
        return self

    def mapInArrow(self, task: Any, _schema: str) -> Rows:  # noqa: N802 - the name in Spark
        self._task = task
        return self

    def collect(self) -> list[tuple[Any, ...]]:
        return [tuple(row.values()) for batch in self._task([ROWS]) for row in batch.to_pylist()]


@pytest.mark.usefixtures("task")
def test_a_task_of_foreach_batch_takes_no_port(target: Target) -> None:
    """The tasks of a machine cannot share it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        report = write_batch(
            Rows(),  # type: ignore[arg-type]
            0, topic=target.topic, sink_id="spark", service_url=target.url,
            metrics_port=taken.getsockname()[1],
        )  # fmt: skip
    assert report.rows == len(ROWS) == len(target.values())


@pytest.mark.usefixtures("task")
def test_batches_of_foreach_batch_are_those_of_their_query_alone(target: Target) -> None:
    """With a new checkpoint, a query numbers its batches from 0 again, and its rows are others."""

    def written(query: str | None) -> int:
        rows: Any = Rows(query)
        return write_batch(
            rows, 0, topic=target.topic, sink_id="spark", service_url=target.url
        ).already_stored

    old, new = str(uuid.uuid4()), str(uuid.uuid4())
    assert [written(old), written(old)] == [0, 3]
    with pytest.raises(SinkIdInUseError, match=f"{new}.*{old}"):
        written(new)
    assert [written(None), written(None)] == [0, 3]
    assert sorted(value or b"" for value in target.values()) == [b"1", b"1", b"2", b"2", b"3", b"3"]


def test_a_commit_logs_the_counts_of_the_batch(
    target: Target, task: Any, caplog: pytest.LogCaptureFixture
) -> None:
    writer = KeyShardStreamWriter(target.write)
    first = writer.write(iter([ROWS]))
    task._attemptNumber = 2
    with caplog.at_level("INFO", "spark_adapter"):
        writer.commit([first, writer.write(iter([ROWS])), None], 7)
    (line,) = caplog.messages
    assert line.startswith(
        "batch 7 is stored (exactly-once): 6 rows in 2 tasks, of which 3 were stored before; "
    )
    assert "entries (1.0 messages each), all confirmed; 2 retries; slowest: persistent://" in line


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("writer_kind", [KeyShardStreamWriter, KeyShardBatchWriter])
def test_columns_that_only_order_rows_are_left_out_of_each_topic(
    target: Target, task: Any, writer_kind: Any, tmp_path: Path, *, staged: bool
) -> None:
    """Each topic has a schema of its own, which may have the column or not."""
    with_order = target.create_topic("with", ["n", "seq"])
    without = target.create_topic("without", ["n"])
    columns = StructType(
        [
            StructField("__topic", StringType()),
            StructField("n", LongType()),
            StructField("seq", LongType()),
        ]
    )
    sink = KeyShardSink("__topic", sink_id="spark", service_url=target.url, value_format="auto")
    options = fitted(sink, columns, ("seq",))
    write = TopicWrite(options._replace(staging=str(tmp_path) if staged else None))
    rows = {"__topic": [without, with_order] * 2, "n": [4, 3, 2, 1], "seq": [4, 3, 2, 1]}
    writer = writer_kind(write)
    stored = writer.write(iter([pa.record_batch(rows)]))
    writer.commit([stored], *([7] if writer_kind is KeyShardStreamWriter else []))
    assert target.values(without) == [b'{"n":2}', b'{"n":4}']
    assert target.values(with_order) == [b'{"n":1,"seq":1}', b'{"n":3,"seq":3}']
