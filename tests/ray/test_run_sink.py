"""Results of ``ray_adapter.run`` that are published to a topic."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray

import ray_adapter
from keyshard import KeyShardSink, KeyShardSource, Message, Produce
from keyshard.broker.memory import MemoryBroker
from keyshard.columns.messages import messages_of
from keyshard.core.position.entry import EntryId
from keyshard.errors import ConfigError, HandlerFailedError, MessageTooLargeError
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import Workload, parse_value, produce
from ray_adapter.job import Job
from ray_adapter.job_state import JobResults
from tests.helpers import present, wait_until
from tests.ray.ray_topic import RayTopic
from tests.ray.test_write import named_processes, producers, stored_entries, topic_of
from tests.support.deadlines import deadline, joined
from tests.support.machine import ended_early
from tests.support.stored_topic import admin_of, messages_of_topic

pytestmark = pytest.mark.ray


def copy(message: Message) -> Produce:
    return Produce(message.value, key=message.key)


def copy_and_audit(message: Message) -> Any:
    """Yield a copy, and for each tenth message another one for a second topic."""
    yield Produce(message.value, key=message.key)
    if (message.value or b"").split(b":")[1].endswith(b"0"):
        yield Produce(message.value, key=message.key, topic="audit")


def copy_rows(rows: pa.RecordBatch) -> pa.Table:
    return pa.Table.from_batches([rows]).select(["value", "__key"])


def audit_rows(rows: pa.RecordBatch) -> pa.Table:
    """Copy the rows, and send each tenth of a key to a second topic only."""
    topics = ["audit" if value.split(b":")[1].endswith(b"0") else "copies" for value in
              rows.column("value").to_pylist()]  # fmt: skip
    return copy_rows(rows).append_column("__topic", pa.array(topics))


def no_output(message: Message) -> None:
    return None


def text(message: Message) -> str:
    return "text"


def oversize(message: Message) -> Produce:
    return Produce(os.urandom(6_000_000))


def results(job: Job) -> JobResults:
    return present(job.status()["sink"])


class Copied(RayTopic):
    """A topic, and one to which handlers publish."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.out = self.cluster.create_topic("copies", 2)
        self.sink = KeyShardSink(self.out, service_url=self.url, linger_ms=1)

    def stored(self, topic: str | None = None) -> dict[str | None, list[int]]:
        """Numbers of each key, in their order."""
        broker = MemoryBroker(self.cluster)
        found: dict[str | None, list[int]] = {}
        for where in self.cluster.partitions(topic or self.out):
            reader = broker.reader(where, EntryId(0, 0))
            while not reader.at_end():
                for block in reader.read(0):
                    for one in messages_of(where, block):
                        found.setdefault(one.key, []).append(parse_value(one.value or b"")[1])
        broker.close()
        return found

    def in_order(self) -> dict[str, list[int]]:
        return {key: list(range(count)) for key, count in self.sent.items()}


@pytest.fixture
def copied(tmp_path: Path) -> Copied:
    return Copied(tmp_path)


def drained(job: ray_adapter.Job, copied: Copied) -> list[Any]:
    """Drain a job when nothing is left to acknowledge; its results."""

    def drain() -> None:
        wait_until(lambda: copied.backlog() == 0)
        job.drain()

    draining = threading.Thread(target=drain)
    draining.start()
    results = list(job)
    draining.join()
    return results


@pytest.mark.parametrize(
    ("handle", "takes"), [(copy, "messages"), (copy_and_audit, "messages"), (copy_rows, "arrow")]
)
def test_results_are_stored_in_order_per_key_and_then_acknowledged(
    copied: Copied, handle: Any, takes: Any
) -> None:
    audit = copied.cluster.create_topic("audit")
    copied.publish(keys=20, per_key=30)
    with ray_adapter.run(
        copied.source(), handle, sink=copied.sink, parallelism=2, max_rows=50, takes=takes
    ) as job:
        assert drained(job, copied) == []
        audited = 20 * 3 if handle is copy_and_audit else 0
        assert job.status()["sink"] == {"published": 600 + audited, "confirmed": 600 + audited}
        assert present(job.status()["source"]["outputs"])["guarantee"] == "at least once"
    assert copied.stored() == copied.in_order()
    if audited:
        assert copied.stored(audit) == {f"k{key}": [0, 10, 20] for key in range(20)}


