"""Encodes columns as the values of a schema; the inverse of :mod:`keyshard.columns.codecs`.

Compiled code encodes the Avro schemas that it supports, and fastavro the others. The packages are
those that decode.
"""

from __future__ import annotations

import io
import json
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import pyarrow as pa
from pyarrow import compute

from keyshard.base_error import first_line
from keyshard.columns.avro import COMPILED_LACKS
from keyshard.columns.avro_types import DECIMAL, UNION, AvroType, parse
from keyshard.columns.avro_unions import is_member, kind_of
from keyshard.columns.codec import library, panics_as_errors
from keyshard.columns.fitting import Slot, fitted
from keyshard.columns.primitives import PRIMITIVES
from keyshard.columns.protobuf import ProtobufCodec
from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import SchemaError

_Change = Callable[[Any], Any]
_ENCODE = "Encode the bytes yourself, and set valueFormat=raw."
_TOGETHER = 8_192
"""Most values that are turned into Python objects together."""


class Encoder(Protocol):
    """Encodes values of one schema."""

    slot: Slot
    """Values that it takes. Fields of a struct are columns; else the column is ``value``."""

    def encode(self, values: pa.Array) -> pa.Array:
        """Encode values.

        Args:
            values: Fitted to :attr:`slot`.

        Returns:
            Payloads, binary.

        Raises:
            ValueError: A value cannot be encoded.
        """


def encoder_of(schema: TopicSchema, topic: str) -> Encoder:
    """Return the encoder of a schema.

    Args:
        schema: The schema that values are encoded by.
        topic: For errors.

    Raises:
        SchemaError: keyshard cannot encode by the schema.
        ConfigError: A required package is not installed.
    """
    if schema.type in PRIMITIVES:
        return _PrimitiveEncoder(schema)
    if schema.type == "AVRO":
        return _AvroEncoder(schema, topic)
    if schema.type == "JSON":
        return _JsonEncoder(schema, topic)
    if schema.type == "PROTOBUF_NATIVE":
        return _ProtobufEncoder(schema, topic)
    raise SchemaError(
        f"keyshard does not encode values by a schema of type {schema.type}, which {topic} has.",
        _ENCODE,
        topic=topic,
    )


def encoded(values: pa.Array, encoder: Encoder, topic: str) -> pa.Array:
    """Fit values to a schema, and encode them.

    Args:
        values: A struct of all columns, or the one column of a schema without fields.
        encoder: Encoder of the schema.
        topic: For errors.

    Raises:
        SchemaError: A column or a value does not fit the schema, and the error names its path. Or a
            value cannot be encoded.
    """
    found = fitted(values, encoder.slot, topic)
    try:
        with panics_as_errors():
            return encoder.encode(found)
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as exc:
        raise SchemaError(
            f"A value cannot be encoded by the schema of {topic} ({first_line(exc)}).",
            "Correct the rows, or encode the bytes yourself, and set valueFormat=raw.",
            topic=topic,
        ) from exc


# -- Avro and JSON --------------------------------------------------------------------------------


class _AvroEncoder:
    def __init__(self, schema: TopicSchema, topic: str) -> None:
        self._compiled = library("pyruhvro", f"The Avro schema of {topic}").serialize_record_batch
        fastavro = library("fastavro", f"The Avro schema of {topic}")
        for kind in ("bytes", "fixed"):
            writers = fastavro.write.LOGICAL_WRITERS
            writers[f"{kind}-{DECIMAL}"] = writers[f"{kind}-decimal"]
        self._type = parse(schema.definition, topic)
        self.slot = _AvroSlots().of(self._type)
        self._text = json.dumps(self._type.schema)
        self._write = fastavro.schemaless_writer
        try:
            self._parsed = fastavro.parse_schema(self._type.schema)
        except Exception as exc:
            # fastavro may raise any exception. If it refuses the schema, no value can be encoded.
            raise SchemaError(
                f"The Avro schema of {topic} cannot be used ({first_line(exc)}).",
                _ENCODE,
                topic=topic,
            ) from exc
        plain = bool(self.slot.fields) and not self._type.kinds & {*COMPILED_LACKS, UNION}
        self._is_compiled = plain and self._compiles()

    def _compiles(self) -> bool:
        nothing = pa.RecordBatch.from_struct_array(pa.array([], self._type.stored))
        try:
            with panics_as_errors():
                self._compiled(nothing, self._text, 1)
        except ValueError:
            return False
        return True

    def encode(self, values: pa.Array) -> pa.Array:
        if self._is_compiled:
            batch = pa.RecordBatch.from_struct_array(values)
            parts = self._compiled(batch, self._text, 1)
            return pa.concat_arrays([pa.nulls(0, pa.binary()), *parts])
        return pa.array(map(self._one, _objects(values, self.slot, unions=True)), pa.binary())

    def _one(self, value: Any) -> bytes:
        into = io.BytesIO()
        self._write(into, self._parsed, value)
        return into.getvalue()


