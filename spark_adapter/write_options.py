"""The options of a write, checked with its columns."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql.types import (
    ArrayType,
    DataType,
    MapType,
    StructType,
    TimestampNTZType,
    VariantType,
)

from keyshard import Connection, KeyShardSink
from keyshard.columns.outgoing import EVENT_TIME, TOPIC, VALUE, check_types
from keyshard.config.connection_names import fields_of
from keyshard.config.field_types import of_type
from keyshard.config.sink import SINK_ID_MAX, SinkConfig
from keyshard.core.metadata_columns import DELIVER_AT
from keyshard.core.option_checks import did_you_mean
from keyshard.errors import ConfigError
from keyshard.publishing.preflight import check_topics
from keyshard.publishing.sink_claim import Claim
from keyshard.publishing.staging import Staging
from keyshard.publishing.values import Values, check_names
from keyshard.redaction import shown
from spark_adapter.error_text import renamed
from spark_adapter.option_parsing import (
    accumulator_id,
    check_shorthands,
    integer,
    parts_of,
    truth,
)
from spark_adapter.options import CLIENT, CONNECTION_OPTIONS, SINK_OPTIONS
from spark_adapter.query_columns import arrow_schema_of

SINK_ID = "spark"
"""Default of ``sinkId``. Several queries may use it: producer names also contain the query id."""
QUERY_ID = "sql.streaming.queryId"
"""Local property of Spark with the id of a streaming query."""
_OF_SPARK = frozenset({"checkpointlocation", "queryname"})
"""Options of Spark's own that it passes to a sink."""
_OF_TABLES = frozenset({"__messageId", "__partition", "__publishTime"})
"""Columns of rows that were read, which a catalog table also has."""
_BY_NAME = {option.name.lower(): option for option in SINK_OPTIONS}
_INTEGERS, _BOOLEANS = of_type(SinkConfig, int), of_type(SinkConfig, bool)
_OF_CONNECTION = ("service_url", "admin_url")
_TIMES = (EVENT_TIME, DELIVER_AT)
_ID_LENGTH = len(str(uuid.UUID(int=0))) + 1


class WriteOptions(NamedTuple):
    """Parsed options of a write."""

    sink: KeyShardSink
    order_by: tuple[str, ...]
    """Columns that order the rows of each key."""
    kept: tuple[str, ...]
    """Columns that the tasks need. If each row names its topic, the tasks leave out those that only
    order the rows, by the schema of each topic."""
    exclusive: bool = False
    """Whether ``sinkId`` is given, so that one streaming query at most has it."""
    staging: str | None = None
    """URL of the folder where the rows of a batch are kept until they are published."""
    report_to: int | None = None
    """Accumulator to which commits report their counts."""

    def named(self, identity: str) -> KeyShardSink:
        """Return the sink with the id of the query or of the write."""
        return replace(self.sink, sink_id=f"{self.sink.sink_id}-{identity}")

    def claim(self, query: str) -> Claim | None:
        """Return the claim that reserves the sink id for a query; ``None`` without ``sinkId``."""
        assert self.sink.sink_id is not None, "it has a default"
        return Claim(self.sink.sink_id, query) if self.exclusive else None


def parse_write(options: Mapping[str, str], schema: StructType) -> WriteOptions:
    """Parse the options of a write, and check them against its columns.

    Raises:
        ConfigError: An option or a column is unknown, missing or wrong. The error names it.
    """
    names = {name.lower() for name in options}
    if {*schema.names} >= _OF_TABLES and "topic" not in names:
        raise ConfigError(
            "INSERT INTO a table of keyshard is not supported: Spark does not pass the options "
            "of the table to the writer.",
            "Write the rows with df.write.format('keyshard'), without the columns "
            f"{', '.join(sorted(_OF_TABLES))}.",
        )
    fields: dict[str, Any] = {}
    client: dict[str, str] = {}
    for name, text in options.items():
        if name.lower() in _OF_SPARK:
            continue
        if name.lower().startswith(CLIENT):
            client[name[len(CLIENT) :]] = text
            continue
        option = _BY_NAME.get(name.lower())
        if option is None:
            hint = did_you_mean(name, [one.name for one in SINK_OPTIONS])
            hint = f"{hint} " if hint else ""
            raise ConfigError(
                f"Option {shown(name)} is not an option of a write.",
                f"{hint}See docs/publishing.md.",
            )
        fields[option.field] = _parse(option.name, option.field, text)
    if (TOPIC in schema.names) == ("topic" in fields):
        both = "are both given" if "topic" in fields else "are both missing"
        raise ConfigError(
            f"Option 'topic' and column {TOPIC} {both}.",
            "Set the option, or name the topic of each row in the column.",
        )
    fields.setdefault("topic", TOPIC)  # placeholder: each row names its topic
    order, staging = fields.pop("order_by", ()), fields.pop("staging", None)
    report_to = fields.pop("report_to", None)
    exclusive = "sink_id" in fields
    fields = {"sink_id": SINK_ID, "value_format": "auto"} | fields
    check_length("sinkId", fields["sink_id"])
    sink = _sink(fields, client)
    _check_order(schema, order)
    if staging is not None:
        _check_staging(staging)
    found = fitted(sink, schema, order)
    return found._replace(exclusive=exclusive, staging=staging, report_to=report_to)


