"""Status, watchdog and commands over a real broker."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import pulsar
import pytest

from keyshard import KeyShardSource, Message
from keyshard.control import running_source
from keyshard.core.releases import release_of
from keyshard.errors import NotRunningError
from keyshard.observe.status_types import Status
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import Workload, create_partitioned_topic, produce
from tests.helpers import keys_of, present, wait_until
from tests.support.control_folder import own_control_folder
from tests.support.deadlines import deadline, in_time
from tests.support.memory_topic import Run
from tests.support.paused_range import pause_first_range
from tests.support.tested_pulsar import PULSAR

pytestmark = [pytest.mark.broker]

PARTITIONS, RANGES = 2, 3
SETTINGS = {
    "keySharedLookAheadMsgInReplayThresholdPerConsumer": "100",
    "exposeSubscriptionBacklogAgeInPrometheus": "true",
    "preciseTimeBasedBacklogQuotaCheck": "true",
    "backlogQuotaCheckIntervalInSeconds": "1",
}
LIMITS = release_of(PULSAR).limits.with_settings(SETTINGS)


@pytest.fixture(scope="module")
def broker() -> Iterator[DevBroker]:
    """A broker that these tests kill."""
    with DevBroker(PULSAR, settings=SETTINGS) as started:
        yield started


@pytest.fixture(autouse=True)
def control_folder() -> Iterator[None]:
    with own_control_folder():
        yield


class Job(Run):
    """A source that runs in a thread."""

    end_s = deadline(60)

    def __init__(self, broker: DevBroker, topic: str) -> None:
        create_partitioned_topic(broker.admin_url, topic, PARTITIONS)
        source = KeyShardSource(
            topic, subscription="shown", parallelism=RANGES, starting_position="earliest",
            service_url=broker.service_url, admin_url=broker.admin_url,
        )  # fmt: skip
        self.hold = threading.Event()
        self.hold.set()
        self.handled = 0
        super().__init__(source, self._handle, {"drain_timeout_s": 1, "metrics_port": 0})

    def _handle(self, _message: Message) -> None:
        assert self.hold.wait(deadline(100))
        self.handled += 1

    def status(self) -> Status | None:
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
        return [] if status is None else [dict(each)[name] for each in status["partitions"]]

    def states(self) -> list[str]:
        status = self.status()
        return [] if status is None else [each["state"] for each in status["ranges"]]

    def __enter__(self) -> Job:
        super().__enter__()
        wait_until(self.status)
        return self

    def __exit__(self, *details: object) -> None:
        self.hold.set()
        super().__exit__(*details)


def test_the_status_shows_the_backlog_and_names_an_absent_broker_in_time(
    broker: DevBroker, topic_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Job(broker, topic_name) as job:
        job.hold.clear()
        load = Workload(messages=200, keys=40, batching="none")
        produce(load, broker.service_url, topic_name)
        wait_until(
            lambda: None not in job.partitions("backlog") and sum(job.partitions("backlog")) == 200
        )
        assert job.partitions("replayMax") == [LIMITS.replay(RANGES)] * PARTITIONS
        assert job.partitions("ackGapsMax") == [LIMITS.ack_gaps] * PARTITIONS
        assert job.partitions("covered") == [True] * PARTITIONS

        def held() -> int:
            asked = running_source("shown").ask("status")
            return sum(each["waiting"] + each["inFlight"] for each in asked["ranges"])

        wait_until(lambda: held() == 200)
        job.hold.set()
        wait_until(lambda: sum(job.partitions("backlog")) == 0 and job.handled == 200)
        assert job.states() == ["idle"] * RANGES
        assert job.ready() == 200
        with caplog.at_level(logging.WARNING):
            broker.kill()
            killed = time.monotonic()
            wait_until(lambda: job.states() == ["stalled"] * RANGES)
            wait_until(lambda: "is not connected to" in caplog.text)
        in_time(killed + deadline(10), "the stall was named later")
        assert job.partitions("covered") == [False] * PARTITIONS
        assert job.ready() == 503
        assert "does not answer" in present(job.status())["brokerError"]
        broker.start()
        wait_until(lambda: job.states() == ["idle"] * RANGES, deadline(90))
        wait_until(lambda: job.partitions("covered") == [True] * PARTITIONS)
        wait_until(lambda: present(job.status())["brokerError"] == "")
    assert job.error is None


def test_a_paused_source_receives_nothing_until_it_is_resumed(
    broker: DevBroker, topic_name: str
) -> None:
    def backlog() -> int:
        known = job.source.status()["lag"]["entries"]
        return -1 if known is None else known

    with Job(broker, topic_name) as job:
        produce(Workload(messages=200, keys=40, batching="none"), broker.service_url, topic_name)
        wait_until(lambda: job.handled == 200)
        wait_until(lambda: backlog() == 0)
        job.source.pause()
        produce(Workload(messages=300, keys=40, batching="none"), broker.service_url, topic_name)
        wait_until(lambda: backlog() == 300)
        status = job.source.status()
        assert (status["state"], job.handled) == ("paused", 200)
        assert all(each["covered"] for each in status["partitions"])
        assert job.ready() == 200
        job.source.resume()
        wait_until(lambda: job.handled == 500)
        wait_until(lambda: backlog() == 0)


def publish(broker: DevBroker, topic: str, keys: list[str]) -> None:
    """Publish an entry for each key."""
    client = pulsar.Client(
        broker.service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
    )
    with closing(client):
        producer = client.create_producer(topic, batching_enabled=False, block_if_queue_full=True)
        for key in keys:
            producer.send_async(b"x", None, partition_key=key)
        producer.flush()


def test_the_status_names_a_topic_partition_that_stands_still_because_of_one_range(
    broker: DevBroker, topic_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Job(broker, topic_name) as job:
        pause_first_range(monkeypatch)
        first, second, _ = keys_of(RANGES)
        # The consumer of the first range takes 1,000 before it comes to a stand.
        publish(broker, f"{topic_name}-partition-0", [first] * 2_000 + [second])
        wait_until(lambda: any(job.partitions("stalled")))
        stalled, *others = job.partitions("stalled")
        assert stalled["reason"].startswith("the broker reads no new entries: 300 entries wait")
        assert not any(others)
        assert job.handled == 0
        monkeypatch.undo()
        wait_until(lambda: job.handled == 2_001)
        wait_until(lambda: not any(job.partitions("stalled")))


def test_the_age_of_the_backlog_is_the_one_that_the_broker_measured(
    broker: DevBroker, topic_name: str
) -> None:
    with Job(broker, topic_name) as job:
        job.source.pause()
        produce(Workload(messages=50, keys=40, batching="none"), broker.service_url, topic_name)
        wait_until(lambda: (job.source.status()["lag"]["seconds"] or 0) > 3)
        if not PULSAR.startswith("5."):
            assert job.source.status()["lag"]["brokerSeconds"] is None
            return

        def measured() -> float:
            return job.source.status()["lag"]["brokerSeconds"] or 0

        wait_until(lambda: measured() >= 3)
        # The broker measured it at its last check, so its number is never the greater one.
        assert measured() <= present(job.source.status()["lag"]["seconds"]) + 1
