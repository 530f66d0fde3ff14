"""Which codec decodes a schema; keys and values together."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import SchemaError
from keyshard.schemas.avro import AvroCodec
from keyshard.schemas.codec import Codec, UndecodableError, decode_rows, refused
from keyshard.schemas.json_values import JsonCodec
from keyshard.schemas.primitives import PRIMITIVES, PrimitiveCodec
from keyshard.schemas.protobuf import ProtobufCodec

_SIZE = struct.Struct(">i")
_NULL = -1
"""Size of a key or value that is null."""
KEY_VALUE = "KEY_VALUE"


def keys_apart(schema: TopicSchema) -> bool:
    """Whether its keys are those of the messages, and not in their values."""
    encoding = schema.properties.get("kv.encoding.type")
    return schema.type == KEY_VALUE and encoding == "SEPARATED"


def codec_of(schema: TopicSchema, topic: str) -> Codec:
    """The codec of a schema.

    Args:
        schema: What values are decoded to.
        topic: For errors.

    Raises:
        SchemaError: Values of it cannot be columns.
        ConfigError: A package that is needed for it is missing.
    """
    if schema.type in PRIMITIVES:
        return PrimitiveCodec(schema)
    if schema.type == "AVRO":
        return AvroCodec(schema, topic)
    if schema.type == "JSON":
        return JsonCodec(schema, topic)
    if schema.type in ("PROTOBUF_NATIVE", "PROTOBUF"):
        return ProtobufCodec(schema, topic)
    if schema.type == KEY_VALUE:
        return KeyValueCodec(schema, topic)
    raise SchemaError(
        f"The schema of {topic} is of type {schema.type}, which is not known. Set valueFormat=raw "
        "to get the bytes."
    )


class KeyValueCodec:
    """Keys and values with a schema each, as columns ``key`` and ``value``.

    Args:
        schema: ``KEY_VALUE``, inline or separated: then the key is that of the message.
        topic: For errors.
    """

    kind = KEY_VALUE

    def __init__(self, schema: TopicSchema, topic: str) -> None:
        self._topic = topic
        key, value = parts_of(schema, topic)
        # A key alone says that it has no value any more.
        self.has_null = keys_apart(schema)
        self._key = codec_of(key, f"keys of {topic}")
        self._value = codec_of(value, f"values of {topic}")
        self.type = pa.struct([("key", self._key.type), ("value", self._value.type)])
        self.untold: Mapping[str, str] = {
            f"{name}.{path}": why
            for name, codec in (("key", self._key), ("value", self._value))
            for path, why in codec.untold.items()
        }

    def decode(self, values: pa.Array, keys: pa.Array, writer: TopicSchema | None) -> pa.Array:
        columns = []
        for decoded, reasons in self._parts(self._raw(values, keys, writer), writer):
            if reasons:
                raise UndecodableError(next(iter(reasons.values())))
            columns.append(decoded)
        return pa.StructArray.from_arrays(columns, fields=list(self.type))

    def suspects(
        self, values: pa.Array, keys: pa.Array, writer: TopicSchema | None
    ) -> Sequence[int]:
        try:
            raw = self._raw(values, keys, writer)
        except UndecodableError:
            return refused(values, lambda value: None if value is None else _pair(value))
        return sorted({row for _, reasons in self._parts(raw, writer) for row in reasons})

    def _raw(
        self, values: pa.Array, keys: pa.Array, writer: TopicSchema | None
    ) -> tuple[pa.Array, pa.Array]:
        separated = self.has_null if writer is None else keys_apart(writer)
        return (keys, values) if separated else _split(values)

    def _parts(
        self, raw: tuple[pa.Array, pa.Array], writer: TopicSchema | None
    ) -> Iterator[tuple[pa.Array, dict[int, str]]]:
        writers = (None, None) if writer is None else parts_of(writer, self._topic)
        for codec, values, written in zip((self._key, self._value), raw, writers, strict=True):
            yield decode_rows(codec, values, pa.nulls(len(values), pa.binary()), written)


def _split(values: pa.Array) -> tuple[pa.Array, pa.Array]:
    pairs = [(None, None) if one is None else _pair(one) for one in values.to_pylist()]
    return (
        pa.array([key for key, _ in pairs], pa.binary()),
        pa.array([value for _, value in pairs], pa.binary()),
    )


def _pair(value: bytes) -> list[bytes | None]:
    found: list[bytes | None] = []
    position = 0
    try:
        for _ in range(2):
            (size,) = _SIZE.unpack_from(value, position)
            position += 4
            if size > len(value) - position:
                raise UndecodableError("its key or value ends too early")
            if size < _NULL:
                raise UndecodableError(f"its key or value has a size of {size}")
            found.append(None if size == _NULL else value[position : position + size])
            position += max(0, size)
    except struct.error as exc:
        raise UndecodableError("its key or value ends too early") from exc
    return found


def parts_of(schema: TopicSchema, topic: str) -> list[TopicSchema]:
    """The schemas of keys and of values.

    Raises:
        SchemaError: They are not there.
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
            f"The KEY_VALUE schema of {topic} cannot be read ({exc!r}). Set valueFormat=raw to get "
            "the bytes."
        ) from exc


def same(one: TopicSchema, other: TopicSchema, topic: str) -> bool:
    """Whether values of two schemas are decoded alike, whoever told of them.

    Raises:
        SchemaError: The parts of one are not there.
    """
    if not one.type == other.type == KEY_VALUE:
        return one.says_the_same(other)
    if dict(one.properties) != dict(other.properties):
        return False
    # The admin interface and the broker have another form each for both definitions together.
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
    """What describes keys and values: as the admin interface tells it, or as the broker does."""
    if definition.startswith(b"{"):
        told: dict[str, Any] = json.loads(definition)
        return [
            b"" if told[one] == "" else json.dumps(told[one]).encode() for one in ("key", "value")
        ]
    return [part or b"" for part in _pair(definition)]
