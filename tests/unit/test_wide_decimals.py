"""Decimals that no decimal column can hold have another column, and a warning names them."""

from __future__ import annotations

import io
import json
import logging
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
import pytest

from keyshard.columns.codecs import codec_of
from keyshard.core.topic_schema import TopicSchema

Schema = dict[str, Any]

DIGITS = Decimal("1" * 40 + ".25")
UNSCALED = int("1" * 40 + "25")
STORED = UNSCALED.to_bytes(18, "big", signed=True)


def decimal(precision: Any, scale: Any = 2, kind: str = "bytes", **more: Any) -> Schema:
    named = {"logicalType": "decimal", "precision": precision, "scale": scale}
    return {"type": kind, **named, **more}


def record(field: Any) -> Schema:
    inner = {"type": "record", "name": "Inner", "fields": [{"name": "b", "type": field}]}
    return {"type": "record", "name": "Outer", "fields": [{"name": "a", "type": inner}]}


def read(kind: str, schema: Schema, value: bytes, topic: str) -> tuple[pa.DataType, Any]:
    """Decode one value; return the type of the field a.b and its value."""
    codec = codec_of(TopicSchema(kind, json.dumps(schema).encode()), topic)
    row = codec.decode(pa.array([value], pa.binary()), pa.nulls(1, pa.binary()), None)
    return codec.type.field("a").type.field("b").type, row.to_pylist()[0]["a"]["b"]


def avro(schema: Schema, value: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, schema, {"a": {"b": value}})
    return out.getvalue()


SHAPES = [
    pytest.param(lambda one: one, id="field"),
    pytest.param(lambda one: {"type": "array", "items": one}, id="list"),
    pytest.param(lambda one: {"type": "map", "values": ["null", one]}, id="map"),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_in_avro_its_stored_bytes_are_a_binary_column(
    shape: Any, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    schema, topic = record(shape(decimal(50))), request.node.name
    name = request.node.callspec.id
    given: Any = {"field": DIGITS, "list": [DIGITS], "map": {"k": DIGITS}}[name]
    kind, found = read("AVRO", schema, avro(schema, given), topic)
    wanted = {"field": STORED, "list": [STORED], "map": [("k", STORED)]}[name]
    assert found == wanted
    assert "binary" in str(kind)
    (told,) = caplog.messages
    assert f"Field 'a.b' of the schema of {topic} is a decimal (precision 50 and scale 2)" in told
    assert "more than 38 digits" in told
    assert told.endswith("Its column is binary, with the stored bytes.")


@pytest.mark.parametrize("shape", SHAPES)
def test_in_json_all_its_digits_are_a_string_column(
    shape: Any, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    topic, name = request.node.name, request.node.callspec.id
    given = {"field": "%s", "list": "[%s]", "map": '{"k": %s}'}[name] % DIGITS
    schema = record(shape(decimal(50)))
    kind, found = read("JSON", schema, b'{"a": {"b": %s}}' % given.encode(), topic)
    text = str(DIGITS)
    assert found == {"field": text, "list": [text], "map": [("k", text)]}[name]
    assert "string" in str(kind)
    assert caplog.messages[0].endswith("Its column is a string with all digits.")


def test_fixed_bytes_are_wide_too_and_each_field_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    schema = record(decimal(40, 2, "fixed", name="Sum", size=20))
    for _ in range(2):
        kind, found = read("AVRO", schema, avro(schema, Decimal("-1.25")), "fixed")
        assert (kind, found) == (pa.binary(), (-125).to_bytes(20, "big", signed=True))
    assert len(caplog.messages) == 1


def test_parts_of_a_key_value_schema_name_the_field(caplog: pytest.LogCaptureFixture) -> None:
    part = json.dumps(record(decimal(50))).encode()
    definition = b"".join(len(one).to_bytes(4, "big") + one for one in (part, part))
    properties = {
        "key.schema.type": "AVRO",
        "value.schema.type": "JSON",
        "kv.encoding.type": "SEPARATED",
    }
    codec = codec_of(TopicSchema("KEY_VALUE", definition, 0, properties), "pairs")
    inner = {name: codec.type.field(name).type.field("a").type for name in ("key", "value")}
    assert [str(inner[name].field("b").type) for name in inner] == ["binary", "string"]
    assert "of the schema of keys of pairs" in caplog.messages[0]
    assert "of the schema of values of pairs" in caplog.messages[1]


@pytest.mark.parametrize(
    "schema",
    [
        decimal(2, 5),
        decimal(9, -1),
        decimal(0, 0),
        decimal("9"),
        decimal(1.5),
        {"type": "bytes", "logicalType": "decimal"},
        decimal(10, 2, "fixed", name="Short", size=2),
        decimal(10**9, 2, "fixed", name="Long", size=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["AVRO", "JSON"])
def test_an_invalid_decimal_is_ignored_as_avro_says_and_named(
    schema: Schema, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain = {key: one for key, one in schema.items() if key in ("type", "name", "size")}
    value = avro(record(plain), b"ab") if kind == "AVRO" else b'{"a": {"b": "YWI="}}'
    assert read(kind, record(schema), value, f"{kind} {schema}") == (pa.binary(), b"ab")
    assert "not valid in Avro" in caplog.messages[0]


def test_a_decimal_of_38_digits_stays_a_decimal_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    schema = record(decimal(38))
    kind, found = read("AVRO", schema, avro(schema, Decimal("9" * 36 + ".25")), "fits")
    assert (kind, found) == (pa.decimal128(38, 2), Decimal("9" * 36 + ".25"))
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]
