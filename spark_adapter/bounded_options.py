"""Options of a batch read, ``spark.read.format("keyshard")``; a stream has others."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from keyshard import KeyShardSource
from keyshard.core.option_checks import check_integer
from keyshard.core.position.bounds import Edge, bound_text, parse_offsets, parse_time
from keyshard.errors import ConfigError
from keyshard.redaction import shown
from spark_adapter.option_table import BATCH_OPTIONS, OF_BATCHES_TOO, OPTIONS
from spark_adapter.options import milliseconds, parse_options, truth

PARTITIONS_MAX = 100_000
"""Most Spark partitions that anybody may ask for."""
ROWS_MAX = 10**9
"""Most rows of a partition that are a limit."""

_BY_NAME = {option.name.lower(): option for option in BATCH_OPTIONS}
_OF_STREAMS = {
    option.name.lower(): option.name for option in OPTIONS if option.name not in OF_BATCHES_TOO
}


@dataclass(frozen=True)
class BoundedRead:
    """What is read, and in how many parts."""

    source: KeyShardSource
    """Topics and connection; it has no subscription."""
    start: str | Mapping[str, object] = Edge.EARLIEST
    end: str | Mapping[str, object] = Edge.LATEST
    names: tuple[tuple[str, str], ...] = ()
    """What :func:`keyshard.coordinator.bounded.plan_read` calls things, and the user."""
    disorder_max_s: float | None = None
    partitions_min: int = 1
    rows_max: int | None = None
    """Most entries of a Spark partition."""
    keys: frozenset[str] | None = None
    pushes_filters: bool = False
    """Whether filters of the query are taken from Spark."""


def is_of_streams(name: str) -> bool:
    """Whether only a stream has an option."""
    return name.lower() in _OF_STREAMS


def parse_bounded(options: Mapping[str, str]) -> BoundedRead:
    """Make a bounded read of Spark's options; names are case-insensitive.

    Raises:
        ConfigError: An option is unknown, missing, given twice, wrong, or one of streams.
    """
    found: dict[str, Any] = {}
    names: dict[str, str] = {}
    others: dict[str, str] = {}
    for name, text in options.items():
        option = _BY_NAME.get(name.lower())
        if option is not None:
            if option.field in names:
                raise ConfigError(f"Give only one of {names[option.field]!r} and {option.name!r}.")
            names[option.field] = option.name
            found[option.field] = _PARSED[option.name](option.name, text)
        elif is_of_streams(name):
            raise ConfigError(
                f"Option {_OF_STREAMS[name.lower()]!r} is one of a stream (spark.readStream), and "
                "a batch read does not have it. Remove it."
            )
        else:
            others[name] = text
    source = parse_options(others, stream=False)
    return BoundedRead(source, **found, names=tuple(names.items()))


def _time(name: str, text: str) -> str:
    return bound_text(parse_time(name, text))


def _seconds(name: str, text: str) -> float:
    return milliseconds(name, text) / 1000


def _count(name: str, text: str) -> int:
    digits = text.isascii() and text.isdigit() and len(text) < 12
    count = int(text) if digits else text
    check_integer(name, count, 1, PARTITIONS_MAX if name == "minPartitions" else ROWS_MAX)
    assert isinstance(count, int)
    return count


def _keys(name: str, text: str) -> frozenset[str]:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, list) or not given or not all(map(_is_key, given)):
        raise ConfigError(
            f'{name} is {shown(text)}; write a JSON list of keys, such as ["k1", "k2"].'
        )
    return frozenset(given)


def _is_key(given: object) -> bool:
    # JSON can say halves of characters, which no key has.
    return isinstance(given, str) and given == given.encode(errors="replace").decode()


_PARSED: dict[str, Callable[[str, str], Any]] = {
    "startingOffsets": parse_offsets,
    "endingOffsets": parse_offsets,
    "startingTime": _time,
    "endingTime": _time,
    "maxTimeDisorder": _seconds,
    "minPartitions": _count,
    "maxRowsPerPartition": _count,
    "keys": _keys,
    "pushFilters": truth,
}
