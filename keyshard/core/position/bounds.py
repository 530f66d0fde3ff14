"""Where a bounded read begins and ends, as users write it: positions and publish times.

A bound is ``"earliest"``, ``"latest"``, a position ``ledger:entry`` or ``ledger:entry:index`` as
column ``__messageId`` has it, or a time. A read takes what lies from its start up to, and without,
its end; so the end of one read is the start of the next.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from enum import Enum
from typing import TypeAlias

from keyshard.core.message import MessageId
from keyshard.core.position.entry import TopicPartition, full_topic_name
from keyshard.core.position.ledger import Ledger
from keyshard.errors import ConfigError, NonPersistentTopicError
from keyshard.redaction import shown

SECONDS_BELOW_MS = 10**11
"""Numbers below, but 0, are taken for seconds by mistake: as milliseconds they mean before 1973."""
_TIME_MS_END = 253_402_300_800_000
"""Milliseconds of the year 10,000."""
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_ID = re.compile(r"(\d{1,19}):(\d{1,19})(?::(\d{1,9}))?", re.ASCII)
_TIME = re.compile(
    r"(\d{4}-\d\d-\d\d)(?:[T ](\d\d:\d\d)(?:(:\d\d)(?:\.(\d{1,6})\d*)?)?)?(Z|[+-]\d\d:?\d\d)?",
    re.ASCII | re.IGNORECASE,
)


class Edge(str, Enum):
    """An end of what is stored."""

    EARLIEST = "earliest"
    LATEST = "latest"
    """Behind the last entry at the time of planning."""


Bound: TypeAlias = Edge | MessageId | int
"""An integer is a publish time, milliseconds since the epoch."""
_WANTED = (
    "write 'earliest', 'latest', a position 'ledger:entry' or 'ledger:entry:index', or a time: a "
    "datetime, '2026-11-21T08:00:00+01:00' or milliseconds since 1970 as an int"
)


def parse_bounds(
    name: str, given: object, topic_partitions: Collection[TopicPartition]
) -> dict[TopicPartition, Bound]:
    """The bound of each topic partition.

    Args:
        name: The option, for errors.
        given: One bound for all, or one for each topic partition by its name.
        topic_partitions: All that are read.

    Raises:
        ConfigError: It is no bound; a topic partition has none, or is none of those that are read;
            or it is one position for several.
    """
    if isinstance(given, Mapping):
        return _by_partition(name, given, topic_partitions)
    bound = parse_bound(name, given)
    if isinstance(bound, MessageId) and len(topic_partitions) > 1:
        raise ConfigError(
            f"{name} is {shown(given)}, but {len(topic_partitions)} topic partitions are read and "
            "a position is one of a single one. Give a dict with a position for each, such as "
            f"{{'{min(topic_partitions)}': '{bound}', ...}}."
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
                f"{name} names {topic_partition}, which is not read. Read are: "
                f"{_listed(sorted(known))}."
            )
        if topic_partition in found:
            raise ConfigError(f"{name} names {topic_partition} twice. Name it once.")
        found[topic_partition] = parse_bound(f"{name} of {topic_partition}", value)
    if missing := sorted(known - found.keys()):
        raise ConfigError(
            f"{name} says nothing of {_listed(missing)}. Name every topic partition; 'earliest' "
            "and 'latest' may stand for a position."
        )
    return found


def _topic_partition(name: str, key: object) -> TopicPartition:
    if isinstance(key, TopicPartition):
        return key
    try:
        return TopicPartition.parse(full_topic_name(key if isinstance(key, str) else ""))
    except (ConfigError, NonPersistentTopicError) as exc:
        raise ConfigError(
            f"{name} has the key {shown(key)}; name a topic partition, such as "
            "'persistent://public/default/orders-partition-0'."
        ) from exc


def _listed(topic_partitions: Collection[TopicPartition]) -> str:
    names = [topic_partition.name for topic_partition in topic_partitions]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def parse_bound(name: str, given: object) -> Bound:
    """One bound.

    Raises:
        ConfigError: It is none.
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
    raise ConfigError(f"{name} is {shown(given)}; {_WANTED}.")


def _edge_or_id(text: str) -> Edge | MessageId | None:
    if text.lower() in (Edge.EARLIEST.value, Edge.LATEST.value):
        return Edge(text.lower())
    if match := _ID.fullmatch(text):
        ledger, entry, index = map(int, match.groups(default="0"))
        if max(ledger, entry) < 2**63:
            return MessageId(ledger, entry, index)
    return None


def parse_position(name: str, given: object) -> Edge | MessageId:
    """An edge or a position, and no time.

    Raises:
        ConfigError: It is something else.
    """
    bound = _edge_or_id(given.strip()) if isinstance(given, str) else None
    if bound is not None:
        return bound
    raise ConfigError(
        f"{name} is {shown(given)}; write 'earliest', 'latest', or a position 'ledger:entry' or "
        "'ledger:entry:index'."
    )