def test_rows_go_to_the_topics_that_they_name(copied: Copied) -> None:
    audit = copied.cluster.create_topic("audit")
    copied.publish(keys=20, per_key=30)
    with ray_adapter.run(
        copied.source(), audit_rows, sink=copied.sink, parallelism=1, takes="arrow"
    ) as job:
        drained(job, copied)
    assert copied.stored(audit) == {f"k{key}": [0, 10, 20] for key in range(20)}
    others = [number for number in range(30) if number % 10]
    assert copied.stored() == {f"k{key}": others for key in range(20)}


def test_messages_without_results_are_acknowledged(copied: Copied) -> None:
    copied.publish(keys=5, per_key=5)
    with ray_adapter.run(copied.source(), no_output, sink=copied.sink, parallelism=1) as job:
        drained(job, copied)
    assert copied.stored() == {}


def test_a_message_whose_result_is_not_confirmed_is_not_acknowledged(copied: Copied) -> None:
    copied.publish(keys=5, per_key=5)
    where = copied.cluster.partitions(copied.out)
    for one in where:
        copied.cluster.hold_writes(one)
    with ray_adapter.run(copied.source(), copy, sink=copied.sink, parallelism=1) as job:
        waiting = threading.Thread(target=job.wait)
        waiting.start()
        # Further results wait until those of the first commit are confirmed.
        wait_until(lambda: results(job)["published"] > 0)
        assert copied.backlog() == 25
        for one in where:
            copied.cluster.release_writes(one)
        wait_until(lambda: copied.backlog() == 0)
        job.stop()
        waiting.join()
    assert copied.stored() == copied.in_order()


def test_a_result_that_cannot_be_stored_ends_the_job_and_is_handled_again(copied: Copied) -> None:
    copied.publish(keys=1, per_key=3)
    with (
        ray_adapter.run(copied.source(), oversize, sink=copied.sink, parallelism=1) as job,
        pytest.raises(MessageTooLargeError),
    ):
        job.wait()
    assert copied.backlog() == 3
    with ray_adapter.run(copied.source(), copy, sink=copied.sink, parallelism=1) as job:
        drained(job, copied)
    assert copied.stored() == copied.in_order()


def test_a_result_that_is_no_message_ends_the_job(copied: Copied) -> None:
    copied.publish(keys=1, per_key=3)
    with (
        ray_adapter.run(copied.source(), text, sink=copied.sink, parallelism=1) as job,
        pytest.raises(HandlerFailedError, match="With a sink, return None"),
    ):
        job.wait()
    assert copied.backlog() == 3


def test_wrong_sinks_are_refused(copied: Copied) -> None:
    run: Any = ray_adapter.run
    with pytest.raises(ConfigError, match="sink is"):
        run(copied.source(), copy, sink="copies")


@pytest.mark.broker
def test_killed_actors_store_every_result_once_in_order_per_key(dev_broker: DevBroker) -> None:
    """An actor that died handles its messages again, but no result of them was published."""
    with admin_of(dev_broker) as admin:
        topic, out = (topic_of(admin, deduplicate=True) for _ in range(2))
        sent = produce(Workload(6_000, keys=60, entry_messages=4), dev_broker.service_url, topic)
        source = KeyShardSource(
            topic, subscription="copier", service_url=dev_broker.service_url, parallelism=4,
            starting_position="earliest",
        )  # fmt: skip
        sink = KeyShardSink(out, service_url=dev_broker.service_url)
        killed = 0
        with ray_adapter.run(source, copy, sink=sink, parallelism=3, max_rows=50) as job:
            waiting = threading.Thread(target=job.wait)
            waiting.start()
            for number in range(1, 5):
                wait_until(
                    lambda number=number: results(job)["confirmed"] >= number * 1_000,  # type: ignore[misc]
                    deadline(60),
                )
                for process in named_processes("HandlerActor")[:2]:
                    process.kill()
                    killed += 1
            wait_until(lambda: results(job)["confirmed"] == 6_000, deadline(90))
            job.drain()
            joined(waiting, deadline(60))
        assert killed >= 4
        found: dict[str | None, list[int]] = {}
        for one in messages_of_topic(dev_broker.service_url, out):
            found.setdefault(one.key, []).append(parse_value(one.value or b"")[1])
        assert found == {key: list(range(count)) for key, count in sent.per_key.items()}
        assert producers(admin, out) == 0


