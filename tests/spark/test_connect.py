"""Spark Connect: reads work; features that need the SparkContext's process are refused by name."""

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
from tests.spark.spark_process import ROOT
from tests.spark.spark_topic import SparkTopic
from tests.support.deadlines import deadline


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
@pytest.mark.timeout(300)
def test_a_session_of_spark_connect_reads_batches_and_streams(
    dev_broker: DevBroker, tmp_path: Path
) -> None:
    pytest.importorskip("grpc_status", reason="pyspark[connect] is not installed")
    pytest.importorskip("zstandard", reason="pyspark[connect] is not installed")
    topic = SparkTopic(dev_broker, "connect", tmp_path, partitions=2)
    topic.produce(5)
    options = {"service.url": dev_broker.service_url, "admin.url": dev_broker.admin_url}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.spark.connect_query"),
            json.dumps(options | {"topic": topic.name}),
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
    assert all("Spark Connect" in sentence for sentence in said.values()), said
