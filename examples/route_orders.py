"""Orders of one topic, enriched and routed to a topic of each region: Avro in, Avro out, once.

    python -m examples.route_orders --topic orders --into persistent://shop/out/orders \
        --service-url pulsar://127.0.0.1:6650 --subscription route --checkpoint ck

The topic has an AVRO schema with the fields ``region``, ``price`` and ``count``. Topics
``orders-eu``, ``orders-us`` and ``orders-other`` get the same fields, and ``total``. Their schema
is registered with the first rows. The broker has to deduplicate them:
``pulsar-admin namespaces set-deduplication shop/out --enable``.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery

from examples.parquet_query import session

REGIONS = ("eu", "us")
"""Regions with a topic of their own; other orders share one."""


def enriched(orders: DataFrame, into: str) -> DataFrame:
    """Add the total of each order, and the topic that it goes to."""
    region = f.when(f.col("region").isin(*REGIONS), f.col("region")).otherwise("other")
    return orders.select(
        "__key", "region", "price", "count",
        (f.col("price") * f.col("count")).alias("total"),
        f.concat(f.lit(f"{into}-"), region).alias("__topic"),
    )  # fmt: skip


def start(
    spark: SparkSession, read: Mapping[str, str], into: str, checkpoint: str
) -> StreamingQuery:
    """Start the query. It ends when it has routed what is stored."""
    # Rows stay in their Spark partition if a batch is repeated.
    spark.conf.set("spark.sql.adaptive.streaming.stateless.enabled", "false")
    orders = spark.readStream.format("keyshard").options(**read).load()
    return (
        enriched(orders, into)
        .writeStream.format("keyshard")
        .option("service.url", read["service.url"])
        .option("valueFormat", "avro")
        .option("registerSchema", "true")
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the query of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("topic", "into", "service-url", "subscription", "checkpoint"):
        parser.add_argument(f"--{name}", required=True)
    given = parser.parse_args(arguments)
    read = {
        "service.url": given.service_url, "topic": given.topic, "subscription": given.subscription,
        "startingOffsets": "earliest",
    }  # fmt: skip
    start(session(), read, given.into, given.checkpoint).awaitTermination()


if __name__ == "__main__":
    main()
