"""Ranges of a running handler move on a real broker, under load."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import pytest

from keyshard import Message
from keyshard.broker.admin.rest import PulsarAdmin
from keyshard.broker.connect import connect
from keyshard.core.position.entry import TopicPartition, full_topic_name
from keyshard.core.ring.assignment import assign, moved_ranges, reassign
from keyshard.core.ring.hash_range import RING_SIZE, HashRange
from keyshard.core.ring.key_slot import key_slot
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import Workload, create_partitioned_topic, produce
from tests.helpers import wait_until
from tests.support.deadlines import deadline
from tests.support.observed import backlog
from tests.support.recorded_handler import RecordedRun
from tests.support.tested_pulsar import PULSAR

pytestmark = pytest.mark.broker

PARTITIONS = 3
LOAD = Workload(12_000, keys=100, batching="none", rate_per_s=1_500)


def handle(message: Message) -> None:
    time.sleep(0.001)


def test_four_ranges_become_eight_and_three_under_load(
    dev_broker: DevBroker, topic_name: str
) -> None:
    create_partitioned_topic(dev_broker.admin_url, topic_name, PARTITIONS)
    topic = full_topic_name(topic_name)
    run = RecordedRun(
        handle, lambda: connect(dev_broker.connection), topic, {"lanes": 8},
        service_url=dev_broker.service_url, admin_url=dev_broker.admin_url,
    )  # fmt: skip
    try:
        with ThreadPoolExecutor(1) as pool:
            producing = pool.submit(produce, LOAD, dev_broker.service_url, topic_name)
            reports = []
            for count in (8, 3):
                run.more(1_500)
                reports.append(run.rescale(count))
                assert ring(dev_broker, topic) == RING_SIZE
            sent = producing.result(deadline(60))
        wait_until(
            lambda: (
                run.count == sent.sent and backlog(dev_broker, topic, "keyshard", PARTITIONS) == 0
            )
        )
        assert [report.ranges_after for report in reports] == [8, 3]
        assert [report.moved_fraction for report in reports] == [
            report.optimum_fraction for report in reports
        ]
        pauses = [pause.pause_ms for report in reports for pause in report.pauses]
        print(f"pauses, ms: {sorted(pauses)}")
        assert 0 < max(pauses) < 5_000
    finally:
        run.end()
    run.judge(sent.per_key)


def test_a_broker_killed_during_a_rescale_causes_no_loss_and_no_disorder(topic_name: str) -> None:
    load = Workload(4_000, keys=60, batching="none")
    moving = moved_ranges(assign(4), reassign(assign(4), 8))
    gated = next(f"k{n}" for n in range(60) if any(key_slot(f"k{n}") in part for part in moving))
    entered, leave = threading.Event(), threading.Event()

    def wait(message: Message) -> None:
        time.sleep(0.001)
        if message.key == gated and not leave.is_set():
            entered.set()
            leave.wait(deadline(60))

    with DevBroker(PULSAR) as broker:
        create_partitioned_topic(broker.admin_url, topic_name, PARTITIONS)
        topic = full_topic_name(topic_name)
        sent = produce(load, broker.service_url, topic_name)
        connection = replace(broker.connection, operation_timeout_ms=5_000)
        run = RecordedRun(
            wait, lambda: connect(connection), topic,
            {"lanes": 4},
            service_url=broker.service_url, subscribe_timeout_ms=90_000,
        )  # fmt: skip
        try:
            assert entered.wait(deadline(30))
            with ThreadPoolExecutor(1) as pool:
                rescaling = pool.submit(run.rescale, 8)
                broker.kill()
                leave.set()
                broker.start()
                report = rescaling.result(deadline(100))
            assert report.ranges_after == 8
            wait_until(
                lambda: (
                    run.count == sent.sent and backlog(broker, topic, "keyshard", PARTITIONS) == 0
                ),
                deadline(60),
            )
            assert ring(broker, topic) == RING_SIZE
        finally:
            leave.set()
            run.end()
    run.judge(sent.per_key)


def ring(broker: DevBroker, topic: str) -> int:
    """Slots that have a consumer in every topic partition, as the broker says; none has two."""
    covered = RING_SIZE
    with closing(PulsarAdmin(broker.connection)) as admin:
        for partition in range(PARTITIONS):
            stats = admin.subscription(TopicPartition(topic, partition), "keyshard")
            assert stats is not None
            ranges = [
                HashRange(start, end)
                for consumer in stats["consumers"]
                for start, end in consumer["keyHashRangeArrays"]
            ]
            covered = min(covered, sum(map(len, ranges)))
    return covered
