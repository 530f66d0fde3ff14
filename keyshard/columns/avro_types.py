"""Types of an Avro schema as Arrow types; Pulsar's JSON schemas are Avro schemas, too.

Readers return the stored types, such as a long for a time. Arrow casts them to the logical types.
So a reader needs to support few types only, and all readers return the same.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import pyarrow as pa

from keyshard.columns.avro_unions import kind_of, members, with_member
from keyshard.columns.codec import AS_BYTES
from keyshard.columns.json_forms import (
    LOGICAL,
    PAIRS,
    Form,
    Known,
    Pair,
    key_of,
    numbers_of,
    of_record,
    of_type,
    pair_of,
)
from keyshard.columns.json_scalars import decimal_text
from keyshard.columns.projection import cast_values
from keyshard.errors import SchemaError

_log = logging.getLogger(__name__)

_TIMESTAMP, _LOCAL = pa.timestamp("us", tz="UTC"), pa.timestamp("us")
_PLAIN = {
    "null": pa.null(),
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "string": pa.string(),
}
_LOGICAL = {
    ("int", "date"): (pa.date32(), pa.date32()),
    ("int", "time-millis"): (pa.time32("ms"), pa.time64("us")),
    ("long", "time-micros"): (pa.time64("us"), pa.time64("us")),
    ("long", "timestamp-millis"): (pa.timestamp("ms", tz="UTC"), _TIMESTAMP),
    ("long", "timestamp-micros"): (_TIMESTAMP, _TIMESTAMP),
    ("long", "local-timestamp-millis"): (pa.timestamp("ms"), _LOCAL),
    ("long", "local-timestamp-micros"): (_LOCAL, _LOCAL),
}
"""Arrow types in the stored unit, and as a column."""
DECIMAL_DIGITS_MAX = 38
DECIMAL = "keyshard-decimal"
"""Logical type of decimals for readers. It is keyshard's own, for its own reader function."""
FIELDS_MAX = 20_000
"""Most fields of a value on all levels. Types that name one another can turn a short schema into
more fields than memory holds."""
_TIME = "time"
"""Marks the kinds of a type that has a time of day."""
_NO_BYTES = frozenset({"null", "nothing", "record"})
"""Types whose values may be stored in zero bytes."""


class AvroType(NamedTuple):
    """A type of an Avro schema."""

    schema: Any
    """The type without logical types other than :data:`DECIMAL`."""
    stored: pa.DataType
    """Type that a reader returns."""
    unit: pa.DataType
    """The same with logical types, in the stored unit."""
    column: pa.DataType
    """Type of the column."""
    kinds: frozenset[str]
    """Avro's names of all types in it."""
    form: Form | None = None
    """Form of its JSON values, if it differs from that of the column."""

    def as_column(self, stored: pa.Array) -> pa.Array:
        """Convert values of a reader to a column.

        Raises:
            pa.ArrowInvalid: A value is out of range.
        """
        made = cast_values(cast_values(stored, self.unit), self.column)
        if _TIME in self.kinds:
            # Arrow casts any number to a time of day.
            made.validate(full=True)
        return made


UNION = "union of many"
"""Marks the kinds of a type that has a union of several types other than numbers."""
_NUMBERS = ({"int", "long"}, pa.int64()), ({"float", "double"}, pa.float64())
"""Unions of these types become one type, as in Spark's ``from_avro``."""


def parse(definition: bytes, topic: str, *, unions: bool = True, forms: bool = False) -> AvroType:
    """Parse a definition, and log a warning for each decimal that no column can hold as one.

    Args:
        definition: Its JSON.
        topic: For errors.
        unions: Whether a value states its branch of a union: in Avro, but not in Pulsar's JSON.
        forms: Whether the values may have the forms of Pulsar's Java client.

    Raises:
        SchemaError: It is no Avro schema, or no column can hold its values.
    """
    try:
        parser = _Parser(topic, unions=unions, forms=forms)
        found = parser.type_of(json.loads(definition), "", "")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as exc:
        raise SchemaError(
            f"The schema of {topic} is not an Avro schema ({exc!r}).",
            AS_BYTES,
        ) from exc
    for sentence in parser.warnings:
        _warn_once(sentence)
    return found


