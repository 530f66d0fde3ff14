"""Unions of several types: structs with a field for each type, of which one is set.

A record of one field is stored as that field alone. So readers are given a schema in which each
type of such a union is a record of the one field that it becomes, and read values as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

_PREFIX = "keyshard_union_"
"""Begins the names of such records. They have no namespace: types that have none are named in them,
too, and a name is looked for in the namespace that it stands in."""
_NAMED = ("record", "error", "enum", "fixed")
_PROMOTED = {
    "int": ("long", "float", "double"), "long": ("float", "double"), "float": ("double",),
    "string": ("bytes",), "bytes": ("string",),
}  # fmt: skip
_SYMBOLS_MAX = 1_000_000
"""Most symbols of all enumerations of a version: types that are used often are written out."""


def members(types: list[Any], path: str) -> list[Any]:
    """A union whose types are records of one field each.

    Args:
        types: Without null.
        path: Of the field that has it: two of one schema need different names, and those of two
            versions are best alike.
    """
    before = f"{_PREFIX}{path.encode().hex()}"
    return [
        _record(f"{before}_{number}", "", f"member{number}", kind)
        for number, kind in enumerate(types)
    ]


def with_member(default: Any, kind: Any, named: Callable[[str], Any]) -> Any:
    """A default as readers give it: that of a union is one of its first type.

    Args:
        default: As the schema has it.
        kind: Type, with :func:`members` in it.
        named: Gives the type of a name, be it Avro's own or one of the schema.
    """
    kind = named(kind) if isinstance(kind, str) else kind
    if isinstance(kind, list):
        first: Any = next((one for one in kind if one != "null"), "null")
        if default is None or not _is_member(first):
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
    """The schema that values were written with, such that a reader finds their unions in those of
    another schema: types that become the same member are records of the same name.

    Args:
        written: With :func:`members`, as ``wanted``.
        wanted: What values become.

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
        """The type as it was written, for a reader of another: ``None`` passes over it."""
        if isinstance(written, str):
            written = self._written.get(written, written)
        if isinstance(wanted, str):
            wanted = self._wanted.get(wanted, wanted)
        if isinstance(wanted, list) and any(map(_is_member, wanted)):
            if isinstance(written, list):
                return [self._as_member(_without_member(one), wanted) for one in written]
            return self._as_member(written, wanted)
        if isinstance(wanted, list):
            others = [one for one in wanted if one != "null"]
            # Of several, all are numbers.
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
        """One more: a type is written out in each place, and every name is there once."""
        self._made += 1
        return f"w{self._made}"

    def _in_member(self, kind: Any) -> Any:
        inner = _without_member(kind)
        return self._wanted.get(inner, inner) if isinstance(inner, str) else inner

    def _place(self, written: Any, wanted: list[Any]) -> int | None:
        """Which type of a union one becomes: the same one, else the first that it fits into."""
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
    """The type of the field that one becomes, if any."""
    if not same:
        return None
    name = written["name"]
    found = [one for one in wanted["fields"] if one["name"] == name]
    found += [one for one in wanted["fields"] if name in one.get("aliases", ())]
    return found[0]["type"] if found else None


def _record(name: str, namespace: str, field: str, kind: Any) -> dict[str, Any]:
    fields = [{"name": field, "type": kind}]
    return {"type": "record", "name": name, "namespace": namespace, "fields": fields}


def _is_member(kind: Any) -> bool:
    return isinstance(kind, dict) and str(kind.get("name")).startswith(_PREFIX)


def _without_member(kind: Any) -> Any:
    return kind["fields"][0]["type"] if _is_member(kind) else kind


def kind_of(kind: Any) -> str:
    """What a type is, without what it is made of: ``int``, ``record``, ``array``, ..."""
    return str(kind["type"] if isinstance(kind, dict) else kind)


def _full_name(kind: dict[str, Any]) -> str:
    return f"{kind['namespace']}.{kind['name']}"


def _is_called(written: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether a named type is the same one, by Avro's rules."""
    names = {written["name"], _full_name(written)}
    return written["name"] == wanted["name"] or not names.isdisjoint(wanted.get("aliases", ()))


def _named(kind: Any) -> Iterator[tuple[str, Any]]:
    """The named types in a type."""
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
