"""Writes of ``format("pulsar")``: options and columns of the JVM connector, as keyshard's.

Tasks rename the columns. Everything else comes from :mod:`spark_adapter.topic_writer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa
from pyarrow import compute
from pyspark.sql.types import (
    BinaryType,
    DataType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from keyshard.columns.outgoing import EVENT_TIME, KEY, PROPERTIES_COLUMN, TOPIC, VALUE
from keyshard.core.metadata_columns import KEY_BYTES
from keyshard.core.option_checks import did_you_mean
from keyshard.errors import ConfigError
from keyshard.redaction import shown
from spark_adapter.error_text import as_spark_error
from spark_adapter.pulsar.options import (
    Translated,
    check_admin,
    check_once,
    check_refused,
    passes_on,
)
from spark_adapter.pulsar.table import ADMIN, PRODUCER, PRODUCER_OPTIONS, READER, Treatment
from spark_adapter.topic_writer import TopicWrite
from spark_adapter.write_options import parse_write

_BY_NAME = {option.name.lower(): option for option in PRODUCER_OPTIONS}
_IGNORED = ("__messageId", "__publishTime")
"""Columns that both connectors leave out: the broker makes them."""
_PROPERTIES = "__messageProperties"


class _Column(NamedTuple):
    """A column of a write."""

    name: str
    """Name for keyshard."""
    of: str
    """Name of the column of the rows."""
    kind: DataType
    field: str = ""
    """Field of a struct that becomes the column."""
    millis: bool = False
    """Whether it is milliseconds, which become a timestamp."""

    def made(self, rows: pa.Table) -> pa.ChunkedArray:
        found = rows.column(self.of)
        if self.field:
            return compute.struct_field(found, self.field)
        if not self.millis:
            return found
        # The JVM connector sets an event time only if it is positive.
        there = compute.greater(found, 0)
        return compute.if_else(there, found, None).cast(pa.timestamp("ms", tz="UTC"))


@dataclass(frozen=True)
class PulsarTopicWrite(TopicWrite):
    """A write whose rows have the columns of the JVM connector."""

    columns: tuple[_Column, ...] = ()

    def columns_of(self, rows: pa.Table) -> pa.Table:
        """Return the rows with keyshard's columns."""
        return pa.table({one.name: one.made(rows) for one in self.columns})


def write_of(options: Mapping[str, str], schema: StructType) -> PulsarTopicWrite:
    """Parse a write of ``format("pulsar")``.

    Raises:
        KeyShardError: An option or a column is not supported, or wrong.
    """
    found, names, _ = translated_write(options)
    columns = columns_of(schema, routed=not any(name.lower() == "topic" for name in found))
    translated = StructType([StructField(one.name, one.kind) for one in columns])
    with as_spark_error(**names):
        parsed = parse_write(found, translated)
    return PulsarTopicWrite(parsed, tuple(columns))


def translated_write(options: Mapping[str, str]) -> Translated:
    """Translate options to those of a write of ``format("keyshard")``.

    Raises:
        ConfigError: An option is not supported, wrong, or given by two names.
    """
    given = {name.lower(): text for name, text in options.items()}
    found: dict[str, str] = {"registerSchema": "true"}
    names: dict[str, str] = {}
    if {"valueformat", "registerschema"} & given.keys():
        del found["registerSchema"]
    for name, text in options.items():
        low = name.lower()
        if low.startswith(ADMIN):
            check_admin(name, text, given)
        elif low.startswith(PRODUCER):
            pair = _of_producer(name, text)
            if pair is not None:
                called = _BY_NAME[low].name  # Spark passes names in lower case
                check_once(pair[0], called, names)
                names[pair[0]], found[pair[0]] = called, pair[1]
        elif low.startswith(READER):
            raise ConfigError(f"Option {shown(name)} belongs to reads.", "Remove it.")
        elif passes_on(name, text, stream=False):
            check_once(name, name, names)
            names[name], found[name] = name, text
    return Translated(found, {new: old for new, old in names.items() if new != old})


def _of_producer(name: str, text: str) -> tuple[str, str] | None:
    option = _BY_NAME.get(name.lower())
    if option is None:
        hint = did_you_mean(
            name,
            [one.name for one in PRODUCER_OPTIONS],
            "See docs/migrating.md for the options of the JVM connector.",
        )
        raise ConfigError(f"Option {shown(name)} is unknown.", hint)
    check_refused(option.name, option, text)
    if option.treatment in (Treatment.REFUSED, Treatment.NOT_NEEDED) or option.convert is None:
        return None
    new, value = option.convert(option.name, text)
    return None if value is None else (new, value)


def columns_of(schema: StructType, *, routed: bool) -> list[_Column]:
    """Return the columns of a write, made of those of the JVM connector."""
    found: list[_Column] = []
    values: list[StructField] = []
    for one in schema.fields:
        name, kind = one.name, one.dataType
        if name == "__key":
            of_bytes = isinstance(kind, BinaryType)
            _check(name, kind, BinaryType, StringType)
            found.append(_Column(KEY_BYTES if of_bytes else KEY, name, kind))
        elif name == TOPIC:
            _check(name, kind, StringType)
            if routed:  # the option takes precedence, as in the JVM connector
                found.append(_Column(TOPIC, name, kind))
        elif name == EVENT_TIME:
            _check(name, kind, LongType, TimestampType)
            millis = isinstance(kind, LongType)
            found.append(_Column(EVENT_TIME, name, TimestampType(), millis=millis))
        elif name == _PROPERTIES:
            found.append(_Column(PROPERTIES_COLUMN, name, kind))
        elif name not in _IGNORED:
            values.append(one)
    if not values:
        raise ConfigError("The rows have no column of a value.", "Add one.")
    if len(values) > 1:
        return found + [_Column(one.name, one.name, one.dataType) for one in values]
    (single,) = values
    if isinstance(single.dataType, StructType):
        return found + [
            _Column(one.name, single.name, one.dataType, field=one.name)
            for one in single.dataType.fields
        ]
    return [*found, _Column(VALUE, single.name, single.dataType)]


def _check(name: str, kind: DataType, *wanted: type[DataType]) -> None:
    if not isinstance(kind, wanted):
        names = " or ".join(one().simpleString() for one in wanted)
        raise ConfigError(
            f"Column {name} has the type {kind.simpleString()}; it must be {names}.", "Cast it."
        )
