"""Spark Structured Streaming on keyshard.

Usage::

    import spark_adapter

    spark_adapter.register(spark)
    rows = (
        spark.readStream.format("keyshard")
        .option("service.url", "pulsar://127.0.0.1:6650")
        .option("topic", "orders")
        .option("subscription", "billing")
        .load()
    )
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_adapter import pyspark_version

pyspark_version.check(pyspark_version.installed())  # else the next line fails in words of PySpark

from spark_adapter.data_source import KeyShardDataSource  # noqa: E402
from spark_adapter.executors import ExecutorWorkers, start_workers  # noqa: E402
from spark_adapter.options import to_options  # noqa: E402
from spark_adapter.positions import positions  # noqa: E402
from spark_adapter.preflight import check_workers  # noqa: E402

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from keyshard import KeyShardSource

__all__ = [
    "ExecutorWorkers", "KeyShardDataSource", "positions", "read_stream", "register",
    "start_workers",
]  # fmt: skip


def register(spark: SparkSession) -> None:
    """Make ``format("keyshard")`` known to a session.

    Raises:
        WorkerEnvironmentError: The interpreter of Spark's Python workers lacks keyshard or pyarrow.
    """
    check_workers(spark)
    spark.dataSource.register(KeyShardDataSource)


def read_stream(spark: SparkSession, source: KeyShardSource) -> DataFrame:
    """A streaming DataFrame over ``source``; the same as setting its options one by one.

    Raises:
        WorkerEnvironmentError: See :func:`register`, which this calls.
        ConfigError: The source has a setting that Spark has no option for.
    """
    register(spark)
    return spark.readStream.format("keyshard").options(**to_options(source)).load()
