"""Topics that come, grow and go under a Spark query: nothing missed, nothing twice, none back."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pyarrow.parquet as pq
import pytest

from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.file_sink import committed_files
from keyshard.testing.verify.workloads import (
    Workload,
    create_partitioned_topic,
    parse_value,
    produce,
)
from tests.spark.spark_process import SparkProcess, eventually
from tests.support.deadlines import deadline

pytestmark = [pytest.mark.broker, pytest.mark.spark]

LOAD = Workload(messages=5_000, keys=100, entry_messages=5)
ROUNDS_AFTER_S = 3.0
"""Time that a deleted topic is watched, several rounds of discovery, seconds."""


class Sent:
    """Messages published, each named by topic, key, sequence number and load."""

    def __init__(self, broker: DevBroker) -> None:
        self._broker = broker
        self.rows: Counter[tuple[str, str, int]] = Counter()

    def produce(self, topic: str) -> None:
        report = produce(LOAD, self._broker.service_url, topic)
        for key, count in report.per_key.items():
            self.rows.update((topic, key, seq) for seq in range(count))


def committed_rows(sink: Path) -> Counter[tuple[str, str, int]]:
    """How often each message is in the committed files of the sink."""
    rows: Counter[tuple[str, str, int]] = Counter()
    for files in committed_files(sink).values():
        for path in files:
            table = pq.read_table(path, columns=["__topic", "value"])
            columns = table["__topic"].to_pylist(), table["value"].to_pylist()
            for topic, value in zip(*columns, strict=True):
                key, seq = parse_value(value)
                rows[topic.rpartition("/")[2], key, seq] += 1
    return rows


@pytest.fixture
def api(dev_broker: DevBroker) -> Iterator[httpx.Client]:
    base = f"{dev_broker.admin_url}/admin/v2/persistent/public/default/"
    with httpx.Client(base_url=base, timeout=deadline(20)) as client:
        yield client


def test_rows_come_once_while_topics_come_grow_and_go(
    dev_broker: DevBroker, api: httpx.Client, topic_name: str, tmp_path: Path
) -> None:
    grows, goes, plain, late = (f"{topic_name}-{name}" for name in ("a", "b", "c", "d"))
    create_partitioned_topic(dev_broker.admin_url, grows, 5)
    create_partitioned_topic(dev_broker.admin_url, goes, 3)
    api.put(plain).raise_for_status()
    sent = Sent(dev_broker)
    for topic in (grows, goes, plain):
        sent.produce(topic)
    run = SparkProcess(
        {
            "service.url": dev_broker.service_url,
            "admin.url": dev_broker.admin_url,
            "topicsPattern": f"{topic_name}-.*",
            "subscription": "topics",
            "startingOffsets": "earliest",
            "parallelism": "10",
            "maxOffsetsPerTrigger": "8000",
            "partitionDiscoveryIntervalMillis": "500",
        },
        tmp_path,
    )

    def everything_came(what: str) -> None:
        seen = -1

        def came() -> bool:
            nonlocal seen
            run.must_run()
            if run.committed() == seen:
                return False
            seen = run.committed()
            return committed_rows(run.sink).total() >= sent.rows.total()

        eventually(came, deadline(180), f"{what}\n{run.tail()}")

    def partitions() -> int:
        return int(run.reported()[-1].get("topicPartitions", 0)) if run.reported() else 0

    def names(*topics: str) -> list[str]:
        found = [name.rpartition("/")[2] for name in api.get("").raise_for_status().json()]
        return [name for name in found if name.startswith(topics)]

    try:
        everything_came("the topics of the start")
        create_partitioned_topic(dev_broker.admin_url, late, 4)
        sent.produce(late)
        api.post(f"{grows}/partitions", json=8).raise_for_status()
        sent.produce(grows)
        everything_came("a topic filled before it is found, and the partitions grown to 8")
        eventually(
            lambda: partitions() == 8 + 3 + 1 + 4,
            deadline(30),
            f"16 partitions, not {partitions()}",
        )

        api.delete(f"{goes}/partitions", params={"force": "true"}).raise_for_status()
        api.delete(plain, params={"force": "true"}).raise_for_status()
        began = time.monotonic()
        sent.produce(grows)
        everything_came("the other topics after the deletion")
        eventually(lambda: partitions() == 12, deadline(30), f"12 partitions, not {partitions()}")
        eventually(lambda: not names(goes, plain), deadline(120), f"no {goes} and {plain}")
        stays_deleted_until = time.monotonic() + ROUNDS_AFTER_S
        while time.monotonic() < stays_deleted_until:
            assert not names(goes, plain)
            time.sleep(0.1)
        sent.produce(late)
        everything_came("a load at the end")
        run.must_run()
        print(f"\ndeleted {time.monotonic() - began:.1f} s ago; {run.reported()[-1]}")
    finally:
        run.stop()
    assert committed_rows(run.sink) == sent.rows
