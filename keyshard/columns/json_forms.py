"""Forms in which Pulsar's Java client writes JSON values that their schema does not show.

A JSON schema is an Avro schema. Pulsar's Java client derives it from a class by Avro's reflection.
Jackson writes the values by its own defaults, which differ:

- An ``Instant`` is a number of seconds with a fraction. The schema says microseconds.
- A ``LocalDate`` is an array.
- A big decimal is a number. The schema says a string.

Other clients write values as the schema says, so both forms are read.

If Avro cannot look into a class, its schema is a record without fields. For some classes of the
JDK, the name tells the form of the values. Values of any other class become their JSON text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from keyshard.columns import json_scalars as scalars
from keyshard.columns.json_scalars import BARE_IN_JSON, Convert


class Form(NamedTuple):
    """How decoded JSON values of a type become values of its column."""

    convert: Convert | None = None
    """Converts a value other than null."""
    is_text: bool = False
    """Whether the value is the JSON text itself."""
    fields: Mapping[str, Form] = {}
    """Forms of the fields of a struct that have one."""
    item: Form | None = None
    """Form of the items of a list or a map."""
    key: Convert | None = None
    """Converts the keys of a map whose schema is a list of pairs. Both forms of it are read."""


def must_convert(column: pa.DataType, form: Form | None) -> bool:
    """Whether Arrow accepts values that a form changes: strings, or pairs with repeated keys."""
    if form is None:
        return False
    if form.key is not None:
        return True
    types = pa.types
    if types.is_struct(column):
        return any(must_convert(one.type, form.fields.get(one.name)) for one in column)
    if types.is_map(column):
        return must_convert(column.item_type, form.item)
    if types.is_list(column):
        return must_convert(column.value_type, form.item)
    return bool(types.is_string(column))


def formed(value: Any, form: Form) -> Any:
    """Return the value of a column for a decoded JSON value.

    Raises:
        ValueError, TypeError, ArithmeticError: The value does not have the form.
    """
    if value is None:
        return None
    if form.is_text:
        # ``JsonCodec`` may have quoted bare floats such as NaN, with a prefix, for msgspec.
        text = str(memoryview(value), "utf-8").replace(f'"{BARE_IN_JSON}', '"')
        return None if text == "null" else text
    if form.convert is not None:
        return form.convert(value)
    if form.fields:
        return value | {name: formed(value.get(name), one) for name, one in form.fields.items()}
    item = form.item
    if isinstance(value, dict) or form.key is not None:
        return {
            name if form.key is None else form.key(name): one if item is None else formed(one, item)
            for name, one in entries(value)
        }
    return value if item is None else [formed(one, item) for one in value]


def entries(value: dict[Any, Any] | list[dict[str, Any]]) -> Iterable[tuple[Any, Any]]:
    """Return the keys and values of an object, or of a list of pairs."""
    if isinstance(value, dict):
        return value.items()
    return [(one.get("key"), one.get("value")) for one in value]


# -- Types of a schema ----------------------------------------------------------------------------


class Known(NamedTuple):
    """The column of values that are not described by their schema."""

    column: pa.DataType
    form: Form | None = None
    """``None``: msgspec and Arrow read the values without a conversion."""
    unit: pa.DataType | None = None
    """Type of time in the unit of whole numbers; ``None``: the column's."""