class _JsonEncoder:
    """Objects as Pulsar's Java client writes them: bytes as base64, and no number as text."""

    def __init__(self, schema: TopicSchema, topic: str) -> None:
        msgspec = library("msgspec", f"The JSON schema of {topic}")
        self._encode = msgspec.json.Encoder(decimal_format="number").encode
        self._type = parse(schema.definition, topic, unions=False)
        self.slot = _AvroSlots().of(self._type)
        if not self.slot.fields:
            raise SchemaError(
                f"The JSON schema of {topic} is not a record with fields.",
                _ENCODE,
                topic=topic,
            )

    def encode(self, values: pa.Array) -> pa.Array:
        objects = _objects(values, self.slot)
        if not _finite(values):
            objects = map(_with_texts, objects)
        return pa.array(map(self._encode, objects), pa.binary())


class _AvroSlots:
    """Creates the :class:`Slot` of each type of an Avro schema."""

    def __init__(self) -> None:
        self._named: dict[str, Any] = {}

    def of(self, kind: AvroType) -> Slot:
        return self._slot(kind.schema, kind.column, kind.unit, kind.stored)

    def _slot(
        self, schema: Any, column: pa.DataType, unit: pa.DataType, stored: pa.DataType
    ) -> Slot:
        if isinstance(schema, list):
            others = [one for one in schema if one != "null"]
            nullable = len(others) < len(schema)
            if any(map(is_member, others)):
                for one in others:
                    self._define(one)
                fields = {
                    one["fields"][0]["name"]: self._slot(
                        one["fields"][0]["type"],
                        *(kind.field(one["fields"][0]["name"]).type
                          for kind in (column, unit, stored)),
                    )
                    for one in others
                }  # fmt: skip
                fields = {name: replace(one, nullable=True) for name, one in fields.items()}
                return Slot(
                    column, stored, nullable=nullable, fields=fields, exclusive=(tuple(fields),)
                )
            if len(others) != 1:  # numbers, or only null
                return Slot(column, stored, unit, nullable=nullable or not others)
            slot = self._slot(others[0], column, unit, stored)
            return replace(slot, nullable=True) if nullable else slot
        self._define(schema)
        if isinstance(schema, str):
            schema = self._named.get(schema, schema)
        kind = kind_of(schema)
        if kind == "record":
            fields = {one["name"]: self._field(one, column, unit, stored)
                      for one in schema["fields"]}  # fmt: skip
            return Slot(column, stored, unit, nullable=False, fields=fields)
        if kind in ("array", "map"):
            types = [
                one.value_type if kind == "array" else one.item_type
                for one in (column, unit, stored)
            ]
            item = self._slot(schema["items" if kind == "array" else "values"], *types)
            return Slot(column, stored, unit, nullable=False, item=item)
        symbols = frozenset(schema["symbols"]) if kind == "enum" else None
        size = schema["size"] if kind == "fixed" and not pa.types.is_decimal(stored) else None
        return Slot(column, stored, unit, nullable=kind == "null", symbols=symbols, size=size)

    def _define(self, schema: Any) -> None:
        if isinstance(schema, dict) and "name" in schema:
            namespace = schema.get("namespace")
            name = f"{namespace}.{schema['name']}" if namespace else schema["name"]
            self._named.setdefault(name, schema)

    def _field(
        self, schema: Mapping[str, Any], column: pa.DataType, unit: pa.DataType, stored: pa.DataType
    ) -> Slot:
        name = schema["name"]
        slot = self._slot(
            schema["type"], *(kind.field(name).type for kind in (column, unit, stored))
        )
        default = schema.get("default")
        scalar = isinstance(default, str | int | float) and not pa.types.is_binary(slot.stored)
        if not scalar or slot.fields or slot.item is not None or pa.types.is_decimal(slot.stored):
            return slot
        return replace(slot, omissible=True, default=default)


