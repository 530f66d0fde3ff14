"""Refusals of a broker, met by ``format("keyshard")`` as a sink: named, and nothing is lost."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from keyshard.broker.wire.broker import WireBroker
from keyshard.core.position.entry import full_topic_name
from keyshard.testing.devbroker import DevBroker
from tests.chaos import pipeline_query
from tests.integration.test_sink_refusals import closed_namespace, request
from tests.spark.spark_process import SparkProcess, eventually
from tests.spark.spark_topic import SparkTopic, ended, failed
from tests.spark.test_topic_writer import by_key, entries
from tests.spark.test_write_batch import stored, target
from tests.support.deadlines import deadline
from tests.support.stored_topic import messages_at
from tests.support.tested_pulsar import PULSAR

__all__ = ["target"]
pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.usefixtures("fixed")]
ROLE = "writer-app"
LARGE = 6 << 20
"""More than a message may have, bytes."""


@pytest.fixture(scope="module")
def broker() -> Iterator[DevBroker]:
    settings = {"brokerDeduplicationEnabled": "true", "backlogQuotaCheckIntervalInSeconds": "1"}
    with DevBroker(PULSAR, tokens=True, settings=settings) as made:
        yield made


def options(broker: DevBroker, topic: str, role: str = "admin", **given: str) -> dict[str, str]:
    """Options of a write by a role."""
    return {
        "service.url": broker.service_url,
        "pulsar.client.authPluginClassName": "token",
        "pulsar.client.authParams": f"token:{broker.signer.token(role)}",
        "topic": topic,
        "pulsar.client.operationTimeoutMs": "3000",
        "sendTimeoutMillis": "3000",
    } | given


def write(frame: DataFrame, given: dict[str, str]) -> None:
    frame.write.format("keyshard").mode("append").options(**given).save()


def copied(spark: SparkSession, folder: Path, given: dict[str, str]) -> StreamingQuery:
    """Start a bounded query that writes the rows of a folder in one batch."""
    rows = spark.readStream.schema("value string, __key string").parquet(str(folder / "rows"))
    writer = rows.writeStream.format("keyshard").options(**given)
    writer = writer.option("checkpointLocation", str(folder / "checkpoint"))
    return writer.trigger(availableNow=True).start()


def keep(folder: Path, values: list[str]) -> None:
    """Store rows with keys ``a`` and ``b`` in turns, as the input of a query."""
    (folder / "rows").mkdir()
    keys = ["ab"[number % 2] for number in range(len(values))]
    table = pa.table({"value": values, "__key": keys})
    parquet.write_table(table, folder / "rows" / "rows.parquet")


def read(broker: DevBroker, topic: str) -> list[tuple[str | None, bytes | None]]:
    """Keys and values that are stored, in their order."""
    with closing(WireBroker(broker.connection)) as opened:
        found = messages_at(opened, opened.partitions(full_topic_name(topic)))
    return [(one.key, one.value) for one in found]


def test_a_role_without_the_permission_is_refused_until_it_has_it(
    spark: SparkSession, broker: DevBroker, topic_name: str
) -> None:
    """The command in the error is enough, and it needs no right to ask for policies."""
    name = f"persistent/public/default/{topic_name}"
    request(broker, "PUT", f"{name}/partitions", 3)
    request(broker, "POST", f"{name}/permissions/{ROLE}", ["consume"])
    rows = spark.sql("select concat('v', id) as value, concat('k', id) as __key from range(20)")
    given = options(broker, topic_name, ROLE, **{"admin.url": broker.admin_url})
    with pytest.raises(AnalysisException, match=r"KEYSHARD_AUTHORIZATION.*'produce'") as caught:
        write(rows, given)
    text = str(caught.value)
    command = re.search(r"grant-permission (\S+) --role (\S+) --actions ([\w,]+)", text)
    assert command is not None
    assert command[2] == ROLE
    path = f"{command[1].replace('://', '/')}/permissions/{ROLE}"
    request(broker, "POST", path, command[3].split(","))
    write(rows, given)
    assert len(read(broker, topic_name)) == 20


def test_a_role_that_may_not_read_is_refused_before_the_first_row(
    spark: SparkSession, broker: DevBroker, topic_name: str
) -> None:
    """Only tasks that start late, or again, look at the end of the topic."""
    name = f"persistent/public/default/{topic_name}"
    request(broker, "PUT", name)
    request(broker, "POST", f"{name}/permissions/{ROLE}", ["produce"])
    rows = spark.sql("select 'v' as value, 'k' as __key")
    with pytest.raises(AnalysisException, match=r"KEYSHARD_AUTHORIZATION.*'consume'"):
        write(rows, options(broker, topic_name, ROLE))
    assert read(broker, topic_name) == []
    write(rows, options(broker, topic_name, ROLE, deliveryGuarantee="at-least-once"))
    assert read(broker, topic_name) == [("k", b"v")]


def test_a_write_to_a_topic_that_is_not_created_automatically_is_refused(
    spark: SparkSession, broker: DevBroker
) -> None:
    namespace = closed_namespace(broker)
    request(broker, "PUT", f"persistent/{namespace}/there")
    there, missing = (f"persistent://{namespace}/{name}" for name in ("there", "missing"))
    rows = spark.sql("select 'v' as value, 'k' as __key")
    with pytest.raises(AnalysisException, match=f"KEYSHARD_TOPIC_NOT_FOUND.*{missing}"):
        write(rows, options(broker, missing))
    routed = spark.sql(
        f"select 'v' as value, if(id < 9, '{there}', '{missing}') as __topic from range(10)"
    ).coalesce(1)
    given = options(broker, "")
    del given["topic"]
    with pytest.raises(PySparkException, match=f"KEYSHARD_TOPIC_NOT_FOUND.*{missing}"):
        write(routed, given)
    assert read(broker, there) == []


def test_a_batch_that_a_quota_holds_back_is_completed_under_a_larger_quota(
    spark: SparkSession, broker: DevBroker, tmp_path: Path
) -> None:
    namespace = "public/full"
    request(broker, "PUT", f"namespaces/{namespace}")
    path = f"persistent/{namespace}/t"
    request(broker, "PUT", path)
    request(broker, "PUT", f"{path}/subscription/s", {"ledgerId": -1, "entryId": -1})
    given = options(broker, f"persistent://{namespace}/t", compression="none")
    write(spark.sql("select repeat('x', 2000) as value, 'x' as __key"), given)
    quota = {"limitSize": 1_000, "policy": "producer_request_hold"}
    request(broker, "POST", f"namespaces/{namespace}/backlogQuota", quota)
    sent = [f"{number}" for number in range(100)]
    keep(tmp_path, sent)

    def refused() -> bool:
        """Whether the quota, which the broker checks from time to time, holds."""
        try:
            write(spark.sql("select 'x' as value, 'x' as __key"), given)
        except PySparkException as exc:
            if "KEYSHARD_QUOTA_EXCEEDED" in str(exc):
                return True
            raise
        return False

    eventually(refused, deadline(90), "the quota holds")
    text = failed(copied(spark, tmp_path, given))
    assert "KEYSHARD_QUOTA_EXCEEDED" in text
    assert f"{namespace}/t" in text
    request(broker, "POST", f"namespaces/{namespace}/backlogQuota", quota | {"limitSize": 1 << 30})
    eventually(lambda: not refused(), deadline(90), "the quota lets rows pass")
    ended(copied(spark, tmp_path, given))
    found = [value for key, value in read(broker, f"persistent://{namespace}/t") if key != "x"]
    assert Counter(found) == Counter(one.encode() for one in sent)


def test_a_row_that_is_too_large_sends_nothing_and_is_stored_once_it_fits(
    spark: SparkSession, dev_broker: DevBroker, target: str, tmp_path: Path
) -> None:
    sent = [*("small" for _ in range(19)), "x" * LARGE]
    keep(tmp_path, sent)
    given = {"service.url": dev_broker.service_url, "topic": target}
    text = failed(copied(spark, tmp_path, given | {"compression": "none"}))
    assert "KEYSHARD_MESSAGE_TOO_LARGE" in text
    assert "'b'" in text, "the key"
    assert stored(dev_broker, target) == {}
    # It fits when it is compressed.
    ended(copied(spark, tmp_path, given | {"compression": "zstd"}))
    assert stored(dev_broker, target) == {"a": sent[::2], "b": sent[1::2]}


def test_a_schema_of_columns_that_the_topic_does_not_admit_is_refused(
    spark: SparkSession, broker: DevBroker, topic_name: str
) -> None:
    """The schema is refused before the first row, and one that the topic admits is registered."""
    request(broker, "PUT", f"persistent/public/default/{topic_name}")
    given = options(broker, topic_name, valueFormat="avro", registerSchema="true")
    write(spark.sql("select 1 as n, named_struct('variant', 'a') as s"), given)
    with pytest.raises(AnalysisException, match=r"'n' has the type string.*takes int32"):
        write(spark.sql("select 'a' as n, named_struct('variant', 'a') as s"), given)
    with pytest.raises(AnalysisException, match="'m' is not a field"):
        write(spark.sql("select 2 as n, 'a' as m, named_struct('variant', 'a') as s"), given)
    assert len(read(broker, topic_name)) == 1


def test_a_task_that_fails_while_the_broker_is_away_is_completed_by_its_retry(
    dev_broker: DevBroker, target: str, tmp_path: Path, topic_name: str
) -> None:
    source = SparkTopic(dev_broker, topic_name, tmp_path, partitions=2)
    source.produce(6_000, keys=20)
    read_options = source.options(maxOffsetsPerTrigger="3000")
    given = {
        "service.url": dev_broker.service_url, "topic": target, "sendTimeoutMillis": "2000",
        "entryMaxMessages": "1", "compression": "none",
    }  # fmt: skip
    run = SparkProcess(
        {"cluster": "local[2,4]", "shuffle": "3", "adaptive": "false"}
        | {f"read.{name}": value for name, value in read_options.items()}
        | {f"write.{name}": value for name, value in given.items()},
        tmp_path, module=pipeline_query.__name__,
    )  # fmt: skip
    try:
        eventually(lambda: entries(dev_broker, target) > 100, deadline(240), "it writes")
        assert dev_broker.pid is not None
        os.kill(dev_broker.pid, signal.SIGSTOP)
        try:
            eventually(lambda: "Lost task" in run.log.read_text(), deadline(60), "a task fails")
        finally:
            os.kill(dev_broker.pid, signal.SIGCONT)
        eventually(lambda: source.backlog() == 0, deadline(240), "all is committed")
        assert "KEYSHARD_BROKER_UNAVAILABLE" in run.log.read_text()
    finally:
        run.stop()
    assert stored(dev_broker, target) == by_key([f"{one}!" for one in source.sent])
