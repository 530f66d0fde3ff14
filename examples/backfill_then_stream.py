"""Read what a topic holds as a batch, then go on as a stream from exactly there.

    python -m examples.backfill_then_stream --sink out --checkpoint ck --subscription billing \
        --option service.url=pulsar://127.0.0.1:6650 --option admin.url=http://127.0.0.1:8080 \
        --option topic=orders

The batch runs in at least ``minPartitions`` tasks, and needs no subscription. The stream starts at
the positions at which the batch ended, so no row is missing and none comes twice. If the program
runs again, the stream continues from its checkpoint. The batch is not read again, because its end
is stored.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pyspark.sql import SparkSession

import spark_adapter
from examples.parquet_query import session


def back_fill(spark: SparkSession, options: dict[str, str], sink: Path) -> str:
    """Write everything up to now, once; return the positions at which the stream starts."""
    positions, history = sink / "positions.json", sink / "history"
    if not positions.exists():
        rows = spark.read.format("keyshard").options(**options).load()
        behind = spark_adapter.positions(rows)
        rows.write.mode("overwrite").parquet(str(history))
        positions.write_text(behind)
    return positions.read_text()


def main() -> None:
    """Run the batch, then the stream, which ends after the messages stored at its start."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sink", required=True, type=Path, help="directory of the Parquet files")
    parser.add_argument("--checkpoint", required=True, help="directory of the Spark checkpoint")
    parser.add_argument("--subscription", required=True, help="subscription of the stream")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE")
    arguments = parser.parse_args()
    options = dict(option.split("=", 1) for option in arguments.option)
    run(session(), options, arguments.subscription, arguments.sink, arguments.checkpoint)


def run(
    spark: SparkSession, options: dict[str, str], subscription: str, sink: Path, checkpoint: str
) -> str:
    """Run the batch and the stream to the end; return the positions that the stream reached."""
    behind = back_fill(spark, options, sink)
    query = (
        spark.readStream.format("keyshard")
        .options(**options, subscription=subscription, startingOffsets=behind)
        .load()
        .writeStream.format("parquet")
        .option("path", str(sink / "live"))
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)  # without this line the stream does not end
        .start()
    )
    query.awaitTermination()
    return spark_adapter.positions(query)


if __name__ == "__main__":
    main()
