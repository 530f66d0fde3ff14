"""Values by the schema of their topic: decoded and refused ones."""

from __future__ import annotations

import importlib
import io
import json
import random
import struct
from base64 import b64encode
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time, timezone
from decimal import Decimal
from time import process_time
from typing import Any

import fastavro
import pyarrow as pa
import pytest

from keyshard.columns import avro_types
from keyshard.columns.avro import resolution
from keyshard.columns.codec import decode_rows
from keyshard.columns.codecs import codec_of
from keyshard.columns.projection import null_in
from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import ConfigError, SchemaError

UTC = timezone.utc
TOPIC = "persistent://public/default/orders"


def rows_of(
    schema: TopicSchema,
    values: Sequence[bytes | None],
    keys: Sequence[bytes | None] | None = None,
    writer: TopicSchema | None = None,
) -> tuple[list[Any], dict[int, str]]:
    found, reasons = decode_rows(
        codec_of(schema, TOPIC),
        pa.array(values, pa.binary()),
        pa.array(keys or [None] * len(values), pa.binary()),
        writer,
        in_parts=True,
    )
    found.validate(full=True)
    assert found.type == codec_of(schema, TOPIC).type
    assert len(found) == len(values)
    return found.to_pylist(), reasons


def decoded(schema: TopicSchema, *values: bytes | None, **how: Any) -> list[Any]:
    rows, reasons = rows_of(schema, values, **how)
    assert not reasons
    return rows


MS = struct.pack(">q", 1_700_000_000_123)
AT = datetime(2023, 11, 14, 22, 13, 20, 123_000, tzinfo=UTC)
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


def record(*fields: Any, name: str = "Order", **more: Any) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": list(fields), **more}


def field(name: str, kind: Any, **more: Any) -> dict[str, Any]:
    return {"name": name, "type": kind, **more}


def logical(kind: str, name: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "logicalType": name, **more}


def avro(schema: Any, **how: Any) -> TopicSchema:
    return TopicSchema("AVRO", json.dumps(schema).encode(), **how)


def written(schema: Any, *values: Any) -> list[bytes]:
    parsed = fastavro.parse_schema(schema)
    found = []
    for value in values:
        data = io.BytesIO()
        fastavro.schemaless_writer(data, parsed, value)
        found.append(data.getvalue())
    return found


ITEM = record(field("sku", "string"), field("count", ["null", "int"]), name="Item")
COLUMNS: list[tuple[Any, Any, Any]] = [
    ("boolean", True, True),
    ("int", -5, -5),
    ("long", 2**40, 2**40),
    ("double", 0.1, 0.1),
    ("float", 1.5, 1.5),
    ("string", "né\n", "né\n"),
    ("null", None, None),
    (["null", "string"], None, None),
    (["string", "null"], "x", "x"),
    (["string"], "x", "x"),
    ({"type": "enum", "name": "Colour", "symbols": ["RED", "BLUE"]}, "BLUE", "BLUE"),
    ({"type": "array", "items": ["null", "long"]}, [1, None], [1, None]),
    ({"type": "map", "values": "long"}, {"k": 1}, [("k", 1)]),
    (ITEM, {"sku": "a", "count": None}, {"sku": "a", "count": None}),
    (["null", ITEM], None, None),
    (
        {"type": "array", "items": ITEM},
        [{"sku": "a", "count": 2}],
        [{"sku": "a", "count": 2}],
    ),
    ("bytes", b"\xff", b"\xff"),
    ({"type": "fixed", "name": "Four", "size": 4}, b"1234", b"1234"),
    (logical("bytes", "decimal", precision=9, scale=2), Decimal("-12.34"), Decimal("-12.34")),
    (logical("int", "date"), date(2024, 1, 1), date(2024, 1, 1)),
    (logical("int", "time-millis"), time(1, 2, 3, 4_000), time(1, 2, 3, 4_000)),
    (logical("long", "time-micros"), time(1, 2, 3, 4), time(1, 2, 3, 4)),
    (logical("long", "timestamp-millis"), AT, AT),
    (["null", logical("long", "timestamp-micros")], AT, AT),
    (logical("long", "local-timestamp-millis"), AT.replace(tzinfo=None), AT.replace(tzinfo=None)),
    (logical("string", "uuid"), "a-b", "a-b"),
    (logical("string", "no such"), "x", "x"),
    ({"type": "array", "items": logical("long", "timestamp-millis")}, [AT], [AT]),
]


