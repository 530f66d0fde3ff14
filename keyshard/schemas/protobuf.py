"""Protobuf values, by the descriptors that the schema carries."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from pyarrow import compute

from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import SchemaError
from keyshard.redaction import first_line
from keyshard.schemas.avro_types import FIELDS_MAX
from keyshard.schemas.codec import UndecodableError, library, panics_as_errors, refused
from keyshard.schemas.maps import with_keys_once
from keyshard.schemas.protobuf_fields import PARSING_INFO, Told, told_by

_UNSIGNED = {pa.uint32(): pa.int64(), pa.uint64(): pa.decimal128(20)}
_SATURATED = {-(2**63), 2**63 - 1}
"""What ptars makes of moments and durations that microseconds cannot say."""


class ProtobufCodec:
    """Messages of one descriptor. Fields are known by number, so no version is needed.

    An enumeration is the name of its value, or the number of one that is unknown.

    Args:
        schema: ``PROTOBUF_NATIVE``, which carries a descriptor; or ``PROTOBUF`` as Pulsar's Java
            client writes it, of which one is made.
        topic: For errors.

    Raises:
        SchemaError: The descriptor cannot be used.
        ConfigError: The package is missing.
    """

    has_null = False

    def __init__(self, schema: TopicSchema, topic: str) -> None:
        self.kind = schema.type
        if schema.type == "PROTOBUF" and PARSING_INFO not in schema.properties:
            raise _without_descriptor(topic)
        ptars = library("ptars", f"The protobuf schema of {topic}")
        how = ptars.PtarsConfig(
            timestamp_unit="us", time_unit="us", duration_unit="us", enum_repr="string"
        )
        try:
            descriptor, defaults, self.untold = _told(schema)
            _count_fields(descriptor, (), topic, {})
            self._message = message_factory.GetMessageClass(descriptor)
            self._completes = _maps_to_messages(descriptor)
            self._writes_defaults = False
            with panics_as_errors():
                pool = ptars.HandlerPool([descriptor.file], how)
                self._handler = pool.get_for_message(descriptor)
                found = self._handler.array_to_record_batch(pa.nulls(0, pa.binary())).schema
            self.type = _as_column(pa.struct(list(found)))
            self._defaults = {
                name: pa.scalar(one, self.type.field(name).type) for name, one in defaults.items()
            }
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            RecursionError,
            DecodeError,
        ) as exc:
            if isinstance(exc, SchemaError):
                raise
            raise SchemaError(
                f"The protobuf descriptor of {topic} cannot be used ({first_line(exc)}). Set "
                "valueFormat=raw to get the bytes."
            ) from exc

    def decode(
        self,
        values: pa.Array,
        keys: pa.Array,  # noqa: ARG002
        writer: TopicSchema | None,  # noqa: ARG002
    ) -> pa.Array:
        try:
            found = self._completely_read(values) if self._completes else self._read(values)
            for times in _times(found):
                if set(compute.min_max(times.view(pa.int64())).as_py().values()) & _SATURATED:
                    raise UndecodableError("a time is out of range")
            found = with_keys_once(found.cast(self.type))
        except (ValueError, DecodeError) as exc:
            raise UndecodableError(first_line(exc)) from exc
        return self._filled(found) if self._defaults else found

    def suspects(
        self,
        values: pa.Array,
        keys: pa.Array,  # noqa: ARG002
        writer: TopicSchema | None,  # noqa: ARG002
    ) -> Sequence[int]:
        return refused(values, self._message.FromString)

    def _read(self, values: pa.Array) -> pa.StructArray:
        with panics_as_errors():
            return self._handler.array_to_record_batch(values).to_struct_array()

    def _completely_read(self, values: pa.Array) -> pa.StructArray:
        """Messages whose maps have a value for each key: one may be left out where it is the
        default, and ptars panics over such a one that is a message."""
        given = values.to_pylist()
        if not self._writes_defaults:
            try:
                return self._read(pa.array(map(self._completed, given), pa.binary()))
            except ValueError:
                # The default values that one of them says take as many bytes as what is missing.
                self._writes_defaults = True
        return self._read(pa.array(map(self._completed, given), pa.binary()))

    def _completed(self, value: bytes) -> bytes:
        message = self._message.FromString(value)
        if message.ByteSize() == len(value) and not self._writes_defaults:
            return value
        found: bytes = message.SerializePartialToString(deterministic=True)
        return found

    def _filled(self, values: pa.StructArray) -> pa.Array:
        """Messages with the defaults of fields that were not set."""
        columns = [
            compute.fill_null(column, self._defaults[field.name])
            if field.name in self._defaults
            else column
            for column, field in zip(values.flatten(), self.type, strict=True)
        ]
        return pa.StructArray.from_arrays(columns, fields=list(self.type))


def _without_descriptor(topic: str) -> SchemaError:
    return SchemaError(
        f"The schema of {topic} is PROTOBUF, which carries no descriptor of its messages, and "
        f"lacks the property {PARSING_INFO} of Pulsar's Java client, of which one could be made. "
        "Let its producers use Schema.PROTOBUF_NATIVE, or set valueFormat=raw to get the bytes.",
        topic=topic,
    )


def _told(schema: TopicSchema) -> Told:
    if schema.type == "PROTOBUF":
        return told_by(schema)
    return Told(_descriptor(schema.definition), {}, {})


def _descriptor(definition: bytes) -> Any:
    told = json.loads(definition)
    files = descriptor_pb2.FileDescriptorSet.FromString(b64decode(told["fileDescriptorSet"]))
    by_name: dict[str, Any] = {}
    for file in files.file:
        if by_name.setdefault(file.name, file) != file:
            raise ValueError(f"two files {file.name!r}")
    pool = descriptor_pool.DescriptorPool()
    added: set[str] = set()

    def add(name: str) -> None:
        if name in added:
            return
        added.add(name)
        for dependency in by_name[name].dependency:
            add(dependency)
        pool.Add(by_name[name])

    for name in by_name:
        add(name)
    return pool.FindMessageTypeByName(told["rootMessageTypeName"].lstrip("."))


def _count_fields(
    descriptor: Any, within: tuple[str, ...], topic: str, known: dict[str, int]
) -> int:
    """Number of fields of a message, all levels together; ``known``: of those counted before."""
    if descriptor.full_name in within:
        raise SchemaError(
            f"Message {descriptor.full_name} of the schema of {topic} contains its own type, which "
            "no column can hold. Set valueFormat=raw to get the bytes."
        )
    for one in descriptor.fields:
        if one.type == one.TYPE_GROUP:
            # ptars passes over them.
            raise SchemaError(
                f"Field {one.full_name} of the schema of {topic} is a group, which is not read. "
                "Make it a message, or set valueFormat=raw to get the bytes."
            )
    if descriptor.full_name not in known:
        inside = [one.message_type for one in descriptor.fields if one.message_type is not None]
        path = (*within, descriptor.full_name)
        fields = [_count_fields(one, path, topic, known) for one in inside]
        known[descriptor.full_name] = len(descriptor.fields) + sum(fields)
    if known[descriptor.full_name] > FIELDS_MAX:
        raise SchemaError(
            f"Message {descriptor.full_name} of the schema of {topic} has more than {FIELDS_MAX} "
            "fields, all levels together. Set valueFormat=raw to get the bytes."
        )
    return known[descriptor.full_name]


def _maps_to_messages(descriptor: Any, seen: set[str] | None = None) -> bool:
    """Whether a message has a map whose values are messages, on any level."""
    seen = set() if seen is None else seen
    if descriptor.full_name in seen:
        return False
    seen.add(descriptor.full_name)
    inside = [one.message_type for one in descriptor.fields if one.message_type is not None]
    if descriptor.GetOptions().map_entry and inside:
        return True
    return any(_maps_to_messages(one, seen) for one in inside)


def _times(values: pa.Array) -> Iterator[pa.Array]:
    """The moments and durations among values, on all levels."""
    types = pa.types
    if types.is_timestamp(values.type) or types.is_duration(values.type):
        yield values
    elif types.is_struct(values.type):
        for place in range(values.type.num_fields):
            yield from _times(values.field(place))
    elif types.is_map(values.type):
        yield from _times(values.items)
    elif types.is_list(values.type):
        yield from _times(values.values)


def _as_column(kind: pa.DataType) -> pa.DataType:
    """The type with everything nullable, and no unsigned numbers, which Spark does not have."""
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _as_column(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(_as_column(kind.value_type))
    if pa.types.is_map(kind):
        return pa.map_(_as_column(kind.key_type), _as_column(kind.item_type))
    return _UNSIGNED.get(kind, kind)
