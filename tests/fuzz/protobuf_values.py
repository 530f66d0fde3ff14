"""Protobuf messages of drawn types, whole and damaged, as protobuf itself reads them."""

from __future__ import annotations

import json
from base64 import b64encode
from random import Random
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, timestamp_pb2
from google.protobuf.message import DecodeError

from keyshard.core.topic_schema import TopicSchema
from tests.fuzz.decoding import comparable, damaged, decoded
from tests.fuzz.promises import promise

_Field = descriptor_pb2.FieldDescriptorProto
_INTEGERS = {
    _Field.TYPE_INT32: (-(2**31), 2**31 - 1), _Field.TYPE_SINT32: (-(2**31), 2**31 - 1),
    _Field.TYPE_SFIXED32: (-(2**31), 2**31 - 1), _Field.TYPE_UINT32: (0, 2**32 - 1),
    _Field.TYPE_FIXED32: (0, 2**32 - 1), _Field.TYPE_INT64: (-(2**63), 2**63 - 1),
    _Field.TYPE_SINT64: (-(2**63), 2**63 - 1), _Field.TYPE_SFIXED64: (-(2**63), 2**63 - 1),
    _Field.TYPE_UINT64: (0, 2**64 - 1), _Field.TYPE_FIXED64: (0, 2**64 - 1),
}  # fmt: skip
_KEYS = (*_INTEGERS, _Field.TYPE_BOOL, _Field.TYPE_STRING)
_KINDS = (*_KEYS, _Field.TYPE_FLOAT, _Field.TYPE_DOUBLE, _Field.TYPE_BYTES, _Field.TYPE_ENUM)
_TIME = ".google.protobuf.Timestamp"
_ENUM_NUMBERS = (0, 1, 5, -1)


def protobuf_values(random: Random, _name: str) -> None:
    """Each message is read as protobuf reads it, or is malformed where protobuf refuses it."""
    if random.random() < 0.3:
        (schema, made), output = _drawn_list(random), _as_java_gets_it
    else:
        (schema, made), output = _drawn_schema(random), _told
    wholes = [_filled(made(), random) for _ in range(8)]
    data = [one.SerializeToString() for one in wholes]
    rows, reasons = decoded(schema, data)
    promise(not reasons, f"of whole messages: {reasons}")
    for one, row in zip(wholes, rows, strict=True):
        promise(row == output(one), f"{one!r} is {row}")
    data += [damaged(random, data) for _ in range(30)]
    rows, reasons = decoded(schema, data)
    promise(not reasons.keys() & set(range(8)), "a damaged message took others with it")
    for place in range(8, len(data)):
        try:
            found = made.FromString(data[place])
        except DecodeError:
            continue
        # ptars reads two kinds of messages differently, so they are left out. Protobuf merges a
        # field that occurs twice. It takes a number that a proto2 enumeration lacks for an unknown
        # field, in a map with the whole pair.
        found.DiscardUnknownFields()
        if place not in reasons and len(found.SerializePartialToString()) == len(data[place]):
            wanted = output(found)
            promise(rows[place] == wanted, f"{data[place]!r} is {rows[place]}, not {wanted}")


def _drawn_schema(random: Random) -> tuple[TopicSchema, Any]:
    syntax = random.choice(("proto2", "proto3"))
    file = descriptor_pb2.FileDescriptorProto(
        name="drawn.proto",
        package="d",
        syntax=syntax,
        dependency=["google/protobuf/timestamp.proto"],
    )
    enum = file.enum_type.add(name="E")
    for number in _ENUM_NUMBERS:
        enum.value.add(name=f"V{number}".replace("-", "_"), number=number)
    count = random.randint(1, 4)
    for level in range(count):
        _add_message(file, level, random)
    time = descriptor_pb2.FileDescriptorProto.FromString(timestamp_pb2.DESCRIPTOR.serialized_pb)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(time)
    pool.Add(file)
    root = f"d.M{count - 1}"
    files = descriptor_pb2.FileDescriptorSet(file=[file, time]).SerializeToString()
    output = {"fileDescriptorSet": b64encode(files).decode(), "rootMessageTypeName": root}
    made = message_factory.GetMessageClass(pool.FindMessageTypeByName(root))
    return TopicSchema("PROTOBUF_NATIVE", json.dumps(output).encode()), made