def _objects(values: pa.Array, slot: Slot, *, unions: bool = False) -> Iterator[Any]:
    """Yield values as Python objects, with maps as dictionaries.

    Args:
        values: Values that are fitted.
        slot: The values of the schema, as Arrow types.
        unions: Whether structs of the members of a union become the one member that is set.
    """
    change = _change(slot, unions=unions)
    for start in range(0, len(values), _TOGETHER):
        objects = values.slice(start, _TOGETHER).to_pylist()
        yield from objects if change is None else map(change, objects)


def _change(slot: Slot, *, unions: bool) -> _Change | None:
    """Return a function from Arrow's objects to objects to encode; ``None`` if they are equal."""
    if slot.fields:
        within = {name: _change(one, unions=unions) for name, one in slot.fields.items()}
        changes = {name: one for name, one in within.items() if one is not None}
        if unions and slot.exclusive:
            return partial(_member, changes)
        return partial(_record, changes) if changes else None
    if slot.item is None:
        return None
    item = _change(slot.item, unions=unions)
    if pa.types.is_map(slot.stored):
        return partial(_map, item)
    return partial(_list, item) if item is not None else None


def _record(changes: Mapping[str, _Change], value: Any) -> Any:
    if value is None:
        return None
    return value | {name: change(value[name]) for name, change in changes.items()}


def _map(item: _Change | None, value: Any) -> Any:
    if value is None or item is None:
        return None if value is None else dict(value)
    return {key: item(one) for key, one in value}


def _list(item: _Change, value: Any) -> Any:
    return None if value is None else list(map(item, value))


def _member(changes: Mapping[str, _Change], value: Any) -> Any:
    """Return the member of a union that is set."""
    there = {name: one for name, one in (value or {}).items() if one is not None}
    return {name: changes[name](one) if name in changes else one
            for name, one in there.items()} or None  # fmt: skip


def _finite(values: pa.Array) -> bool:
    """Whether no float among values is NaN or infinite, which JSON lacks."""
    types = pa.types
    if types.is_struct(values.type):
        return all(_finite(values.field(place)) for place in range(values.type.num_fields))
    if types.is_map(values.type):
        return _finite(values.items)
    if types.is_list(values.type):
        return _finite(values.values)
    if not types.is_floating(values.type):
        return True
    return bool(compute.all(compute.is_finite(values), min_count=0).as_py())


_TEXTS = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def _with_texts(value: Any) -> Any:
    """Return a value with texts in place of the floats that JSON lacks."""
    if isinstance(value, dict):
        return {name: _with_texts(one) for name, one in value.items()}
    if isinstance(value, list):
        return list(map(_with_texts, value))
    return _TEXTS.get(str(value), value) if isinstance(value, float) else value


# -- Protobuf -------------------------------------------------------------------------------------


class _ProtobufEncoder:
    def __init__(self, schema: TopicSchema, topic: str) -> None:
        codec = ProtobufCodec(schema, topic)
        self._encode = codec.encode
        self.slot = _message_slot(codec.type, codec.stored, codec.descriptor)

    def encode(self, values: pa.Array) -> pa.Array:
        return self._encode(pa.RecordBatch.from_struct_array(values))


def _message_slot(column: pa.DataType, stored: pa.DataType, descriptor: Any) -> Slot:
    fields = {
        one.name: _field_slot(column.field(one.name).type, stored.field(one.name), one)
        for one in descriptor.fields
    }
    exclusive = tuple(tuple(one.name for one in group.fields) for group in descriptor.oneofs)
    return Slot(column, _bare(stored), omissible=True, fields=fields, exclusive=exclusive)


def _field_slot(column: pa.DataType, stored: pa.Field, described: Any) -> Slot:
    kind, types = stored.type, pa.types
    how = {"nullable": stored.nullable, "omissible": not _is_required(described)}
    if types.is_map(kind):
        value = described.message_type.fields_by_name["value"]
        item = _field_slot(column.item_type, kind.item_field, value)
        return Slot(column, _bare(kind), item=item, default=[], **how)
    if types.is_list(kind):
        item = _single_slot(column.value_type, kind.value_type, described)
        return Slot(column, _bare(kind), item=replace(item, nullable=False), default=[], **how)
    slot = _single_slot(column, kind, described)
    # A field without presence is its default if rows lack it.
    default = None if stored.nullable else described.default_value
    if described.enum_type is not None and default is not None:
        default = described.enum_type.values_by_number[default].name
    return replace(slot, default=default, **how)


