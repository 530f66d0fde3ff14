"""Refuses adaptive execution where it may divide a repeated batch in another way.

Adaptive execution merges and splits the Spark partitions of a shuffle, by the sizes that it
measures and by the number of cores. A repeated batch may get other partitions, so its rows would
have other producer names, and would be lost or stored twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keyshard.errors import ConfigError

if TYPE_CHECKING:
    from pyspark import TaskContext
    from pyspark.sql import DataFrame

ADAPTIVE = "spark.sql.adaptive.enabled"
ADAPTIVE_STREAMS = "spark.sql.adaptive.streaming.stateless.enabled"
"""Setting that lets adaptive execution change the Spark partitions of a stream; on by default."""
_DANGER = (
    "Adaptive execution may divide the rows of a repeated batch in another way, so that rows are "
    "lost or stored twice."
)


def check_task(context: TaskContext) -> None:
    """Refuse a stream whose batch may have other Spark partitions when it is repeated.

    Spark tells tasks only the settings that a session sets. A task cannot see whether its rows
    were shuffled.

    Raises:
        ConfigError: The session of the query allows adaptive execution.
    """
    if (context.getLocalProperty(ADAPTIVE_STREAMS) or "").lower() != "false":
        raise ConfigError(
            f"{_DANGER} Set {ADAPTIVE_STREAMS}=false in the session before the query starts."
        )


def check_rows(rows: DataFrame, *, in_stream: bool) -> None:
    """Refuse rows whose Spark partitions adaptive execution may change.

    Args:
        rows: The rows, not executed yet.
        in_stream: Whether they are of a batch of a streaming query.

    Raises:
        ConfigError: It may: the rows were shuffled. With Spark Connect, the plan is not known here.
    """
    settings = rows.sparkSession.conf
    if settings.get(ADAPTIVE) != "true":
        return
    if is_remote(rows):
        why = "Spark Connect does not tell whether it may."
    else:
        is_fixed = in_stream and settings.get(ADAPTIVE_STREAMS, "true") == "false"
        if not may_change(rows._jdf.queryExecution().executedPlan(), is_fixed=is_fixed):
            return
        why = "Repartition the rows by key to a fixed number, such as rows.repartition(8, '__key')."
    raise ConfigError(
        f"{_DANGER} {why} Or set {ADAPTIVE}=false in the session, before a query starts."
    )


def is_remote(rows: DataFrame) -> bool:
    """Return whether rows are of Spark Connect, so that their plan is at the server."""
    return type(rows).__module__.startswith("pyspark.sql.connect")


def may_change(plan: Any, *, is_fixed: bool, adaptive: bool = False) -> bool:
    """Return whether adaptive execution may give a physical plan other Spark partitions.

    Args:
        plan: The plan, an object of the JVM.
        is_fixed: Whether rows that were executed before the plan have fixed partitions.
        adaptive: Whether it is a part of an adaptive plan.
    """
    kind = plan.getClass().getSimpleName()
    if kind == "AdaptiveSparkPlanExec":
        return may_change(plan.initialPlan(), is_fixed=is_fixed, adaptive=True)
    if kind == "InMemoryTableScanExec":
        return may_change(plan.relation().cachedPlan(), is_fixed=is_fixed)
    if kind == "RDDScanExec":  # rows of a stream, or of another plan that was executed
        return not is_fixed and "ShuffledRowRDD" in plan.rdd().toDebugString()
    ends = kind == "BroadcastExchangeExec"
    if kind == "ShuffleExchangeExec":
        if adaptive and plan.shuffleOrigin().toString() != "REPARTITION_BY_NUM":
            return True
        # Hashes put a row into the same Spark partition wherever it was; a round robin does not.
        spread = plan.outputPartitioning().getClass().getSimpleName()
        ends = spread != "RoundRobinPartitioning"
    children = plan.children()
    return not ends and any(
        may_change(children.apply(place), is_fixed=is_fixed, adaptive=adaptive)
        for place in range(children.size())
    )
