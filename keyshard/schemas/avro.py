"""Avro values: compiled code where it knows all types of the schema, else fastavro.

docs/adr/0023 says why these two.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from decimal import Context, Decimal
from functools import cached_property
from typing import Any

import pyarrow as pa

from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import SchemaError
from keyshard.redaction import first_line
from keyshard.schemas.avro_defaults import read_defaults
from keyshard.schemas.avro_resolution import resolution
from keyshard.schemas.avro_types import DECIMAL, DECIMAL_DIGITS_MAX, UNION, AvroType, parse
from keyshard.schemas.avro_unions import written_for
from keyshard.schemas.casting import cast
from keyshard.schemas.codec import (
    NOTHING_UNTOLD,
    UndecodableError,
    library,
    panics_as_errors,
    refused,
)
from keyshard.schemas.maps import with_keys_once

_COMPILED_LACKS = {
    "bytes", "fixed", "decimal", "null", "nothing", "union of one", "union of numbers",
}  # fmt: skip
"""Types that pyruhvro does not know; it panics over them."""


class AvroCodec:
    """Values of one Avro schema, resolved from those that they were written with.

    Args:
        schema: Version that columns are made of.
        topic: For errors.

    Raises:
        SchemaError: It is no Avro schema, or has what no column can hold.
        ConfigError: The packages are missing.
    """

    kind = "AVRO"
    has_null = False
    untold = NOTHING_UNTOLD

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
            # Whatever both packages say: one that refuses a schema refuses each value of it.
            raise SchemaError(
                f"The Avro schema of {self._topic} cannot be used ({first_line(exc)}). Set "
                "valueFormat=raw to get the bytes.",
                topic=self._topic,
            ) from exc


class _Reader:
    """Reads what was written with one schema as values of another, or of the same.

    Raises:
        Exception: No package can; of a class of its own.
    """

    def __init__(self, compiled: Any, fastavro: Any, written: AvroType, wanted: AvroType) -> None:
        self._deserialize = compiled
        self._fastavro = fastavro
        self._written = written
        self._wanted = wanted
        self._same = written.schema == wanted.schema
        self._resolves_unions = not self._same and UNION in written.kinds | wanted.kinds
        self._resolve = (lambda values: values) if self._same else resolution(written, wanted)
        # Compiled code cuts an int of more than 32 bits off; both are written alike.
        self._text = json.dumps(_with_longs(written.schema))
        self._by_compiled_code = (
            self._resolve is not None
            and isinstance(written.schema, dict)
            and pa.types.is_struct(written.stored)
            and not written.kinds & _COMPILED_LACKS
            and self._compiles()
        )
        if not self._by_compiled_code:
            self._parsed  # noqa: B018 - it may be refused, and that is said once

    def read(self, values: list[bytes]) -> pa.Array:
        """Values in the types that are stored.

        Raises:
            UndecodableError: One of them is no value of the schema.
        """
        if self._by_compiled_code and self._resolve is not None and values:
            try:
                with panics_as_errors():
                    found = self._deserialize(values, self._text).to_struct_array()
                # It takes any bytes for text.
                found.validate(full=True)
                found = cast(found, self._written.stored)
            except ValueError as exc:
                raise UndecodableError(first_line(exc)) from exc
            return self._resolve(found)
        try:
            return pa.array([self.look(value) for value in values], self._wanted.stored)
        except EOFError as exc:
            raise UndecodableError("it ends too early") from exc
        except (*_WRONG, self._fastavro.read.SchemaResolutionError) as exc:
            # The words of that error are of records that stand for types of unions.
            unfit = self._resolves_unions and not isinstance(exc, _WRONG)
            why = "it does not fit the schema that it is read by" if unfit else first_line(exc)
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
        """The schemas written with and read by, as fastavro takes them."""
        parsed = self._fastavro.parse_schema
        written, wanted = self._written.schema, self._wanted.schema
        if self._same or self._by_compiled_code:
            return parsed(written), None
        if self._resolves_unions:
            written = written_for(written, wanted)
        return parsed(written), read_defaults(parsed(wanted), _decimal)

    def look(self, value: bytes) -> Any:
        """Read one value by fastavro.

        Raises:
            Exception: It is none of the schema; of any class.
        """
        written, wanted = self._parsed
        return self._fastavro.schemaless_reader(io.BytesIO(value), written, wanted)


def _with_longs(schema: Any) -> Any:
    """The schema with a long for each int."""
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
    """Of as many bytes as there may be: a number of millions of digits is not worth hours."""
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
"""What fastavro raises over bytes that are no value of the schema."""
