"""Imports: clients and engines are loaded when they are needed."""

from __future__ import annotations

import pickle
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

from keyshard import KeyShardSource
from keyshard.columns.record_batches import SCHEMA
from keyshard.coordinator.batch_server import BatchServer
from tests.support.deadlines import deadline
from tests.unit.test_flight import ServedBatches

HEAVY = (
    "pulsar", "_pulsar", "pyspark", "ray", "pyarrow.flight", "pandas", "httpx", "fsspec",
    "google.protobuf", "opentelemetry",
)  # fmt: skip

SLOW = ("asyncio", "prometheus_client", "pyarrow.compute")
"""Modules that a task does without; PySpark may load them."""


def loaded_by(statement: str) -> set[str]:
    """Return the heavy modules that a fresh interpreter has after a statement."""
    return printed_by(f"{statement}\nimport sys\nprint(*(set({HEAVY!r}) & set(sys.modules)))")


def printed_by(program: str) -> set[str]:
    """Return the words that a program prints in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=deadline(60),
        check=True,
    )
    return set(done.stdout.split())


def test_importing_keyshard_loads_no_client_and_no_engine() -> None:
    assert loaded_by("import keyshard") == set()


def test_describing_a_source_loads_no_client_and_no_engine() -> None:
    statement = "import keyshard; keyshard.KeyShardSource('t', subscription='s')"
    assert loaded_by(statement) == set()


def test_the_in_memory_broker_needs_no_client_and_no_engine() -> None:
    assert loaded_by("import keyshard.broker.memory") == set()


def test_importing_the_spark_adapter_loads_no_broker_client() -> None:
    pytest.importorskip("pyspark")
    assert loaded_by("import spark_adapter") == {"pyspark"}


def of_keyshard(statement: str) -> set[str]:
    """Return the modules that a process of PySpark has after a statement, without PySpark's own.

    Besides those of keyshard, these are the ones of :data:`HEAVY` and :data:`SLOW`.
    """
    return printed_by(f"""
import sys
import pyspark.worker, pyspark.sql.streaming.python_streaming_source_runner
before = set(sys.modules)
{statement}
ours = {{n for n in sys.modules if n.partition(".")[0] in ("keyshard", "spark_adapter")}}
print(*(ours | set({HEAVY + SLOW!r}) & sys.modules.keys() - before))
""")


def test_importing_keyshard_loads_no_other_module_of_it() -> None:
    assert of_keyshard("import keyshard") == {"keyshard", "keyshard.version"}


def test_the_errors_are_there_with_the_package() -> None:
    assert "keyshard.errors" in of_keyshard("import keyshard; keyshard.errors.KeyShardError")


@pytest.mark.parametrize("name", ["keyshard", "spark_adapter"])
def test_no_module_takes_the_place_of_a_public_name(name: str) -> None:
    """The import of a module sets its name in the package."""
    package = pytest.importorskip(name)
    for found in pkgutil.iter_modules(package.__path__):
        assert found.name not in package.__all__


def test_a_task_of_a_stream_loads_only_the_modules_that_read_rows(tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    from spark_adapter.data_source import KeyShardDataSource  # noqa: PLC0415
    from spark_adapter.stream_reader import (  # noqa: PLC0415
        KeyShardPartition,
        KeyShardStreamReader,
    )
    from spark_adapter.task_rows import Rows  # noqa: PLC0415
    from spark_adapter.watched_process import EndAddress  # noqa: PLC0415

    source = KeyShardSource("orders", subscription="billing")
    server = BatchServer(ServedBatches(), "127.0.0.1")
    partition = KeyShardPartition(
        server.ticket("b", 3, SCHEMA.names), ended_at=EndAddress("127.0.0.1", 1, "secret")
    )
    reader = KeyShardStreamReader(source, Rows(SCHEMA.names))
    task = tmp_path / "task"
    task.write_bytes(pickle.dumps((KeyShardDataSource({}), reader, partition)))
    try:
        loaded = of_keyshard(f"""