@pytest.mark.parametrize(("kind", "value", "wanted"), COLUMNS)
def test_an_avro_field_has_the_value_of_its_producer(kind: Any, value: Any, wanted: Any) -> None:
    schema = record(field("first", "long"), field("a", kind), field("last", "string"))
    if logical("string", "uuid") == kind:
        plain = record(field("first", "long"), field("a", "string"), field("last", "string"))
        data = written(plain, {"first": 1, "a": value, "last": "z"})
    else:
        data = written(schema, {"first": 1, "a": value, "last": "z"})
    assert decoded(avro(schema), *data * 3) == [{"first": 1, "a": wanted, "last": "z"}] * 3


def test_named_types_are_found_again_in_their_namespace() -> None:
    schema = record(
        field("a", ITEM), field("b", "Item"), field("c", ["null", "shop.Item"]), namespace="shop"
    )
    one = {"sku": "s", "count": 1}
    data = written(schema, {"a": one, "b": one, "c": None})
    assert decoded(avro(schema), *data) == [{"a": one, "b": one, "c": None}]


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (record(field("a", ["null", "Order"])), "'a'.*contains its own type 'Order'"),
        (
            record(field("a", ["int", {"type": "array", "items": "Order"}, "string"])),
            "'a.member1'.*contains its own type 'Order'",
        ),
        ({"type": "record"}, "not an Avro schema"),
        (record(field("a", {"type": "array", "items": "null"})), "'a' .*items without a type"),
        (record(field("a", {"type": "map", "values": record(name="E")})), "values without a type"),
        ("nonsense", "not an Avro schema"),
        ([[]], "not an Avro schema"),
    ],
)
def test_a_schema_that_no_column_can_hold_is_refused_with_a_remedy(schema: Any, why: str) -> None:
    with pytest.raises(SchemaError, match=rf"(?s){why}.*valueFormat=raw"):
        codec_of(avro(schema), TOPIC)


FIRST = record(field("id", "int"), field("name", "string"), field("gone", "double"))
SECOND = record(
    field("id", "long"),
    field("title", "string", aliases=["name"]),
    field("added", "string", default="new"),
    field("perhaps", ["null", logical("long", "timestamp-millis")], default=None),
)


def test_a_value_of_another_version_is_resolved() -> None:
    data = written(FIRST, {"id": 7, "name": "x", "gone": 1.0})
    wanted = [{"id": 7, "title": "x", "added": "new", "perhaps": None}]
    assert decoded(avro(SECOND, version=1), *data, writer=avro(FIRST)) == wanted
    later = written(SECOND, {"id": 7, "title": "x", "added": "a", "perhaps": AT})
    (row,) = decoded(avro(record(field("perhaps", ["null", "long"]))), *later, writer=avro(SECOND))
    assert row == {"perhaps": 1_700_000_000_123}


