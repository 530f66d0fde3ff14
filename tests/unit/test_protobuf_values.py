"""Protobuf messages with rarely used parts: their values, or their errors."""

from __future__ import annotations

import json
from base64 import b64encode
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2, duration_pb2, timestamp_pb2

from keyshard.columns.codec import decode_rows
from keyshard.columns.codecs import codec_of
from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import SchemaError

TOPIC = "persistent://public/default/orders"
FIELD = descriptor_pb2.FieldDescriptorProto


def file_of(**how: Any) -> Any:
    """A file with a message ``p.M`` without fields yet, below ``p.N`` with one field."""
    file = descriptor_pb2.FileDescriptorProto(name="p.proto", package="p", **how)
    below = file.message_type.add(name="N")
    below.field.add(name="x", number=1, label=1, type=FIELD.TYPE_INT32)
    file.message_type.add(name="M")
    return file


def schema_of(*files: Any, root: str = "p.M") -> TopicSchema:
    output = descriptor_pb2.FileDescriptorSet(file=files).SerializeToString()
    definition = {"fileDescriptorSet": b64encode(output).decode(), "rootMessageTypeName": root}
    return TopicSchema("PROTOBUF_NATIVE", json.dumps(definition).encode())


def rows_of(schema: TopicSchema, *values: bytes) -> tuple[Any, dict[int, str]]:
    found, reasons = decode_rows(
        codec_of(schema, TOPIC), pa.array(values, pa.binary()), pa.nulls(len(values), pa.binary())
    )
    found.validate(full=True)
    return found, reasons


