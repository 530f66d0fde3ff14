"""Status, watchdog and commands over a real broker."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

from control_folder import own_control_folder
from helpers import wait_until
from keyshard import KeyShardSource, Message
from keyshard.errors import NotRunningError
from keyshard.observe.control import running_source
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import Workload, create_partitioned_topic, produce

pytestmark = [pytest.mark.broker]

PARTITIONS, RANGES = 2, 3


@pytest.fixture(scope="module")
def broker() -> Iterator[DevBroker]:
    """One that is killed here."""
    with DevBroker() as started:
        yield started


@pytest.fixture(autouse=True)
def control_folder() -> Iterator[None]:
    with own_control_folder():
        yield


class Job:
    """A source that runs in a thread."""

    def __init__(self, broker: DevBroker, topic: str) -> None:
        create_partitioned_topic(broker.admin_url, topic, PARTITIONS)
        self.source = KeyShardSource(
            topic, subscription="shown", parallelism=RANGES, starting_position="earliest",
            service_url=broker.service_url, admin_url=broker.admin_url,
        )  # fmt: skip
        self.hold = threading.Event()
        self.hold.set()
        self.handled = 0
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.source.run(self._handle, drain_timeout_s=1, metrics_port=0)
        except BaseException as exc:  # noqa: BLE001 - told to the test
            self.error = exc

    def _handle(self, _message: Message) -> None:
        assert self.hold.wait(100)
        self.handled += 1

    def status(self) -> dict[str, Any] | None:
        try:
            status = self.source.status()
        except NotRunningError:
            return None
        return status if status["state"] == "running" else None

    def ready(self) -> int:
        port = self.source.__dict__["_running"]._monitor.metrics_port
        return httpx.get(f"http://127.0.0.1:{port}/readyz", trust_env=False).status_code

    def partitions(self, name: str) -> list[Any]:
        status = self.status()
        return [] if status is None else [each[name] for each in status["partitions"]]

    def states(self) -> list[str]:
        status = self.status()
        return [] if status is None else [each["state"] for each in status["ranges"]]

    def __enter__(self) -> Job:
        self.thread.start()
        wait_until(self.status)
        return self

    def __exit__(self, *_: object) -> None:
        self.hold.set()
        with suppress(NotRunningError):
            self.source.stop()
        self.thread.join(60)
        assert not self.thread.is_alive()


def test_it_shows_what_the_broker_holds_and_a_broker_that_is_away_is_named_in_time(
    broker: DevBroker, topic_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Job(broker, topic_name) as job:
        job.hold.clear()
        load = Workload(messages=200, keys=40, batching="none")
        produce(load, broker.service_url, topic_name)
        wait_until(
            lambda: None not in job.partitions("backlog") and sum(job.partitions("backlog")) == 200
        )
        assert job.partitions("replayMax") == [RANGES * 2_000] * PARTITIONS
        assert job.partitions("ackHolesMax") == [10_000] * PARTITIONS
        assert job.partitions("covered") == [True] * PARTITIONS
        asked = running_source("shown").ask("status")
        assert sum(each["waiting"] + each["inFlight"] for each in asked["ranges"]) == 200
        job.hold.set()
        wait_until(lambda: sum(job.partitions("backlog")) == 0 and job.handled == 200)
        assert job.states() == ["idle"] * RANGES
        assert job.ready() == 200
        with caplog.at_level(logging.WARNING):
            broker.kill()
            killed = time.monotonic()
            wait_until(lambda: job.states() == ["stalled"] * RANGES)
            wait_until(lambda: "is not connected to" in caplog.text)
        assert time.monotonic() - killed < 10
        assert job.partitions("covered") == [False] * PARTITIONS
        assert job.ready() == 503
        status = job.status()
        assert status is not None
        assert "does not answer" in status["brokerError"]
        broker.start()
        wait_until(lambda: job.states() == ["idle"] * RANGES, 90)
        wait_until(lambda: job.partitions("covered") == [True] * PARTITIONS)
        status = job.status()
        assert status is not None
        wait_until(lambda: (job.status() or {})["brokerError"] == "")
    assert job.error is None
