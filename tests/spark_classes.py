"""An archive of the classes of Spark's JVM: a session that maps them starts in half the time.

A session and three small batches take 3.2 s of processor time with it and 7.2 s without. The
archive belongs to one Java and to the jars of one PySpark: it lies in the virtual environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from keyshard.testing.devbroker import java_home
from keyshard.testing.devbroker.java import class_options
from tests.support.deadlines import deadline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Options of a JVM that does not optimise what ends soon."""
_RECORD_S = deadline(240)
"""Longest time in which the classes are recorded, seconds."""


@cache
def java_options() -> str:
    """Options of the JVM of a session; the first call ever records the archive."""
    home = Path(sys.prefix) / f"spark-{version('pyspark')}"
    return " ".join([QUICK, *class_options(home, java_home(), _record, of="Spark")])


def submit_arguments(options: str) -> str:
    """Return the value for ``PYSPARK_SUBMIT_ARGS``."""
    return (
        f"--conf 'spark.driver.extraJavaOptions={options}' "
        f"--conf 'spark.executor.extraJavaOptions={options}' "
        "--conf spark.python.authenticate.socketTimeout=60s pyspark-shell"
    )


def _record(options: Sequence[str]) -> None:
    """Run a session whose JVM writes the archive of its classes at its end."""
    arguments = submit_arguments(" ".join([QUICK, *options]))
    subprocess.run(
        [sys.executable, "-m", "tests.spark_classes"],
        env=os.environ | {"PYSPARK_SUBMIT_ARGS": arguments},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        timeout=_RECORD_S,
        check=False,
    )


def main() -> None:
    """Use what most tests use: streams of several batches, files, and rows in this process."""
    from examples.parquet_query import session  # noqa: PLC0415 - a JVM starts with it

    spark = session()
    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()
    with tempfile.TemporaryDirectory() as folder:
        written = rows.writeStream.format("parquet").option("path", f"{folder}/rows")

        def look(batch: DataFrame, _: int) -> None:
            batch.collect()

        looked = rows.writeStream.foreachBatch(look)
        for number, writer in enumerate((written, looked)):
            kept = writer.option("checkpointLocation", f"{folder}/{number}")
            query = kept.trigger(processingTime="0 seconds").start()
            while len(query.recentProgress) < 2:
                query.awaitTermination(1)
            query.stop()
        spark.read.parquet(f"{folder}/rows").groupBy("value").count().toArrow()
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    java = gateway.proc
    spark.stop()
    java.stdin.close()
    java.wait(_RECORD_S)


if __name__ == "__main__":
    main()