def add_map(file: Any, key: Any, value: Any, of: str | None = None) -> None:
    message = file.message_type[1]
    entry = message.nested_type.add(name="AEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=1, type=key)
    entry.field.add(name="value", number=2, label=1, type=value, type_name=of)
    message.field.add(
        name="a", number=1, label=3, type=FIELD.TYPE_MESSAGE, type_name=".p.M.AEntry"
    )  # fmt: skip


def test_a_panic_of_the_decoder_is_a_row_with_a_reason() -> None:
    file = file_of(syntax="proto3")
    add_map(file, FIELD.TYPE_INT32, FIELD.TYPE_INT32)
    bad = b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01x"  # a negative length
    good = b"\x0a\x04\x08\x05\x10\x07"
    found, reasons = rows_of(schema_of(file), good, bad, good)
    row = {"a": [(5, 7)]}
    assert found.to_pylist() == [row, None, row]
    assert list(reasons) == [1]
    assert "decoder failed" in reasons[1]


@pytest.mark.parametrize("levels", [1, 2])
def test_a_pair_of_a_map_without_key_or_value_has_their_defaults(
    levels: int, capfd: pytest.CaptureFixture[str]
) -> None:
    file = file_of(syntax="proto3")
    add_map(file, FIELD.TYPE_INT32, FIELD.TYPE_MESSAGE, ".p.N")
    schema = schema_of(file)
    pairs = {b"\x0a\0": (0, 0), b"\x0a\x02\x08\x05": (5, 0), b"\x0a\x04\x12\x02\x08\x07": (0, 7)}
    values = list(pairs)
    if levels == 2:
        outer = file.message_type.add(name="O")
        outer.field.add(name="b", number=1, label=1, type=FIELD.TYPE_MESSAGE, type_name=".p.M")
        schema = schema_of(file, root="p.O")
        values = [b"\x0a" + bytes([len(one)]) + one for one in values]
    found, reasons = rows_of(schema, b"\x0a\x7f", *values)
    assert list(reasons) == [0]
    wanted = [{"a": [(key, {"x": x})]} for key, x in pairs.values()]
    assert found.to_pylist()[1:] == (wanted if levels == 1 else [{"b": one} for one in wanted])
    assert capfd.readouterr().err == "", "no trace of native code is in anybody's way"


def test_a_default_as_long_as_the_missing_bytes_is_read() -> None:
    """A message was malformed if its explicit defaults were as long as the bytes it lacks."""
    file = file_of(syntax="proto3")
    add_map(file, FIELD.TYPE_INT32, FIELD.TYPE_MESSAGE, ".p.N")
    # The value of 5 is missing; that of 6 says x = 0.
    lacks = b"\x0a\x02\x08\x05\x0a\x06\x08\x06\x12\x02\x08\0"
    found, reasons = rows_of(schema_of(file), lacks, b"\x0a\x7f", b"\x0a\0", lacks)
    assert list(reasons) == [1]
    row = {"a": {5: {"x": 0}, 6: {"x": 0}}}
    rows = found.to_pylist(maps_as_pydicts="strict")
    assert rows == [row, None, {"a": {0: {"x": 0}}}, row]


def test_unsigned_keys_of_maps_are_signed_as_all_numbers_are() -> None:
    file = file_of(syntax="proto3")
    add_map(file, FIELD.TYPE_UINT64, FIELD.TYPE_UINT32)
    found, _ = rows_of(schema_of(file), b"\x0a\x0d\x08" + b"\xff" * 9 + b"\x01\x10\x05")
    assert found.type == pa.struct([("a", pa.map_(pa.decimal128(20), pa.int64()))])
    assert found.to_pylist() == [{"a": [(Decimal(2**64 - 1), 5)]}]


@pytest.mark.parametrize("of", [timestamp_pb2.Timestamp, duration_pb2.Duration])
@pytest.mark.parametrize("label", [FIELD.LABEL_OPTIONAL, FIELD.LABEL_REPEATED])
def test_a_time_beyond_microseconds_gives_its_row_a_reason(of: Any, label: Any) -> None:
    known = descriptor_pb2.FileDescriptorProto.FromString(of.DESCRIPTOR.file.serialized_pb)
    file = file_of(syntax="proto3", dependency=[known.name])
    file.message_type[1].field.add(
        name="a", number=1, label=label, type=FIELD.TYPE_MESSAGE,
        type_name=f".{of.DESCRIPTOR.full_name}",
    )  # fmt: skip
    times = [of(seconds=one) for one in (1, 2**62, -(2**62), 9_223_372_036_854)]
    values = [one.SerializeToString() for one in times]
    values = [b"\x0a" + bytes([len(one)]) + one for one in values]
    found, reasons = rows_of(schema_of(file, known), *values, b"")
    assert {row: "out of range" in why for row, why in reasons.items()} == {1: True, 2: True}
    assert found.is_valid().to_pylist() == [True, False, False, True, True]


def test_a_group_is_refused_with_a_remedy() -> None:
    file = file_of(syntax="proto2")
    inner = file.message_type[1].nested_type.add(name="A")
    inner.field.add(name="x", number=1, label=1, type=FIELD.TYPE_INT32)
    file.message_type[1].field.add(
        name="a", number=1, label=1, type=FIELD.TYPE_GROUP, type_name=".p.M.A"
    )
    with pytest.raises(SchemaError, match=r"(?s)Field p\.M\.a .*is a group.*valueFormat=raw"):
        codec_of(schema_of(file), TOPIC)


def test_an_edition_that_its_package_does_not_know_is_refused_with_a_remedy() -> None:
    file = file_of(syntax="editions", edition=descriptor_pb2.EDITION_2023)
    file.message_type[1].field.add(name="a", number=1, label=1, type=FIELD.TYPE_INT32)
    with pytest.raises(SchemaError, match=r"(?s)descriptor of .*cannot be used.*valueFormat=raw"):
        codec_of(schema_of(file), TOPIC)


def test_two_files_of_one_name_are_one_only_where_they_are_equal() -> None:
    one, other = file_of(syntax="proto3"), file_of(syntax="proto3")
    assert codec_of(schema_of(one, other), TOPIC).type == pa.struct([])
    other.message_type[1].field.add(name="a", number=1, label=1, type=FIELD.TYPE_INT32)
    with pytest.raises(SchemaError, match=r"(?s)two files 'p\.proto'.*valueFormat=raw"):
        codec_of(schema_of(one, other), TOPIC)
    # Nor does the schema of one topic change that of another.
    for file in (one, other, one):
        wanted = [field.name for field in file.message_type[1].field]
        assert [field.name for field in codec_of(schema_of(file), TOPIC).type] == wanted
