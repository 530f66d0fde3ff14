"""Columns encoded by the schema of a topic, and what does not fit it."""

from __future__ import annotations

import json
import re
import struct
from base64 import b64encode
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2, timestamp_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from keyshard.columns.codec import decode_rows
from keyshard.columns.codecs import codec_of
from keyshard.columns.encoders import encoded, encoder_of
from keyshard.columns.projection import columns_of
from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import SchemaError
from keyshard.publishing.values import definition_of

TOPIC = "persistent://public/default/orders"
UTC = timezone.utc


def written(schema: TopicSchema, rows: pa.Array) -> pa.Array:
    return encoded(rows, encoder_of(schema, TOPIC), TOPIC)


def read(schema: TopicSchema, values: pa.Array) -> list[Any]:
    nothing = pa.nulls(len(values), pa.binary())
    found, reasons = decode_rows(codec_of(schema, TOPIC), values, nothing)
    assert not reasons
    rows: list[Any] = found.to_pylist()
    return rows


# -- Any types: what is written is read ------------------------------------------------------------

_INT32, _INT64 = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
_TIMES = st.datetimes().filter(lambda at: 1 < at.year < 9999)
_SCALARS: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.bool_(): st.booleans(),
    pa.int32(): _INT32,
    pa.int64(): _INT64,
    pa.float32(): st.floats(width=32, allow_nan=False),
    pa.float64(): st.floats(allow_nan=False),
    pa.string(): st.text(st.characters(codec="utf-8"), max_size=8),
    pa.date32(): st.dates(),
    pa.timestamp("us", tz="UTC"): _TIMES.map(lambda at: at.replace(tzinfo=UTC)),
    pa.timestamp("us"): _TIMES,
    pa.binary(): st.binary(max_size=8),
    pa.decimal128(12, 3): st.decimals(-999_999, 999_999, places=3),
}
_COMPILED = [
    kind for kind in _SCALARS if not (pa.types.is_binary(kind) or pa.types.is_decimal(kind))
]


