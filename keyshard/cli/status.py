"""``keyshard status``: the state of a running source, range by range, and of sinks and workers."""

# ruff: noqa: PLC0415 - each command imports its modules when it runs, so that --help is fast.
from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keyshard.cli.connecting import ClientConfOption, others_of, source_of, sources_of
from keyshard.cli.output import (
    JsonOption,
    PidOption,
    ServiceUrlOption,
    console,
)
from keyshard.cli.page_token import TokenFileOption, read_token
from keyshard.cli.sink_and_worker_text import sink_view, sinks_table, worker_view, workers_table
from keyshard.cli.status_text import SUMMARY_FROM, Rates, source_facts, status_view
from keyshard.errors import ConfigError, ControlError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from keyshard.control import RunningSource
    from keyshard.observe.status_types import Status


def status(  # noqa: PLR0917 - one argument per option
    subscription: Annotated[
        str | None,
        typer.Argument(help="Subscription or name of the source or sink. Default: the only one."),
    ] = None,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Refresh every second, with rates, until the source stops."),
    ] = False,
    all_ranges: Annotated[
        bool | None,
        typer.Option(
            "--all-ranges/--summary",
            help="Show a line for each range and topic partition, or a summary with those in "
            f"trouble. Default: the summary from {SUMMARY_FROM} lines.",
        ),
    ] = None,
    service_url: ServiceUrlOption = None,
    client_conf: ClientConfOption = None,
    pid: PidOption = None,
    url: Annotated[
        str | None,
        typer.Option("--url", help="URL of a page (keyshard ui, ui_port), on any machine."),
    ] = None,
    token_file: TokenFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the ranges, topic partitions, parked keys and counts of a source on this machine.

    If several sources match, it lists them, with their lag and newest error. It also lists the
    open sinks and the workers. If no source matches, it shows the only sink, or the only worker.
    """

    if url is not None or token_file is not None:
        if watch or service_url or client_conf or url is None:
            raise ConfigError(
                "--url shows the status once, for sources of its page.",
                "Leave out --watch, --service-url and --client-conf; --token-file needs --url.",
            )
        _show_remote(url, token_file, subscription, pid, as_json=as_json, all_ranges=all_ranges)
        return
    found = sources_of(subscription, service_url, client_conf, pid)
    sinks, workers, errors = _others(subscription, service_url, client_conf, pid)
    if not (watch or as_json):
        for error in errors:
            typer.echo(error, err=True)
        if len(found or sinks or workers) > 1:
            _show_all(found, sinks, workers)
            return
    if not found and (sinks or workers):
        _show_other(sinks or workers, watch=watch, as_json=as_json)
        return
    source = source_of(subscription, service_url, client_conf, pid)

    def view(status: Status, rates: Rates | None = None) -> RenderableType:
        return status_view(status, rates, all_ranges=all_ranges)

    _show(source, view, watch=watch, as_json=as_json)
    if not (watch or as_json):
        _list_others(sinks, workers)


def _others(
    name: str | None, service_url: str | None, client_conf: Path | None, pid: int | None
) -> tuple[list[RunningSource], list[RunningSource], list[str]]:
    """Return the sinks and the workers that match, and the errors of those that hang."""
    from keyshard.control import SINK, WORKER

    sinks, errors = others_of(SINK, name, service_url, client_conf, pid)
    workers, more = others_of(WORKER, name, service_url, client_conf, pid)
    return sinks, workers, errors + more


def _list_others(sinks: list[RunningSource], workers: list[RunningSource]) -> None:
    if sinks:
        console().print(sinks_table(sinks))
    if workers:
        console().print(workers_table(workers))


def _show_all(
    sources: list[RunningSource], sinks: list[RunningSource], workers: list[RunningSource]
) -> None:
    """Show one line for each of them."""
    if sources:
        console().print(_overview(sources))
    _list_others(sinks, workers)
    if sources or sinks:
        many, name = ("sources", "SUBSCRIPTION") if sources else ("sinks", "NAME")
        way = f"keyshard status {name}, or keyshard status --pid PID"
    else:
        many, way = "workers", "keyshard status --pid PID"
    typer.echo(f"Several {many} match. Name one: {way}.", err=True)


def _show_other(found: list[RunningSource], *, watch: bool, as_json: bool) -> None:
    """Show the only sink or worker.

    Raises:
        ControlError: There are several, or it does not answer.
    """
    if len(found) > 1:
        names = "; ".join(f"pid {one.pid}: {one.title}" for one in found)
        raise ControlError(
            f"{len(found)} {found[0].kind_word}s match: {names}.",
            "Select one by its name, --service-url or --pid.",
        )
    (one,) = found
    view: Callable[[Any], RenderableType] = sink_view if one.kind == "sink" else worker_view
    _show(one, lambda status, _rates=None: view(status), watch=watch, as_json=as_json)


def _show(
    one: RunningSource, view: Callable[..., RenderableType], *, watch: bool, as_json: bool
) -> None:
    """Show the status of a source, sink or worker, once or until it stops."""
    if watch:
        _watch(one, view, as_json=as_json)
        return
    status: Any = one.ask("status")
    if as_json:
        typer.echo(json.dumps(status, indent=2))
        return
    with one.read():
        console().print(view(status))


def _show_remote(
    url: str,
    token_file: Path | None,
    name: str | None,
    pid: int | None,
    *,
    as_json: bool,
    all_ranges: bool | None,
) -> None:
    from keyshard.observe.page.client import statuses_at

    found = [
        one
        for one in statuses_at(url, None if token_file is None else read_token(token_file))
        if name in (None, one["name"], one["subscription"]) and pid in (None, one["pid"])
    ]
    if not found:
        raise ControlError(f"The page at {url} shows no such source.", "Leave the name out.")
    if as_json:
        typer.echo(json.dumps(found[0] if len(found) == 1 else found, indent=2))
    elif len(found) == 1:
        console().print(status_view(found[0], None, all_ranges=all_ranges))
    else:
        console().print(
            _overview_of([(one["pid"], one["kind"], one["name"], one) for one in found])
        )


def ps(
    service_url: ServiceUrlOption = None,
    client_conf: ClientConfOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the running sources, open sinks and workers of this user on this machine."""

    found = sources_of(None, service_url, client_conf, None)
    sinks, workers, errors = _others(None, service_url, client_conf, None)
    for error in errors:
        typer.echo(error, err=True)
    found += sinks + workers
    if as_json:
        facts = [
            {
                "pid": one.pid, "kind": one.kind, "name": one.name,
                "subscription": _subscription_of(one), "topics": one.topics,
                "serviceUrl": one.service_url,
            }
            for one in found
        ]  # fmt: skip
        typer.echo(json.dumps(facts, indent=2))
    elif found:
        console().print(listed(found))
    else:
        typer.echo("No source runs, and no sink is open.")


