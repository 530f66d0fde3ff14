"""Decoded values as the columns that are wanted, by casts that lose nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pyarrow as pa

from keyshard.errors import SchemaError
from keyshard.schemas import casting

_INTEGER_OF_FLOAT = {pa.float32(): 16, pa.float64(): 32}
"""Bits of integers that a float holds exactly."""
_DIGITS = {8: 3, 16: 5, 32: 10, 64: 19}
"""Of integers, by their bits."""
_LOSSLESS = {
    (pa.float32(), pa.float64()),
    (pa.string(), pa.binary()),
    (pa.date32(), pa.timestamp("us")),
}


def columns_of(kind: pa.DataType) -> dict[str, pa.DataType]:
    """The columns of a decoded value: its fields, or ``value``."""
    if pa.types.is_struct(kind):
        return {field.name: field.type for field in kind}
    return {"value": kind}


def without_time_of_day(kind: pa.DataType) -> pa.DataType:
    """The type with microseconds of a day as numbers, for who has no type for them."""
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


def check_told(untold: Mapping[str, str], topic: str, columns: Sequence[str] | None = None) -> None:
    """Check that the schema tells all of the columns that are wanted: ``None`` are all.

    Args:
        untold: Paths of fields that it does not tell enough of, and why.
        topic: For errors.
        columns: Names; each is wanted whole.

    Raises:
        SchemaError: It does not.
    """
    for path, why in untold.items():
        if columns is None or path.partition(".")[0] in columns:
            raise _untold(path, why, topic)


def check(kind: pa.DataType, untold: Mapping[str, str], wanted: pa.Schema, topic: str) -> None:
    """Check that values can be the columns that are wanted.

    Args:
        kind: Type of the values.
        untold: As for :func:`check_told`.
        wanted: Columns; of a struct, the fields that are named are wanted.
        topic: For errors.

    Raises:
        SchemaError: One of them is not there, or would lose something.
    """
    for path, why in untold.items():
        if _names(wanted, path.split(".")):
            raise _untold(path, why, topic)
    there = columns_of(kind)
    for field in wanted:
        if field.name not in there:
            raise SchemaError(
                f"Column {field.name!r} is no field of the schema of {topic}, which has: "
                f"{', '.join(there) or 'none'}. Leave it out, or set valueFormat=raw.",
                topic=topic,
            )
        problem = _problem(there[field.name], field.type, field.name)
        if problem:
            raise SchemaError(
                f"{problem} (schema of {topic}). Give another type in schema(...), or set "
                "valueFormat=raw.",
                topic=topic,
            )


def cast(values: pa.Array, wanted: pa.Schema) -> dict[str, pa.Array]:
    """Decoded values as columns; they were checked."""
    names = list(columns_of(values.type))
    columns = values.flatten() if pa.types.is_struct(values.type) else [values]
    found = dict(zip(names, columns, strict=True))
    return {field.name: casting.cast(found[field.name], field.type) for field in wanted}


def _untold(path: str, why: str, topic: str) -> SchemaError:
    return SchemaError(
        f"Field {path!r} of the schema of {topic} {why}. Name the columns without it in "
        "schema(...) (in Python in decoder(...)), or set valueFormat=raw to get the bytes (a "
        "handler has them in message.value).",
        topic=topic,
    )


def _names(fields: Iterable[pa.Field], path: Sequence[str]) -> bool:
    """Whether fields, or those inside of them, have one of this path."""
    kind = next((field.type for field in fields if field.name == path[0]), None)
    if kind is None or len(path) == 1:
        return kind is not None
    return bool(pa.types.is_struct(kind)) and _names(kind, path[1:])


def _problem(source: pa.DataType, target: pa.DataType, path: str) -> str:
    """Why one type cannot be the other without loss; empty where it can."""
    types = pa.types
    if source == target or types.is_null(source) or _widens(source, target):
        return ""
    if types.is_struct(source) and types.is_struct(target):
        there = {field.name: field.type for field in source}
        problems = (
            _problem(there[field.name], field.type, f"{path}.{field.name}")
            if field.name in there
            else f"Column {path!r} has no field {field.name!r}, but {', '.join(there) or 'none'}"
            for field in target
        )
        return next(filter(None, problems), "")
    if types.is_list(source) and types.is_list(target):
        return _problem(source.value_type, target.value_type, f"{path}[]")
    if types.is_map(source) and types.is_map(target):
        return _problem(source.key_type, target.key_type, f"{path} (key)") or _problem(
            source.item_type, target.item_type, f"{path}[]"
        )
    return f"Column {path!r} is wanted as {target} and is {source}, and that cast is not made"


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
