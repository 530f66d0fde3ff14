"""What decodes values, and which rows it cannot."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import pyarrow as pa
from pyarrow import compute

from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import ConfigError

INSTALL = "pip install 'keyshard[schemas]'"


class UndecodableError(Exception):
    """Why values cannot be decoded; of one value where only one was given."""


class Codec(Protocol):
    """Decodes values of one schema."""

    type: pa.DataType
    """Of a decoded value; a struct becomes columns."""
    has_null: bool
    """Whether a message without a value has something to decode; else null is null."""

    def decode(self, values: pa.Array, keys: pa.Array, writer: TopicSchema | None) -> pa.Array:
        """Decode all values together.

        Args:
            values: Payloads; without null unless :attr:`has_null`.
            keys: Partition keys of the messages as text.
            writer: The schema they were written with; ``None``: this one.

        Raises:
            UndecodableError: One of them cannot be decoded.
        """


def library(name: str, purpose: str) -> Any:
    """A module of an optional package.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        package = name.partition(".")[0]
        raise ConfigError(
            f"{purpose} needs the package {package}, which is not installed: {INSTALL}, also on "
            "the executors; or set valueFormat=raw to get the bytes.",
        ) from exc


def decode_rows(
    codec: Codec, values: pa.Array, keys: pa.Array, writer: TopicSchema | None = None
) -> tuple[pa.Array, dict[int, str]]:
    """Decode values; null stays null, but for a key beside it. What cannot be decoded is null,
    and it is said why.

    All are tried together. Where one fails the halves are, so that one bad value among many costs
    about as much again as all the others.

    Returns:
        (decoded values, reasons by row).
    """
    if values.null_count and not codec.has_null:
        there = values.is_valid()
        rows = compute.indices_nonzero(there)
        decoded, wrong = decode_rows(codec, values.take(rows), keys.take(rows), writer)
        return spread(decoded, there), {rows[row].as_py(): why for row, why in wrong.items()}
    reasons: dict[int, str] = {}
    parts: list[pa.Array] = []
    left = [(0, len(values))]
    while left:
        start, count = left.pop()
        try:
            parts.append(codec.decode(values.slice(start, count), keys.slice(start, count), writer))
        except UndecodableError as exc:
            if count == 1:
                reasons[start] = str(exc)
                parts.append(pa.nulls(1, codec.type))
                continue
            half = count // 2
            left += [(start + half, count - half), (start, half)]
    if len(parts) == 1:
        return parts[0], reasons
    return pa.concat_arrays(parts or [pa.nulls(0, codec.type)]), reasons


def spread(values: pa.Array, there: pa.Array) -> pa.Array:
    """Values in the rows where one is, null in the others."""
    numbers = compute.subtract(compute.cumulative_sum(there.cast(pa.int64())), 1)
    return values.take(compute.if_else(there, numbers, pa.scalar(None, pa.int64())))
