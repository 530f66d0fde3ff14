"""Unions of several types: structs with a field for each type, of which one is set.

A record of one field is stored as that field alone. So readers get a schema in which each type of
such a union is a record of one field, and they read values as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

_PREFIX = "keyshard_union_"
"""Prefix of the names of such records. They have no namespace: types without a namespace are named
inside them, and a name is resolved in the namespace around it."""
_NAMED = ("record", "error", "enum", "fixed")
_PROMOTED = {
    "int": ("long", "float", "double"), "long": ("float", "double"), "float": ("double",),
    "string": ("bytes",), "bytes": ("string",),
}  # fmt: skip
_SYMBOLS_MAX = 1_000_000
"""Most symbols of all enumerations of a version, because a type is written out at each use."""


def members(types: list[Any], path: str) -> list[Any]:
    """Return a union whose types are records of one field each.

    Args:
        types: Without null.
        path: Path of the field that has the union. Two unions of one schema need different names,
            and equal unions of two versions should have equal names.
    """
    before = f"{_PREFIX}{path.encode().hex()}"
    return [
        _record(f"{before}_{number}", "", f"member{number}", kind)
        for number, kind in enumerate(types)
    ]


def with_member(default: Any, kind: Any, named: Callable[[str], Any]) -> Any:
    """Return a default as readers return it; that of a union has its first type.

    Args:
        default: The default in the schema.
        kind: Its type, with :func:`members` in it.
        named: Returns the type of a name, of Avro or of the schema.
    """
    kind = named(kind) if isinstance(kind, str) else kind
    if isinstance(kind, list):
        first: Any = next((one for one in kind if one != "null"), "null")
        if default is None or not is_member(first):
            return default if default is None else with_member(default, first, named)
        (field,) = first["fields"]
        return {field["name"]: with_member(default, field["type"], named)}
    name = kind_of(kind)
    if name == "record" and isinstance(default, dict):
        types = {one["name"]: one["type"] for one in kind["fields"]}
        return {
            key: with_member(one, types[key], named) if key in types else one
            for key, one in default.items()
        }
    if name == "array" and isinstance(default, list):
        return [with_member(one, kind["items"], named) for one in default]
    if name == "map" and isinstance(default, dict):
        return {key: with_member(one, kind["values"], named) for key, one in default.items()}
    return default


def written_for(written: Any, wanted: Any) -> Any:
    """Return a writer's schema whose unions a reader resolves into those of another schema.

    Types that become the same member are records of the same name.

    Args:
        written: The writer's schema with :func:`members`.
        wanted: The reader's schema with :func:`members`.

    Raises:
        ValueError: It is too large.
    """
    return _Pairing(written, wanted).pair(written, wanted)


class _Pairing:
    def __init__(self, written: Any, wanted: Any) -> None:
        self._written = dict(_named(written))
        self._wanted = dict(_named(wanted))
        self._made = 0
        self._symbols = 0

    def pair(self, written: Any, wanted: Any) -> Any:
        """Return the written type for a reader of another type; a reader skips it for ``None``."""
        if isinstance(written, str):
            written = self._written.get(written, written)
        if isinstance(wanted, str):
            wanted = self._wanted.get(wanted, wanted)
        if isinstance(wanted, list) and any(map(is_member, wanted)):
            if isinstance(written, list):
                return [self._as_member(_without_member(one), wanted) for one in written]
            return self._as_member(written, wanted)
        if isinstance(wanted, list):
            others = [one for one in wanted if one != "null"]
            # A union of several types has only numbers here.
            wanted = others[0] if len(others) == 1 else None
        if isinstance(written, list):
            return [self.pair(_without_member(one), wanted) for one in written]
        return self._single(written, wanted)

    def _as_member(self, written: Any, wanted: list[Any]) -> Any:
        if written == "null":
            return written
        place = self._place(written, [self._in_member(one) for one in wanted])
        namespace = self._namespace()
        if place is None:
            return _record(f"{_PREFIX}none", namespace, "none", self.pair(written, None))
        (field,) = wanted[place]["fields"]
        kind = self.pair(written, field["type"])
        return _record(wanted[place]["name"], namespace, field["name"], kind)

    def _namespace(self) -> str:
        """Return a new namespace: a type is written out at each use, and names must be unique."""
        self._made += 1
        return f"w{self._made}"

    def _in_member(self, kind: Any) -> Any:
        inner = _without_member(kind)
        return self._wanted.get(inner, inner) if isinstance(inner, str) else inner

    def _place(self, written: Any, wanted: list[Any]) -> int | None:
        """Return the place in a union of a written type: the same type, else the first it fits."""
        if isinstance(written, str):
            written = self._written.get(written, written)
        kind = kind_of(written)
        same = [place for place, one in enumerate(wanted) if kind_of(one) == kind]
        if kind in _NAMED:
            named = [place for place in same if _full_name(wanted[place]) == _full_name(written)]
            same = named or [place for place in same if _is_called(written, wanted[place])]
        wider = (
            place for place, one in enumerate(wanted) if kind_of(one) in _PROMOTED.get(kind, ())
        )
        return same[0] if same else next(wider, None)

    def _single(self, written: Any, wanted: Any) -> Any:
        if not isinstance(written, dict):
            return written
        kind = kind_of(written)
        alike = isinstance(wanted, dict) and kind_of(wanted) == kind
        if kind in ("array", "map"):
            within = "items" if kind == "array" else "values"
            return written | {within: self.pair(written[within], wanted[within] if alike else None)}
        if kind not in _NAMED:
            return written
        self._symbols += len(written.get("symbols", ()))
        if self._symbols > _SYMBOLS_MAX:
            raise ValueError(f"more than {_SYMBOLS_MAX} symbols, wherever they are used")
        same = alike and _is_called(written, wanted)
        made = {key: one for key, one in written.items() if key != "aliases"} | {
            "name": wanted["name"] if same else written["name"],
            "namespace": self._namespace(),
        }
        if "fields" in made:
            made["fields"] = [
                {"name": one["name"], "type": self.pair(one["type"], _field(one, wanted, same))}
                for one in written["fields"]
            ]
        return made


def _field(written: dict[str, Any], wanted: Any, same: object) -> Any:
    """Return the type of the field that a written field becomes, or ``None``."""
    if not same:
        return None
    name = written["name"]
    found = [one for one in wanted["fields"] if one["name"] == name]
    found += [one for one in wanted["fields"] if name in one.get("aliases", ())]
    return found[0]["type"] if found else None


def _record(name: str, namespace: str, field: str, kind: Any) -> dict[str, Any]:
    fields = [{"name": field, "type": kind}]
    return {"type": "record", "name": name, "namespace": namespace, "fields": fields}


def is_member(kind: Any) -> bool:
    return isinstance(kind, dict) and str(kind.get("name")).startswith(_PREFIX)


def _without_member(kind: Any) -> Any:
    return kind["fields"][0]["type"] if is_member(kind) else kind


def kind_of(kind: Any) -> str:
    """Return the kind of a type: ``int``, ``record``, ``array``, ..."""
    return str(kind["type"] if isinstance(kind, dict) else kind)


def _full_name(kind: dict[str, Any]) -> str:
    return f"{kind['namespace']}.{kind['name']}"


def _is_called(written: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether a named type is the same one, by Avro's rules."""
    names = {written["name"], _full_name(written)}
    return written["name"] == wanted["name"] or not names.isdisjoint(wanted.get("aliases", ()))


def _named(kind: Any) -> Iterator[tuple[str, Any]]:
    """Return the named types in a type."""
    if isinstance(kind, list):
        for one in kind:
            yield from _named(one)
    elif isinstance(kind, dict):
        if kind_of(kind) in _NAMED:
            yield _full_name(kind).lstrip("."), kind
        for one in kind.get("fields", ()):
            yield from _named(one["type"])
        for within in ("items", "values"):
            if within in kind:
                yield from _named(kind[within])
