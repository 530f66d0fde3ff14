"""The example of a declarative pipeline of Spark, from topic to topic, on a real broker."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from keyshard import KeyShardSink
from keyshard.testing.devbroker import DevBroker, java_home
from tests.spark.spark_process import ROOT
from tests.support.deadlines import deadline, in_time
from tests.support.stored_topic import admin_of, keeping_namespace, messages_of_topic

EXAMPLE = ROOT / "examples" / "pipeline"
KEYS = 5


class Pipeline:
    """Runs the example with other topics."""

    def __init__(self, folder: Path, broker: DevBroker, namespace: str) -> None:
        self._folder = folder / "pipeline"
        shutil.copytree(EXAMPLE, self._folder)
        spec = yaml.safe_load((EXAMPLE / "spark-pipeline.yml").read_text())
        (folder / "storage").mkdir()
        spec["storage"] = (folder / "storage").as_uri()
        spec["configuration"] |= {
            "orders.service.url": broker.service_url,
            "orders.topic": f"persistent://{namespace}/orders",
            "orders.copies": f"persistent://{namespace}/copies",
        }
        (self._folder / "spark-pipeline.yml").write_text(yaml.safe_dump(spec))
        self.log = folder / "log"

    def start(self) -> subprocess.Popen[bytes]:
        """Start a run, which ends when it has copied what is stored."""
        python = Path(sys.executable)
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [str(python.parent / "spark-pipelines"), "run"],
                cwd=self._folder,
                env=os.environ
                | {
                    "JAVA_HOME": str(java_home()), "PYTHONPATH": str(ROOT),
                    "PYSPARK_PYTHON": str(python), "PYSPARK_DRIVER_PYTHON": str(python),
                },
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def run(self) -> None:
        """Run to the end."""
        run = self.start()
        try:
            assert run.wait(deadline(150)) == 0, self.log.read_text()[-4000:]
        finally:
            kill(run)


def kill(run: subprocess.Popen[bytes]) -> None:
    """Kill the processes of a run."""
    with suppress(ProcessLookupError):
        os.killpg(run.pid, signal.SIGKILL)
    run.wait(deadline(20))


@pytest.mark.spark
@pytest.mark.broker
@pytest.mark.pyspark(4, 2)
@pytest.mark.timeout(600)
def test_a_pipeline_copies_each_message_once_in_order_although_a_run_is_killed(
    dev_broker: DevBroker, tmp_path: Path
) -> None:
    with admin_of(dev_broker) as admin:
        namespace = keeping_namespace(admin, "pipeline")
        for name in ("orders", "copies"):
            path = f"/persistent/{namespace}/{name}/partitions"
            admin.put(path, json=2).raise_for_status()

    def send(first: int, end: int) -> None:
        topic = f"persistent://{namespace}/orders"
        with KeyShardSink(topic, service_url=dev_broker.service_url) as orders:
            for number in range(first, end):
                orders.send(b"%d" % number, key=f"k{number % KEYS}")

    def copied() -> list[tuple[str | None, int]]:
        found = messages_of_topic(dev_broker.service_url, f"persistent://{namespace}/copies")
        return [(one.key, int(one.value or b"")) for one in found]

    pipeline = Pipeline(tmp_path, dev_broker, namespace)
    send(0, 3_000)
    run = pipeline.start()
    end_s = time.monotonic() + deadline(120)
    while not copied():
        assert run.poll() is None, pipeline.log.read_text()[-4000:]
        in_time(end_s, f"nothing was copied:\n{pipeline.log.read_text()[-4000:]}")
        time.sleep(0.1)
    kill(run)
    pipeline.run()
    assert sorted(number for _, number in copied()) == list(range(3_000))
    send(3_000, 4_000)
    pipeline.run()
    found = copied()
    for key in range(KEYS):
        numbers = [number for name, number in found if name == f"k{key}"]
        assert numbers == list(range(key, 4_000, KEYS))
