"""Joins orders with their payments while both topics receive messages; writes each pair once.

    python -m examples.join_topics --orders orders --payments payments --within "1 hour" \
        --subscription paid --sink out --checkpoint ck \
        --option service.url=pulsar://127.0.0.1:6650 --option startingOffsets=earliest

Both topics have a schema (JSON, Avro or Protobuf) whose fields are columns: ``id`` and ``amount``
of orders, ``order_id`` and ``paid`` of payments. A payment comes at or after its order, and at most
``--within`` later. Event times decide that, or publish times if a producer sets no event time.

Each topic is a source with its own subscription, and one checkpoint holds both. A restart continues
both at the end of one batch, with the rows that wait for their match. Watermarks and ``--within``
limit how long a row waits. Spark uses the watermark of the topic that is further behind, so a
silent topic keeps all rows waiting. Rows later than ``--delay`` are dropped.
"""

from __future__ import annotations

import argparse

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery

from examples.parquet_query import progress_of, session


def pairs(orders: DataFrame, payments: DataFrame, within: str, delay: str) -> DataFrame:
    """Join each order with its payments that came in time."""
    time = f.coalesce("__eventTime", "__publishTime")
    left = orders.select("id", "amount", time.alias("ordered_at"))
    right = payments.select("order_id", "paid", time.alias("paid_at"))
    in_time = f"paid_at between ordered_at and ordered_at + interval {within}"
    return (
        left.withWatermark("ordered_at", delay)
        .join(right.withWatermark("paid_at", delay), f.expr(f"id = order_id and {in_time}"))
        .drop("order_id")
    )


def start(
    spark: SparkSession, orders: dict[str, str], payments: dict[str, str], sink: str,
    checkpoint: str, *, within: str = "1 hour", delay: str = "10 minutes",
    available_now: bool = False,
) -> StreamingQuery:  # fmt: skip
    """Start the query, which runs forever or, with ``available_now``, until the backlog is read."""
    left = spark.readStream.format("keyshard").options(**orders).load()
    right = spark.readStream.format("keyshard").options(**payments).load()
    return (
        pairs(left, right, within, delay)
        .writeStream.format("parquet")
        .option("path", sink)
        .option("checkpointLocation", checkpoint)
        .trigger(**({"availableNow": True} if available_now else {"processingTime": "1 second"}))
        .start()
    )


def main() -> None:
    """Run the query until it ends, fails or is stopped; print a line per batch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--orders", required=True, help="topic of the orders")
    parser.add_argument("--payments", required=True, help="topic of the payments")
    parser.add_argument(
        "--within", default="1 hour", help="longest time between an order and its payment"
    )
    parser.add_argument("--delay", default="10 minutes", help="longest delay of a message")
    parser.add_argument("--subscription", required=True, help="subscription on both topics")
    parser.add_argument("--sink", required=True, help="directory of the Parquet files")
    parser.add_argument("--checkpoint", required=True, help="directory of the Spark checkpoint")
    parser.add_argument(
        "--available-now", action="store_true", help="end after the stored messages"
    )
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE")
    arguments = parser.parse_args()
    options = dict(option.split("=", 1) for option in arguments.option)
    options["subscription"] = arguments.subscription
    query = start(
        session(), {**options, "topic": arguments.orders}, {**options, "topic": arguments.payments},
        arguments.sink, arguments.checkpoint, within=arguments.within, delay=arguments.delay,
        available_now=arguments.available_now,
    )  # fmt: skip
    for progress in progress_of(query):
        read = [source["numInputRows"] for source in progress["sources"]]
        wait = [state["numRowsTotal"] for state in progress["stateOperators"]]
        print(
            f"batch {progress['batchId']}: {read} messages of each topic, {wait} wait", flush=True
        )


if __name__ == "__main__":
    main()
