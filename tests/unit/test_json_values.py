"""Values of JSON schemas: decoded and refused ones."""

from __future__ import annotations

import json
import random
from base64 import b64encode
from datetime import date
from decimal import Decimal
from time import process_time
from typing import Any

import pytest

from tests.support.deadlines import deadline
from tests.support.schema_values import (
    AT,
    ITEM,
    TWO,
    decoded,
    field,
    jsons,
    logical,
    record,
    rows_of,
)

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
    assert process_time() - began < deadline(10), (
        "hours, where the search begins again at each quote"
    )
    assert rows[:8] == [{"t": "NaN"}] * 8
    assert list(reasons) == [8]


@pytest.mark.parametrize("kind", ["string", {"type": "fixed", "name": "F", "size": 6}, "bytes"])
def test_bare_bytes_are_no_text(kind: Any) -> None:
    schema = record(field("a", kind), field("b", "double"))
    bare = [b'{"a": %s, "b": NaN}' % one for one in (b"NaN", b"Infinity", b"-Infinity")]
    rows, reasons = rows_of(jsons(schema), [*bare, b'{"a": "AAAA", "b": Infinity}'])
    assert sorted(reasons) == [0, 1, 2]
    assert rows[3] == {"a": "AAAA" if kind == "string" else b"\0" * 3, "b": float("inf")}


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
    assert process_time() - began < deadline(10), "hours, where all digits are written out"
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
