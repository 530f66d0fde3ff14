"""Versions of Avro schemas whose types have other names, and how Avro's Java reader reads them.

``avro_versions.jsonl`` has the answers of the reader of Pulsar's Java client. A test on a real
client holds the file against it, and draws more schemas.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pyarrow as pa

from keyshard.columns.codec import decode_rows
from keyshard.columns.codecs import codec_of
from keyshard.core.topic_schema import TopicSchema

READ = Path(__file__).with_suffix(".jsonl")
"""Name of a case, a value in hexadecimal, and what is read, in each line."""
REFUSED = "refused"
_Schema = Any


class Case(NamedTuple):
    """A written schema and a reader's."""

    name: str
    written: _Schema
    wanted: _Schema


class Answer(NamedTuple):
    """A value of a case, and what Avro's Java reader makes of it."""

    name: str
    value: bytes
    found: Any
    """A value of a union of several types is an object with its member. It is :data:`REFUSED` if
    the reader refuses it."""


# -- Schemas --------------------------------------------------------------------------------------


def named(kind: str, full: str, aliases: Sequence[str] = (), **parts: Any) -> _Schema:
    space, _, name = full.rpartition(".")
    own: dict[str, dict[str, Any]] = {
        "record": {"fields": [field("n", "int"), field("s", "string")]},
        "enum": {"symbols": ["A", "B"]},
        "fixed": {"size": 2},
    }
    head: dict[str, Any] = {"type": kind, "name": name, "namespace": space}
    if aliases:
        head["aliases"] = list(aliases)
    return head | own[kind] | parts


def field(name: str, kind: _Schema, **parts: Any) -> _Schema:
    return {"name": name, "type": kind, **parts}


def record(full: str, *fields: _Schema, aliases: Sequence[str] = ()) -> _Schema:
    return named("record", full, aliases, fields=list(fields))


def row(*kinds: _Schema) -> _Schema:
    """A record with a field of each type between two numbers: a type read wrongly shifts them."""
    within = [field(f"v{place}", kind) for place, kind in enumerate(kinds)]
    return record("t.Row", field("id", "int"), *within, field("end", "int"))


_KINDS = ("record", "enum", "fixed")
_CHANGES: Mapping[str, tuple[str, str, Sequence[str]]] = {
    "same": ("a.Old", "a.Old", ()), "short": ("a.Old", "a.New", ()),
    "space": ("a.Old", "b.Old", ()), "both": ("a.Old", "b.New", ()),
    "alias": ("a.Old", "b.New", ["a.Old"]), "short alias": ("a.Old", "a.New", ["Old"]),
    "alias elsewhere": ("a.Old", "b.New", ["Old"]), "wrong alias": ("a.Old", "a.New", ["z.Old"]),
    "alias of space": ("a.Old", "b.Old", ["a.Old"]), "no space": ("Old", "a.Old", ()),
    "space gone": ("a.Old", "Old", ()), "no space, alias": ("Old", "a.New", ["Old"]),
    "no space, dot": ("Old", "a.New", [".Old"]),
}  # fmt: skip
"""Full names of a type in both schemas, and its aliases in the reader's."""
_USUAL = ("same", "short", "space", "both", "alias")
_Place = Callable[[_Schema], _Schema]
_PLACES: Mapping[str, tuple[_Place, _Place]] = {
    "top": (lambda one: one, lambda one: one),
    "field": (row, row),
    "nullable": (lambda one: row(["null", one]),) * 2,
    "nullable, turned": (lambda one: row(["null", one]), lambda one: row([one, "null"])),
    "member": (lambda one: row(["null", "string", one]),) * 2,
    "member, turned": (
        lambda one: row(["null", "string", one]), lambda one: row(["null", one, "string"])
    ),
    "member of more": (
        lambda one: row(["null", "string", one]), lambda one: row(["null", "string", one, "long"])
    ),
    "list": (lambda one: row({"type": "array", "items": one}),) * 2,
    "list of nullable": (lambda one: row({"type": "array", "items": ["null", one]}),) * 2,
    "map": (lambda one: row({"type": "map", "values": one}),) * 2,
    "nested": (lambda one: row(record("t.Mid", field("m", one), field("o", "int"))),) * 2,
    "by name": (lambda one: row(one, _full(one), ["null", _full(one)]),) * 2,
    "to nullable": (row, lambda one: row(["null", one])),
    "to member": (row, lambda one: row(["null", "string", one])),
    "from nullable": (lambda one: row(["null", one]), row),
    "from member": (lambda one: row(["null", "string", one]), row),
    "nullable to member": (
        lambda one: row(["null", one]), lambda one: row(["null", "string", one])
    ),
    "member to nullable": (
        lambda one: row(["null", "string", one]), lambda one: row(["null", one])
    ),
    "union of one": (row, lambda one: row([one])),
}  # fmt: skip


