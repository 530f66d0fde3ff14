"""Casts decoded values to the wanted columns, without loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pyarrow as pa
from pyarrow import compute

from keyshard.errors import SchemaError

_INTEGER_OF_FLOAT = {pa.float32(): 16, pa.float64(): 32}
"""Largest integer type, in bits, that a float holds exactly."""
_DIGITS = {8: 3, 16: 5, 32: 10, 64: 19}
"""Decimal digits of integers, by their bits."""
_LOSSLESS = {
    (pa.float32(), pa.float64()),
    (pa.string(), pa.binary()),
    (pa.date32(), pa.timestamp("us")),
}


def columns_of(kind: pa.DataType) -> dict[str, pa.DataType]:
    """Return the columns of a decoded value: its fields, or ``value``."""
    if pa.types.is_struct(kind):
        return {field.name: field.type for field in kind}
    return {"value": kind}


def without_time_of_day(kind: pa.DataType) -> pa.DataType:
    """Return the type with times of day as microseconds, for hosts without a type for them."""
    types = pa.types
    if types.is_time(kind):
        return pa.int64()
    if types.is_struct(kind):
        return pa.struct([(field.name, without_time_of_day(field.type)) for field in kind])
    if types.is_list(kind):
        return pa.list_(without_time_of_day(kind.value_type))
    if types.is_map(kind):
        return pa.map_(kind.key_type, without_time_of_day(kind.item_type))
    return kind


def check_described(
    undescribed: Mapping[str, str], topic: str, columns: Sequence[str] | None = None
) -> None:
    """Check that the schema describes the wanted columns completely.

    Args:
        undescribed: Paths of fields that it does not describe completely, and the reasons.
        topic: For errors.
        columns: Names; each column is wanted whole. ``None``: all.

    Raises:
        SchemaError: It does not.
    """
    for path, why in undescribed.items():
        if columns is None or path.partition(".")[0] in columns:
            raise _undescribed(path, why, topic)


def check(kind: pa.DataType, undescribed: Mapping[str, str], wanted: pa.Schema, topic: str) -> None:
    """Check that values can be cast to the wanted columns.

    Args:
        kind: Type of the values.
        undescribed: As for :func:`check_described`.
        wanted: Columns; of a struct, only the named fields are wanted.
        topic: For errors.

    Raises:
        SchemaError: A column does not exist, or a cast would lose information.
    """
    for path, why in undescribed.items():
        if _names(wanted, path.split(".")):
            raise _undescribed(path, why, topic)
    there = columns_of(kind)
    for field in wanted:
        if field.name not in there:
            raise SchemaError(
                f"The schema of {topic} has no field {field.name!r}. Its fields: "
                f"{', '.join(there) or 'none'}.",
                "Remove the column, or set valueFormat=raw.",
                topic=topic,
            )
        problem = lossy(there[field.name], field.type, field.name)
        if problem:
            raise SchemaError(
                f"{problem} (schema of {topic}).",
                "Change the type in schema(...), or set valueFormat=raw.",
                topic=topic,
            )


def cast(values: pa.Array, wanted: pa.Schema) -> dict[str, pa.Array]:
    """Cast decoded values, which were checked, to the wanted columns."""
    names = list(columns_of(values.type))
    columns = values.flatten() if pa.types.is_struct(values.type) else [values]
    found = dict(zip(names, columns, strict=True))
    return {field.name: cast_values(found[field.name], field.type) for field in wanted}


def _undescribed(path: str, why: str, topic: str) -> SchemaError:
    return SchemaError(
        f"Field {path!r} of the schema of {topic} {why}.",
        "Leave the field out of schema(...) (in Python: decoder(...)). Or set valueFormat=raw to "
        "get the bytes (in a handler: message.value).",
        topic=topic,
    )


def _names(fields: Iterable[pa.Field], path: Sequence[str]) -> bool:
    """Whether a field exists at a path."""
    kind = next((field.type for field in fields if field.name == path[0]), None)
    if kind is None or len(path) == 1:
        return kind is not None
    return bool(pa.types.is_struct(kind)) and _names(kind, path[1:])


def lossy(source: pa.DataType, target: pa.DataType, path: str) -> str:
    """Return why a cast would lose information, or ``""``."""
    types = pa.types
    if source == target or types.is_null(source) or _widens(source, target):
        return ""
    if types.is_struct(source) and types.is_struct(target):
        there = {field.name: field.type for field in source}
        problems = (
            lossy(there[field.name], field.type, f"{path}.{field.name}")
            if field.name in there
            else f"Column {path!r} has no field {field.name!r}, only {', '.join(there) or 'none'}"
            for field in target
        )
        return next(filter(None, problems), "")
    if types.is_list(source) and types.is_list(target):
        return lossy(source.value_type, target.value_type, f"{path}[]")
    if types.is_map(source) and types.is_map(target):
        return lossy(source.key_type, target.key_type, f"{path} (key)") or lossy(
            source.item_type, target.item_type, f"{path}[]"
        )
    return f"Column {path!r} has type {source}, which cannot be cast to {target}"


def _widens(source: pa.DataType, target: pa.DataType) -> bool:
    types = pa.types
    if types.is_integer(source) and types.is_integer(target):
        return bool(target.bit_width >= source.bit_width)
    if types.is_integer(source) and types.is_decimal(target):
        return bool(target.precision - target.scale >= _DIGITS[source.bit_width])
    if types.is_integer(source):
        return bool(source.bit_width <= _INTEGER_OF_FLOAT.get(target, 0))
    if types.is_decimal(source) and types.is_decimal(target):
        whole = target.precision - target.scale >= source.precision - source.scale
        return bool(whole and target.scale >= source.scale)
    if types.is_time64(source):
        return bool(types.is_time64(target) or types.is_int64(target))
    return (source, target) in _LOSSLESS


# -- Casts of nested values -----------------------------------------------------------------------


def cast_values(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Cast values field by field.

    Arrow's own cast of a null type inside a list makes as many values as there are lists.

    Raises:
        pa.ArrowInvalid: A value is out of range.
    """
    types, own = pa.types, values.type
    if own == kind:
        return values
    mask = values.is_null() if values.null_count else None
    if types.is_struct(own) and types.is_struct(kind):
        fields = list(kind)
        columns = [cast_values(values.field(field.name), field.type) for field in fields]
        return pa.StructArray.from_arrays(columns, fields=fields, mask=mask)
    if types.is_list(own) and types.is_list(kind):
        within = cast_values(values.values, kind.value_type)
        return pa.ListArray.from_arrays(values.offsets, within, type=kind, mask=mask)
    if types.is_map(own) and types.is_map(kind):
        keys, items = (
            cast_values(values.keys, kind.key_type),
            cast_values(values.items, kind.item_type),
        )
        return pa.MapArray.from_arrays(values.offsets, keys, items, type=kind, mask=mask)
    if types.is_union(own):
        return _members(values, kind)
    return values.cast(kind)


def _members(values: pa.UnionArray, kind: pa.StructType) -> pa.Array:
    """Make a struct with all fields from a union of null and structs of one field each."""
    columns: list[pa.Array] = []
    codes, mask = values.type_codes, None
    for place, code in enumerate(values.type.type_codes):
        there = compute.equal(codes, code)
        inner = values.field(place)
        if pa.types.is_null(inner.type):
            mask = there
            continue
        rows = compute.if_else(there, pa.array(range(len(values)), pa.int64()), None)
        columns.append(cast_values(inner.field(0), kind[len(columns)].type).take(rows))
    return pa.StructArray.from_arrays(columns, fields=list(kind), mask=mask)


def null_in(field: pa.Field, values: pa.Array) -> str:
    """Return the path of a null in a field that is not nullable, or ``""``."""
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