def _types(scalars: list[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    return st.recursive(
        st.sampled_from(scalars),
        lambda inner: st.one_of(
            inner.map(pa.list_),
            inner.map(lambda one: pa.map_(pa.string(), one)),
            st.lists(inner, min_size=1, max_size=3).map(
                lambda kinds: pa.struct([(f"f{place}", one) for place, one in enumerate(kinds)])
            ),
        ),
        max_leaves=5,
    )


def _values(kind: pa.DataType) -> st.SearchStrategy[Any]:
    if pa.types.is_struct(kind):
        return st.none() | st.fixed_dictionaries({one.name: _values(one.type) for one in kind})
    if pa.types.is_list(kind):
        return st.none() | st.lists(_values(kind.value_type), max_size=3)
    if pa.types.is_map(kind):
        texts = st.text(st.characters(codec="utf-8"), max_size=4)
        pairs = st.dictionaries(texts, _values(kind.item_type), max_size=3)
        return st.none() | pairs.map(lambda found: list(found.items()))
    return st.none() | _SCALARS[kind]


@st.composite
def _tables(draw: st.DrawFn) -> pa.RecordBatch:
    scalars = draw(st.sampled_from([_COMPILED, list(_SCALARS)]))
    kinds = draw(st.lists(_types(scalars), min_size=1, max_size=4))
    columns = pa.schema([(f"c{place}", kind) for place, kind in enumerate(kinds)])
    rows = st.fixed_dictionaries({one.name: _values(one.type) for one in columns})
    made = pa.RecordBatch.from_pylist(draw(st.lists(rows, min_size=1, max_size=6)), columns)
    return made.slice(draw(st.integers(0, 1)))


@pytest.mark.parametrize("kind", ["AVRO", "JSON"])
@given(batch=_tables())
@settings(max_examples=150, deadline=None)
def test_rows_of_any_types_are_read_as_they_were_written(kind: str, batch: pa.RecordBatch) -> None:
    schema = TopicSchema(kind, definition_of(batch.schema, TOPIC))
    values = written(schema, batch.to_struct_array())
    assert read(schema, values) == batch.to_pylist()


def test_nested_records_of_a_registered_schema_have_names_of_their_own() -> None:
    inner = pa.struct([("b", pa.struct([("c", pa.int32())]))])
    columns = pa.schema([("a", inner), ("a_b", pa.struct([("c", pa.string())]))])
    row = {"a": {"b": {"c": 1}}, "a_b": {"c": "x"}}
    schema = TopicSchema("AVRO", definition_of(columns, TOPIC))
    rows = pa.RecordBatch.from_pylist([row], columns).to_struct_array()
    assert read(schema, written(schema, rows)) == [row]


def test_a_time_of_day_is_registered_in_microseconds() -> None:
    columns = pa.schema([("t", pa.time64("ns"))])
    schema = TopicSchema("AVRO", definition_of(columns, TOPIC))
    rows = pa.RecordBatch.from_pylist([{"t": time(1, 2, 3, 4)}], columns).to_struct_array()
    assert read(schema, written(schema, rows)) == [{"t": time(1, 2, 3, 4)}]


@pytest.mark.parametrize("name", ["a.b", "a b", "1a", "\U0001f600", ""])
def test_names_that_avro_lacks_are_refused_by_path(name: str) -> None:
    columns = pa.schema([("outer", pa.list_(pa.struct([(name, pa.int32())])))])
    with pytest.raises(SchemaError, match=re.escape(f"Column 'outer[].{name}' has a name")):
        definition_of(columns, TOPIC)


@pytest.mark.parametrize("kind", ["AVRO", "JSON"])
@given(micros=st.integers(-(10**9), 10**9))
def test_times_are_cut_downwards_to_the_unit_of_the_schema(kind: str, micros: int) -> None:
    at = {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}}
    schema, epoch = _schema(kind, [at]), datetime(1970, 1, 1, tzinfo=timezone.utc)
    times = pa.array([micros, None], pa.timestamp("us", "UTC"))
    rows = pa.StructArray.from_arrays([times[:1]], ["at"])
    (found,) = read(schema, written(schema, rows))
    assert found["at"] - epoch == timedelta(milliseconds=micros // 1000)


# -- The types of a schema -------------------------------------------------------------------------

_PART = {
    "type": "record", "name": "Part", "namespace": "a.b",
    "fields": [{"name": "price", "type": "double"}, {"name": "text", "type": ["null", "string"]}],
}  # fmt: skip
_FIELDS: list[dict[str, Any]] = [
    {"name": "n", "type": "int"},
    {"name": "total", "type": ["null", "long"]},
    {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["A", "B"]}},
    {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
    {"name": "day_time", "type": {"type": "int", "logicalType": "time-millis"}},
    {"name": "parts", "type": {"type": "array", "items": _PART}},
    {"name": "first", "type": ["null", "a.b.Part"]},
    {"name": "tags", "type": {"type": "map", "values": "string"}},
    {"name": "place", "type": "string", "default": "here"},
]
_MORE: list[dict[str, Any]] = [
    {"name": "code", "type": {"type": "fixed", "name": "Code", "size": 2}},
    {
        "name": "sum",
        "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2},
    },
    {"name": "number", "type": ["null", "int", "long"]},
]
_UNION: list[dict[str, Any]] = [{"name": "either", "type": ["null", "int", "string", "a.b.Part"]}]
_PART_TYPE = pa.struct([("price", pa.float32()), ("text", pa.string())])
_COLUMNS = {
    "n": pa.int16(), "total": pa.int32(), "kind": pa.string(),
    "at": pa.timestamp("us", tz="Europe/Berlin"), "day_time": pa.int64(),
    "parts": pa.list_(_PART_TYPE), "first": _PART_TYPE, "tags": pa.map_(pa.string(), pa.string()),
    "code": pa.binary(), "sum": pa.decimal128(7, 2), "number": pa.int64(),
    "either": pa.struct([("member0", pa.int32()), ("member1", pa.string()),
                         ("member2", _PART_TYPE)]),
}  # fmt: skip
_ROW: dict[str, Any] = {
    "n": 1, "total": None, "kind": "B", "at": datetime(2024, 1, 1, 2, 3, 4, 5_999, UTC),
    "day_time": 3_600_000_000, "parts": [{"price": 1.5, "text": None}], "first": None,
    "tags": [("a", "b")], "code": b"xy", "sum": Decimal("1.25"), "number": 2**40,
    "either": {"member2": {"price": 2.0, "text": "t"}},
}  # fmt: skip


def _schema(kind: str, fields: list[dict[str, Any]]) -> TopicSchema:
    record = {"type": "record", "name": "R", "fields": fields}
    return TopicSchema(kind, json.dumps(record).encode())


def _rows(names: Any, *rows: dict[str, Any]) -> pa.Array:
    columns = pa.schema([(name, _COLUMNS[name]) for name in names])
    return pa.RecordBatch.from_pylist(list(rows), columns).to_struct_array()


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("AVRO", _FIELDS), ("AVRO", _FIELDS + _MORE), ("AVRO", _FIELDS + _MORE + _UNION),
        ("JSON", _FIELDS + _MORE),
    ],
)  # fmt: skip
def test_the_types_of_a_schema_are_written(kind: str, fields: list[dict[str, Any]]) -> None:
    schema = _schema(kind, fields)
    names = [one["name"] for one in fields if one["name"] != "place"]
    (found,) = read(schema, written(schema, _rows(names, _ROW)))
    wanted = {name: _ROW[name] for name in names} | {
        "at": datetime(2024, 1, 1, 2, 3, 4, 5_000, UTC), "day_time": time(1), "place": "here",
    }  # fmt: skip
    if "either" in names:
        wanted["either"] = {"member0": None, "member1": None, **_ROW["either"]}
    assert found == wanted


