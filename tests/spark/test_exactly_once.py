"""No loss, exactly once and order per key under SIGKILL, into a Spark parquet sink."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import httpx
import pyarrow as pa
import pytest

from keyshard.testing.devbroker import DevBroker, DevCluster
from keyshard.testing.verify.file_sink import SinkCheck, committed_files, message_ids, task_of
from keyshard.testing.verify.workloads import Workload, create_partitioned_topic, produce
from tests.spark.spark_process import SparkProcess, eventually
from tests.support.deadlines import deadline, in_time
from tests.support.tested_pulsar import BROKERS, PULSAR

pytestmark = [
    pytest.mark.broker,
    pytest.mark.spark,
    pytest.mark.timeout(1_800),
    pytest.mark.pyspark(4, 2),
]

SUBSCRIPTION, PARTITIONS = "keyshard-test", 5
LOAD = Workload(messages=200_000, keys=500, size_bytes=100, entry_messages=4)
SMALL_LOAD = Workload(messages=60_000, keys=500, size_bytes=100, entry_messages=4)
ROWS_PER_BATCH = 6_000


class Sent(NamedTuple):
    """Messages of a topic, as they were published."""

    topic: str
    messages: int
    per_key: dict[str, int]


def sent_to(broker: DevBroker | OneOfSeveral, topic: str, load: Workload) -> Sent:
    create_partitioned_topic(broker.admin_url, topic, PARTITIONS)
    done = produce(load, broker.service_url, topic)
    print(f"\nproduced {done.sent} messages in {done.seconds:.1f} s")
    return Sent(topic, load.messages, done.per_key)


def backlog(broker: DevBroker | OneOfSeveral, topic: str) -> int:
    """Entries that the broker still holds for the subscription; -1 while it does not answer."""
    url = f"{broker.admin_url}/admin/v2/persistent/public/default/{topic}/partitioned-stats"
    try:
        stats = httpx.get(url, params={"perPartition": "false"}, timeout=deadline(5)).json()
    except (httpx.TransportError, ValueError):
        return -1
    return int(stats["subscriptions"][SUBSCRIPTION]["msgBacklog"])


@dataclass
class Runs:
    """The runs of one query over one checkpoint."""

    broker: DevBroker | OneOfSeveral
    topic: str
    directory: Path
    all: list[SparkProcess] = field(default_factory=list)

    def start(self, parallelism: int) -> SparkProcess:
        run = SparkProcess(
            {
                "topic": self.topic,
                "subscription": SUBSCRIPTION,
                "service.url": self.broker.service_url,
                "admin.url": self.broker.admin_url,
                "parallelism": str(parallelism),
                "startingOffsets": "earliest",
                "maxOffsetsPerTrigger": str(ROWS_PER_BATCH),
                # Most of the topic stays at the broker, so that every fault meets traffic.
                "windowMaxRows": str(3 * ROWS_PER_BATCH),
                "tasksPerBatch": "10",
            },
            self.directory,
            len(self.all),
        )
        self.all.append(run)
        return run

    def backlog(self) -> int:
        return backlog(self.broker, self.topic)

    def stop(self) -> None:
        for run in self.all:
            run.stop()

    def duplicates_dropped(self) -> list[int]:
        """Redeliveries that each run reported as dropped."""
        return [
            max((status.get("duplicatesDropped", 0) for status in run.reported()), default=0)
            for run in self.all
        ]


def complete_rows(path: Path) -> list[tuple[int, str]] | None:
    """Message ids of a file, or ``None`` if a killed task did not finish it."""
    try:
        return message_ids(path)
    except pa.ArrowException:
        return None


def kill_and_compare_later(
    runs: Runs, run: SparkProcess, victim: str, leftovers: dict[int, set[Path]]
) -> None:
    """SIGKILL the driver or the JVM inside a batch of which some tasks are done."""
    before = run.files()
    batch = run.wait_inside_batch(files_min=4)
    took = run.kill(run.processes()[0] if victim == "driver" else run.jvm())
    assert batch not in run.batches("commits"), "the kill came too late"
    leftovers[batch] = run.files() - before
    print(f"{victim} killed inside batch {batch}; all its processes were gone after {took:.1f} s")


def same_rows_again(sink: Path, batch: int, leftovers: set[Path]) -> int:
    """Compare files of a killed run of a batch with those committed later; return how many."""
    committed = {task_of(path): path for path in committed_files(sink)[batch]}
    compared = 0
    for path in leftovers - set(committed.values()):
        rows = complete_rows(path)
        if rows is not None:
            assert rows == message_ids(committed[task_of(path)]), f"batch {batch}: {path.name}"
            compared += 1
    return compared


class OneOfSeveral(DevCluster):
    """A cluster whose first broker is killed and started again."""

    def kill(self) -> None:
        self.brokers[0].kill()

    def restart(self) -> None:
        self.start()


def test_rows_are_stored_once_in_order_under_kills_of_everything_and_changes_of_n(
    tmp_path: Path,
) -> None:
    broker = OneOfSeveral(BROKERS) if BROKERS > 1 else DevBroker(PULSAR)
    with broker:
        sent = sent_to(broker, "exactly-once", LOAD)
        runs = Runs(broker, sent.topic, tmp_path)
        try:
            leftovers = kill_everything(runs)
            drain(runs, 3)
        finally:
            runs.stop()
        judge(runs, sent, leftovers)
        assert sum(runs.duplicates_dropped()) > 0, "the faults brought nothing back"


def test_rows_are_stored_once_in_order_over_a_broker_kill_and_a_restart(
    dev_broker: DevBroker, topic_name: str, tmp_path: Path
) -> None:
    if BROKERS > 1:
        pytest.skip("the test above kills one of several brokers")
    sent = sent_to(dev_broker, topic_name, SMALL_LOAD)
    runs = Runs(dev_broker, topic_name, tmp_path)
    try:
        run = runs.start(10)
        run.wait_committed(1)
        dev_broker.kill()
        dev_broker.restart()
        run.wait_committed(run.committed() + 1)
        kill_and_compare_later(runs, run, "driver", {})
        drain(runs, 10)
    finally:
        runs.stop()
    judge(runs, sent, {})


def test_rows_are_stored_once_in_order_with_the_recommended_checkpoint_files(
    dev_broker: DevBroker, topic_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = re.search(
        r"(spark\.sql\.streaming\.checkpointFileManagerClass) (org\.\S+)",
        Path("docs/how-to/short-triggers.md").read_text(),
    )
    assert setting is not None
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", f"--conf {setting[1]}={setting[2]} pyspark-shell")
    sent = sent_to(dev_broker, topic_name, SMALL_LOAD)
    runs = Runs(dev_broker, topic_name, tmp_path)
    try:
        for victim in ("driver", "jvm"):
            run = runs.start(10)
            run.wait_committed(run.committed() + 1)
            assert f"{setting[1]}={setting[2]}" in run.jvm().cmdline()
            kill_and_compare_later(runs, run, victim, {})
        drain(runs, 10)
    finally:
        runs.stop()
    judge(runs, sent, {})


def kill_everything(runs: Runs) -> dict[int, set[Path]]:
    """Run with parallelism 10, 10, 10 and 16, and kill each run.

    Returns:
        By batch, the files of each run that was killed before a change of parallelism.
    """
    broker = runs.broker
    leftovers: dict[int, set[Path]] = {}
    run = runs.start(10)
    run.wait_committed(2)
    kill_and_compare_later(runs, run, "driver", {})

    run = runs.start(10)
    run.wait_committed(run.committed() + 2)
    before = runs.backlog()
    eventually(
        lambda: -1 < runs.backlog() < before, deadline(60), "acknowledgements arrive at the broker"
    )
    broker.kill()
    broker.restart()
    run.wait_committed(run.committed() + 3)
    kill_and_compare_later(runs, run, "driver", {})

    # A JVM whose driver died still ends its job and deletes files; one that is killed leaves
    # what its tasks finished.
    run = runs.start(10)
    run.wait_committed(run.committed() + 2)
    kill_and_compare_later(runs, run, "jvm", leftovers)

    run = runs.start(16)
    run.wait_committed(run.committed() + 2)
    kill_and_compare_later(runs, run, "jvm", leftovers)
    return leftovers


def drain(runs: Runs, parallelism: int) -> None:
    """Read up to the end of the topic; how long that takes depends on what else runs."""
    run = runs.start(parallelism)
    if runs.backlog():
        run.wait_committed(run.committed() + 1)  # until here, Spark starts
    left, end_s = -1, 0.0
    while (now := runs.backlog()) != 0:
        if now != left:
            left, end_s = now, time.monotonic() + deadline(120)
        run.must_run()
        in_time(end_s, f"backlog {now}\n{run.tail()}")
        time.sleep(0.1)
    last = run.committed()
    eventually(
        lambda: any(status["batch"] >= last - 1 for status in run.reported()),
        deadline(20),
        "last progress",
    )


def judge(runs: Runs, sent: Sent, leftovers: dict[int, set[Path]]) -> None:
    sink = runs.directory / "sink"
    check = SinkCheck()
    for files in committed_files(sink).values():
        check.add(files, 10)
    dropped = runs.duplicates_dropped()
    compared = {batch: same_rows_again(sink, batch, left) for batch, left in leftovers.items()}
    verdicts = check.verdicts(sent.topic, sent.per_key)
    output = "\n".join(verdict.message for verdict in verdicts.values() if verdict.checked)
    print(
        f"\nrows {check.rows}, batches {len(committed_files(sink))}, redeliveries dropped per run "
        f"{dropped} = {sum(dropped)}, files equal over a change of N {compared}\n{output}"
    )
    assert check.rows == sent.messages
    for promise in ("no loss", "exactly once into the checkpoint", "order per key"):
        assert verdicts[promise].checked >= sent.messages
        assert verdicts[promise].holds, verdicts[promise].message
    assert all(compared.values()), f"no finished task to compare: {compared}"
    assert len(check.rows_of_range) == 10
