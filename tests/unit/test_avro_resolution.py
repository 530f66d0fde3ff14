"""Avro values of another version of their schema."""

from __future__ import annotations

import io
import json
import random
from decimal import Decimal
from typing import Any

import fastavro

from keyshard.columns import avro_types
from keyshard.columns.avro import resolution
from tests.support.schema_values import (
    AT,
    FIRST,
    SECOND,
    TOPIC,
    avro,
    decoded,
    field,
    logical,
    record,
    rows_of,
    written,
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


def test_an_unresolvable_schema_is_reported_in_its_row() -> None:
    data = written(FIRST, {"id": 7, "name": "x", "gone": 1.0})
    wanted = avro(record(field("id", "int"), field("must", "string")))
    rows, reasons = rows_of(wanted, data, writer=avro(FIRST))
    assert rows == [None]
    assert "must" in reasons[0]
