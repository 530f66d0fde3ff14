"""Names of scalable topics where keyshard publishes, which it does to persistent topics only.

A broker does not refuse a producer of ``topic://``: it stores the messages beside the segments.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from keyshard import KeyShardSink, KeyShardSource
from keyshard.broker.admin.rest import PulsarAdmin
from keyshard.broker.memory import MemoryCluster
from keyshard.columns.routing import by_topic
from keyshard.config.connection import Connection
from keyshard.config.handlers import HandlerConfig
from keyshard.errors import ConfigError
from keyshard.handlers.output_log import OpenTopics
from keyshard.testing.verify.workloads import Workload, create_partitioned_topic, produce
from tests.support.command_line import run

NAMES = (
    "topic://public/default/t",
    "Topic://public/default/t",
    "  topic://public/default/t ",
    "segment://public/default/t/0000-ffff-0",
    "SEGMENT://public/default/t/0000-ffff-0",
)
NOWHERE = "pulsar://127.0.0.1:1"
REFUSED = "of a scalable topic|a scalable topic, which keyshard consumes and reads"
VALUE = pa.table({"value": pa.array([b"x"])})


def _rows(topic: str) -> Any:
    return by_topic(VALUE.append_column("__topic", pa.array([topic])), "persistent://a/b/c")


def _output(topic: str) -> Any:
    return OpenTopics(KeyShardSink("out"), lambda sink: sink.topic).of(topic)


def _spark(kind: str) -> Callable[[str], Any]:
    def parsed(topic: str) -> Any:
        pytest.importorskip("pyspark")
        from pyspark.sql.types import BinaryType, StructField, StructType  # noqa: PLC0415

        from spark_adapter.pulsar.writing import write_of  # noqa: PLC0415
        from spark_adapter.write_options import parse_write  # noqa: PLC0415

        write = {"keyshard": parse_write, "pulsar": write_of}[kind]
        columns = StructType([StructField("value", BinaryType())])
        return write({"service.url": NOWHERE, "topic": topic}, columns)

    return parsed


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "publish",
    [
        KeyShardSink,
        _rows,
        _output,
        _spark("keyshard"),
        _spark("pulsar"),
        lambda name: HandlerConfig(on_failure="park", dead_letter_topic=name),
        lambda name: produce(Workload(messages=1, keys=1), Connection(NOWHERE), name),
        lambda name: create_partitioned_topic("http://127.0.0.1:1", name, 1),
        lambda name: PulsarAdmin(Connection(admin_url="http://127.0.0.1:1")).create(name, 1),
        MemoryCluster().create_topic,
    ],
    ids=[
        "sink", "rows", "output", "keyshard", "pulsar", "dead letters", "load", "partitions",
        "admin", "memory",
    ],
)  # fmt: skip
def test_no_way_to_publish_takes_a_scalable_topic(publish: Callable[[str], Any], name: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED) as caught:
        publish(name)
    assert caught.value.remedy == "Name a persistent topic."


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "command", [("produce",), ("check", "--live", "--topic"), ("doctor", "--sink")], ids="-".join
)
def test_no_command_that_publishes_takes_a_scalable_topic(
    command: tuple[str, ...], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*command, name, "--service-url", NOWHERE, "--admin-url", "http://127.0.0.1:1"]
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert re.search(f"{REFUSED}|is not the name of a scalable topic", err)


@pytest.mark.parametrize("name", ["TOPIC://a/b/c", "Segment://a/b/c/0000-ffff-0", "segment://a"])
def test_a_source_takes_the_name_as_brokers_write_it(name: str) -> None:
    with pytest.raises(ConfigError, match="is not the name of a scalable topic") as caught:
        KeyShardSource(name, subscription="s")
    assert "topic://tenant/namespace/topic" in caught.value.remedy


def test_a_scalable_topic_has_no_partitions() -> None:
    with pytest.raises(ConfigError, match=r"c-partition-3' ends like a partition"):
        KeyShardSource("topic://a/b/c-partition-3", subscription="s", admin_url="http://h:1")
    for name in ("topic://a/b/c-partition-03", "topic://a/b/c-partition-"):
        source = KeyShardSource(name, subscription="s", admin_url="http://h:1")
        assert source.topics == (name,)
