"""Copies a topic to another one, as a declarative pipeline; see ../spark-pipeline.yml.

The broker has to deduplicate the copies:
``pulsar-admin namespaces set-deduplication public/default --enable``.
"""

from __future__ import annotations

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

spark = SparkSession.active()


def setting(name: str) -> str:
    """Return a setting of ``spark-pipeline.yml``."""
    return str(spark.conf.get(f"orders.{name}"))


dp.create_sink(
    "copies", "keyshard", {"topic": setting("copies"), "service.url": setting("service.url")}
)


@dp.append_flow(target="copies")
def copy_orders() -> DataFrame:
    """Return the rows of the topic, from its beginning."""
    orders = spark.readStream.format("keyshard").option("service.url", setting("service.url"))
    orders = orders.option("topic", setting("topic")).option("subscription", "copy-orders")
    return orders.option("startingOffsets", "earliest").load().select("value", "__key")
