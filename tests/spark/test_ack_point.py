"""Promise 2: a message is acknowledged only after the checkpoint that contains it is durable."""

from __future__ import annotations

import json
import time
from contextlib import closing
from pathlib import Path

import pytest

from keyshard.broker.admin.rest import PulsarAdmin
from keyshard.core.position.entry import TopicPartition, full_topic_name
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import Workload, create_partitioned_topic, produce
from tests.spark.spark_process import SparkProcess, eventually
from tests.support.deadlines import deadline

pytestmark = [pytest.mark.broker, pytest.mark.spark]

PARTITIONS = 5
IDLE_BACKLOG_S = 2.0
"""Longest time from the last batch's commit to backlog 0, seconds."""


def test_acknowledgements_follow_the_commit_log_and_an_idle_backlog_reaches_zero(
    dev_broker: DevBroker, topic_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_partitioned_topic(dev_broker.admin_url, topic_name, PARTITIONS)
    notes = tmp_path / "notes.jsonl"
    monkeypatch.setenv("KEYSHARD_TEST_NOTES", str(notes))
    options = {
        "service.url": dev_broker.service_url,
        "admin.url": dev_broker.admin_url,
        "topic": topic_name,
        "subscription": "ack-point",
        "startingOffsets": "earliest",
        "maxOffsetsPerTrigger": "3000",
    }
    load = Workload(messages=20_000, keys=100, entry_messages=5)
    produce(load, dev_broker.service_url, topic_name)
    run = SparkProcess(options, tmp_path, module="tests.spark.ack_point_query")
    try:
        with closing(PulsarAdmin(dev_broker.connection)) as admin:
            run.wait_committed(7)
            first = seconds_to_backlog_zero(run, admin, topic_name)
            produce(Workload(messages=200, keys=10), dev_broker.service_url, topic_name)
            seen = run.committed()
            run.wait_committed(seen + 1)
            second = seconds_to_backlog_zero(run, admin, topic_name)
    finally:
        run.stop()
    noted = [json.loads(line) for line in notes.read_text().splitlines()]
    print(
        f"\n{len(noted)} submissions of {sum(note['entries'] for note in noted)} entries; backlog "
        f"0 after {first:.2f} s and {second:.2f} s of idling"
    )
    assert sum(note["entries"] for note in noted) >= load.messages // load.run_messages
    assert sum(note["early"] for note in noted) == 0
    assert max(first, second) <= IDLE_BACKLOG_S


def seconds_to_backlog_zero(run: SparkProcess, admin: PulsarAdmin, topic: str) -> float:
    """Time from the last commit of an idle query until the broker holds nothing for it."""

    def empty() -> bool:
        run.must_run()
        return backlog(admin, topic) == 0

    eventually(empty, deadline(60), f"backlog 0\n{run.tail()}")
    reached = time.time()
    last = max(path.stat().st_mtime for path in (run.checkpoint / "commits").iterdir())
    return reached - last


def backlog(admin: PulsarAdmin, topic: str) -> int:
    """Entries the broker holds for the subscription, over all partitions."""
    name = full_topic_name(topic)
    stats = [admin.subscription(TopicPartition(name, i), "ack-point") for i in range(PARTITIONS)]
    return sum(int(one["msgBacklog"]) if one else 0 for one in stats)
