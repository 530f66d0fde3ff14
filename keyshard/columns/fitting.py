"""Fits columns to the schema that they are encoded by: types, nulls and missing fields.

The types of empty columns are checked as those of full ones, so a host can check them before it has
rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import pyarrow as pa
from pyarrow import compute

from keyshard.base_error import first_line
from keyshard.columns.projection import lossy, null_in
from keyshard.core.option_checks import did_you_mean
from keyshard.errors import SchemaError


@dataclass(frozen=True, slots=True)
class Slot:
    """A field or an item of a schema, and the values that it takes; not a slot of the ring."""

    column: pa.DataType
    """Type of the column of a reader. Columns that cast to it without loss fit."""
    stored: pa.DataType
    """Type that the encoder takes."""
    unit: pa.DataType | None = None
    """Type between the two, in the unit that is stored; ``None`` for the column's."""
    nullable: bool = True
    omissible: bool = False
    """Whether rows may lack the field."""
    default: Any = None
    """Stored value of rows that lack the field."""
    symbols: frozenset[str] | None = None
    """Texts of an enumeration."""
    size: int | None = None
    """Size of each value, bytes."""
    fields: Mapping[str, Slot] = field(default_factory=dict)
    """Fields of a struct."""
    item: Slot | None = None
    """Items of a list or a map."""
    exclusive: tuple[tuple[str, ...], ...] = ()
    """Fields of which at most one is set: the members of a union, or the fields of a oneof."""

    def declared(self) -> pa.DataType:
        """Return the stored type, with each field and item marked as nullable or not."""
        if self.fields:
            return pa.struct(
                [pa.field(name, one.declared(), one.nullable) for name, one in self.fields.items()]
            )
        if self.item is None:
            return self.stored
        item = pa.field("[]", self.item.declared(), self.item.nullable)
        if pa.types.is_map(self.stored):
            return pa.map_(pa.field("key", self.stored.key_type, nullable=False), item)
        return pa.list_(item)


def fitted(values: pa.Array, slot: Slot, topic: str) -> pa.Array:
    """Return values as the type that an encoder takes.

    Args:
        values: A struct of all columns, or the one column of a schema without fields.
        slot: The values that the schema takes.
        topic: For errors.

    Raises:
        SchemaError: A column is unknown or missing, or its type or a value does not fit. The error
            names the path of the column.
    """
    if pa.types.is_nested(values.type):
        # Copy: Arrow cannot rebuild a sliced list or map that has nulls.
        values = values.take(pa.array(range(len(values)), pa.int64()))
    found = _Fitting(topic).fit(values, slot, "")
    declared = pa.field("", slot.declared(), slot.nullable)
    path = null_in(declared, found).replace(".[]", "[]")
    if path:
        raise SchemaError(
            f"Column {path.lstrip('.') or 'value'!r} has a null, which the schema of {topic} does "
            "not allow there.",
            "Replace the nulls, or make the field nullable in the schema.",
            topic=topic,
        )
    return found


