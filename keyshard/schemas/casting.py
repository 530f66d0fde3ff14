"""Casts of values with values inside."""

from __future__ import annotations

import pyarrow as pa
from pyarrow import compute


def cast(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Values as another type, field by field: Arrow's own cast makes of what has no type, inside of
    a list, as many values as there are lists.

    Raises:
        pa.ArrowInvalid: One is out of range.
    """
    types, own = pa.types, values.type
    if own == kind:
        return values
    mask = values.is_null() if values.null_count else None
    if types.is_struct(own) and types.is_struct(kind):
        fields = list(kind)
        columns = [cast(values.field(field.name), field.type) for field in fields]
        return pa.StructArray.from_arrays(columns, fields=fields, mask=mask)
    if types.is_list(own) and types.is_list(kind):
        within = cast(values.values, kind.value_type)
        return pa.ListArray.from_arrays(values.offsets, within, type=kind, mask=mask)
    if types.is_map(own) and types.is_map(kind):
        keys, items = cast(values.keys, kind.key_type), cast(values.items, kind.item_type)
        return pa.MapArray.from_arrays(values.offsets, keys, items, type=kind, mask=mask)
    if types.is_union(own):
        return _members(values, kind)
    return values.cast(kind)


def _members(values: pa.UnionArray, kind: pa.StructType) -> pa.Array:
    """A union of structs of one field each, and null, as a struct with all of their fields."""
    columns: list[pa.Array] = []
    codes, mask = values.type_codes, None
    for place, code in enumerate(values.type.type_codes):
        there = compute.equal(codes, code)
        inner = values.field(place)
        if pa.types.is_null(inner.type):
            mask = there
            continue
        rows = compute.if_else(there, pa.array(range(len(values)), pa.int64()), None)
        columns.append(cast(inner.field(0), kind[len(columns)].type).take(rows))
    return pa.StructArray.from_arrays(columns, fields=list(kind), mask=mask)


def null_in(field: pa.Field, values: pa.Array) -> str:
    """The path of a value that is null where the field, or one inside of it, never is; or none."""
    if values.null_count and not field.nullable:
        return str(field.name)
    types, kind = pa.types, field.type
    if not (types.is_struct(kind) or types.is_list(kind) or types.is_map(kind)):
        return ""
    values = values.drop_null()
    if types.is_struct(kind):
        within = [(one, values.field(one.name)) for one in kind]
    elif types.is_list(kind):
        within = [(kind.value_field, values.flatten())]
    else:
        items = pa.ListArray.from_arrays(values.offsets, values.items).flatten()
        within = [(kind.item_field, items)]
    found = next((path for one in within if (path := null_in(*one))), "")
    return found and f"{field.name}.{found}"
