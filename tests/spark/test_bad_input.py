"""Bad input through Spark: a clear error within its deadline, and nothing is acknowledged."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

import spark_adapter
from keyshard.errors import WorkerEnvironmentError
from keyshard.testing.devbroker import DevBroker
from tests.spark.spark_topic import SparkTopic, ended, failed

pytestmark = [pytest.mark.broker, pytest.mark.spark]


@pytest.fixture
def topic(dev_broker: DevBroker, topic_name: str, tmp_path: Path) -> SparkTopic:
    return SparkTopic(dev_broker, topic_name, tmp_path, partitions=2)


@pytest.fixture(autouse=True)
def _no_query_left(spark: SparkSession) -> Iterator[None]:
    yield
    for query in spark.streams.active:
        query.stop()


def unused_port() -> int:
    """A port without a listener."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize("wrong", ["service_url", "admin_url"])
def test_a_broker_that_is_not_there_is_a_clear_error(
    spark: SparkSession, topic: SparkTopic, wrong: str
) -> None:
    # tests/integration/test_unreachable.py measures the deadline, without Spark's start.
    scheme = {"service_url": "pulsar", "admin_url": "http"}[wrong]
    options = {wrong: f"{scheme}://127.0.0.1:{unused_port()}", "operationTimeoutMillis": "2000"}
    try:
        message = failed(topic.start(topic.rows(spark, **options)))
    except AnalysisException as exc:  # who has the schemas is asked when the query is built
        message = str(exc)
    assert "[KEYSHARD_BROKER_UNAVAILABLE]" in message
    assert options[wrong] in message
    shown = message.split("[KEYSHARD_")[-1]
    assert f"Check {wrong.replace('_', '.')}" in shown, "in the words of Spark's options"
    assert "direct cause" not in message, "the sentence ends the traceback"


def test_a_topic_that_does_not_exist_is_not_created(spark: SparkSession, topic: SparkTopic) -> None:
    message = failed(topic.start(topic.rows(spark, topic=f"{topic.name}-typo")))
    assert "[KEYSHARD_TOPIC_NOT_FOUND]" in message
    assert f"{topic.name}-typo" in message
    again = failed(topic.start(topic.rows(spark, topic=f"{topic.name}-typo")))
    assert "[KEYSHARD_TOPIC_NOT_FOUND]" in again, "the first attempt created the topic"


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        ({"parallelism": "0"}, "BAD_OPTION", "parallelism is 0"),
        ({"parallelism": "65537"}, "BAD_OPTION", "parallelism is 65537"),
        ({"parallelism": "ten"}, "BAD_OPTION", "'ten'; it must be an integer"),
        ({"paralelism": "10"}, "BAD_OPTION", "Did you mean 'parallelism'?"),
        ({"topic": "non-persistent://public/default/t"}, "NON_PERSISTENT_TOPIC", "non-persistent"),
        ({"subscription": ""}, "BAD_OPTION", "'subscription' is missing"),
    ],
)
def test_options_are_refused_when_the_query_is_built(
    spark: SparkSession, topic: SparkTopic, options: dict[str, str], code: str, text: str
) -> None:
    with pytest.raises(AnalysisException) as caught:
        topic.rows(spark, **options)
    assert f"[KEYSHARD_{code}]" in str(caught.value)
    assert text in str(caught.value)


def of_version(offset: dict[str, Any]) -> None:
    offset["version"] = 99


def without_a_field(offset: dict[str, Any]) -> None:
    for state in offset["partitions"].values():
        del state["delivered"]


def with_a_bad_run(offset: dict[str, Any]) -> None:
    for state in offset["partitions"].values():
        state["delivered"] = "7:9-3"


def of_another_subscription(offset: dict[str, Any]) -> None:
    offset["subscription"] = "somebody-else"


def of_another_cluster(offset: dict[str, Any]) -> None:
    offset["cluster"] = "moon"


CORRUPT: tuple[tuple[Callable[[dict[str, Any]], None], str, str], ...] = (
    (of_version, "CHECKPOINT_INVALID", "has version 99"),
    (without_a_field, "CHECKPOINT_INVALID", "Field 'delivered' is missing in persistent://"),
    (with_a_bad_run, "CHECKPOINT_INVALID", "'7:9-3' is not an entry set"),
    (of_another_subscription, "CHECKPOINT_MISMATCH", "'somebody-else'"),
    (of_another_cluster, "CHECKPOINT_MISMATCH", "'moon'"),
)


@pytest.mark.parametrize("committed", [True, False])
def test_a_checkpoint_that_is_corrupt_or_of_another_source_is_refused(
    spark: SparkSession, topic: SparkTopic, committed: bool
) -> None:
    topic.produce(20)
    ended(topic.start(topic.rows(spark)))
    assert set(topic.values()) == set(topic.sent)
    topic.produce(20)
    offsets = topic.checkpoint / "offsets"
    # A slow run may be of several batches. The query goes on from the last one.
    last = max(int(path.name) for path in offsets.iterdir() if path.name.isdigit())
    held, original = topic.acknowledged(), topic.offsets(last)
    if not committed:
        topic.seen.pop()
        for name in (str(last), f".{last}.crc"):
            (topic.checkpoint / "commits" / name).unlink()
    lines = (offsets / str(last)).read_text().splitlines()
    for change, code, text in CORRUPT if committed else CORRUPT[1:4:2]:
        (offsets / f".{last}.crc").unlink(missing_ok=True)
        broken = json.loads(json.dumps(original))
        change(broken)
        (offsets / str(last)).write_text("\n".join([*lines[:-1], json.dumps(broken)]))
        message = failed(topic.start(topic.rows(spark)))
        assert f"[KEYSHARD_{code}]" in message, change.__name__
        assert text in message, change.__name__
    assert topic.acknowledged() == held
    (offsets / str(last)).write_text("\n".join(lines))
    ended(topic.start(topic.rows(spark)))
    assert topic.values() == dict.fromkeys(topic.sent, 1)
    assert topic.backlog() == 0


def test_a_chunked_message_is_refused_and_nothing_of_it_is_acknowledged(
    spark: SparkSession, topic: SparkTopic
) -> None:
    with closing(topic.client()) as client:
        producer = client.create_producer(
            topic.name, batching_enabled=False, chunking_enabled=True, send_timeout_millis=30_000
        )
        sent = producer.send(b"x" * (6 * 1024 * 1024), partition_key="big")
    chunks = topic.entries()
    assert chunks > 1, f"{sent} is not chunked"
    message = failed(topic.start(topic.rows(spark)))
    assert "[KEYSHARD_CHUNKED_MESSAGE]" in message
    assert "maxMessageSize" in message
    assert topic.backlog() == chunks


def test_an_interpreter_without_pyarrow_is_a_clear_error(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(python))
    with pytest.raises(WorkerEnvironmentError) as caught:
        spark_adapter.register(spark)
    assert str(caught.value).startswith("[KEYSHARD_WORKER_ENVIRONMENT] PYSPARK_PYTHON is")
    assert str(python) in str(caught.value)
    assert "pyarrow" in str(caught.value.facts["missing"])
