"""How many messages each key has in each window of time, once the window is over.

    python -m examples.windowed_counts --window "5 minutes" --delay "10 minutes" --sink out \
        --checkpoint ck --option service.url=pulsar://127.0.0.1:6650 --option topic=clicks \
        --option subscription=counts --option startingOffsets=earliest

The time is the event time, or the publish time if the producer set none. A window is written once,
when a message is ``delay`` newer than the window's end. Until then late messages count. Later
messages are dropped, and the line of their batch reports them, by key and window: Spark sums
messages before it drops them.

A time far in the future makes all following messages late, so filter messages of untrusted clocks.
A query that catches up reads topic partitions side by side, and their times may differ: choose a
``delay`` larger than that difference.
"""

from __future__ import annotations

import argparse
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery

from examples.parquet_query import progress_of, session


def counts(rows: DataFrame, window: str, delay: str) -> DataFrame:
    """Count the messages of each key in each window."""
    return (
        rows.withColumn("at", f.coalesce("__eventTime", "__publishTime"))
        .withWatermark("at", delay)
        .groupBy(f.window("at", window), f.col("__key").alias("key"))
        .count()
        .select("window.start", "window.end", "key", "count")
    )


def start(
    spark: SparkSession, options: dict[str, str], sink: str, checkpoint: str, *,
    window: str, delay: str, available_now: bool = False,
) -> StreamingQuery:  # fmt: skip
    """Start the query, which runs forever or, with ``available_now``, until the backlog is read."""
    rows = spark.readStream.format("keyshard").options(**options).load()
    return (
        counts(rows, window, delay)
        .writeStream.format("parquet")
        .outputMode("append")
        .option("path", sink)
        .option("checkpointLocation", checkpoint)
        .trigger(**({"availableNow": True} if available_now else {"processingTime": "1 second"}))
        .start()
    )


def counts_of(progress: dict[str, Any]) -> str:
    """Return one line about a batch."""
    said = f"batch {progress['batchId']}: {progress['numInputRows']} messages"
    for state in progress["stateOperators"]:
        said += (
            f", watermark {progress['eventTime'].get('watermark', '-')}, {state['numRowsTotal']} "
            f"counts open, {state['numRowsDroppedByWatermark']} too late"
        )
    return said


def main() -> None:
    """Run the query until it ends, fails or is stopped; print a line per batch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--window", default="5 minutes", help="length of a window")
    parser.add_argument("--delay", default="10 minutes", help="longest delay of a message")
    parser.add_argument("--sink", required=True, help="directory of the Parquet files")
    parser.add_argument("--checkpoint", required=True, help="directory of the Spark checkpoint")
    parser.add_argument(
        "--available-now", action="store_true", help="end after the stored messages"
    )
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE")
    arguments = parser.parse_args()
    query = start(
        session(), dict(option.split("=", 1) for option in arguments.option), arguments.sink,
        arguments.checkpoint, window=arguments.window, delay=arguments.delay,
        available_now=arguments.available_now,
    )  # fmt: skip
    for progress in progress_of(query):
        print(counts_of(progress), flush=True)


if __name__ == "__main__":
    main()
