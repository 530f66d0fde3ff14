"""Messages of Pulsar's protocol, as far as integers and byte strings go, by field number."""

from __future__ import annotations

Value = int | bytes
"""What a field holds."""


def message(fields: dict[int, Value]) -> bytes:
    """A protobuf message of integers and byte strings."""
    data = b""
    for number, value in fields.items():
        if isinstance(value, int):
            data += varint(number << 3) + varint(value)
        else:
            data += varint(number << 3 | 2) + varint(len(value)) + value
    return data


def varint(value: int) -> bytes:
    """An integer as protobuf writes it."""
    data = b""
    while value > 0x7F:
        data += bytes([value & 0x7F | 0x80])
        value >>= 7
    return data + bytes([value])


def fields_of(data: bytes) -> dict[int, Value]:
    """Integers and byte strings of a protobuf message; of repeated ones the last.

    Raises:
        ValueError: It is none.
        IndexError: It ends too early.
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
            raise ValueError("not a message")
    return found


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """An integer as protobuf writes it, and where the next field begins.

    Raises:
        IndexError: It ends too early.
    """
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
