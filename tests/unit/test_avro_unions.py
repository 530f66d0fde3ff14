"""Unions of several types: the columns that Spark's ``from_avro`` has, also of other versions."""

from __future__ import annotations

import io
import json
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
import pytest

from keyshard.columns.codec import decode_rows
from keyshard.columns.codecs import codec_of
from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import SchemaError

TOPIC = "persistent://public/default/orders"


def record(name: str, **fields: Any) -> dict[str, Any]:
    listed = [{"name": one, "type": of} for one, of in fields.items()]
    return {"type": "record", "name": name, "fields": listed}


def array(of: Any) -> dict[str, Any]:
    return {"type": "array", "items": of}


A, B = record("A", x="long"), record("B", x="long")
ENUM = {"type": "enum", "name": "E", "symbols": ["RED", "BLUE"]}
FIXED = {"type": "fixed", "name": "F", "size": 2}
PRICE = {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}
YES, NO = True, False
DAY = {"type": "int", "logicalType": "date"}


def avro(kind: Any, **more: Any) -> TopicSchema:
    """Return the schema of a record with a field ``u``."""
    schema = record("R", first="long", u=kind, last="string")
    schema["fields"][1] |= more
    return TopicSchema("AVRO", json.dumps(schema).encode())


def stored(kind: Any, place: int, value: Any) -> bytes:
    """A value of a type of a union, by the place that it has there."""
    data = io.BytesIO()
    fastavro.schemaless_writer(data, "long", 7)
    fastavro.schemaless_writer(data, "long", place)
    fastavro.schemaless_writer(data, fastavro.parse_schema(kind), value)
    fastavro.schemaless_writer(data, "string", "z")
    return data.getvalue()


def rows_of(
    schema: TopicSchema, *values: bytes, writer: TopicSchema | None = None
) -> tuple[list[Any], dict[int, str]]:
    """The field of each row."""
    codec = codec_of(schema, TOPIC)
    found, reasons = decode_rows(
        codec, pa.array(values, pa.binary()), pa.nulls(len(values), pa.binary()), writer
    )
    found.validate(full=True)
    assert found.type == codec.type
    rows = found.to_pylist(maps_as_pydicts="strict")
    assert all(row is None or (row["first"], row["last"]) == (7, "z") for row in rows)
    return [row and row["u"] for row in rows], reasons


def member(number: int, value: Any, of: int) -> dict[str, Any]:
    return dict.fromkeys(f"member{one}" for one in range(of)) | {f"member{number}": value}


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (["int", "long"], pa.int64()),
        (["long", "null", "int"], pa.int64()),
        ([DAY, "long"], pa.int64()),
        (["float", "double"], pa.float64()),
        (["int", "float"], pa.struct([("member0", pa.int32()), ("member1", pa.float32())])),
        (
            ["int", "long", "string"],
            pa.struct([("member0", pa.int32()), ("member1", pa.int64()), ("member2", pa.string())]),
        ),
        (
            ["null", DAY, ENUM],
            pa.struct([("member0", pa.date32()), ("member1", pa.string())]),
        ),
        (["null", "long"], pa.int64()),
        (["string"], pa.string()),
    ],
)
def test_a_union_has_the_type_that_spark_gives_it(kind: Any, wanted: pa.DataType) -> None:
    assert codec_of(avro(kind), TOPIC).type.field("u").type == wanted


EACH: list[tuple[list[Any], list[tuple[int, Any, Any]]]] = [
    # Of numbers, and of all that compiled code reads, and of what it does not.
    (["int", "long", "null"], [(0, -5, -5), (1, 2**40, 2**40), (2, None, None)]),
    (["double", "float"], [(0, 0.1, 0.1), (1, 0.5, 0.5)]),
    (
        ["int", "null", "long", "string", A, B, array("double"), {"type": "map", "values": "int"}],
        [
            (0, 5, member(0, 5, 7)), (1, None, None), (2, 5, member(1, 5, 7)),
            (3, "n\u00e9", member(2, "n\u00e9", 7)), (4, {"x": 1}, member(3, {"x": 1}, 7)),
            (5, {"x": 1}, member(4, {"x": 1}, 7)), (6, [0.5], member(5, [0.5], 7)),
            (7, {"k": 1}, member(6, {"k": 1}, 7)),
        ],
    ),
    (
        [ENUM, "bytes", FIXED, "boolean", "null"],
        [
            (0, "BLUE", member(0, "BLUE", 4)), (1, b"\xff", member(1, b"\xff", 4)),
            (2, b"xy", member(2, b"xy", 4)), (3, NO, member(3, NO, 4)), (4, None, None),
        ],
    ),
    ([PRICE, "string"], [(0, Decimal("1.25"), member(0, Decimal("1.25"), 2))]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "each"), EACH)
