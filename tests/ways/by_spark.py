"""The ways to read a topic in Spark."""

from __future__ import annotations

import json
import time
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from spark_adapter import catalog
from tests.ways import facts
from tests.ways.draw import ALL, BYTES, CLIENT, METADATA, Published, Reading
from tests.ways.kinds import BYTES_FIELD, KINDS
from tests.ways.outcome import DEADLINE_S, Outcome, Place, row_of

_COUNTS = ("malformedDropped", "malformedNulls", "encryptedSkipped", "corruptSkipped")


def batch(place: Place, made: Published, how: Reading, out: Outcome) -> None:
    """Read with ``spark.read``."""
    reader = place.spark.read.format(_format(how)).options(**_options(place, made, how))
    schema = _schema(made, how)
    out.rows += _rows((reader.schema(schema) if schema else reader).load().toArrow(), how)


def stream(place: Place, made: Published, how: Reading, out: Outcome) -> None:
    """Read with ``spark.readStream``."""
    options = _options(place, made, how) | _stream_options(place, how)
    reader = place.spark.readStream.format(_format(how)).options(**options)
    schema = _schema(made, how)
    _run((reader.schema(schema) if schema else reader).load(), place, made, how, out)


def table(place: Place, made: Published, how: Reading, out: Outcome) -> None:
    """Read a table of the catalog."""
    name = _sync(place, made, _options(place, made, how))
    out.rows += _rows(place.spark.table(name).toArrow(), how)


def table_stream(place: Place, made: Published, how: Reading, out: Outcome) -> None:
    """Read a stream of a table."""
    name = _sync(place, made, _options(place, made, how) | _stream_options(place, how))
    _run(place.spark.readStream.table(name), place, made, how, out)


def _format(how: Reading) -> str:
    return "pulsar" if how.by_pulsar_name else "keyshard"


def _options(place: Place, made: Published, how: Reading) -> dict[str, str]:
    options = {
        "service.url": place.broker.service_url,
        "admin.url": place.broker.admin_url,
        "mode": how.mode,
    }
    if how.way not in ("table", "table stream"):
        options["topic"] = made.read_as
    if how.columns == BYTES:
        options["valueFormat"] = "raw"
    if not how.by_pulsar_name:
        options["transport"] = how.transport
        if not _schema(made, how):
            options["metadataColumns"] = ",".join(_on_request(how))
    return options


def _stream_options(place: Place, how: Reading) -> dict[str, str]:
    options = {
        "predefinedSubscription" if how.by_pulsar_name else "subscription": place.name,
        "startingOffsets": "earliest",
        "parallelism": "3",
        "onEncrypted": "skip" if how.skips_encrypted else "fail",
    }
    return options if how.workers == "embedded" else options | {"workers": how.workers}


def _on_request(how: Reading) -> tuple[str, ...]:
    return facts.ON_REQUEST + (() if how.transport == CLIENT else facts.BY_WIRE)


def _schema(made: Published, how: Reading) -> str:
    """Columns that Spark is asked for; empty for all."""
    if how.columns == ALL or (how.columns == BYTES and made.kind == BYTES_FIELD):
        return ""
    declared = facts.DECLARED_BY_PULSAR if how.by_pulsar_name else facts.DECLARED
    left_out = facts.BY_WIRE if how.transport == CLIENT else ()
    columns = [f"{name} {type_}" for name, type_ in declared.items() if name not in left_out]
    if how.columns != METADATA:
        columns.insert(0, "value binary" if how.columns == BYTES else KINDS[made.kind].some)
    return ", ".join(columns)


def _sync(place: Place, made: Published, options: dict[str, str]) -> str:
    catalog.sync(place.spark, namespaces=["public/default"], options=options)
    return f"`public/default`.`{made.topic.name}`"


def _run(frame: DataFrame, place: Place, made: Published, how: Reading, out: Outcome) -> None:
    """Run a query to its end, or until it has shown and counted every message."""
    parts: list[pa.Table] = []
    trigger: dict[str, Any] = {"processingTime": "100 milliseconds"}
    query = (
        frame.writeStream.foreachBatch(lambda rows, _: parts.append(rows.toArrow()))
        .option("checkpointLocation", str(place.directory / place.name))
        .trigger(**({"availableNow": True} if how.ends else trigger))
        .start()
    )
    end = time.monotonic() + DEADLINE_S
    try:
        while not query.awaitTermination(int(DEADLINE_S) if how.ends else 1):
            rows = sum(part.num_rows for part in parts)
            out.counts = _counts(query)
            dropped, skipped = (
                out.counts.get(name, 0) for name in ("malformedDropped", "encryptedSkipped")
            )
            if rows + dropped >= made.expected(how) and skipped >= made.skipped(how):
                break
            if time.monotonic() >= end:
                out.is_late = True
                break
        out.counts = _counts(query)
    finally:
        query.stop()
        for part in parts:
            out.rows += _rows(part, how)


def _counts(query: StreamingQuery) -> dict[str, int]:
    """Rows that the newest progress counts as left out or incomplete."""
    counts: dict[str, int] = {}
    for progress in query.recentProgress:
        output = json.loads(progress.sources[0].latestOffset or "{}")
        counts |= {name: output[name] for name in _COUNTS if name in output}
    return counts


def _rows(rows: pa.Table, how: Reading) -> list[dict[str, Any]]:
    found = [row_of(row) for row in rows.to_pylist()]
    if how.columns == BYTES:
        for row in found:
            row["raw"] = row.pop("value")
    return found
