"""Imports: clients and engines are loaded when they are needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.deadlines import deadline

HEAVY = (
    "pulsar", "_pulsar", "pyspark", "ray", "pyarrow.flight", "pandas", "httpx", "fsspec",
    "google.protobuf", "opentelemetry",
)  # fmt: skip


def loaded_by(statement: str) -> set[str]:
    """Return the heavy modules that a fresh interpreter has after a statement."""
    program = f"{statement}\nimport sys\nprint(*(set({HEAVY!r}) & set(sys.modules)))"
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
    assert loaded_by("import spark_adapter") <= {"pyspark", "pyarrow.flight"}


def test_a_task_that_reads_loads_no_writer_and_no_http_client() -> None:
    pytest.importorskip("pyspark")
    loaded = loaded_by("import spark_adapter.stream_reader, spark_adapter.batch_reader")
    assert loaded == {"pyspark", "pyarrow.flight"}
    assert loaded_by("import keyshard.coordinator.batch_server") == {"pyarrow.flight"}


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