def evolved(draw: random.Random) -> tuple[Any, Any, dict[str, Any]]:
    """Two versions of a record, and a value of the first."""
    promoted = {
        "int": ["int", "long", "float", "double"],
        "long": ["long", "double"],
        "float": ["float", "double"],
        "string": ["string"],
        "boolean": ["boolean"],
    }
    values = {
        "int": draw.randrange(-99, 99),
        "long": draw.randrange(-(2**50), 2**50),
        "float": 0.5,
        "string": "né",
        "boolean": True,
    }
    theirs: list[dict[str, Any]] = []
    ours: list[dict[str, Any]] = []
    row: dict[str, Any] = {}
    for number in range(draw.randrange(1, 6)):
        kind, name = draw.choice(list(values)), f"f{number}"
        nullable = draw.random() < 0.4
        if draw.random() < 0.2:
            inner = record(field("a", kind), field("b", ["null", "int"]), name=f"In{number}")
            listed = draw.choice([inner, {"type": "array", "items": inner}])
            row[name] = {"a": values[kind], "b": None}
            row[name] = row[name] if listed is inner else [row[name]] * 2
            theirs.append(field(name, listed))
            ours.append(field(name, ["null", listed] if nullable else listed))
            continue
        theirs.append(field(name, ["null", kind] if nullable else kind))
        row[name] = draw.choice([None, values[kind]]) if nullable else values[kind]
        wanted = draw.choice(promoted[kind])
        if draw.random() < 0.8:
            keeps_null = nullable or draw.random() < 0.3
            given: Any = draw.choice([["null", wanted], [wanted, "null"]]) if keeps_null else wanted
            renamed = draw.random() < 0.2
            more = {"aliases": [name]} if renamed else {}
            ours.append(field(f"new_{name}" if renamed else name, given, **more))
    for number in range(draw.randrange(3)):
        added: tuple[Any, Any] = draw.choice(
            [
                ("int", 3),
                ("string", "d"),
                (["null", "long"], None),
                (["long", "null"], 5),
                ({"type": "array", "items": "int"}, [1]),
                ("double", 1.5),
                ("boolean", False),
                ({"type": "enum", "name": f"E{number}", "symbols": ["A"]}, "A"),
                *DEFAULTS,
            ]
        )
        definition, value = added
        if isinstance(definition, dict) and definition.get("type") == "fixed":
            definition = definition | {"name": f"F{number}"}
        ours.append(field(f"added{number}", definition, default=value))
    draw.shuffle(ours)
    return record(*theirs), record(*ours or [field("x", "int", default=1)]), row


DEFAULTS: list[tuple[Any, Any]] = [
    ("bytes", "a\u00ff"),
    ({"type": "fixed", "size": 2}, "\u0000\u00ff"),
    ({"type": "array", "items": ["bytes", "null"]}, ["\u00fe"]),
    (logical("bytes", "decimal", precision=9, scale=2), "\u00ff\u0085"),
]
"""Types and defaults with bytes. JSON writes bytes as characters, and fastavro returns those."""


def as_bytes(value: Any) -> Any:
    """Return the value of a default in :data:`DEFAULTS`: bytes instead of characters."""
    if isinstance(value, list):
        return [as_bytes(one) for one in value]
    data = value.encode("latin-1")
    return Decimal("-1.23") if data == b"\xff\x85" else data


def test_columns_resolve_as_fastavro_resolves_values() -> None:
    plain = 0
    for seed in range(300):
        theirs, ours, row = evolved(random.Random(seed))
        (data,) = written(theirs, row)
        writer, reader = (fastavro.parse_schema(one) for one in (theirs, ours))
        wanted: Any = fastavro.schemaless_reader(io.BytesIO(data), writer, reader)
        for added in ours["fields"]:
            if added.get("default") in [default for _, default in DEFAULTS]:
                wanted[added["name"]] = as_bytes(added["default"])
        assert decoded(avro(ours), data, data, writer=avro(theirs)) == [wanted] * 2, seed
        kinds = [avro_types.parse(json.dumps(one).encode(), TOPIC) for one in (theirs, ours)]
        plain += resolution(*kinds) is not None
    assert 100 < plain < 300, "both ways are taken"


