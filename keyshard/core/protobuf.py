"""Encodes and decodes the integers and byte strings of protobuf messages, by field number."""

from __future__ import annotations

Value = int | bytes
"""Value of a field."""
_BITS_MAX = 70
"""Most bits of a varint: ten bytes."""


class NotProtobufError(ValueError):
    """The bytes are no protobuf message."""


def message(fields: dict[int, Value]) -> bytes:
    """Encode a protobuf message of integers and byte strings."""
    data = b""
    for number, value in fields.items():
        if isinstance(value, int):
            data += varint(number << 3) + varint(value)
        else:
            data += varint(number << 3 | 2) + varint(len(value)) + value
    return data


def varint(value: int) -> bytes:
    """Encode an integer as a protobuf varint."""
    data = b""
    while value > 0x7F:
        data += bytes([value & 0x7F | 0x80])
        value >>= 7
    return data + bytes([value])


def fields_of(data: bytes) -> dict[int, Value]:
    """Decode the integers and byte strings of a protobuf message; of repeated fields, the last.

    Raises:
        NotProtobufError: The bytes are no protobuf message.
        IndexError: The bytes end too early.
    """
    found: dict[int, Value] = {}
    position = 0
    while position < len(data):
        tag, position = read_varint(data, position)
        if tag & 7 == 0:
            found[tag >> 3], position = read_varint(data, position)
        elif tag & 7 == 2:
            size, position = read_varint(data, position)
            found[tag >> 3] = data[position : position + size]
            position += size
        elif tag & 7 in (1, 5):
            position += 8 if tag & 7 == 1 else 4
        else:
            raise NotProtobufError("not a message")
    return found


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Decode a protobuf varint; return it and the position after it.

    Raises:
        NotProtobufError: The number does not end.
        IndexError: The bytes end too early.
    """
    value = shift = 0
    while shift < _BITS_MAX:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise NotProtobufError("an integer in it has no end")
