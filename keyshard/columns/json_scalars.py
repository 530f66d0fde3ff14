"""Conversions of single JSON values: times, texts and keys, as Pulsar's Java client writes them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from datetime import date, time
from decimal import Decimal
from functools import partial
from typing import Any, NamedTuple, TypeGuard, cast

Convert = Callable[[Any], Any]
"""Converts a decoded value other than null; raises ValueError, TypeError or ArithmeticError."""
BARE = "\x01"
"""Prefix of strings that were floats without quotes, such as ``NaN``; no other string begins with
it."""
BARE_IN_JSON = r"\u0001"


class Number:
    """A JSON number with a fraction or an exponent, as it is written.

    Arrow refuses this class for every type. Arrow would truncate a ``Decimal`` to an integer.
    """

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


# -- Numbers, arrays and texts --------------------------------------------------------------------


def _is_integer(value: Any) -> TypeGuard[int]:
    return type(value) is int


def _as_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} is no string")
    if value.startswith(BARE):
        raise ValueError("a float is no string")
    return value


def _digits(value: int | Number) -> str:
    return str(value) if _is_integer(value) else cast("Number", value).text


def _refuse(value: Any) -> Any:
    raise TypeError(f"{type(value).__name__} has no meaning here")


def _one_of(of_number: Convert, of_array: Convert, of_text: Callable[[str], Any]) -> Convert:
    """Return a conversion of a number, an array or a text. An empty text is null, as in Jackson."""

    def convert(value: Any) -> Any:
        if _is_integer(value) or isinstance(value, Number):
            return of_number(value)
        if isinstance(value, list):
            return of_array(value)
        found = _as_text(value).strip()
        return of_text(found) if found else None

    return convert


def _integers(value: list[Any], least: int, most: int) -> list[int]:
    """Return the items of an array, filled up with zeros."""
    if not least <= len(value) <= most or not all(map(_is_integer, value)):
        raise ValueError("an array is no time")
    return value + [0] * (most - len(value))


# -- Times ----------------------------------------------------------------------------------------

_US = 1_000_000
_DAY_US = 86_400 * _US
_CYCLE_YEARS, _CYCLE_DAYS = 400, 146_097
"""The calendar repeats after these."""
_EPOCH_DATE = date(1970, 1, 1).toordinal()
_EXPONENT_MAX = 30
"""Largest decimal exponent of a time; the digits of a larger one would take hours."""
_TEXT_MAX = 100
"""Most characters of a time."""
_DATE = r"(\d{4}|[+-]\d{4,9})-(\d\d)-(\d\d)"
_TIME_OF_DAY = r"(\d\d):(\d\d)(?::(\d\d)(?:\.(\d{0,9}))?)?"
_OFFSET = r"(Z|([+-])(\d\d?)(?::?(\d\d)(?::?(\d\d))?)?)"
_ISO = re.compile(
    rf"(?:{_DATE})?(?:(?:^|T){_TIME_OF_DAY}(?:{_OFFSET}(?:\[[^]]+\])?)?)?",
    re.IGNORECASE | re.ASCII,
)
_ISO_YEAR_MONTH = re.compile(r"(\d{4,9})-(\d\d)", re.ASCII)
_ISO_DURATION = re.compile(
    r"([+-]?)P(?=[-+\dT])(?:([+-]?\d+)D)?"
    r"(?:T(?=[-+\d])(?:([+-]?\d+)H)?(?:([+-]?\d+)M)?(?:([+-]?\d+(?:[.,]\d{0,9})?)S)?)?",
    re.IGNORECASE | re.ASCII,
)
_OFFSET_S_MAX = 18 * 3_600


class _Iso(NamedTuple):
    """The parts of a text as ISO 8601 writes it."""

    days: int | None
    """Since the epoch."""
    nanos: int | None
    """Nanoseconds since midnight."""
    offset_s: int | None


def _iso(text: str) -> _Iso:
    found = _ISO.fullmatch(text) if len(text) <= _TEXT_MAX else None
    if found is None:
        raise ValueError(f"{text[:40]!r} is no time")
    year, month, day, hour, minute, second, fraction, zone, sign, *offset = found.groups()
    days = None if year is None else _days(int(year), int(month), int(day))
    nanos = offset_s = None
    if hour is not None:
        nanos = _nanos(
            int(hour), int(minute), int(second or 0), int((fraction or "").ljust(9, "0"))
        )
    if zone is not None:
        hours, minutes, seconds = (int(one or 0) for one in offset)
        offset_s = (hours * 60 + minutes) * 60 + seconds
        if max(minutes, seconds) > 59 or offset_s > _OFFSET_S_MAX:
            raise ValueError(f"{zone} is no offset")
        offset_s = -offset_s if sign == "-" else offset_s
    return _Iso(days, nanos, offset_s)


def _days(year: int, month: int, day: int) -> int:
    """Return days since the epoch, of any year."""
    cycle, year = divmod(year, _CYCLE_YEARS)
    found = date(_CYCLE_YEARS + year, month, day).toordinal() - _EPOCH_DATE
    return found + (cycle - 1) * _CYCLE_DAYS


def _nanos(hour: int, minute: int, second: int, nanos: int) -> int:
    """Return nanoseconds since midnight."""
    time(hour, minute, second, nanos // 1_000)
    return ((hour * 60 + minute) * 60 + second) * 1_000_000_000 + nanos


def _micros(seconds: Decimal) -> int:
    """Return seconds as microseconds, rounded down."""
    if not seconds.is_finite() or seconds.adjusted() > _EXPONENT_MAX:
        raise ValueError(f"{str(seconds)[:40]} is no time")
    if seconds.adjusted() < -_EXPONENT_MAX:
        return 0 if seconds >= 0 else -1
    return math.floor(seconds * _US)


def _of_number(per_unit: int, value: int | Number) -> int:
    """Return microseconds of a whole number of units, or of seconds with a fraction."""
    return value * per_unit if _is_integer(value) else _micros(Decimal(_digits(value)))


def _of_whole(per_unit: int, value: int | Number) -> int:
    return value * per_unit if _is_integer(value) else _refuse(value)


def _moment_of_array(value: list[Any]) -> int:
    """Return the time of ``[year, month, day, hour, minute, second, nanosecond]``."""
    year, month, day, *time_of_day = _integers(value, 5, 7)
    return _days(year, month, day) * _DAY_US + _nanos(*time_of_day) // 1_000


def _moment_of_text(text: str) -> int:
    """Return microseconds since the epoch; without an offset, the time is UTC."""
    found = _iso(text)
    if found.days is None:
        raise ValueError("a time without a date is no point in time")
    micros = (found.nanos or 0) // 1_000 - (found.offset_s or 0) * _US
    return found.days * _DAY_US + micros


def _local_of_text(text: str) -> int:
    found = _iso(text)
    if found.nanos is None or found.offset_s:
        raise ValueError("it is no local time")
    return _moment_of_text(text)


def _date_of_text(text: str) -> int:
    found = _iso(text)
    if found.days is None or found.offset_s:
        raise ValueError("it is no local date")
    return found.days


def _time_of_text(text: str) -> int:
    found = _iso(text)
    if found.nanos is None or found.offset_s is not None:
        raise ValueError("it is no local time of day")
    return found.nanos // 1_000


def _duration_of_text(text: str) -> int:
    found = _ISO_DURATION.fullmatch(text) if len(text) <= _TEXT_MAX else None
    if found is None:
        raise ValueError(f"{text[:40]!r} is no duration")
    sign, days, hours, minutes, seconds = (part or "0" for part in found.groups())
    whole = (int(days) * 24 + int(hours)) * 60 + int(minutes)
    total = whole * 60 + Decimal(seconds.replace(",", "."))
    return _micros(-total if sign == "-" else total)


def instant(per_unit: int) -> Convert:
    """Return the conversion of points in time to microseconds since the epoch.

    Args:
        per_unit: Microseconds in the unit of whole numbers. Numbers with a fraction are seconds.
    """
    return _one_of(partial(_of_number, per_unit), _moment_of_array, _moment_of_text)


def local(per_unit: int) -> Convert:
    """Return the conversion of times without a zone to microseconds since the epoch."""
    return _one_of(partial(_of_whole, per_unit), _moment_of_array, _local_of_text)


def time_of_day(per_unit: int) -> Convert:
    """Return the conversion of times of day to microseconds since midnight."""
    return _one_of(
        partial(_of_whole, per_unit),
        lambda value: _nanos(*_integers(value, 2, 4)) // 1_000,
        _time_of_text,
    )


milliseconds = _one_of(partial(_of_whole, 1_000), _refuse, _moment_of_text)
"""Converts points in time of whole milliseconds to microseconds since the epoch."""
days = _one_of(partial(_of_whole, 1), lambda value: _days(*_integers(value, 3, 3)), _date_of_text)
"""Converts dates to days since the epoch."""
duration = _one_of(partial(_of_number, _US), _refuse, _duration_of_text)
"""Converts durations to microseconds."""


# -- Columns of texts -----------------------------------------------------------------------------

_DECIMAL = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:E[+-]?\d+)?", re.IGNORECASE | re.ASCII)
_INTEGER = re.compile(r"[+-]?\d+")
_INTEGER_DIGITS_MAX = 4_000
"""Most digits of an integer that is written with an exponent."""
_BMP_MAX = 0xFFFF
"""Largest character that a ``char`` of Java holds."""


def _decimal_of_text(text: str) -> str:
    if _DECIMAL.fullmatch(text) is None:
        raise ValueError(f"{text[:40]!r} is no number")
    return str(Decimal(text))


def _integer_of_number(value: int | Number) -> str:
    if _is_integer(value):
        return str(value)
    found = Decimal(_digits(value))
    if found.adjusted() > _INTEGER_DIGITS_MAX:
        raise ValueError("an integer has too many digits")
    return str(int(found))


def _integer_of_text(text: str) -> str:
    if _INTEGER.fullmatch(text) is None:
        raise ValueError(f"{text[:40]!r} is no integer")
    return text.removeprefix("+")


def character(value: Any) -> str | None:
    """Return the text of a character, or of its number; an empty text is null, as in Jackson."""
    found = chr(value) if _is_integer(value) else _as_text(value)
    if len(found) > 1 or ord(found or " ") > _BMP_MAX:
        raise ValueError(f"{found[:40]!r} is no character")
    return found or None


def characters(value: Any) -> str:
    """Return the text of an array of characters, which Java's client writes as a text."""
    if not isinstance(value, list):
        return _as_text(value)
    return "".join(character(_as_text(one)) or "" for one in value)


