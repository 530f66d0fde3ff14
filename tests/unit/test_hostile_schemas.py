"""Malformed schemas and values: no hang, no crash, no wrong rows."""

from __future__ import annotations

import json
from base64 import b64encode
from datetime import datetime, timezone
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2

from keyshard.columns.codec import decode_rows
from keyshard.columns.codecs import codec_of
from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import SchemaError

TOPIC = "persistent://public/default/orders"


def record(*fields: tuple[str, Any], name: str = "R") -> dict[str, Any]:
    return {
        "type": "record", "name": name, "fields": [{"name": one, "type": of} for one, of in fields]
    }  # fmt: skip


def fixed(size: Any, **logical: Any) -> dict[str, Any]:
    return {"type": "fixed", "name": "F", "size": size} | logical


def doubling(levels: int) -> dict[str, Any]:
    """Each level holds the one below twice."""
    found = record(("x", "int"), name="R0")
    for level in range(1, levels):
        found = record(("a", found), ("b", f"R{level - 1}"), name=f"R{level}")
    return found


def nested(levels: int) -> dict[str, Any]:
    found: Any = "int"
    for level in range(levels):
        found = record(("a", found), name=f"R{level}")
    return dict(found)


def rows_of(kind: str, schema: Any, *values: bytes) -> tuple[list[Any], dict[int, str]]:
    codec = codec_of(TopicSchema(kind, json.dumps(schema).encode()), TOPIC)
    found, reasons = decode_rows(
        codec, pa.array(values, pa.binary()), pa.nulls(len(values), pa.binary())
    )
    found.validate(full=True)
    return found.to_pylist(), reasons


TIME = {"type": "int", "logicalType": "time-millis"}
MICROS = {"type": "long", "logicalType": "time-micros"}
LIST_OF_TIMES = {"type": "array", "items": TIME}


@pytest.mark.parametrize("kind", ["AVRO", "JSON"])
@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (record(("a", {"type": "array", "items": fixed(0)})), "'a' .*items without a type"),
        (record(("a", {"type": "map", "values": record(("f", fixed(0)))})), "without a type"),
        (record(("a", fixed(-1))), "not an Avro schema"),
        (record(("a", fixed("8"))), "not an Avro schema"),
        (doubling(60), "'a.a.*' .*exceeds the limit of 20000 fields"),
        (record(("a", "int"), ("b", "int"), ("a", "int")), "two fields named 'a'"),
        (record(("o", record(("a", "int"), ("a", "int"), name="I"))), "'o' .*two fields named 'a'"),
    ],
)
def test_a_too_large_or_invalid_schema_is_refused_with_a_remedy(
    kind: str, schema: Any, why: str
) -> None:
    with pytest.raises(SchemaError, match=rf"(?s){why}.*valueFormat=raw"):
        rows_of(kind, schema)


@pytest.mark.parametrize(
    ("kind", "schema"),
    [
        ("JSON", record(('a "b"', "int"))),
        ("JSON", record(("a\\b", "int"))),
        ("AVRO", record(("a", {"type": "enum", "name": "E", "symbols": ["a b"]}))),
        ("AVRO", record(("a", record(("x", "int"), name="Q")), ("b", record(name="Q")))),
    ],
)
def test_a_schema_that_no_package_takes_is_refused_before_any_value(kind: str, schema: Any) -> None:
    with pytest.raises(
        SchemaError, match=r"(?s)schema of .*orders cannot be used.*valueFormat=raw"
    ):
        rows_of(kind, schema)


@pytest.mark.parametrize("name", ["größe", "a b", "1a", "a.b", "键"])
@pytest.mark.parametrize("kind", ["AVRO", "JSON"])
@pytest.mark.parametrize("escaped", [False, True])
def test_a_field_of_any_name_has_its_value(kind: str, name: str, escaped: bool) -> None:
    inner = record((name, "int"), name="I")
    schema = record((name, "int"), ("o", inner), ("l", {"type": "array", "items": "I"}))
    wanted = {name: 1, "o": {name: 2}, "l": [{name: 3}]}
    text = json.dumps(wanted, ensure_ascii=escaped).encode()
    value = text if kind == "JSON" else bytes([2, 4, 2, 6, 0])
    assert rows_of(kind, schema, value, value) == ([wanted, wanted], {})


def test_names_that_are_not_ascii_change_no_other_value() -> None:
    decimal = {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}
    inner = record(
        ("é", ["null", "bytes"]), ("d", decimal), ("m", {"type": "map", "values": "int"})
    )
    data = b'{"o": {"\xc3\xa9": "/w==", "d": 1.25, "m": {"\xc3\xa9": 1}, "other": 5}}'
    rows, reasons = rows_of("JSON", record(("o", inner)), data, b"{}", b'{"o": {}}')
    full = {"é": b"\xff", "d": Decimal("1.25"), "m": [("é", 1)]}
    assert rows == [{"o": full}, {"o": None}, {"o": dict.fromkeys(full)}]
    assert not reasons


