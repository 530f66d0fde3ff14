"""JSON values, by msgspec: typed as the schema says, one object after the other.

docs/adr/0023 says why not by Arrow's reader.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from operator import attrgetter
from typing import Any, TypedDict

import pyarrow as pa

from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import SchemaError
from keyshard.redaction import first_line
from keyshard.schemas.avro_types import DECIMAL_DIGITS_MAX, parse
from keyshard.schemas.codec import UndecodableError, library

_PLAIN: Mapping[Any, type] = {
    pa.null(): type(None), pa.bool_(): bool, pa.int32(): int, pa.int64(): int,
    pa.float32(): float, pa.float64(): float, pa.string(): str, pa.binary(): bytes,
}  # fmt: skip
_record: Any = TypedDict


class JsonCodec:
    """JSON objects of one schema. A field that is missing is null, one that is unknown is left out.

    Bytes are base64, as Pulsar's Java client writes them.

    Args:
        schema: What describes them: an Avro schema, as Pulsar writes it.
        topic: For errors.

    Raises:
        SchemaError: It is none, or has what no column can hold.
        ConfigError: The package is missing.
    """

    def __init__(self, schema: TopicSchema, topic: str) -> None:
        msgspec = library("msgspec", f"The JSON schema of {topic}")
        self._wanted = parse(schema.definition, topic)
        self.type = self._wanted.column
        if not pa.types.is_struct(self.type):
            raise SchemaError(
                f"The JSON schema of {topic} describes no record. Set valueFormat=raw to get the "
                "bytes."
            )
        self._fields = list(self._wanted.stored)
        names = [f"f{number}" for number in range(len(self._fields))]
        made = msgspec.defstruct(
            "Value",
            [
                (name, _kind(field.type), None)
                for name, field in zip(names, self._fields, strict=True)
            ],
            rename=dict(zip(names, (field.name for field in self._fields), strict=True)),
            gc=False,
        )
        self._read = msgspec.json.Decoder(made).decode
        self._columns = [attrgetter(name) for name in names]
        self._wrong = (msgspec.MsgspecError, *_WRONG)

    def decode(
        self,
        values: pa.Array,
        keys: pa.Array,  # noqa: ARG002
        writer: TopicSchema | None,  # noqa: ARG002 - an object names its fields
    ) -> pa.Array:
        try:
            rows = list(map(self._read, values.to_pylist()))
            columns = [
                _array(list(map(column, rows)), field.type)
                for column, field in zip(self._columns, self._fields, strict=True)
            ]
            # Without a field there is nothing to tell how many rows there are.
            stored = (
                pa.StructArray.from_arrays(columns, fields=self._fields)
                if columns
                else pa.array([{}] * len(rows), self._wanted.stored)
            )
            return self._wanted.as_column(stored)
        except self._wrong as exc:
            raise UndecodableError(first_line(exc)) from exc


_WRONG = (pa.ArrowException, ValueError, TypeError, ArithmeticError, RecursionError)


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    if "decimal" in str(kind):
        _check_decimals(values)
    return pa.array(values, kind)


def _check_decimals(value: Any) -> None:
    """Refuse decimals far out of range: Arrow would write down all digits of ``1e-999999999``."""
    if isinstance(value, Decimal):
        if not value.is_finite() or abs(value.adjusted()) > DECIMAL_DIGITS_MAX:
            raise ValueError(f"a decimal is out of range: {str(value)[:40]}")
    elif isinstance(value, (list, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            _check_decimals(one)


def _kind(stored: pa.DataType) -> Any:
    """What msgspec is to read for a type."""
    found: Any = Decimal
    if pa.types.is_struct(stored):
        found = _record("Record", {one.name: _kind(one.type) for one in stored}, total=False)
    elif pa.types.is_map(stored):
        found = dict[str, _kind(stored.item_type)]  # type: ignore[misc]
    elif pa.types.is_list(stored):
        found = list[_kind(stored.value_type)]  # type: ignore[misc]
    elif not pa.types.is_decimal(stored):
        found = _PLAIN[stored]
    return found | None
