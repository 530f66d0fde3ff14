"""The status of a source as text."""

# ruff: noqa: PLC0415 - each command imports its modules when it runs, so that --help is fast.
from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from keyshard.cli.output import (
    ERROR_MAX,
    duration,
    newest_error,
    pace,
    plain,
    plural,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from keyshard.coordinator.progress import Progress, SourceWorker
    from keyshard.core.lanes.lane_status import HandlerSlots
    from keyshard.core.range_watchdog import Stalled
    from keyshard.observe.status_types import Lag, PartitionStatus, RangeStatus, Status

Row = TypeVar("Row")
SUMMARY_FROM = 50
"""Number of ranges, or topic partitions, from which on they are summarised."""
_TROUBLED_MAX = 10
_KEY_MAX = 60
"""Most characters of a hot key."""
_PARKED_MAX = 10
_NAMED_MAX = 5
_SOURCE_WORKERS_MAX = 8
RATES_OVER = 5
"""Number of looks over which rates are computed."""
_STYLES = {
    "stalled": "red",
    "disconnected": "red",
    "blocked": "yellow",
    "draining": "yellow",
    "paused": "yellow",
    "running": "green",
    "idle": "dim",
}


def source_facts(status: Status) -> list[str]:
    return [
        status["state"],
        pace(status["rates"]["received"]),
        _lag(status["lag"]),
        duration(status["uptimeSeconds"]),
        newest_error(status["newestError"]),
    ]


def _lag(lag: Lag) -> str:
    """Return a lag in rows and seconds with its trend, and the age by the broker, as known."""
    rows, seconds = lag["rows"], lag["seconds"]
    parts = [] if rows is None else [f"{rows:,} rows"]
    if rows is None and lag["entries"] is not None:
        parts = [f"{lag['entries']:,} entries"]
    parts += [] if seconds is None else [f"{seconds:.1f} s"]
    parts += [] if lag["trend"] is None else [lag["trend"]]
    broker_s = lag["brokerSeconds"]
    parts += [] if broker_s is None else [f"{broker_s:.0f} s as measured by the broker"]
    return ", ".join(parts) or "-"


def status_view(status: Status, rates: Rates | None, *, all_ranges: bool | None) -> RenderableType:
    from rich.console import Group
    from rich.markup import escape
    from rich.text import Text

    # Short parts come first: a terminal may be too low for all ranges.
    parts: list[RenderableType] = [
        Text(_head(status)),
        Text(f"lag {_lag(status['lag'])}; up for {duration(status['uptimeSeconds'])}"),
        Text(_counts(status)),
    ]
    if status["newestError"]:
        parts.append(Text(f"newest error: {newest_error(status['newestError'])}", style="yellow"))
    if status["hotKeys"]:
        keys = ", ".join(
            f"{plain(repr(one['key']), _KEY_MAX)} {one['share']:.1%}" for one in status["hotKeys"]
        )
        parts.append(Text(f"hot keys: {keys}"))
    if rates is not None:
        parts.append(Text(_paces(status, rates)))
    parts += map(Text, _of_window(status["window"]))
    circuit = status["circuit"]
    if circuit is not None and circuit["state"] != "closed":
        parts.append(
            Text(
                f"handlers paused for {circuit['forSeconds']:.0f} s, because most keys fail "
                f"({circuit['keysFailing']} of the last {circuit['keysTried']} keys): "
                f"{plain(circuit['error'], ERROR_MAX)}",
                style="red",
            )
        )
    rate = status["rateLimit"]
    if rate is not None and rate["holdsBack"]:
        parts.append(
            Text(
                f"handlers are held back by rate_limit, {rate['perSecond']:,g} messages per "
                f"second: {rate['heldBackSeconds']:,.0f} s since the start",
                style="yellow",
            )
        )
    named = [each["key"] for each in status["parked"][:_PARKED_MAX]]
    if named:
        names = ", ".join(map(repr, named))
        left = (status["parkedKeys"] or 0) - len(named)
        more = f" and {left:,} more" if left else ""
        parts.append(Text.from_markup(f"[yellow]parked[/]: {escape(names)}{more}"))
    if status["malformedDeadLetters"]:
        text = f"malformed dead letters, not replayed: {status['malformedDeadLetters']:,}"
        parts.append(Text(text, style="yellow"))
    parts += _named(
        [
            f"{_name_of(each)} receives nothing: {plain(each['error'], ERROR_MAX)}"
            for each in status["partitions"]
            if each["error"]
        ],
        "topic partitions receive nothing",
    )
    parts += _stalls(status)
    known = any(not each["unknown"] for each in status["partitions"])
    if status["brokerError"] and known:
        parts.append(Text(f"broker facts are outdated: {status['brokerError']}", style="yellow"))
    return Group(*parts, *_tables(status, rates, all_ranges), *_unknown(status["partitions"]))


def _tables(status: Status, rates: Rates | None, all_ranges: bool | None) -> list[RenderableType]:
    """Return the parts of a status that have a row for each of many things."""
    parts = _handler_slots(status["handlerSlots"], all_ranges)
    parts += _table_of(
        status["ranges"], partial(_ranges, rates=rates), _ranges_summary,
        lambda each: each["state"] not in ("running", "idle"), all_ranges,
    )  # fmt: skip
    parts += _table_of(
        status["partitions"], _partitions, _partitions_summary,
        lambda each: not each["covered"] or each["stalled"] is not None, all_ranges,
    )  # fmt: skip
    return parts


def _unknown(rows: list[PartitionStatus]) -> list[RenderableType]:
    """Return why numbers of the broker are unknown, a line for each reason."""
    from rich.text import Text

    lines = []
    reasons = Counter(each["unknown"] for each in rows if each["unknown"])
    for reason, count in reasons.most_common(_NAMED_MAX):
        some = f" for {count:,} of {plural(len(rows), 'topic partition')}"
        which = some if count < len(rows) else ""
        text = f"numbers of the broker{which} are unknown (-): {plain(reason, ERROR_MAX)}"
        lines.append(Text(text))
    return list(lines)


def _handler_slots(slots: list[HandlerSlots], whole: bool | None) -> list[RenderableType]:
    """Return a row for each process or actor, or a line for threads or coroutines."""
    from rich.text import Text

    if not slots:
        return []
    if all(one["handled"] is None for one in slots):
        return [Text(_slots_summary(slots))]
    return _table_of(
        slots, _slots_table, _slots_summary,
        lambda one: one["state"] == "starting" or one["stalled"] is not None, whole,
    )  # fmt: skip


def _slots_summary(slots: list[HandlerSlots]) -> str:
    used = sum(one["used"] for one in slots)
    totals = [one["total"] for one in slots if one["total"] is not None]
    of = f" of {sum(totals):,}" if totals else ""
    starting = sum(one["state"] == "starting" for one in slots)
    stalled = sum(one["stalled"] is not None for one in slots)
    troubles = {"starting": starting, "stalled": stalled}
    text = [f"{count:,} {name}" for name, count in troubles.items() if count]
    return ", ".join([f"handler slots used: {used:,}{of}", *text])


def _slots_table(slots: list[HandlerSlots]) -> RenderableType:
    from rich.markup import escape
    from rich.table import Table

    table = Table("handler slot", "process", "slots", "state", "waiting", "in flight", "for",
                  "handled", "restarts")  # fmt: skip
    for one in slots:
        seconds = one["runningSeconds"]
        table.add_row(
            str(one["index"]),
            "-" if one["pid"] is None else escape(f"{one['pid']} on {one['host']}"),
            one["hashRange"] or "-",
            one["state"] if one["stalled"] is None else "stalled",
            _count(one["waiting"]),
            _count(one["inFlight"]),
            "-" if seconds is None else f"{seconds:.1f} s",
            _count(one["handled"]),
            _count(one["restarts"]),
        )
    return table


def _named(troubles: list[str], others: str) -> list[RenderableType]:
    """Return a line for each of the first troubles, and the number of others."""
    from rich.text import Text

    more = len(troubles) - _NAMED_MAX
    rest = [f"{more} more {others}"] if more > 0 else []
    return [Text(line, style="red") for line in troubles[:_NAMED_MAX] + rest]


def _stalls(status: Status) -> list[RenderableType]:
    """Return the stalled topic partitions and actors, and the sections of the runbook."""
    from rich.text import Text

    from keyshard.core.range_watchdog import runbook_section, stall_alert

    partitions = [(_name_of(each), each["stalled"]) for each in status["partitions"]]
    actors = [(f"actor {each['index']}", each["stalled"]) for each in status["handlerSlots"]]
    ranges = [each["stalled"] for each in status["ranges"]]
    stalls = (*ranges, *(stalled for _, stalled in (*partitions, *actors)))
    kinds = dict.fromkeys(plain(stalled["kind"]) for stalled in stalls if stalled is not None)
    where = [
        Text(f"runbook for {kind}: {runbook_section(stall_alert(kind))}", style="yellow")
        for kind in kinds
    ]
    return [
        *_named(_stall_texts(partitions), "topic partitions are stalled"),
        *_named(_stall_texts(actors), "actors are stalled"),
        *where,
    ]


def _stall_texts(stalls: Iterable[tuple[str, Stalled | None]]) -> list[str]:
    """Return a line for each stall, by the name of what is stalled."""
    return [
        f"{name} is stalled for {stalled['forSeconds']:.0f} s: "
        f"{plain(stalled['reason'], ERROR_MAX)} ({plain(stalled['kind'])})"
        for name, stalled in stalls
        if stalled is not None
    ]


def _table_of(
    rows: list[Row],
    table: Callable[[list[Row]], RenderableType],
    summary: Callable[[list[Row]], str],
    in_trouble: Callable[[Row], bool],
    whole: bool | None,
) -> list[RenderableType]:
    """Return all rows or, if they are many, a summary and the first rows in trouble."""
    from rich.text import Text

    if len(rows) < SUMMARY_FROM if whole is None else whole:
        return [table(rows)]
    troubled = list(filter(in_trouble, rows))
    text = summary(rows)
    if len(troubled) > _TROUBLED_MAX:
        text += f"; the first {_TROUBLED_MAX} of {len(troubled):,} in trouble"
    text += " (--all-ranges shows each)"
    return [Text(text), *([table(troubled[:_TROUBLED_MAX])] if troubled else [])]


def _ranges_summary(rows: list[RangeStatus]) -> str:
    states = Counter(each["state"] for each in rows)
    counts = ", ".join(f"{states[state]:,} {state}" for state in _STYLES if states[state])
    waiting = [each["waiting"] for each in rows if each["waiting"] is not None]
    running = [each["inFlight"] for each in rows if each["inFlight"] is not None]
    work = f"; waiting {sum(waiting):,}, in flight {sum(running):,}" if waiting else ""
    ages = [
        each["oldestUnacknowledgedMillis"]
        for each in rows
        if each["oldestUnacknowledgedMillis"] is not None
    ]
    oldest = f", oldest {max(ages) / 1000:.1f} s" if ages else ""
    return f"{plural(len(rows), 'range')}: {counts}{work}{oldest}"


def _partitions_summary(rows: list[PartitionStatus]) -> str:
    known = [each["backlog"] for each in rows if each["backlog"] is not None]
    backlog = sum(known) if known and len(known) == len(rows) else None
    gaps = sum(not each["covered"] for each in rows)
    stalled = sum(each["stalled"] is not None for each in rows)
    return (
        f"{plural(len(rows), 'topic partition')}: backlog "
        f"{_number(backlog)}, {gaps:,} with slots without a consumer"
        f", {stalled:,} stalled"
    )


def _head(status: Status) -> str:
    topics = status["topicsPattern"] or ", ".join(status["topics"])
    decoder = f" ({status['decoder']})" if status["decoder"] else ""
    return (
        f"{status['state']}: {_called(status)} on {topics} at {status['serviceUrl']}: "
        f"{plural(len(status['ranges']), 'range')} x {plural(status['lanes'], 'lane')}, "
        f"{plural(status['workers'], 'worker')} ({status['executor']}), epoch {status['epoch']}, "
        f"{status['transport']}{decoder}, "
        f"pid {status['pid']} on {status['host']}"
    )


def _called(status: Status) -> str:
    name, subscription = status["name"], status["subscription"]
    return repr(name) if name == subscription else f"{name!r}, subscription {subscription!r},"


def _of_window(window: Progress | None) -> list[str]:
    if window is None:
        return []
    waiting = window["segmentsWaiting"]
    lines = [f"segments that wait for their parents: {waiting:,}"] if waiting else []
    return lines + ([_source_workers(window["sourceWorkers"])] if window["sourceWorkers"] else [])


def _source_workers(all_of_them: list[SourceWorker]) -> str:
    shown = [
        f"{one['kind']} {one['pid']} on {one['host']} ({plural(one['consumers'], 'consumer')}, for "
        f"{one['forSeconds']:.0f} s, {plural(one['restarts'], 'restart')})"
        if one["pid"] is not None
        else f"{one['kind']} missing for {one['forSeconds']:.0f} s"
        for one in all_of_them[:_SOURCE_WORKERS_MAX]
    ]
    more = len(all_of_them) - len(shown)
    return "received by " + "; ".join(shown) + (f"; and {more} more" if more else "")


def _counts(status: Status) -> str:
    counters, window = status["counters"], status["window"]
    dropped = window["duplicatesDropped"] if window else 0
    if counters["completed"] is None:
        acknowledged = window["entriesAcknowledged"] if window else 0
        return (
            f"received {_received(status) or 0:,} rows, acknowledged {acknowledged:,} entries, "
            f"redeliveries dropped {dropped:,}"
        )
    counts = {
        "completed": counters["completed"],
        "failed attempts": counters["failedAttempts"],
        "rejected": counters["rejected"],
        "parked": counters["parked"],
        "dead letters": counters["deadLettered"],
        "redeliveries dropped": dropped,
    }
    # A Ray job rejects and parks nothing.
    return ", ".join(f"{name} {count:,}" for name, count in counts.items() if count is not None)


def _received(status: Status) -> int | None:
    return status["window"]["rowsReceived"] if status["window"] else None


def _paces(status: Status, rates: Rates) -> str:
    received = rates.of(_received)
    if status["counters"]["completed"] is None:
        return f"per second: received {pace(received)}"
    completed = rates.of(lambda status: status["counters"]["completed"])
    failed = rates.of(lambda status: status["counters"]["failedAttempts"])
    return (
        f"per second: received {pace(received)}, completed {pace(completed)}, failed attempts "
        f"{pace(failed)}"
    )


def _handled(index: int) -> Callable[[Status], int | None]:
    return lambda status: next(
        (each["handled"] for each in status["ranges"] if each["index"] == index), None
    )


def _ranges(rows: list[RangeStatus], rates: Rates | None) -> RenderableType:
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    paces = [] if rates is None else ["handled/s"]
    table = Table("range", "slots", "state", "waiting", "in flight", *paces, "oldest", "blocked by")
    for each in rows:
        state = each["state"]
        oldest = each["oldestUnacknowledgedMillis"]
        table.add_row(
            str(each["index"]),
            escape(" ".join(each["hashRanges"])),
            Text(state, _STYLES.get(state, "")),
            _count(each["waiting"]),
            _count(each["inFlight"]),
            *([] if rates is None else [pace(rates.of(_handled(each["index"])))]),
            "-" if oldest is None else f"{oldest / 1000:.1f} s",
            escape(plain(_why(each), ERROR_MAX)),
        )
    return table


def _count(count: int | None) -> str:
    return "-" if count is None else f"{count:,}"


def _why(each: RangeStatus) -> str:
    key = each["blockedBy"]
    stalled = each["stalled"]
    if stalled is not None:
        return f"{stalled['reason']} ({stalled['kind']}, for {stalled['forSeconds']:.0f} s)"
    if key is None:
        return each["reason"]
    name = "no key" if key["key"] is None else f"key {key['key']!r}"
    return f"{name}, message {key['messageId']}, attempt {key['attempts'] + 1}: {key['reason']}"


def _partitions(rows: list[PartitionStatus]) -> RenderableType:
    from rich.markup import escape
    from rich.table import Table

    table = Table("topic partition", "lag", "backlog", "ring", "ack gaps", "replay queue")
    for each in rows:
        ring = (
            "whole" if each["covered"] else f"[red]no consumer: {escape(' '.join(each['gaps']))}[/]"
        )
        table.add_row(
            escape(_name_of(each)),
            _lag(each["lag"]),
            _number(each["backlog"]),
            ring,
            _limited(each["ackGaps"], each["ackGapsMax"], each),
            _limited(each["replay"], each["replayMax"], each),
        )
    return table


def _limited(count: int | None, most: int | None, each: PartitionStatus) -> str:
    assumed = " (assumed)" if each["limitsAssumed"] else ""
    return f"{_number(count)} / {_number(most)}{assumed}"


def _name_of(each: PartitionStatus) -> str:
    number = each["partition"]
    return each["topic"] if number < 0 else f"{each['topic']}-partition-{number}"


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


class Rates:
    """Rates between the first and the last of a few statuses of a source."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, Status]] = deque(maxlen=RATES_OVER + 1)

    def look(self, now_s: float, status: Status) -> None:
        """Take a status, and the time of its request."""
        if self._looks and self._looks[-1][1].get("epoch") != status.get("epoch"):
            self._looks.clear()  # after a rescale there are other ranges, which count from 0
        self._looks.append((now_s, status))

    def of(self, count: Callable[[Status], int | None]) -> float | None:
        """Return the growth of a counter per second; ``None`` while it is unknown."""
        if len(self._looks) < 2:
            return None
        (began_s, first), (now_s, last) = self._looks[0], self._looks[-1]
        before, after = count(first), count(last)
        if before is None or after is None or now_s <= began_s:
            return None
        return max(0, after - before) / (now_s - began_s)
