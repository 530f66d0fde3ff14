"""Decodes Protobuf values, by the descriptors in the schema."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from pyarrow import compute

from keyshard.base_error import first_line
from keyshard.columns.avro_types import FIELDS_MAX
from keyshard.columns.codec import (
    AS_BYTES,
    Indivisible,
    UndecodableError,
    library,
    panics_as_errors,
    refused,
)
from keyshard.columns.maps import with_keys_once
from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import SchemaError

_UNSIGNED = {pa.uint32(): pa.int64(), pa.uint64(): pa.decimal128(20)}
_SATURATED = {-(2**63), 2**63 - 1}
"""Values of ptars for times and durations that microseconds cannot represent."""


class ProtobufCodec(Indivisible):
    """Messages of one descriptor. Fields are known by number, so no version is needed.

    An enumeration value becomes its name, or its number if it is unknown.

    Args:
        schema: ``PROTOBUF_NATIVE``, which carries a descriptor; or ``PROTOBUF`` as Pulsar's Java
            client writes it, from which one is made.
        topic: For errors.

    Raises:
        SchemaError: The descriptor cannot be used.
        ConfigError: The package is not installed.
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
            descriptor, defaults, self.undescribed = _description(schema)
            _count_fields(descriptor, (), topic, {})
            self._message = message_factory.GetMessageClass(descriptor)
            self._completes = _maps_to_messages(descriptor)
            self._writes_defaults = False
            with panics_as_errors():
                pool = ptars.HandlerPool([descriptor.file], how)
                self._handler = pool.get_for_message(descriptor)
                found = self._handler.array_to_record_batch(pa.nulls(0, pa.binary())).schema
            self.descriptor = descriptor
            self.stored = pa.struct(list(found))
            self.type = _as_column(self.stored)
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
                f"The protobuf descriptor of {topic} cannot be used ({first_line(exc)}).",
                AS_BYTES,
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

    def encode(self, rows: pa.RecordBatch) -> pa.Array:
        """Encode messages whose fields have the types :attr:`stored`."""
        return self._handler.record_batch_to_array(rows)

    def _read(self, values: pa.Array) -> pa.StructArray:
        with panics_as_errors():
            return self._handler.array_to_record_batch(values).to_struct_array()

    def _completely_read(self, values: pa.Array) -> pa.StructArray:
        """Read messages after missing map values are filled in.

        A map value may be omitted if it is the default, and ptars panics if such a value is a
        message.
        """
        given = values.to_pylist()
        if not self._writes_defaults:
            try:
                return self._read(pa.array(map(self._completed, given), pa.binary()))
            except ValueError:
                # A size equal to the canonical one does not prove a message complete: explicit
                # defaults may take as many bytes as missing map values. Re-encode all messages.
                self._writes_defaults = True
        return self._read(pa.array(map(self._completed, given), pa.binary()))

    def _completed(self, value: bytes) -> bytes:
        message = self._message.FromString(value)
        if message.ByteSize() == len(value) and not self._writes_defaults:
            return value
        found: bytes = message.SerializePartialToString(deterministic=True)
        return found

    def _filled(self, values: pa.StructArray) -> pa.Array:
        """Fill unset fields with their defaults."""
        columns = [
            compute.fill_null(column, self._defaults[field.name])
            if field.name in self._defaults
            else column
            for column, field in zip(values.flatten(), self.type, strict=True)
        ]
        return pa.StructArray.from_arrays(columns, fields=list(self.type))


def _without_descriptor(topic: str) -> SchemaError:
    return SchemaError(
        f"The PROTOBUF schema of {topic} has neither a descriptor nor the property {PARSING_INFO} "
        "of Pulsar's Java client.",
        "Use Schema.PROTOBUF_NATIVE in its producers, or set valueFormat=raw to get the bytes.",
        topic=topic,
    )


def _description(schema: TopicSchema) -> MessageDescription:
    if schema.type == "PROTOBUF":
        return description_of(schema)
    return MessageDescription(_descriptor(schema.definition), {}, {})


def _descriptor(definition: bytes) -> Any:
    native = json.loads(definition)
    files = descriptor_pb2.FileDescriptorSet.FromString(b64decode(native["fileDescriptorSet"]))
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
    return pool.FindMessageTypeByName(native["rootMessageTypeName"].lstrip("."))