class _Fitting:
    def __init__(self, topic: str) -> None:
        self._topic = topic

    def fit(self, values: pa.Array, slot: Slot, path: str) -> pa.Array:
        types, own = pa.types, values.type
        if types.is_null(own):
            return pa.nulls(len(values), slot.stored)
        if types.is_struct(slot.stored) and types.is_struct(own):
            return self._struct(values, slot, path)
        mask = values.is_null() if values.null_count else None
        if slot.item is not None and types.is_list(own) and types.is_list(slot.stored):
            within = self.fit(values.values, slot.item, f"{path}[]")
            return pa.ListArray.from_arrays(values.offsets, within, type=slot.stored, mask=mask)
        if slot.item is not None and types.is_map(own) and types.is_map(slot.stored):
            keys = self._leaf(values.keys, Slot(slot.stored.key_type, slot.stored.key_type), path)
            items = self.fit(values.items, slot.item, f"{path}[]")
            return pa.MapArray.from_arrays(values.offsets, keys, items, type=slot.stored, mask=mask)
        return self._leaf(values, slot, path)

    def _struct(self, values: pa.StructArray, slot: Slot, path: str) -> pa.Array:
        names = [one.name for one in values.type]
        for name in names:
            if name not in slot.fields:
                hint = did_you_mean(name, slot.fields, f"It has: {', '.join(slot.fields)}.")
                raise self._unfit(f"{path}.{name}", "is not a field of the schema", hint)
        columns, given = [], values.flatten()  # null where the struct is null
        for name, one in slot.fields.items():
            if name in names:
                within = given[names.index(name)]
                columns.append(self.fit(within, one, f"{path}.{name}"))
            elif one.omissible or one.nullable:
                columns.append(pa.array([one.default] * len(values), one.stored))
            else:
                raise self._unfit(
                    f"{path}.{name}",
                    "is missing, but the schema has neither null nor a default for it",
                    "Add it.",
                )
        for group in slot.exclusive:
            self._check_one(dict(zip(slot.fields, columns, strict=True)), group, path)
        if not columns:
            return pa.array([{}] * len(values), slot.stored)
        mask = values.is_null() if values.null_count else None
        return pa.StructArray.from_arrays(columns, fields=list(slot.stored), mask=mask)

    def _leaf(self, values: pa.Array, slot: Slot, path: str) -> pa.Array:
        types = pa.types
        if types.is_large_string(values.type) or types.is_large_binary(values.type):
            small = pa.string() if types.is_large_string(values.type) else pa.binary()
            values = values.cast(small)
        if types.is_timestamp(values.type) and types.is_timestamp(slot.column):
            of_zone = values.type.tz is not None
            if of_zone == (slot.column.tz is not None):
                values = values.cast(slot.column, safe=values.type.unit != "ns")
        of_day = types.is_time(slot.column) and types.is_int64(values.type)
        nested = bool(slot.fields) or slot.item is not None
        if not of_day and (nested or lossy(values.type, slot.column, "-")):
            raise self._unfit(
                path, f"has the type {values.type}, but the schema takes {slot.column}",
                "Cast the column.",
            )  # fmt: skip
        try:
            found = values.cast(slot.column)
            if of_day:
                found.validate(full=True)  # Arrow casts any number to a time of day
            for kind in (slot.unit or slot.column, slot.stored):
                # Times are rounded down to the unit of the schema.
                coarser = types.is_timestamp(kind) or types.is_time(kind)
                found = _cut(found, kind) if coarser else found.cast(kind)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as exc:
            raise self._unfit(
                path, f"has a value out of range ({first_line(exc)})", "Correct it."
            ) from exc
        self._check_values(found, slot, path)
        return found

    def _check_one(
        self, columns: Mapping[str, pa.Array], group: tuple[str, ...], path: str
    ) -> None:
        there = [columns[name].is_valid().cast(pa.int8()) for name in group]
        if len(there) > 1 and (compute.max(reduce(compute.add, there)).as_py() or 0) > 1:
            raise self._unfit(
                path, f"has values in more than one of {', '.join(group)}",
                "Set only one of them.",
            )  # fmt: skip

    def _check_values(self, values: pa.Array, slot: Slot, path: str) -> None:
        if slot.symbols is not None:
            for text in compute.unique(values).to_pylist():
                if text is not None and text not in slot.symbols:
                    hint = did_you_mean(
                        text, slot.symbols, f"It has: {', '.join(sorted(slot.symbols)[:20])}."
                    )
                    raise self._unfit(
                        path, f"has the value {text!r}, which its enumeration lacks", hint
                    )
        if slot.size is not None:
            fits = compute.equal(compute.binary_length(values), slot.size)
            if not compute.all(fits, min_count=0).as_py():
                raise self._unfit(
                    path, f"has a value of another size than {slot.size} bytes", "Correct it."
                )

    def _unfit(self, path: str, why: str, what_to_do: str) -> SchemaError:
        return SchemaError(
            f"Column {path.lstrip('.') or 'value'!r} {why} (schema of {self._topic}).",
            what_to_do,
            topic=self._topic,
        )


def _cut(times: pa.Array, kind: pa.DataType) -> pa.Array:
    """Round times down to a coarser unit, also before 1970, where Arrow rounds up."""
    found = times.cast(kind, safe=False)
    if not pa.types.is_timestamp(kind) or found.type == times.type:
        return found
    late = compute.greater(found.cast(times.type), times)
    if not compute.any(late).as_py():
        return found
    return compute.subtract(found.cast(pa.int64()), late.cast(pa.int64())).cast(kind)