def _single_slot(column: pa.DataType, kind: pa.DataType, described: Any) -> Slot:
    if pa.types.is_struct(kind):
        return _message_slot(column, kind, described.message_type)
    enum = described.enum_type
    symbols = frozenset(enum.values_by_name) if enum is not None else None
    return Slot(column, _bare(kind), symbols=symbols)


def _is_required(described: Any) -> bool:
    """Whether a field of proto2 is required; older versions of protobuf have only its label."""
    if hasattr(described, "is_required"):
        return bool(described.is_required)
    return bool(described.label == described.LABEL_REQUIRED)


def _bare(kind: pa.DataType) -> pa.DataType:
    """Return the type with all fields nullable."""
    types = pa.types
    if types.is_struct(kind):
        return pa.struct([(one.name, _bare(one.type)) for one in kind])
    if types.is_list(kind):
        return pa.list_(_bare(kind.value_type))
    if types.is_map(kind):
        return pa.map_(kind.key_type, _bare(kind.item_type))
    return kind


# -- Primitive types ------------------------------------------------------------------------------


class _PrimitiveEncoder:
    def __init__(self, schema: TopicSchema) -> None:
        self._kind = schema.type
        column = PRIMITIVES[schema.type].type
        millis = schema.type in ("DATE", "TIME", "TIMESTAMP")
        self.slot = Slot(column, pa.timestamp("ms", tz="UTC") if millis else column)

    def encode(self, values: pa.Array) -> pa.Array:
        found = _primitive(self._kind, values)
        return compute.if_else(values.is_valid(), found, pa.scalar(None, pa.binary()))


_NUMBERS = {"BOOLEAN": "b", "INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q", "FLOAT": "f",
            "DOUBLE": "d", "DATE": "q", "TIME": "q", "TIMESTAMP": "q", "LOCAL_DATE": "q",
            "LOCAL_TIME": "q"}  # fmt: skip
_DAY_US, _SECOND_US = 86_400_000_000, 1_000_000


def _primitive(kind: str, values: pa.Array) -> pa.Array:
    if kind in ("NONE", "BYTES", "STRING"):
        return values.cast(pa.binary())
    if kind == "BOOLEAN":
        values = values.cast(pa.int8())
    if kind == "LOCAL_DATE":
        values = values.cast(pa.int32())
    if kind in ("INSTANT", "LOCAL_DATE_TIME"):
        unit = _SECOND_US if kind == "INSTANT" else _DAY_US
        us = values.cast(pa.int64())
        whole = compute.divide(us, unit)
        rest = compute.subtract(us, compute.multiply(whole, unit))
        early = compute.less(rest, 0)  # Arrow divides towards zero
        whole = compute.if_else(early, compute.subtract(whole, 1), whole)
        nanos = compute.multiply(compute.if_else(early, compute.add(rest, unit), rest), 1_000)
        parts = _big_endian(whole, "q"), _big_endian(nanos, "i" if kind == "INSTANT" else "q")
        return compute.binary_join_element_wise(*parts, pa.scalar(b"", pa.binary()))
    if kind == "LOCAL_TIME":
        values = compute.multiply(values.cast(pa.int64()), 1_000)
    return _big_endian(values, _NUMBERS[kind])


_KINDS = {"b": pa.int8(), "h": pa.int16(), "i": pa.int32(), "q": pa.int64(), "f": pa.float32(),
          "d": pa.float64()}  # fmt: skip


def _big_endian(values: pa.Array, code: str) -> pa.Array:
    kind = _KINDS[code]
    plain = compute.fill_null(values.cast(kind), pa.scalar(0, kind))
    size = array(code).itemsize
    data = plain.buffers()[1]
    numbers = array(code)
    if data is not None:
        numbers.frombytes(data[plain.offset * size : (plain.offset + len(plain)) * size])
    if sys.byteorder == "little":
        numbers.byteswap()
    fixed = pa.Array.from_buffers(pa.binary(size), len(plain), [None, pa.py_buffer(numbers)])
    return fixed.cast(pa.binary())
