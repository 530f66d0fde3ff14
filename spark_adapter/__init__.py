"""The Spark adapter: streams, batch reads, tables and writes over Pulsar topics.

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
from importlib import import_module
from typing import TYPE_CHECKING, Any

from spark_adapter import preflight

preflight.check_pyspark()  # First, because PySpark's own import errors are less clear.

from spark_adapter.preflight import STREAMS, check_has, check_workers  # noqa: E402

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.datasource import DataSource

    from keyshard import KeyShardSource
    from spark_adapter.data_source import KeyShardDataSource
    from spark_adapter.end_positions import positions
    from spark_adapter.pulsar.source import PulsarDataSource
    from spark_adapter.reports import ReadReports, WriteReports, read_plan
    from spark_adapter.workers.executors import ExecutorWorkers, start_workers
    from spark_adapter.writing import write_batch

_log = logging.getLogger(__name__)

__all__ = [
    "ExecutorWorkers", "KeyShardDataSource", "PulsarDataSource", "ReadReports", "WriteReports",
    "positions", "read_plan", "read_stream", "register", "start_workers", "write_batch",
]  # fmt: skip
_LATER = {
    "ExecutorWorkers": "spark_adapter.workers.executors",
    "KeyShardDataSource": "spark_adapter.data_source",
    "PulsarDataSource": "spark_adapter.pulsar.source",
    "ReadReports": "spark_adapter.reports",
    "WriteReports": "spark_adapter.reports",
    "positions": "spark_adapter.end_positions",
    "read_plan": "spark_adapter.reports",
    "start_workers": "spark_adapter.workers.executors",
    "write_batch": "spark_adapter.writing",
}
"""Modules of names. Their first use imports them, because a task needs few of them."""


def __getattr__(name: str) -> Any:
    """Import a name of :data:`_LATER` at its first use."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    """Return all names of the module, imported or not."""
    return sorted({*globals(), *__all__})


def register(spark: SparkSession) -> None:
    """Register ``format("keyshard")`` and ``format("pulsar")`` in a session.

    ``format("pulsar")`` is the same source with the option names of the JVM connector; see
    ``docs/migrating.md``.

    Raises:
        WorkerEnvironmentError: The interpreter of Spark's Python workers lacks keyshard or pyarrow.
    """
    from spark_adapter.data_source import KeyShardDataSource  # noqa: PLC0415 - see _LATER
    from spark_adapter.pulsar.source import (  # noqa: PLC0415
        PulsarDataSource,
        register_pulsar,
    )

    check_workers(spark)
    if warning := preflight.warning_of_lacking():
        _log.warning("%s", warning)
    if not _is_known(spark, KeyShardDataSource):
        spark.dataSource.register(KeyShardDataSource)
    if not (_is_known(spark, PulsarDataSource) or register_pulsar(spark)):
        _log.warning(
            "The JVM connector keeps format('pulsar'), because its jar is on the class path. To "
            "use keyshard under this name, remove the jar."
        )


def _is_known(spark: SparkSession, source: type[DataSource]) -> bool:
    """Whether the session knows the source. A second registration makes Spark print a warning."""
    session, jvm = getattr(spark, "_jsparkSession", None), getattr(spark, "_jvm", None)
    if session is None or jvm is None:  # Spark Connect has no JVM here to ask.
        return False
    try:
        found = jvm.org.apache.spark.sql.execution.datasources.DataSource.lookupDataSource(
            source.name(), session.sessionState().conf()
        )
    except Exception as exc:  # noqa: BLE001 - Py4J and PySpark raise different classes here
        _log.debug("Spark does not find format(%r) automatically: %s", source.name(), exc)
        return False
    return str(found.getName()).endswith(".PythonDataSourceV2")


def read_stream(spark: SparkSession, source: KeyShardSource) -> DataFrame:
    """Return a streaming DataFrame over ``source``, with the options of :func:`to_options`.

    Raises:
        WorkerEnvironmentError: As in :func:`register`, which this function calls.
        ConfigError: The source has a setting that has no Spark option, or PySpark has no streams.
    """
    from spark_adapter.option_parsing import to_options  # noqa: PLC0415 - see _LATER

    check_has(STREAMS)
    register(spark)
    return spark.readStream.format("keyshard").options(**to_options(source)).load()