def test_with_a_checkpoint_results_are_stored_once_although_the_program_dies(
    copied: Copied, tmp_path: Path
) -> None:
    """The job ends between the checkpoint and the confirmations, and another continues."""
    copied.cluster.deduplicate(copied.out)
    copied.publish(keys=20, per_key=30)
    where = copied.cluster.partitions(copied.out)
    sink = replace(copied.sink, sink_id="copies", send_timeout_ms=500)
    options: Any = {
        "sink": sink, "checkpoint": tmp_path / "c.json", "parallelism": 2, "max_rows": 50,
    }  # fmt: skip
    with ray_adapter.run(copied.source(), copy, **options) as job:
        waiting = threading.Thread(target=job.wait)
        waiting.start()
        wait_until(lambda: results(job)["confirmed"] >= 100)
        for one in where:
            copied.cluster.hold_writes(one)
        wait_until(
            lambda: (
                results(job)["published"] > results(job)["confirmed"]
                or results(job)["confirmed"] == 600
            )
        )
        job.stop()
        joined(waiting, deadline(60))
    for one in where:
        copied.cluster.release_writes(one)
    before = copied.backlog()
    with ray_adapter.run(copied.source(), copy, **options) as job:
        drained(job, copied)
    assert before > 0
    assert copied.stored() == copied.in_order()
    # Nothing is left of the outputs in the checkpoint.
    assert json.loads((tmp_path / "c.json").read_text())["outputs"]["topics"] == {}


def test_a_job_with_a_checkpoint_needs_a_sink_id(copied: Copied, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a sink_id"):
        ray_adapter.run(copied.source(), copy, sink=copied.sink, checkpoint=tmp_path / "c.json")


DRIVER = """
import sys
import ray
import ray_adapter
from keyshard import Connection, KeyShardSink, KeyShardSource
from tests.ray.test_run_sink import copy

address, url, admin_url, topic, out, checkpoint = sys.argv[1:]
ray.init(address=address, log_to_driver=False)
source = KeyShardSource(
    topic, subscription="copier", service_url=url, parallelism=4, starting_position="earliest"
)
sink = KeyShardSink(out, sink_id="copier", connection=Connection(url, admin_url=admin_url))
options = {"sink": sink, "checkpoint": checkpoint, "parallelism": 2, "max_rows": 20}
with ray_adapter.run(source, copy, **options) as job:
    job.wait()
"""


@pytest.mark.broker
def test_killed_programs_and_actors_store_every_result_once_with_a_checkpoint(
    dev_broker: DevBroker, tmp_path: Path
) -> None:
    messages, kills = 4_000, 2
    address = ray.get_runtime_context().gcs_address
    with admin_of(dev_broker) as admin:
        topic, out = (topic_of(admin, deduplicate=True) for _ in range(2))
        # Entries of several keys, which actors share.
        sent = produce(Workload(messages, keys=80, entry_messages=4), dev_broker.service_url, topic)

        def start() -> subprocess.Popen[str]:
            return subprocess.Popen(
                [sys.executable, "-c", DRIVER, address, dev_broker.service_url,
                 dev_broker.admin_url, topic, out, str(tmp_path / "c.json")],
                cwd=Path(__file__).parents[2], stderr=subprocess.PIPE, text=True,
            )  # fmt: skip

        def reached(driver: subprocess.Popen[str], count: int) -> None:
            wait_until(
                lambda: stored_entries(admin, out) >= count or driver.poll() is not None,
                deadline(120),
            )
            if driver.poll() is not None:
                assert driver.stderr is not None
                raise ended_early(driver.stderr.read())

        for number in range(1, kills + 1):
            with start() as driver:
                reached(driver, number * messages // (kills + 2) // 4)
                for process in named_processes("HandlerActor")[:1]:
                    process.kill()
                reached(driver, (number * messages // (kills + 2) + 200) // 4)
                driver.kill()
        with start() as driver:
            wait_until(
                lambda: (
                    len(messages_of_topic(dev_broker.service_url, out)) >= messages
                    or driver.poll() is not None
                ),
                deadline(120),
            )
            driver.send_signal(signal.SIGTERM)
            assert driver.wait(deadline(60)) == 0
        found: dict[str | None, list[int]] = {}
        for one in messages_of_topic(dev_broker.service_url, out):
            found.setdefault(one.key, []).append(parse_value(one.value or b"")[1])
        assert found == {key: list(range(count)) for key, count in sent.per_key.items()}
        assert producers(admin, out) == 0
