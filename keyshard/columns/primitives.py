"""Decodes Pulsar's primitive types: fixed sizes, big-endian."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pyarrow as pa
from pyarrow import compute

from keyshard.columns.codec import ALL_DESCRIBED, Indivisible, UndecodableError, refused
from keyshard.core.topic_schema import TopicSchema

TIMESTAMP = pa.timestamp("us", tz="UTC")
LOCAL_TIMESTAMP = pa.timestamp("us")
_DAY_US = 86_400_000_000
_DAY_NS = _DAY_US * 1000


def _shown(data: bytes) -> str:
    return f"{data[:16].hex(' ')}{' ...' if len(data) > 16 else ''}"


def _data(values: pa.Array, size: int) -> bytes:
    """Return the bytes of all values, which must have the same size."""
    fits = compute.equal(compute.binary_length(values), size)
    if not compute.all(fits, min_count=0).as_py():
        wrong = values.filter(compute.invert(fits))[0].as_py()
        raise UndecodableError(f"it has {len(wrong)} bytes instead of {size}: {_shown(wrong)}")
    _, offsets, data = values.buffers()
    if data is None:
        return b""
    start = int.from_bytes(
        offsets[4 * values.offset : 4 * values.offset + 4].to_pybytes(), "little"
    )
    found: bytes = data[start : start + size * len(values)].to_pybytes()
    return found


def _numbers(data: bytes, code: str) -> array[int]:
    found = array(code, data)
    if sys.byteorder == "little":
        found.byteswap()
    return found


def _plain(code: str, kind: pa.DataType, values: pa.Array) -> pa.Array:
    found = _numbers(_data(values, array(code).itemsize), code)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(found)])


def _boolean(values: pa.Array) -> pa.Array:
    return compute.not_equal(_plain("b", pa.int8(), values), 0)


def _string(values: pa.Array) -> pa.Array:
    try:
        return values.cast(pa.string())
    except pa.ArrowInvalid as exc:
        raise UndecodableError("it is not UTF-8") from exc


def _millis(values: pa.Array) -> pa.Array:
    return _checked(_plain("q", pa.timestamp("ms", tz="UTC"), values).cast, TIMESTAMP)


def _checked(make: Callable[[pa.DataType], pa.Array], kind: pa.DataType) -> pa.Array:
    try:
        return make(kind)
    except pa.ArrowInvalid as exc:
        raise UndecodableError(str(exc)) from exc


def _local_date(values: pa.Array) -> pa.Array:
    days = _plain("q", pa.int64(), values)
    return _checked(days.cast, pa.int32()).cast(pa.date32())


def _time_of_day(nanos: pa.Array) -> pa.Array:
    """Convert nanoseconds of a day to microseconds."""
    inside = compute.and_(compute.greater_equal(nanos, 0), compute.less(nanos, _DAY_NS))
    if not compute.all(inside, min_count=0).as_py():
        raise UndecodableError("its value is not a time of day")
    return compute.divide(nanos, 1000)


def _local_time(values: pa.Array) -> pa.Array:
    return _time_of_day(_plain("q", pa.int64(), values)).cast(pa.time64("us"))


def _in_us(whole: pa.Array, unit_us: int, rest_us: pa.Array, kind: pa.DataType) -> pa.Array:
    try:
        us = compute.add_checked(compute.multiply_checked(whole, unit_us), rest_us)
    except pa.ArrowInvalid as exc:
        raise UndecodableError("its time is out of range") from exc
    return us.cast(kind)


def _local_date_time(values: pa.Array) -> pa.Array:
    pairs = _numbers(_data(values, 16), "q")
    days, nanos = pa.array(pairs[::2], pa.int64()), pa.array(pairs[1::2], pa.int64())
    return _in_us(days, _DAY_US, _time_of_day(nanos), LOCAL_TIMESTAMP)


def _instant(values: pa.Array) -> pa.Array:
    words = memoryview(_data(values, 12)).cast("B")
    seconds = array("q", b"".join(bytes(words[at : at + 8]) for at in range(0, len(words), 12)))
    nanos = array("i", b"".join(bytes(words[at + 8 : at + 12]) for at in range(0, len(words), 12)))
    if sys.byteorder == "little":
        seconds.byteswap()
        nanos.byteswap()
    if nanos and not 0 <= min(nanos) <= max(nanos) < 10**9:
        raise UndecodableError("its nanoseconds are out of range")
    rest = compute.divide(pa.array(nanos, pa.int64()), 1000)
    return _in_us(pa.array(seconds, pa.int64()), 1_000_000, rest, TIMESTAMP)


class _Primitive(NamedTuple):
    type: pa.DataType
    decode: Callable[[pa.Array], pa.Array]


def _number(code: str, kind: pa.DataType) -> _Primitive:
    return _Primitive(kind, lambda values: _plain(code, kind, values))


PRIMITIVES = {
    "NONE": _Primitive(pa.binary(), lambda values: values),
    "BYTES": _Primitive(pa.binary(), lambda values: values),
    "STRING": _Primitive(pa.string(), _string),
    "BOOLEAN": _Primitive(pa.bool_(), _boolean),
    "INT8": _number("b", pa.int8()),
    "INT16": _number("h", pa.int16()),
    "INT32": _number("i", pa.int32()),
    "INT64": _number("q", pa.int64()),
    "FLOAT": _number("f", pa.float32()),
    "DOUBLE": _number("d", pa.float64()),
    "DATE": _Primitive(TIMESTAMP, _millis),
    "TIME": _Primitive(TIMESTAMP, _millis),
    "TIMESTAMP": _Primitive(TIMESTAMP, _millis),
    "INSTANT": _Primitive(TIMESTAMP, _instant),
    "LOCAL_DATE": _Primitive(pa.date32(), _local_date),
    "LOCAL_TIME": _Primitive(pa.time64("us"), _local_time),
    "LOCAL_DATE_TIME": _Primitive(LOCAL_TIMESTAMP, _local_date_time),
}
"""Primitive types. ``DATE``, ``TIME`` and ``TIMESTAMP`` are all milliseconds since the epoch.
Fractions of a microsecond are cut off."""


class PrimitiveCodec(Indivisible):
    """Codec of one of :data:`PRIMITIVES`."""

    has_null = False
    undescribed = ALL_DESCRIBED

    def __init__(self, schema: TopicSchema) -> None:
        self.kind = schema.type
        self.type, self._decode = PRIMITIVES[schema.type]

    def decode(
        self,
        values: pa.Array,
        keys: pa.Array,  # noqa: ARG002
        writer: TopicSchema | None,  # noqa: ARG002
    ) -> pa.Array:
        return self._decode(values)

    def suspects(
        self,
        values: pa.Array,
        keys: pa.Array,  # noqa: ARG002
        writer: TopicSchema | None,  # noqa: ARG002
    ) -> Sequence[int]:
        return refused(values, self._read)

    def _read(self, value: bytes) -> None:
        self._decode(pa.array([value], pa.binary()))
