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

import logging
from typing import TYPE_CHECKING

from spark_adapter import pyspark_version

pyspark_version.check(pyspark_version.installed())  # else the next line fails in words of PySpark

from pyspark.errors import AnalysisException  # noqa: E402

from spark_adapter.data_source import KeyShardDataSource  # noqa: E402
from spark_adapter.executors import ExecutorWorkers, start_workers  # noqa: E402
from spark_adapter.options import to_options  # noqa: E402
from spark_adapter.positions import positions  # noqa: E402
from spark_adapter.preflight import check_workers  # noqa: E402
from spark_adapter.pulsar_source import PulsarDataSource  # noqa: E402

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.datasource import DataSource

    from keyshard import KeyShardSource

_log = logging.getLogger(__name__)

__all__ = [
    "ExecutorWorkers", "KeyShardDataSource", "PulsarDataSource", "positions", "read_stream",
    "register", "start_workers",
]  # fmt: skip


def register(spark: SparkSession) -> None:
    """Make ``format("keyshard")`` known to a session, and ``format("pulsar")``.

    The second is the first under the names of the JVM connector; see ``docs/migrating.md``.

    Raises:
        WorkerEnvironmentError: The interpreter of Spark's Python workers lacks keyshard or pyarrow.
    """
    check_workers(spark)
    if not _is_known(spark, KeyShardDataSource):
        spark.dataSource.register(KeyShardDataSource)
    try:
        if not _is_known(spark, PulsarDataSource):
            spark.dataSource.register(PulsarDataSource)
    except AnalysisException as exc:
        if exc.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise
        _log.warning(
            "format('pulsar') stays that of the JVM connector, because its jar is on the class "
            "path; take the jar away to have keyshard under this name."
        )


def _is_known(spark: SparkSession, source: type[DataSource]) -> bool:
    """Whether a session knows a source already; Spark warns if it is registered again."""
    session, jvm = getattr(spark, "_jsparkSession", None), getattr(spark, "_jvm", None)
    if session is None or jvm is None:  # Spark Connect
        return False
    try:
        found = jvm.org.apache.spark.sql.execution.datasources.DataSource.lookupDataSource(
            source.name(), session.sessionState().conf()
        )
    except Exception as exc:  # noqa: BLE001 - of Py4J, or of PySpark for what it knows
        _log.debug("Spark does not find format(%r) by itself: %s", source.name(), exc)
        return False
    return str(found.getName()).endswith(".PythonDataSourceV2")


def read_stream(spark: SparkSession, source: KeyShardSource) -> DataFrame:
    """A streaming DataFrame over ``source``; the same as setting its options one by one.

    Raises:
        WorkerEnvironmentError: See :func:`register`, which this calls.
        ConfigError: The source has a setting that Spark has no option for.
    """
    register(spark)
    return spark.readStream.format("keyshard").options(**to_options(source)).load()
