"""JSON objects of drawn schemas, whole and damaged, as :mod:`json` reads them."""

from __future__ import annotations

import json
import re
from base64 import b64decode, b64encode
from datetime import date, datetime, timedelta
from decimal import Decimal
from random import Random
from typing import Any

from keyshard.core.topic_schema import TopicSchema
from tests.fuzz.avro_values import Drawn, as_column, is_time
from tests.fuzz.decoding import comparable, damaged, decoded
from tests.fuzz.promises import promise

_JUNK = (
    b"NaN", b"null", b'"', b"{}", b"[]", b",", b":", b"\\", b"\\ud800", b"1e400", b"\xef\xbb\xbf",
    b"-", b"0", b".5", b" ", b'"f0":1,', b"true", b"9" * 30,
)  # fmt: skip


def json_values(random: Random, _name: str) -> None:
    """Each object is read as json reads it, or is malformed."""
    drawn = Drawn(random, unions=False)
    schema = drawn.record(2)
    rows = [drawn.value(schema) for _ in range(6)]
    data = [_stored(random, row, schema) for row in rows]
    many = data + [_damaged(random, data) for _ in range(30)]
    found, reasons = decoded(TopicSchema("JSON", json.dumps(schema).encode()), many)
    for place, one in enumerate(rows):
        promise(place not in reasons, f"{data[place]!r} is malformed: {reasons.get(place)}")
        wanted = comparable(as_column(one, schema))
        promise(found[place] == wanted, f"{found[place]} is not {wanted} of {json.dumps(schema)}")
    for place in range(len(rows), len(many)):
        if place in reasons:
            _check_rest(many[place], found[place], schema)
            continue
        try:
            read = _read(json.loads(many[place], parse_float=Decimal), schema)
        except _UnclearError:
            continue
        except Exception as error:
            raise AssertionError(f"{many[place]!r} is {found[place]}, and {error!r}") from error
        promise(
            found[place] == comparable(as_column(read, schema)),
            f"{many[place]!r} is {found[place]}, not {read}",
        )


def _check_rest(value: bytes, found: dict[str, Any] | None, schema: Any) -> None:
    """Of a malformed object, each field is as json reads it, or null."""
    if found is None:
        return
    try:
        whole = json.loads(value, parse_float=Decimal)
    except (ValueError, ArithmeticError):  # -NaN or a huge exponent, which cost only their field
        return
    for one in schema["fields"]:
        name, kind = one["name"], one["type"]
        if isinstance(found[name], dict | list | None):
            continue
        try:
            read = _read(whole[name], kind)
        except _UnclearError:
            continue
        wanted = comparable(as_column(read, kind))
        promise(found[name] == wanted, f"{name} of {value!r} is {found[name]}, not {wanted}")


class _UnclearError(Exception):
    """json does not tell the meaning of a time in another form than that of the schema."""


def _damaged(random: Random, data: list[bytes]) -> bytes:
    if random.random() < 0.3:
        return damaged(random, data)
    found = bytearray(random.choice(data))
    place = random.randrange(len(found) + 1)
    found[place : place + random.choice((0, 1, 4))] = random.choice(_JUNK)
    return bytes(found)


def _stored(random: Random, row: dict[str, Any], schema: Any) -> bytes:
    """Encode a value as Pulsar's Java or Python client does."""
    forms = random if random.random() < 0.5 else None
    output = _told(row, schema, forms) | random.choice(({}, {"unknown": [{"f0": "\u00e9"}, None]}))
    if random.random() < 0.3:
        output = {name: one for name, one in output.items() if one is not None}
    text = json.dumps(output, ensure_ascii=random.random() < 0.5)
    return _NUMBER.sub(r"\1", text).encode()


_NUMBER = re.compile(r'"@(-?[\d.]+)@"')
"""A number that json does not write."""


def _told(value: Any, kind: Any, forms: Random | None) -> Any:
    """Return a value as it is written.

    Args:
        value: The value.
        kind: Its type.
        forms: Decides whether times have the form of Java's client; ``None``: they have not.
    """
    if isinstance(kind, list):
        kind = next(one for one in kind if one != "null")
    if value is None:
        return None
    name = kind if isinstance(kind, str) else kind["type"]
    if name == "record":
        return {
            one["name"]: _told(value[one["name"]], one["type"], forms) for one in kind["fields"]
        }
    if name == "array":
        return [_told(one, kind["items"], forms) for one in value]
    if name == "map":
        return {key: _told(one, kind["values"], forms) for key, one in value.items()}
    if forms is not None and is_time(kind) and forms.random() < 0.5:
        return _as_java(value, kind["logicalType"])
    return _leaf(value)


def _leaf(value: Any) -> Any:
    if isinstance(value, bytes):
        return b64encode(value).decode()
    return float(value) if isinstance(value, Decimal) else value


def _as_java(value: int, logical: str) -> Any:
    """Return a time as Java's client writes it, if Python has such a time."""
    micros = value * (1_000 if logical.endswith("millis") else 1)
    if logical.startswith("timestamp"):
        return f"@{Decimal(micros).scaleb(-6):f}@"
    try:
        if logical == "date":
            one = date.fromordinal(date(1970, 1, 1).toordinal() + value)
            return [one.year, one.month, one.day]
        at = datetime(1970, 1, 1) + timedelta(microseconds=micros)  # noqa: DTZ001
    except (OverflowError, ValueError):
        return value
    time = [at.hour, at.minute, at.second, at.microsecond * 1_000]
    return time if logical.startswith("time") else [at.year, at.month, at.day, *time]


def _read(output: Any, kind: Any) -> Any:
    """Return the meaning of an object, field by field."""
    if isinstance(kind, list):
        kind = next(one for one in kind if one != "null")
    name = kind if isinstance(kind, str) else kind["type"]
    if output is None:
        return None
    if is_time(kind) and type(output) is not int:
        raise _UnclearError
    if name == "record":
        return {one["name"]: _read(output.get(one["name"]), one["type"]) for one in kind["fields"]}
    if name == "array":
        return [_read(one, kind["items"]) for one in output]
    if name == "map":
        return {key: _read(one, kind["values"]) for key, one in output.items()}
    if isinstance(kind, dict) and kind.get("logicalType") == "decimal":
        return Decimal(output)
    if name in ("bytes", "fixed"):
        output = b64decode(output, validate=True)
    return float(output) if name in ("float", "double") else output