@lru_cache(maxsize=1024)
def _warn_once(sentence: str) -> None:
    """Warn once in a process: the schema of a topic is parsed for many values."""
    _log.warning("%s", sentence)


class _Parser:
    def __init__(self, topic: str, *, unions: bool, forms: bool) -> None:
        self._topic = topic
        self._unions = unions
        self._forms = forms
        self._named: dict[str, AvroType | None] = {}
        """``None`` while the type is parsed."""
        self._pairs: dict[str, Pair] = {}
        self._fields = 0
        """Fields of all types so far, counted at each use."""
        self._fields_of: dict[str, int] = {}
        self.warnings: list[str] = []
        """Sentences about fields whose column is not what their schema says."""

    def type_of(self, schema: Any, namespace: str, path: str) -> AvroType:
        if isinstance(schema, list):
            return self._union(schema, namespace, path)
        schema = {"type": schema} if isinstance(schema, str) else schema
        kind = schema["type"]
        if isinstance(kind, (dict, list)):
            return self.type_of(kind, namespace, path)
        return self._of_kind(kind, schema, namespace, path)

    def _of_kind(self, kind: str, schema: dict[str, Any], namespace: str, path: str) -> AvroType:
        if kind in ("record", "error", "enum", "fixed"):
            return self._define(kind, schema, namespace, path)
        known = of_type(kind, schema) if self._forms else None
        if known is None:
            known = self._wide_decimal(kind, schema, path)
        if known is not None:
            return _of_known(known)
        if kind in ("array", "map"):
            return self._collection(kind, schema, namespace, path)
        if kind not in _PLAIN:
            return self._reference(kind, namespace, path)
        found = _logical(kind, schema, kind)
        if found is None:
            return _same(kind, _PLAIN[kind], kind)
        form = LOGICAL.get(str(schema["logicalType"])) if self._forms else None
        return found._replace(form=form)

    def _wide_decimal(self, kind: str, schema: dict[str, Any], path: str) -> Known | None:
        """Warn of a decimal that no decimal column can hold; with ``forms``, return a text column.

        ``None`` for any other type, and for a decimal that is read as stored bytes: without
        ``forms``, or if it is invalid in Avro, whose specification tells readers to ignore it.
        """
        if schema.get("logicalType") != "decimal" or kind not in ("bytes", "fixed"):
            return None
        found = _digits_of(kind, schema)
        if found is not None and found[0] <= DECIMAL_DIGITS_MAX:
            return None
        of = f"precision {schema.get('precision')} and scale {schema.get('scale', 0)}"
        why = f"of more than {DECIMAL_DIGITS_MAX} digits, the most of a decimal column"
        if found is None:
            why = "that is not valid in Avro, whose specification tells readers to ignore it"
        as_text = found is not None and self._forms
        self.warnings.append(
            f"Field {path.lstrip('.') or 'value'!r} of the schema of {self._topic} is a decimal "
            f"({of}) {why}. Its column is "
            + ("a string with all digits." if as_text else "binary, with the stored bytes.")
        )
        return Known(pa.string(), Form(decimal_text)) if as_text else None

    def _refuse(
        self, path: str, why: str, so: str = "which no column can represent"
    ) -> SchemaError:
        return SchemaError(
            f"Field {path.lstrip('.') or 'value'!r} of the schema of {self._topic} {why}, {so}.",
            AS_BYTES,
        )

    def _union(self, branches: list[Any], namespace: str, path: str) -> AvroType:
        found = [self.type_of(*one) for one in _branches(branches, namespace, path)]
        others = [one for one in found if one.kinds != {"null"}]
        if len(others) > 1:
            return self._union_of_many(found, others, path)
        kept = others[0] if others else found[0]
        name = "union" if len(found) == 2 else "union of one"
        kinds = frozenset({name if others else UNION}).union(
            *(one.kinds for one in others or found)
        )
        return kept._replace(schema=[one.schema for one in found], kinds=kinds)

    def _union_of_many(self, found: list[AvroType], others: list[AvroType], path: str) -> AvroType:
        kinds = frozenset().union(*(one.kinds for one in others))
        names = [kind_of(one.schema) for one in others]
        number = next(
            (one for types, one in _NUMBERS if len(names) == 2 and {*names} == types), None
        )
        if number is not None:
            schema = [kind_of(one.schema) for one in found]
            return AvroType(schema, number, number, number, kinds - {_TIME} | {"union of numbers"})
        if not self._unions:
            why = f"is a union of {len(others)} types"
            raise self._refuse(path, why, "and JSON does not tell the type of a value")
        self._count(len(others), path)
        wrapped = iter(members([one.schema for one in others], path))

        def made(of: list[pa.DataType]) -> pa.DataType:
            return pa.struct([(f"member{number}", one) for number, one in enumerate(of)])

        return AvroType(
            [one.schema if one.kinds == {"null"} else next(wrapped) for one in found],
            made([one.stored for one in others]),
            made([one.unit for one in others]),
            made([one.column for one in others]),
            kinds | {UNION},
        )

    def _reference(self, name: str, namespace: str, path: str) -> AvroType:
        full = _full(name, namespace)
        full = full if full in self._named else name
        found = self._named[full]
        if found is None:
            raise self._refuse(path, f"contains its own type {name!r}")
        self._count(self._fields_of[full], path)
        return found._replace(schema=full)

    def _define(self, kind: str, schema: dict[str, Any], namespace: str, path: str) -> AvroType:
        name = str(schema["name"])
        namespace = name.rpartition(".")[0] or schema.get("namespace", namespace) or ""
        full = _full(name, namespace)
        self._named[full] = None
        before = self._fields
        head = {"name": full.rpartition(".")[2], "namespace": namespace}
        if "aliases" in schema:
            head["aliases"] = schema["aliases"]
        if kind == "enum":
            kept = {"type": "enum", **head, "symbols": schema["symbols"]}
            if "default" in schema:
                kept["default"] = schema["default"]
            found = _same(kept, pa.string(), "enum")
        elif kind == "fixed":
            kept = {"type": "fixed", **head, "size": schema["size"]}
            if kept["size"] < 0:
                raise ValueError(f"a size of {kept['size']}")
            wide = self._wide_decimal("fixed", schema, path)
            found = (
                _of_known(wide)
                if wide is not None
                else _logical("fixed", kept | _decimal_of(schema), "fixed")
                or _same(kept, pa.binary(), "fixed" if kept["size"] else "nothing")
            )
        else:
            known = of_record(full, schema["fields"]) if self._forms and path else None
            found = (
                self._record(schema, head, namespace, path) if known is None else _of_known(known)
            )
        self._named[full] = found
        self._fields_of[full] = self._fields - before
        return found

    def _count(self, fields: int, path: str) -> None:
        self._fields += fields
        if self._fields > FIELDS_MAX:
            raise self._refuse(path, f"exceeds the limit of {FIELDS_MAX} fields")

    def _record(
        self, schema: dict[str, Any], head: dict[str, Any], namespace: str, path: str
    ) -> AvroType:
        self._count(len(schema["fields"]), path)
        fields = [
            (one, self.type_of(one["type"], namespace, f"{path}.{one['name']}"))
            for one in schema["fields"]
        ]
        names = [one["name"] for one, _ in fields]
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise self._refuse(path, f"has two fields named {twice[0]!r}")
        kept = [
            {key: one[key] for key in ("name", "default", "aliases") if key in one}
            | {"type": kind.schema}
            for one, kind in fields
        ]
        if any(UNION in kind.kinds for _, kind in fields):
            self._put_members(kept)
        formed = {
            name: kind.form for name, (_, kind) in zip(names, fields, strict=True) if kind.form
        }
        return AvroType(
            {"type": "record", **head, "fields": kept},
            pa.struct([(name, kind.stored) for name, (_, kind) in zip(names, fields, strict=True)]),
            pa.struct([(name, kind.unit) for name, (_, kind) in zip(names, fields, strict=True)]),
            pa.struct([(name, kind.column) for name, (_, kind) in zip(names, fields, strict=True)]),
            frozenset({"record" if fields else "nothing"}).union(
                *(kind.kinds for _, kind in fields)
            ),
            Form(fields=formed) if formed else None,
        )

    def _put_members(self, fields: list[dict[str, Any]]) -> None:
        """Convert defaults of unions to defaults of their members."""
        for one in fields:
            if "default" in one:
                one["default"] = with_member(one["default"], one["type"], self._schema_of)

    def _schema_of(self, name: str) -> Any:
        found = self._named.get(name)
        return name if found is None else found.schema

    def _collection(self, kind: str, schema: dict[str, Any], namespace: str, path: str) -> AvroType:
        is_list = self._forms and kind == "array"
        pair = pair_of(schema["items"], namespace, self._pairs) if is_list else None
        if pair is not None:
            self._count(len(pair), path)
            key, value = (self.type_of(one, PAIRS, path) for one in pair)
            key_type, convert = key_of(key.column)
            stored, unit, column = (
                pa.map_(key_type, one) for one in (value.stored, value.unit, value.column)
            )
            form = Form(item=value.form, key=convert)
            kept = {"type": "map", "values": value.schema}
            return AvroType(kept, stored, unit, column, value.kinds | {"map"}, form)
        within = "items" if kind == "array" else "values"
        inner = self.type_of(schema[within], namespace, path)
        if inner.kinds <= _NO_BYTES:
            # A few bytes could be a list of any length.
            raise self._refuse(path, f"has {within} without a type")

        def made(of: pa.DataType) -> pa.DataType:
            return pa.list_(of) if kind == "array" else pa.map_(pa.string(), of)

        return AvroType(
            {"type": kind, within: inner.schema},
            made(inner.stored),
            made(inner.unit),
            made(inner.column),
            inner.kinds | {kind},
            Form(item=inner.form) if inner.form else None,
        )


