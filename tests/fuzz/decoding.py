"""How drawn values are decoded, and damaged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Any

import pyarrow as pa

from keyshard.columns.codec import Codec, decode_rows
from keyshard.columns.codecs import codec_of
from keyshard.columns.projection import cast_values
from keyshard.core.topic_schema import TopicSchema

TOPIC = "persistent://public/default/drawn"


def decoded(
    schema: TopicSchema, values: Sequence[bytes], writer: TopicSchema | None = None
) -> tuple[list[Any], dict[int, str]]:
    """Return rows as dictionaries with numbers for times, and reasons by number of row.

    Each value must decode alone as beside the others: a batch that runs again may have other rows.
    """
    codec = codec_of(schema, TOPIC)
    found, reasons = _rows(codec, values, writer)
    for row, value in enumerate(values):
        assert _rows(codec, [value], writer) == (
            [found[row]],
            {0: reasons[row]} if row in reasons else {},
        ), (value, schema)
    return found, reasons


def _rows(
    codec: Codec, values: Sequence[bytes], writer: TopicSchema | None
) -> tuple[list[Any], dict[int, str]]:
    given = pa.array(values, pa.binary())
    keys = pa.nulls(len(given), pa.binary())
    found, reasons = decode_rows(codec, given, keys, writer, in_parts=True)
    found.validate(full=True)
    numbers = cast_values(found, _without_times(found.type))
    return comparable(numbers.to_pylist(maps_as_pydicts="lossy")), reasons


def comparable(value: Any) -> Any:
    """Return a value with a text for each NaN, which equals nothing."""
    if isinstance(value, dict):
        return {name: comparable(one) for name, one in value.items()}
    if isinstance(value, list):
        return [comparable(one) for one in value]
    return "NaN" if isinstance(value, float) and math.isnan(value) else value


def _without_times(kind: pa.DataType) -> pa.DataType:
    types = pa.types
    if types.is_timestamp(kind) or types.is_time64(kind):
        return pa.int64()
    if types.is_date32(kind):
        return pa.int32()
    if types.is_struct(kind):
        return pa.struct([(field.name, _without_times(field.type)) for field in kind])
    if types.is_list(kind):
        return pa.list_(_without_times(kind.value_type))
    if types.is_map(kind):
        return pa.map_(kind.key_type, _without_times(kind.item_type))
    return kind


def damaged(random: Random, values: Sequence[bytes]) -> bytes:
    """One of some values with bytes changed, put in, taken out, or another one behind it."""
    found = bytearray(random.choice(values))
    for _ in range(random.choice((1, 1, 2, 5))):
        place = random.randrange(len(found) + 1)
        match random.randrange(5):
            case 0 if place < len(found):
                found[place] ^= 1 << random.randrange(8)
            case 1:
                found[place:place] = random.choice(_BYTES)
            case 2:
                del found[place : place + random.choice((1, 1, 4))]
            case 3:
                found += random.choice(values)
            case _:
                found[place:] = b""
    return bytes(found)


_BYTES = (b"\0", b"\x01", b"\xff", b"\xff" * 9 + b"\x01", b"\x80" * 9, b"\x0a\0", b"\x13\x14")
