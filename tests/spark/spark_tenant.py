"""A tenant whose topics are tables of a Spark session."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import httpx
import pulsar
from pyspark.sql import SparkSession

from keyshard.testing.devbroker import DevBroker
from spark_adapter import catalog


class Tenant:
    """A tenant with one namespace, and its sync."""

    def __init__(self, broker: DevBroker, spark: SparkSession, name: str) -> None:
        self.broker, self.spark, self.name = broker, spark, name
        self.database = f"`{name}/default`"
        self.options = {
            "service.url": broker.service_url, "admin.url": broker.admin_url,
            "subscription": "reports", "startingOffsets": "earliest", "parallelism": "2",
        }  # fmt: skip
        (cluster,) = httpx.get(f"{broker.admin_url}/admin/v2/clusters").json()[:1]
        self.put(f"tenants/{name}", {"allowedClusters": [cluster]})
        self.put(
            f"namespaces/{name}/default", {"schema_compatibility_strategy": "ALWAYS_COMPATIBLE"}
        )

    def put(self, path: str, content: Any) -> None:
        httpx.put(f"{self.broker.admin_url}/admin/v2/{path}", json=content).raise_for_status()

    def topic(self, name: str) -> str:
        return f"persistent://{self.name}/default/{name}"

    def send(self, name: str, schema: Any, *values: Any, **output: Any) -> None:
        client = pulsar.Client(
            self.broker.service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
        )
        with closing(client):
            producer = client.create_producer(self.topic(name), schema=schema)
            for value in values:
                producer.send(value, **output)

    def delete(self, name: str) -> None:
        path = f"persistent/{self.name}/default/{name}"
        httpx.delete(f"{self.broker.admin_url}/admin/v2/{path}?force=true").raise_for_status()

    def sync(self, **options: str) -> catalog.Synced:
        return catalog.sync(self.spark, self.name, options=self.options | options)

    def tables(self) -> list[str]:
        # Others of this session have views, such as those of memory sinks.
        shown = self.spark.sql(f"SHOW TABLES IN {self.database}").collect()
        return [row["tableName"] for row in shown if not row["isTemporary"]]
