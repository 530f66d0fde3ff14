"""Chooses the codec of a schema, and contains the codec of ``KEY_VALUE`` schemas."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from keyshard.columns.avro import AvroCodec
from keyshard.columns.codec import AS_BYTES, Codec, UndecodableError, decode_rows, refused
from keyshard.columns.json_values import JsonCodec
from keyshard.columns.primitives import PRIMITIVES, PrimitiveCodec
from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import SchemaError

_SIZE = struct.Struct(">i")
_NULL = -1
"""Size of a null key or value."""
KEY_VALUE = "KEY_VALUE"
_Pair = Sequence[bytes | None]
_Read = Callable[[bytes], _Pair]
_NO_PAIR = (None, None)


def keys_apart(schema: TopicSchema) -> bool:
    """Whether keys are stored as message keys, and not in the values."""
    encoding = schema.properties.get("kv.encoding.type")
    return schema.type == KEY_VALUE and encoding == "SEPARATED"


def codec_of(schema: TopicSchema, topic: str) -> Codec:
    """Return the codec of a schema.

    Args:
        schema: The schema that values are decoded to.
        topic: For errors.

    Raises:
        SchemaError: No columns can hold its values.
        ConfigError: A required package is not installed.
    """
    if schema.type in PRIMITIVES:
        return PrimitiveCodec(schema)
    if schema.type == "AVRO":
        return AvroCodec(schema, topic)
    if schema.type == "JSON":
        return JsonCodec(schema, topic)
    if schema.type in ("PROTOBUF_NATIVE", "PROTOBUF"):
        from keyshard.columns.protobuf import ProtobufCodec  # noqa: PLC0415 - loads protobuf

        return ProtobufCodec(schema, topic)
    if schema.type == KEY_VALUE:
        return KeyValueCodec(schema, topic)
    raise SchemaError(
        f"The schema of {topic} has the unknown type {schema.type}.",
        AS_BYTES,
    )


class KeyValueCodec:
    """Keys and values with a schema each, as columns ``key`` and ``value``.

    Args:
        schema: ``KEY_VALUE``, inline or separated. If it is separated, the key is that of the
            message.
        topic: For errors.
    """

    kind = KEY_VALUE

    def __init__(self, schema: TopicSchema, topic: str) -> None:
        self._topic = topic
        key, value = parts_of(schema, topic)
        # A key without a value means that the value was deleted.
        self.has_null = keys_apart(schema)
        self._key = codec_of(key, f"keys of {topic}")
        self._value = codec_of(value, f"values of {topic}")
        self.type = pa.struct([("key", self._key.type), ("value", self._value.type)])
        self.undescribed: Mapping[str, str] = {
            f"{name}.{path}": why
            for name, codec in (("key", self._key), ("value", self._value))
            for path, why in codec.undescribed.items()
        }

    def decode(self, values: pa.Array, keys: pa.Array, writer: TopicSchema | None) -> pa.Array:
        columns = []
        for decoded, reasons in self._parts(self._raw(values, keys, writer, _pair), writer):
            if reasons:
                raise UndecodableError(next(iter(reasons.values())))
            columns.append(decoded)
        return pa.StructArray.from_arrays(columns, fields=list(self.type))

    def suspects(
        self, values: pa.Array, keys: pa.Array, writer: TopicSchema | None
    ) -> Sequence[int]:
        try:
            raw = self._raw(values, keys, writer, _pair)
        except UndecodableError:
            return refused(values, lambda value: value is None or _pair(value))
        return sorted({row for _, reasons in self._parts(raw, writer) for row in reasons})

    def readable(self, values: pa.Array, keys: pa.Array, writer: TopicSchema | None) -> pa.Array:
        raw = self._raw(values, keys, writer, _readable_pair)
        parts = [found for found, _ in self._parts(raw, writer, in_parts=True)]
        return pa.StructArray.from_arrays(parts, fields=list(self.type))

    def _raw(
        self, values: pa.Array, keys: pa.Array, writer: TopicSchema | None, pair: _Read
    ) -> tuple[pa.Array, pa.Array]:
        separated = self.has_null if writer is None else keys_apart(writer)
        return (keys, values) if separated else _split(values, pair)

    def _parts(
        self,
        raw: tuple[pa.Array, pa.Array],
        writer: TopicSchema | None,
        *,
        in_parts: bool = False,
    ) -> Iterator[tuple[pa.Array, dict[int, str]]]:
        writers = (None, None) if writer is None else parts_of(writer, self._topic)
        for codec, values, written in zip((self._key, self._value), raw, writers, strict=True):
            nothing = pa.nulls(len(values), pa.binary())
            yield decode_rows(codec, values, nothing, written, in_parts=in_parts)


def _split(values: pa.Array, pair: _Read) -> tuple[pa.Array, pa.Array]:
    pairs = [_NO_PAIR if one is None else pair(one) for one in values.to_pylist()]
    return (
        pa.array([key for key, _ in pairs], pa.binary()),
        pa.array([value for _, value in pairs], pa.binary()),
    )


def _readable_pair(value: bytes) -> _Pair:
    try:
        return _pair(value)
    except UndecodableError:
        return _NO_PAIR


def _pair(value: bytes) -> _Pair:
    found: list[bytes | None] = []
    position = 0
    try:
        for _ in range(2):
            (size,) = _SIZE.unpack_from(value, position)
            position += 4
            if size > len(value) - position:
                raise UndecodableError("its key or value ends too early")
            if size < _NULL:
                raise UndecodableError(f"the declared size of its key or value is {size}")
            found.append(None if size == _NULL else value[position : position + size])
            position += max(0, size)
    except struct.error as exc:
        raise UndecodableError("its key or value ends too early") from exc
    return found


def parts_of(schema: TopicSchema, topic: str) -> list[TopicSchema]:
    """Return the schemas of keys and of values.

    Raises:
        SchemaError: The definition has none.
    """
    try:
        definitions = _definitions(schema.definition)
        return [
            TopicSchema(
                schema.properties[f"{name}.schema.type"],
                definition,
                schema.version,
                _properties(schema.properties.get(f"{name}.schema.properties", "{}")),
            )
            for name, definition in zip(("key", "value"), definitions, strict=True)
        ]
    except (ValueError, KeyError, TypeError, UndecodableError) as exc:
        raise SchemaError(
            f"The KEY_VALUE schema of {topic} cannot be read ({exc!r}).",
            AS_BYTES,
        ) from exc


def same(one: TopicSchema, other: TopicSchema, topic: str) -> bool:
    """Whether values of two schemas are decoded alike, from whichever interface they come.

    Raises:
        SchemaError: A ``KEY_VALUE`` definition has no schemas of keys and values.
    """
    if not one.type == other.type == KEY_VALUE:
        return one.says_the_same(other)
    if dict(one.properties) != dict(other.properties):
        return False
    # The admin interface and the broker join both definitions in different forms.
    pairs = zip(parts_of(one, topic), parts_of(other, topic), strict=True)
    return all(_read(mine.definition) == _read(its.definition) for mine, its in pairs)


def _read(definition: bytes) -> Any:
    try:
        return json.loads(definition)
    except ValueError:
        return definition


def _properties(text: str) -> Mapping[str, str]:
    found: Mapping[str, str] = json.loads(text) or {}
    return found


def _definitions(definition: bytes) -> list[bytes]:
    """Return the definitions of keys and values, from the admin or the broker form."""
    if definition.startswith(b"{"):
        both: dict[str, Any] = json.loads(definition)
        return [
            b"" if both[one] == "" else json.dumps(both[one]).encode() for one in ("key", "value")
        ]
    return [part or b"" for part in _pair(definition)]
