"""Options of ``format("keyshard")``: from Spark's texts to a source, and back."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from keyshard import Connection, KeyShardSource
from keyshard.config.connection_names import fields_of, names_of
from keyshard.config.field_types import of_type
from keyshard.config.source import SHORTHANDS
from keyshard.core.option_checks import did_you_mean
from keyshard.core.position.bounds import (
    Edge,
    bound_text,
    parse_offsets,
    parse_start,
    parse_time,
)
from keyshard.errors import ConfigError
from keyshard.redaction import shown
from spark_adapter.option_table import BATCH_OPTIONS, CLIENT, CONNECTION_OPTIONS, OPTIONS, Option

_UNITS_MS = {"": 1, "ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000}
_DURATION = re.compile(r"(?P<number>[0-9]{1,18})\s*(?P<unit>ms|s|m|min|h|)")
_BY_NAME = {option.name.lower(): option for option in OPTIONS}
_OF_BATCHES = {option.name.lower(): option for option in BATCH_OPTIONS}
_INTEGERS, _BOOLEANS = of_type(KeyShardSource, int), of_type(KeyShardSource, bool)


def parse_options(options: Mapping[str, str], *, stream: bool = True) -> KeyShardSource:
    """Make a source of Spark's options; names are case-insensitive.

    Args:
        options: Texts by name.
        stream: Whether messages are acknowledged, for which a subscription has to be named.

    Raises:
        ConfigError: An option is unknown, missing, given twice or wrong; names the option.
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
            raise ConfigError(unknown(name))
        if option.field in given:
            raise ConfigError(f"Give only one of {given[option.field]!r} and {option.name!r}.")
        given[option.field] = option.name
        fields[option.field] = _parse(option, text)
    if "topics" in given and "topics_pattern" in given:
        raise ConfigError(f"Give only one of {given['topics']!r} and 'topicsPattern'.")
    if not given.keys() & {"topics", "topics_pattern"}:
        raise ConfigError("No topic is given. Set option 'topic', 'topics' or 'topicsPattern'.")
    if stream and "subscription" not in fields:
        raise ConfigError(
            "Option 'subscription' is missing. Name the Pulsar subscription that holds the "
            "backlog of this query."
        )
    try:
        source = KeyShardSource(**_connected(fields, client))
    except ConfigError as exc:
        # Only the field's name at the start: what follows may be the user's own text.
        # Spark prints causes before the error, with names that are not those of options.
        field, space, rest = exc.message.partition(" ")
        given |= {one.field: CLIENT + one.name for one in CONNECTION_OPTIONS}
        raise ConfigError(given.get(field, field) + space + rest) from None
    if source.in_memory:
        raise ConfigError(
            f"service.url is {shown(source.service_url)}, which lives in one process; Spark reads "
            "in others. Give the URL of a broker: 'keyshard broker start' starts one."
        )
    return source


def _connected(fields: dict[str, Any], client: Mapping[str, str]) -> dict[str, Any]:
    """Fields of a source; the connection is one of them where URLs do not say it."""
    if not client:
        return fields
    said = fields_of(client)
    for name in said.keys() & SHORTHANDS:
        if fields.get(name, said[name]) != said[name]:
            raise ConfigError(f"{name} is given together with another one in {CLIENT}*. Give one.")
    kept = {name: value for name, value in fields.items() if name not in SHORTHANDS}
    shorthands = {name: value for name, value in fields.items() if name in SHORTHANDS}
    return {**kept, "connection": Connection(**shorthands, **{
        name: value for name, value in said.items() if name not in shorthands
    })}  # fmt: skip


def to_options(source: KeyShardSource) -> dict[str, str]:
    """The options that say what ``source`` says; the inverse of :func:`parse_options`.

    A secret that the source holds itself, in no file or variable, is among them.

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
            "Several topics cannot be set for Spark when one has a comma in its name."
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
            raise ConfigError(f"{name} cannot be set for Spark; leave it at {field.default!r}.")
        options[known[name]] = _text(name, value)
    return options


def _text(name: str, value: Any) -> str:
    """How a field is written as an option."""
    if name == "metadata_columns":
        return ",".join(value)
    return str(value).lower() if name in _BOOLEANS else str(value)


def options_table() -> str:
    """The table of ``docs/options.md``, in Markdown."""
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
    """The table of what a batch read has of its own, in Markdown."""
    lines = ["| option | meaning |", "|---|---|"]
    lines += [f"| `{option.name}` | {option.meaning} |" for option in BATCH_OPTIONS]
    return "\n".join(lines)


def _parse(option: Option, text: str) -> Any:
    if option.name in ("topics", "metadataColumns"):
        return [part for part in (piece.strip() for piece in text.split(",")) if part]
    if option.name in ("startingTime", "startingOffsets"):
        return _start(option.name, text)
    if option.field in _BOOLEANS:
        return truth(option.name, text)
    if option.field == "batch_delay_max_ms":
        return milliseconds(option.name, text)
    if option.field not in _INTEGERS:
        return text.upper() if option.name == "mode" else text
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"Option {option.name!r} is {shown(text)}; it must be an integer."
        ) from None


def _start(name: str, text: str) -> str:
    if name == "startingTime":
        return bound_text(parse_time(name, text))
    start = parse_offsets(name, text)
    return start.value if isinstance(start, Edge) else text


def truth(name: str, text: str) -> bool:
    """What an option says that is ``true`` or ``false``, in any case.

    Raises:
        ConfigError: It is neither.
    """
    if text.lower() not in ("true", "false"):
        raise ConfigError(f"Option {name!r} is {shown(text)}; it must be true or false.")
    return text.lower() == "true"


def milliseconds(name: str, text: str) -> int:
    """A length of time with its unit.

    Raises:
        ConfigError: It is none.
    """
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None:
        raise ConfigError(f"Option {name!r} is {shown(text)}; write for example '30s' or '15m'.")
    return int(match["number"]) * _UNITS_MS[match["unit"]]


def unknown(name: str) -> str:
    """What is wrong with an option that a stream does not have."""
    batch = _OF_BATCHES.get(name.lower())
    if batch is not None:
        return (
            f"Option {batch.name!r} is one of a batch read (spark.read), and a stream does not "
            "have it. Remove it."
        )
    hint = did_you_mean(name, [option.name for option in (*OPTIONS, *BATCH_OPTIONS)])
    hint = f"{hint} " if hint else ""
    return f"Option {shown(name)} is unknown. {hint}All options stand in docs/options.md."
