"""A map with a repeated key: the last value counts, in each codec."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from keyshard.columns.codec import decode_rows
from keyshard.columns.codecs import codec_of
from keyshard.columns.maps import with_keys_once
from keyshard.core.topic_schema import TopicSchema

FIELD = descriptor_pb2.FieldDescriptorProto
INNER = pa.map_(pa.string(), pa.int64())
KIND = pa.struct([
    ("plain", INNER),
    ("listed", pa.list_(pa.struct([("m", INNER)]))),
    ("mapped", pa.map_(pa.int32(), INNER)),
    ("number", pa.int64()),
])  # fmt: skip
_pairs = st.none() | st.lists(
    st.tuples(st.sampled_from("abcä"), st.none() | st.integers(0, 9)), max_size=4
)
_rows = st.none() | st.fixed_dictionaries({
    "plain": _pairs,
    "listed": st.none() | st.lists(st.none() | st.fixed_dictionaries({"m": _pairs}), max_size=3),
    "mapped": st.none() | st.lists(st.tuples(st.integers(0, 2), _pairs), max_size=3),
    "number": st.none() | st.integers(0, 9),
})  # fmt: skip


def as_dicts(value: Any) -> Any:
    """Return lists of pairs as dictionaries; they keep the last value of each key."""
    if isinstance(value, dict):
        return {key: as_dicts(one) for key, one in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], tuple):
        return {key: as_dicts(one) for key, one in value}
    return [as_dicts(one) for one in value] if isinstance(value, list) else value


@settings(deadline=None, max_examples=100)
@given(st.lists(_rows, max_size=6), st.integers(0, 3))
def test_the_last_value_of_each_key_is_left_on_all_levels(rows: list[Any], start: int) -> None:
    values = pa.array(rows, KIND)[start:]
    found = with_keys_once(values)
    found.validate(full=True)
    assert found.type == KIND
    output = found.to_pylist()
    assert as_dicts(output) == as_dicts(rows[start:])
    again = with_keys_once(found)
    assert again is found, "no key is there twice any more"


def record(values: Any) -> bytes:
    fields = [{"name": "a", "type": {"type": "map", "values": values}}]
    return json.dumps({"type": "record", "name": "R", "fields": fields}).encode()


def proto(kind: Any, of: str | None = None) -> TopicSchema:
    file = descriptor_pb2.FileDescriptorProto(name="p.proto", package="p", syntax="proto3")
    below, message = file.message_type.add(name="N"), file.message_type.add(name="M")
    below.field.add(name="x", number=1, label=1, type=FIELD.TYPE_INT32)
    entry = message.nested_type.add(name="AEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=1, type=FIELD.TYPE_STRING)
    entry.field.add(name="value", number=2, label=1, type=kind, type_name=of)
    pairs = ".p.M.AEntry"
    message.field.add(name="a", number=1, label=3, type=FIELD.TYPE_MESSAGE, type_name=pairs)
    output = b64encode(descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString()).decode()
    definition = {"fileDescriptorSet": output, "rootMessageTypeName": "p.M"}
    return TopicSchema("PROTOBUF_NATIVE", json.dumps(definition).encode())


@pytest.mark.parametrize(
    ("schema", "value", "wanted"),
    [
        (TopicSchema("AVRO", record("int")), b"\4\2a\2\2a\4\2\2b\6\0", {"a": 2, "b": 3}),
        (TopicSchema("AVRO", record("bytes")), b"\4\2a\2x\2a\2y\0", {"a": b"y"}),
        (TopicSchema("JSON", record("int")), b'{"a": {"a": 1, "b": 3, "a": 2}}', {"a": 2, "b": 3}),
        (proto(FIELD.TYPE_INT32), b"\n\5\n\1a\x10\1\n\5\n\1a\x10\2", {"a": 2}),
        (
            proto(FIELD.TYPE_MESSAGE, ".p.N"),
            b"\n\7\n\1a\x12\2\x08\1\n\3\n\1b\n\7\n\1a\x12\2\x08\2",
            {"a": {"x": 2}, "b": {"x": 0}},
        ),
    ],
    ids=["AVRO, compiled", "AVRO, fastavro", "JSON", "protobuf", "protobuf, messages"],
)
def test_every_codec_reads_the_last_value_of_a_key(
    schema: TopicSchema, value: bytes, wanted: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    codec = codec_of(schema, "t")
    values = pa.array([value, value], pa.binary())
    found, reasons = decode_rows(codec, values, pa.nulls(2, pa.binary()))
    assert not reasons
    for row in found.to_pylist():
        assert len(row["a"]) == len(wanted)
        assert dict(row["a"]) == wanted
    assert capfd.readouterr().err == ""