def parse_offsets(name: str, given: str) -> Edge | dict[str, Edge | MessageId]:
    """One edge for all topic partitions, or JSON with an edge or position for each.

    Raises:
        ConfigError: It is something else; a topic partition is named twice.
    """
    if not given.lstrip().startswith("{"):
        bound = parse_position(name, given)
        if isinstance(bound, Edge):
            return bound
        raise ConfigError(
            f"{name} is {shown(given)}, and a position is one of a single topic partition. Write "
            f'JSON such as {{"orders-partition-0": "{bound}"}}, with all that are read.'
        )

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found: dict[str, object] = {}
        for key, one in pairs:
            if key in found:
                raise ConfigError(f"{name} names {shown(key)} twice. Name it once.")
            found[key] = one
        return found

    try:
        parsed = json.loads(given, object_pairs_hook=once)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as exc:
        raise ConfigError(
            f"{name} is {shown(given)}, which is no JSON: {exc}. Write 'earliest', 'latest', or "
            '{"orders-partition-0": "7:120"}.'
        ) from None
    return {key: parse_position(f"{name} of {shown(key)}", one) for key, one in parsed.items()}


def parse_start(name: str, given: object) -> Edge | int | dict[str, Edge | MessageId]:
    """Where a subscription begins: an edge, positions, or a publish time.

    Raises:
        ConfigError: It is something else.
    """
    text = given.strip() if isinstance(given, str) else ""
    if _TIME.fullmatch(text):
        return parse_time(name, text)
    if text not in (Edge.EARLIEST.value, Edge.LATEST.value) and not text.startswith("{"):
        raise ConfigError(
            f"{name} is {shown(given)}; write 'earliest' or 'latest', a position for each topic "
            'partition as JSON such as {"orders-partition-0": "7:120"}, or a time with its zone '
            "such as '2026-11-21T08:00:00+01:00'."
        )
    return parse_offsets(name, text)


def parse_time(name: str, given: str) -> int:
    """A time as a text says it without doubt.

    Raises:
        ConfigError: It is none, or says no zone.
    """
    text = given.strip()
    if re.fullmatch(r"\d{1,18}", text, re.ASCII):
        return _number(name, int(text))
    match = _TIME.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{name} is {shown(given)}, which is no time; write '2026-11-21T08:00:00+01:00', or "
            "milliseconds since 1970."
        )
    if match[5] is None:
        raise ConfigError(
            f"{name} is {shown(given)}, which says no zone. Add 'Z' for UTC, or an offset such as "
            "'+01:00'."
        )
    return _time(name, text, match)


def _number(name: str, given: int) -> int:
    if 0 < given < SECONDS_BELOW_MS:
        raise ConfigError(
            f"{name} is {given}, which is in {_EPOCH.year + given // 31_557_600_000} as "
            "milliseconds since 1970. If it is seconds, multiply it by 1000; else give a datetime."
        )
    if not 0 <= given < _TIME_MS_END:
        raise ConfigError(f"{name} is {shown(given)}, which is no time; {_WANTED}.")
    return given


def _time(name: str, text: str, match: re.Match[str]) -> int:
    day, minutes, seconds, fraction, zone = match.groups()
    zone = (zone or "Z").upper()
    offset = "+00:00" if zone == "Z" else f"{zone[:3]}:{zone[-2:]}"
    clock = f"{minutes or '00:00'}{seconds or ':00'}.{(fraction or '0').ljust(6, '0')}"
    try:
        return _milliseconds(name, datetime.fromisoformat(f"{day}T{clock}{offset}"))
    except ValueError as exc:
        raise ConfigError(f"{name} is {shown(text)}, which is no time: {exc}; {_WANTED}.") from exc


def _milliseconds(name: str, moment: datetime) -> int:
    """Publish times are whole milliseconds: what is at or after a moment is so after rounding up.

    A time without a zone is one of UTC.
    """
    try:
        aware = moment if moment.utcoffset() is not None else moment.replace(tzinfo=timezone.utc)
        microseconds = (aware - _EPOCH) // timedelta(microseconds=1)
    except (ValueError, OverflowError, TypeError) as exc:
        raise ConfigError(f"{name} is {shown(moment)}, which is no time: {exc}.") from exc
    # Nothing was published before 1970, or behind what a datetime can say.
    return min(max(0, -(-microseconds // 1_000)), _TIME_MS_END - 1)


def check_order(
    starts: Mapping[TopicPartition, Bound], ends: Mapping[TopicPartition, Bound]
) -> None:
    """Check that no start is after its end, where both are times, or both positions.

    Raises:
        ConfigError: One is.
    """
    for topic_partition, start in starts.items():
        end = ends[topic_partition]
        comparable = type(start) is type(end) and not isinstance(start, Edge)
        if (comparable and start > end) or (start, end) == (Edge.LATEST, Edge.EARLIEST):  # type: ignore[operator]
            raise ConfigError(
                f"start of {topic_partition} is {bound_text(start)}, after its end, which is "
                f"{bound_text(end)}. Exchange them, or correct one."
            )


def fixed(bound: Bound, ledgers: Sequence[Ledger]) -> Bound:
    """A bound that stays where it is: for ``latest`` the position behind all that is stored.

    So it is for a position that is ahead of that: what comes until then lies behind it.
    """
    if isinstance(bound, int) or bound is Edge.EARLIEST:
        return bound
    if not ledgers:
        return Edge.EARLIEST
    behind = MessageId(ledgers[-1].id, ledgers[-1].entries, 0)
    return behind if isinstance(bound, Edge) else min(bound, behind)


def bound_text(bound: Bound) -> str:
    """A bound as people read it."""
    if isinstance(bound, int):
        return (_EPOCH + timedelta(milliseconds=bound)).isoformat()
    return bound.value if isinstance(bound, Edge) else str(bound)
