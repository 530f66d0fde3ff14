"""The outcome of a way to read a topic, and where it is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

import keyshard
from keyshard import KeyShardSource
from tests.streams.cluster import Broker
from tests.streams.values import NONE, SEPARATED
from tests.support.deadlines import deadline
from tests.ways import facts
from tests.ways.draw import CLIENT, HANDLERS, Published, Reading
from tests.ways.kinds import KINDS

DEADLINE_S = deadline(60)
QUIET_S = 2.0
"""Time that a live way to read waits for surplus rows after the last expected row, seconds."""


@dataclass(slots=True)
class Outcome:
    """Outcome of one way to read a topic."""

    rows: list[Mapping[str, Any]] = field(default_factory=list)
    """The rows, with the message number ``n``, their ``facts``, their stored bytes ``raw`` if the
    reading shows them, and the columns of their values."""
    code: str = ""
    """Code of the error that ended it."""
    error: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    malformed: set[int] = field(default_factory=set)
    """Messages with refused data."""
    is_late: bool = False
    """Whether the deadline ended it, so that missing rows say nothing."""
    problems: list[str] = field(default_factory=list)
    """Defects that the way found by itself."""

    def count(self, status: Mapping[str, Any]) -> None:
        """Take the counts of a source's status."""
        window = status["window"]
        self.counts["encryptedSkipped"] = 0 if window is None else window["encryptedSkipped"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a topic is read."""

    broker: Broker
    spark: SparkSession
    directory: Path
    """For checkpoints."""
    name: str
    """Of the subscription."""


def source_of(place: Place, made: Published, how: Reading) -> KeyShardSource:
    """Return the source of a way to read in Python."""
    wanted: tuple[str, ...] = () if how.way in HANDLERS else facts.ON_REQUEST
    wanted += () if how.way in HANDLERS or how.transport == CLIENT else facts.BY_WIRE
    if how.way in HANDLERS and made.kind == SEPARATED:
        wanted = ("__keyBytes",)  # A handler decodes a separate key from its bytes.
    return KeyShardSource(
        made.read_as,
        subscription=place.name,
        service_url=place.broker.service_url,
        admin_url=place.broker.admin_url,
        parallelism=3,
        starting_position="earliest",
        on_encrypted="skip" if how.skips_encrypted else "fail",
        transport=how.transport,  # type: ignore[arg-type]
        workers=how.workers,
        metadata_columns=list(wanted),
    )


def columns_of(source: KeyShardSource) -> list[str]:
    """Return all columns that a bounded read of a source can have."""
    return [*keyshard.columns.record_batches.SCHEMA.names, *source.metadata_columns]


def raw_rows(batches: Iterable[pa.RecordBatch]) -> list[dict[str, Any]]:
    """Return rows without their values: a decoder makes those."""
    rows = [row for batch in batches for row in batch.to_pylist()]
    return [row_of(row) | {"raw": row["value"]} for row in rows]


def row_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with the number and the facts of its message, and columns of its value."""
    found = facts.of_row(row)
    values = {name: value for name, value in row.items() if not name.startswith("__")}
    return values | {"n": int(found["properties"]["n"]), "facts": found}


def row_of_message(kind: str, message: keyshard.Message) -> dict[str, Any]:
    """Return what a handler gets; ``malformed`` says whether its data is refused."""
    row: dict[str, Any] = {
        "n": int(message.properties["n"]), "facts": facts.of_message(message),
        "raw": message.value,
    }  # fmt: skip
    try:
        data = message.data
    except keyshard.errors.MalformedMessageError:
        return row | {"malformed": True}
    if isinstance(data, dict):
        row |= data
    elif KINDS[kind].some.startswith("value ") or kind == NONE:
        row["value"] = data
    return row
