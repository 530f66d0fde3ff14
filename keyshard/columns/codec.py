"""The codec protocol, and the search for rows that a codec cannot decode."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Protocol

import pyarrow as pa
from pyarrow import compute

from keyshard.base_error import first_line
from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import ConfigError

ALL_DESCRIBED: Mapping[str, str] = MappingProxyType({})
AS_BYTES = "Set valueFormat=raw to get the bytes."
"""Remedy of schemas that keyshard does not decode."""
INSTALL = "pip install 'keyshard[schemas]'"
_PARTS = 8
"""Number of parts into which values are divided if one of them cannot be decoded. With fewer parts,
most values are decoded three times. With more, the last values are decoded one by one."""
_TOGETHER = 8_192
"""Most values that are decoded together. With more, the first results leave the processor's caches
before they are used (docs/adr/0023)."""
_LOOKED_AT = 256
"""Most values that are checked one by one for those that cannot be decoded."""
_Rows = range | list[int]


class UndecodableError(Exception):
    """The reason why values cannot be decoded; for a single value, its own reason."""


class Codec(Protocol):
    """Decodes values of one schema."""

    kind: str
    """Pulsar's name of the schema type."""
    type: pa.DataType
    """Type of a decoded value; the fields of a struct become columns."""
    has_null: bool
    """Whether a message without a value can be decoded; if not, null stays null."""
    undescribed: Mapping[str, str]
    """Fields that are not in :attr:`type`, because the schema does not say how they are stored:
    their paths, and the reasons."""

    def decode(self, values: pa.Array, keys: pa.Array, writer: TopicSchema | None) -> pa.Array:
        """Decode all values together.

        Args:
            values: Payloads; without null unless :attr:`has_null`.
            keys: The partition keys of the messages, as the bytes that the producer set.
            writer: The schema that they were written with; ``None``: this one.

        Raises:
            UndecodableError: One of them cannot be decoded.
        """

    def suspects(
        self, values: pa.Array, keys: pa.Array, writer: TopicSchema | None
    ) -> Sequence[int]:
        """Return the rows that probably prevent the values from being decoded together.

        This is a cheap hint. :meth:`decode` decides for both the named and the other rows.

        Args:
            values: As for :meth:`decode`.
            keys: As for :meth:`decode`.
            writer: As for :meth:`decode`.

        Returns:
            Rows, ascending; empty if the codec cannot tell.
        """

    def readable(
        self, values: pa.Array, keys: pa.Array, writer: TopicSchema | None
    ) -> pa.Array | None:
        """Decode what can be read of values that cannot be decoded.

        Args:
            values: As for :meth:`decode`.
            keys: As for :meth:`decode`.
            writer: As for :meth:`decode`.

        Returns:
            The values, with null for each part that cannot be read; ``None`` if there is none.
        """


class Indivisible:
    """Base of codecs whose values are read as a whole or not at all."""

    def readable(self, values: pa.Array, keys: pa.Array, writer: TopicSchema | None) -> None:
        """Return ``None``: there is nothing to read."""


def refused(values: pa.Array, read: Callable[[bytes], object]) -> list[int]:
    """Return the rows of the values for which ``read`` raises any exception."""
    found = []
    for row, value in enumerate(values.to_pylist()):
        try:
            read(value)
        except Exception:  # noqa: BLE001, PERF203 - each value is tried; any exception counts
            found.append(row)
    return found


def library(name: str, purpose: str) -> Any:
    """Import a module of an optional package.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        package = name.partition(".")[0]
        raise ConfigError(
            f"{purpose} needs the package {package}, which is not installed.",
            f"Install it here and on the executors: {INSTALL}. Or set valueFormat=raw to get the "
            "bytes.",
        ) from exc


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Turn panics of compiled packages into errors: some lengths and some schemas cause them.

    Raises:
        ValueError: A package panicked. The panic itself is no :class:`Exception`, and would end the
            process.
    """
    try:
        yield
    except BaseException as exc:
        if type(exc).__name__ != "PanicException":
            raise
        raise ValueError(f"its decoder failed: {first_line(exc)}") from exc


