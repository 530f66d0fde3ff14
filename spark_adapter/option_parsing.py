"""Options of ``format("keyshard")``: parse Spark's texts to a source or a batch read."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from keyshard import Connection, KeyShardSource
from keyshard.config.connection_names import NAMES, fields_of, names_of
from keyshard.config.field_types import of_type
from keyshard.config.segments import BROKER, BYTES_IN_FLIGHT, Segments, check_bytes_in_flight
from keyshard.config.source import SHORTHANDS
from keyshard.core.option_checks import (
    check_folder,
    check_integer,
    did_you_mean,
    duration_ms,
    is_key,
)
from keyshard.core.position.read_bounds import (
    Edge,
    bound_text,
    parse_offsets,
    parse_start,
    parse_time,
)
from keyshard.errors import ConfigError
from keyshard.redaction import shown
from spark_adapter.error_text import renamed
from spark_adapter.options import (
    BATCH_OPTIONS,
    CLIENT,
    CONNECTION_OPTIONS,
    OF_BATCHES_TOO,
    OPTIONS,
    Option,
)

_BY_NAME = {option.name.lower(): option for option in OPTIONS}
_OF_BATCHES = {option.name.lower(): option for option in BATCH_OPTIONS}
_INTEGERS, _BOOLEANS = of_type(KeyShardSource, int), of_type(KeyShardSource, bool)


def parse_options(options: Mapping[str, str], *, stream: bool = True) -> KeyShardSource:
    """Parse Spark's options to a source; names are case-insensitive.

    Args:
        options: Texts by name.
        stream: Whether the read is a stream, which needs a subscription.

    Raises:
        ConfigError: An option is unknown, missing, given twice or wrong. The error names it.
    """
    fields: dict[str, Any] = {}
    given: dict[str, str] = {}
    client: dict[str, str] = {}
    for name, text in options.items():
        if name.lower().startswith(CLIENT):
            client[name[len(CLIENT) :]] = text
            continue
        option = _BY_NAME.get(name.lower())
        if option is None:
            raise unknown(name)
        if option.field in given:
            raise ConfigError(
                f"{given[option.field]!r} and {option.name!r} are both given.",
                "Give only one of them.",
            )
        given[option.field] = option.name
        fields[option.field] = _parse(option, text)
    if "topics" in given and "topics_pattern" in given:
        raise ConfigError(
            f"{given['topics']!r} and 'topicsPattern' are both given.", "Give only one of them."
        )
    if not given.keys() & {"topics", "topics_pattern"}:
        raise ConfigError("No topic is given.", "Set option 'topic', 'topics' or 'topicsPattern'.")
    if stream and "subscription" not in fields:
        raise ConfigError(
            "Option 'subscription' is missing.",
            "Set it to the Pulsar subscription that holds the backlog of this query.",
        )
    try:
        source = KeyShardSource(**_connected(fields, client))
    except ConfigError as exc:
        # Without the cause: Spark prints causes first, and this one has names of fields, not of
        # options.
        given |= {one.field: CLIENT + one.name for one in CONNECTION_OPTIONS}
        raise exc.with_text(renamed(exc.problem, given), exc.remedy) from None
    if source.in_memory:
        raise ConfigError(
            f"service.url is {shown(source.service_url)}, an in-memory cluster that only one "
            "process can reach, but Spark reads in several.",
            "Use the URL of a broker: 'keyshard broker start' starts one.",
        )
    return source


def _connected(fields: dict[str, Any], client: Mapping[str, str]) -> dict[str, Any]:
    """Add the ``pulsar.client.*`` options to the fields of a source, as its connection."""
    if not client:
        return fields
    said = fields_of(client)
    check_shorthands(fields, said)
    kept = {name: value for name, value in fields.items() if name not in SHORTHANDS}
    shorthands = {name: value for name, value in fields.items() if name in SHORTHANDS}
    return {**kept, "connection": Connection(**shorthands, **{
        name: value for name, value in said.items() if name not in shorthands
    })}  # fmt: skip


def check_shorthands(fields: Mapping[str, Any], said: Mapping[str, Any]) -> None:
    """Check that fields have the values that ``pulsar.client.*`` options give them.

    Args:
        fields: Values of other options, by field.
        said: Values of the ``pulsar.client.*`` options, by field.

    Raises:
        ConfigError: A field has two values. The error begins with its name.
    """
    for java, name in NAMES.items():
        if name in SHORTHANDS and name in said and fields.get(name, said[name]) != said[name]:
            raise ConfigError(
                f"{name} and {CLIENT}{java} have different values.", "Give only one of them."
            )


def to_options(source: KeyShardSource) -> dict[str, str]:
    """Return the Spark options of a source; the inverse of :func:`parse_options`.

    If the source holds a secret itself, the options contain it.

    Raises:
        ConfigError: A field without an option differs from its default, or one of several topics
            has a comma in its name.
    """
    fields = {field.name: field for field in dataclasses.fields(source)}
    if source.topics_pattern is not None:
        options = {}
    elif len(source.topics) == 1:
        options = {"topic": source.topics[0]}
    elif any("," in topic for topic in source.topics):
        raise ConfigError(
            "The name of a topic contains a comma, so several topics cannot be passed to Spark.",
            "Read this topic alone.",
        )
    else:
        options = {"topics": ",".join(source.topics)}
    known = {option.field: option.name for option in reversed(OPTIONS)}
    if isinstance(parse_start("starting_position", source.starting_position), int):
        known["starting_position"] = "startingTime"
    if source.connection is not None:
        said = {option.name for option in CONNECTION_OPTIONS}
        options |= {
            CLIENT + name: text
            for name, text in names_of(source.connection).items()
            if name in said
        }
    for name, field in fields.items():
        value = getattr(source, name)
        if name in ("topics", "connection") or value == field.default:
            continue
        if name not in known:
            raise ConfigError(f"{name} cannot be set for Spark.", f"Leave it at {field.default!r}.")
        options[known[name]] = _text(name, value)
    return options


def _text(name: str, value: Any) -> str:
    """Write the value of a field as an option."""
    if name == "metadata_columns":
        return ",".join(value)
    return str(value).lower() if name in _BOOLEANS else str(value)


def options_table() -> str:
    """Return the options table of ``docs/options.md``, in Markdown."""
    defaults = {field.name: field.default for field in dataclasses.fields(KeyShardSource)}
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for option in OPTIONS:
        default = defaults[option.field]
        none = default in (None, ()) or option.name == "startingTime"
        shown = "" if none else f"`{default}`"
        shown = shown.lower() if option.field in _BOOLEANS else shown
        lines.append(f"| `{option.name}` | {shown} | {option.meaning} |")
    plain = Connection()
    for option in CONNECTION_OPTIONS:
        value = getattr(plain, option.field)
        shown = "" if value is None else f"`{str(value).lower()}`"
        lines.append(f"| `{CLIENT}{option.name}` | {shown} | {option.meaning} |")
    return "\n".join(lines)


def batch_options_table() -> str:
    """Return the table of the options that only a batch read has, in Markdown."""
    lines = ["| option | meaning |", "|---|---|"]
    lines += [f"| `{option.name}` | {option.meaning} |" for option in BATCH_OPTIONS]
    return "\n".join(lines)


def _parse(option: Option, text: str) -> Any:
    if option.name in ("topics", "metadataColumns"):
        return parts_of(text)
    if option.name in ("startingTime", "startingOffsets"):
        return _start(option.name, text)
    if option.field in _BOOLEANS:
        return truth(option.name, text)
    if option.field == "batch_delay_max_ms":
        return milliseconds(option.name, text)
    if option.field not in _INTEGERS:
        return text.upper() if option.name == "mode" else text
    return integer(option.name, text)


def _start(name: str, text: str) -> str:
    if name == "startingTime":
        return bound_text(parse_time(name, text))
    start = parse_offsets(name, text)
    return start.value if isinstance(start, Edge) else text


def truth(name: str, text: str) -> bool:
    """Parse ``true`` or ``false``, in any case.

    Raises:
        ConfigError: The text is neither.
    """
    if text.lower() not in ("true", "false"):
        raise ConfigError(f"Option {name!r} is {shown(text)}; it must be true or false.")
    return text.lower() == "true"


def integer(name: str, text: str) -> int:
    """Parse an integer.

    Raises:
        ConfigError: The text is not an integer.
    """
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"Option {name!r} is {shown(text)}; it must be an integer.") from None


def parts_of(text: str) -> list[str]:
    """Return the parts of a text that commas separate, without empty ones."""
    return [part for part in (piece.strip() for piece in text.split(",")) if part]


def milliseconds(name: str, text: str) -> int:
    """Parse a duration with its unit to milliseconds.

    Raises:
        ConfigError: The text is not a duration.
    """
    found = duration_ms(text.strip().lower(), unit="ms")
    if found is None:
        raise ConfigError(
            f"Option {name!r} is {shown(text)}.",
            "Write a time with a unit, such as '30s' or '15m'.",
        )
    return found


def unknown(name: str) -> ConfigError:
    """Return the error for an option that a stream does not have."""
    batch = _OF_BATCHES.get(name.lower())
    if batch is not None:
        return ConfigError(
            f"Option {batch.name!r} belongs to batch reads (spark.read), not to streams.",
            "Remove it.",
        )
    hint = did_you_mean(name, [option.name for option in (*OPTIONS, *BATCH_OPTIONS)])
    hint = f"{hint} " if hint else ""
    return ConfigError(f"Option {shown(name)} is unknown.", f"{hint}See docs/options.md.")


# -- Options of a batch read -----------------------------------------------------------------------

PARTITIONS_MAX = 100_000
"""Largest value of ``minPartitions``."""
ROWS_MAX = 10**9
"""Largest value of ``maxRowsPerPartition``."""

_OF_STREAMS = {
    option.name.lower(): option.name for option in OPTIONS if option.name not in OF_BATCHES_TOO
}


@dataclass(frozen=True)
class BoundedRead:
    """A batch read: its topics, its bounds, and the number of its parts."""

    source: KeyShardSource
    """Topics and connection, without a subscription."""
    start: str | Mapping[str, object] = Edge.EARLIEST
    end: str | Mapping[str, object] = Edge.LATEST
    names: tuple[tuple[str, str], ...] = ()
    """Option names by argument of :func:`keyshard.reading.split_planner.plan_read`, for errors."""
    disorder_max_s: float | None = None
    partitions_min: int = 1
    rows_max: int | None = None
    """Most entries of a Spark partition."""
    keys: frozenset[str] | None = None
    ledger_index: str | None = dataclasses.field(default=None, repr=False)
    """fsspec URL of the index of closed ledgers."""
    bytes_in_flight_max: int = BYTES_IN_FLIGHT
    """Most entries that a task receives ahead, bytes."""
    segments: Segments = dataclasses.field(default_factory=Segments)
    report_to: int | None = None
    """Accumulator to which tasks report how they got their entries."""
    pushes_filters: bool = False
    """Whether the reader takes filters from Spark."""


def is_of_streams(name: str) -> bool:
    """Whether only a stream has the option."""
    return name.lower() in _OF_STREAMS


def parse_bounded(options: Mapping[str, str]) -> BoundedRead:
    """Parse Spark's options to a batch read; names are case-insensitive.

    Raises:
        ConfigError: An option is unknown, missing, given twice or wrong, or belongs to a stream.
    """
    found: dict[str, Any] = {}
    names: dict[str, str] = {}
    others: dict[str, str] = {}
    for name, text in options.items():
        option = _OF_BATCHES.get(name.lower())
        if option is not None:
            if option.field in names:
                raise ConfigError(
                    f"{names[option.field]!r} and {option.name!r} are both given.",
                    "Give only one of them.",
                )
            names[option.field] = option.name
            found[option.field] = _PARSED[option.name](option.name, text)
        elif is_of_streams(name):
            raise ConfigError(
                f"Option {_OF_STREAMS[name.lower()]!r} belongs to streams (spark.readStream), not "
                "to batch reads.",
                "Remove it.",
            )
        else:
            others[name] = text
    source = parse_options(others, stream=False)
    said = {
        name: found.pop(name)
        for name in list(found)
        if name.startswith("bookies_") or name == "offloads"
    }
    segments = Segments(found.pop("segments", BROKER), **said)
    return BoundedRead(source, **found, segments=segments, names=tuple(names.items()))


def _time(name: str, text: str) -> str:
    return bound_text(parse_time(name, text))


def _seconds(name: str, text: str) -> float:
    return milliseconds(name, text) / 1000


def _number(text: str) -> int | str:
    """Parse an integer. Return any other text unchanged, so that a later check refuses it."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 12 else text


