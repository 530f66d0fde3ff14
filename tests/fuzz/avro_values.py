"""Avro values of drawn schemas and versions, whole and damaged, as fastavro itself reads them."""

from __future__ import annotations

import ctypes
import io
import json
from decimal import Decimal
from random import Random
from typing import Any

import fastavro

from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import SchemaError
from tests.fuzz.decoding import comparable, damaged, decoded
from tests.fuzz.promises import promise

_SCALARS = ("boolean", "int", "long", "float", "double", "string", "bytes")
_LOGICAL = (
    ("int", "date"), ("int", "time-millis"), ("long", "time-micros"), ("long", "timestamp-millis"),
    ("long", "timestamp-micros"), ("long", "local-timestamp-millis"), ("string", "uuid"),
    ("long", "no such"),
)  # fmt: skip
_WIDER = {
    "int": ("long", "float", "double"), "long": ("float", "double"), "float": ("double",),
    "string": ("bytes",), "bytes": ("string",),
}  # fmt: skip
_DEFAULTS: tuple[tuple[Any, Any, Any], ...] = (
    ("int", 7, 7), ("bytes", "\u00ff\0", b"\xff\0"), (["null", "string"], None, None),
    ({"type": "array", "items": "bytes"}, ["\u0080"], [b"\x80"]),
    ({"type": "map", "values": "double"}, {"k": 1}, {"k": 1.0}), (["bytes", "null"], "a", b"a"),
    (["bytes", "int"], "\u00ff", {"member0": b"\xff", "member1": None}),
    (["null", "int", "string"], None, None),
    ({"type": "array", "items": ["int", "string"]}, [7], [{"member0": 7, "member1": None}]),
)  # fmt: skip
"""Type, default, and the value that it means."""


def avro_values(random: Random, _name: str) -> None:
    """Each value is read as fastavro reads it, or is malformed where fastavro refuses it."""
    drawn = Drawn(random)
    written = drawn.record(2)
    rows = [drawn.value(written) for _ in range(6)]
    data = [_stored(written, row) for row in rows]
    found, reasons = decoded(_schema(written), data)
    promise(not reasons, f"of whole values: {reasons}")
    wanted = [_read(one, written, written) for one in data]
    promise(found == wanted, f"{found} are not {wanted} of {json.dumps(written)}")
    _compare_damaged(random, written, data)
    later, added = drawn.later(written)
    try:
        found, reasons = decoded(_schema(later), data, _schema(written))
    except SchemaError as error:
        raise AssertionError(f"{error} of {json.dumps(later)}") from error
    for place, one in enumerate(data):
        try:
            row = _read(one, written, later) | added
        except (fastavro.read.SchemaResolutionError, UnicodeDecodeError):
            promise(place in reasons, f"{found[place]} of {json.dumps([written, later])}")
            continue
        promise(place not in reasons, f"{reasons} of {json.dumps([written, later])}")
        promise(found[place] == row, f"{found[place]}, not {row}, {json.dumps([written, later])}")


def _compare_damaged(random: Random, schema: Any, data: list[bytes]) -> None:
    many = [*data, *(damaged(random, data) for _ in range(30))]
    found, reasons = decoded(_schema(schema), many)
    promise(not reasons.keys() & set(range(len(data))), "a damaged value took others with it")
    for place in range(len(data), len(many)):
        if place in reasons:
            continue
        try:
            wanted = _read(many[place], schema, schema)
        except Exception as error:
            raise AssertionError(f"{many[place]!r} is {found[place]}, and {error!r}") from error
        promise(found[place] == wanted, f"{many[place]!r} is {found[place]}, not {wanted}")


def _schema(schema: Any) -> TopicSchema:
    return TopicSchema("AVRO", json.dumps(schema).encode())


def _stored(schema: Any, value: Any) -> bytes:
    data = io.BytesIO()
    fastavro.schemaless_writer(data, fastavro.parse_schema(_plain(schema)), value)
    return data.getvalue()


def _read(data: bytes, written: Any, wanted: Any) -> Any:
    writer, reader = (fastavro.parse_schema(_plain(one)) for one in (written, wanted))
    found = fastavro.schemaless_reader(io.BytesIO(data), writer, reader, return_named_type=True)
    return comparable(as_column(found, wanted))