def decode_rows(
    codec: Codec,
    values: pa.Array,
    keys: pa.Array,
    writer: TopicSchema | None = None,
    *,
    in_parts: bool = False,
) -> tuple[pa.Array, dict[int, str]]:
    """Decode values. A value that cannot be decoded becomes null, with a reason.

    A null value stays null, unless the codec decodes messages without a value.

    Up to 8,192 values are decoded together. If that fails, each eighth of them is decoded again, so
    one bad value about doubles the time. If a part of at most 256 values fails, the codec names the
    likely bad ones, so the time for each bad value does not grow with their number.

    Args:
        codec: Decodes the values.
        values: Payloads.
        keys: As for :meth:`Codec.decode`.
        writer: As for :meth:`Codec.decode`.
        in_parts: Whether the fields that can be read of a value that cannot be decoded are kept.

    Returns:
        (decoded values, reasons by row, ascending).
    """
    if values.null_count and not codec.has_null:
        there = values.is_valid()
        rows = compute.indices_nonzero(there)
        decoded, wrong = decode_rows(
            codec, values.take(rows), keys.take(rows), writer, in_parts=in_parts
        )
        return spread(decoded, there), {rows[row].as_py(): why for row, why in wrong.items()}
    if writer is not None and writer.type != codec.kind:
        why = f"it was written as {writer.type}"
        return pa.nulls(len(values), codec.type), dict.fromkeys(range(len(values)), why)
    reasons: dict[int, str] = {}
    decoded_parts: list[pa.Array] = []
    for start in range(0, len(values), _TOGETHER):
        some = slice(start, start + _TOGETHER)
        part, wrong = _decode_together(codec, values[some], keys[some], writer, in_parts=in_parts)
        decoded_parts.append(part)
        reasons |= {start + row: why for row, why in wrong.items()}
    if len(decoded_parts) == 1:
        return decoded_parts[0], reasons
    return pa.concat_arrays([*decoded_parts, pa.nulls(0, codec.type)]), reasons


def _decode_together(
    codec: Codec,
    values: pa.Array,
    keys: pa.Array,
    writer: TopicSchema | None,
    *,
    in_parts: bool,
) -> tuple[pa.Array, dict[int, str]]:
    """Decode values as :func:`decode_rows`, beginning with all of them together."""
    reasons: dict[int, str] = {}
    parts: list[tuple[_Rows, pa.Array]] = []
    left: list[_Rows] = [range(len(values))]
    while left:
        tried = left.pop()
        some_values, some_keys = _some(values, tried), _some(keys, tried)
        try:
            parts.append((tried, codec.decode(some_values, some_keys, writer)))
        except UndecodableError as exc:
            if len(tried) == 1:
                reasons[tried[0]] = str(exc)
                continue
            suspects: Sequence[int] = ()
            if len(tried) <= _LOOKED_AT:
                suspects = codec.suspects(some_values, some_keys, writer)
            left += _apart(tried, suspects)
    if reasons and in_parts:
        malformed = sorted(reasons)
        rest = codec.readable(_some(values, malformed), _some(keys, malformed), writer)
        if rest is not None:
            parts.append((malformed, rest))
    return _joined(codec, parts, len(values)), dict(sorted(reasons.items()))


def _some(values: pa.Array, rows: _Rows) -> pa.Array:
    if isinstance(rows, range):
        return values.slice(rows.start, len(rows))
    return values.take(pa.array(rows, pa.int64()))


def _apart(rows: _Rows, suspects: Sequence[int]) -> list[_Rows]:
    """Return the parts to try next, the last one first."""
    if suspects:
        doubted = set(suspects)
        rest = [row for place, row in enumerate(rows) if place not in doubted]
        alone: list[_Rows] = [[rows[place]] for place in suspects]
        return [rest, *alone] if rest else alone
    size = -(-len(rows) // _PARTS)
    return [rows[at : at + size] for at in range(0, len(rows), size)]


def _joined(codec: Codec, parts: list[tuple[_Rows, pa.Array]], count: int) -> pa.Array:
    """Put decoded values into their rows; the other rows are null."""
    if len(parts) == 1 and len(parts[0][0]) == count:
        return parts[0][1]
    if not parts:
        return pa.nulls(count, codec.type)
    places: list[int | None] = [None] * count
    at = 0
    for rows, _ in parts:
        for place, row in enumerate(rows, at):
            places[row] = place
        at += len(rows)
    return pa.concat_arrays([part for _, part in parts]).take(pa.array(places, pa.int64()))


def spread(values: pa.Array, there: pa.Array) -> pa.Array:
    """Put values into the rows where ``there`` is true; the other rows are null."""
    numbers = compute.subtract(compute.cumulative_sum(there.cast(pa.int64())), 1)
    return values.take(compute.if_else(there, numbers, pa.scalar(None, pa.int64())))
