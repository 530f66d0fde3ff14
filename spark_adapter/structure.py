"""Which columns the rows of a query have, and how they become them, in tasks.

The plan is made when the query is: :class:`Rows` goes with the reader to the tasks.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
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
from keyshard.core.metadata_columns import (
    BROKER_PUBLISH_TIME,
    KEY_BYTES,
    MESSAGE_ID_BYTES,
    METADATA_COLUMNS,
    ORDERING_KEY,
    PRODUCER,
    SEQUENCE_ID,
    check_known,
)
from keyshard.errors import ConfigError, SchemaError
from keyshard.reading.decoding_plan import (
    CORRUPT,
    DROPMALFORMED,
    WITHOUT_SCHEMA,
    Decoding,
    check_same,
    plan_decoding,
)
from keyshard.reading.structured import Decoder
from keyshard.schemas.casting import cast, null_in
from keyshard.schemas.projection import without_time_of_day

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
"""Column names and Spark types; what they hold stands in :mod:`keyshard.arrow.columns`."""
SELECTABLE: dict[str, DataType] = {
    **COLUMNS,
    MESSAGE_ID_BYTES: BinaryType(),
    ORDERING_KEY: StringType(),
    KEY_BYTES: BinaryType(),
    SEQUENCE_ID: LongType(),
    PRODUCER: StringType(),
    BROKER_PUBLISH_TIME: TimestampType(),
}
"""The same with those that there are where a schema or ``metadataColumns`` names them."""


@dataclass(frozen=True)
class Rows:
    """The columns of a query; picklable."""

    columns: Sequence[str]
    """Columns that the runtime has to give."""
    wanted: pa.Schema | None = None
    """What they become; ``None``: they are the query's."""
    plan: Decoding | None = None
    strict: pa.Schema | None = None
    """The query's columns, where it says of some that they are never null."""

    def source_of(self, source: KeyShardSource) -> KeyShardSource:
        """A source that has what these rows need, and decodes nothing else.

        Raises:
            ConfigError: A column cannot be had of it.
        """
        metadata = [name for name in METADATA_COLUMNS if name in self.columns]
        return replace(source, metadata_columns=metadata)

    def check(self, topics: Iterable[str] | None = None) -> None:
        """Check that what values are decoded with still is the schema of their topics.

        Args:
            topics: Which are asked for; ``None``: all.

        Raises:
            SchemaError: A topic was created anew, with another one.
        """
        if self.plan is not None:
            check_same(self.plan, topics)

    def after(self, ledgers: int) -> Rows:
        """The same, which takes no schema that was asked for when there were fewer ledgers: of a
        topic that was created anew, a version may be another one."""
        if self.plan is None or not ledgers:
            return self
        return replace(self, plan=replace(self.plan, name=f"{self.plan.name} {ledgers}"))

    def of(
        self, raw: Iterable[pa.RecordBatch], tell: Callable[[int], None] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Rows of the query, of rows of :attr:`columns`: in a task.

        Args:
            raw: What was read.
            tell: Called with how many rows were left out, if any was.

        Raises:
            SchemaError: A value is null that the query says never is.
        """
        made = self._made(raw, tell)
        yield from made if self.strict is None else (never_null(one, self.strict) for one in made)

    def _made(
        self, raw: Iterable[pa.RecordBatch], tell: Callable[[int], None] | None
    ) -> Iterator[pa.RecordBatch]:
        """The same, with columns that may all be null."""
        if self.plan is None:
            yield from raw
            return
        decoder = Decoder(self.plan, self.wanted)
        yield from decoder.decoded(raw)
        if decoder.dropped:
            (tell or _log_left_out)(decoder.dropped)


def _log_left_out(rows: int) -> None:
    _log.warning("%d rows were left out: the schema of their topic does not fit", rows)


def plan_of(source: KeyShardSource) -> Decoding | None:
    """What the values of a source are decoded with; ``None``: they stay bytes.

    Raises:
        KeyShardError: The schemas cannot be asked for.
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
    """The columns that a query has by itself.

    Args:
        plan: What values are decoded with.
        metadata: Columns that are wanted beside the default ones.
    """
    if plan is None:
        return StructType([StructField(name, SELECTABLE[name]) for name in (*COLUMNS, *metadata)])
    return StructType([StructField(one.name, _spark_type(one)) for one in plan.columns])


def _spark_type(column: pa.Field) -> DataType:
    if column.name != "value" and column.name in SELECTABLE:
        return SELECTABLE[column.name]
    from pyspark.sql.pandas.types import from_arrow_type  # noqa: PLC0415 - it loads pandas

    kind: DataType = from_arrow_type(without_time_of_day(column.type))
    return kind


def needs_no_schema(columns: StructType, mode: str) -> bool:
    """Whether rows of these columns are the same whatever the schemas of their topics are."""
    return mode != DROPMALFORMED and all(
        field.name != "value" and SELECTABLE.get(field.name) == field.dataType
        for field in columns.toNullable().fields
    )


def rows_of(schema: StructType, plan: Decoding | None) -> Rows:
    """How rows get the columns of a schema.

    Raises:
        ConfigError: A column is not there, or of another type.
        SchemaError: It would lose something of what it is cast of.
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
            why = "" if plan else " (no topic has a schema now, or valueFormat is raw: no fields)"
            raise ConfigError(
                f"Column {field.name!r} of type {field.dataType.simpleString()} is not one of "
                f"keyshard's{why}. A schema selects some of: {known}."
            )
    if plan is None:
        return Rows(schema.names, strict=strict)
    from pyspark.sql.pandas.types import to_arrow_schema  # noqa: PLC0415 - it loads pandas

    wanted = to_arrow_schema(schema, timezone="UTC")
    decoder = Decoder(plan, wanted)
    if not decoder.decodes and CORRUPT not in schema.names:
        return Rows(schema.names, strict=strict)
    return Rows(decoder.raw_columns, wanted, plan, strict)


def strict_of(schema: StructType) -> pa.Schema | None:
    """The columns of a schema that has some that are never null."""
    if schema == schema.toNullable():
        return None
    from pyspark.sql.pandas.types import to_arrow_schema  # noqa: PLC0415 - it loads pandas

    return to_arrow_schema(schema, timezone="UTC")


def never_null(batch: pa.RecordBatch, strict: pa.Schema) -> pa.RecordBatch:
    """Rows as columns of which some are never null: Spark fails over one, in words of its own.

    Raises:
        SchemaError: A value is.
    """
    for field, values in zip(strict, batch.columns, strict=True):
        missing = null_in(field, values)
        if missing:
            raise SchemaError(
                f"Column {missing!r} is NOT NULL in schema(...), and a message has no value for "
                "it. Leave NOT NULL out (nullable=True)."
            )
    columns = [cast(*pair) for pair in zip(batch.columns, strict.types, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=strict)


def _check_names(names: Sequence[str]) -> None:
    """Check that rows can have columns of these names: Spark lets any list pass.

    Raises:
        ConfigError: There is none, or one twice.
    """
    if not names:
        raise ConfigError("schema(...) has no column. Name some, or leave it out to have all.")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ConfigError(f"schema(...) has column {twice[0]!r} twice. Name each once.")