def _full(kind: _Schema) -> str:
    return f"{kind['namespace']}.{kind['name']}".removeprefix(".")


_N, _S = field("n", "int"), field("s", "string")
_MORE, _MUST = field("x", "string", default="dx"), field("y", "string")
_EQUAL, _OTHER = [_N, _S], [field("d", "double")]
_SHAPES: Mapping[str, list[_Schema]] = {
    "default": [_N, _S, _MORE], "missing": [_N, _S, _MUST], "fewer": [_S],
    "wider": [field("n", "long"), _S], "turned": [_S, _N], "unfit": [field("n", "string"), _S],
}  # fmt: skip
_SIZES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "more symbols": ("enum", {"symbols": ["A", "B", "C"]}),
    "fewer symbols": ("enum", {"symbols": ["A"]}),
    "default symbol": ("enum", {"symbols": ["A"], "default": "A"}),
    "turned symbols": ("enum", {"symbols": ["B", "A"]}), "larger": ("fixed", {"size": 3}),
}  # fmt: skip


def _places() -> Iterator[Case]:
    """Each kind of type, renamed in each way, in each place."""
    for place, (written, wanted) in _PLACES.items():
        for kind in _KINDS:
            if place == "top" and kind != "record":
                continue
            for change, (old, new, aliases) in _CHANGES.items():
                if change not in _USUAL and place not in ("field", "nullable", "member"):
                    continue
                yield Case(
                    f"place: {place}, {kind}, {change}",
                    written(named(kind, old)), wanted(named(kind, new, aliases)),
                )  # fmt: skip


def _shapes() -> Iterator[Case]:
    """Renamed types that also have other fields, symbols or sizes."""
    for place in ("field", "nullable", "member"):
        written, wanted = _PLACES[place]
        for change in ("same", "short", "space", "alias"):
            old, new, aliases = _CHANGES[change]
            for shape, fields in _SHAPES.items():
                yield Case(
                    f"shape: {place}, {shape}, {change}",
                    written(named("record", old)), wanted(record(new, *fields, aliases=aliases)),
                )  # fmt: skip
            for size, (kind, parts) in _SIZES.items():
                yield Case(
                    f"shape: {place}, {size}, {change}",
                    written(named(kind, old)), wanted(named(kind, new, aliases, **parts)),
                )  # fmt: skip


def _one(full: str, fields: Sequence[_Schema] = _EQUAL, aliases: Sequence[str] = ()) -> _Schema:
    return record(full, *fields, aliases=aliases)


