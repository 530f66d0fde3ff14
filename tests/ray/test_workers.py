"""Consumers in actors, on a real Ray and a real broker, and refused options."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest
import ray

import ray_adapter
from keyshard import KeyShardSource
from keyshard.config.connection import Connection
from keyshard.config.workers import WorkersOption
from keyshard.coordinator.progress import SourceWorker
from keyshard.errors import ConfigError
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import Workload, create_partitioned_topic, produce
from keyshard.workers.backends import connect_source
from ray_adapter.worker_actors import WorkerActor
from tests.helpers import keyshard_threads, wait_until
from tests.support.deadlines import deadline
from tests.support.stream_rows import StreamRows

MESSAGES = 6_000
PARTITIONS = 2


@pytest.mark.broker
def test_a_killed_actor_neither_loses_nor_repeats_nor_reorders_messages(
    dev_broker: DevBroker, topic_name: str
) -> None:
    create_partitioned_topic(dev_broker.admin_url, topic_name, PARTITIONS)
    load = Workload(messages=MESSAGES, keys=100, rate_per_s=2_000.0)
    before, taken = keyshard_threads(), StreamRows()
    source = KeyShardSource(
        topic_name, subscription="workers", service_url=dev_broker.service_url,
        starting_position="earliest", workers=ray_adapter.workers(2, num_cpus=0.5),
    )  # fmt: skip
    with source.open() as stream:

        def workers() -> list[SourceWorker]:
            return stream.status()["sourceWorkers"]

        first, other = workers()
        assert first["kind"] == "Ray worker"
        assert first["pid"] not in (None, other["pid"], os.getpid())
        assert first["consumers"] == other["consumers"] == 5 * PARTITIONS
        publisher = threading.Thread(
            target=produce, args=(load, dev_broker.service_url, topic_name)
        )
        publisher.start()
        taken.take(stream, MESSAGES // 3)
        assert first["pid"] is not None
        os.kill(first["pid"], signal.SIGKILL)
        taken.take(stream, MESSAGES)
        publisher.join()
        wait_until(lambda: workers()[0]["pid"] not in (None, first["pid"]), deadline(30))
        assert [one["restarts"] for one in workers()] == [1, 0]
    assert taken.rows == MESSAGES
    assert not keyshard_threads() - before


def test_connecting_to_ray_keeps_the_sigterm_handler_of_the_program() -> None:
    """Otherwise the end of a container would end a run in the middle of its handlers."""
    program = (
        "import signal; from ray_adapter.cluster import connect\n"
        "def mine(*_): ...\n"
        "signal.signal(signal.SIGTERM, mine); connect()\n"
        "assert signal.getsignal(signal.SIGTERM) is mine, signal.getsignal(signal.SIGTERM)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, timeout=deadline(60),
        capture_output=True, text=True,
        env=os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_worker_of_another_version_is_refused_by_its_actor() -> None:
    actor = ray.remote(WorkerActor).remote()
    said = ray.get(actor.begin.remote("0.0.9", "", ""))
    ray.kill(actor)
    assert "keyshard is 0.0.9 in the process of the source" in said


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"num_cpus": -1}, "num_cpus of workers is '-1'; it must be a number"),
        ({"num_cpus": "many"}, "num_cpus of workers is 'many'"),
        ({"resources": {"gate": float("nan")}}, "resources.gate of workers is 'nan'"),
        ({"resources": ["gate"]}, "resources is .*; it must be a dict"),
        ({"resources": {"": 1}}, r"the options of Ray workers are 'num_cpus' and 'resources\."),
    ],
)
def test_an_invalid_option_of_ray_workers_is_refused(options: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        ray_adapter.workers(2, **options)  # type: ignore[arg-type]


def test_ray_workers_are_a_text_in_which_unknown_options_are_refused() -> None:
    """Spark takes the same text in its option ``workers``."""
    text = ray_adapter.workers(3, num_cpus=0.5, resources={"a & b": 1})
    assert text == "ray:3?num_cpus=0.5&resources.a+%26+b=1"
    with pytest.raises(ConfigError, match="options of Ray workers are 'num_cpus'"):
        connect_source(Connection("pulsar://nobody"), WorkersOption.parse("ray:2?num_gpus=1"))