def _count(name: str, text: str) -> int:
    count = _number(text)
    check_integer(name, count, 1, PARTITIONS_MAX if name == "minPartitions" else ROWS_MAX)
    assert isinstance(count, int)
    return count


def _bytes_in_flight(name: str, text: str) -> int:
    count = _number(text)
    check_bytes_in_flight(count, name)
    assert isinstance(count, int)
    return count


def accumulator_id(name: str, text: str) -> int:
    """Parse the ``id`` of a ``ReadReports`` or a ``WriteReports``.

    Args:
        name: The option: ``readReports`` or ``writeReports``.
        text: Its value.

    Raises:
        ConfigError: The text is not an id.
    """
    if text.isascii() and text.isdigit() and len(text) < 19:
        return int(text)
    kind = name[:1].upper() + name[1:]
    raise ConfigError(
        f"{name} is {shown(text)}.", f"Give the id of a spark_adapter.{kind}, or remove it."
    )


def _keys(name: str, text: str) -> frozenset[str]:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, list) or not given or not all(map(is_key, given)):
        raise ConfigError(
            f"{name} is {shown(text)}.", 'Write a JSON list of keys, such as ["k1", "k2"].'
        )
    return frozenset(given)


def _plain(name: str, text: str) -> str:  # noqa: ARG001 - one signature for all options
    return text


def _addresses(name: str, text: str) -> dict[str, str]:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise ConfigError(
            f"{name} is {shown(text)}.",
            "Write a JSON object with an address for each bookie, such as "
            '{"bookie-0:3181": "10.0.0.1:3181"}.',
        )
    return given


_PARSED: dict[str, Callable[[str, str], Any]] = {
    "startingOffsets": parse_offsets,
    "endingOffsets": parse_offsets,
    "startingTime": _time,
    "endingTime": _time,
    "maxTimeDisorder": _seconds,
    "minPartitions": _count,
    "maxRowsPerPartition": _count,
    "keys": _keys,
    "ledgerIndex": check_folder,
    "maxBytesInFlight": _bytes_in_flight,
    "segments": _plain,
    "offloads": _plain,
    "bookies.map": _addresses,
    "bookies.trustCertsFilePath": _plain,
    "bookies.certificateFilePath": _plain,
    "bookies.keyFilePath": _plain,
    "bookies.hostnameVerification": truth,
    "readReports": accumulator_id,
    "pushFilters": truth,
}