decimal_text = _one_of(lambda value: _decimal_of_text(_digits(value)), _refuse, _decimal_of_text)
"""Converts numbers to texts with all their digits."""
integer_text = _one_of(_integer_of_number, _refuse, _integer_of_text)
"""Converts numbers to texts of integers, cut off."""


def _month_of_array(value: list[Any]) -> str:
    year, month = _integers(value, 2, 2)
    _days(year, month, 1)
    return f"{year:04}-{month:02}"


def _month_of_text(text: str) -> str:
    found = _ISO_YEAR_MONTH.fullmatch(text)
    if found is None:
        raise ValueError(f"{text[:40]!r} is no month")
    return _month_of_array(list(map(int, found.groups())))


def _offset_time(nanos: int, offset_s: int) -> str:
    """Return a time of day with its offset, as ISO 8601 writes it."""
    seconds, nanos = divmod(nanos, 1_000_000_000)
    fraction = f".{nanos:09}".rstrip("0").rstrip(".")
    clock = f"{seconds // 3_600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}{fraction}"
    if not offset_s:
        return f"{clock}Z"
    sign, apart = "-" if offset_s < 0 else "+", abs(offset_s)
    rest = f":{apart % 60:02}" if apart % 60 else ""
    return f"{clock}{sign}{apart // 3_600:02}:{apart // 60 % 60:02}{rest}"


