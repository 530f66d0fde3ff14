"""Metrics and the page of a running query, over HTTP on the driver."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from keyshard.testing.devbroker import DevBroker
from keyshard.testing.devbroker.process import free_port, give_back
from tests.spark.spark_process import SparkProcess, eventually
from tests.spark.spark_topic import SUBSCRIPTION, SparkTopic
from tests.support.deadlines import deadline
from tests.support.scraped import get, samples, serves

pytestmark = [pytest.mark.broker, pytest.mark.spark]


def test_the_log_of_the_driver_names_the_ports_that_0_took(
    dev_broker: DevBroker, topic_name: str, tmp_path: Path
) -> None:
    topic = SparkTopic(dev_broker, topic_name, tmp_path)
    topic.produce(20)
    query = SparkProcess(topic.options(metrics_port="0", ui_port="0"), tmp_path)
    try:
        query.wait_committed(1)
        log = query.log.read_text(errors="replace")
        (metrics,) = re.findall(
            r"metrics\.port is 0: metrics are served on port (\d+)$", log, re.MULTILINE
        )
        (page,) = re.findall(r"ui\.port is 0: the page is served on port (\d+)$", log, re.MULTILINE)
        assert samples(int(metrics))["keyshard_messages_received_total"] == [20]
        (shown,) = get(int(page), "/api/status").json()["sources"]
        assert (shown["name"], shown["kind"]) == (SUBSCRIPTION, "spark")
    finally:
        query.stop()


@pytest.fixture
def ports() -> Iterator[tuple[int, int]]:
    """Two free ports: for metrics, and for the page."""
    metrics = free_port()
    page = free_port({metrics})
    yield metrics, page
    give_back(metrics)
    give_back(page)


def test_a_query_serves_its_metrics_and_its_page_until_it_stops(
    spark: SparkSession,
    dev_broker: DevBroker,
    topic_name: str,
    tmp_path: Path,
    ports: tuple[int, int],
) -> None:
    topic = SparkTopic(dev_broker, topic_name, tmp_path)
    topic.produce(200)
    metrics, page = ports
    rows = topic.rows(spark, metrics_port=str(metrics), ui_port=str(page))
    query = topic.start(rows, trigger={"processingTime": "0 seconds"})
    try:
        eventually(lambda: len(topic.values()) == 200, deadline(120), "all rows seen")

        def acknowledged() -> bool:
            return samples(metrics)["keyshard_entries_acknowledged_total"] == [200]

        eventually(acknowledged, deadline(60), "the last batch acknowledged")
        found = samples(metrics)
        assert found["keyshard_messages_received_total"] == [200]
        assert found["keyshard_ranges"] == [4]

        def looked() -> bool:
            return len(samples(metrics).get("keyshard_partition_backlog_entries", ())) == 3

        eventually(looked, deadline(60), "the backlog of each topic partition")
        for probe in ("/livez", "/readyz"):
            assert get(metrics, probe).text == "ok\n"
        assert "<title>keyshard" in get(page, "/").text
        (shown,) = get(page, "/api/status").json()["sources"]
        assert (shown["name"], shown["kind"]) == (SUBSCRIPTION, "spark")
    finally:
        query.stop()
    eventually(lambda: not (serves(metrics) or serves(page)), deadline(30), "the ports closed")
