"""How many messages each key has in each window of time, once the window is over.

    python -m examples.windowed_counts --window "5 minutes" --delay "10 minutes" --sink out \
        --checkpoint ck --option service.url=pulsar://127.0.0.1:6650 --option topic=clicks \
        --option subscription=counts --option startingOffsets=earliest

The time is the event time that a producer gave; where it gave none, when it published. A window is
written, once, when a message is ``delay`` newer than its end; until then late messages count. What
comes later is left out, and the line of its batch tells of it, by key and window: messages are
summed before that is found out.

A time far in the future makes all that follows late, so clocks that you do not trust need a filter.
A query that catches up reads topic partitions side by side, and their times need not be level:
choose a ``delay`` above what one may be ahead of another.
"""

from __future__ import annotations

import argparse
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery

from examples.parquet_query import progress_of, session


def counts(rows: DataFrame, window: str, delay: str) -> DataFrame:
    """Messages of each key in each window."""
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
    """The query, which goes on for ever, or ends with what is there when it starts."""
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


def told(progress: dict[str, Any]) -> str:
    """One line about a batch."""
    said = f"batch {progress['batchId']}: {progress['numInputRows']} messages"
    for state in progress["stateOperators"]:
        said += (
            f", watermark {progress['eventTime'].get('watermark', '-')}, "
            f"{state['numRowsTotal']} counts open, {state['numRowsDroppedByWatermark']} too late"
        )
    return said


def main() -> None:
    """Run the query until it ends, fails or is stopped; each batch is a line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--window", default="5 minutes", help="length of a window")
    parser.add_argument("--delay", default="10 minutes", help="how late a message may come")
    parser.add_argument("--sink", required=True, help="directory of the parquet files")
    parser.add_argument("--checkpoint", required=True, help="directory of Spark's checkpoint")
    parser.add_argument("--available-now", action="store_true", help="end with what is there now")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE")
    arguments = parser.parse_args()
    query = start(
        session(), dict(option.split("=", 1) for option in arguments.option), arguments.sink,
        arguments.checkpoint, window=arguments.window, delay=arguments.delay,
        available_now=arguments.available_now,
    )  # fmt: skip
    for progress in progress_of(query):
        print(told(progress), flush=True)


if __name__ == "__main__":
    main()
