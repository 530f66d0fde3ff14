"""A query from topic to topic that shuffles, in a process that can be killed.

Options ``read.NAME`` and ``write.NAME`` are those of the source and of the sink.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from pyspark.sql import SparkSession

import spark_adapter
from examples.parquet_query import progress_of
from spark_adapter.adaptive_execution import ADAPTIVE_STREAMS
from tests.spark.spark_process import query_arguments
from tests.support import two_hosts

TWO_HOSTS = "two hosts"
"""The cluster of :mod:`tests.support.two_hosts`, instead of a master."""


def session(options: Mapping[str, str], work: Path) -> SparkSession:
    """A session; speculation needs :data:`TWO_HOSTS`."""
    cluster = options["cluster"]
    settings = {
        "spark.sql.shuffle.partitions": options["shuffle"],
        ADAPTIVE_STREAMS: options["adaptive"],
        # Many attempts run twice at once.
        "spark.speculation": "true",
        "spark.speculation.interval": "50ms",
        "spark.speculation.multiplier": "1.1",
        "spark.speculation.quantile": "0.3",
        "spark.speculation.minTaskRuntime": "10ms",
    }
    if cluster == TWO_HOSTS:
        spark = two_hosts.session(settings, work)
    else:
        two_hosts.prepare()
        built = SparkSession.builder.master(cluster)
        for name, value in (two_hosts.SETTINGS | settings).items():
            built = built.config(name, value)
        spark = built.getOrCreate()
        spark.sparkContext.setLogLevel("WARN")
    spark_adapter.register(spark)
    return spark


def main() -> None:
    """Run the query until it fails; write each progress as a line of JSON."""
    arguments, options = query_arguments()

    def of(prefix: str) -> dict[str, str]:
        return {
            name.removeprefix(prefix): value
            for name, value in options.items()
            if name.startswith(prefix)
        }

    work = Path(arguments.checkpoint).parent / "work"
    spark = session(options, work)
    rows = spark.readStream.format("keyshard").options(**of("read.")).load()
    shuffled = rows.repartition("__key").selectExpr(
        "concat(cast(value as string), '!') as value",
        "__key",
        "cast(split(cast(value as string), ':')[1] as bigint) as n",
    )
    query = (
        shuffled.writeStream.format("keyshard")
        .options(**of("write."))
        .option("orderBy", "n")
        .option("checkpointLocation", arguments.checkpoint)
        .start()
    )
    with Path(arguments.progress).open("a", encoding="utf-8") as out:
        for progress in progress_of(query):
            out.write(json.dumps({"batch": progress["batchId"]}) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
