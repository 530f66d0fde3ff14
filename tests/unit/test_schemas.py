"""Values by the schema of their topic: primitives and Protobuf, and bad values among many."""

from __future__ import annotations

import importlib
import json
import struct
from base64 import b64encode
from datetime import date, datetime, time
from typing import Any

import pyarrow as pa
import pytest

from keyshard.columns.codec import decode_rows
from keyshard.columns.codecs import codec_of
from keyshard.columns.projection import null_in
from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import ConfigError, SchemaError
from tests.support.schema_values import (
    AT,
    SOME,
    TOPIC,
    TWO,
    UTC,
    avro,
    decoded,
    jsons,
    rows_of,
    written,
)

MS = struct.pack(">q", 1_700_000_000_123)
PRIMITIVES: list[tuple[str, bytes, Any]] = [
    ("BYTES", b"\xff\x00", b"\xff\x00"),
    ("NONE", b"x", b"x"),
    ("STRING", "né".encode(), "né"),
    ("STRING", b"", ""),
    ("BOOLEAN", b"\x01", True),
    ("BOOLEAN", b"\x00", False),
    ("INT8", b"\x80", -128),
    ("INT16", b"\x01\x02", 258),
    ("INT32", b"\xff\xff\xff\xfe", -2),
    ("INT64", b"\x7f" + b"\xff" * 7, 2**63 - 1),
    ("FLOAT", struct.pack(">f", 1.5), 1.5),
    ("DOUBLE", struct.pack(">d", -0.1), -0.1),
    ("DATE", MS, AT),
    ("TIME", MS, AT),
    ("TIMESTAMP", MS, AT),
    ("TIMESTAMP", struct.pack(">q", -1), datetime(1969, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC)),
    ("INSTANT", struct.pack(">qi", 1_700_000_000, 123_456_789), AT.replace(microsecond=123_456)),
    ("LOCAL_DATE", struct.pack(">q", 19_723), date(2024, 1, 1)),
    ("LOCAL_TIME", struct.pack(">q", 3_723_000_004_000), time(1, 2, 3, 4)),
    (
        "LOCAL_DATE_TIME",
        struct.pack(">qq", 19_723, 3_723_000_004_999),
        datetime.fromisoformat("2024-01-01T01:02:03.000004"),
    ),
]


@pytest.mark.parametrize(("kind", "value", "wanted"), PRIMITIVES)
def test_a_primitive_has_the_value_of_its_producer(kind: str, value: bytes, wanted: Any) -> None:
    assert decoded(TopicSchema(kind), value, value) == [wanted, wanted]
    # A slice has offsets that do not begin at 0.
    values = pa.array([b"other", value, value], pa.binary()).slice(1)
    keys = pa.nulls(2, pa.binary())
    assert decode_rows(codec_of(TopicSchema(kind), TOPIC), values, keys)[0].to_pylist() == [
        wanted,
        wanted,
    ]


@pytest.mark.parametrize(
    ("kind", "value", "why"),
    [
        ("INT32", b"\x01\x02", "2 bytes instead of 4"),
        ("INT64", b"\x01" * 9, "9 bytes instead of 8"),
        ("STRING", b"\xff", "not UTF-8"),
        ("TIMESTAMP", b"\x7f" * 8, "out of bounds"),
        ("INSTANT", struct.pack(">qi", 0, -1), "nanoseconds"),
        ("INSTANT", struct.pack(">qi", 2**62, 0), "out of range"),
        ("LOCAL_DATE", struct.pack(">q", 2**40), "not in range"),
        ("LOCAL_TIME", struct.pack(">q", 86_400 * 10**9), "not a time of day"),
        ("LOCAL_DATE_TIME", struct.pack(">qq", 2**60, 0), "out of range"),
    ],
)
def test_a_malformed_primitive_is_named_and_the_others_are_decoded(
    kind: str, value: bytes, why: str
) -> None:
    good, wanted = next((one[1], one[2]) for one in PRIMITIVES if one[0] == kind)
    rows, reasons = rows_of(TopicSchema(kind), [good, value, good])
    assert rows == [wanted, None, wanted]
    assert list(reasons) == [1]
    assert why in reasons[1]


