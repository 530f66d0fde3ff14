"""Handlers in a process of their own, on a real broker: signals, kills, restarts."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from keyshard.core.position.checkpoint import Checkpoint, PartitionCheckpoint
from keyshard.core.position.entry import EntryId, TopicPartition, full_topic_name
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import (
    Workload,
    create_partitioned_topic,
    parse_value,
    produce,
)
from tests.helpers import wait_until
from tests.support.deadlines import DeadlineError, deadline
from tests.support.tested_pulsar import PULSAR

pytestmark = pytest.mark.broker

PARTITIONS = 5
ROOT = Path(__file__).parents[2]
END_S = deadline(120)
NOTHING = PartitionCheckpoint()
"""The state of a topic partition without a checkpoint."""


class Job:
    """The example of handlers, in a process, and its output."""

    def __init__(self, broker: DevBroker, topic: str, folder: Path, *, checkpoint: bool) -> None:
        self._broker, self._topic = broker, topic
        self.out = folder / "out.txt"
        self.checkpoint = folder / "checkpoint.json"
        self._with_checkpoint = checkpoint
        self.errors = folder / "stderr.txt"

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        command = [
            sys.executable, "-m", "examples.handlers", self._topic, "--out", str(self.out),
            "--service-url", self._broker.service_url,
        ]  # fmt: skip
        if self._with_checkpoint:
            command += ["--checkpoint", f"file://{self.checkpoint}"]
        with self.errors.open("ab") as errors:
            process = subprocess.Popen(command, cwd=ROOT, stderr=errors)
        try:
            yield process
        finally:
            process.kill()
            process.wait(END_S)

    def lines(self) -> list[str]:
        return self.out.read_text().splitlines() if self.out.exists() else []

    def handled(self) -> list[tuple[TopicPartition, EntryId, str, int]]:
        """(topic partition, entry, key, sequence number), in the order of the handler."""
        result = []
        for line in self.lines():
            partition, message_id, _, value = line.split(" ", 3)
            ledger, entry, _ = map(int, message_id.split(":"))
            where = TopicPartition(full_topic_name(self._topic), int(partition))
            result.append((where, EntryId(ledger, entry), *parse_value(value.encode())))
        return result

    def finish(self, messages: int) -> None:
        """Run until all messages were handled, and stop in order."""
        with self.running() as process:
            wait_until(
                lambda: sum(map(len, first_times(self.handled()).values())) == messages, END_S
            )
            process.terminate()
            assert process.wait(END_S) == 0, self.errors.read_text()

    def wait_for(self, count: int) -> None:
        """Wait for a number of lines; on failure, show the output of the process."""
        try:
            wait_until(lambda: len(self.lines()) >= count, END_S)
        except DeadlineError as exc:
            raise DeadlineError(f"{len(self.lines())} lines: {self.errors.read_text()}") from exc


@pytest.fixture
def topic(dev_broker: DevBroker, topic_name: str) -> str:
    create_partitioned_topic(dev_broker.admin_url, topic_name, PARTITIONS)
    return topic_name


def first_times(handled: list[tuple[TopicPartition, EntryId, str, int]]) -> dict[str, list[int]]:
    """Sequence numbers per key, in the order in which they were handled first."""
    result: dict[str, list[int]] = {}
    for _, _, key, sequence in handled:
        own = result.setdefault(key, [])
        if sequence not in own:
            own.append(sequence)
    return result


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_so_that_no_message_comes_twice(
    dev_broker: DevBroker, topic: str, tmp_path: Path, number: signal.Signals
) -> None:
    load = Workload(6_000, keys=100)
    sent = produce(load, dev_broker.service_url, topic)
    job = Job(dev_broker, topic, tmp_path, checkpoint=False)
    with job.running() as process:
        job.wait_for(1_000)
        process.send_signal(number)
        assert process.wait(END_S) == 0, job.errors.read_text()
    assert len(job.lines()) < load.messages, "it ended after everything was handled"
    with job.running():
        job.wait_for(load.messages)
    assert first_times(job.handled()) == {key: list(range(n)) for key, n in sent.per_key.items()}
    assert len(job.lines()) == load.messages


def test_no_message_of_the_checkpoint_comes_again_after_a_sigkill(
    dev_broker: DevBroker, topic: str, tmp_path: Path
) -> None:
    load = Workload(10_000, keys=100, entry_messages=2)
    sent = produce(load, dev_broker.service_url, topic)
    job = Job(dev_broker, topic, tmp_path, checkpoint=True)
    with job.running():
        job.wait_for(4_000)
    durable = [(len(job.lines()), Checkpoint.from_json(job.checkpoint.read_text()))]
    job.finish(load.messages)
    judge(job, sent.per_key, durable)


def test_no_message_of_the_checkpoint_comes_again_whichever_process_is_killed(
    topic_name: str, tmp_path: Path
) -> None:
    with DevBroker(PULSAR) as broker:
        create_partitioned_topic(broker.admin_url, topic_name, PARTITIONS)
        load = Workload(30_000, keys=300, entry_messages=2)
        sent = produce(load, broker.service_url, topic_name)
        job = Job(broker, topic_name, tmp_path, checkpoint=True)
        durable: list[tuple[int, Checkpoint]] = []
        for run, count in enumerate((5_000, 12_000, 20_000)):
            with job.running():
                job.wait_for(count)
                if run == 1:
                    broker.kill()
            durable.append((len(job.lines()), Checkpoint.from_json(job.checkpoint.read_text())))
            if run == 1:
                broker.start()
        job.finish(load.messages)
    judge(job, sent.per_key, durable)


def judge(job: Job, sent: dict[str, int], durable: list[tuple[int, Checkpoint]]) -> None:
    """Nothing is lost, nothing of a checkpoint comes again, and each run keeps the order per key.

    Args:
        job: All its runs.
        sent: Messages per key.
        durable: Number of lines, and the checkpoint, after each run that was killed.
    """
    handled = job.handled()
    assert first_times(handled) == {key: list(range(n)) for key, n in sent.items()}
    for lines, checkpoint in durable:
        states = {where: checkpoint.partitions.get(where, NOTHING) for where, *_ in handled}
        again = [one for one in handled[lines:] if states[one[0]].covers(one[1])]
        assert not again, f"{len(again)} messages of the checkpoint were handled again"
    twice = sum(count - 1 for count in Counter(handled).values())
    print(f"{twice} of {sum(sent.values())} messages were handled twice over {len(durable)} kills")
    ends = [0, *(lines for lines, _ in durable), len(handled)]
    for start, end in pairwise(ends):
        per_key: dict[str, int] = {}
        for _, _, key, sequence in handled[start:end]:
            assert per_key.get(key, -1) < sequence, "a key is out of order inside a run"
            per_key[key] = sequence
