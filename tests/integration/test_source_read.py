"""``source.read`` of a real broker: the same rows by every way, and nothing that is left behind."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from keyshard import KeyShardSource, Segments, SourceRead
from keyshard.broker.memory import Batching, Message
from keyshard.core.position.entry import TopicPartition
from keyshard.errors import DataLossTrimmedError, TopicNotFoundError
from keyshard.reading.split_planner import plan_read
from keyshard.reading.split_reader import read_splits
from keyshard.testing.devbroker import DevBroker
from tests.contract.pulsar_harness import PulsarHarness
from tests.helpers import wait_until
from tests.support.deadlines import deadline, joined

pytestmark = [pytest.mark.broker]

ROOT = Path(__file__).parents[2]
EACH = 90
"""Messages of a topic partition."""


@pytest.fixture
def source(dev_broker: DevBroker, harness: PulsarHarness) -> KeyShardSource:
    """Two partitions, each with a closed ledger of single messages and batches, and an open one."""
    topic = harness.create_topic(2)
    for number in range(2):
        where = TopicPartition(topic, number)
        messages = [Message(b"%d:%d" % (number, i), key=f"k{i % 7}") for i in range(EACH)]
        harness.publish(where.name, messages[:30])
        harness.publish(where.name, messages[30:60], Batching.MIXED)
        harness.roll_ledger(where)
        harness.publish(where.name, messages[60:])
    return KeyShardSource(topic, service_url=dev_broker.service_url, admin_url=dev_broker.admin_url)


@pytest.fixture
def several(source: KeyShardSource, monkeypatch: pytest.MonkeyPatch) -> SourceRead:
    """A read with many batches."""
    monkeypatch.setattr("keyshard.source_read.SPLIT_BYTES", 500)
    return source.read()


@pytest.fixture
def unchanged() -> Iterator[None]:
    """After the test, the process has the threads and connections of before."""
    before = left_open()
    yield
    gc.collect()
    wait_until(lambda: left_open() == before)


def left_open() -> tuple[set[str], int]:
    """Names of keyshard's threads, and the number of connections of this process."""
    names = {one.name for one in threading.enumerate() if one.name.startswith("keyshard")}
    connected = [one for one in psutil.Process().net_connections() if one.status == "ESTABLISHED"]
    return names, len(connected)


def values(rows: SourceRead) -> list[bytes]:
    return [value for batch in rows for value in batch.column("value").to_pylist()]


@pytest.mark.usefixtures("unchanged")
def test_the_rows_are_those_of_the_other_reads_also_from_bookies_and_with_an_index(
    dev_broker: DevBroker, source: KeyShardSource, tmp_path: Path
) -> None:
    expected = pa.Table.from_batches(
        read_splits(source.how_to_connect(), plan_read(source), source.read().schema.names)
    )
    assert expected.num_rows == 2 * EACH
    segments = Segments("auto", dev_broker.bookies_map)
    ways: list[dict[str, Any]] = [
        {}, {"segments": segments}, *[{"segments": segments, "ledger_index": str(tmp_path)}] * 2,
    ]  # fmt: skip
    for options in ways:
        with source.read(**options) as rows:
            assert pa.Table.from_batches(rows) == expected, options
        if "segments" in options:
            assert rows.report.by_bookies == rows.plan.by_bookies > 60 <= rows.report.by_broker
            assert list(rows.report.reasons) == ["it is not closed"]
    later = source.read(keys=["k3"], ledger_index=str(tmp_path))
    table = pa.table(later)
    wanted = [key == "k3" for key in expected.column("__key").to_pylist()]
    assert table == expected.filter(pa.array(wanted))


def test_the_example_exports_a_topic_in_processes(source: KeyShardSource, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.export_history", source.topics[0], tmp_path / "exported",
         "--service-url", source.service_url, "--admin-url", str(source.admin_url), "--parts", "5"],
        cwd=ROOT, check=False, timeout=deadline(120), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said, ends = done.stdout.splitlines()
    assert said == f"{2 * EACH} rows in 5 files"
    files = sorted((tmp_path / "exported").iterdir())
    found = [pq.read_table(file).column("value").to_pylist() for file in files]
    assert [value for part in found for value in part] == values(source.read())
    assert values(source.read(start=json.loads(ends))) == []


@pytest.mark.usefixtures("unchanged")
def test_a_read_that_ends_early_leaves_no_thread_and_no_connection(several: SourceRead) -> None:
    before = left_open()
    with several:
        for _ in several:
            assert left_open() != before
            break
        gc.collect()
        first, second = iter(several), iter(several)
        assert next(first) == next(second)
    with pytest.raises(StopIteration):
        next(first)


@pytest.mark.usefixtures("unchanged")
def test_an_error_of_the_program_closes_the_read(several: SourceRead) -> None:
    def fail() -> None:
        with several as rows:
            for _ in rows:
                raise KeyError("of the program")

    with pytest.raises(KeyError):
        fail()
    assert len(values(several)) == 2 * EACH


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_that_ends_leaves_the_read_to_its_parent(several: SourceRead) -> None:
    """The child's copy of the iteration is closed, but not the consumer at the broker."""
    batches = iter(several)
    found = [next(batches)]
    child = os.fork()
    if not child:
        own = -1
        try:
            batches.close()
            several.close()
            own = len(values(several))
        finally:
            os._exit(0 if own == 2 * EACH else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    found += batches
    assert sum(batch.num_rows for batch in found) == 2 * EACH


def test_a_topic_that_is_deleted_during_the_read_is_a_named_loss(
    harness: PulsarHarness, source: KeyShardSource, several: SourceRead
) -> None:
    batches = iter(several)
    next(batches)
    harness.delete_topic(source.topics[0])
    for read in (batches, several):
        with pytest.raises(DataLossTrimmedError):
            list(read)
    with pytest.raises(TopicNotFoundError):
        source.read()
    assert harness.broker().missing(source.topics) == frozenset(source.topics)


def test_reads_of_several_threads_have_all_rows(several: SourceRead) -> None:
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(len(values(several)))) for _ in range(4)
    ]
    for one in threads:
        one.start()
    for one in threads:
        joined(one, deadline(60))
    assert found == [2 * EACH] * 4