LOGICAL: Mapping[str, Form] = {
    "date": Form(scalars.days),
    "time-millis": Form(scalars.time_of_day(1_000)),
    "time-micros": Form(scalars.time_of_day(1)),
    "timestamp-millis": Form(scalars.instant(1_000)),
    "timestamp-micros": Form(scalars.instant(1)),
    "local-timestamp-millis": Form(scalars.local(1_000)),
    "local-timestamp-micros": Form(scalars.local(1)),
}
"""Forms of Avro's logical types of integers."""
_TIMESTAMP, _TIME = pa.timestamp("us", tz="UTC"), pa.time64("us")
_BY_JAVA_CLASS: Mapping[tuple[str, str], Known] = {
    ("int", "java.lang.Character"): Known(pa.string(), Form(scalars.character)),
    ("array", "[C"): Known(pa.string(), Form(scalars.characters)),
    ("string", "java.math.BigDecimal"): Known(pa.string(), Form(scalars.decimal_text)),
    ("string", "java.math.BigInteger"): Known(pa.string(), Form(scalars.integer_text)),
}
_MILLISECONDS = Known(
    _TIMESTAMP,
    Form(scalars.milliseconds),
    pa.timestamp("ms", tz="UTC"),
)
_SECONDS = Known(
    _TIMESTAMP,
    Form(scalars.instant(1_000_000)),
    pa.timestamp("s", tz="UTC"),
)
_TEXT = Known(pa.string())
_JSON_TEXT = Known(pa.string(), Form(is_text=True))
_RECORDS: Mapping[str, Known] = {
    **dict.fromkeys(
        (
            "java.sql.Date", "java.sql.Timestamp", "java.util.Calendar", "java.util.Date",
            "java.util.GregorianCalendar",
        ),
        _MILLISECONDS,
    ),
    **dict.fromkeys(
        ("java.time.Instant", "java.time.OffsetDateTime", "java.time.ZonedDateTime"), _SECONDS
    ),
    "java.sql.Time": Known(
        _TIME, Form(scalars.time_of_day(1_000)), pa.time32("ms")
    ),
    "java.time.Duration": Known(
        pa.duration("us"),
        Form(scalars.duration),
        pa.duration("s"),
    ),
    "java.time.LocalDate": Known(pa.date32(), LOGICAL["date"]),
    "java.time.LocalDateTime": Known(pa.timestamp("us"), LOGICAL["local-timestamp-micros"]),
    "java.time.LocalTime": Known(_TIME, LOGICAL["time-micros"]),
    "java.time.OffsetTime": Known(pa.string(), Form(scalars.offset_time)),
    "java.time.Year": Known(pa.int32()),
    "java.time.YearMonth": Known(pa.string(), Form(scalars.month)),
    "java.util.OptionalDouble": Known(pa.float64()),
    "java.util.OptionalInt": Known(pa.int32()),
    "java.util.OptionalLong": Known(pa.int64()),
    "java.util.concurrent.atomic.AtomicBoolean": Known(pa.bool_()),
    "java.util.concurrent.atomic.AtomicInteger": Known(pa.int32()),
    "java.util.concurrent.atomic.AtomicLong": Known(pa.int64()),
    **dict.fromkeys(
        (
            "java.io.File", "java.lang.Class", "java.net.Inet4Address", "java.net.Inet6Address",
            "java.net.InetAddress", "java.net.InetSocketAddress", "java.nio.charset.Charset",
            "java.nio.file.Path", "java.time.MonthDay", "java.time.Period", "java.time.ZoneId",
            "java.time.ZoneOffset", "java.util.Currency", "java.util.Locale",
            "java.util.SimpleTimeZone", "java.util.TimeZone", "java.util.UUID",
            "java.util.regex.Pattern",
        ),
        _TEXT,
    ),
}  # fmt: skip


def of_type(kind: str, schema: Mapping[str, Any]) -> Known | None:
    """Return the column of a type that is no record; ``None`` if the schema describes it."""
    return _BY_JAVA_CLASS.get((kind, str(schema.get("java-class"))))


def of_record(name: str, fields: Sequence[Any]) -> Known | None:
    """Return the column of the values of a Java class; ``None`` if the schema has their fields.

    Args:
        name: Full name of the record.
        fields: Fields of the record.
    """
    return _RECORDS.get(name) or (None if fields else _JSON_TEXT)


PAIRS = "org.apache.avro.reflect"
"""Namespace of the records that Avro's reflection makes of the entries of a map."""


class Pair(NamedTuple):
    """Types of the keys and values of a map."""

    key: Any
    value: Any


def pair_of(items: Any, namespace: str, known: dict[str, Pair]) -> Pair | None:
    """Return the types of a Java map that Avro describes as a list of pairs.

    Avro's own maps have strings as keys. Jackson writes any map as an object.

    Args:
        items: Schema of the items of an array, or the name of an earlier one.
        namespace: Namespace of a record or name that states none, such as a pair within a pair.
        known: Earlier pairs by name; gets new ones.
    """
    if isinstance(items, str):
        return known.get(items if "." in items else f"{namespace}.{items}")
    if not isinstance(items, Mapping) or items.get("namespace", namespace) != PAIRS:
        return None
    fields = {one["name"]: one["type"] for one in items.get("fields", ())}
    if fields.keys() != {"key", "value"}:
        return None
    return known.setdefault(f"{PAIRS}.{items['name']}", Pair(fields["key"], fields["value"]))


def numbers_of(column: pa.DataType) -> pa.DataType:
    """Return the type with a number for each time, in its unit."""
    types = pa.types
    if types.is_struct(column):
        return pa.struct([(one.name, numbers_of(one.type)) for one in column])
    if types.is_list(column):
        return pa.list_(numbers_of(column.value_type))
    if types.is_map(column):
        return pa.map_(column.key_type, numbers_of(column.item_type))
    if types.is_date(column) or types.is_time32(column):
        return pa.int32()
    is_time = types.is_timestamp(column) or types.is_time(column) or types.is_duration(column)
    return pa.int64() if is_time else column


def key_of(kind: pa.DataType) -> tuple[pa.DataType, Convert]:
    """Return the type of a map's keys, and the conversion of JSON keys to that type."""
    if pa.types.is_integer(kind):
        return kind, scalars.integer_key
    return pa.string(), scalars.text_key
