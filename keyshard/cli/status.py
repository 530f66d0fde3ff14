"""``keyshard status``: what a running source does, range by range."""

# ruff: noqa: PLC0415 - what a command needs is imported when it runs, so that --help is fast.
from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from keyshard.cli import watching
from keyshard.cli.connecting import ClientConfOption, source_of
from keyshard.cli.output import JsonOption, PidOption, ServiceUrlOption, console, plural

if TYPE_CHECKING:
    from rich.console import RenderableType

    from keyshard.coordinator.progress import SourceWorker
    from keyshard.observe.status_types import RangeStatus, Status

_PARKED_MAX = 10
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
    service_url: ServiceUrlOption = None,
    client_conf: ClientConfOption = None,
    pid: PidOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show ranges, topic partitions, parked keys and counts of a source that runs here."""

    source = source_of(subscription, service_url, client_conf, pid)
    if watch:
        watching.watch(source, _view, as_json=as_json)
        return
    told: Status = source.ask("status")
    if as_json:
        typer.echo(json.dumps(told, indent=2))
    else:
        console().print(_view(told))


def _view(told: Status, rates: watching.Rates | None = None) -> RenderableType:
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
    if told["brokerError"]:
        parts.append(Text(f"broker facts are old: {told['brokerError']}", style="yellow"))
    return Group(*parts, _ranges(told, rates), _partitions(told))


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


def _ranges(told: Status, rates: watching.Rates | None) -> RenderableType:
    from rich.markup import escape
    from rich.table import Table

    paces = [] if rates is None else ["handled/s"]
    table = Table("range", "slots", "state", "waiting", "in flight", *paces, "oldest", "blocked by")
    for each in told["ranges"]:
        state = each["state"]
        oldest = each["oldestUnacknowledgedMillis"]
        table.add_row(
            str(each["index"]),
            " ".join(each["hashRanges"]),
            f"[{_STYLES.get(state, '')}]{state}[/]",
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


def _partitions(told: Status) -> RenderableType:
    from rich.table import Table

    table = Table("topic partition", "backlog", "ring", "ack holes", "replay queue")
    for each in told["partitions"]:
        ring = "whole" if each["covered"] else "[red]gaps: " + " ".join(each["gaps"]) + "[/]"
        number = each["partition"]
        table.add_row(
            each["topic"] if number < 0 else f"{each['topic']}-partition-{number}",
            _number(each["backlog"]),
            ring,
            f"{_number(each['ackHoles'])} / {_number(each['ackHolesMax'])}",
            f"{_number(each['replay'])} / {_number(each['replayMax'])}",
        )
    return table


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