@pytest.mark.parametrize("number", [2**31, -(2**31) - 1, 2**62])
def test_an_int_of_more_bits_is_no_value_and_not_another_number(number: int) -> None:
    kinds = record(field("a", ["null", "int"]), field("b", {"type": "map", "values": "int"}))
    longs = json.loads(json.dumps(kinds).replace('"int"', '"long"'))
    data = written(longs, {"a": 5, "b": {"k": number}}, {"a": -(2**31), "b": {"k": 2**31 - 1}})
    rows, reasons = rows_of(avro(kinds), data)
    assert rows == [None, {"a": -(2**31), "b": [("k", 2**31 - 1)]}]
    assert str(number) in reasons[0]


def test_an_unresolvable_schema_is_reported_in_its_row() -> None:
    data = written(FIRST, {"id": 7, "name": "x", "gone": 1.0})
    wanted = avro(record(field("id", "int"), field("must", "string")))
    rows, reasons = rows_of(wanted, data, writer=avro(FIRST))
    assert rows == [None]
    assert "must" in reasons[0]


SOME = record(
    field("id", "long"),
    field("name", ["null", "string"]),
    field("tags", {"type": "array", "items": "string"}),
)


@pytest.mark.parametrize("bad", [b"\x01", b"\xff" * 20, b"\x02\x02\x7f"])
@pytest.mark.parametrize("extra", [[], [field("raw", "bytes")]], ids=["compiled", "fastavro"])
def test_one_bad_value_among_many_does_not_affect_the_others(bad: bytes, extra: list[Any]) -> None:
    schema = SOME | {"fields": [*SOME["fields"], *extra]}
    values = [
        {"id": i, "name": None, "tags": ["t"], **({"raw": b"r"} if extra else {})}
        for i in range(200)
    ]
    data = written(schema, *values)
    data[137] = bad
    rows, reasons = rows_of(avro(schema), data)
    assert list(reasons) == [137]
    assert rows == [None if i == 137 else value for i, value in enumerate(values)]


@pytest.mark.parametrize("bad", [[], [0, 8_191, 8_192, 16_384, 19_999], range(8_192, 16_384)])
def test_more_values_than_are_decoded_together_keep_their_rows(bad: Sequence[int]) -> None:
    data = written(SOME, *[{"id": i, "name": None, "tags": ["t"]} for i in range(20_000)])
    for row in bad:
        data[row] = b"\x01"
    rows, reasons = rows_of(avro(SOME), data)
    assert list(reasons) == list(bad)
    ids = [None if row is None else row["id"] for row in rows]
    assert ids == [None if i in reasons else i for i in range(20_000)]


@pytest.mark.parametrize("seed", range(30))
def test_damaged_avro_is_a_row_with_a_reason_or_a_value(seed: int) -> None:
    draw = random.Random(seed)
    data = written(SOME, *[{"id": i, "name": "n" * i, "tags": ["t"] * i} for i in range(5)])
    for _ in range(40):
        at = draw.randrange(5)
        one = bytearray(data[at])
        one[draw.randrange(len(one))] ^= draw.randrange(1, 256)
        rows, reasons = rows_of(avro(SOME), [*data[:at], bytes(one), *data[at + 1 :]])
        assert set(reasons) <= {at}
        assert all(rows[i] is not None for i in range(5) if i not in reasons)


def test_a_missing_avro_or_json_value_is_null_and_an_empty_one_is_wrong() -> None:
    (data,) = written(SOME, {"id": 1, "name": None, "tags": []})
    rows, reasons = rows_of(avro(SOME), [None, data, b"", None])
    assert rows == [None, {"id": 1, "name": None, "tags": []}, None, None]
    assert list(reasons) == [2]
    rows, reasons = rows_of(jsons(SOME), [b"", None, b"{}"])
    assert rows == [None, None, {"id": None, "name": None, "tags": None}]
    assert list(reasons) == [0]


def jsons(schema: Any) -> TopicSchema:
    return TopicSchema("JSON", json.dumps(schema).encode())


