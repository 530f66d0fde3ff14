"""Messages of which only Java's list of fields is known: readable and unreadable ones."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from keyshard.columns.codec import decode_rows
from keyshard.columns.codecs import codec_of
from keyshard.columns.projection import check, check_described
from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import SchemaError

TOPIC = "persistent://public/default/orders"


def listed(*fields: tuple[int, str, str, Any], label: str = "LABEL_OPTIONAL") -> TopicSchema:
    """A schema of fields: number, name, type, default."""
    info = [
        {"number": number, "name": name, "type": kind, "label": label, "definition": None}
        for number, name, kind, _ in fields
    ]
    avro = [{"name": name, "type": "string", "default": default} for _, name, _, default in fields]
    definition = json.dumps({"type": "record", "name": "M", "fields": avro}).encode()
    return TopicSchema("PROTOBUF", definition, 0, {"__PARSING_INFO__": json.dumps(info)})


def rows_of(schema: TopicSchema, *values: bytes) -> list[Any]:
    codec = codec_of(schema, TOPIC)
    found, reasons = decode_rows(
        codec, pa.array(values, pa.binary()), pa.nulls(len(values), pa.binary())
    )
    assert not reasons
    assert found.type == codec.type
    found.validate(full=True)
    rows: list[Any] = found.to_pylist()
    return rows


def test_an_unset_field_has_the_default_of_the_java_schema() -> None:
    schema = listed(
        (1, "a", "SINT32", -7),
        (2, "b", "STRING", "n\u00e9"),
        (3, "c", "BYTES", "\u00ff"),
        # Java and Avro have no unsigned numbers.
        (4, "d", "UINT32", -1),
        (5, "e", "FIXED64", -1),
        (6, "f", "BOOL", True),
        (7, "g", "FLOAT", 1.5),
    )
    defaults = {
        "a": -7, "b": "n\u00e9", "c": b"\xff", "d": 2**32 - 1, "e": Decimal(2**64 - 1), "f": True,
        "g": 1.5,
    }  # fmt: skip
    zeros = b"\x08\0\x12\0\x1a\0\x20\0\x29" + bytes(8) + b"\x30\0\x3d" + bytes(4)
    as_set = {"a": 0, "b": "", "c": b"", "d": 0, "e": Decimal(0), "f": False, "g": 0.0}
    assert rows_of(schema, b"", zeros) == [defaults, as_set]


def test_repeated_numbers_are_read_packed_and_unpacked_and_a_tombstone_is_null() -> None:
    schema = listed((1, "a", "INT32", []), label="LABEL_REPEATED")
    found, _ = decode_rows(
        codec_of(schema, TOPIC),
        pa.array([b"\x0a\x02\x05\x06", b"\x08\x05\x08\x06", b"", None]),
        pa.nulls(4, pa.binary()),
    )
    assert found.to_pylist() == [{"a": [5, 6]}, {"a": [5, 6]}, {"a": []}, None]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("ENUM", "an enumeration without numbers"),
        ("MESSAGE", "a message without field numbers"),
        ("GROUP", "a group"),
    ],
)
def test_a_field_of_an_undescribed_type_is_refused_only_if_it_is_wanted(
    kind: str, why: str
) -> None:
    schema = listed((1, "a", "INT32", 0), (2, "b", kind, None), (3, "c", "STRING", ""))
    output = rf"(?s)Field 'b' of the schema of {TOPIC} is {why}.*schema\(\.\.\.\).*valueFormat=raw"
    codec = codec_of(schema, TOPIC)
    for wanted in (None, ["a", "b"]):
        with pytest.raises(SchemaError, match=output):
            check_described(codec.undescribed, TOPIC, wanted)
    with pytest.raises(SchemaError, match=output):
        check(codec.type, codec.undescribed, pa.schema([("b", pa.int32())]), TOPIC)
    # The rest of the message is read without it.
    check_described(codec.undescribed, TOPIC, ["a", "c"])
    check(codec.type, codec.undescribed, pa.schema([("c", pa.string())]), TOPIC)
    assert rows_of(schema, b"\x08\x05\x10\x01\x1a\x01x") == [{"a": 5, "c": "x"}]


def test_a_field_without_numbers_of_a_key_or_value_is_named_by_its_path() -> None:
    value = listed((1, "a", "INT32", 0), (2, "b", "ENUM", "X"))
    definition = json.dumps({"key": "", "value": json.loads(value.definition)}).encode()
    pair = TopicSchema("KEY_VALUE", definition, 0, {
        "key.schema.type": "INT32", "value.schema.type": "PROTOBUF",
        "value.schema.properties": json.dumps(dict(value.properties)),
        "kv.encoding.type": "INLINE",
    })  # fmt: skip
    codec = codec_of(pair, TOPIC)
    with pytest.raises(SchemaError, match=r"Field 'value\.b' "):
        check_described(codec.undescribed, TOPIC, ["value"])
    check_described(codec.undescribed, TOPIC, ["key"])
    both = pa.struct([("a", pa.int32()), ("b", pa.int32())])
    with pytest.raises(SchemaError, match=r"Field 'value\.b' "):
        check(codec.type, codec.undescribed, pa.schema([("value", both)]), TOPIC)
    check(codec.type, codec.undescribed, pa.schema([("value", pa.struct([both[0]]))]), TOPIC)
    row = {"key": 7, "value": {"a": 5}}
    assert rows_of(pair, b"\0\0\0\4\0\0\0\7\0\0\0\4\x08\x05\x10\x01") == [row]


def of(number: Any = 1, kind: str = "INT32", label: str = "LABEL_OPTIONAL") -> list[Any]:
    return [{"name": "a", "number": number, "type": kind, "label": label}]


@pytest.mark.parametrize(
    ("fields", "info"),
    [
        (None, []),
        ([], 7),
        ([], [7]),
        ([], of()),
        ([{"name": "a"}], of(number=0)),
        ([{"name": "a"}], of(number="1")),
        ([{"name": "a"}], of(kind="X")),
        ([{"name": "a"}], of(label="X")),
        ([{"name": "a"}], of() * 2),
        ([{"name": "a", "default": "x"}], of()),
        ([{"name": "a", "default": None}], of(kind="UINT32")),
        ([{"name": "a", "default": 7}], of(kind="BYTES")),
    ],
)
def test_an_invalid_list_of_fields_is_refused_with_a_remedy(fields: Any, info: Any) -> None:
    definition = json.dumps({"name": "M", "fields": fields}).encode()
    schema = TopicSchema("PROTOBUF", definition, 0, {"__PARSING_INFO__": json.dumps(info)})
    with pytest.raises(SchemaError, match=r"(?s)cannot be used.*valueFormat=raw"):
        codec_of(schema, TOPIC)
