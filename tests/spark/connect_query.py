"""A program of Spark Connect over keyshard; prints its results as JSON for its test."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping

from pyspark.sql import SparkSession

import spark_adapter
from keyshard.errors import ConfigError
from keyshard.testing.devbroker import java_home
from spark_adapter import catalog


def refused(call: Callable[[], object]) -> str:
    """Return the error of a call that Spark Connect cannot do."""
    try:
        return f"not refused: {call()!r}"
    except ConfigError as exc:
        return exc.message


def main(options: Mapping[str, str]) -> None:
    """Read a topic in each way, and ask for what needs a JVM."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["JAVA_HOME"] = str(java_home())
    spark = SparkSession.builder.remote("local[2]").getOrCreate()
    spark_adapter.register(spark)
    rows = spark.read.format("keyshard").options(**options).load()
    query = (
        spark.readStream.format("keyshard")
        .options(**options, subscription="connect", startingOffsets="earliest", parallelism="2")
        .load()
        .selectExpr("cast(value as string) as value")
        .writeStream.format("memory")
        .queryName("seen")
        .trigger(availableNow=True)
        .start()
    )
    ended = query.awaitTermination(60)
    said = {
        "batch": rows.count(),
        "stream": sorted(row["value"] for row in spark.table("seen").collect()),
        "ended": ended,
        "positions of a read": refused(lambda: spark_adapter.positions(rows)),
        "positions of a query": refused(lambda: spark_adapter.positions(query)),
        "start_workers": refused(lambda: spark_adapter.start_workers(spark, 1)),
        "sync": refused(lambda: catalog.sync(spark, options={})),
    }
    spark.stop()
    sys.stdout.write(f"\n{json.dumps(said)}\n")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