@pytest.mark.parametrize(
    ("kind", "value", "stored"),
    [
        ("STRING", "né", "né".encode()), ("BYTES", b"x", b"x"), ("BOOLEAN", True, b"\x01"),
        ("INT8", -128, b"\x80"), ("INT16", 258, b"\x01\x02"), ("INT32", -2, b"\xff\xff\xff\xfe"),
        ("INT64", 2**63 - 1, b"\x7f" + b"\xff" * 7), ("FLOAT", 1.5, struct.pack(">f", 1.5)),
        ("DOUBLE", -0.1, struct.pack(">d", -0.1)),
        ("TIMESTAMP", datetime(1969, 12, 31, 23, 59, 59, 999_000, UTC), struct.pack(">q", -1)),
        ("INSTANT", datetime(1969, 12, 31, 23, 59, 59, 5, UTC), struct.pack(">qi", -1, 5_000)),
        ("LOCAL_DATE", date(2024, 1, 1), struct.pack(">q", 19_723)),
        ("LOCAL_TIME", time(1, 2, 3, 4), struct.pack(">q", 3_723_000_004_000)),
        ("LOCAL_DATE_TIME", datetime.fromisoformat("1969-12-31T00:00:00.000005"),
         struct.pack(">qq", -1, 5_000)),
    ],
)  # fmt: skip
def test_a_primitive_is_written_as_pulsar_stores_it(kind: str, value: Any, stored: bytes) -> None:
    schema = TopicSchema(kind)
    column = columns_of(codec_of(schema, TOPIC).type)["value"]
    values = pa.array([value, None, value], column).slice(1)
    assert written(schema, values).to_pylist() == [None, stored]


# -- Protobuf --------------------------------------------------------------------------------------


