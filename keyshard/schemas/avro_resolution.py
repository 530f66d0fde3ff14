"""Columns written with one Avro schema as those of another, where that is plain.

The rules are Avro's. Whatever is not plain is left to fastavro, value by value: a nested type that
differs, a value that may be null where the other schema has no null, a default that is no scalar.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from keyshard.schemas.avro_types import AvroType

_Make = Callable[[pa.StructArray], pa.Array]
_PROMOTED = {
    ("int", "long"), ("int", "float"), ("int", "double"), ("long", "float"), ("long", "double"),
    ("float", "double"),
}  # fmt: skip


def resolution(written: AvroType, wanted: AvroType) -> Callable[[pa.StructArray], pa.Array] | None:
    """What makes values of one schema of those of another; ``None`` where it is not plain."""
    ours, theirs = wanted.schema, written.schema
    if not _are_records(ours, theirs) or ours["name"] != theirs["name"]:
        return None
    places = {one["name"]: place for place, one in enumerate(theirs["fields"])}
    makes: list[_Make] = []
    for field, kind in zip(ours["fields"], wanted.stored, strict=True):
        names = [field["name"], *field.get("aliases", ())]
        place = next((places[name] for name in names if name in places), None)
        make = (
            _default(field, kind.type)
            if place is None
            else _same_field(theirs["fields"][place]["type"], field["type"], place, kind.type)
        )
        if make is None:
            return None
        makes.append(make)
    fields = list(wanted.stored)

    def resolve(values: pa.StructArray) -> pa.Array:
        return pa.StructArray.from_arrays([make(values) for make in makes], fields=fields)

    return resolve if makes else None


def _are_records(*schemas: Any) -> bool:
    return all(isinstance(one, dict) and one["type"] == "record" for one in schemas)


def _same_field(theirs: Any, ours: Any, place: int, kind: pa.DataType) -> _Make | None:
    """What makes the column of a field that both have."""
    their_kind, ours_kind = _without_null(theirs), _without_null(ours)
    may_be_null = isinstance(theirs, list) and not isinstance(ours, list)
    promoted = (str(their_kind), str(ours_kind)) in _PROMOTED
    if may_be_null or not (promoted or (their_kind == ours_kind and _is_whole(ours_kind))):
        return None
    return lambda values: values.field(place).cast(kind, safe=False)


_SCALARS = {"boolean", "int", "long", "float", "double", "string"}


def _is_whole(kind: Any) -> bool:
    """Whether a type names no other, which another schema may define otherwise."""
    if isinstance(kind, str):
        return kind in _SCALARS or kind == "null"
    if isinstance(kind, list):
        return all(map(_is_whole, kind))
    within = [one["type"] for one in kind.get("fields", ())]
    within += [kind[name] for name in ("items", "values") if name in kind]
    return all(map(_is_whole, within))


def _without_null(kind: Any) -> Any:
    others: Sequence[Any] = [one for one in kind if one != "null"] if isinstance(kind, list) else ()
    return others[0] if len(others) == 1 else kind


def _default(field: dict[str, Any], kind: pa.DataType) -> _Make | None:
    """What makes the column of a field that was not written."""
    if "default" not in field or isinstance(field["default"], (dict, list)):
        return None
    value, named = field["default"], _without_null(field["type"])
    if value is not None and not (isinstance(named, str) and named in _SCALARS):
        return None
    try:
        one = pa.array([value], kind)
    except (pa.ArrowException, TypeError):
        return None
    return lambda values: one.take(pa.array([0] * len(values), pa.int8()))
