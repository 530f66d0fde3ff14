"""Values of Avro schemas: decoded and refused ones."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from datetime import date, time
from decimal import Decimal
from typing import Any

import pytest

from keyshard.columns.codecs import codec_of
from keyshard.errors import SchemaError
from tests.support.schema_values import (
    AT,
    ITEM,
    SOME,
    TOPIC,
    avro,
    decoded,
    field,
    logical,
    record,
    rows_of,
    written,
)

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


@pytest.mark.parametrize("number", [2**31, -(2**31) - 1, 2**62])
def test_an_int_of_more_bits_is_no_value_and_not_another_number(number: int) -> None:
    kinds = record(field("a", ["null", "int"]), field("b", {"type": "map", "values": "int"}))
    longs = json.loads(json.dumps(kinds).replace('"int"', '"long"'))
    data = written(longs, {"a": 5, "b": {"k": number}}, {"a": -(2**31), "b": {"k": 2**31 - 1}})
    rows, reasons = rows_of(avro(kinds), data)
    assert rows == [None, {"a": -(2**31), "b": [("k", 2**31 - 1)]}]
    assert str(number) in reasons[0]


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
