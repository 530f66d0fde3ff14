"""Unions of several types: structs with a field for each type, of which one is set.

A record of one field is stored as that field alone. So readers get a schema in which each type of
such a union is a record of one field, and they read values as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PREFIX = "keyshard_union_"
"""Prefix of the names of such records. They have no namespace: types without a namespace are named
inside them, and a name is resolved in the namespace around it."""


def members(types: list[Any], path: str) -> list[Any]:
    """Return a union whose types are records of one field each.

    Args:
        types: Without null.
        path: Path of the field that has the union. Two unions of one schema need different names,
            and equal unions of two versions should have equal names.
    """
    before = f"{PREFIX}{path.encode().hex()}"
    return [
        record_of(f"{before}_{number}", "", f"member{number}", kind)
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


def record_of(name: str, namespace: str, field: str, kind: Any) -> dict[str, Any]:
    """Return a record of one field."""
    fields = [{"name": field, "type": kind}]
    return {"type": "record", "name": name, "namespace": namespace, "fields": fields}


def is_member(kind: Any) -> bool:
    """Whether a type is a record of :func:`members`."""
    return isinstance(kind, dict) and str(kind.get("name")).startswith(PREFIX)


def without_member(kind: Any) -> Any:
    """Return the type in a member, or the type itself."""
    return kind["fields"][0]["type"] if is_member(kind) else kind


def kind_of(kind: Any) -> str:
    """Return the kind of a type: ``int``, ``record``, ``array``, ..."""
    return str(kind["type"] if isinstance(kind, dict) else kind)
