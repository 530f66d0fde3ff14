"""Workers on Spark's executors: a cluster of two, one of which is killed inside a batch."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing
from pathlib import Path

import httpx
import psutil
import pyarrow.parquet as pq
import pytest

from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.file_sink import SinkCheck, committed_files
from keyshard.testing.verify.workloads import Workload, create_partitioned_topic, produce
from tests.spark.spark_process import SparkProcess, eventually
from tests.support.deadlines import deadline
from tests.support.scalable_topic import ScalableTopic
from tests.support.tested_pulsar import PULSAR

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.timeout(900)]

SUBSCRIPTION, PARTITIONS = "executors", 3
LOAD = Workload(messages=8_000, keys=300, size_bytes=1_000, entry_messages=4)
ROWS_PER_BATCH = 1_500
WAIT_S = deadline(240)


def backlog(broker: DevBroker, topic: str) -> int:
    """Entries that the broker still holds for the subscription."""
    url = f"{broker.admin_url}/admin/v2/persistent/public/default/{topic}/partitioned-stats"
    stats = httpx.get(url, params={"perPartition": "false"}, timeout=deadline(10)).json()
    return int(stats["subscriptions"][SUBSCRIPTION]["msgBacklog"])


def executors(run: SparkProcess) -> list[psutil.Process]:
    """Living executors of a run."""

    def is_one(process: psutil.Process) -> bool:
        try:
            return "CoarseGrainedExecutorBackend" in " ".join(process.cmdline())
        except psutil.Error:
            return False

    return list(filter(is_one, run.processes()))


def counted(notes: Path) -> Counter[str]:
    """Sums of what was noted."""
    total: Counter[str] = Counter()
    for line in notes.read_text().splitlines():
        for name, value in json.loads(line).items():
            total[name] += int(value)
    return total


def test_rows_go_between_executors_and_none_is_lost_with_a_killed_executor(
    dev_broker: DevBroker, topic_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "notes"
    notes.touch()
    monkeypatch.setenv("KEYSHARD_TEST_NOTES", str(notes))
    create_partitioned_topic(dev_broker.admin_url, topic_name, PARTITIONS)
    sent = produce(LOAD, dev_broker.service_url, topic_name)
    options = {
        "topic": topic_name, "subscription": SUBSCRIPTION, "startingOffsets": "earliest",
        "service.url": dev_broker.service_url, "admin.url": dev_broker.admin_url,
        "parallelism": "4", "maxOffsetsPerTrigger": str(ROWS_PER_BATCH), "workers": "spark:2",
        "windowMaxRows": str(3 * ROWS_PER_BATCH), "tasksPerBatch": "4",
    }  # fmt: skip
    run = SparkProcess(options, tmp_path, module="tests.spark.executors_query")
    try:
        run.wait_committed(2, WAIT_S)
        before = counted(notes)
        batch = run.wait_inside_batch(1, WAIT_S)
        victim, _ = executors(run)
        victim.kill()
        assert batch not in run.batches("commits"), "the kill came too late"
        eventually(lambda: backlog(dev_broker, topic_name) == 0, WAIT_S, "all is acknowledged")
    finally:
        output = run.tail()
        run.stop()
    print(f"\nbytes before the kill: {dict(before)}\nat the end: {dict(counted(notes))}")
    assert before["task"] >= before["rows"] * LOAD.size_bytes > 0
    assert before["kept"] >= before["rows"]
    # The stream process gets the keys of deliveries that begin or end inside an entry.
    assert before["heard"] < 0.05 * before["kept"] * LOAD.size_bytes, "content does"
    assert before["served"] == 0
    check = SinkCheck()
    for files in committed_files(tmp_path / "sink").values():
        check.add(files, 4)
    verdicts = check.verdicts(topic_name, sent.per_key)
    assert check.rows == LOAD.messages, output
    for promise in ("no loss", "exactly once into the checkpoint", "order per key"):
        assert verdicts[promise].checked >= LOAD.messages
        assert verdicts[promise].holds, verdicts[promise].message


@pytest.mark.skipif(int(PULSAR.split(".")[0]) < 5, reason="needs scalable topics")
def test_entries_of_several_ranges_stay_on_executors_and_are_divided_there(
    dev_broker: DevBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "notes"
    notes.touch()
    monkeypatch.setenv("KEYSHARD_TEST_NOTES", str(notes))
    with closing(ScalableTopic(dev_broker, segments=2)) as topic:
        topic.publish_mixed(400, 10)
        options = {
            "topic": topic.name, "subscription": SUBSCRIPTION, "startingOffsets": "earliest",
            "service.url": dev_broker.service_url, "admin.url": dev_broker.admin_url,
            "parallelism": "4", "tasksPerBatch": "4", "workers": "spark:2",
        }  # fmt: skip
        run = SparkProcess(options, tmp_path, module="tests.spark.executors_query")

        def got() -> list[str]:
            """Values in the order of batches and files."""
            return [
                value.decode()
                for files in committed_files(tmp_path / "sink").values()
                for file in files
                for value in pq.read_table(file, columns=["value"])["value"].to_pylist()
            ]

        try:
            eventually(lambda: len(got()) >= 400, WAIT_S, "all is committed")
            topic.split(0)
            topic.publish_mixed(200, 10)
            eventually(lambda: len(got()) >= 600, WAIT_S, "the children are committed")
        finally:
            print(run.tail())
            run.stop()
        topic.check(got())
    total = counted(notes)
    assert total["kept"] >= 600
    assert total["served"] == 0
