"""A Spark query in a process of its own, to be killed by tests: keyshard into a parquet sink.

Usage: ``python query.py '{"source": {...}, "sink": "...", "checkpoint": "...", "progress": "..."}'``
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession

from keyshard import KeyShardSource
from keyshard.devbroker import java_home
from spark_adapter import read_stream


def session() -> SparkSession:
    """A small local session on keyshard's Java."""
    os.environ["JAVA_HOME"] = str(java_home())
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", "1g")
        .config("spark.sql.session.timeZone", "UTC")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def main() -> None:
    """Run the query until it ends or is killed; each progress is a line of JSON."""
    run = json.loads(sys.argv[1])
    rows = read_stream(session(), KeyShardSource(**run["source"]))
    query = (
        rows.writeStream.format("parquet")
        .option("path", run["sink"])
        .option("checkpointLocation", run["checkpoint"])
        .start()
    )
    with Path(run["progress"]).open("a", encoding="utf-8") as out:
        shown = None
        while not query.awaitTermination(0.05):
            progress = query.lastProgress
            if progress is not None and progress["timestamp"] != shown:
                shown = progress["timestamp"]
                status = json.loads(progress["sources"][0]["latestOffset"] or "null") or {}
                out.write(json.dumps({"batch": progress["batchId"], **status}) + "\n")
                out.flush()


if __name__ == "__main__":
    main()
