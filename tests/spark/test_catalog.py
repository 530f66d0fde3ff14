"""Topics as tables, and the source that Spark finds by itself."""

from __future__ import annotations

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from pulsar.schema import AvroSchema, Bytes, BytesSchema, Integer, JsonSchema, Record, String
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

import spark_adapter
from keyshard.errors import BrokerUnavailableError, ConfigError
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import create_partitioned_topic
from spark_adapter import catalog
from spark_adapter.preflight import is_before
from tests.spark.spark_process import eventually
from tests.spark.spark_tenant import Tenant
from tests.spark.spark_topic import SparkTopic, ended
from tests.support.deadlines import deadline

pytestmark = [pytest.mark.spark, pytest.mark.broker]
NOTHING = catalog.Synced()


class Order(Record):  # type: ignore[misc]
    item = String()
    count = Integer()


class Kept(Record):  # type: ignore[misc]
    value = Bytes()


class LaterOrder(Record):  # type: ignore[misc]
    item = String()
    count = Integer()
    note = String()


@pytest.mark.pyspark(4, 2)
def test_a_session_without_configuration_finds_the_source(
    spark: SparkSession, dev_broker: DevBroker, tmp_path: Path
) -> None:
    topic = SparkTopic(dev_broker, "catalog-found", tmp_path, partitions=1)
    topic.produce(3)
    clean = spark.newSession()
    options = {"service.url": dev_broker.service_url, "admin.url": dev_broker.admin_url}
    options["topic"] = topic.name
    assert clean.read.format("keyshard").options(**options).load().count() == 3
    assert "__messageProperties" in clean.read.format("pulsar").options(**options).load().columns
    registered = type(clean.dataSource)
    with pytest.MonkeyPatch.context() as patch:  # Spark warns of a source that it knows
        patch.setattr(registered, "register", lambda *_: pytest.fail("it is registered again"))
        spark_adapter.register(clean)  # programs may register a source that Spark has found
    assert clean.read.format("keyshard").options(**options).load().count() == 3


def test_an_insert_into_a_table_is_refused_by_name(tenant: Tenant) -> None:
    tenant.send("orders", JsonSchema(Order), Order(item="i", count=1), partition_key="k")
    tenant.sync()
    table = f"{tenant.database}.orders"
    refusal = "INSERT INTO a table of keyshard is not supp"
    if is_before(4, 1):  # Spark 4.0 compares the columns first
        refusal += "|INCOMPATIBLE_DATA_FOR_TABLE"
    for statement in (
        f"insert into {table} select * from {table}",
        f"insert into {table} (item, count) values ('x', 2)",
    ):
        with pytest.raises(AnalysisException, match=refusal):
            tenant.spark.sql(statement)
    assert tenant.spark.table(table).count() == 1


