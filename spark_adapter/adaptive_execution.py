"""Refuses rows that a repeated batch may divide over Spark partitions in another way.

Adaptive execution merges and splits the Spark partitions of a shuffle, by the sizes that it
measures and by the number of cores. Ranges of a sort are chosen from a sample that differs each
time. Rows in another Spark partition have another producer name, and are lost or stored twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keyshard.errors import ConfigError
from spark_adapter.preflight import is_remote

if TYPE_CHECKING:
    from pyspark import TaskContext
    from pyspark.sql import DataFrame

ADAPTIVE = "spark.sql.adaptive.enabled"
ADAPTIVE_STREAMS = "spark.sql.adaptive.streaming.stateless.enabled"
"""Setting that lets adaptive execution change the Spark partitions of a stream; on by default."""
_DANGER = (
    "may divide the rows of a repeated batch in another way, so that rows are lost or stored twice."
)
_REPLACED = ("SortMergeJoin", "ShuffledHashJoin")
"""Joins that adaptive execution may replace by others, which need no shuffle below them."""


def check_task(context: TaskContext) -> None:
    """Refuse a stream whose batch may have other Spark partitions when it is repeated.

    Spark tells tasks only the settings that a session sets. A task cannot see whether its rows
    were shuffled.

    Raises:
        ConfigError: The session of the query allows adaptive execution.
    """
    if _is_on(context.getLocalProperty(ADAPTIVE_STREAMS)):
        raise ConfigError(
            f"Adaptive execution {_DANGER}",
            f"Set {ADAPTIVE_STREAMS}=false in the session before the query starts.",
        )


def check_rows(rows: DataFrame, *, in_stream: bool) -> None:
    """Refuse rows that may have other Spark partitions when they are computed again.

    Args:
        rows: The rows, not executed yet.
        in_stream: Whether they are of a batch of a streaming query.

    Raises:
        ConfigError: The plan may divide the rows in another way the next time. With Spark Connect,
            the plan is not known here: the rows are refused if adaptive execution is on.
    """
    settings = rows.sparkSession.conf
    adaptive = _is_on(settings.get(ADAPTIVE))
    off = f"set {ADAPTIVE}=false in the session, before a query starts."
    if is_remote(rows):
        if adaptive:
            raise ConfigError(f"Adaptive execution {_DANGER}", f"With Spark Connect, {off}")
        return
    is_fixed = not adaptive or (in_stream and not _is_on(settings.get(ADAPTIVE_STREAMS, "true")))
    if may_change(rows._jdf.queryExecution().executedPlan(), is_fixed=is_fixed):
        last = "the function of foreachBatch" if in_stream else "the query"
        raise ConfigError(
            f"Spark {_DANGER}",
            f"Make rows.repartition(8, '__key') the last step of {last}, with a number of your "
            f"choice{f'. Or {off}' if adaptive else '.'}",
        )


def _is_on(setting: str | None) -> bool:
    return (setting or "").lower() != "false"


def may_change(plan: Any, *, is_fixed: bool, adaptive: bool = False) -> bool:
    """Return whether the rows of a physical plan may have other Spark partitions the next time.

    Plugins name their operators after those of Spark, so a part of a name is enough.

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
    if kind == "RDDScanExec":  # Rows of a stream, or of another plan that was executed.
        # After ``DataFrame.checkpoint()``, a CheckpointRDD stands for the shuffles before it.
        lineage = plan.rdd().toDebugString()
        return not is_fixed and ("ShuffledRowRDD" in lineage or "CheckpointRDD" in lineage)
    ends = "BroadcastExchange" in kind
    if "ShuffleExchange" in kind:
        spread = plan.outputPartitioning().getClass().getSimpleName()
        by_number = plan.shuffleOrigin().toString() == "REPARTITION_BY_NUM"
        if spread == "RangePartitioning" or (
            adaptive and not by_number and not spread.startswith("SinglePartition")
        ):
            return True
        # Hashes put a row into the same Spark partition wherever it was; a round robin does not.
        ends = spread != "RoundRobinPartitioning"
    if kind == "UnionLoopExec" or (adaptive and any(name in kind for name in _REPLACED)):
        return True
    children = plan.children()
    return not ends and any(
        may_change(children.apply(place), is_fixed=is_fixed, adaptive=adaptive)
        for place in range(children.size())
    )
