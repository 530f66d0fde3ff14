"""``keyshard status``: what a running source does, range by range."""

# ruff: noqa: PLC0415 - what a command needs is imported when it runs, so that --help is fast.
from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keyshard.cli.output import JsonOption, PidOption, ServiceUrlOption, console, plural

if TYPE_CHECKING:
    from rich.console import RenderableType

_EVERY_S = 1.0
_PARKED_MAX = 10
_STYLES = {
    "stalled": "red",
    "disconnected": "red",
    "blocked": "yellow",
    "draining": "yellow",
    "paused": "yellow",
    "running": "green",
    "idle": "dim",
}


def status(
    subscription: Annotated[
        str | None, typer.Argument(help="Subscription of the source; default: the only one.")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it again every second, until Ctrl-C.")
    ] = False,
    service_url: ServiceUrlOption = None,
    pid: PidOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show ranges, topic partitions, parked keys and counts of a source that runs here."""
    from rich.live import Live

    from keyshard.handlers.control import running_source

    source = running_source(subscription, service_url, pid)
    told = source.ask("status")
    if as_json and not watch:
        typer.echo(json.dumps(told, indent=2))
        return
    if not watch:
        console().print(_view(told))
        return
    try:
        if as_json:
            while True:
                typer.echo(json.dumps(told))
                time.sleep(_EVERY_S)
                told = source.ask("status")
        with Live(_view(told), console=console(), auto_refresh=False) as live:
            while True:
                time.sleep(_EVERY_S)
                live.update(_view(source.ask("status")), refresh=True)
    except KeyboardInterrupt:
        return


def _view(told: Mapping[str, Any]) -> RenderableType:
    from rich.console import Group
    from rich.markup import escape
    from rich.text import Text

    parts: list[RenderableType] = [Text(_head(told)), _ranges(told), _partitions(told)]
    named = [each["key"] for each in told["parked"][:_PARKED_MAX]]
    if named:
        names = ", ".join(map(repr, named))
        left = told["parkedKeys"] - len(named)
        more = f" and {left:,} more" if left else ""
        parts.append(Text.from_markup(f"[yellow]parked[/]: {escape(names)}{more}"))
    counters, window = told["counters"], told["window"] or {}
    parts.append(
        Text(
            f"completed {counters['completed']:,}, failed attempts "
            f"{counters['failedAttempts']:,}, rejected {counters['rejected']:,}, parked "
            f"{counters['parked']:,}, dead letters {counters['deadLettered']:,}, redeliveries "
            f"dropped {window.get('duplicatesDropped', 0):,}"
        )
    )
    if told["brokerError"]:
        parts.append(Text(f"broker facts are old: {told['brokerError']}", style="yellow"))
    return Group(*parts)


def _head(told: Mapping[str, Any]) -> str:
    topics = told["topicsPattern"] or ", ".join(told["topics"])
    return (
        f"{told['state']}: {told['subscription']!r} on {topics} at {told['serviceUrl']}: "
        f"{plural(len(told['ranges']), 'range')} x {plural(told['lanes'], 'lane')}, "
        f"{plural(told['workers'], 'worker')} ({told['executor']}), epoch {told['epoch']}, "
        f"pid {told['pid']} on {told['host']}"
    )


def _ranges(told: Mapping[str, Any]) -> RenderableType:
    from rich.markup import escape
    from rich.table import Table

    table = Table("range", "slots", "state", "waiting", "in flight", "oldest", "blocked by")
    for each in told["ranges"]:
        state = each["state"]
        oldest = each["oldestUnacknowledgedMillis"]
        table.add_row(
            str(each["index"]),
            " ".join(each["hashRanges"]),
            f"[{_STYLES.get(state, '')}]{state}[/]",
            f"{each['waiting']:,}",
            f"{each['inFlight']:,}",
            "-" if oldest is None else f"{oldest / 1000:.1f} s",
            escape(_why(each)),
        )
    return table


def _why(each: Mapping[str, Any]) -> str:
    key = each["blockedBy"]
    if each["stalled"] is not None:
        return f"{each['stalled']['reason']} (for {each['stalled']['forSeconds']:.0f} s)"
    if key is None:
        return ""
    name = "no key" if key["key"] is None else f"key {key['key']!r}"
    return f"{name}, message {key['messageId']}, attempt {key['attempts'] + 1}: {key['reason']}"


def _partitions(told: Mapping[str, Any]) -> RenderableType:
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