JSON_COLUMNS: list[tuple[Any, Any, Any]] = [
    ("boolean", True, True),
    ("int", -5, -5),
    ("long", 2**40, 2**40),
    ("double", 1, 1.0),
    ("double", 0.1, 0.1),
    ("double", float("inf"), float("inf")),
    ("float", "-Infinity", float("-inf")),
    ({"type": "array", "items": "double"}, [1, "Infinity"], [1.0, float("inf")]),
    ({"type": "map", "values": ["null", "double"]}, {"k": "-Infinity"}, [("k", float("-inf"))]),
    (["null", record(field("x", "float"), name="In")], {"x": "Infinity"}, {"x": float("inf")}),
    ("string", 'né\n"{}', 'né\n"{}'),
    ("string", '": NaN, \\', '": NaN, \\'),
    (["null", "string"], None, None),
    ({"type": "enum", "name": "Colour", "symbols": ["RED"]}, "RED", "RED"),
    ({"type": "array", "items": "long"}, [1, 2], [1, 2]),
    ({"type": "map", "values": "long"}, {"k": 1}, [("k", 1)]),
    ({"type": "map", "values": ITEM}, {"k": {"sku": "a"}}, [("k", {"sku": "a", "count": None})]),
    (ITEM, {"sku": "a", "other": [1, "x"]}, {"sku": "a", "count": None}),
    ("bytes", b64encode(b"\xff").decode(), b"\xff"),
    (logical("int", "date"), 19_723, date(2024, 1, 1)),
    (logical("long", "timestamp-millis"), 1_700_000_000_123, AT),
    (logical("bytes", "decimal", precision=9, scale=2), 12.5, Decimal("12.50")),
]


@pytest.mark.parametrize(("kind", "value", "wanted"), JSON_COLUMNS)
@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_field_has_the_value_of_its_producer(
    kind: Any, value: Any, wanted: Any, indent: int | None
) -> None:
    schema = record(field("a", kind), field("last", "string"))
    text = json.dumps({"unknown": {"a": [1, {"b": 2}]}, "a": value, "last": "z"}, indent=indent)
    both = [text.encode(), f" {text}\n".encode()]
    assert decoded(jsons(schema), *both) == [{"a": wanted, "last": "z"}] * 2


def test_a_float_that_is_no_number_is_read_as_java_and_python_write_it() -> None:
    schema = record(field("a", ["null", "double"]), field("t", ["null", "string"]))
    both = [b'{"a": NaN, "t": "NaN \\" NaN"}', b'{"a": "NaN", "t": "NaN \\" NaN"}']
    rows, reasons = rows_of(jsons(schema), [*both, b'{"a": "nan"}', b'{"a": -NaN}', b'{"a": 1}'])
    assert [(str(row["a"]), row["t"]) for row in rows] == [
        ("nan", 'NaN " NaN'), ("nan", 'NaN " NaN'), ("None", None), ("None", None), ("1.0", None),
    ]  # fmt: skip
    assert list(reasons) == [2, 3]


def test_a_long_text_that_was_cut_off_costs_no_more_than_others() -> None:
    cut = b'{"t": "NaN' + b'\\"x' * 300_000
    began = process_time()
    rows, reasons = rows_of(jsons(record(field("t", "string"))), [b'{"t": "NaN"}'] * 8 + [cut])
    assert process_time() - began < 10, "hours, where the search begins again at each quote"
    assert rows[:8] == [{"t": "NaN"}] * 8
    assert list(reasons) == [8]


@pytest.mark.parametrize("kind", ["string", {"type": "fixed", "name": "F", "size": 6}, "bytes"])
def test_bare_bytes_are_no_text(kind: Any) -> None:
    schema = record(field("a", kind), field("b", "double"))
    bare = [b'{"a": %s, "b": NaN}' % one for one in (b"NaN", b"Infinity", b"-Infinity")]
    rows, reasons = rows_of(jsons(schema), [*bare, b'{"a": "AAAA", "b": Infinity}'])
    assert sorted(reasons) == [0, 1, 2]
    assert rows[3] == {"a": "AAAA" if kind == "string" else b"\0" * 3, "b": float("inf")}