def _two(fields: list[_Schema]) -> Mapping[str, tuple[list[_Schema], list[_Schema]]]:
    x, y = _one("a.X"), _one("a.Y", fields)
    near, far = _one("a.X"), _one("b.X", fields)
    return {
        "first": ([x, y], [_one("a.New"), y]),
        "second": ([x, y], [x, _one("a.New", fields)]),
        "first, turned": ([x, y], [y, _one("a.New")]),
        "second, turned": ([x, y], [_one("a.New", fields), x]),
        "both": ([x, y], [_one("a.P"), _one("a.Q", fields)]),
        "both, turned": ([x, y], [_one("a.Q", fields), _one("a.P")]),
        "both, turned, null": (["null", x, y], [_one("a.Q", fields), _one("a.P"), "null"]),
        "names changed round": ([x, y], [_one("a.Y"), _one("a.X", fields)]),
        "alias": ([x, y], [_one("a.New", _EQUAL, ["X"]), y]),
        "alias, turned": ([x, y], [y, _one("a.New", _EQUAL, ["X"])]),
        "aliases": ([x, y], [_one("a.P", fields, ["Y"]), _one("a.Q", _EQUAL, ["X"])]),
        "aliases changed round": ([x, y], [_one("a.Y", _EQUAL, ["X"]), _one("a.X", fields, ["Y"])]),
        "spaces": ([x, y], [_one("b.X"), _one("b.Y", fields)]),
        "spaces, turned": ([x, y], [_one("b.Y", fields), _one("b.X")]),
        "one short name, turned": ([near, far], [far, near]),
        "one short name": ([near, far], [_one("c.X"), _one("d.X", fields)]),
        "one short name, other spaces": ([near, far], [_one("d.X", fields), _one("c.X")]),
        "one short name, null": ([near, far], [_one("c.X"), _one("d.X", fields), "null"]),
        "turned": ([x, y], [y, x]),
        "old name, alias last": (
            ["null", "string", x],
            ["null", "string", _one("a.X", fields), _one("a.Y", _EQUAL, ["X"])],
        ),
        "old name, alias first": (
            ["null", "string", x],
            ["null", "string", _one("a.Y", _EQUAL, ["X"]), _one("a.X", fields)],
        ),
        "old name": (["null", "string", x], ["null", "string", _one("a.Y"), _one("b.X", fields)]),
    }  # fmt: skip


_CANDIDATES: Mapping[str, list[_Schema]] = {
    "equal, equal": [_one("r.P"), _one("r.Q")],
    "missing, equal": [_one("r.P", [*_EQUAL, _MUST]), _one("r.Q")],
    "missing, other": [_one("r.P", [*_EQUAL, _MUST]), _one("r.Q", _OTHER)],
    "default, equal": [_one("r.P", [*_EQUAL, _MORE]), _one("r.Q")],
    "fewer, equal": [_one("r.P", [_S]), _one("r.Q")],
    "nothing in common, equal": [_one("r.P", [_MORE]), _one("r.Q")],
    "wider, equal": [_one("r.P", _SHAPES["wider"]), _one("r.Q")],
    "unfit, equal": [_one("r.P", _SHAPES["unfit"]), _one("r.Q")],
    "equal, short": [_one("r.P"), _one("b.X")],
    "missing short, equal": [_one("b.X", [*_EQUAL, _MUST]), _one("r.P")],
    "equal, short with default": [_one("r.P"), _one("b.X", [*_EQUAL, _MORE])],
    "short, short": [_one("b.X"), _one("c.X")],
    "short, full": [_one("b.X"), _one("a.X")],
    "short, equal, short": [_one("b.X"), _one("r.P"), _one("c.X")],
    "equal, missing full": [_one("r.P"), _one("a.X", [*_EQUAL, _MUST])],
    "unfit full, equal": [_one("a.X", _SHAPES["unfit"]), _one("r.P")],
    "equal, alias": [_one("r.P"), _one("r.Q", _EQUAL, ["a.X"])],
    "equal, missing alias": [_one("r.P"), _one("r.Q", [*_EQUAL, _MUST], ["a.X"])],
    "alias, alias": [_one("r.P", _EQUAL, ["a.X"]), _one("r.Q", _EQUAL, ["a.X"])],
    "alias, full": [_one("r.P", _EQUAL, ["a.X"]), _one("a.X")],
}
"""Records of a union, for one that is written as ``a.X``."""


def _around(full: str, kind: _Schema) -> _Schema:
    return record(full, field("i", kind))