def _add_message(file: Any, level: int, random: Random) -> None:
    message = file.message_type.add(name=f"M{level}")
    below = [_TIME, *(f".d.M{one}" for one in range(level))]
    choice = random.random() < 0.5
    if choice:
        message.oneof_decl.add(name="one")
    for number in range(1, random.randint(2, 7)):
        name, kind, of = f"f{number}", *_drawn_kind(random, below)
        shape = random.choice(("one", "one", "many", "map"))
        field = message.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL)
        field.type = kind
        if shape == "map":
            entry = message.nested_type.add(name=f"F{number}Entry")
            entry.options.map_entry = True
            entry.field.add(name="key", number=1, label=1, type=random.choice(_KEYS))
            entry.field.add(name="value", number=2, label=1, type=kind, type_name=of)
            kind, of = _Field.TYPE_MESSAGE, f".d.M{level}.F{number}Entry"
        if shape != "one":
            field.label = _Field.LABEL_REPEATED
        elif choice and random.random() < 0.5:
            field.oneof_index = 0
        if shape == "many" and kind in _INTEGERS:
            field.options.packed = random.random() < 0.5
        field.type = kind
        if of is not None:
            field.type_name = of
    if choice and not any(one.HasField("oneof_index") for one in message.field):
        message.field.add(name="last", number=99, label=1, type=_Field.TYPE_STRING, oneof_index=0)


def _drawn_list(random: Random) -> tuple[TopicSchema, Any]:
    """A schema as Java's client writes it: its list of fields, and their defaults in Avro."""
    proto2 = random.random() < 0.5
    syntax = "proto2" if proto2 else "proto3"
    file = descriptor_pb2.FileDescriptorProto(name="listed.proto", package="d", syntax=syntax)
    message = file.message_type.add(name="M")
    listed: list[dict[str, Any]] = []
    avro: list[dict[str, Any]] = []
    for number in random.sample(range(1, 40), random.randint(1, 7)):
        name = f"f{number}"
        kind = random.choice([one for one in _KINDS if one != _Field.TYPE_ENUM])
        label = random.choice((_Field.LABEL_OPTIONAL, _Field.LABEL_REPEATED))
        if proto2 and random.random() < 0.2:
            label = _Field.LABEL_REQUIRED
        field = message.field.add(name=name, number=number, label=label, type=kind)
        output: dict[str, Any] = {"default": _ZEROS.get(kind, 0)}
        if label == _Field.LABEL_REPEATED:
            output["default"] = []
            if kind not in (_Field.TYPE_STRING, _Field.TYPE_BYTES):
                field.options.packed = random.random() < 0.5
        elif label == _Field.LABEL_REQUIRED:
            output = {}
        elif proto2 and kind in _DEFAULTS and random.random() < 0.5:
            field.default_value, output["default"] = _DEFAULTS[kind]
        type_name, label_name = _Field.Type.Name(kind), _Field.Label.Name(label)
        avro.append({"name": name, "type": "not looked at", **output})
        listed.append(
            {"number": number, "name": name, "type": type_name.removeprefix("TYPE_")}
            | {"label": label_name, "definition": None}
        )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    definition = json.dumps({"type": "record", "name": "M", "fields": avro}).encode()
    schema = TopicSchema("PROTOBUF", definition, 0, {"__PARSING_INFO__": json.dumps(listed)})
    return schema, message_factory.GetMessageClass(pool.FindMessageTypeByName("d.M"))