def _branches(types: list[Any], namespace: str, path: str) -> Iterator[tuple[Any, str, str]]:
    """Yield the types of a union; ``memberN`` ends the path of each of several non-null types."""
    many = sum(one != "null" for one in types) > 1
    number = 0
    for one in types:
        yield one, namespace, f"{path}.member{number}" if many and one != "null" else path
        number += one != "null"


def _of_known(known: Known) -> AvroType:
    """Return the type of JSON values that their schema does not describe."""
    column, form, unit = known.column, known.form, known.unit or known.column
    kinds = frozenset({_TIME} if pa.types.is_time(column) else {"known"})
    return AvroType("known", numbers_of(unit), unit, column, kinds, form)


def _full(name: str, namespace: str) -> str:
    return name if "." in name or not namespace else f"{namespace}.{name}"


def _same(schema: Any, kind: pa.DataType, name: str) -> AvroType:
    return AvroType(schema, kind, kind, kind, frozenset({name}))


def _decimal_of(schema: dict[str, Any]) -> dict[str, Any]:
    names = ("logicalType", "precision", "scale")
    return {name: schema[name] for name in names if name in schema}


def _digits_of(kind: str, schema: dict[str, Any]) -> tuple[int, int] | None:
    """Return precision and scale of a decimal; ``None`` if Avro's specification forbids them."""
    precision, scale = schema.get("precision"), schema.get("scale", 0)
    if type(precision) is not int or type(scale) is not int:
        return None
    if precision < 1 or not 0 <= scale <= precision:
        return None
    if kind == "fixed":
        # A byte holds 2.4 digits: do not compute a huge power of ten for a larger precision.
        size = schema["size"]
        if precision > 3 * size or 10**precision > 2 ** (8 * size) // 2:
            return None
    return precision, scale


def _logical(kind: str, schema: dict[str, Any], name: str) -> AvroType | None:
    """Return a type with a known logical type; ``None`` for any other, which is read as stored."""
    logical = schema.get("logicalType")
    if logical == "decimal" and kind in ("bytes", "fixed"):
        digits = _digits_of(kind, schema)
        if digits is None or digits[0] > DECIMAL_DIGITS_MAX:
            return None
        decimal = pa.decimal128(*digits)
        kept = {key: value for key, value in schema.items() if key != "connect.parameters"}
        kept["logicalType"] = DECIMAL
        return AvroType(kept, decimal, decimal, decimal, frozenset({name, "decimal"}))
    found = _LOGICAL.get((kind, str(logical)))
    if found is None:
        return None
    kinds = {name, _TIME} if pa.types.is_time(found[1]) else {name}
    return AvroType(kind, _PLAIN[kind], *found, frozenset(kinds))
