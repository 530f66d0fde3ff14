"""Defaults of an Avro schema as values: JSON, in which they are written, has no bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keyshard.schemas.avro_types import DECIMAL
from keyshard.schemas.avro_unions import kind_of

_Decimal = Callable[[bytes, Any, Any], Any]


def read_defaults(schema: Any, decimal: _Decimal) -> Any:
    """Make the defaults of a schema that fastavro has parsed what it gives for what is written.

    Args:
        schema: As it was parsed; its defaults are changed.
        decimal: Reads a decimal of its bytes and its schema.

    Raises:
        ValueError: One has bytes that are none.
    """
    _Defaults(decimal).read(schema)
    return schema


class _Defaults:
    def __init__(self, decimal: _Decimal) -> None:
        self._decimal = decimal
        self._named: dict[str, Any] = {}

    def read(self, kind: Any) -> None:
        """Read the defaults inside of a type."""
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
        if isinstance(kind, list):  # of null and one other, or of one
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