def _protobuf() -> TopicSchema:
    """Schema of messages with a field of each kind."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="t.proto", package="t", syntax="proto3")
    file.dependency.append("google/protobuf/timestamp.proto")
    enum = file.enum_type.add(name="Kind")
    for number, name in enumerate("AB"):
        enum.value.add(name=name, number=3 * number)
    part = file.message_type.add(name="Part")
    part.field.add(name="price", number=1, label=1, type=field.TYPE_DOUBLE)
    message = file.message_type.add(name="M")
    entry = message.nested_type.add(name="NamedEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=1, type=field.TYPE_STRING)
    entry.field.add(name="value", number=2, label=1, type=11, type_name=".t.Part")
    kinds: list[tuple[str, int, int, str]] = [
        ("n", field.TYPE_INT32, 1, ""), ("big", field.TYPE_UINT64, 1, ""),
        ("kind", field.TYPE_ENUM, 1, ".t.Kind"), ("parts", field.TYPE_MESSAGE, 3, ".t.Part"),
        ("part", field.TYPE_MESSAGE, 1, ".t.Part"),
        ("at", field.TYPE_MESSAGE, 1, ".google.protobuf.Timestamp"),
        ("named", field.TYPE_MESSAGE, 3, ".t.M.NamedEntry"),
        ("kinds", field.TYPE_ENUM, 3, ".t.Kind"),
        ("this", field.TYPE_INT32, 1, ""), ("that", field.TYPE_STRING, 1, ""),
    ]  # fmt: skip
    message.oneof_decl.add(name="either")
    for number, (name, kind, label, named) in enumerate(kinds, 1):
        made = message.field.add(name=name, number=number, label=label, type=kind)
        if named:
            made.type_name = named
        if name in ("this", "that"):
            made.oneof_index = 0
    files = descriptor_pb2.FileDescriptorSet()
    timestamp_pb2.DESCRIPTOR.CopyToProto(files.file.add())
    files.file.append(file)
    definition = {
        "fileDescriptorSet": b64encode(files.SerializeToString()).decode(),
        "rootMessageTypeName": "t.M", "rootFileDescriptorName": "t.proto",
    }  # fmt: skip
    return TopicSchema("PROTOBUF_NATIVE", json.dumps(definition).encode())


PROTOBUF = _protobuf()
_MESSAGE: dict[str, Any] = {
    "n": 5, "big": Decimal(2**63), "kind": "B", "parts": [{"price": 1.5}, {"price": 0.0}],
    "part": {"price": 2.0}, "at": datetime(2024, 1, 1, 2, 3, 4, 5, UTC),
    "named": [("a", {"price": 4.0})], "kinds": ["A", "B"], "this": None, "that": "x",
}  # fmt: skip


def _messages(*rows: dict[str, Any]) -> pa.Array:
    return pa.array(list(rows), codec_of(PROTOBUF, TOPIC).type)


def test_messages_of_protobuf_are_read_as_they_were_written() -> None:
    empty = {"n": 0, "big": Decimal(0), "kind": "A", "parts": [], "part": None, "at": None,
             "named": [], "kinds": [], "this": 0, "that": None}  # fmt: skip
    assert read(PROTOBUF, written(PROTOBUF, _messages(_MESSAGE, empty))) == [_MESSAGE, empty]
    fewer = pa.array([{"n": 1}], pa.struct([("n", pa.int32())]))
    assert read(PROTOBUF, written(PROTOBUF, fewer)) == [{**empty, "n": 1, "this": None}]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"n": None}, "Column 'n' has a null"),
        ({"parts": [{"price": 1.0}, None]}, r"Column 'parts\[\]' has a null"),
        ({"kinds": ["A", "C"]}, r"Column 'kinds\[\]' has the value 'C', which its enumeration"),
        ({"this": 1}, "has values in more than one of this, that"),
        ({"big": Decimal(2**64)}, "Column 'big' has a value out of range"),
    ],
)
def test_messages_that_protobuf_would_change_are_refused(change: Any, why: str) -> None:
    with pytest.raises(SchemaError, match=f"(?s){why}"):
        written(PROTOBUF, _messages(_MESSAGE, _MESSAGE | change))


# -- Values that do not fit ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "kind", "value", "why"),
    [
        ("n", pa.int64(), 1, "'n' has the type int64, but the schema takes int32 "),
        ("n", pa.int32(), None, "Column 'n' has a null, which the schema"),
        ("n", pa.int32(), ..., "'n' is missing, but the schema has neither null nor a default"),
        ("totl", pa.int32(), 1, "'totl' is not a field of the schema .*Did you mean 'total'"),
        ("kind", pa.string(), "C", "'kind' has the value 'C', which its enumeration lacks"),
        ("day_time", pa.int64(), -1, "'day_time' has a value out of range"),
        ("parts", pa.list_(pa.struct([("price", pa.string())])), [{"price": "1"}],
         r"'parts\[\].price' has the type string, but the schema takes double"),
        ("parts", pa.list_(_PART_TYPE), [{"price": None, "text": None}],
         r"'parts\[\].price' has a null"),
        ("first", pa.struct([("text", pa.string())]), None, "'first.price' is missing"),
        ("tags", pa.map_(pa.string(), pa.string()), [("a", None)], r"'tags\[\]' has a null"),
        ("tags", pa.string(), "a", "'tags' has the type string, but the schema takes map"),
        ("code", pa.binary(), b"xyz", "'code' has a value of another size than 2 bytes"),
        ("sum", pa.decimal128(9, 3), Decimal(1), "'sum' has the type decimal"),
        ("either", _COLUMNS["either"], {"member0": 1, "member1": "a"}, "more than one of member0"),
    ],
)  # fmt: skip
def test_a_value_that_does_not_fit_is_named_by_its_path(
    column: str, kind: pa.DataType, value: Any, why: str
) -> None:
    schema = _schema("AVRO", _FIELDS + _MORE + _UNION)
    columns = {name: one for name, one in _COLUMNS.items() if name != column}
    row = {name: _ROW[name] for name in columns}
    if value is not ...:
        columns[column], row[column] = kind, value
    rows = pa.RecordBatch.from_pylist([_ROW | row, row], pa.schema(columns)).to_struct_array()
    with pytest.raises(SchemaError, match=f"(?s){why}"):
        written(schema, rows)
    if "has a null" not in why and "value" not in why and "more than" not in why:
        with pytest.raises(SchemaError, match=f"(?s){why}"):  # types are checked without rows, too
            written(schema, rows[:0])


@pytest.mark.parametrize("kind", ["KEY_VALUE", "PROTOBUF", "AUTO_CONSUME"])
def test_schemas_that_keyshard_does_not_write_are_refused(kind: str) -> None:
    with pytest.raises(SchemaError, match=f"(?s)type {kind}.*valueFormat=raw"):
        encoder_of(TopicSchema(kind), TOPIC)


def test_floats_that_json_lacks_are_texts_as_in_java() -> None:
    schema = _schema("JSON", [{"name": "d", "type": {"type": "array", "items": "double"}}])
    floats = [float("inf"), float("-inf"), 1.5]
    rows = pa.array([{"d": floats}], pa.struct([("d", pa.list_(pa.float64()))]))
    values = written(schema, rows)
    assert values.to_pylist() == [b'{"d":["Infinity","-Infinity",1.5]}']
    assert read(schema, values) == [{"d": floats}]