TWO = record(field("a", "long"), field("b", ["null", "string"]))
MAPPED = record(*TWO["fields"], field("m", ["null", {"type": "map", "values": "long"}]))


@pytest.mark.parametrize("schema", [TWO, MAPPED], ids=["plain", "with a map"])
@pytest.mark.parametrize(
    "bad",
    [
        b"null", b"5", b"[]", b"[{}]", b'"x"', b"x", b" ", b"\n", b"{", b"}", b"{}{}", b"{}\n{}",
        b"{},{}", b'{"a":1', b'"a":1}', b'{"a":"x"}', b'{"a":1.5}', b'{"a":true}', b'{"a":[1]}',
        b'{"a":9223372036854775808}', b'{"a":{}}', b'{"b":5}', b'{"b":"\xff"}', b'{"b":"x}',
        b'{"a":1}\x00', b'{"a":1}}', b'{"a":{}', b'{"b":"\n"}', b"{}[]", b"{} null {}",
        b'{"u":"\xff"}', b'{"a\xff":1}', b"{NaN:1}", b'{"a":1,NaN:2}',
        b"\xff\xfe", b"[" * 5_000, b'{"a":' * 5_000,
    ],
)  # fmt: skip
def test_a_value_outside_the_schema_is_named_and_shifts_no_row(schema: Any, bad: bytes) -> None:
    good = [b'{"a":%d,"b":"%d"}' % (i, i) for i in range(7)]
    rows, reasons = rows_of(jsons(schema), [*good[:3], bad, *good[3:]])
    assert list(reasons) == [3], rows
    wrong = rows.pop(3)
    assert wrong is None or wrong["a"] is None
    assert [row["a"] for row in rows] == list(range(7))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("number", [b"1e-999999999", b"1e999999999", b'"NaN"', b"123456789.99"])
def test_a_decimal_far_out_of_range_is_refused_at_once(number: bytes, nested: bool) -> None:
    kind = logical("bytes", "decimal", precision=9, scale=2)
    schema = jsons(record(field("d", {"type": "array", "items": kind} if nested else kind)))
    bad = b'{"d":[%s]}' % number if nested else b'{"d":%s}' % number
    began = process_time()
    rows, reasons = rows_of(schema, [bad])
    assert process_time() - began < 10, "hours, where all digits are written out"
    assert rows == [{"d": [None] if nested else None}]
    assert list(reasons) == [0]


def test_two_bad_objects_that_make_up_for_one_another_are_both_found() -> None:
    good = b'{"a":1,"b":"x"}'
    rows, reasons = rows_of(jsons(TWO), [good, good + good, b"", b" ", good])
    assert sorted(reasons) == [1, 2, 3]
    assert [row and row["a"] for row in rows] == [1, None, None, None, 1]


@pytest.mark.parametrize("seed", range(30))
def test_damaged_json_is_a_row_with_a_reason_or_a_value(seed: int) -> None:
    draw = random.Random(seed)
    schema = record(
        *TWO["fields"], field("in", ["null", ITEM]), field("l", {"type": "array", "items": "int"})
    )
    whole = (
        b'{"a": 1, "b": "x\\u00e9", "in": {"sku": "s", "count": 2}, "l": [1, 2], "u": [null, {}]}'
    )
    for _ in range(60):
        one = bytearray(whole)
        for _ in range(draw.choice([1, 1, 2, 4])):
            at = draw.randrange(len(one))
            if draw.randrange(3):
                one[at] = draw.choice(b'{}[]",:\\ \n0-e1nul\xff\x00')
            else:
                del one[at : at + draw.randrange(1, 20)]
                one = one or bytearray(b"?")
        rows, reasons = rows_of(jsons(schema), [whole, bytes(one), whole])
        assert set(reasons) <= {1}
        assert rows[0] == rows[2] != None  # noqa: E711 - a row is there


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