def _subscription_of(one: RunningSource) -> str | None:
    return None if one.kind == "sink" else one.subscription


def listed(sources: list[RunningSource]) -> RenderableType:
    """Return one line for each source, sink or worker."""
    from rich.markup import escape
    from rich.table import Table

    table = Table("pid", "kind", "name", "subscription", "topics", "cluster")
    for one in sources:
        of = _subscription_of(one) or "-"
        texts = one.kind, one.name, of, one.topics, one.service_url
        table.add_row(str(one.pid), *map(escape, texts))
    return table


def _overview(sources: list[RunningSource]) -> RenderableType:
    """Return one line for each source, with facts of its status."""

    def asked(one: RunningSource) -> Status | str:
        try:
            status: Status = one.ask("status")
            with one.read():
                source_facts(status)
        except ControlError as exc:
            return exc.message
        return status

    return _overview_of([(one.pid, one.kind, one.name, asked(one)) for one in sources])


def _overview_of(rows: list[tuple[int, str, str, Status | str]]) -> RenderableType:
    """Return one line for each source: its status, or why it has none."""
    from rich.markup import escape
    from rich.table import Table

    table = Table("pid", "kind", "name", "state", "received/s", "lag", "uptime", "newest error")
    for pid, kind, name, status in rows:
        facts = ["?", "-", "-", "-", status] if isinstance(status, str) else source_facts(status)
        table.add_row(str(pid), *map(escape, (kind, name, *facts)))
    return table


# -- keyshard status --watch: the status at an interval, with rates, until the source ends ---------

EVERY_S = 1.0
"""Interval between two requests of the status, seconds."""


def _watch(
    source: RunningSource,
    view: Callable[[Any, Rates], RenderableType],
    *,
    as_json: bool,
) -> None:
    """Show a source every second until it ends, or until Ctrl-C.

    Raises:
        ControlError: It does not answer, or it is gone without having stopped.
    """
    from rich.live import Live

    try:
        shown = console()
        if as_json or not shown.is_terminal:
            for status, rates in _looks(source):
                if as_json:
                    typer.echo(json.dumps(status))
                else:
                    with source.read():
                        shown.print(view(status, rates))
        else:
            with Live(console=shown, auto_refresh=False) as live:
                for status, rates in _looks(source):
                    with source.read():
                        live.update(view(status, rates), refresh=True)
    except KeyboardInterrupt:
        return
    typer.echo(f"The {source.title}, pid {source.pid}, has stopped.", err=True)


def _looks(source: RunningSource) -> Iterator[tuple[Status, Rates]]:
    rates = Rates()
    while True:
        try:
            status: Status = source.ask("status")
        except ControlError as exc:
            if not source.path.exists():
                return
            if isinstance(exc.__cause__, ConnectionRefusedError):
                raise ControlError(
                    f"The {source.title}, pid {source.pid}, crashed or was killed.",
                    "Start it again.",
                ) from exc
            raise
        with source.read():
            rates.look(time.monotonic(), status)
        yield status, rates
        time.sleep(EVERY_S)
