"""Bounds of a bounded read, as users write them: positions and publish times.

A bound is ``"earliest"``, ``"latest"``, a position ``ledger:entry`` or ``ledger:entry:index`` as in
column ``__messageId``, or a time. The start is inclusive, the end exclusive. So the end of one read
is the start of the next.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from enum import Enum
from typing import TypeAlias

from keyshard.base_error import one_line
from keyshard.core.message import MessageId
from keyshard.core.position.entry import TopicPartition, full_topic_name
from keyshard.core.position.ledger import Ledger
from keyshard.errors import ConfigError, NonPersistentTopicError
from keyshard.redaction import listed, shown

SECONDS_BELOW_MS = 10**11
"""Positive numbers below this are refused as times: as milliseconds they mean before 1973, so
they are probably seconds."""
_TIME_MS_END = 253_402_300_800_000
"""Start of the year 10,000, milliseconds since the epoch."""
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_ID = re.compile(r"(\d{1,19}):(\d{1,19})(?::(\d{1,9}))?", re.ASCII)
_TIME = re.compile(
    r"(\d{4}-\d\d-\d\d)(?:[T ](\d\d:\d\d)(?:(:\d\d)(?:\.(\d{1,6})\d*)?)?)?(Z|[+-]\d\d:?\d\d)?",
    re.ASCII | re.IGNORECASE,
)


class Edge(str, Enum):
    """An end of the stored data."""

    EARLIEST = "earliest"
    LATEST = "latest"
    """After the last entry at the time of planning."""


Bound: TypeAlias = Edge | MessageId | int
"""An integer is a publish time, milliseconds since the epoch."""
_WANTED = (
    "Write 'earliest', 'latest', a position 'ledger:entry' or 'ledger:entry:index', or a time: a "
    "datetime, '2026-11-21T08:00:00+01:00' or milliseconds since 1970 as an int."
)


def parse_bounds(
    name: str, given: object, topic_partitions: Collection[TopicPartition]
) -> dict[TopicPartition, Bound]:
    """Parse the bound of each topic partition.

    Args:
        name: The option, for errors.
        given: One bound for all, or a mapping from the name of each topic partition to its bound.
        topic_partitions: All topic partitions of the read.

    Raises:
        ConfigError: A bound is malformed; a topic partition has none, or is not part of the read;
            or a single position is given for several topic partitions.
    """
    if isinstance(given, Mapping):
        return _by_partition(name, given, topic_partitions)
    bound = parse_bound(name, given)
    if isinstance(bound, MessageId) and len(topic_partitions) > 1:
        raise ConfigError(
            f"{name} is {shown(given)}, but {len(topic_partitions)} topic partitions are read, "
            "and a position belongs to one of them.",
            f"Write a dict with a position for each, such as {{'{min(topic_partitions)}': "
            f"'{bound}', ...}}.",
        )
    return dict.fromkeys(topic_partitions, bound)


def _by_partition(
    name: str, given: Mapping[object, object], topic_partitions: Collection[TopicPartition]
) -> dict[TopicPartition, Bound]:
    known, found = set(topic_partitions), dict[TopicPartition, Bound]()
    for key, value in given.items():
        topic_partition = _topic_partition(name, key)
        if topic_partition not in known:
            raise ConfigError(
                f"{name} names {topic_partition}, which is not part of the read.",
                f"Choose from: {listed(sorted(known))}.",
            )
        if topic_partition in found:
            raise ConfigError(f"{name} names {topic_partition} twice.", "Name it once.")
        found[topic_partition] = parse_bound(f"{name} of {topic_partition}", value)
    if missing := sorted(known - found.keys()):
        raise ConfigError(
            f"{name} has no position for {listed(missing)}.",
            "Name every topic partition. A position may also be 'earliest' or 'latest'.",
        )
    return found


def _topic_partition(name: str, key: object) -> TopicPartition:
    if isinstance(key, TopicPartition):
        return key
    try:
        return TopicPartition.parse(full_topic_name(key if isinstance(key, str) else ""))
    except (ConfigError, NonPersistentTopicError) as exc:
        raise ConfigError(
            f"{name} has the key {shown(key)}.",
            "Name a topic partition, such as 'persistent://public/default/orders-partition-0'.",
        ) from exc


def parse_bound(name: str, given: object) -> Bound:
    """Parse one bound.

    Raises:
        ConfigError: The value is no bound.
    """
    if isinstance(given, datetime):
        return _milliseconds(name, given)
    if type(given) is int:
        return _number(name, given)
    if isinstance(given, MessageId):
        given = str(given)
    if isinstance(given, str):
        text = given.strip()
        if (bound := _edge_or_id(text)) is not None:
            return bound
        if match := _TIME.fullmatch(text):
            return _time(name, text, match)
    raise ConfigError(f"{name} is {shown(given)}.", _WANTED)


def _edge_or_id(text: str) -> Edge | MessageId | None:
    if text.lower() in (Edge.EARLIEST.value, Edge.LATEST.value):
        return Edge(text.lower())
    if match := _ID.fullmatch(text):
        ledger, entry, index = map(int, match.groups(default="0"))
        if max(ledger, entry) < 2**63:
            return MessageId(ledger, entry, index)
    return None


def parse_position(name: str, given: object) -> Edge | MessageId:
    """Parse an edge or a position. Times are refused.

    Raises:
        ConfigError: The value is neither.
    """
    bound = _edge_or_id(given.strip()) if isinstance(given, str) else None
    if bound is not None:
        return bound
    raise ConfigError(
        f"{name} is {shown(given)}.",
        "Write 'earliest', 'latest', or a position 'ledger:entry' or 'ledger:entry:index'.",
    )


def parse_offsets(name: str, given: str) -> Edge | dict[str, Edge | MessageId]:
    """Parse one edge for all topic partitions, or JSON with an edge or position for each.

    Raises:
        ConfigError: The text is neither, or names a topic partition twice.
    """
    if not given.lstrip().startswith("{"):
        bound = parse_position(name, given)
        if isinstance(bound, Edge):
            return bound
        raise ConfigError(
            f"{name} is {shown(given)}, but a position belongs to one topic partition.",
            "Write JSON with every topic partition of the read, such as "
            f'{{"orders-partition-0": "{bound}"}}.',
        )

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found: dict[str, object] = {}
        for key, one in pairs:
            if key in found:
                raise ConfigError(f"{name} names {shown(key)} twice.", "Name it once.")
            found[key] = one
        return found

    try:
        parsed = json.loads(given, object_pairs_hook=once)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as exc:
        raise ConfigError(
            f"{name} is {shown(given)}, which is not JSON: {exc}.",
            "Write 'earliest', 'latest', or {\"orders-partition-0\": \"7:120\"}.",
        ) from None
    return {key: parse_position(f"{name} of {shown(key)}", one) for key, one in parsed.items()}


def parse_start(name: str, given: object) -> Edge | int | dict[str, Edge | MessageId]:
    """Parse the start of a subscription: an edge, positions, or a publish time.

    Raises:
        ConfigError: The value is none of these.
    """
    text = given.strip() if isinstance(given, str) else ""
    if _TIME.fullmatch(text):
        return parse_time(name, text)
    if text not in (Edge.EARLIEST.value, Edge.LATEST.value) and not text.startswith("{"):
        raise ConfigError(
            f"{name} is {shown(given)}.",
            "Write 'earliest' or 'latest', a position for each topic partition as JSON such as "
            '{"orders-partition-0": "7:120"}, or a time with its zone such as '
            "'2026-11-21T08:00:00+01:00'.",
        )
    return parse_offsets(name, text)


def parse_time(name: str, given: str) -> int:
    """Parse an unambiguous time, and return milliseconds since the epoch.

    Raises:
        ConfigError: The text is no time, or has no zone.
    """
    text = given.strip()
    if re.fullmatch(r"\d{1,18}", text, re.ASCII):
        return _number(name, int(text))
    match = _TIME.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{name} is {shown(given)}, which is not a time.",
            "Write '2026-11-21T08:00:00+01:00', or milliseconds since 1970.",
        )
    if match[5] is None:
        raise ConfigError(
            f"{name} is {shown(given)}, which has no time zone.",
            "Add 'Z' for UTC, or an offset such as '+01:00'.",
        )
    return _time(name, text, match)


def _number(name: str, given: int) -> int:
    if 0 < given < SECONDS_BELOW_MS:
        raise ConfigError(
            f"{name} is {given}. In milliseconds since 1970, this is the year "
            f"{_EPOCH.year + given // 31557600000}.",
            "If it is in seconds, multiply it by 1000. Otherwise use a datetime.",
        )
    if not 0 <= given < _TIME_MS_END:
        raise ConfigError(f"{name} is {shown(given)}, which is not a time.", _WANTED)
    return given


def _time(name: str, text: str, match: re.Match[str]) -> int:
    day, minutes, seconds, fraction, zone = match.groups()
    zone = (zone or "Z").upper()
    offset = "+00:00" if zone == "Z" else f"{zone[:3]}:{zone[-2:]}"
    clock = f"{minutes or '00:00'}{seconds or ':00'}.{(fraction or '0').ljust(6, '0')}"
    try:
        return _milliseconds(name, datetime.fromisoformat(f"{day}T{clock}{offset}"))
    except ValueError as exc:
        raise ConfigError(
            f"{name} is {shown(text)}, which is not a time: {one_line(exc)}.", _WANTED
        ) from exc


def _milliseconds(name: str, moment: datetime) -> int:
    """Return a time in milliseconds since the epoch, rounded up.

    Publish times are whole milliseconds, so rounding up selects exactly those at or after the time.
    A time without a zone is in UTC.
    """
    try:
        aware = moment if moment.utcoffset() is not None else moment.replace(tzinfo=timezone.utc)
        microseconds = (aware - _EPOCH) // timedelta(microseconds=1)
    except (ValueError, OverflowError, TypeError) as exc:
        raise ConfigError(
            f"{name} is {shown(moment)}, which is not a time: {one_line(exc)}."
        ) from exc
    # No message was published before 1970, or after the last year that a datetime can express.
    return min(max(0, -(-microseconds // 1_000)), _TIME_MS_END - 1)


def check_order(
    starts: Mapping[TopicPartition, Bound], ends: Mapping[TopicPartition, Bound]
) -> None:
    """Check that no start is after its end, if both are times or both are positions.

    Raises:
        ConfigError: A start is after its end.
    """
    for topic_partition, start in starts.items():
        end = ends[topic_partition]
        comparable = type(start) is type(end) and not isinstance(start, Edge)
        if (comparable and start > end) or (start, end) == (Edge.LATEST, Edge.EARLIEST):  # type: ignore[operator]
            raise ConfigError(
                f"start of {topic_partition} is {bound_text(start)}, after its end "
                f"{bound_text(end)}.",
                "Correct one of them.",
            )


def fixed(bound: Bound, ledgers: Sequence[Ledger]) -> Bound:
    """Return a bound that later messages do not move.

    ``latest``, or a position beyond the stored data, becomes the end of the stored data. So the
    read does not include entries that come later.
    """
    if isinstance(bound, int) or bound is Edge.EARLIEST:
        return bound
    if not ledgers:
        return Edge.EARLIEST
    behind = MessageId(ledgers[-1].id, ledgers[-1].entries, 0)
    return behind if isinstance(bound, Edge) else min(bound, behind)


def bound_text(bound: Bound) -> str:
    """Return a bound as readable text."""
    if isinstance(bound, int):
        return (_EPOCH + timedelta(milliseconds=bound)).isoformat()
    return bound.value if isinstance(bound, Edge) else str(bound)
