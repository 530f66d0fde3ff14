"""Spark Connect: reads and writes work; features that need a JVM here are refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import spark_adapter
from keyshard.errors import ConfigError
from keyshard.testing.devbroker import DevBroker
from spark_adapter import catalog
from spark_adapter.adaptive_execution import ADAPTIVE
from tests.spark.spark_process import ROOT
from tests.spark.spark_topic import SparkTopic
from tests.support.deadlines import deadline
from tests.support.stored_topic import admin_of, keeping_namespace, messages_of_topic


class Remote:
    """A DataFrame of Spark Connect as far as it matters: any name is a column."""

    def __getattr__(self, _name: str) -> object:
        return object()


Remote.__module__ = "pyspark.sql.connect.dataframe"


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("positions()", lambda: spark_adapter.positions(Remote())),  # type: ignore[arg-type]
        ("catalog.sync()", lambda: catalog.sync(SESSION, options={})),
        ("start_workers()", lambda: spark_adapter.start_workers(SESSION, 1)),
    ],
)
def test_features_that_need_a_jvm_are_refused_by_name(
    name: str, call: Callable[[], object]
) -> None:
    with pytest.raises(ConfigError, match="Spark Connect") as caught:
        call()
    assert name in caught.value.message


SESSION: Any = SimpleNamespace()
"""One of Spark Connect has neither a context nor a JVM."""


@pytest.mark.spark
@pytest.mark.broker
@pytest.mark.pyspark(4, 2)
@pytest.mark.timeout(300)
def test_a_session_of_spark_connect_reads_and_copies_each_message_once(
    dev_broker: DevBroker, tmp_path: Path
) -> None:
    topic = SparkTopic(dev_broker, "connect", tmp_path, partitions=2)
    topic.produce(5)
    options = {"service.url": dev_broker.service_url, "admin.url": dev_broker.admin_url}
    with admin_of(dev_broker) as admin:
        target = f"persistent://{keeping_namespace(admin, 'connect')}/t"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.spark.connect_query"),
            json.dumps([options | {"topic": topic.name}, target]),
        ],
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=deadline(240),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said.pop("batch") == 5
    assert said.pop("stream") == sorted(topic.sent)
    assert said.pop("ended") is True
    refused, failed, repeated = said.pop("copies")
    assert "Adaptive execution" in refused
    assert f"{ADAPTIVE}=false" in refused
    assert "batch 0, 5 rows, 0 stored before" in failed
    assert repeated == "batch 0, 5 rows, 5 stored before"
    copied = messages_of_topic(dev_broker.service_url, target)
    assert sorted((one.value or b"").decode() for one in copied) == sorted(topic.sent)
    assert all("Spark Connect" in sentence for sentence in said.values()), said
