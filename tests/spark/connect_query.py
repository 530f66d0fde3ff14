"""A program of Spark Connect over keyshard; prints its results as JSON for its test."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

import spark_adapter
from keyshard.errors import ConfigError
from keyshard.testing.devbroker import java_home
from spark_adapter import catalog
from spark_adapter.adaptive_execution import ADAPTIVE


def refused(call: Callable[[], object]) -> str:
    """Return the error of a call that Spark Connect cannot do."""
    try:
        return f"not refused: {call()!r}"
    except ConfigError as exc:
        return exc.message


def copies(spark: SparkSession, options: Mapping[str, str], target: str) -> list[str]:
    """Copy the topic in ``foreachBatch``, in three runs, and return how each of them ended."""
    broker, folder = options["service.url"], Path("copies")
    folder.mkdir()

    def store(rows: DataFrame, batch_id: int) -> None:  # it runs in a process of the server
        report = spark_adapter.write_batch(
            rows.select("value", "__key"), batch_id, topic=target, sink_id="copy",
            service_url=broker,
        )  # fmt: skip
        # The batch is repeated if it fails after its write.
        said = f"batch {batch_id}, {report.rows} rows, {report.already_stored} stored before"
        if not report.already_stored:
            raise RuntimeError(said)
        folder.joinpath("said").write_text(said)

    folder, found = folder.absolute(), []
    for adaptive in (True, False, False):
        spark.conf.set(ADAPTIVE, str(adaptive).lower())
        rows = spark.readStream.format("keyshard").options(**options, startingOffsets="earliest")
        writer = rows.option("subscription", "copies").load().writeStream.foreachBatch(store)
        writer = writer.option("checkpointLocation", str(folder / "checkpoint"))
        query = writer.trigger(availableNow=True).start()
        try:
            query.awaitTermination(60)
            found.append(folder.joinpath("said").read_text())
        except StreamingQueryException as exc:
            found.append(str(exc))
    return found


def main(options: Mapping[str, str], target: str) -> None:
    """Read a topic in each way, copy it to another one, and ask for what needs a JVM."""
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
        "copies": copies(spark, options, target),
        "positions of a read": refused(lambda: spark_adapter.positions(rows)),
        "positions of a query": refused(lambda: spark_adapter.positions(query)),
        "start_workers": refused(lambda: spark_adapter.start_workers(spark, 1)),
        "sync": refused(lambda: catalog.sync(spark, options={})),
    }
    spark.stop()
    sys.stdout.write(f"\n{json.dumps(said)}\n")


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
