"""Forms in which Pulsar's Java client writes JSON values that their schema does not show.

A JSON schema is an Avro schema. Pulsar's Java client makes it of a class by Avro's reflection, but
Jackson writes the values by its own defaults: an ``Instant`` is a number of seconds with a fraction
where the schema says microseconds, a ``LocalDate`` is an array, a big decimal is a number where the
schema says a string. Other clients write what the schema says. So both forms are read.

Of a class that Avro cannot look into, the schema is a record without fields. The values of some
classes of the JDK are known by their name; those of any other class become their JSON text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time, timezone
from decimal import Decimal
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import pyarrow as pa

_Convert = Callable[[Any], Any]
BARE = r"\u0001"
"""Prefix in JSON of strings that were floats without quotes, such as ``NaN``; no other string
begins with it."""


class Number:
    """A JSON number with a fraction or an exponent, as it is written.

    Arrow takes it for no value of any type. It would cut a ``Decimal`` to an integer.
    """

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


class Form(NamedTuple):
    """How decoded JSON values of a type become values of its column."""

    convert: _Convert | None = None
    """Converts a value other than null."""
    is_text: bool = False
    """Whether the value is the JSON text itself."""
    fields: Mapping[str, Form] = {}
    """Forms of the fields of a struct that have one."""
    item: Form | None = None
    """Form of the items of a list or a map."""
    key: _Convert | None = None
    """Converts the keys of a map."""


def formed(value: Any, form: Form) -> Any:
    """Return the value of a column for a decoded JSON value.

    Raises:
        ValueError, TypeError, ArithmeticError: The value does not have the form.
    """
    if value is None:
        return None
    if form.is_text:
        # A float without quotes was quoted with a prefix.
        text = str(memoryview(value), "utf-8").replace(f'"{BARE}', '"')
        return None if text == "null" else text
    if form.convert is not None:
        return form.convert(value)
    if form.fields:
        return value | {name: formed(value.get(name), one) for name, one in form.fields.items()}
    item, key = form.item, form.key
    if isinstance(value, dict):
        return {
            name if key is None else key(name): one if item is None else formed(one, item)
            for name, one in value.items()
        }
    return value if item is None else [formed(one, item) for one in value]


# -- Times ----------------------------------------------------------------------------------------

_US = 1_000_000
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_EPOCH_DATE = date(1970, 1, 1).toordinal()
_EXPONENT_MAX = 30
"""Largest decimal exponent of a time; the digits of a larger one would take hours."""
_TEXT_MAX = 100
"""Most characters of a time; the search for a zone takes quadratic time."""
_ZONE_ID = re.compile(r"\[[^]]*\]$")
_ISO_DURATION = re.compile(
    r"([+-]?)P(?:([+-]?\d+)D)?(?:T(?:([+-]?\d+)H)?(?:([+-]?\d+)M)?(?:([+-]?[\d.]+)S)?)?"
)
_TIMESTAMP, _TIME = pa.timestamp("us", tz="UTC"), pa.time64("us")


def _micros(seconds: Decimal) -> int:
    """Return seconds as microseconds, cut off."""
    if not seconds.is_finite() or seconds.adjusted() > _EXPONENT_MAX:
        raise ValueError(f"{str(seconds)[:40]} is no time")
    if seconds.adjusted() < -_EXPONENT_MAX:
        return 0 if seconds >= 0 else -1
    return math.floor(seconds * _US)


def _is_integer(value: Any) -> TypeGuard[int]:
    return type(value) is int


def _integers(value: list[Any], least: int, most: int) -> list[int]:
    """Return the items of an array, filled up with zeros; the last one is nanoseconds."""
    if not least <= len(value) <= most or not all(map(_is_integer, value)):
        raise ValueError("an array is no time")
    *parts, nanos = value + [0] * (most - len(value))
    return [*parts, nanos // 1_000]


def _from_parts(value: list[Any]) -> datetime:
    """Return the time of ``[year, month, day, hour, minute, second, nanosecond]``."""
    year, month, day, hour, minute, second, micros = _integers(value, 5, 7)
    return datetime(year, month, day, hour, minute, second, micros, timezone.utc)


def _from_text(text: str) -> datetime:
    if len(text) > _TEXT_MAX:
        raise ValueError("a text is too long for a time")
    found = datetime.fromisoformat(_ZONE_ID.sub("", text))
    return found if found.tzinfo is not None else found.replace(tzinfo=timezone.utc)


def _since_epoch(moment: datetime) -> int:
    passed = moment - _EPOCH
    return (passed.days * 86_400 + passed.seconds) * _US + passed.microseconds


def _moment(per_unit: int, value: Any) -> int:
    """Return a point in time, microseconds since the epoch.

    Args:
        per_unit: Microseconds of a whole number. A number with a fraction has seconds.
        value: The decoded value.
    """
    if _is_integer(value):
        return value * per_unit
    if isinstance(value, Number):
        return _micros(Decimal(value.text))
    if isinstance(value, list):
        return _since_epoch(_from_parts(value))
    return _since_epoch(_from_text(_text(value)))


def _date(value: Any) -> int:
    """Return days since the epoch."""
    if _is_integer(value):
        return value
    found = date(*value) if isinstance(value, list) else date.fromisoformat(_text(value))
    return found.toordinal() - _EPOCH_DATE


def _time_of_day(per_unit: int, value: Any) -> int:
    """Return microseconds since midnight."""
    if _is_integer(value):
        return value * per_unit
    if isinstance(value, list):
        hour, minute, second, micros = _integers(value, 2, 4)
        found = time(hour, minute, second, micros)
    else:
        found = time.fromisoformat(_text(value))
    return ((found.hour * 60 + found.minute) * 60 + found.second) * _US + found.microsecond


def _duration(value: Any) -> int:
    """Return the microseconds of a number of seconds, or of a text such as ``PT1M30.5S``."""
    if _is_integer(value):
        return value * _US
    if isinstance(value, Number):
        return _micros(Decimal(value.text))
    value = _text(value)
    found = _ISO_DURATION.fullmatch(value)
    if found is None or not any(found.groups()[1:]):
        raise ValueError(f"{value[:40]!r} is no duration")
    sign, days, hours, minutes, seconds = (part or "0" for part in found.groups())
    whole = (int(days) * 24 + int(hours)) * 60 + int(minutes)
    total = whole * 60 + Decimal(seconds)
    return _micros(-total if sign == "-" else total)


# -- Texts ----------------------------------------------------------------------------------------


def _number_text(value: Any) -> str:
    if isinstance(value, Number):
        return value.text
    return str(value) if _is_integer(value) else _text(value)


def _characters(value: Any) -> str:
    """Return a character, or an array of them, as text."""
    if isinstance(value, list):
        return "".join(map(_characters, value))
    return chr(value) if _is_integer(value) else _text(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} is no string")
    if value.startswith("\x01"):  # BARE
        raise ValueError("a float is no string")
    return value


def _year_month(value: Any) -> str:
    if isinstance(value, list):
        year, month = value
        return f"{year:04}-{month:02}"
    return _text(value)


def _offset_time(value: Any) -> str:
    """Return a time of day with its offset, as ISO 8601 writes it."""
    if not isinstance(value, list):
        return _text(value)
    *parts, offset = value
    hour, minute, second, nanos = [*parts, 0, 0][:4]
    fraction = f".{nanos:09}".rstrip("0").rstrip(".")
    return f"{hour:02}:{minute:02}:{second:02}{fraction}{_text(offset)}"


# -- Types of a schema ----------------------------------------------------------------------------


class Known(NamedTuple):
    """The column of values that are not described by their schema."""

    column: pa.DataType
    form: Form | None = None
    """``None``: they are what msgspec and Arrow read for the column."""
    unit: pa.DataType | None = None
    """Type of time in the unit of whole numbers; ``None``: the column's."""