def _plain(schema: Any) -> Any:
    """Return the schema without logical types other than decimals."""
    if isinstance(schema, list):
        return [_plain(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("logicalType") not in (None, "decimal"):
        return schema["type"]
    return {key: one if key == "default" else _plain(one) for key, one in schema.items()}


_PER_UNIT = {"time-millis": 1000, "timestamp-millis": 1000, "local-timestamp-millis": 1000}


def is_time(kind: Any) -> bool:
    """Whether a type is a date or time."""
    return isinstance(kind, dict) and str(kind.get("logicalType", "")).startswith(_TIMES)


_TIMES = "date", "time", "local-time"


def as_column(value: Any, kind: Any) -> Any:
    """A value of stored types as a column has it: times in microseconds, unions with a field for
    each type. One of a named type of a union comes with its name."""
    if isinstance(kind, list):
        return _of_union(value, [one for one in kind if one != "null"])
    value = value[1] if isinstance(value, tuple) else value
    if value is None or not isinstance(kind, dict):
        return ctypes.c_float(value).value if value is not None and kind == "float" else value
    if kind["type"] == "record":
        return {one["name"]: as_column(value[one["name"]], one["type"]) for one in kind["fields"]}
    if kind["type"] == "array":
        return [as_column(one, kind["items"]) for one in value]
    if kind["type"] == "map":
        return {key: as_column(one, kind["values"]) for key, one in value.items()}
    per_unit = _PER_UNIT.get(kind.get("logicalType", ""), 1)
    return value if per_unit == 1 else value * per_unit


def _of_union(value: Any, kinds: list[Any]) -> Any:
    if len(kinds) == 1:
        return as_column(value, kinds[0])
    if set(map(name_of, kinds)) in _NUMBERS:
        return as_column(value, "double" if "double" in map(name_of, kinds) else "long")
    if value is None:
        return None
    place = place_of(value, kinds)
    members = dict.fromkeys(f"member{number}" for number in range(len(kinds)))
    return members | {f"member{place}": as_column(value, kinds[place])}


_NUMBERS = {"int", "long"}, {"float", "double"}
_READ_AS: dict[type, tuple[str, ...]] = {
    bool: ("boolean",), int: ("int", "long"), float: ("float", "double"), list: ("array",),
    dict: ("map", "record"), str: ("string", "enum", "bytes"),
    bytes: ("bytes", "fixed"), Decimal: ("bytes", "fixed"),
}  # fmt: skip


def name_of(kind: Any) -> str:
    """Avro's name of a type."""
    return str(kind if isinstance(kind, str) else kind["type"])


def place_of(value: Any, kinds: list[Any]) -> int:
    """Return the type of a union for a value. No drawn union has two similar types."""
    if isinstance(value, tuple):
        name = value[0].rpartition(".")[2]
        found = [place for place, one in enumerate(kinds) if name == _called(one)]
        if found:
            return found[0]
        value = value[1]
    names = _READ_AS[type(value)]
    return next(place for place, one in enumerate(kinds) if name_of(one) in names)


def _called(kind: Any) -> str:
    return str(kind["name"]) if isinstance(kind, dict) and "name" in kind else ""


def _is_record(kind: Any) -> bool:
    return isinstance(kind, dict) and kind["type"] == "record"


class Drawn:
    """Draws schemas, values of them, and versions that follow."""

    def __init__(self, random: Random, *, unions: bool = True) -> None:
        self._random = random
        self._unions = unions
        """Whether there are such of several types other than numbers."""
        self._named = 0

    def record(self, depth: int) -> dict[str, Any]:
        """A record, with so many levels below it."""
        fields = [
            {"name": f"f{number}", "type": self._kind(depth)}
            for number in range(self._random.randint(1, 5))
        ]
        return self._called({"type": "record", "fields": fields})

    def _called(self, kind: dict[str, Any]) -> dict[str, Any]:
        self._named += 1
        return {"name": f"N{self._named}", "namespace": self._random.choice(("a", "a.b"))} | kind

    def _kind(self, depth: int) -> Any:
        random = self._random
        found: Any = random.choice(_SCALARS)
        match random.randrange(14):
            case 0 if depth:
                found = {"type": "array", "items": self._kind(depth - 1)}
            case 1 if depth:
                found = {"type": "map", "values": self._kind(depth - 1)}
            case 2 | 3 if depth:
                found = self.record(depth - 1)
            case 4:
                kind, logical = random.choice(_LOGICAL)
                found = {"type": kind, "logicalType": logical}
            case 5:
                found = self._called({"type": "enum", "symbols": ["A", "B", "C"]})
            case 6:
                found = self._called({"type": "fixed", "size": random.choice((1, 12))})
            case 7:
                size = {"type": "bytes"}
                if random.random() < 0.5:
                    size = self._called({"type": "fixed", "size": 8})
                found = size | {"logicalType": "decimal", "precision": 9, "scale": 2}
            case 8 | 9:
                found = self._union(depth)
                if random.random() < 0.3:
                    found.insert(random.randrange(len(found) + 1), "null")
                return found
        null = random.random() < 0.3
        return random.choice((["null", found], [found, "null"])) if null else found

    def _union(self, depth: int) -> list[Any]:
        """A union of several types, none of which looks like another."""
        random = self._random
        found: list[Any] = [
            random.choice(("int", "long", "float", "double")),
            random.choice(("string", "bytes", self._called({"type": "enum", "symbols": ["A"]}))),
            "boolean",
        ]
        if depth:
            found.append({"type": "array", "items": self._kind(depth - 1)})
            found += random.choice(
                (
                    [{"type": "map", "values": self._kind(depth - 1)}],
                    [self.record(depth - 1), self.record(depth - 1)],
                )
            )
        if not self._unions or random.random() < 0.2:
            found = random.choice((["int", "long"], ["float", "double"]))
        random.shuffle(found)
        return found[: random.randint(2, len(found))]

    def value(self, kind: Any) -> Any:
        """A value of a type."""
        random = self._random
        if isinstance(kind, list):
            others = [one for one in kind if one != "null"]
            other = random.choice(others)
            if "null" in kind and random.random() < 0.3:
                return None
            # The name of the record: fastavro would guess between two.
            of_many = len(others) > 1 and _is_record(other)
            name = f"{other['namespace']}.{other['name']}" if of_many else ""
            return (name, self.value(other)) if of_many else self.value(other)
        name = kind if isinstance(kind, str) else kind["type"]
        if name == "record":
            return {one["name"]: self.value(one["type"]) for one in kind["fields"]}
        if name == "array":
            return [self.value(kind["items"]) for _ in range(random.randint(0, 3))]
        if name == "map":
            return {
                key: self.value(kind["values"]) for key in random.sample(("", "k", "\u00e9"), 2)
            }
        return self._scalar(kind, name)

    def _scalar(self, kind: Any, name: str) -> Any:
        random = self._random
        if isinstance(kind, dict) and kind.get("logicalType") == "decimal":
            return Decimal(random.choice((0, 1, -1, 999_999_999))).scaleb(-2)
        if name == "enum":
            return random.choice(kind["symbols"])
        if name == "fixed":
            return random.randbytes(kind["size"])
        known: dict[str, tuple[Any, ...]] = {
            "boolean": (True, False), "int": (0, 1, 86_399_999), "long": (0, 1, 86_399_999_999),
            "float": (0.5, -0.0, float("inf")), "double": (0.1, 1e300, float("nan")),
            "string": ("", "n\u00e9\0", "x" * 70), "bytes": (b"", b"\xff\0"),
        }  # fmt: skip
        plain: dict[str, tuple[Any, ...]] = {
            "int": (-(2**31), 2**31 - 1), "long": (-(2**63), 2**63 - 1),
        }  # fmt: skip
        return random.choice(known[name] + (plain.get(name, ()) if kind == name else ()))

    def later(self, schema: dict[str, Any], most: int = 2) -> tuple[dict[str, Any], dict[str, Any]]:
        """Another version of a record, and values of the fields that it adds: ``most`` ones."""
        fields: list[dict[str, Any]] = [
            {"name": one["name"], "type": self._changed(one["type"])}
            for one in schema["fields"]
            if self._random.random() < 0.8
        ] or [dict(schema["fields"][0])]
        for one in fields:
            if self._random.random() < 0.15:
                one |= {"name": f"new_{one['name']}", "aliases": [one["name"]]}
        added = {}
        for number in range(self._random.randint(0, most)):
            kind, default, meant = self._random.choice(_DEFAULTS)
            fields.append({"name": f"added{number}", "type": kind, "default": default})
            added[f"added{number}"] = meant
        self._random.shuffle(fields)
        return schema | {"fields": fields}, added

    def _changed_union(self, kinds: list[Any]) -> Any:
        random = self._random
        if set(map(name_of, kinds)) in _NUMBERS:
            wider = "double" if "double" in kinds else random.choice(("long", "double"))
            return random.choice((kinds, kinds[::-1], ["null", *kinds], wider))
        kept = [self._changed(one, nulls=False) for one in kinds]
        if len(kept) > 1:
            random.shuffle(kept)
            kept = kept[: random.choice((1, len(kept) - 1, len(kept), len(kept)))]
            if random.random() < 0.3:
                return kept if len(kept) > 1 else kept[0]
        return random.choice((["null", *kept], [*kept, "null"]))

    def _changed(self, kind: Any, *, nulls: bool = True) -> Any:
        random = self._random
        if isinstance(kind, list):
            return self._changed_union([one for one in kind if one != "null"])
        if nulls and kind != "boolean" and random.random() < 0.1:
            changed = self._changed(kind, nulls=False)
            return random.choice((["boolean", changed], [changed, "boolean", "null"]))
        if isinstance(kind, str):
            return random.choice((kind, kind, *_WIDER.get(kind, ())))
        changed = dict(kind)
        if kind["type"] == "record" and random.random() < 0.2:
            changed = self.later(kind, most=0)[0]
        for within in ("items", "values"):
            if within in kind:
                changed[within] = self._changed(kind[within])
        if kind["type"] == "enum" and random.random() < 0.3:
            changed["symbols"] = random.choice((["C", "B", "A"], ["A", "B"]))
            changed |= random.choice(({}, {"default": "A"}))
        return ["null", changed] if nulls and random.random() < 0.2 else changed
