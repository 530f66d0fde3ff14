"""The columns of a query: their names, their types, and the plan by which tasks make them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
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

from keyshard.config.source import DROPMALFORMED
from keyshard.core import metadata_columns
from keyshard.core.metadata_columns import Kind, check_known
from keyshard.errors import ConfigError
from spark_adapter.preflight import is_before
from spark_adapter.task_rows import Rows

if TYPE_CHECKING:
    from keyshard import KeyShardSource
    from keyshard.reading.decoding_plan import Decoding

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


def plan_of(source: KeyShardSource) -> Decoding | None:
    """Plan how to decode the values of a source; ``None`` if they stay bytes.

    Raises:
        KeyShardError: The schemas cannot be read from the broker.
    """
    if source.value_format == "raw":
        return None
    from keyshard.broker.schemas import first_tries_s, topics_of  # noqa: PLC0415 - for schemas
    from keyshard.reading.decoding_plan import WITHOUT_SCHEMA, plan_decoding  # noqa: PLC0415

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

    from keyshard.columns.projection import without_time_of_day  # noqa: PLC0415 - for schemas

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
    for name in schema.names:
        check_known(name)
    if plan is None:
        _check_kinds(schema, SELECTABLE, " (no topic has a schema, or valueFormat is raw)")
        return Rows(schema.names, strict=strict)
    from keyshard.reading.decoder import RowDecoder  # noqa: PLC0415 - for schemas
    from keyshard.reading.decoding_plan import CORRUPT  # noqa: PLC0415

    kinds = {**SELECTABLE, CORRUPT: BinaryType()}
    own = [field for field in schema.fields if field.name in kinds and field.name != "value"]
    _check_kinds(StructType(own), kinds)
    output = arrow_schema_of(schema)
    decoder = RowDecoder(plan, output)
    if not decoder.decodes and CORRUPT not in schema.names:
        return Rows(schema.names, strict=strict)
    return Rows(decoder.raw_columns, output, plan, strict)


def _check_kinds(schema: StructType, kinds: Mapping[str, DataType], why: str = "") -> None:
    """Check that columns of a schema exist and have their types.

    Raises:
        ConfigError: A column does not exist, or has another type.
    """
    for field in schema.fields:
        if kinds.get(field.name) != field.dataType:
            known = ", ".join(f"{name} {kind.simpleString()}" for name, kind in kinds.items())
            raise ConfigError(
                f"Column {field.name!r} of type {field.dataType.simpleString()} does not "
                f"exist{why}.",
                f"The columns are: {known}.",
            )


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


def _check_names(names: Sequence[str]) -> None:
    """Refuse a schema without columns, or with duplicate ones. Spark accepts both.

    Raises:
        ConfigError: The list of names is empty, or contains a name twice.
    """
    if not names:
        raise ConfigError(
            "schema(...) has no columns.", "Name some, or leave schema(...) out to get all."
        )
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ConfigError(f"schema(...) has column {twice[0]!r} twice.", "Name each column once.")
