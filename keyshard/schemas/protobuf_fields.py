"""A descriptor for messages of type PROTOBUF, of the two things that Pulsar's Java client tells.

The numbers and types of the fields of a message stand in a property, and their defaults in an Avro
schema. Neither has the numbers of an enumeration, nor those of the fields of a message inside.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool

from keyshard.core.topic_schema import TopicSchema

PARSING_INFO = "__PARSING_INFO__"
"""Property with the fields of the message, as JSON."""
_Field = descriptor_pb2.FieldDescriptorProto
_UNTOLD = {
    "ENUM": "is an enumeration, and the schema does not tell the numbers of its names",
    "MESSAGE": "is a message, and the schema does not tell the numbers of the fields in it",
    "GROUP": "is a group, which is not read",
}
_UNSIGNED_BITS = {"UINT32": 32, "FIXED32": 32, "UINT64": 64, "FIXED64": 64}


class Told(NamedTuple):
    """What is known of a message."""

    descriptor: Any
    """Of the fields that can be read. All of them know whether they were set."""
    defaults: Mapping[str, Any]
    """Of fields that were not set, by name."""
    untold: Mapping[str, str]
    """The other fields, and why they cannot be read."""


def told_by(schema: TopicSchema) -> Told:
    """Read the schema of a message.

    Args:
        schema: ``PROTOBUF``, with :data:`PARSING_INFO`.

    Raises:
        ValueError, LookupError, TypeError, AttributeError: It is none.
    """
    avro = json.loads(schema.definition)
    fields = {one["name"]: one for one in avro["fields"]}
    file = descriptor_pb2.FileDescriptorProto(name="told.proto", syntax="proto2")
    message = file.message_type.add(name=avro["name"])
    defaults, untold = {}, {}
    for one in json.loads(schema.properties[PARSING_INFO]):
        name, kind = one["name"], one["type"]
        if kind in _UNTOLD:
            untold[name] = _UNTOLD[kind]
            continue
        label = _Field.Label.Value(one["label"])
        message.field.add(
            name=name, number=one["number"], label=label, type=_Field.Type.Value(f"TYPE_{kind}")
        )
        # One that has to be there has none; of a repeated one, nothing is an empty list anyway.
        if label == _Field.LABEL_OPTIONAL and "default" in fields[name]:
            defaults[name] = _default(fields[name]["default"], kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return Told(pool.FindMessageTypeByName(message.name), defaults, untold)


def _default(value: Any, kind: str) -> Any:
    """A default as it is meant: Java and Avro have no unsigned numbers, and JSON no bytes."""
    if kind in _UNSIGNED_BITS:
        return value % 2 ** _UNSIGNED_BITS[kind]
    return value.encode("latin-1") if kind == "BYTES" else value
