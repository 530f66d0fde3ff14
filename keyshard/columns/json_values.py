"""JSON values, decoded by msgspec with the types of the schema, object by object.

docs/adr/0023 gives the reasons against Arrow's reader.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import partial
from operator import attrgetter
from typing import Annotated, Any, Literal, TypedDict

import pyarrow as pa

from keyshard.columns.avro_types import DECIMAL_DIGITS_MAX, parse
from keyshard.columns.codec import ALL_DESCRIBED, UndecodableError, library, refused
from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import SchemaError
from keyshard.redaction import first_line

_NO_NUMBER = "NaN", "Infinity", "-Infinity"
"""Floats that JSON lacks. Pulsar's Java client writes them as strings, its Python client without
quotes."""
_BARE = "\x01"
"""Prefix of such floats that had no quotes and are quoted here; no other string begins with it."""
_TEXTS = _NO_NUMBER + tuple(_BARE + one for one in _NO_NUMBER)
_FLOAT: Any = float | Literal[_TEXTS]
_PLAIN: Mapping[Any, Any] = {
    pa.null(): type(None), pa.bool_(): bool, pa.int32(): int, pa.int64(): int,
    pa.float32(): _FLOAT, pa.float64(): _FLOAT, pa.binary(): bytes,
}  # fmt: skip
_FEW = 64
"""Most values that are searched for floats without quotes; more values are tried in parts."""
_TEXT_OR_BARE = re.compile(rb'"(?:[^"\\]|\\.)*"?|-?\b(?:NaN|Infinity)\b(?=\s*[],}])', re.DOTALL)
"""A string may lack its end, as in a truncated value. Without that, the search would begin again at
each quote in it, and take hours."""
_dict: Any = TypedDict
_Record = Callable[[list[tuple[str, Any]]], Any]


class JsonCodec:
    """JSON objects of one schema. A missing field is null; an unknown field is ignored.

    Bytes are base64, as Pulsar's Java client writes them.

    Args:
        schema: Its definition is an Avro schema, as Pulsar writes it.
        topic: For errors.

    Raises:
        SchemaError: It is no Avro schema, or no column can hold its values.
        ConfigError: The package is not installed.
    """

    kind = "JSON"
    has_null = False
    undescribed = ALL_DESCRIBED

    def __init__(self, schema: TopicSchema, topic: str) -> None:
        msgspec = library("msgspec", f"The JSON schema of {topic}")
        self._wanted = parse(schema.definition, topic, unions=False)
        self.type = self._wanted.column
        if not pa.types.is_struct(self.type):
            raise SchemaError(
                f"The JSON schema of {topic} is not a record. Set valueFormat=raw to get the bytes."
            )
        self._fields = list(self._wanted.stored)
        plain = str(self._wanted.stored).isascii()
        record: _Record = _typed_dict if plain else partial(_struct, msgspec)
        no_bare = Annotated[str, msgspec.Meta(pattern=f"^[^{_BARE}]|^$")]
        try:
            self._read, self._read_quoted = (
                msgspec.json.Decoder(
                    _struct(
                        msgspec, [(one.name, _kind(one.type, record, text)) for one in self._fields]
                    )
                ).decode
                for text in (str, no_bare)
            )
        except (ValueError, TypeError, RecursionError) as exc:
            raise SchemaError(
                f"The JSON schema of {topic} cannot be used ({first_line(exc)}). Set "
                "valueFormat=raw to get the bytes.",
                topic=topic,
            ) from exc
        self._columns = [attrgetter(f"f{number}") for number in range(len(self._fields))]
        # msgspec does not find names that are not ASCII in dictionaries, only in its own objects.
        self._made_plain: Callable[[Any], Any] | None = (
            None if plain else partial(msgspec.to_builtins, builtin_types=(bytes, Decimal))
        )
        self._wrong = (msgspec.MsgspecError, *_WRONG)

    def decode(
        self,
        values: pa.Array,
        keys: pa.Array,  # noqa: ARG002
        writer: TopicSchema | None,  # noqa: ARG002 - an object names its fields
    ) -> pa.Array:
        try:
            values.cast(pa.string())  # msgspec does not check ignored values and names
        except pa.ArrowInvalid as exc:
            raise UndecodableError("it is not UTF-8") from exc
        given = values.to_pylist()
        try:
            return self._decoded(given, self._read)
        except self._wrong as exc:
            quoted = list(map(_bare_quoted, given)) if len(given) <= _FEW else given
            if quoted == given:
                raise UndecodableError(first_line(exc)) from exc
        try:
            return self._decoded(quoted, self._read_quoted)
        except self._wrong as exc:
            raise UndecodableError(first_line(exc)) from exc

    def suspects(
        self,
        values: pa.Array,
        keys: pa.Array,  # noqa: ARG002
        writer: TopicSchema | None,  # noqa: ARG002
    ) -> Sequence[int]:
        return refused(values, self._look)

    def _look(self, value: bytes) -> None:
        value.decode()
        try:
            self._read(value)
        except self._wrong:
            self._read_quoted(_bare_quoted(value))

    def _decoded(self, values: list[bytes], read: Callable[[bytes], Any]) -> pa.Array:
        rows = list(map(read, values))
        columns = [
            self._array(list(map(column, rows)), field.type)
            for column, field in zip(self._columns, self._fields, strict=True)
        ]
        # Without columns, the number of rows would be lost.
        stored = (
            pa.StructArray.from_arrays(columns, fields=self._fields)
            if columns
            else pa.array([{}] * len(rows), self._wanted.stored)
        )
        return self._wanted.as_column(stored)

    def _array(self, values: list[Any], kind: pa.DataType) -> pa.Array:
        if self._made_plain is not None:
            values = self._made_plain(values)
        if "decimal" in str(kind):
            _check_decimals(values)
        try:
            return pa.array(values, kind)
        except (pa.ArrowException, TypeError):
            return pa.array([_without_texts(one, kind) for one in values], kind)


_WRONG = (pa.ArrowException, ValueError, TypeError, ArithmeticError, RecursionError)


def _bare_quoted(value: bytes) -> bytes:
    return _TEXT_OR_BARE.sub(
        lambda found: found[0] if found[0].startswith(b'"') else b'"\\u0001%s"' % found[0], value
    )


def _without_texts(value: Any, kind: pa.DataType) -> Any:
    """Return a value with floats in place of the strings of :data:`_NO_NUMBER`."""
    if pa.types.is_floating(kind) and isinstance(value, str):
        return float(value.removeprefix(_BARE))
    if pa.types.is_struct(kind) and value:
        return {one.name: _without_texts(value.get(one.name), one.type) for one in kind}
    if pa.types.is_list(kind) and value:
        return [_without_texts(one, kind.value_type) for one in value]
    if pa.types.is_map(kind) and value:
        return {key: _without_texts(one, kind.item_type) for key, one in value.items()}
    return value


def _typed_dict(fields: list[tuple[str, Any]]) -> Any:
    return _dict("Record", dict(fields), total=False)


def _struct(msgspec: Any, fields: list[tuple[str, Any]]) -> Any:
    """Define a class with attributes ``f0``, ``f1``, ..., because fields may have any name."""
    names = {f"f{number}": name for number, (name, _) in enumerate(fields)}
    kinds = [kind for _, kind in fields]
    made = [(attribute, kind, None) for attribute, kind in zip(names, kinds, strict=True)]
    return msgspec.defstruct("Value", made, rename=names, gc=False)


def _check_decimals(value: Any) -> None:
    """Refuse decimals far out of range: Arrow would write out all digits of ``1e-999999999``."""
    if isinstance(value, Decimal):
        if not value.is_finite() or abs(value.adjusted()) > DECIMAL_DIGITS_MAX:
            raise ValueError(f"a decimal is out of range: {str(value)[:40]}")
    elif isinstance(value, (list, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            _check_decimals(one)


def _kind(stored: pa.DataType, record: _Record, text: Any) -> Any:
    """Return the type that msgspec reads for a stored type."""
    found: Any = Decimal
    if pa.types.is_struct(stored):
        found = record([(one.name, _kind(one.type, record, text)) for one in stored])
    elif pa.types.is_map(stored):
        found = dict[str, _kind(stored.item_type, record, text)]  # type: ignore[misc]
    elif pa.types.is_list(stored):
        found = list[_kind(stored.value_type, record, text)]  # type: ignore[misc]
    elif not pa.types.is_decimal(stored):
        found = text if pa.types.is_string(stored) else _PLAIN[stored]
    return found | None