LOGICAL: Mapping[str, Form] = {
    "date": Form(_date),
    "time-millis": Form(partial(_time_of_day, 1_000)),
    "time-micros": Form(partial(_time_of_day, 1)),
    "timestamp-millis": Form(partial(_moment, 1_000)),
    "timestamp-micros": Form(partial(_moment, 1)),
    "local-timestamp-millis": Form(partial(_moment, 1_000)),
    "local-timestamp-micros": Form(partial(_moment, 1)),
}
"""Forms of Avro's logical types of integers."""
_CHARACTERS = Known(pa.string(), Form(_characters))
_NUMBER_TEXT = Known(pa.string(), Form(_number_text))
_BY_JAVA_CLASS: Mapping[tuple[str, str], Known] = {
    ("int", "java.lang.Character"): _CHARACTERS,
    ("array", "[C"): _CHARACTERS,
    ("string", "java.math.BigDecimal"): _NUMBER_TEXT,
    ("string", "java.math.BigInteger"): _NUMBER_TEXT,
}
_MILLISECONDS = Known(_TIMESTAMP, LOGICAL["timestamp-millis"], pa.timestamp("ms", tz="UTC"))
_SECONDS = Known(_TIMESTAMP, Form(partial(_moment, _US)), pa.timestamp("s", tz="UTC"))
_TEXT = Known(pa.string(), Form(_text))
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
    "java.sql.Time": Known(_TIME, LOGICAL["time-millis"], pa.time32("ms")),
    "java.time.Duration": Known(pa.duration("us"), Form(_duration), pa.duration("s")),
    "java.time.LocalDate": Known(pa.date32(), LOGICAL["date"]),
    "java.time.LocalDateTime": Known(pa.timestamp("us"), LOGICAL["local-timestamp-micros"]),
    "java.time.LocalTime": Known(_TIME, LOGICAL["time-micros"]),
    "java.time.OffsetTime": Known(pa.string(), Form(_offset_time)),
    "java.time.Year": Known(pa.int32()),
    "java.time.YearMonth": Known(pa.string(), Form(_year_month)),
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
    """Return the column of the values of a Java class; ``None`` if they are its fields.

    Args:
        name: Full name of the record.
        fields: Its fields.
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
        namespace: Namespace of names without one: a pair within a pair has none.
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


def key_of(kind: pa.DataType) -> tuple[pa.DataType, _Convert | None]:
    """Return the type of a map's keys, and what converts their texts to it."""
    if pa.types.is_integer(kind):
        return kind, int
    return pa.string(), None
