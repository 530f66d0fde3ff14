"""What decodes values, and which rows it cannot."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Protocol

import pyarrow as pa
from pyarrow import compute

from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import ConfigError
from keyshard.redaction import first_line

NOTHING_UNTOLD: Mapping[str, str] = MappingProxyType({})
INSTALL = "pip install 'keyshard[schemas]'"
_PARTS = 8
"""Into how many parts values go of which one cannot be decoded: of few, all values but a few are
decoded three times, of many the last ones one by one."""


class UndecodableError(Exception):
    """Why values cannot be decoded; of one value where only one was given."""


class Codec(Protocol):
    """Decodes values of one schema."""

    kind: str
    """Pulsar's name of the type of its schema."""
    type: pa.DataType
    """Of a decoded value; a struct becomes columns."""
    has_null: bool
    """Whether a message without a value has something to decode; else null is null."""
    untold: Mapping[str, str]
    """Fields that are not in :attr:`type`, since its schema does not tell how they are stored:
    their paths, and why."""

    def decode(self, values: pa.Array, keys: pa.Array, writer: TopicSchema | None) -> pa.Array:
        """Decode all values together.

        Args:
            values: Payloads; without null unless :attr:`has_null`.
            keys: The bytes that partition keys of the messages were set as.
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


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Inside, compiled packages may panic: over some lengths that cannot be, and some schemas.

    Raises:
        ValueError: One did. What it raises is no :class:`Exception`, and would end a process.
    """
    try:
        yield
    except BaseException as exc:
        if type(exc).__name__ != "PanicException":
            raise
        raise ValueError(f"its decoder gave up: {first_line(exc)}") from exc


def decode_rows(
    codec: Codec, values: pa.Array, keys: pa.Array, writer: TopicSchema | None = None
) -> tuple[pa.Array, dict[int, str]]:
    """Decode values; null stays null, but for a key beside it. What cannot be decoded is null,
    and it is said why.

    All are tried together. Where one fails the eighths are, so that one bad value among many costs
    about as much again as all the others.

    Returns:
        (decoded values, reasons by row).
    """
    if values.null_count and not codec.has_null:
        there = values.is_valid()
        rows = compute.indices_nonzero(there)
        decoded, wrong = decode_rows(codec, values.take(rows), keys.take(rows), writer)
        return spread(decoded, there), {rows[row].as_py(): why for row, why in wrong.items()}
    if writer is not None and writer.type != codec.kind:
        why = f"it was written as {writer.type}"
        return pa.nulls(len(values), codec.type), dict.fromkeys(range(len(values)), why)
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
            size = -(-count // _PARTS)
            left += [
                (at, min(size, start + count - at))
                for at in reversed(range(start, start + count, size))
            ]
    if len(parts) == 1:
        return parts[0], reasons
    return pa.concat_arrays(parts or [pa.nulls(0, codec.type)]), reasons


def spread(values: pa.Array, there: pa.Array) -> pa.Array:
    """Values in the rows where one is, null in the others."""
    numbers = compute.subtract(compute.cumulative_sum(there.cast(pa.int64())), 1)
    return values.take(compute.if_else(there, numbers, pa.scalar(None, pa.int64())))