_INNER: Mapping[str, tuple[_Schema, _Schema, _Schema]] = {
    "missing in a record": (
        record("a.I", _N), record("r.P", _N, _MUST), record("r.Q", _N)
    ),
    "unfit in a record": (
        record("a.I", _N), record("r.P", field("n", "string")), record("r.Q", _N)
    ),
    "missing two below": (
        record("a.J", field("j", record("a.I", _N))),
        record("r.P", field("j", record("r.I", _N, _MUST))),
        record("r.Q", field("j", record("s.I", _N))),
    ),
    "unfit in a list": (
        {"type": "array", "items": "string"}, {"type": "array", "items": "int"},
        {"type": "array", "items": "string"},
    ),
    "unfit nullable": (["null", "string"], ["null", "int"], ["null", "string"]),
    "nullable": (["null", "string"], "string", ["null", "string"]),
    "to unfit nullable": ("string", ["null", "int"], ["null", "string"]),
    "enumeration": (named("enum", "a.E"), named("enum", "r.F"), named("enum", "r.E")),
    "size": (named("fixed", "a.E"), named("fixed", "r.E", size=3), named("fixed", "s.E")),
    "renamed": (record("a.I", _N), record("r.I", _N), record("r.J", _N)),
}  # fmt: skip
"""Types of a field in a written record, and in the two that it may become."""


def _unions() -> Iterator[Case]:
    for shape, fields in (("equal", _EQUAL), ("other", _OTHER)):
        for name, (written, wanted) in _two(fields).items():
            yield Case(f"two, {shape}: {name}", row(written), row(wanted))
    for kind, other in (("enum", {"symbols": ["C", "D"]}), ("fixed", {"size": 3})):
        for shape, parts in ("equal", {}), ("other", other):
            x, y = named(kind, "a.X"), named(kind, "a.Y", **parts)
            far = named(kind, "b.X", **parts)
            for name, types, into in (
                ("turned", [x, y], [y, x]),
                ("renamed", [x, y], [named(kind, "a.New"), y]),
                ("alias", [x, y], [y, named(kind, "a.New", ["X"])]),
                ("spaces", [x, y], [named(kind, "b.X"), named(kind, "b.Y", **parts)]),
                ("spaces, turned", [x, y], [named(kind, "b.Y", **parts), named(kind, "b.X")]),
                ("one short name", [x, far], [far, x]),
                ("old name", ["null", x], ["null", named(kind, "a.X", **parts),
                                           named(kind, "a.Y", ["X"])]),
            ):  # fmt: skip
                yield Case(f"two, {shape} {kind}: {name}", row(types), row(into))
    for name, wanted in _CANDIDATES.items():
        yield Case(f"candidates: {name}", row(_one("a.X")), row(wanted))
        yield Case(
            f"candidates, nullable: {name}", row(["null", _one("a.X")]), row(["null", *wanted])
        )
    for name, (written, first, second) in _INNER.items():
        into = [_around("r.First", first), _around("r.Second", second)]
        yield Case(f"inner: {name}", row(_around("a.X", written)), row(into))


def _deep(space: str, suffix: str = "", leaves: str = "", *, nullable: bool = False) -> _Schema:
    """Records in records, with an enumeration and a fixed type in the innermost one."""

    def made(name: str, *fields: _Schema) -> _Schema:
        one = record(f"{space}.{name}{suffix}", *fields)
        return ["null", one] if nullable else one

    last = suffix if not leaves else ""
    e, f = (
        named(kind, f"{leaves or space}.{name}{last}")
        for kind, name in (("enum", "E"), ("fixed", "F"))
    )
    return row(
        made(
            "A", field("b", made("B", field("c", made("C", _N, field("e", e), field("f", f))))), _S
        )
    )


