"""A Spark Structured Streaming query from Pulsar into parquet files, through keyshard.

    python -m examples.parquet_query --sink out --checkpoint ck \
        --option topic=orders --option subscription=billing --option parallelism=10

Options are those of ``format("keyshard")``; docs/options.md lists them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

import spark_adapter
from keyshard.testing.devbroker import java_home


def session() -> SparkSession:
    """Return a small local session whose Python workers use this interpreter."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ["JAVA_HOME"] = str(java_home())
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.session.timeZone", "UTC")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    spark_adapter.register(spark)
    return spark


def progress_of(query: StreamingQuery) -> Iterator[dict[str, Any]]:
    """Yield the progress of each batch once, until the query ends."""
    shown = -1
    ended: bool | None = False
    while not ended:
        ended = query.awaitTermination(1)
        for progress in query.recentProgress:
            if progress["batchId"] > shown:
                shown = progress["batchId"]
                yield progress


def main() -> None:
    """Run the query until it fails or is stopped; write each progress as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sink", required=True, help="directory of the Parquet files")
    parser.add_argument("--checkpoint", required=True, help="directory of the Spark checkpoint")
    parser.add_argument("--progress", help="file for the progress of the query; default: stdout")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE")
    arguments = parser.parse_args()
    options = dict(option.split("=", 1) for option in arguments.option)

    query = (
        session()
        .readStream.format("keyshard")
        .options(**options)
        .load()
        .writeStream.format("parquet")
        .option("path", arguments.sink)
        .option("checkpointLocation", arguments.checkpoint)
        .start()
    )
    with Path(arguments.progress or "/dev/stdout").open("a", encoding="utf-8") as out:
        shown = None
        while not query.awaitTermination(0.05):  # type: ignore[arg-type]
            progress = query.lastProgress
            if progress is not None and progress["timestamp"] != shown:
                shown = progress["timestamp"]
                status = json.loads(progress["sources"][0]["latestOffset"] or "null") or {}
                out.write(json.dumps({"batch": progress["batchId"], **status}) + "\n")
                out.flush()


if __name__ == "__main__":
    main()
