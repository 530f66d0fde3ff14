"""Decodes Avro values: by compiled code if it supports all types of the schema, else by fastavro.

docs/adr/0023 gives the reasons for these two.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from decimal import Context, Decimal
from functools import cached_property
from typing import Any

import pyarrow as pa

from keyshard.base_error import first_line
from keyshard.columns.avro_resolution import PROMOTED_NUMBERS, without_aliases, written_for
from keyshard.columns.avro_types import DECIMAL, DECIMAL_DIGITS_MAX, AvroType, parse
from keyshard.columns.avro_unions import kind_of
from keyshard.columns.codec import (
    ALL_DESCRIBED,
    AS_BYTES,
    Indivisible,
    UndecodableError,
    library,
    panics_as_errors,
    refused,
)
from keyshard.columns.maps import with_keys_once
from keyshard.columns.projection import cast_values
from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import SchemaError

COMPILED_LACKS = {
    "bytes", "fixed", "decimal", "null", "nothing", "union of one", "union of numbers",
}  # fmt: skip
"""Types that pyruhvro does not support; it panics on them."""


class AvroCodec(Indivisible):
    """Values of one Avro schema, resolved from the schemas that they were written with.

    Args:
        schema: The version that the columns are made of.
        topic: For errors.

    Raises:
        SchemaError: It is no Avro schema, or no column can hold its values.
        ConfigError: The packages are not installed.
    """

    kind = "AVRO"
    has_null = False
    undescribed = ALL_DESCRIBED

    def __init__(self, schema: TopicSchema, topic: str) -> None:
        self._deserialize = library("pyruhvro", f"The Avro schema of {topic}").deserialize_array
        self._fastavro = library("fastavro", f"The Avro schema of {topic}")
        for kind in ("bytes", "fixed"):
            self._fastavro.read.LOGICAL_READERS[f"{kind}-{DECIMAL}"] = _decimal
        self._wanted = parse(schema.definition, topic)
        self._topic = topic
        self.type = self._wanted.column
        self._readers = {schema.definition: self._reader(self._wanted)}
        self._own = schema

    def decode(
        self,
        values: pa.Array,
        keys: pa.Array,  # noqa: ARG002
        writer: TopicSchema | None,
    ) -> pa.Array:
        stored = self._reader_of(writer).read(values.to_pylist())
        try:
            return with_keys_once(self._wanted.as_column(stored))
        except pa.ArrowInvalid as exc:
            raise UndecodableError(first_line(exc)) from exc

    def suspects(
        self,
        values: pa.Array,
        keys: pa.Array,  # noqa: ARG002
        writer: TopicSchema | None,
    ) -> Sequence[int]:
        return refused(values, self._reader_of(writer).look)

    def _reader_of(self, writer: TopicSchema | None) -> _Reader:
        definition = (writer or self._own).definition
        reader = self._readers.get(definition)
        if reader is None:
            written = parse(definition, self._topic)
            reader = self._readers[definition] = self._reader(written)
        return reader

    def _reader(self, written: AvroType) -> _Reader:
        try:
            return _Reader(self._deserialize, self._fastavro, written, self._wanted)
        except Exception as exc:
            # A package may raise any exception. Without a reader, no value can be decoded.
            raise SchemaError(
                f"The Avro schema of {self._topic} cannot be used ({first_line(exc)}).",
                AS_BYTES,
                topic=self._topic,
            ) from exc


class _Reader:
    """Reads values written with one schema as values of another, or of the same.

    Raises:
        Exception: No package supports the schemas; any exception class.
    """

    def __init__(self, compiled: Any, fastavro: Any, written: AvroType, wanted: AvroType) -> None:
        self._deserialize = compiled
        self._fastavro = fastavro
        self._written = written
        self._wanted = wanted
        self._reader_schema = without_aliases(wanted.schema)
        self._same = without_aliases(written.schema) == self._reader_schema
        self._resolve = (lambda values: values) if self._same else resolution(written, wanted)
        # The compiled code truncates an int of more than 32 bits; int and long are encoded alike.
        self._text = json.dumps(_with_longs(written.schema))
        self._by_compiled_code = (
            self._resolve is not None
            and isinstance(written.schema, dict)
            and pa.types.is_struct(written.stored)
            and not written.kinds & COMPILED_LACKS
            and self._compiles()
        )
        if not self._by_compiled_code:
            self._parsed  # noqa: B018 - a schema that fastavro refuses fails here, once

    def read(self, values: list[bytes]) -> pa.Array:
        """Read values as the stored types.

        Raises:
            UndecodableError: One of them is no value of the schema.
        """
        if self._by_compiled_code and self._resolve is not None and values:
            try:
                with panics_as_errors():
                    found = self._deserialize(values, self._text).to_struct_array()
                # The compiled code accepts any bytes as a string.
                found.validate(full=True)
                found = cast_values(found, self._written.stored)
            except ValueError as exc:
                raise UndecodableError(first_line(exc)) from exc
            return self._resolve(found)
        try:
            return pa.array([self.look(value) for value in values], self._wanted.stored)
        except EOFError as exc:
            raise UndecodableError("it ends too early") from exc
        except (*_WRONG, self._fastavro.read.SchemaResolutionError) as exc:
            # Types in this error's message do not have the names that users know.
            unfit = "mismatch" in str(exc) and not isinstance(exc, _WRONG)
            why = "it does not match the reader schema" if unfit else first_line(exc)
            raise UndecodableError(f"{type(exc).__name__}: {why}") from exc

    def _compiles(self) -> bool:
        try:
            with panics_as_errors():
                self._deserialize([], self._text)
        except ValueError:
            return False
        return True

    @cached_property
    def _parsed(self) -> tuple[Any, Any]:
        """The writer's and the reader's schema, parsed by fastavro."""
        parsed = self._fastavro.parse_schema
        written, wanted = self._written.schema, self._wanted.schema
        if self._same or self._by_compiled_code:
            return parsed(written), None
        reader = parsed(self._reader_schema)
        return parsed(written_for(written, wanted)), read_defaults(reader, _decimal)

    def look(self, value: bytes) -> Any:
        """Read one value with fastavro.

        Raises:
            Exception: It is no value of the schema; any exception class.
        """
        written, wanted = self._parsed
        return self._fastavro.schemaless_reader(io.BytesIO(value), written, wanted)


def _with_longs(schema: Any) -> Any:
    """Return the schema with a long for each int."""
    if isinstance(schema, list):
        return [_with_longs(one) for one in schema]
    if not isinstance(schema, dict):
        return "long" if schema == "int" else schema
    made = {
        key: _with_longs(one) if key in ("items", "values") else one for key, one in schema.items()
    }
    if "fields" in made:
        made["fields"] = [
            {"name": one["name"], "type": _with_longs(one["type"])} for one in made["fields"]
        ]
    return made


def _decimal(data: bytes, schema: Any, _wanted: Any) -> Decimal:
    """Read a decimal of at most 128 bits; millions of digits would take hours."""
    unscaled = int.from_bytes(data, "big", signed=True)
    if unscaled.bit_length() > _DECIMAL_BITS_MAX:
        raise ValueError("a decimal is out of range")
    return Decimal(unscaled).scaleb(-schema.get("scale", 0), _EXACT)


_DECIMAL_BITS_MAX = 128
_EXACT = Context(prec=DECIMAL_DIGITS_MAX + 1)
_WRONG = (
    pa.ArrowException, ValueError, TypeError, LookupError, ArithmeticError, MemoryError,
    AttributeError, RecursionError,
)  # fmt: skip
"""Exceptions of fastavro for bytes that are no value of the schema."""


# -- Defaults of an Avro schema: they are JSON, which has no bytes --------------------------------

_Decimal = Callable[[bytes, Any, Any], Any]


def read_defaults(schema: Any, decimal: _Decimal) -> Any:
    """Convert the defaults of a schema to the values that fastavro returns for written ones.

    Args:
        schema: Parsed by fastavro; its defaults are changed in place.
        decimal: Reads a decimal from its bytes and its schema.

    Raises:
        ValueError: A default has invalid bytes.
    """
    _Defaults(decimal).read(schema)
    return schema


class _Defaults:
    def __init__(self, decimal: _Decimal) -> None:
        self._decimal = decimal
        self._named: dict[str, Any] = {}

    def read(self, kind: Any) -> None:
        """Convert the defaults in a type."""
        if isinstance(kind, list):
            for one in kind:
                self.read(one)
        elif isinstance(kind, dict):
            if "name" in kind:
                self._named[kind["name"]] = kind
            for one in kind.get("fields", ()):
                self.read(one["type"])
                if "default" in one:
                    one["default"] = self._value(one["default"], one["type"])
            for within in ("items", "values"):
                if within in kind:
                    self.read(kind[within])

    def _value(self, default: Any, kind: Any) -> Any:
        if isinstance(kind, list):  # null and one other type, or one type
            kind = next((one for one in kind if one != "null"), None)
        kind = self._named.get(kind, kind) if isinstance(kind, str) else kind
        name = kind_of(kind)
        if name in ("bytes", "fixed") and isinstance(default, str):
            data = default.encode("latin-1")
            is_decimal = isinstance(kind, dict) and kind.get("logicalType") == DECIMAL
            return self._decimal(data, kind, None) if is_decimal else data
        if name == "array" and isinstance(default, list):
            return [self._value(one, kind["items"]) for one in default]
        if name == "map" and isinstance(default, dict):
            return {key: self._value(one, kind["values"]) for key, one in default.items()}
        if name == "record" and isinstance(default, dict):
            return {
                one["name"]: self._value(default[one["name"]], one["type"])
                if one["name"] in default
                else one.get("default")
                for one in kind["fields"]
            }
        return default


# -- Schema resolution by column, for simple cases ------------------------------------------------
# The rules are Avro's. fastavro resolves all other cases, value by value: a nested type that
# differs, a nullable value where the other schema has no null, a default that is no scalar.

_Make = Callable[[pa.StructArray], pa.Array]


def resolution(written: AvroType, wanted: AvroType) -> Callable[[pa.StructArray], pa.Array] | None:
    """Return a conversion from one schema to another; ``None`` for complex cases."""
    ours, theirs = wanted.schema, written.schema
    if not _are_records(ours, theirs):
        return None
    places = {one["name"]: place for place, one in enumerate(theirs["fields"])}
    makes: list[_Make] = []
    taken: set[int] = set()
    for field, kind in zip(ours["fields"], wanted.stored, strict=True):
        names = [field["name"], *field.get("aliases", ())]
        there = [places[name] for name in names if name in places]
        place = there[0] if there else None
        if len(there) > 1 or place in taken:
            return None  # two fields match one: Avro's rules choose, in fastavro
        if place is not None:
            taken.add(place)
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
    """Return a function that makes the column of a field that both schemas have."""
    their_kind, ours_kind = _without_null(theirs), _without_null(ours)
    may_be_null = isinstance(theirs, list) and not isinstance(ours, list)
    promoted = str(ours_kind) in PROMOTED_NUMBERS.get(str(their_kind), ())
    if may_be_null or not (promoted or (their_kind == ours_kind and _is_whole(ours_kind))):
        return None
    return lambda values: values.field(place).cast(kind, safe=False)


_SCALARS = {"boolean", "int", "long", "float", "double", "string"}


def _is_whole(kind: Any) -> bool:
    """Whether a type contains no named type, which another schema may define differently."""
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
    """Return a function that makes the column of a field that was not written."""
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
