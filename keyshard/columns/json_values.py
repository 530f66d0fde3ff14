"""JSON values, decoded by msgspec with the types of the schema, object by object.

docs/adr/0023 gives the reasons against Arrow's reader.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from functools import partial
from operator import attrgetter
from typing import Annotated, Any, Literal, TypedDict, cast

import pyarrow as pa

from keyshard.columns.avro_types import DECIMAL_DIGITS_MAX, parse
from keyshard.columns.codec import ALL_DESCRIBED, UndecodableError, library, refused
from keyshard.columns.json_forms import BARE, Form, Number, formed, numbers_of
from keyshard.columns.projection import cast_values
from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import SchemaError
from keyshard.redaction import first_line

_NO_NUMBER = "NaN", "Infinity", "-Infinity"
"""Floats that JSON lacks. Pulsar's Java client writes them as strings, its Python client without
quotes."""
_BARE = "\x01"
"""Prefix of such floats that had no quotes and are quoted here; no other string begins with it."""
_QUOTED = BARE.encode()
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
        self._msgspec = msgspec = library("msgspec", f"The JSON schema of {topic}")
        self._wanted = parse(schema.definition, topic, unions=False, forms=True)
        self.type = self._wanted.column
        if not pa.types.is_struct(self.type):
            raise SchemaError(
                f"The JSON schema of {topic} is not a record. Set valueFormat=raw to get the bytes."
            )
        self._form = self._wanted.form or Form()
        plain = str(self.type).isascii()
        record: _Record = _typed_dict if plain else partial(_struct, msgspec)
        no_bare = Annotated[str, msgspec.Meta(pattern=f"^[^{_BARE}]|^$")]
        self._quoted = _Kinds(msgspec, record, no_bare)
        try:
            self._read, self._read_quoted = map(
                self._decoder, (_Kinds(msgspec, record, str), self._quoted)
            )
        except (ValueError, TypeError, RecursionError) as exc:
            raise SchemaError(
                f"The JSON schema of {topic} cannot be used ({first_line(exc)}). Set "
                "valueFormat=raw to get the bytes.",
                topic=topic,
            ) from exc
        self._attributes = [attrgetter(f"f{number}") for number in range(len(list(self.type)))]
        # msgspec does not find names that are not ASCII in dictionaries, only in its own objects.
        kept = (bytes, Decimal, msgspec.Raw, Number)
        self._made_plain: Callable[[Any], Any] | None = (
            None if plain else partial(msgspec.to_builtins, builtin_types=kept)
        )
        self._wrong = (msgspec.MsgspecError, *_WRONG)

    def _decoder(self, kinds: _Kinds) -> Callable[[bytes], Any]:
        forms = self._form.fields
        fields = [(one.name, kinds.of(one.type, forms.get(one.name))) for one in self.type]
        read = self._msgspec.json.Decoder(_struct(self._msgspec, fields), float_hook=Number)
        return cast("Callable[[bytes], Any]", read.decode)

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

    def readable(
        self,
        value: pa.Array,
        key: pa.Array,  # noqa: ARG002
        writer: TopicSchema | None,  # noqa: ARG002
    ) -> pa.Array | None:
        (given,) = value.to_pylist()
        for text in (given, _bare_quoted(given)):
            try:
                fields = self._parts(text, dict)
            except self._wrong:
                continue
            row = self._fields(fields, self.type, self._form)
            return _cast(pa.array([row], numbers_of(self.type)), self.type)
        return None

    def _parts(self, text: Any, kind: type[dict[str, Any]] | type[list[Any]]) -> Any:
        """Return the parts of an object or array, not yet decoded; raise if it is none."""
        raw = self._msgspec.Raw
        parts: Any = dict[str, raw] if kind is dict else list[raw]  # type: ignore[valid-type]
        return self._msgspec.json.decode(text, type=parts)

    def _fields(self, parts: dict[str, Any], column: pa.DataType, form: Form) -> dict[str, Any]:
        return {
            one.name: self._readable(parts[one.name], one.type, form.fields.get(one.name))
            for one in column
            if one.name in parts
        }

    def _readable(self, text: Any, column: pa.DataType, form: Form | None) -> Any:
        """Return what can be read of a value."""
        with suppress(*self._wrong):
            return self._whole(text, column, form)
        form, types = form or Form(), pa.types
        with suppress(*self._wrong):
            if types.is_struct(column):
                return self._fields(self._parts(text, dict), column, form)
            if types.is_map(column) and form.key is None:
                parts = self._parts(text, dict)
                return {
                    name: self._readable(one, column.item_type, form.item)
                    for name, one in parts.items()
                }
            if types.is_list(column):
                parts = self._parts(text, list)
                return [self._readable(one, column.value_type, form.item) for one in parts]
        return None

    def _whole(self, text: Any, column: pa.DataType, form: Form | None) -> Any:
        """Return a value with numbers for times; raise one of the errors of a wrong value."""
        kind = self._quoted.of(column, form)
        read = self._msgspec.json.Decoder(kind, float_hook=Number).decode
        values = [read(text)]
        if self._made_plain is not None:
            values = self._made_plain(values)
        made = _formed(values, column, form)
        _cast(made, column)
        return made.to_pylist()[0]

    def _look(self, value: bytes) -> None:
        value.decode()
        try:
            self._read(value)
        except self._wrong:
            self._read_quoted(_bare_quoted(value))

    def _decoded(self, values: list[bytes], read: Callable[[bytes], Any]) -> pa.Array:
        rows = list(map(read, values))
        columns = [
            self._column(list(map(attribute, rows)), number, quoted=read is self._read_quoted)
            for number, attribute in enumerate(self._attributes)
        ]
        # Without columns, the number of rows would be lost.
        if not columns:
            return pa.array([{}] * len(rows), self.type)
        return pa.StructArray.from_arrays(columns, fields=list(self.type))

    def _column(self, values: list[Any], number: int, *, quoted: bool) -> pa.Array:
        """Make the column of a field of decoded values.

        Args:
            values: The values.
            number: Number of the field.
            quoted: Whether floats without quotes were quoted.

        Raises:
            ValueError: A value does not fit. The text names the field as msgspec does.
        """
        try:
            return self._column_of(values, number, quoted=quoted)
        except _WRONG as exc:
            name = self.type.field(number).name
            raise ValueError(f"{first_line(exc)} - at `$.{name}`") from exc

    def _column_of(self, values: list[Any], number: int, *, quoted: bool) -> pa.Array:
        wanted = self._wanted
        stored, unit, field = (
            kind.field(number) for kind in (wanted.stored, wanted.unit, self.type)
        )
        if self._made_plain is not None:
            values = self._made_plain(values)
        form = self._form.fields.get(field.name)
        if form is not None and quoted:
            return _cast(_formed(values, field.type, form), field.type)
        if form is not None:
            try:
                # Values of other clients are as the schema says, and need no conversion.
                return _cast(_array(values, stored.type), unit.type, field.type)
            except (pa.ArrowException, TypeError, OverflowError):
                return _cast(_formed(values, field.type, form), field.type)
        return _cast(_array(values, stored.type), unit.type, field.type)


_WRONG = (pa.ArrowException, ValueError, TypeError, ArithmeticError, RecursionError)


def _bare_quoted(value: bytes) -> bytes:
    return _TEXT_OR_BARE.sub(
        lambda found: found[0] if found[0].startswith(b'"') else b'"%s%s"' % (_QUOTED, found[0]),
        value,
    )


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    if "decimal" in str(kind):
        _check_decimals(values)
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, TypeError):
        return pa.array([_without_texts(one, kind) for one in values], kind)


def _formed(values: list[Any], column: pa.DataType, form: Form | None) -> pa.Array:
    """Return values of a form as an array with numbers for times."""
    if form is not None:
        values = [formed(one, form) for one in values]
    return _array(values, numbers_of(column))


def _cast(values: pa.Array, *kinds: pa.DataType) -> pa.Array:
    """Cast values by one or more steps."""
    for kind in kinds:
        values = cast_values(values, kind)
    if "time64" in str(values.type):
        # Arrow casts any number to a time of day.
        values.validate(full=True)
    return values


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


class _Kinds:
    """Makes the types that msgspec reads.

    Args:
        msgspec: The package.
        record: Makes the type of an object.
        text: Type of a string.
    """

    def __init__(self, msgspec: Any, record: _Record, text: Any) -> None:
        self._raw = msgspec.Raw
        self._record = record
        self._text = text

    def of(self, column: pa.DataType, form: Form | None) -> Any:
        """Return the type for a column and its form."""
        form = form or Form()
        if form.is_text:
            return self._raw
        if form.convert is not None:
            return Any
        types = pa.types
        found: Any = Decimal
        if types.is_struct(column):
            fields = form.fields
            found = self._record(
                [(one.name, self.of(one.type, fields.get(one.name))) for one in column]
            )
        elif types.is_map(column):
            found = dict[str, self.of(column.item_type, form.item)]  # type: ignore[misc]
        elif types.is_list(column):
            found = list[self.of(column.value_type, form.item)]  # type: ignore[misc]
        elif not types.is_decimal(column):
            found = self._text if types.is_string(column) else _PLAIN[column]
        return found | None