def _count_fields(
    descriptor: Any, within: tuple[str, ...], topic: str, known: dict[str, int]
) -> int:
    """Return the number of fields of a message on all levels.

    Args:
        descriptor: Descriptor of the message.
        within: Full names of the messages around it.
        topic: For errors.
        known: Counts of messages by full name; gets new ones.
    """
    if descriptor.full_name in within:
        raise SchemaError(
            f"Message {descriptor.full_name} of the schema of {topic} contains its own type, "
            "which no column can represent.",
            AS_BYTES,
        )
    for one in descriptor.fields:
        if one.type == one.TYPE_GROUP:
            # ptars ignores groups.
            raise SchemaError(
                f"Field {one.full_name} of the schema of {topic} is a group, which keyshard does "
                "not support.",
                "Change it to a message, or set valueFormat=raw to get the bytes.",
            )
    if descriptor.full_name not in known:
        inside = [one.message_type for one in descriptor.fields if one.message_type is not None]
        path = (*within, descriptor.full_name)
        fields = [_count_fields(one, path, topic, known) for one in inside]
        known[descriptor.full_name] = len(descriptor.fields) + sum(fields)
    if known[descriptor.full_name] > FIELDS_MAX:
        raise SchemaError(
            f"Message {descriptor.full_name} of the schema of {topic} exceeds the limit of "
            f"{FIELDS_MAX} fields, counted over all levels.",
            AS_BYTES,
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
    """Return the times and durations among values, on all levels."""
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
    """Return the type with all fields nullable, and without unsigned types, which Spark lacks."""
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _as_column(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(_as_column(kind.value_type))
    if pa.types.is_map(kind):
        return pa.map_(_as_column(kind.key_type), _as_column(kind.item_type))
    return _UNSIGNED.get(kind, kind)


# -- Descriptors for schemas of type PROTOBUF -----------------------------------------------------
# Pulsar's Java client stores the numbers and types of the fields of a message in a property, and
# their defaults in an Avro schema. Neither has the numbers of an enumeration, or of the fields of a
# nested message.

PARSING_INFO = "__PARSING_INFO__"
"""Property with the fields of the message, as JSON."""
_Field = descriptor_pb2.FieldDescriptorProto
_UNDESCRIBED = {
    "ENUM": "is an enumeration without numbers in the schema",
    "MESSAGE": "is a message without field numbers in the schema",
    "GROUP": "is a group, which keyshard does not support",
}
_UNSIGNED_BITS = {"UINT32": 32, "FIXED32": 32, "UINT64": 64, "FIXED64": 64}


class MessageDescription(NamedTuple):
    """The description of a message."""

    descriptor: Any
    """Descriptor of the readable fields. All of them have presence."""
    defaults: Mapping[str, Any]
    """Defaults of unset fields, by name."""
    undescribed: Mapping[str, str]
    """The other fields, and why they cannot be read."""


def description_of(schema: TopicSchema) -> MessageDescription:
    """Read the schema of a message.

    Args:
        schema: ``PROTOBUF``, with :data:`PARSING_INFO`.

    Raises:
        ValueError, LookupError, TypeError, AttributeError: The schema is not valid.
    """
    avro = json.loads(schema.definition)
    fields = {one["name"]: one for one in avro["fields"]}
    file = descriptor_pb2.FileDescriptorProto(name="message.proto", syntax="proto2")
    message = file.message_type.add(name=avro["name"])
    defaults, undescribed = {}, {}
    for one in json.loads(schema.properties[PARSING_INFO]):
        name, kind = one["name"], one["type"]
        if kind in _UNDESCRIBED:
            undescribed[name] = _UNDESCRIBED[kind]
            continue
        label = _Field.Label.Value(one["label"])
        message.field.add(
            name=name, number=one["number"], label=label, type=_Field.Type.Value(f"TYPE_{kind}")
        )
        # A required field has no default, and an unset repeated field is an empty list.
        if label == _Field.LABEL_OPTIONAL and "default" in fields[name]:
            defaults[name] = _default(fields[name]["default"], kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return MessageDescription(pool.FindMessageTypeByName(message.name), defaults, undescribed)


def _default(value: Any, kind: str) -> Any:
    """Convert a default: Java and Avro have no unsigned numbers, and JSON has no bytes."""
    if kind in _UNSIGNED_BITS:
        return value % 2 ** _UNSIGNED_BITS[kind]
    return value.encode("latin-1") if kind == "BYTES" else value