def _others() -> Iterator[Case]:
    for nullable in (False, True):
        old = _deep("a", nullable=nullable)
        label = "deep, nullable" if nullable else "deep"
        yield Case(f"{label}: spaces", old, _deep("b", nullable=nullable))
        yield Case(f"{label}: records", old, _deep("b", "2", "a", nullable=nullable))
        yield Case(f"{label}: records and spaces", old, _deep("b", "2", "c", nullable=nullable))
        yield Case(f"{label}: all", old, _deep("b", "2", nullable=nullable))
    alias = field("num", "int", aliases=["n"])
    for change in ("same", "short", "space", "alias"):
        old, new, aliases = _CHANGES[change]
        for place in ("top", "field", "nullable"):
            written, wanted = _PLACES[place]
            for name, one in ("required", alias), ("default", alias | {"default": -1}):
                into = wanted(record(new, one, _S, aliases=aliases))
                yield Case(
                    f"field alias: {place}, {name}, {change}", written(named("record", old)), into
                )
    x = _one("a.X")
    for name, fields in {
        "the old name, too": [field("n", "int", default=-2), alias | {"default": -1}, _S],
        "of two": [alias | {"default": -1}, field("m", "int", aliases=["n"], default=-2), _S],
    }.items():
        yield Case(f"field alias: {name}", row(x), row(_one("a.X", fields)))
        yield Case(f"field alias: {name}, top", x, _one("a.X", fields))
    changed = [field("n", "int", aliases=["m"]), field("m", "int", aliases=["n"])]
    yield Case("field alias: changed round", row(record("a.X", _N, field("m", "int"))),
               row(record("a.X", *changed)))  # fmt: skip
    yield Case("field alias: changed round, top", record("t.R", _N, field("m", "int")),
               record("t.R", *changed[::-1]))  # fmt: skip
    yield Case("names: one to two", row(x, "a.X"), row(_one("a.X"), _one("a.Y")))
    yield Case("names: two to one", row(x, _one("a.Y")), row(x, "a.X"))
    yield Case("names: changed round", row(x, _one("a.Y")), row(_one("a.Y"), x))
    yield Case("names: field and union", row(x, ["null", "string", "a.X"]),
               row(_one("b.Y"), ["null", "string", "b.Y"]))  # fmt: skip
    for kind in ("enum", "fixed"):
        one = named(kind, "a.X")
        yield Case(f"names: {kind}, one to two", row(one, "a.X"), row(one, named(kind, "a.Y")))


CASES = (*_places(), *_shapes(), *_unions(), *_others())


# -- Drawn schemas --------------------------------------------------------------------------------

_NAMES = ("a.X", "b.X", "a.Y", "b.Y", "c.X", "c.Z", "a.Z")
_MORE_NAMES = (*_NAMES, "d.V", "d.W", "d.X", "d.Y", "d.Z", "e.X", "e.Y", "e.Z")


def drawn(random: Random, count: int) -> list[Case]:
    """Draw written schemas; the reader's have other names, order, fields and aliases."""
    found = []
    for number in range(count):
        written = row(_Drawn(random).kind(3))
        changed = _Changed(random).kind(written)
        found.append(Case(f"drawn {number}", written, changed))
    return found


class _Drawn:
    def __init__(self, random: Random) -> None:
        self._random = random
        self._free = random.sample(_NAMES, len(_NAMES))

    def kind(self, depth: int) -> _Schema:
        random = self._random
        if not self._free or random.random() < 0.15:
            return random.choice(("int", "string", "long", "double"))
        if depth and random.random() < 0.4:
            types = [self.kind(depth - 1) for _ in range(random.choice((1, 2, 2, 3)))]
            named_ones = [one for one in types if isinstance(one, dict) and "name" in one]
            return random.sample([*named_ones, "null", "string"], len(named_ones) + 2)
        if depth and random.random() < 0.15:
            within = random.choice(("items", "values"))
            return {"type": "array" if within == "items" else "map", within: self.kind(depth - 1)}
        return self._named(depth)

    def _named(self, depth: int) -> _Schema:
        random, full = self._random, self._free.pop()
        kind = random.choice(
            ("record", "record", "record", "enum", "fixed") if depth else ("enum", "fixed")
        )
        if kind != "record":
            return named(kind, full, **random.choice(_PARTS[kind]))
        names = random.sample("fgh", random.choice((1, 1, 2, 3)))
        within = [
            self.kind(depth - 1) if random.random() < 0.5 else random.choice(("int", "string"))
            for _ in names
        ]
        return record(full, *map(field, names, within))