def test_a_value_of_a_union_is_in_the_member_field_of_its_type(
    kind: list[Any], each: list[tuple[int, Any, Any]]
) -> None:
    values = [stored(kind[place], place, value) for place, value, _ in each]
    wanted = [one for _, _, one in each]
    # The values are read alone, and around a malformed one.
    assert rows_of(avro(kind), *values) == (wanted, {})
    rows, reasons = rows_of(avro(kind), *values, b"\x0e\x7f", *values)
    assert (rows, list(reasons)) == ([*wanted, None, *wanted], [len(each)])


def test_unions_inside_of_lists_and_of_one_another_are_read_by_their_own_types() -> None:
    inner = array(["string", "int"])
    kind = ["null", inner, record("N", u=["boolean", inner])]
    values = [
        stored(inner, 1, ["a", 5]), stored(inner, 1, []),
        stored(kind[2], 2, {"u": ["b"]}), stored(kind[2], 2, {"u": True}),
    ]  # fmt: skip
    texts = [{"member0": "b", "member1": None}]
    assert rows_of(avro(kind), *values) == (
        [
            member(0, [member(0, "a", 2), member(1, 5, 2)], 2), member(0, [], 2),
            member(1, {"u": member(1, texts, 2)}, 2), member(1, {"u": member(0, YES, 2)}, 2),
        ],
        {},
    )  # fmt: skip


ELSEWHERE = A | {"namespace": "elsewhere"}
RENAMED = record("Q", y=["string", "long"], added="int")
RENAMED["aliases"] = ["A"]
RENAMED["fields"][0]["aliases"] = ["x"]
RENAMED["fields"][1]["default"] = 3
VERSIONS: list[tuple[Any, int, Any, Any, Any]] = [
    # Written type and value; read type and value.
    (["int", "string"], 0, 5, ["string", "null", "int"], member(1, 5, 2)),
    (["int", "string"], 0, 5, ["string", "long", "int"], member(2, 5, 3)),
    (["int", "string"], 0, 5, ["string", "double", "long"], member(1, 5.0, 3)),
    (["int", "string"], 1, "a", ["bytes", "string"], member(1, "a", 2)),
    (["int", "string"], 1, "a", ["bytes", "long"], member(0, b"a", 2)),
    (["int", "string"], 0, 5, "long", 5),
    (["int", "string"], 0, 5, ["null", "double"], 5.0),
    (["null", "int", "string"], 0, None, ["int", "string", "null"], None),
    (["null", "int"], 1, 5, ["string", "long"], member(1, 5, 2)),
    (["int", "long"], 1, 2**40, ["string", "long"], member(1, 2**40, 2)),
    (["int", "long"], 0, 5, "double", 5.0),
    (["int", "string"], 0, 5, ["int", "long"], 5),
    ([A, "string"], 0, {"x": 5}, ["string", A], member(1, {"x": 5}, 2)),
    ([B, A], 0, {"x": 5}, [A, B, "null"], member(1, {"x": 5}, 2)),
    ([A, ELSEWHERE], 0, {"x": 5}, [ELSEWHERE, A], member(0, {"x": 5}, 2)),
    ([A, "int"], 0, {"x": 5}, ["int", ELSEWHERE], member(1, {"x": 5}, 2)),
    ([A, "int"], 0, {"x": 5}, ["int", RENAMED], member(1, {"y": member(1, 5, 2), "added": 3}, 2)),
    (
        [array(["int", "string"]), "null"], 0, [5, "a"], ["boolean", array(["string", "long"])],
        member(1, [member(1, 5, 2), member(0, "a", 2)], 2),
    ),
]  # fmt: skip
UNFIT: list[tuple[Any, int, Any, Any]] = [
    (["int", "string"], 1, "a", "long"),
    (["int", "boolean"], 1, True, ["int", "string"]),
    (["null", "int", "string"], 0, None, ["int", "string"]),
    ([A, "int"], 0, {"x": 5}, ["int", record("B", z="long")]),
    ([A, "int"], 0, {"x": 5}, ["int", record("A", x="string")]),
]


@pytest.mark.parametrize(("written", "place", "value", "wanted", "found"), VERSIONS)
def test_a_value_of_another_version_has_the_same_type_or_the_first_that_it_fits(
    written: Any, place: int, value: Any, wanted: Any, found: Any
) -> None:
    data = stored(written[place], place, value)
    assert rows_of(avro(wanted), data, writer=avro(written)) == ([found], {})