@pytest.mark.parametrize("levels", [60, 120])
def test_records_in_records_are_read(levels: int) -> None:
    (found,), reasons = rows_of("AVRO", nested(levels), b"\x02")
    assert not reasons
    for _ in range(levels):
        found = found["a"]
    assert found == 1


@pytest.mark.parametrize("of", ["long", {"type": "long", "logicalType": "timestamp-millis"}])
def test_a_field_that_is_always_null_has_its_place_in_each_list(of: Any) -> None:
    inner = record(("a", of), ("n", "null"), name="I")
    schema = record(
        ("l", {"type": "array", "items": inner}), ("m", {"type": "map", "values": "I"}),
        ("o", ["null", {"type": "array", "items": "I"}]),
    )  # fmt: skip
    one = {"a": 1 if of == "long" else datetime.fromtimestamp(0.001, timezone.utc), "n": None}
    many = b'{"l": [{"a": 1}, {"a": 1}, {"a": 1}, {"a": 1}], "m": {"x": {"a": 1}}}'
    rows, reasons = rows_of("JSON", schema, many, b"{}", b'{"l": [], "m": {}, "o": [{"a": 1}]}')
    assert rows == [
        {"l": [one] * 4, "m": [("x", one)], "o": None},
        {"l": None, "m": None, "o": None},
        {"l": [], "m": [], "o": [one]},
    ]
    assert not reasons


def test_a_value_that_may_be_null_as_a_whole_is_read() -> None:
    schema = ["null", record(("a", "int"))]
    assert rows_of("AVRO", schema, b"\x02\x02", b"\x00") == ([{"a": 1}, None], {})


@pytest.mark.parametrize(
    ("kind", "schema", "good", "bad"),
    [
        ("AVRO", record(("a", TIME)), b"\x02", b"\x01"),
        ("AVRO", record(("a", TIME)), b"\x02", b"\x80\xf0\xb2\x52"),
        ("AVRO", record(("a", LIST_OF_TIMES)), b"\x02\x02\x00", b"\x02\x01\x00"),
        ("AVRO", record(("a", MICROS)), b"\x02", b"\x01"),
        ("JSON", record(("a", TIME)), b'{"a": 1}', b'{"a": -1}'),
        ("JSON", record(("a", TIME)), b'{"a": 1}', b'{"a": 86400000}'),
        ("JSON", record(("a", MICROS)), b'{"a": 1}', b'{"a": 86400000000}'),
    ],
)
def test_a_time_beyond_its_day_gives_its_row_a_reason(
    kind: str, schema: Any, good: bytes, bad: bytes
) -> None:
    rows, reasons = rows_of(kind, schema, good, bad, good)
    assert rows[1] in (None, {"a": None})
    assert list(reasons) == [1]
    assert rows[0] == rows[2] != {"a": None}


def test_a_decimal_of_millions_of_digits_is_refused_at_once() -> None:
    schema = record(("a", {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2}))
    size = b"\x80\x80\x80\x02"  # 2**21
    rows, reasons = rows_of("AVRO", schema, size + b"\x7f" * 2**21, b"\x04\xff\x85")
    assert rows == [None, {"a": Decimal("-1.23")}]
    assert "out of range" in reasons[0]


def test_a_decimal_that_its_bytes_cannot_hold_is_bytes() -> None:
    for precision, wanted in ((2, Decimal("0.5")), (3, b"\x05")):
        schema = record(("a", fixed(1, logicalType="decimal", precision=precision, scale=1)))
        assert rows_of("AVRO", schema, b"\x05") == ([{"a": wanted}], {})


def test_protobuf_messages_without_end_are_refused() -> None:
    file = descriptor_pb2.FileDescriptorProto(name="p.proto", package="p", syntax="proto3")
    for level in range(60):
        message = file.message_type.add(name=f"M{level}")
        for number in (1, 2):
            below = f".p.M{level - 1}" if level else None
            kind = 11 if level else 5
            message.field.add(name=f"f{number}", number=number, label=1, type=kind, type_name=below)
    definition = {
        "fileDescriptorSet": b64encode(
            descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString()
        ).decode(),
        "rootMessageTypeName": "p.M59",
    }
    with pytest.raises(SchemaError, match=r"(?s)limit of 20000 fields.*valueFormat=raw"):
        rows_of("PROTOBUF_NATIVE", definition)