@pytest.mark.pyspark(4, 2)
def test_topics_are_tables_of_batch_reads_and_of_streams(tenant: Tenant, tmp_path: Path) -> None:
    spark, database = tenant.spark, tenant.database
    create_partitioned_topic(tenant.broker.admin_url, tenant.topic("orders"), 2)
    for number in range(4):
        order = Order(item=f"i{number}", count=number)
        tenant.send("orders", JsonSchema(Order), order, partition_key=f"k{number}")
    tenant.send("Odd-name.v1", BytesSchema(), b"bytes")
    tenant.send("__system", BytesSchema(), b"not for users")

    assert tenant.sync() == catalog.Synced((f"{database}.`odd-name.v1`", f"{database}.`orders`"))
    assert tenant.sync() == NOTHING, "there was nothing to do"
    assert tenant.tables() == ["odd-name.v1", "orders"]
    rows = spark.sql(f"SELECT item, count, __key FROM {database}.Orders ORDER BY count").collect()
    assert [tuple(row) for row in rows] == [(f"i{n}", n, f"k{n}") for n in range(4)]
    assert [row["value"] for row in spark.table(f"{database}.`Odd-name.v1`").collect()] == [
        b"bytes"
    ]
    # What a query says comes before what the table says.
    assert spark.read.option("EndingOffsets", "earliest").table(f"{database}.orders").count() == 0

    seen: list[Any] = []
    query = (
        spark.readStream.option("subscription", "mine")
        .table(f"{database}.orders")
        .select("item", "__key")
        .writeStream.foreachBatch(lambda batch, _: seen.extend(map(tuple, batch.collect())))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    ended(query)
    assert sorted(seen) == [(f"i{n}", f"k{n}") for n in range(4)]
    assert "orders-partition-1" in spark_adapter.positions(query)
    stats = f"{tenant.broker.admin_url}/admin/v2/{tenant.topic('orders').replace('://', '/')}"
    found = httpx.get(f"{stats}-partition-0/stats").json()["subscriptions"]
    assert list(found) == ["mine"]


@pytest.mark.pyspark(4, 2)
def test_a_field_value_of_bytes_is_a_column_of_a_table_and_of_its_streams(
    tenant: Tenant, tmp_path: Path
) -> None:
    tenant.send("kept", AvroSchema(Kept), Kept(value=b"\0abc"))
    tenant.sync()
    name = f"{tenant.database}.kept"
    assert [row["value"] for row in tenant.spark.table(name).collect()] == [b"\0abc"]
    seen: list[Any] = []
    query = (
        tenant.spark.readStream.table(name)
        .writeStream.foreachBatch(lambda batch, _: seen.extend(batch.collect()))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    ended(query)
    assert [row["value"] for row in seen] == [b"\0abc"]
    own = {"topic": tenant.topic("kept"), **tenant.options}
    own = {name: text for name, text in own.items() if name.endswith("url") or name == "topic"}
    for form in ("keyshard", "pulsar"):
        rows = tenant.spark.read.format(form).options(**own).schema("value binary").load()
        assert [row["value"] for row in rows.collect()] == [b"\0abc"]


@pytest.mark.pyspark(4, 2)
def test_a_table_is_read_from_bookies_and_with_an_index_if_its_options_say_so(
    tenant: Tenant, tmp_path: Path
) -> None:
    url = f"{tenant.broker.admin_url}/admin/v2"
    kept = {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}
    httpx.post(f"{url}/namespaces/{tenant.name}/default/retention", json=kept).raise_for_status()
    for number in range(3):
        values = [b"%d" % one for one in range(10 * number, 10 * number + 10)]
        tenant.send("events", BytesSchema(), *values, partition_key=f"k{number}")
        tenant.put(f"persistent/{tenant.name}/default/events/unload", None)
    tenant.sync(**{
        "segments": "bookies", "bookies.map": json.dumps(tenant.broker.bookies_map),
        "ledgerIndex": str(tmp_path / "index"),
    })  # fmt: skip
    table = f"{tenant.database}.events"

    def read(**own: str) -> tuple[set[int], spark_adapter.ReadReport]:
        reports = spark_adapter.ReadReports(tenant.spark)
        rows = tenant.spark.read.options(readReports=str(reports.id), **own).table(table)
        found = {int(row["value"]) for row in rows.collect()}
        assert reports.total == spark_adapter.read_plan(rows)
        return found, reports.total

    found, report = read()
    assert found == set(range(30))
    assert (report.by_bookies, report.by_broker, report.skipped) == (30, 0, 0)
    found, report = read(keys='["k1"]', segments="auto")
    assert found == set(range(10, 20))
    assert (report.by_bookies, report.by_broker, report.skipped) == (10, 0, 20)

    seen: list[Any] = []
    query = (
        tenant.spark.readStream.table(table)
        .writeStream.foreachBatch(lambda batch, _: seen.extend(batch.collect()))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    ended(query)
    assert len(seen) == 30, "a stream takes no notice of them"


def test_tables_follow_their_topics_and_no_other_table_changes(tenant: Tenant) -> None:
    spark, database = tenant.spark, tenant.database
    tenant.send("orders", JsonSchema(Order), Order(item="a", count=1))
    tenant.send("short-lived", BytesSchema(), b"x")
    for name in ("Twice", "TWICE", "thrice", "Thrice", "a name"):
        tenant.send(name, BytesSchema(), name.encode())
    definition = '{"type":"record","name":"R","fields":[{"name":"a","type":"int"}]}'
    url = f"{tenant.broker.admin_url}/admin/v2/schemas/{tenant.name}/default/made/schema"
    tenant.send("made", BytesSchema())
    body = {"type": "PROTOBUF", "schema": definition, "properties": {}}
    httpx.post(url, json=body).raise_for_status()

    first = tenant.sync()
    assert tenant.tables() == ["made", "orders", "short-lived", "thrice"]
    assert list(first.raw) == [f"{database}.`made`"]
    assert "descriptor" in first.raw[f"{database}.`made`"]
    assert spark.table(f"{database}.made").schema["value"].dataType.typeName() == "binary"
    assert sorted(first.left) == ["TWICE", "Thrice", "Twice", tenant.topic("a name")]
    assert [row["value"] for row in spark.table(f"{database}.thrice").collect()] == [b"thrice"]

    spark.sql(f"CREATE TABLE {database}.mine (a int) USING parquet")
    spark.sql(f"CREATE TABLE {database}.later (a int) USING parquet")
    tenant.delete("short-lived")
    tenant.send("later", BytesSchema(), b"x")
    tenant.send("newcomer", BytesSchema(), b"x")
    tenant.send("orders", JsonSchema(LaterOrder), LaterOrder(item="b", count=2, note="n"))
    second = tenant.sync()
    assert second.created == (f"{database}.`newcomer`",)
    assert second.changed == (f"{database}.`orders`",)
    assert second.dropped == (f"{database}.`short-lived`",)
    assert f"{database}.`later`" in second.left
    assert tenant.tables() == ["later", "made", "mine", "newcomer", "orders", "thrice"]
    rows = spark.sql(f"SELECT item, note FROM {database}.orders ORDER BY item").collect()
    assert [tuple(row) for row in rows] == [("a", None), ("b", "n")]

    other = dataclasses.replace(second, created=(), changed=(), dropped=())
    assert tenant.sync(**{"service.url": "pulsar://localhost:1"}).created == ()
    with pytest.raises(BrokerUnavailableError, match="does not answer"):
        tenant.sync(**{"admin.url": "http://127.0.0.1:1", "operationTimeoutMillis": "1000"})
    with pytest.raises(Exception, match=r"no-such-tenant.*(status 404|404)"):
        catalog.sync(spark, [tenant.name, "no-such-tenant"], options=tenant.options)
    assert tenant.sync() == other, "nothing was concluded from what did not answer"

    for name in (
        "orders",
        "made",
        "later",
        "newcomer",
        "thrice",
        "Twice",
        "TWICE",
        "Thrice",
        "a name",
    ):
        tenant.delete(name)
    url = f"{tenant.broker.admin_url}/admin/v2/namespaces/{tenant.name}/default"
    eventually(lambda: httpx.delete(url).is_success, deadline(60), "the namespace is gone")
    gone = tenant.sync()
    assert len(gone.dropped) == 4
    assert tenant.tables() == ["later", "mine"], "the database has tables of somebody else"


def test_syncs_at_the_same_time_run_one_after_the_other(tenant: Tenant) -> None:
    for name in ("one", "two", "three"):
        tenant.send(name, BytesSchema(), b"x")
    with ThreadPoolExecutor(3) as pool:
        found = [one.result() for one in [pool.submit(tenant.sync) for _ in range(3)]]
    assert sorted(len(one.created) for one in found) == [0, 0, 3]


def test_impossible_values_are_refused(spark: SparkSession, tenant: Tenant) -> None:
    for wrong, why in (
        ({"topic": "orders"}, "each table has its own topic"),
        ({"admin.url": ""}, "admin.url"),
        ({"owner": "me"}, "'owner' is unknown"),
        ({"pushFilters": "true"}, "'pushFilters' is not supported for tables"),
        (
            {"pulsar.client.authPluginClassName": "token", "pulsar.client.authParams": "token:abc"},
            "contains a secret",
        ),
    ):
        options = {name: text for name, text in (tenant.options | wrong).items() if text}
        with pytest.raises(ConfigError, match=why):
            catalog.sync(spark, tenant.name, options=options)
    for names in (["public"], ["a/b/c"], ["/x"]):
        with pytest.raises(ConfigError, match="tenant/namespace"):
            catalog.sync(spark, namespaces=names, options=tenant.options)
    with pytest.raises(AnalysisException, match=r"spark_adapter\.catalog\.sync"):
        spark.sql("CREATE TABLE by_hand USING keyshard OPTIONS (topic = 'orders')")