@pytest.mark.parametrize(("written", "place", "value", "wanted"), UNFIT)
def test_a_value_of_a_type_that_the_other_version_lacks_has_a_reason(
    written: Any, place: int, value: Any, wanted: Any
) -> None:
    rows, reasons = rows_of(
        avro(wanted), stored(written[place], place, value), writer=avro(written)
    )
    assert rows == [None]
    assert "keyshard" not in reasons[0], "its names are not the user's"


def test_a_field_becomes_a_union_with_a_default_of_its_first_type() -> None:
    plain = record("R", first="long", u="int", last="string")
    data = b"\x0e\x0a\x02z"
    writer = TopicSchema("AVRO", json.dumps(plain).encode())
    assert rows_of(avro(["string", "long"]), data, writer=writer) == ([member(1, 5, 2)], {})
    without = record("R", first="long", last="string")
    writer = TopicSchema("AVRO", json.dumps(without).encode())
    bytes_first = avro(["bytes", "int"], default="\u00ff")
    assert rows_of(bytes_first, b"\x0e\x02z", writer=writer) == ([member(0, b"\xff", 2)], {})
    nothing = avro(["null", "bytes", "int"], default=None)
    assert rows_of(nothing, b"\x0e\x02z", writer=writer) == ([None], {})
    inside = avro(record("I", l=array(["int", A])), default={"l": [4]})
    assert rows_of(inside, b"\x0e\x02z", writer=writer) == ([{"l": [member(0, 4, 2)]}], {})


def test_a_named_type_is_found_in_every_place_that_it_is_used() -> None:
    both = record("P", a=["null", A, "string"], b=["string", "A"], c="A")
    later = record("P", c=["null", A], b=["null", "A", "string"], a=["string", "A", "null"])
    value = {"a": {"x": 1}, "b": {"x": 2}, "c": {"x": 3}}
    data = b"\x0e" + b"\x02\x02" + b"\x02\x04" + b"\x06" + b"\x02z"
    assert rows_of(avro(both), data) == (
        [{"a": member(0, {"x": 1}, 2), "b": member(1, {"x": 2}, 2), "c": value["c"]}], {},
    )  # fmt: skip
    assert rows_of(avro(later), data, writer=avro(both)) == (
        [{"a": member(1, {"x": 1}, 2), "b": member(0, {"x": 2}, 2), "c": value["c"]}], {},
    )  # fmt: skip


def test_a_union_of_json_is_refused_but_for_numbers() -> None:
    def of(kind: Any) -> TopicSchema:
        return TopicSchema("JSON", avro(kind).definition)

    output = r"(?s)Field 'u' .*union of 2 types, and JSON does not tell the type.*valueFormat=raw"
    for kind in (["int", "string"], ["null", A, B]):
        with pytest.raises(SchemaError, match=output):
            codec_of(of(kind), TOPIC)
    numbers = b'{"first": 7, "u": %s, "last": "z"}'
    assert rows_of(of(["int", "long"]), numbers % b"1099511627776") == ([2**40], {})
    assert rows_of(of(["null", "float", "double"]), numbers % b"0.1") == ([0.1], {})


@pytest.mark.parametrize("kind", ["AVRO", "JSON"])
def test_a_record_that_contains_itself_is_named(kind: str) -> None:
    node = record("Node", next=["null", "Node"])
    schema = TopicSchema(kind, avro(node).definition)
    output = r"(?s)Field 'u\.next' of the schema of .*contains its own type 'Node'.*valueFormat=raw"
    with pytest.raises(SchemaError, match=output):
        codec_of(schema, TOPIC)
    inside = TopicSchema(kind, avro(["null", record("Tree", l=array("Tree"))]).definition)
    with pytest.raises(SchemaError, match=r"Field 'u\.l' .*its own type 'Tree'"):
        codec_of(inside, TOPIC)


def test_a_schema_with_too_many_symbols_of_enumerations_is_refused() -> None:
    many = {"type": "enum", "name": "M", "symbols": [f"S{number}" for number in range(1_000)]}
    fields = {f"f{number}": "M" for number in range(1_001)}
    kind = ["null", record("I", first=many, **fields), "string"]
    codec = codec_of(avro("string"), TOPIC)
    with pytest.raises(SchemaError, match=r"(?s)more than 1000000 symbols.*valueFormat=raw"):
        codec.decode(pa.array([b""]), pa.nulls(1, pa.binary()), avro(kind))