_ZEROS = {
    _Field.TYPE_BOOL: False, _Field.TYPE_STRING: "", _Field.TYPE_BYTES: "",
    _Field.TYPE_FLOAT: 0.0, _Field.TYPE_DOUBLE: 0.0,
}  # fmt: skip
_DEFAULTS: dict[Any, tuple[str, Any]] = {
    # In the descriptor, and as Java tells it: without unsigned numbers.
    **dict.fromkeys(_INTEGERS, ("7", 7)),
    _Field.TYPE_UINT32: ("4294967295", -1),
    _Field.TYPE_FIXED64: ("18446744073709551615", -1),
    _Field.TYPE_SINT64: ("-9223372036854775808", -(2**63)),
    _Field.TYPE_BOOL: ("true", True),
    _Field.TYPE_STRING: ("n\u00e9", "n\u00e9"),
    _Field.TYPE_FLOAT: ("1.5", 1.5),
    _Field.TYPE_DOUBLE: ("-0.1", -0.1),
}


def _drawn_kind(random: Random, below: list[str]) -> tuple[Any, str | None]:
    if random.random() < 0.3:
        return _Field.TYPE_MESSAGE, random.choice(below)
    kind = random.choice(_KINDS)
    return kind, ".d.E" if kind == _Field.TYPE_ENUM else None


def _filled(message: Any, random: Random) -> Any:
    for field in message.DESCRIPTOR.fields:
        if random.random() < 0.3 and not field.is_required:
            continue
        there = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            _fill_map(there, field.message_type, random)
        elif field.is_repeated:
            for _ in range(random.randint(0, 3)):
                if field.message_type is None:
                    there.append(_scalar(field, random))
                else:
                    _filled(there.add(), random)
        elif field.message_type is not None:
            there.SetInParent()
            _filled(there, random)
        else:
            setattr(message, field.name, _scalar(field, random))
    if message.DESCRIPTOR.full_name == _TIME[1:]:
        message.seconds = random.choice((0, -1, 1_700_000_000, -62_135_596_800, 253_402_300_799))
        message.nanos = random.choice((0, 1000, 999_999_000))
    return message


def _fill_map(there: Any, entry: Any, random: Random) -> None:
    key, value = (entry.fields_by_name[name] for name in ("key", "value"))
    for _ in range(random.randint(0, 3)):
        if value.message_type is None:
            there[_scalar(key, random)] = _scalar(value, random)
        else:
            _filled(there[_scalar(key, random)], random)


def _scalar(field: Any, random: Random) -> Any:
    if field.type in _INTEGERS:
        first, last = _INTEGERS[field.type]
        return random.choice((first, last, 0, 1, random.randint(first, last)))
    found: dict[Any, tuple[Any, ...]] = {
        _Field.TYPE_BOOL: (True, False),
        _Field.TYPE_STRING: ("", "x", "n\u00e9\0\U0001f600", "x" * 200),
        _Field.TYPE_BYTES: (b"", b"\xff\0"),
        _Field.TYPE_ENUM: _ENUM_NUMBERS,
        _Field.TYPE_FLOAT: (0.0, -0.0, 1.5, float("inf")),
        _Field.TYPE_DOUBLE: (0.0, 0.1, -1e300, float("-inf")),
    }
    return random.choice(found[field.type])


def _told(message: Any) -> Any:
    """A message as a row."""
    if message.DESCRIPTOR.full_name == _TIME[1:]:
        return message.seconds * 1_000_000 + message.nanos // 1000
    return {field.name: _value(message, field) for field in message.DESCRIPTOR.fields}


def _as_java_gets_it(message: Any) -> dict[str, Any]:
    """Return a message as a row of the values that its getters return.

    The list of fields does not tell which fields have presence. So only an unset required field is
    null; any other unset field has its default.
    """
    return {
        field.name: [comparable(one) for one in getattr(message, field.name)]
        if field.is_repeated
        else None
        if field.is_required and not message.HasField(field.name)
        else comparable(getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
    }


def _value(message: Any, field: Any) -> Any:
    there = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        of = field.message_type.fields_by_name["value"]
        return {key: _one(one, of) for key, one in there.items()}
    if field.is_repeated:
        return [_one(one, field) for one in there]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _one(there, field)


def _one(value: Any, field: Any) -> Any:
    if field.message_type is not None:
        return _told(value)
    if field.enum_type is not None:
        named = field.enum_type.values_by_number.get(value)
        return str(value) if named is None else named.name
    return comparable(value)
