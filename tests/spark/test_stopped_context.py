"""``spark.stop()`` without ``query.stop()``, in a program that goes on, such as a notebook."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import Workload, create_partitioned_topic, produce
from tests.helpers import wait_until
from tests.support.deadlines import deadline
from tests.support.stored_topic import admin_of

pytestmark = pytest.mark.spark

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("stopped_query.py")


def test_ranges_are_given_back_though_the_program_goes_on(
    dev_broker: DevBroker, topic_name: str, tmp_path: Path
) -> None:
    """They were held as long as the program lived, and the next query waited."""
    create_partitioned_topic(dev_broker.admin_url, topic_name, 1)
    produce(Workload(messages=100, keys=10, batching="none"), dev_broker.service_url, topic_name)
    urls = [dev_broker.service_url, dev_broker.admin_url]
    with admin_of(dev_broker) as admin, (tmp_path / "log").open("w") as log:
        program = subprocess.Popen(
            [sys.executable, str(PROGRAM), topic_name, *urls, str(tmp_path / "checkpoint")],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
        stats = f"/persistent/public/default/{topic_name}-partition-0/stats"

        def owners() -> int:
            subscriptions = admin.get(stats).json()["subscriptions"]
            return len(subscriptions.get("stopped", {"consumers": []})["consumers"])

        def step(said: str) -> None:
            assert program.stdout is not None
            found = program.stdout.readline()
            assert found == f"{said}\n", (tmp_path / "log").read_text()[-3_000:]

        try:
            step("started")
            wait_until(lambda: owners() == 2, deadline(60))
            assert program.stdin is not None
            program.stdin.write("\n")
            program.stdin.flush()
            step("stopped")
            wait_until(lambda: owners() == 0, deadline(10))
            assert program.poll() is None
            assert "its SparkContext was stopped" in (tmp_path / "log").read_text()
        finally:
            program.communicate(timeout=deadline(60))
