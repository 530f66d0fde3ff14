"""Positions of batch reads and of queries, as text for ``startingOffsets``."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql.types import StructType

from keyshard import Checkpoint
from keyshard.coordinator.start_positions import positions_of
from keyshard.core.position.read_bounds import Edge, bound_text, parse_bound
from keyshard.errors import CheckpointError, ConfigError, NotRunningError
from keyshard.redaction import shown
from spark_adapter.batch_reader import KeyShardSplits
from spark_adapter.error_text import as_spark_error
from spark_adapter.option_parsing import parse_options
from spark_adapter.preflight import is_remote, is_true
from spark_adapter.pulsar.options import translated
from spark_adapter.table_options import options_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

FORMATS = ("keyshard", "pulsar")
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


def positions(of: DataFrame | StreamingQuery) -> str:
    """Return where a batch read ends, or what a query has reached, by topic partition.

    ::

        history = spark.read.format("keyshard").options(**options).load()
        behind = spark_adapter.positions(history)  # fixes the end of the read
        ...
        spark.readStream.format("keyshard").options(**options, startingOffsets=behind, ...)

    Args:
        of: A ``DataFrame`` over one batch read, with any transformations; this call plans the read
            if it is not planned yet. Or a streaming query over one keyshard source, running or
            stopped; its committed batches contain everything before the positions.

    Returns:
        JSON for the options ``startingOffsets`` and ``endingOffsets``.

    Raises:
        ConfigError: The argument is neither of them, or the read ends at a time or is not fixed.
        NotRunningError: The query has no batch yet, or its delivered entries have ack gaps.
        BrokerError: The broker cannot be reached, or refuses.
    """
    given: Any = of
    with as_spark_error():
        remote = is_remote(given)
        if not remote and hasattr(given, "_jsq"):
            return _text(_of_query(given))
        if remote or getattr(given, "_jdf", None) is None or given.isStreaming:
            raise ConfigError(
                f"positions() got {shown(of)}.",
                "Pass the DataFrame of a batch read or a streaming query, from a session without "
                "Spark Connect.",
            )
        return _text(_of_batch(given))


def _text(found: dict[str, str]) -> str:
    return json.dumps(found, sort_keys=True)


def tables(plan: Any) -> Iterator[Any]:
    """Yield the relations of :data:`FORMATS` in a plan of the JVM."""
    leaves = plan.collectLeaves()
    for number in range(leaves.size()):
        leaf = leaves.apply(number)
        kind = leaf.getClass().getSimpleName()
        relation = leaf.relation() if kind == "StreamingDataSourceV2ScanRelation" else leaf
        if kind in _KINDS and relation.table().name() in FORMATS:
            yield relation


_KINDS = ("DataSourceV2Relation", "StreamingDataSourceV2ScanRelation")


def _of_batch(rows: DataFrame) -> dict[str, str]:
    ends: dict[str, str] = {}
    for relation in tables(rows._jdf.queryExecution().analyzed()):
        pushes = is_true(rows.sparkSession.conf.get(PUSHDOWN, "false"))
        ending = relation.options().get("endingOffsets") or Edge.LATEST.value
        if pushes and Edge.LATEST.value in ending.lower():
            raise ConfigError(
                f"{PUSHDOWN} is true, so Spark plans each query with a filter again, and 'latest' "
                "changes.",
                "Set it to false, or set endingOffsets.",
            )
        # Spark keeps this plan with the loaded table, for every DataFrame made from it.
        scan = relation.table().newScanBuilder(relation.options()).build()
        first, *_ = scan.toBatch().planInputPartitions()
        part = pickle.loads(bytes(first.pickedPartition()))
        assert isinstance(part, KeyShardSplits)
        for name, end in part.ends.items():
            if ends.setdefault(name, end) != end:
                raise ConfigError(
                    f"The DataFrame has two reads of {name}, with the ends {ends[name]} and {end}.",
                    "Get the positions of each read separately.",
                )
    if not ends:
        raise ConfigError(
            "The DataFrame has no batch read of format('keyshard').", "Pass one that has."
        )
    for name, end in ends.items():
        if isinstance(parse_bound(f"The end of {name}", end), int):
            raise ConfigError(
                f"The end of {name} is {end!r}, a publish time, which is not a position: earlier "
                "messages may be stored after it.",
                "Use endingOffsets instead of endingTime.",
            )
    return ends


def _of_query(query: Any) -> dict[str, str]:
    relations = list(tables(query._jsq.streamingQuery().logicalPlan()))
    if len(relations) != 1:
        raise ConfigError(
            f"The query has {len(relations)} sources of format('keyshard'), but positions() "
            "supports exactly one.",
            "Use a query with one source.",
        )
    (relation,) = relations
    given, made_up = dict(relation.options().asCaseSensitiveMap()), False
    if relation.table().name() == "pulsar":
        options, _, made_up = translated(given, stream=True)
        source = parse_options(options)
    else:
        columns = StructType.fromJson(json.loads(relation.table().schema().json()))
        source = parse_options(options_of(columns, given, stream=True))
    progress = query.lastProgress
    for one in progress["sources"] if progress else ():
        try:
            checkpoint = Checkpoint.from_json(one["endOffset"])
        except CheckpointError:
            continue
        if (made_up or checkpoint.subscription == source.subscription) and checkpoint.partitions:
            found = positions_of(source, checkpoint)
            return {name: bound_text(at) for name, at in found.items()}
    raise NotRunningError("The query has no batch yet.", "Try again later.")
