"""``keyshard status``: what a running source does, range by range."""

# ruff: noqa: PLC0415 - what a command needs is imported when it runs, so that --help is fast.
from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from keyshard.cli import watching
from keyshard.cli.connecting import ClientConfOption, source_of, sources_of
from keyshard.cli.output import JsonOption, PidOption, ServiceUrlOption, console, plural

if TYPE_CHECKING:
    from rich.console import RenderableType

    from keyshard.coordinator.progress import SourceWorker
    from keyshard.observe.control import RunningSource
    from keyshard.observe.status_types import PartitionStatus, RangeStatus, Status

Row = TypeVar("Row")

SUMMARY_FROM = 50
"""Ranges, or topic partitions, from which on they are summarised."""
_TROUBLED_MAX = 10
_PARKED_MAX = 10
_REFUSED_MAX = 5
_SOURCE_WORKERS_MAX = 8
_STYLES = {
    "stalled": "red",
    "disconnected": "red",
    "blocked": "yellow",
    "draining": "yellow",
    "paused": "yellow",
    "running": "green",
    "idle": "dim",
}


def status(  # noqa: PLR0917 - one argument per option
    subscription: Annotated[
        str | None, typer.Argument(help="Subscription of the source; default: the only one.")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Again every second, with rates, until it stops.")
    ] = False,
    all_ranges: Annotated[
        bool | None,
        typer.Option(
            "--all-ranges/--summary",
            help="A line for each range and topic partition, or how many are in which state and "
            f"those in trouble; default: a summary of {SUMMARY_FROM} or more.",
        ),
    ] = None,
    service_url: ServiceUrlOption = None,
    client_conf: ClientConfOption = None,
    pid: PidOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show ranges, topic partitions, parked keys and counts of a source that runs here.

    If several sources match, it lists them.
    """

    if not (watch or as_json):
        found = sources_of(subscription, service_url, client_conf, pid)
        if len(found) > 1:
            console().print(listed(found))
            typer.echo("Name one: keyshard status SUBSCRIPTION, or --pid.", err=True)
            return
    source = source_of(subscription, service_url, client_conf, pid)

    def view(told: Status, rates: watching.Rates | None = None) -> RenderableType:
        return _view(told, rates, all_ranges=all_ranges)

    if watch:
        watching.watch(source, view, as_json=as_json)
        return
    told: Status = source.ask("status")
    if as_json:
        typer.echo(json.dumps(told, indent=2))
        return
    with source.read():
        console().print(view(told))


def ps(
    service_url: ServiceUrlOption = None,
    client_conf: ClientConfOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the sources of this user that run on this machine."""

    found = sources_of(None, service_url, client_conf, None)
    if as_json:
        facts = [
            {
                "pid": one.pid, "subscription": one.subscription, "topics": one.topics,
                "serviceUrl": one.service_url,
            }
            for one in found
        ]  # fmt: skip
        typer.echo(json.dumps(facts, indent=2))
    elif found:
        console().print(listed(found))
    else:
        typer.echo("No source runs.")


def listed(sources: list[RunningSource]) -> RenderableType:
    """A line for each of some sources."""
    from rich.markup import escape
    from rich.table import Table

    table = Table("pid", "subscription", "topics", "cluster")
    for one in sources:
        table.add_row(str(one.pid), *map(escape, (one.subscription, one.topics, one.service_url)))
    return table


def _view(told: Status, rates: watching.Rates | None, *, all_ranges: bool | None) -> RenderableType:
    from rich.console import Group
    from rich.markup import escape
    from rich.text import Text

    # What is short stands first: a terminal may be too low for all ranges.
    parts: list[RenderableType] = [Text(_head(told)), Text(_counts(told))]
    if rates is not None:
        parts.append(Text(_paces(told, rates)))
    if told["window"] and told["window"]["sourceWorkers"]:
        parts.append(Text(_source_workers(told["window"]["sourceWorkers"])))
    circuit = told["circuit"]
    if circuit["state"] != "closed":
        parts.append(
            Text(
                f"handlers pause for {circuit['forSeconds']:.0f} s, because most keys fail "
                f"({circuit['keysFailing']} of the {circuit['keysTried']} tried last): "
                f"{circuit['error']}",
                style="red",
            )
        )
    named = [each["key"] for each in told["parked"][:_PARKED_MAX]]
    if named:
        names = ", ".join(map(repr, named))
        left = told["parkedKeys"] - len(named)
        more = f" and {left:,} more" if left else ""
        parts.append(Text.from_markup(f"[yellow]parked[/]: {escape(names)}{more}"))
    if told["malformedLetters"]:
        text = f"malformed dead letters, which are not replayed: {told['malformedLetters']:,}"
        parts.append(Text(text, style="yellow"))
    refused = [each for each in told["partitions"] if each["error"]]
    for each in refused[:_REFUSED_MAX]:
        text = f"{_name_of(each)} is not received from: {each['error']}"
        parts.append(Text(text, style="red"))
    if len(refused) > _REFUSED_MAX:
        parts.append(Text(f"nor are {len(refused) - _REFUSED_MAX} more", style="red"))
    if told["brokerError"]:
        parts.append(Text(f"broker facts are old: {told['brokerError']}", style="yellow"))
    parts += _table_of(
        told["ranges"], partial(_ranges, rates=rates), _ranges_summary,
        lambda each: each["state"] not in ("running", "idle"), all_ranges,
    )  # fmt: skip
    parts += _table_of(
        told["partitions"], _partitions, _partitions_summary,
        lambda each: not each["covered"], all_ranges,
    )  # fmt: skip
    return Group(*parts)


def _table_of(
    rows: list[Row],
    table: Callable[[list[Row]], RenderableType],
    summary: Callable[[list[Row]], str],
    in_trouble: Callable[[Row], bool],
    whole: bool | None,
) -> list[RenderableType]:
    """All rows, or where they are many a line about them and the first of those in trouble."""
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
    waiting, running = sum(each["waiting"] for each in rows), sum(each["inFlight"] for each in rows)
    ages = [
        each["oldestUnacknowledgedMillis"]
        for each in rows
        if each["oldestUnacknowledgedMillis"] is not None
    ]
    oldest = f", oldest {max(ages) / 1000:.1f} s" if ages else ""
    return (
        f"{plural(len(rows), 'range')}: {counts}; waiting {waiting:,}, in flight {running:,}"
        f"{oldest}"
    )


def _partitions_summary(rows: list[PartitionStatus]) -> str:
    backlogs = [each["backlog"] for each in rows if each["backlog"] is not None]
    gaps = sum(not each["covered"] for each in rows)
    return (
        f"{plural(len(rows), 'topic partition')}: backlog "
        f"{_number(sum(backlogs) if backlogs else None)}, {gaps:,} with gaps in the ring"
    )


def _head(told: Status) -> str:
    topics = told["topicsPattern"] or ", ".join(told["topics"])
    decoder = f" ({told['decoder']})" if told["decoder"] else ""
    return (
        f"{told['state']}: {told['subscription']!r} on {topics} at {told['serviceUrl']}: "
        f"{plural(len(told['ranges']), 'range')} x {plural(told['lanes'], 'lane')}, "
        f"{plural(told['workers'], 'worker')} ({told['executor']}), epoch {told['epoch']}, "
        f"{told['transport']}{decoder}, "
        f"pid {told['pid']} on {told['host']}"
    )


def _source_workers(all_of_them: list[SourceWorker]) -> str:
    shown = [
        f"{one['kind']} {one['pid']} on {one['host']} ({plural(one['consumers'], 'consumer')}, for "
        f"{one['forSeconds']:.0f} s, {plural(one['restarts'], 'restart')})"
        if one["pid"] is not None
        else f"{one['kind']} gone for {one['forSeconds']:.0f} s"
        for one in all_of_them[:_SOURCE_WORKERS_MAX]
    ]
    more = len(all_of_them) - len(shown)
    return "received by " + "; ".join(shown) + (f"; and {more} more" if more else "")


def _counts(told: Status) -> str:
    counters, window = told["counters"], told["window"]
    dropped = window["duplicatesDropped"] if window else 0
    if told["executor"] == "batches":
        acknowledged = window["entriesAcknowledged"] if window else 0
        return (
            f"received {_received(told) or 0:,} rows, acknowledged {acknowledged:,} entries, "
            f"redeliveries dropped {dropped:,}"
        )
    return (
        f"completed {counters['completed']:,}, failed attempts {counters['failedAttempts']:,}, "
        f"rejected {counters['rejected']:,}, parked {counters['parked']:,}, dead letters "
        f"{counters['deadLettered']:,}, redeliveries dropped {dropped:,}"
    )


def _received(told: Status) -> int | None:
    return told["window"]["rowsReceived"] if told["window"] else None


def _paces(told: Status, rates: watching.Rates) -> str:
    received = rates.of(_received)
    if told["executor"] == "batches":
        return f"per second: received {_pace(received)}"
    completed = rates.of(lambda told: told["counters"]["completed"])
    failed = rates.of(lambda told: told["counters"]["failedAttempts"])
    return (
        f"per second: received {_pace(received)}, completed {_pace(completed)}, failed attempts "
        f"{_pace(failed)}"
    )


def _pace(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 10 or not value else f"{value:.1f}"


def _handled(index: int) -> Callable[[Status], int | None]:
    return lambda told: next(
        (each["handled"] for each in told["ranges"] if each["index"] == index), None
    )


def _ranges(rows: list[RangeStatus], rates: watching.Rates | None) -> RenderableType:
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
            f"{each['waiting']:,}",
            f"{each['inFlight']:,}",
            *([] if rates is None else [_pace(rates.of(_handled(each["index"])))]),
            "-" if oldest is None else f"{oldest / 1000:.1f} s",
            escape(_why(each)),
        )
    return table


def _why(each: RangeStatus) -> str:
    key = each["blockedBy"]
    if each["stalled"] is not None:
        return f"{each['stalled']['reason']} (for {each['stalled']['forSeconds']:.0f} s)"
    if key is None:
        return ""
    name = "no key" if key["key"] is None else f"key {key['key']!r}"
    return f"{name}, message {key['messageId']}, attempt {key['attempts'] + 1}: {key['reason']}"


def _partitions(rows: list[PartitionStatus]) -> RenderableType:
    from rich.markup import escape
    from rich.table import Table

    table = Table("topic partition", "backlog", "ring", "ack holes", "replay queue")
    for each in rows:
        ring = "whole" if each["covered"] else f"[red]gaps: {escape(' '.join(each['gaps']))}[/]"
        table.add_row(
            escape(_name_of(each)),
            _number(each["backlog"]),
            ring,
            f"{_number(each['ackHoles'])} / {_number(each['ackHolesMax'])}",
            f"{_number(each['replay'])} / {_number(each['replayMax'])}",
        )
    return table


def _name_of(each: PartitionStatus) -> str:
    number = each["partition"]
    return each["topic"] if number < 0 else f"{each['topic']}-partition-{number}"


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