def check_length(name: str, sink_id: str) -> None:
    """Check that a producer name has room for the query id after the sink id.

    Raises:
        ConfigError: The sink id is too long. The error names the option.
    """
    if len(sink_id) > SINK_ID_MAX - _ID_LENGTH:
        raise ConfigError(
            f"{name} has {len(sink_id)} characters; it must have at most "
            f"{SINK_ID_MAX - _ID_LENGTH}."
        )


def _check_staging(url: str) -> None:
    if url.startswith("memory:") or not url:
        raise ConfigError(
            f"staging is {shown(url)}, but the driver and all tasks must reach it.",
            "Write an fsspec URL of a folder, such as s3://bucket/staging.",
        )
    Staging(url).check()


def _sink(fields: dict[str, Any], client: Mapping[str, str]) -> KeyShardSink:
    try:
        if client or "admin_url" in fields:
            said = fields_of(client)
            check_shorthands(fields, said)
            said |= {name: fields.pop(name) for name in _OF_CONNECTION if name in fields}
            fields["connection"] = Connection(**said)
        sink = KeyShardSink(**fields)
    except ConfigError as exc:
        # The error begins with the name of a field; the user knows the option.
        names = {option.field: option.name for option in SINK_OPTIONS}
        names |= {option.field: CLIENT + option.name for option in CONNECTION_OPTIONS}
        raise exc.with_text(renamed(exc.problem, names), exc.remedy) from None
    if sink.service_url.startswith("memory://"):
        raise ConfigError(
            f"service.url is {shown(sink.service_url)}, an in-memory cluster that only one "
            "process can reach, but Spark writes from several.",
            "Use the URL of a broker.",
        )
    return sink


def _parse(name: str, field: str, text: str) -> Any:
    if field == "order_by":
        return tuple(parts_of(text))
    if field == "report_to":
        return accumulator_id(name, text)
    if field in _BOOLEANS:
        return truth(name, text)
    return integer(name, text) if field in _INTEGERS else text


def _check_order(schema: StructType, order_by: tuple[str, ...]) -> None:
    for name in order_by:
        if name not in schema.names:
            hint = did_you_mean(name, schema.names, f"It has: {', '.join(schema.names)}.")
            raise ConfigError(f"orderBy names {name}, which the rows do not have.", hint)
        kind = schema[name].dataType
        if isinstance(kind, ArrayType | MapType | StructType | VariantType):
            raise ConfigError(
                f"orderBy names {name}, but values of type {kind.simpleString()} have no order "
                "here.",
                "Name columns of numbers, texts or times.",
            )


def _arrow_columns(schema: StructType) -> pa.Schema:
    """Return the columns of rows as Arrow.

    Raises:
        ConfigError: Arrow lacks a type; a type is a variant, whose encoding only Spark reads; or a
            time column has no time zone.
    """
    found = []
    for field in schema.fields:
        name, kind = field.name, field.dataType
        if _has_variant(kind):
            raise ConfigError(
                f"Column {name!r} has the type {kind.simpleString()}, whose values only Spark "
                "understands.",
                f"Write to_json({name}), or cast it.",
            )
        try:
            found += arrow_schema_of(StructType([field]))
        except (PySparkException, ValueError, TypeError) as exc:
            raise ConfigError(
                f"Column {name!r} has the type {kind.simpleString()}, which cannot be written.",
                "Cast it, or leave it out.",
            ) from exc
        if name in _TIMES and isinstance(kind, TimestampNTZType):
            raise ConfigError(
                f"Column {name} has the type timestamp_ntz, which has no time zone.",
                "Cast it to timestamp.",
            )
    return pa.schema(found)


def _has_variant(kind: DataType) -> bool:
    if isinstance(kind, StructType):
        return any(_has_variant(field.dataType) for field in kind.fields)
    if isinstance(kind, ArrayType):
        return _has_variant(kind.elementType)
    if isinstance(kind, MapType):
        return _has_variant(kind.valueType)
    return isinstance(kind, VariantType)


def fitted(sink: KeyShardSink, schema: StructType, order_by: tuple[str, ...]) -> WriteOptions:
    """Check columns and topic before the first row.

    The topics of column ``__topic`` are not known here; the tasks check them and their schemas.

    Raises:
        KeyShardError: A column does not fit, or the topic cannot be written.
    """
    columns = _arrow_columns(schema)
    check_names(columns.names)
    check_types(pa.schema([one for one in columns if one.name != VALUE]))
    values, routed = Values(sink), TOPIC in columns.names
    if routed and sink.value_format != "raw":
        return WriteOptions(sink, order_by, tuple(columns.names))
    kept = values.kept(sink.topic, columns, order_by)
    rows = pa.Table.from_batches([], schema=columns).select(kept)
    made = values.outgoing(sink.topic, rows)
    if not routed:
        check_topics(sink, [sink.topic], made.schema)
    if made.schema is None and sink.value_format == "auto":  # the tasks need not ask for a schema
        sink = replace(sink, value_format="raw", register_schema=False)
    return WriteOptions(sink, order_by, tuple(kept))
