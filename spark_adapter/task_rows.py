"""The columns of a query, and the conversion of rows to them in tasks.

The decoding plan is made with the query. :class:`Rows` carries it to the tasks.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from keyshard.broker.schemas import first_tries_s, topics_of
from keyshard.columns.projection import cast_values, null_in, without_time_of_day
from keyshard.core import metadata_columns
from keyshard.core.metadata_columns import METADATA_COLUMNS, Kind, check_known
from keyshard.errors import ConfigError, SchemaError
from keyshard.reading.decoder import RowDecoder
from keyshard.reading.decoding_plan import (
    CORRUPT,
    DROPMALFORMED,
    WITHOUT_SCHEMA,
    Decoding,
    check_same,
    plan_decoding,
)
from spark_adapter.preflight import is_before

if TYPE_CHECKING:
    from keyshard import KeyShardSource

_log = logging.getLogger(__name__)

COLUMNS: dict[str, DataType] = {
    "value": BinaryType(),
    "__key": StringType(),
    "__topic": StringType(),
    "__partition": IntegerType(),
    "__messageId": StringType(),
    "__publishTime": TimestampType(),
    "__eventTime": TimestampType(),
    "__properties": MapType(StringType(), StringType()),
    "__slot": IntegerType(),
    "__schemaVersion": LongType(),
}
"""Names and Spark types of the columns; see :mod:`keyshard.columns.record_batches`."""
_TYPES: dict[Kind, DataType] = {
    Kind.BYTES: BinaryType(), Kind.TEXT: StringType(), Kind.NUMBER: LongType(),
    Kind.TIME: TimestampType(),
}  # fmt: skip
SELECTABLE = {**COLUMNS, **{one.name: _TYPES[one.kind] for one in metadata_columns.COLUMNS}}
"""Also the columns that exist only if a schema or ``metadataColumns`` names them."""


@dataclass(frozen=True)
class Rows:
    """The columns of a query and how to make them. Picklable."""

    columns: Sequence[str]
    """Columns that the runtime returns."""
    output: pa.Schema | None = None
    """Columns of the query; ``None`` if they are :attr:`columns`."""
    plan: Decoding | None = None
    strict: pa.Schema | None = None
    """Columns of the query, if some of them are never null."""

    def source_of(self, source: KeyShardSource) -> KeyShardSource:
        """Return the source with exactly the metadata columns that these rows need.

        Raises:
            ConfigError: The source cannot have a column.
        """
        metadata = [name for name in METADATA_COLUMNS if name in self.columns]
        return replace(source, metadata_columns=metadata)

    def check(self, topics: Iterable[str] | None = None) -> None:
        """Check that the topics still have the schemas that the plan decodes.

        Args:
            topics: Topics to check; ``None`` for all.

        Raises:
            SchemaError: A topic was created again with another schema.
        """
        if self.plan is not None:
            check_same(self.plan, topics)

    def after(self, ledgers: int) -> Rows:
        """Return rows that share no cached schema with rows of fewer ledgers.

        A schema version of a topic that was created again may be another schema.
        """
        if self.plan is None or not ledgers:
            return self
        return replace(self, plan=replace(self.plan, name=f"{self.plan.name} {ledgers}"))

    def of(
        self, raw: Iterable[pa.RecordBatch], report: Callable[[int], None] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Convert rows of :attr:`columns` to rows of the query, in a task.

        Args:
            raw: Rows to convert.
            report: Called with the number of malformed rows, if there are any.

        Raises:
            SchemaError: A value is null in a column that is NOT NULL.
        """
        made = self._made(raw, report)
        yield from made if self.strict is None else (never_null(one, self.strict) for one in made)

    def _made(
        self, raw: Iterable[pa.RecordBatch], report: Callable[[int], None] | None
    ) -> Iterator[pa.RecordBatch]:
        """Convert rows without the check for null values."""
        if self.plan is None:
            yield from raw
            return
        decoder = RowDecoder(self.plan, self.output)
        yield from decoder.decoded(raw)
        if decoder.malformed:
            (report or partial(_log_malformed, self.plan.mode))(decoder.malformed)


def _log_malformed(mode: str, rows: int) -> None:
    so = "were left out" if mode == DROPMALFORMED else "have nulls"
    _log.warning("%d rows do not fit the schema of the query, and %s", rows, so)