def key_value(key: TopicSchema, value: TopicSchema, encoding: str, *, by_rest: bool) -> TopicSchema:
    if by_rest:
        output = {
            name: json.loads(one.definition) if one.definition else ""
            for name, one in (("key", key), ("value", value))
        }
        definition = json.dumps(output).encode()
    else:
        definition = pair(key.definition, value.definition)
    properties: Mapping[str, str] = {
        "key.schema.type": key.type,
        "key.schema.properties": "{}",
        "value.schema.type": value.type,
        "value.schema.properties": "{}",
        "kv.encoding.type": encoding,
    }
    return TopicSchema("KEY_VALUE", definition, 0, properties)


def pair(key: bytes | None, value: bytes | None) -> bytes:
    return b"".join(
        struct.pack(">i", -1) if one is None else struct.pack(">i", len(one)) + one
        for one in (key, value)
    )


@pytest.mark.parametrize("by_rest", [True, False])
def test_keys_and_values_become_two_columns(by_rest: bool) -> None:
    key, value = TopicSchema("INT32"), avro(TWO)
    (data,) = written(TWO, {"a": 1, "b": "x"})
    inline = key_value(key, value, "INLINE", by_rest=by_rest)
    values = [pair(b"\0\0\0\5", data), pair(None, data), pair(b"\0\0\0\6", None)]
    one = {"a": 1, "b": "x"}
    assert decoded(inline, *values) == [
        {"key": 5, "value": one},
        {"key": None, "value": one},
        {"key": 6, "value": None},
    ]
    negative = struct.pack(">i", -2) + pair(None, data)[4:]
    bad = [b"\0", pair(b"", b"")[:-1], pair(b"xx", data), negative, b"", b"\x7f\xff\xff\xff" + data]
    assert sorted(rows_of(inline, [*values, *bad])[1]) == [3, 4, 5, 6, 7, 8]
    separated = key_value(key, value, "SEPARATED", by_rest=by_rest)
    keys = [b"\0\0\0\5", None]
    assert decoded(separated, data, data, keys=keys) == [
        {"key": 5, "value": one},
        {"key": None, "value": one},
    ]
    # Java, too, shows the key of a deleted value.
    assert decoded(separated, None, data, keys=[keys[0], keys[0]]) == [
        {"key": 5, "value": None},
        {"key": 5, "value": one},
    ]
    assert rows_of(separated, [data], keys=[b"xx"])[1]


def test_versions_of_keys_and_values_are_resolved() -> None:
    key = TopicSchema("STRING")
    first, second = avro(FIRST), avro(SECOND)
    (data,) = written(FIRST, {"id": 7, "name": "x", "gone": 1.0})
    wanted = {"id": 7, "title": "x", "added": "new", "perhaps": None}
    assert decoded(
        key_value(key, second, "INLINE", by_rest=True),
        pair(b"k", data),
        writer=key_value(key, first, "INLINE", by_rest=False),
    ) == [{"key": "k", "value": wanted}]


def test_keys_and_values_are_split_by_the_version_of_the_message() -> None:
    """A broker compares the types of keys and values, and not how both are put together."""
    key, value = TopicSchema("STRING"), TopicSchema("STRING")
    inline, separated = (
        key_value(key, value, encoding, by_rest=True) for encoding in ("INLINE", "SEPARATED")
    )
    keys = [b"k"] * 3
    one = {"key": "k", "value": "v"}
    both = [pair(b"k", b"v"), pair(b"k", None), None]
    nothing = {"key": None, "value": None}
    assert decoded(separated, *both, keys=keys, writer=inline) == [
        one,
        one | {"value": None},
        nothing,
    ]
    assert decoded(inline, b"v", None, keys=keys[:2], writer=separated) == [one, None]


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
