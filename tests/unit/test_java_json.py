"""JSON as Pulsar's Java client writes it: each type alone, null, in collections and in classes."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from time import process_time

import pyarrow as pa
import pytest

from keyshard.columns.codec import decode_rows
from keyshard.columns.codecs import codec_of
from keyshard.columns.json_forms import numbers_of
from keyshard.columns.projection import cast_values
from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import SchemaError
from tests.support import java_forms
from tests.support.deadlines import deadline
from tests.support.java_values import CASES, Case, column_types, expected, load

WRITTEN = load()
SPACE = "org.apache.avro.reflect"


def decoded(schema: str, *values: str) -> tuple[pa.Array, dict[int, str]]:
    codec = codec_of(TopicSchema("JSON", schema.encode()), "persistent://t/n/orders")
    data = pa.array([one.encode() for one in values], pa.binary())
    return decode_rows(codec, data, pa.nulls(len(data), pa.binary()), in_parts=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.java)
def test_a_value_of_the_java_client_is_read_with_the_type_of_its_class(case: Case) -> None:
    schema, value = WRITTEN[case.java]
    found, reasons = decoded(schema, value)
    assert not reasons
    wanted = column_types(case)
    assert {one.name: one.type for one in found.type} == wanted
    assert found.to_pylist(maps_as_pydicts="strict") == [expected(case)]


def record(*fields: object) -> str:
    return json.dumps({"type": "record", "name": "Order", "fields": fields})


def of_field(kind: object, *values: str) -> tuple[list[object], dict[int, str]]:
    found, reasons = decoded(
        record({"name": "v", "type": kind}), *(f'{{"v":{one}}}' for one in values)
    )
    return found.field("v").cast(pa.string()).to_pylist(), reasons


def logical(kind: str, name: str) -> dict[str, str]:
    return {"type": kind, "logicalType": name}


def java(name: str) -> dict[str, object]:
    return {"type": "record", "name": name, "fields": []}


OTHER_FORMS = [
    (logical("long", "timestamp-millis"), {
        "1700000000123": "2023-11-14 22:13:20.123000Z",
        "1700000000.123456789": "2023-11-14 22:13:20.123456Z",
        "-0.0000001": "1969-12-31 23:59:59.999999Z",
        '"2023-11-14T23:13:20.5+01:00"': "2023-11-14 22:13:20.500000Z",
        '"2023-11-14T23:13:20+01:00[Europe/Berlin]"': "2023-11-14 22:13:20.000000Z",
        '"2023-11-14T22:13:20Z"': "2023-11-14 22:13:20.000000Z",
    }),
    (logical("long", "local-timestamp-micros"), {
        "5": "1970-01-01 00:00:00.000005", "[2026,11,27,13,5]": "2026-11-27 13:05:00.000000",
        "[2026,11,27,13,5,7]": "2026-11-27 13:05:07.000000",
        '"2026-11-27T13:05:07.25"': "2026-11-27 13:05:07.250000",
    }),
    (logical("int", "date"), {
        "20784": "2026-11-27", "[2026,11,27]": "2026-11-27", '"2026-11-27"': "2026-11-27",
    }),
    (logical("int", "time-millis"), {
        "5": "00:00:00.005000", "[13,5]": "13:05:00.000000", '"13:05:07"': "13:05:07.000000",
    }),
    (java("java.time.Duration"), {
        '"PT1M30.5S"': "90500000", '"-P1DT1S"': "-86401000000", "2": "2000000",
    }),
    (java("java.util.Date"), {'"2023-11-14T22:13:20.123+00:00"': "2023-11-14 22:13:20.123000Z"}),
    (java("java.lang.Object"), {
        '"a"': '"a"', "[1.50]": "[1.50]", "false": "false", "[NaN]": '["NaN"]',
        '{"ä":1}': '{"ä":1}',
    }),
    ({"type": "int", "java-class": "java.lang.Character"}, {'"x"': "x", "120": "x"}),
    ({"type": "string", "java-class": "java.math.BigDecimal"},
     {"12.50": "12.50", "1E+3": "1E+3", '"1.0"': "1.0", "7": "7"}),
]  # fmt: skip


ALSO_READ = {
    "java.time.Instant": {
        '"2026-11-27T13:05:07"', '"2026-11-27T13:05Z"', '"2026-11-27T13:05:07+0100"',
        '"2026-11-27T13:05:07+01"', '"2026-11-27T13:05:07+01:00[Europe/Berlin]"', '"2026-11-27"',
    },
    "java.time.OffsetDateTime": {
        '"2026-11-27T13:05:07+01:00[Europe/Berlin]"', '"2026-11-27T13:05:07"',
    },
    "java.time.ZonedDateTime": {'"2026-11-27T13:05:07"'},
    "java.time.LocalTime": {"5"},
    "java.time.LocalDateTime": {"5"},
    "java.sql.Time": {"80000000", '"13:05"'},
    "java.time.OffsetTime": {'"13:05+02"'},
    "Map<Integer, Integer>": {'[{"key":1,"value":5}]'},
}  # fmt: skip
"""Values that Java's client refuses: numbers and pairs as the schema says, and times that it reads
for other classes."""
READ_OTHERWISE = {
    # Whole numbers are in the unit of the schema. Jackson gets the sign of fractions wrong.
    "java.time.Instant": {"1700000000": "1700000000", "-1.5": "-1500000"},
    "java.time.Duration": {"-1.5": "-1500000"},
    "java.util.Date": {'"2026-11-27T13:05:07.1234567Z"': "1795784707123456"},
}
NOT_READ = {
    "java.time.Instant": {
        '"2026-11-27T24:00:00Z"', '"2026-11-27T23:59:60Z"', '"1700000000"', '"1700000000.5"',
        '"+1000000000-12-31T23:59:59.999999999Z"',
    },
    "java.time.OffsetDateTime": {'"1700000000"'},
    "java.util.Date": {'"1700000000123"', '"Fri, 27 Nov 2026 13:05:07 GMT"'},
    "Character": {"55357", r'"\ud83d"'},
    "java.time.Year": {'"2026"', '"+12026"', '""'},
    "OptionalInt": {'"5"', "5.5"},
}  # fmt: skip
"""Values that only Java's client reads: texts for numbers and the reverse, halves of characters,
and times that no column holds. It writes none of them."""


@pytest.mark.parametrize("java", java_forms.FORMS)
def test_other_forms_are_read_as_java_reads_them(java: str) -> None:
    schema, values = java_forms.load()[java]
    found, reasons = decoded(schema, *(f'{{"v":{one}}}' for one in values))
    column = found.field("v")
    numbers = cast_values(column, numbers_of(column.type)).to_pylist()
    read = {
        value: None if row in reasons else told(one)
        for row, (value, one) in enumerate(zip(values, numbers, strict=True))
    }
    assert {one for one in values if values[one] is None and read[one] is not None} == (
        ALSO_READ.get(java, set())
    )
    wanted = values | dict.fromkeys(NOT_READ.get(java, ())) | READ_OTHERWISE.get(java, {})
    assert {one: read[one] for one in values if values[one] is not None} == {
        one: wanted[one] for one in values if values[one] is not None
    }


def told(value: object) -> str:
    """Return a value as the Java program writes it."""
    if value is None:
        return "null"
    if isinstance(value, list):
        return "{" + ", ".join(f"{key}={one}" for key, one in value) + "}"
    return str(value)


@pytest.mark.parametrize(("kind", "values"), OTHER_FORMS, ids=lambda one: str(one)[:40])
def test_other_forms_of_a_value_are_read_as_listed(kind: object, values: dict[str, str]) -> None:
    assert of_field(kind, *values) == (list(values.values()), {})


WRONG_TIMES = [
    (logical("long", "timestamp-micros"),
     ['"soon"', "true", "[2026,13,1,0,0]", "[1]", "{}", "1e999999999", "NaN"]),
    (logical("int", "date"), ['"2026"', "[2026,2,30]", "1.5", "[1]"]),
    (logical("int", "time-millis"), ["[24,0]", "86400000", "-1", '"25:00"', "[true,1]"]),
    (java("java.time.Duration"), ['"P"', '"1s"', "true"]),
    ({"type": "int", "java-class": "java.lang.Character"}, ["-1", "1.5", "{}", "NaN"]),
    (java("java.io.File"), ["NaN", "5"]),
    ({"type": "string", "java-class": "java.math.BigInteger"}, ["true", "[1]", "NaN"]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "values"), WRONG_TIMES, ids=lambda one: str(one)[:40])
def test_a_value_without_a_meaning_is_null_with_a_reason(kind: object, values: list[str]) -> None:
    found, reasons = of_field(kind, *values)
    assert found == [None] * len(values)
    assert sorted(reasons) == list(range(len(values)))


def test_the_reason_names_the_field() -> None:
    _, reasons = of_field(logical("long", "timestamp-micros"), "true", "[1]")
    assert all(reason.endswith(" - at `$.v`") for reason in reasons.values())


def test_a_number_too_long_for_any_type_leaves_the_other_fields() -> None:
    schema = record({"name": "a", "type": "int"}, {"name": "b", "type": "int"})
    found, reasons = decoded(schema, '{"a":%s,"b":2}' % ("9" * 5_000))
    assert found.to_pylist() == [{"a": None, "b": 2}]
    assert list(reasons) == [0]


def test_items_that_no_column_holds_do_not_affect_the_others() -> None:
    schema = record({"name": "l", "type": {"type": "array", "items": "int"}})
    found, reasons = decoded(schema, '{"l":[1,9999999999,2,-9999999999,9999999999,3]}')
    assert found.to_pylist() == [{"l": [1, None, 2, None, None, 3]}]
    assert list(reasons) == [0]


def test_a_field_that_cannot_be_read_does_not_affect_the_others() -> None:
    inner = {"type": "record", "name": "Inner", "fields": [
        {"name": "n", "type": "int"}, {"name": "at", "type": logical("long", "timestamp-micros")},
    ]}  # fmt: skip
    schema = record(
        {"name": "id", "type": "int"},
        {"name": "inner", "type": inner},
        {"name": "list", "type": {"type": "array", "items": "Inner"}},
        {"name": "map", "type": {"type": "map", "values": "float"}},
        {"name": "any", "type": java("java.lang.Object")},
    )
    bad = (
        '{"id":9999999999,"inner":{"n":1,"at":"soon"},"list":[{"n":"x","at":1.5},null,7],'
        '"map":{"a":NaN,"b":"c"},"any":[1.50]}'
    )
    good = '{"id":1,"inner":null,"list":[],"map":{},"any":null}'
    found, reasons = decoded(schema, good, bad, good, '{"id":', "[1]", '{"id":"x"}')
    assert list(reasons) == [1, 3, 4, 5]
    rows = found.to_pylist(maps_as_pydicts="strict")
    assert rows[0] == rows[2] == {"id": 1, "inner": None, "list": [], "map": {}, "any": None}
    assert rows[3:] == [None, None, dict.fromkeys(rows[0])]
    nan = rows[1]["map"].pop("a")
    assert nan != nan  # noqa: PLR0124 - only NaN differs from itself
    at = datetime(1970, 1, 1, 0, 0, 1, 500000, timezone.utc)
    assert rows[1] == {
        "id": None, "inner": {"n": 1, "at": None}, "list": [{"n": None, "at": at}, None, None],
        "map": {"b": None}, "any": "[1.50]",
    }  # fmt: skip


def test_a_map_by_number_is_read_in_both_forms_and_part_by_part() -> None:
    schema = record(
        {"name": "m", "type": pair("Of", "int", namespace=SPACE)}, {"name": "n", "type": "int"}
    )
    found, reasons = decoded(
        schema,
        '{"m":{"1":5,"2":6},"n":1}', '{"m":[{"key":1,"value":5},{"value":6,"key":2}],"n":1}',
        '{"m":{"1":"x","2":6},"n":2}', '{"m":[{"key":1},{"key":2,"value":"x"}],"n":"x"}',
        '{"m":{"x":5},"n":3}', '{"m":[{"value":5}],"n":4}', '{"m":[5],"n":5}', '{"m":[null],"n":6}',
        '{"m":{"9999999999":5},"n":7}',
    )  # fmt: skip
    twice = '{"m":[{"key":1,"value":4},{"key":2,"value":6},{"key":1,"value":5}],"n":1}'
    assert decoded(schema, twice)[0].to_pylist(maps_as_pydicts="strict") == [
        {"m": {1: 5, 2: 6}, "n": 1}
    ]
    assert list(reasons) == [2, 3, 4, 5, 6, 7, 8]
    whole = {"m": {1: 5, 2: 6}, "n": 1}
    assert found.to_pylist(maps_as_pydicts="strict") == [
        whole, whole, {"m": {1: None, 2: 6}, "n": 2}, {"m": {1: None, 2: None}, "n": None},
        *({"m": None, "n": number} for number in range(3, 8)),
    ]  # fmt: skip


def test_many_malformed_values_cost_little_more_than_well_formed_ones() -> None:
    """Parts are read together, and by decoders that are made once."""
    inner = {"type": "record", "name": "Item", "fields": [
        {"name": "a", "type": "int"}, {"name": "at", "type": logical("long", "timestamp-micros")},
    ]}  # fmt: skip
    schema = record({"name": "l", "type": {"type": "array", "items": inner}})
    items = ['{"a":1,"at":1.5}'] * 15_000
    items[7_000] = '{"a":"x","at":1.5}'
    one = '{"l":[' + ",".join(items) + "]}"
    many = ['{"l":[{"a":"x","at":1.5}]}'] * 10_000
    decoded(schema, many[0])
    began = process_time()
    found, reasons = decoded(schema, one, *many)
    assert process_time() - began < deadline(10), (
        "a minute, where each part has a decoder of its own"
    )
    assert len(reasons) == 1 + len(many)
    read = found.to_pylist()
    assert [one["a"] for one in read[0]["l"]].count(None) == 1
    assert read[-1]["l"][0] | {"at": None} == {"a": None, "at": None}


def test_maps_that_name_one_another_many_times_are_refused_at_once() -> None:
    kind: object = "int"
    for level in range(30):
        again = {"type": "array", "items": f"{SPACE}.P{level - 1}"} if level else "int"
        fields = [{"name": "key", "type": kind}, {"name": "value", "type": again}]
        head = {"type": "record", "name": f"P{level}", "namespace": SPACE, "fields": fields}
        kind = {"type": "array", "items": head}
    began = process_time()
    with pytest.raises(SchemaError, match="fields"):
        decoded(record({"name": "m", "type": kind}), "{}")
    assert process_time() - began < deadline(10), "hours, where each name is read again"


def test_a_long_text_is_no_time_at_once() -> None:
    began = process_time()
    found, reasons = of_field(logical("long", "timestamp-micros"), '"%s"' % ("[" * 100_000))
    assert process_time() - began < deadline(10), "minutes, where each bracket begins a search"
    assert found == [None]
    assert list(reasons) == [0]


def pair(name: str, value: object, **head: str) -> dict[str, object]:
    """A map as Avro's reflection describes it if its keys are integers."""
    fields = [{"name": "key", "type": "int"}, {"name": "value", "type": value}]
    return {"type": "array", "items": {"type": "record", "name": name, **head, "fields": fields}}


def test_maps_by_number_within_maps_by_number_are_read() -> None:
    """Avro leaves out the namespace of a pair within a pair, also where it is named again."""
    inner = pair("Inner", logical("long", "timestamp-micros"))
    again = {"type": "array", "items": f"{SPACE}.Inner"}
    within = {"type": "array", "items": "Inner"}
    schema = record(
        {"name": "a", "type": pair("Outer", inner, namespace=SPACE)},
        {"name": "b", "type": again},
        {"name": "c", "type": pair("Other", within, namespace=SPACE)},
    )
    found, reasons = decoded(schema, '{"a":{"1":{"2":1.5}},"b":{"3":1.5},"c":{"4":{"5":1.5}}}')
    assert not reasons
    at = datetime(1970, 1, 1, 0, 0, 1, 500000, timezone.utc)
    assert found.to_pylist(maps_as_pydicts="strict") == [
        {"a": {1: {2: at}}, "b": {3: at}, "c": {4: {5: at}}}
    ]
