"""The types that msgspec decodes JSON to, and Arrow arrays of the decoded values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from typing import Annotated, Any, Literal, TypedDict

import pyarrow as pa

from keyshard.columns.avro_types import DECIMAL_DIGITS_MAX
from keyshard.columns.json_forms import Form, formed, numbers_of
from keyshard.columns.json_scalars import BARE, Number
from keyshard.columns.projection import cast_values

_NO_NUMBER = "NaN", "Infinity", "-Infinity"
"""Floats that JSON lacks. Pulsar's Java client writes them as strings, its Python client without
quotes."""
_TEXTS = _NO_NUMBER + tuple(BARE + one for one in _NO_NUMBER)
_FLOAT: Any = float | Literal[_TEXTS]
_PLAIN: Mapping[Any, Any] = {
    pa.null(): type(None), pa.bool_(): bool, pa.int32(): int, pa.int64(): int,
    pa.float32(): _FLOAT, pa.float64(): _FLOAT, pa.binary(): bytes,
}  # fmt: skip
WRONG = (pa.ArrowException, ValueError, TypeError, ArithmeticError, RecursionError)
"""Errors of a value that does not fit. Those of msgspec are ValueErrors."""
_dict: Any = TypedDict


class Types:
    """Makes the types that msgspec reads, and its decoders.

    Args:
        msgspec: The package.
        plain: Whether the names of all fields are ASCII. msgspec does not find other names in
            dictionaries, only in objects of its own.
        quoted: Whether ``JsonCodec`` has quoted bare floats, such as ``NaN``, with the prefix
            :data:`BARE`, because msgspec refuses them.
    """

    def __init__(self, msgspec: Any, *, plain: bool, quoted: bool) -> None:
        self._msgspec = msgspec
        self._record: Callable[[list[tuple[str, Any]]], Any] = _typed_dict if plain else self.struct
        no_bare = Annotated[str, msgspec.Meta(pattern=f"^[^{BARE}]|^$")]
        self._text: Any = no_bare if quoted else str
        kept = (bytes, Decimal, msgspec.Raw, Number)
        self.plain: Callable[[Any], Any] | None = (
            None if plain else partial(msgspec.to_builtins, builtin_types=kept)
        )
        """Turns decoded values into dictionaries; ``None`` if they are dictionaries already."""
        raw: Any = msgspec.Raw
        self.values = self.decoder(Any)
        self.objects = self.decoder(dict[str, raw])
        """Decodes an object of values that are not yet decoded."""
        self.lists = self.decoder(list[raw])
        self.pairs = self.decoder(list[dict[str, raw]])

    def of(self, column: pa.DataType, form: Form | None) -> Any:
        """Return the type for a column and its form."""
        form = form or Form()
        if form.is_text:
            return self._msgspec.Raw
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
            item = self.of(column.item_type, form.item)
            found = dict[str, item]  # type: ignore[valid-type]
            if form.key is not None:
                found |= list[self._record([("key", Any), ("value", item)])]  # type: ignore[misc]
        elif types.is_list(column):
            found = list[self.of(column.value_type, form.item)]  # type: ignore[misc]
        elif not types.is_decimal(column):
            found = self._text if types.is_string(column) else _PLAIN[column]
        return found | None

    def decoder(self, kind: Any) -> Callable[[Any], Any]:
        """Return a function that decodes a value of a type."""
        decode: Callable[[Any], Any] = self._msgspec.json.Decoder(kind, float_hook=Number).decode
        return decode

    def struct(self, fields: list[tuple[str, Any]]) -> Any:
        """Define a class with attributes ``f0``, ``f1``, ..., because fields may have any name."""
        names = {f"f{number}": name for number, (name, _) in enumerate(fields)}
        kinds = [kind for _, kind in fields]
        made = [(attribute, kind, None) for attribute, kind in zip(names, kinds, strict=True)]
        return self._msgspec.defstruct("Value", made, rename=names, gc=False)


def _typed_dict(fields: list[tuple[str, Any]]) -> Any:
    return _dict("Record", dict(fields), total=False)


def array_of(values: list[Any], kind: pa.DataType) -> pa.Array:
    """Return decoded values as an array; raise one of :data:`WRONG` if one does not fit."""
    if "decimal" in str(kind):
        _check_decimals(values)
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, TypeError):
        if not _has_floats(kind):
            raise
        return pa.array([_without_texts(one, kind) for one in values], kind)


def formed_array(values: list[Any], column: pa.DataType, form: Form) -> pa.Array:
    """Return values of a form as an array with numbers for times."""
    return array_of([formed(one, form) for one in values], numbers_of(column))


def cast_array(values: pa.Array, *kinds: pa.DataType) -> pa.Array:
    """Cast values by one or more steps."""
    for kind in kinds:
        values = cast_values(values, kind)
    if "time64" in str(values.type):
        # Arrow casts any number to a time of day.
        values.validate(full=True)
    return values


def _has_floats(kind: pa.DataType) -> bool:
    text = str(kind)
    return "float" in text or "double" in text


def _without_texts(value: Any, kind: pa.DataType) -> Any:
    """Return a value with floats in place of the strings of :data:`_NO_NUMBER`."""
    if pa.types.is_floating(kind) and isinstance(value, str):
        return float(value.removeprefix(BARE))
    if pa.types.is_struct(kind) and value:
        return {one.name: _without_texts(value.get(one.name), one.type) for one in kind}
    if pa.types.is_list(kind) and value:
        return [_without_texts(one, kind.value_type) for one in value]
    if pa.types.is_map(kind) and isinstance(value, dict):
        return {key: _without_texts(one, kind.item_type) for key, one in value.items()}
    return value


def _check_decimals(value: Any) -> None:
    """Refuse decimals far out of range: Arrow would write out all digits of ``1e-999999999``."""
    if isinstance(value, Decimal):
        if not value.is_finite() or abs(value.adjusted()) > DECIMAL_DIGITS_MAX:
            raise ValueError(f"a decimal is out of range: {str(value)[:40]}")
    elif isinstance(value, (list, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            _check_decimals(one)