_PARTS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "enum": ({}, {"symbols": ["B", "A"]}, {"symbols": ["A"]}, {"symbols": ["A"], "default": "A"}),
    "fixed": ({}, {"size": 1}),
}


class _Changed:
    def __init__(self, random: Random) -> None:
        self._random = random
        self._free = random.sample(_MORE_NAMES, len(_MORE_NAMES))
        self._taken: set[str] = set()

    def kind(self, kind: _Schema) -> _Schema:
        random = self._random
        if isinstance(kind, list):
            types = [self.kind(one) for one in kind]
            return random.sample(types, len(types)) if random.random() < 0.4 else types
        if isinstance(kind, str):
            return "long" if kind == "int" and random.random() < 0.1 else kind
        for within in ("items", "values"):
            if within in kind:
                return kind | {within: self.kind(kind[within])}
        return self._named(kind)

    def _named(self, kind: _Schema) -> _Schema:
        random, old = self._random, _full(kind)
        if old == "t.Row":
            return kind | {
                "fields": [one | {"type": self.kind(one["type"])} for one in kind["fields"]]
            }
        full = old if old in self._free and random.random() < 0.5 else self._free[-1]
        self._free.remove(full)
        self._taken.add(full)
        space, _, name = full.rpartition(".")
        found = kind | {"namespace": space, "name": name}
        # Java's reader follows an alias of an alias, and its broker does not: none is drawn.
        short = f"{space}.{old[2:]}"
        alias, known = random.choice(((old, old), (old[2:], short)))
        if random.random() < 0.3 and known not in self._taken:
            found["aliases"] = [alias]
            self._taken.add(known)
            self._free = [one for one in self._free if one != known]
        if kind["type"] == "record":
            fields = [one | {"type": self.kind(one["type"])} for one in kind["fields"]]
            if random.random() < 0.2 and len(fields) > 1:
                fields.pop()
            if random.random() < 0.2:
                fields.append(random.choice((_MORE, _MUST)))
            found["fields"] = fields
        elif random.random() < 0.2:
            found |= random.choice(_PARTS[kind["type"]])
        return found


# -- Answers --------------------------------------------------------------------------------------


def read(case: Case, value: bytes) -> Any:
    """Return what keyshard reads of a value, as :class:`Answer` has it."""
    wanted, written = (TopicSchema("AVRO", json.dumps(one).encode()) for one in case[:0:-1])
    codec = codec_of(wanted, "persistent://t/n/orders")
    values = pa.array([value], pa.binary())
    rows, reasons = decode_rows(codec, values, pa.nulls(1, pa.binary()), written)
    if reasons:
        return REFUSED
    return _told(rows.to_pylist(maps_as_pydicts="strict")[0])


def _told(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, list):
        return list(map(_told, value))
    if not isinstance(value, dict):
        return value
    is_union = bool(value) and all(name.startswith("member") for name in value)
    return {name: _told(one) for name, one in value.items() if one is not None or not is_union}


def load() -> list[Answer]:
    """Return the answers for :data:`CASES` that are kept."""
    lines = READ.read_text(encoding="utf-8").splitlines()
    return [
        Answer(name, bytes.fromhex(value), found) for name, value, found in map(json.loads, lines)
    ]


def keep(answers: Sequence[Answer]) -> None:
    """Keep what :func:`tests.support.avro_java_reader.ask` returned."""
    lines = [
        json.dumps([one.name, one.value.hex(), one.found], separators=(",", ":")) for one in answers
    ]
    READ.write_text("\n".join(lines) + "\n", encoding="utf-8")
