"""Kinds of values: one row each, with their schemas, bytes, and the columns that a reader gets."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta, timezone
from typing import Any, NamedTuple

import fastavro
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from tests.streams import values
from tests.streams.values import INLINE, NONE, RECORDS, SEPARATED, TEXT, Schema

BYTES_FIELD, OF_JAVA = "AVRO of bytes", "PROTOBUF"
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MS, _DAY_S = 1_700_000_000_123, 86_400
_THREE_BYTES = b"\x01\x02\x03"
"""Bytes that no number can be."""


class Kind(NamedTuple):
    """A kind of value."""

    schema: Callable[[int], Schema | None]
    """Schema of a version."""
    encoded: Callable[[int, int, str | bytes | None], bytes]
    """Bytes of a message: of its version, number and key."""
    some: str
    """Columns that a query may declare."""
    row: Callable[[int], dict[str, Any]] | None = None
    """Columns of a message as :func:`plain` shows them, by its number. ``None``:
    :func:`tests.streams.values.wrong` judges."""
    malformed: Callable[[int], bytes | None] = lambda _: None
    """Bytes that no version can be, by the number of a message."""
    versions: bool = False
    """Whether it has a second version."""
    tombstones: bool = True


def plain(value: Any) -> Any:
    """Return a value in one form for every host: times in microseconds, dates in days."""
    if isinstance(value, datetime):
        aware = value if value.tzinfo else value.replace(tzinfo=timezone.utc)
        return (aware - _EPOCH) // timedelta(microseconds=1)
    if isinstance(value, date):
        return (value - _EPOCH.date()).days
    if isinstance(value, time):
        return (
            (value.hour * 60 + value.minute) * 60 + value.second
        ) * 1_000_000 + value.microsecond
    return bytes(value) if isinstance(value, bytearray) else value


def _older(name: str, some: str, *, tombstones: bool = True) -> Kind:
    """A kind that the streams of Spark have, too."""
    return Kind(
        lambda version: values.schema_of(name, version),
        lambda version, number, key: values.encoded(name, version, number, _name(number), key),
        some,
        None,
        lambda number: None if name == NONE else values.malformed(name, number),
        versions=name in RECORDS,
        tombstones=tombstones,
    )


def _name(number: int) -> str | None:
    return values.Sent(
        number, "", 0, 0, None, None, "", 0, tombstone=False, corrupt=False, payload=None,
        confirmed=True,
    ).name  # fmt: skip


def _primitive(
    name: str, some: str, form: str, made: Callable[[int], tuple[Any, ...]],
    read: Callable[..., Any] = lambda value: value,
) -> Kind:  # fmt: skip
    """A primitive type of Pulsar.

    Args:
        name: The type.
        some: Its type in Spark.
        form: Its bytes, as :mod:`struct` has them.
        made: Stored numbers by the number of a message.
        read: The column value of stored numbers.
    """
    return Kind(
        lambda _: Schema(name),
        lambda _, number, __: struct.pack(f">{form}", *made(number)),
        f"value {some}",
        lambda number: {"value": read(*made(number))},
        lambda _: _THREE_BYTES,
    )


_FIELDS = [{"name": "id", "type": "long"}, {"name": "value", "type": "bytes"}]
_AVRO = {"type": "record", "name": "B", "fields": _FIELDS}


def _of_bytes(_: int, number: int, __: str | bytes | None) -> bytes:
    data = io.BytesIO()
    fastavro.schemaless_writer(data, fastavro.parse_schema(_AVRO), _bytes_row(number))
    return data.getvalue()


def _bytes_row(number: int) -> dict[str, Any]:
    return {"id": number, "value": b"\x00\xff" + str(number).encode()}


def _message() -> Any:
    kind = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="j.proto", package="j", syntax="proto3")
    made = file.message_type.add(name="J")
    for number, (name, type_) in enumerate((("id", kind.TYPE_INT64), ("name", kind.TYPE_STRING))):
        made.field.add(name=name, number=number + 1, type=type_, label=kind.LABEL_OPTIONAL)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("j.J"))


_JAVA_MESSAGE = _message()
_PARSING = json.dumps(
    [
        {"number": number, "name": name, "type": type_, "label": "LABEL_OPTIONAL"}
        for number, name, type_ in ((1, "id", "INT64"), (2, "name", "STRING"))
    ]
)
_JAVA_AVRO = {
    "type": "record", "name": "J",
    "fields": [
        {"name": "id", "type": "long", "default": 0},
        {"name": "name", "type": {"type": "string", "avro.java.string": "String"}, "default": ""},
    ],
}  # fmt: skip


def _of_java(_: int, number: int, __: str | bytes | None) -> bytes:
    data: bytes = _JAVA_MESSAGE(id=number, name=_name(number) or "").SerializeToString()
    return data


def _whole(number: int) -> tuple[int]:
    return (number % 100 - 50,)


def _millis(number: int) -> tuple[int]:
    return (_MS + number * 86_400_123,)


def _instant(number: int) -> tuple[int, int]:
    return 1_700_000_000 - number * 100_000_000, number * 1_000_000 + 1_000


def _day(number: int) -> tuple[int]:
    return (number * 1_000 - 20_000,)


def _time_ns(number: int) -> tuple[int]:
    return (number % 86_400 * 1_000_000_000 + 123_456_789,)


_RECORD = "id bigint, name string"
KINDS: Mapping[str, Kind] = {
    values.AVRO: _older(values.AVRO, _RECORD),
    values.JSON: _older(values.JSON, _RECORD),
    values.PROTOBUF: _older(values.PROTOBUF, _RECORD),
    INLINE: _older(INLINE, "key string, value string", tombstones=False),
    SEPARATED: _older(SEPARATED, "key string, value string"),
    TEXT: _older(TEXT, "value string"),
    NONE: _older(NONE, "value binary"),
    BYTES_FIELD: Kind(
        lambda _: Schema("AVRO", json.dumps(_AVRO)), _of_bytes, "id bigint, value binary",
        _bytes_row, lambda _: b"\x01",
    ),
    OF_JAVA: Kind(
        lambda _: Schema("PROTOBUF", json.dumps(_JAVA_AVRO), {"__PARSING_INFO__": _PARSING}),
        _of_java, _RECORD, lambda number: {"id": number, "name": _name(number) or ""},
        lambda _: b"\xff",
    ),
    "BOOLEAN": _primitive("BOOLEAN", "boolean", "?", lambda number: (number % 2 == 0,)),
    "INT8": _primitive("INT8", "tinyint", "b", _whole),
    "INT16": _primitive("INT16", "smallint", "h", lambda number: (number * 7 - 300,)),
    "INT32": _primitive("INT32", "int", "i", lambda number: (number * 9_999_991 - 2**30,)),
    "INT64": _primitive("INT64", "bigint", "q", lambda number: (number - 2**62,)),
    "FLOAT": _primitive("FLOAT", "float", "f", lambda number: (number / 4 - 5,)),
    "DOUBLE": _primitive("DOUBLE", "double", "d", lambda number: (number / 3 - 1e300,)),
    "DATE": _primitive("DATE", "timestamp", "q", _millis, lambda ms: ms * 1_000),
    "TIME": _primitive("TIME", "timestamp", "q", _millis, lambda ms: ms * 1_000),
    "TIMESTAMP": _primitive("TIMESTAMP", "timestamp", "q", _millis, lambda ms: ms * 1_000),
    "INSTANT": _primitive(
        "INSTANT", "timestamp", "qi", _instant, lambda at_s, ns: at_s * 1_000_000 + ns // 1_000
    ),
    "LOCAL_DATE": _primitive("LOCAL_DATE", "date", "q", _day),
    "LOCAL_TIME": _primitive("LOCAL_TIME", "bigint", "q", _time_ns, lambda ns: ns // 1_000),
    "LOCAL_DATE_TIME": _primitive(
        "LOCAL_DATE_TIME", "timestamp_ntz", "qq", lambda number: (*_day(number), *_time_ns(number)),
        lambda day, ns: day * _DAY_S * 1_000_000 + ns // 1_000,
    ),
}  # fmt: skip
"""Every kind, by its name."""