@pytest.mark.parametrize("kind", ["INT32", "BOOLEAN", "INSTANT", "LOCAL_DATE", "STRING", "BYTES"])
def test_a_missing_value_is_null(kind: str) -> None:
    good, wanted = next((one[1], one[2]) for one in PRIMITIVES if one[0] == kind)
    assert decoded(TopicSchema(kind), None, good, None, good) == [None, wanted, None, wanted]
    assert decoded(TopicSchema(kind), None) == [None]
    assert decoded(TopicSchema(kind)) == []


def test_a_missing_avro_or_json_value_is_null_and_an_empty_one_is_wrong() -> None:
    (data,) = written(SOME, {"id": 1, "name": None, "tags": []})
    rows, reasons = rows_of(avro(SOME), [None, data, b"", None])
    assert rows == [None, {"id": 1, "name": None, "tags": []}, None, None]
    assert list(reasons) == [2]
    rows, reasons = rows_of(jsons(SOME), [b"", None, b"{}"])
    assert rows == [None, None, {"id": None, "name": None, "tags": None}]
    assert list(reasons) == [0]


def native() -> tuple[TopicSchema, Any]:
    """A schema as Pulsar keeps it, and the class of its messages."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # noqa: PLC0415

    file = descriptor_pb2.FileDescriptorProto(name="order.proto", package="shop", syntax="proto3")
    file.dependency.append("google/protobuf/timestamp.proto")
    order = file.message_type.add(name="Order")
    kinds = descriptor_pb2.FieldDescriptorProto
    colour = file.enum_type.add(name="Colour")
    colour.value.add(name="RED", number=0)
    colour.value.add(name="BLUE", number=1)
    for number, (name, kind, label, of) in enumerate(
        [
            ("id", kinds.TYPE_INT64, 1, ""),
            ("name", kinds.TYPE_STRING, 1, ""),
            ("tags", kinds.TYPE_STRING, 3, ""),
            ("colour", kinds.TYPE_ENUM, 1, ".shop.Colour"),
            ("at", kinds.TYPE_MESSAGE, 1, ".google.protobuf.Timestamp"),
            ("raw", kinds.TYPE_BYTES, 1, ""),
            ("u", kinds.TYPE_UINT32, 1, ""),
        ],
        1,
    ):
        order.field.add(name=name, number=number, type=kind, label=label, type_name=of or None)
    from google.protobuf import timestamp_pb2  # noqa: PLC0415

    known = descriptor_pb2.FileDescriptorProto.FromString(timestamp_pb2.DESCRIPTOR.serialized_pb)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(known)
    pool.Add(file)
    files = descriptor_pb2.FileDescriptorSet(file=[file, known]).SerializeToString()
    output = {
        "fileDescriptorSet": b64encode(files).decode(),
        "rootMessageTypeName": "shop.Order",
        "rootFileDescriptorName": "order.proto",
    }
    made = message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Order"))
    return TopicSchema("PROTOBUF_NATIVE", json.dumps(output).encode()), made


def test_protobuf_messages_become_columns() -> None:
    schema, order = native()
    one = order(id=5, name="né", tags=["a", "b"], colour=1, raw=b"\xff", u=2**32 - 1)
    one.at.FromMilliseconds(1_700_000_000_123)
    wanted = {
        "id": 5, "name": "né", "tags": ["a", "b"], "colour": "BLUE", "at": AT, "raw": b"\xff",
        "u": 2**32 - 1,
    }  # fmt: skip
    none = {"id": 0, "name": "", "tags": [], "colour": "RED", "at": None, "raw": b"", "u": 0}
    data = one.SerializeToString()
    rows, reasons = rows_of(schema, [data, b"", data[:-3], b"\xff", data])
    assert rows == [wanted, none, None, None, wanted]
    assert set(reasons) == {2, 3}


def test_protobuf_without_a_descriptor_is_refused_with_a_remedy() -> None:
    output = r"(?s)neither a descriptor nor.*__PARSING_INFO__.*PROTOBUF_NATIVE.*valueFormat=raw"
    with pytest.raises(SchemaError, match=output):
        codec_of(TopicSchema("PROTOBUF", json.dumps(TWO).encode()), TOPIC)
    with pytest.raises(SchemaError, match=r"descriptor of .* cannot be used"):
        codec_of(TopicSchema("PROTOBUF_NATIVE", b'{"fileDescriptorSet": "AAAA"}'), TOPIC)


def test_a_package_that_is_missing_is_named_with_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"(?s)pyruhvro.*pip install 'keyshard\[schemas\]'"):
        codec_of(avro(TWO), TOPIC)
    with pytest.raises(ConfigError, match=r"(?s)ptars.*pip install 'keyshard\[schemas\]'"):
        codec_of(native()[0], TOPIC)
    with pytest.raises(ConfigError, match=r"(?s)msgspec.*pip install"):
        codec_of(jsons(TWO), TOPIC)
    assert decoded(TopicSchema("INT8"), b"\1") == [1]


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(SchemaError, match="unknown type NEWER"):
        codec_of(TopicSchema("NEWER"), TOPIC)


def test_a_bad_value_among_many_is_found_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = codec_of(TopicSchema("INT64"), TOPIC)
    tried: list[int] = []
    decode = codec.decode

    def counted(values: pa.Array, keys: pa.Array, writer: None) -> pa.Array:
        tried.append(len(values))
        return decode(values, keys, writer)

    monkeypatch.setattr(codec, "decode", counted)
    data = [struct.pack(">q", i) for i in range(1 << 14)]
    data[5_000] = b"bad"
    found, reasons = decode_rows(codec, pa.array(data), pa.nulls(len(data), pa.binary()))
    assert list(reasons) == [5_000]
    assert found.null_count == 1
    assert sum(tried) <= 2.2 * len(data)
    assert len(tried) <= 5 * 8 + 1


def test_a_null_in_a_required_field_is_found_by_its_path() -> None:
    def path(kind: pa.DataType, *values: Any, nullable: bool = True) -> str:
        # Not from their beginning, as columns of a batch may be.
        given = pa.array([None, *values], kind).slice(1)
        return null_in(pa.field("c", kind, nullable=nullable), given)

    never = pa.field("n", pa.int32(), nullable=False)
    inner = pa.struct([never, pa.field("s", pa.string())])
    assert path(pa.int32(), 1, None) == ""
    assert path(pa.int32(), 1, None, nullable=False) == "c"
    assert path(pa.int32(), 1, nullable=False) == ""
    assert path(inner, None, {"n": 1, "s": None}) == ""
    assert path(inner, {"s": "x"}) == "c.n"
    assert path(pa.list_(never), [1], None, []) == ""
    assert path(pa.list_(inner), [{"n": 1}], [{"s": "x"}]) == "c.element.n".replace(
        "element", pa.list_(inner).value_field.name
    )
    assert path(pa.map_(pa.string(), never), [("k", 1)], None) == ""
    assert path(pa.map_(pa.string(), never), None, [("k", None)]).startswith("c.")


@pytest.mark.parametrize("every", [3, 10, 100])
@pytest.mark.parametrize("kind", ["AVRO", "JSON", "INT64"])
def test_each_of_many_bad_values_is_tried_once_by_itself(
    kind: str, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = {"AVRO": b"\x02a", "JSON": b'{"x": "a"}', "INT64": bytes(8)}[kind]
    definition = {"type": "record", "name": "R", "fields": [{"name": "x", "type": "string"}]}
    codec = codec_of(TopicSchema(kind, json.dumps(definition).encode()), TOPIC)
    tried: list[int] = []
    decode = codec.decode

    def counted(values: pa.Array, *rest: Any) -> Any:
        tried.append(len(values))
        return decode(values, *rest)

    monkeypatch.setattr(codec, "decode", counted)
    data = [good[:-1] if row % every == 1 else good for row in range(10_000)]
    bad = [row for row in range(10_000) if row % every == 1]
    found, reasons = decode_rows(codec, pa.array(data), pa.nulls(len(data), pa.binary()))
    assert list(reasons) == bad
    assert found.is_null().to_pylist() == [row % every == 1 for row in range(10_000)]
    assert tried.count(1) == len(bad)
    assert sum(tried) - len(bad) < 5 * len(data)
    assert len(tried) - len(bad) < 200