def _offset_time_of_array(value: list[Any]) -> str:
    *parts, offset = value
    zone = _iso(f"00:00{_as_text(offset)}")
    if zone.offset_s is None:
        raise ValueError("a time lacks its offset")
    return _offset_time(_nanos(*_integers(parts, 2, 4)), zone.offset_s)


def _offset_time_of_text(text: str) -> str:
    found = _iso(text)
    if found.days is not None or found.nanos is None or found.offset_s is None:
        raise ValueError(f"{text!r} is no time of day with an offset")
    return _offset_time(found.nanos, found.offset_s)


month = _one_of(_refuse, _month_of_array, _month_of_text)
"""Converts months of a year to texts such as ``2026-01``."""
offset_time = _one_of(_refuse, _offset_time_of_array, _offset_time_of_text)
"""Converts times of day with an offset to texts such as ``13:05:00.12+02:00``."""


# -- Keys of maps ---------------------------------------------------------------------------------


def integer_key(value: Any) -> int:
    """Return the integer of a number or a text."""
    return value if _is_integer(value) else int(_integer_of_text(_as_text(value)))


def text_key(value: Any) -> str:
    """Return the text of a number or a text."""
    is_number = _is_integer(value) or isinstance(value, Number)
    return _digits(value) if is_number else _as_text(value)