def plan_of(source: KeyShardSource) -> Decoding | None:
    """Plan how to decode the values of a source; ``None`` if they stay bytes.

    Raises:
        KeyShardError: The schemas cannot be read from the broker.
    """
    if source.value_format == "raw":
        return None
    connection = source.how_to_connect()
    metadata = source.metadata_columns
    tries_s = first_tries_s(connection)
    plan = plan_decoding(connection, topics_of(source), source.malformed, metadata, tries_s=tries_s)
    if all(schema.type in WITHOUT_SCHEMA for schema in plan.schemas.values()):
        return None
    return plan


def schema_of(plan: Decoding | None, metadata: Sequence[str]) -> StructType:
    """Return the columns of a query that names none.

    Args:
        plan: How to decode values; ``None`` for bytes.
        metadata: Metadata columns to add to the default ones.
    """
    if plan is None:
        return StructType([StructField(name, SELECTABLE[name]) for name in (*COLUMNS, *metadata)])
    return StructType([StructField(one.name, _spark_type(one)) for one in plan.columns])


def _spark_type(column: pa.Field) -> DataType:
    if column.name != "value" and column.name in SELECTABLE:
        return SELECTABLE[column.name]
    from pyspark.sql.pandas.types import from_arrow_type  # noqa: PLC0415 - it loads pandas

    kind: DataType = from_arrow_type(without_time_of_day(column.type), prefer_timestamp_ntz=True)
    return kind


def needs_no_schema(columns: StructType, mode: str) -> bool:
    """Whether rows of these columns do not depend on the schemas of the topics."""
    return mode != DROPMALFORMED and all(
        field.name != "value" and SELECTABLE.get(field.name) == field.dataType
        for field in columns.toNullable().fields
    )


def rows_of(schema: StructType, plan: Decoding | None) -> Rows:
    """Return the conversion of rows to the columns of a schema.

    Raises:
        ConfigError: A column does not exist, or has another type.
        SchemaError: A cast to a column would lose data.
    """
    _check_names(schema.names)
    strict = strict_of(schema)
    schema = schema.toNullable()
    kinds = SELECTABLE if plan is None else {**SELECTABLE, CORRUPT: BinaryType()}
    for field in schema.fields:
        check_known(field.name)
        own = plan is None or (field.name in kinds and field.name != "value")
        if own and kinds.get(field.name) != field.dataType:
            known = ", ".join(f"{name} {kind.simpleString()}" for name, kind in kinds.items())
            why = "" if plan else " (no topic has a schema, or valueFormat is raw)"
            raise ConfigError(
                f"Column {field.name!r} of type {field.dataType.simpleString()} does not "
                f"exist{why}. The columns are: {known}."
            )
    if plan is None:
        return Rows(schema.names, strict=strict)
    output = arrow_schema_of(schema)
    decoder = RowDecoder(plan, output)
    if not decoder.decodes and CORRUPT not in schema.names:
        return Rows(schema.names, strict=strict)
    return Rows(decoder.raw_columns, output, plan, strict)


def strict_of(schema: StructType) -> pa.Schema | None:
    """Return the columns of a schema if some of them are never null, else ``None``."""
    if schema == schema.toNullable():
        return None
    return arrow_schema_of(schema)


def arrow_schema_of(schema: StructType) -> pa.Schema:
    """Return the Arrow schema of a schema of Spark, with timestamps in UTC."""
    from pyspark.sql.pandas.types import to_arrow_schema  # noqa: PLC0415 - it loads pandas

    # Before 4.2, UTC has another name, and is the default.
    return to_arrow_schema(schema) if is_before(4, 2) else to_arrow_schema(schema, timezone="UTC")


def never_null(batch: pa.RecordBatch, strict: pa.Schema) -> pa.RecordBatch:
    """Check NOT NULL columns and return the batch with them, before Spark fails less clearly.

    Raises:
        SchemaError: A value is null.
    """
    for field, values in zip(strict, batch.columns, strict=True):
        missing = null_in(field, values)
        if missing:
            raise SchemaError(
                f"Column {missing!r} is NOT NULL in schema(...), but a message has no value for "
                "it. Remove NOT NULL (nullable=True)."
            )
    columns = [cast_values(*pair) for pair in zip(batch.columns, strict.types, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=strict)


def _check_names(names: Sequence[str]) -> None:
    """Refuse empty and duplicate column names, which Spark accepts.

    Raises:
        ConfigError: There is no column, or one twice.
    """
    if not names:
        raise ConfigError(
            "schema(...) has no columns. Name some, or leave schema(...) out to get all."
        )
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ConfigError(f"schema(...) has column {twice[0]!r} twice. Name each column once.")