import pickle
source, reader, partition = pickle.load(open({str(task)!r}, "rb"))
assert source.name() == "keyshard"
assert sum(rows.num_rows for rows in reader.read(partition)) == 30
""")
    finally:
        server._server.shutdown()
    assert loaded == {
        "keyshard", "keyshard.base_error", "keyshard.coordinator",
        "keyshard.coordinator.batch_reading", "keyshard.coordinator.kept_client", "keyshard.core",
        "keyshard.core.metadata_columns",
        "keyshard.core.process_end", "keyshard.errors", "keyshard.redaction", "keyshard.version",
        "keyshard.workers", "keyshard.workers.authentication", "keyshard.workers.flight_client",
        "pyarrow.flight", "spark_adapter", "spark_adapter.data_source", "spark_adapter.error_text",
        "spark_adapter.preflight", "spark_adapter.python_worker", "spark_adapter.stream_reader",
        "spark_adapter.task_rows", "spark_adapter.watched_process",
    }  # fmt: skip


def test_a_task_of_a_batch_loads_no_stream_and_no_codec(tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    from spark_adapter.batch_reader import KeyShardBatchReader, KeyShardSplits  # noqa: PLC0415
    from spark_adapter.data_source import KeyShardDataSource  # noqa: PLC0415
    from spark_adapter.option_parsing import BoundedRead  # noqa: PLC0415
    from spark_adapter.task_rows import Rows  # noqa: PLC0415

    reader = KeyShardBatchReader(BoundedRead(KeyShardSource("orders")), Rows(SCHEMA.names))
    task = tmp_path / "task"
    task.write_bytes(pickle.dumps((KeyShardDataSource({}), reader, KeyShardSplits([], {}))))
    loaded = of_keyshard(f"""
import pickle
source, reader, partition = pickle.load(open({str(task)!r}, "rb"))
assert list(reader.read(partition)) == []
""")
    assert not loaded & {*HEAVY, "prometheus_client", "asyncio", "keyshard.reading.decoding_plan"}
    assert not [
        name
        for name in loaded
        if name.startswith(("keyshard.coordinator", "keyshard.handlers", "keyshard.observe"))
    ]


def test_describing_a_stream_loads_no_module_that_runs_it() -> None:
    pytest.importorskip("pyspark")
    loaded = of_keyshard("""
from spark_adapter.data_source import KeyShardDataSource
options = {"service.url": "pulsar://h:1", "topic": "t", "subscription": "s", "valueFormat": "raw"}
assert KeyShardDataSource(options).schema().names
""")
    assert not loaded & {*HEAVY, *SLOW}
    packages = {".".join(name.split(".")[:2]) for name in loaded}
    assert not packages & {
        "keyshard.broker", "keyshard.columns", "keyshard.consumers", "keyshard.coordinator",
        "keyshard.handlers", "keyshard.observe", "keyshard.workers",
    }  # fmt: skip


def test_a_stream_process_loads_no_part_that_only_handlers_or_servers_need() -> None:
    pytest.importorskip("pyspark")
    loaded = of_keyshard("import spark_adapter.stream_runtime")
    assert not loaded & {
        "asyncio", "prometheus_client", "keyshard.dead_letters", "keyshard.handlers.output_log",
        "keyshard.observe.metrics_server", "keyshard.observe.page", "keyshard.publishing",
        "keyshard.reading.decoding_plan", "keyshard.sink",
    }  # fmt: skip


def test_rows_are_made_without_pandas() -> None:
    code = """
import pyarrow as pa
from keyshard.columns.record_batches import record_batches
from keyshard.columns.content import CONTENT
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition

content = pa.RecordBatch.from_arrays([pa.nulls(2, one) for one in CONTENT.types], schema=CONTENT)
block = EntryBlock(EntryId(1, 0), 2, True, range(2), 7, None, 1, 2, content, 0)
(rows,) = record_batches([(TopicPartition("persistent://public/default/t"), block)])
assert rows.num_rows == 2
"""
    assert loaded_by(code) == set()
