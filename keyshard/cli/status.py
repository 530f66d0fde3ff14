"""``keyshard status``: the state of a running source, range by range, and of sinks and workers."""

# ruff: noqa: PLC0415 - each command imports its modules when it runs, so that --help is fast.
from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
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
from keyshard.redaction import redacted

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

    if url is None and token_file is None:
        found = _found_here(subscription, service_url, client_conf, pid)
    elif url is None or service_url or client_conf:
        raise ConfigError(
            "--url shows what its page shows.",
            "Leave out --service-url and --client-conf; --token-file needs --url.",
        )
    else:
        found = _found_at(url, token_file, subscription, pid)
    if not watch:
        for error in found.errors:
            typer.echo(error, err=True)
        if as_json and url is not None and len(found.first) > 1:
            _print_all(found.first)
            return
    if not (watch or as_json) and len(found.first) > 1:
        _show_all(found)
        return
    if not found.sources and found.first:
        _show_other(found, watch=watch, as_json=as_json)
        return

    def view(status: Status, rates: Rates | None = None) -> RenderableType:
        return status_view(status, rates, all_ranges=all_ranges)

    _show(found.only_source(), found.again, view, watch=watch, as_json=as_json)
    if not (watch or as_json):
        _list_others(found)


@dataclass(frozen=True, slots=True)
class _Found:
    """The sources, sinks and workers that match the arguments, here or at a page."""

    sources: Sequence[RunningSource]
    sinks: Sequence[RunningSource]
    workers: Sequence[RunningSource]
    errors: list[str]
    """Why some may be missing."""
    only_source: Callable[[], RunningSource]
    """Returns the only source; raises ``ControlError`` if there is none, or several."""
    again: Callable[[Any], Any | None]
    """Asks one of them for its status; returns ``None`` once it has stopped."""

    by: str
    """Options that select one, besides its name and ``--pid``."""

    @property
    def first(self) -> Sequence[RunningSource]:
        """The sources; without one the sinks, and without one of these the workers."""
        return self.sources or self.sinks or self.workers


def _found_here(
    name: str | None, service_url: str | None, client_conf: Path | None, pid: int | None
) -> _Found:
    only = partial(source_of, name, service_url, client_conf, pid)
    sources = sources_of(name, service_url, client_conf, pid)
    others = _others(name, service_url, client_conf, pid)
    return _Found(sources, *others, only, _again, ", --service-url")


def _found_at(url: str, token_file: Path | None, name: str | None, pid: int | None) -> _Found:
    """Return what a page shows and what matches.

    Raises:
        ControlError: The page does not answer.
    """
    from keyshard.control import only_of
    from keyshard.observe.page.client import Page
    from keyshard.observe.page.status_watcher import GROUPS

    page = Page(url, None if token_file is None else read_token(token_file))
    listed, error = page.listed()
    groups: dict[str, list[RunningSource]] = {kind: [] for kind in GROUPS}
    for one in listed:
        if pid in (None, one.pid):
            groups[one.kind_word].append(one)
    sources = groups["source"]
    if name is not None:
        named = [one for one in sources if one.subscription == name]
        sources = named or [one for one in sources if one.name == name]
    sinks, workers = (
        [one for one in groups[kind] if name in (None, one.name)] for kind in ("sink", "worker")
    )

    def only() -> RunningSource:
        if not sources:
            more = f" It may be one that does not answer: {error}" if error else ""
            raise ControlError(
                f"The page at {redacted(url)} shows no such source.{more}", "Leave the name out."
            )
        return only_of(sources, "")

    return _Found(sources, sinks, workers, [error] if error else [], only, page.status_of, "")


def _others(
    name: str | None, service_url: str | None, client_conf: Path | None, pid: int | None
) -> tuple[list[RunningSource], list[RunningSource], list[str]]:
    """Return the sinks and the workers that match, and the errors of those that hang."""
    from keyshard.control import SINK, WORKER

    sinks, errors = others_of(SINK, name, service_url, client_conf, pid)
    workers, more = others_of(WORKER, name, service_url, client_conf, pid)
    return sinks, workers, errors + more


def _list_others(found: _Found) -> None:
    if found.sinks:
        console().print(sinks_table(found.sinks))
    if found.workers:
        console().print(workers_table(found.workers))


def _show_all(found: _Found) -> None:
    """Show one line for each of them."""
    if found.sources:
        console().print(_overview(found.sources))
    _list_others(found)
    if found.sources or found.sinks:
        many, name = ("sources", "SUBSCRIPTION") if found.sources else ("sinks", "NAME")
        way = f"keyshard status {name}, or keyshard status --pid PID"
    else:
        many, way = "workers", "keyshard status --pid PID"
    typer.echo(f"Several {many} match. Name one: {way}.", err=True)


def _print_all(found: Sequence[RunningSource]) -> None:
    """Print the status of each that has one, as JSON; name the others."""

    def asked(one: RunningSource) -> Any | None:
        try:
            return one.ask("status")
        except ControlError as exc:
            typer.echo(exc.message, err=True)
            return None

    statuses = [status for one in found if (status := asked(one)) is not None]
    typer.echo(json.dumps(statuses, indent=2))


def _show_other(found: _Found, *, watch: bool, as_json: bool) -> None:
    """Show the only sink or worker.

    Raises:
        ControlError: There are several, or it does not answer.
    """
    from keyshard.control import only_of

    one = only_of(found.first, found.by)
    view: Callable[[Any], RenderableType] = sink_view if one.kind == "sink" else worker_view
    _show(one, found.again, lambda status, _rates=None: view(status), watch=watch, as_json=as_json)


def _show(
    one: RunningSource,
    again: Callable[[Any], Any | None],
    view: Callable[..., RenderableType],
    *,
    watch: bool,
    as_json: bool,
) -> None:
    """Show the status of a source, sink or worker, once or until it stops."""
    if watch:
        _watch(one, again, view, as_json=as_json)
        return
    status: Any = one.ask("status")
    if as_json:
        typer.echo(json.dumps(status, indent=2))
        return
    with one.read():
        console().print(view(status))


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
        facts = [one.facts | {"topics": one.topics, "serviceUrl": one.service_url} for one in found]
        typer.echo(json.dumps(facts, indent=2))
    elif found:
        console().print(listed(found))
    else:
        typer.echo("No source runs, and no sink is open.")


def listed(sources: list[RunningSource]) -> RenderableType:
    """Return one line for each source, sink or worker."""
    from rich.markup import escape
    from rich.table import Table

    table = Table("pid", "kind", "name", "subscription", "topics", "cluster")
    for one in sources:
        of = one.facts["subscription"] or "-"
        texts = one.kind, one.name, of, one.topics, one.service_url
        table.add_row(str(one.pid), *map(escape, texts))
    return table


def _overview(sources: Sequence[RunningSource]) -> RenderableType:
    """Return one line for each source: facts of its status, or why it has none."""
    from rich.markup import escape
    from rich.table import Table

    def facts_of(one: RunningSource) -> list[str]:
        try:
            status: Status = one.ask("status")
            with one.read():
                return source_facts(status)
        except ControlError as exc:
            return ["?", "-", "-", "-", exc.message]

    table = Table("pid", "kind", "name", "state", "received/s", "lag", "uptime", "newest error")
    for one in sources:
        table.add_row(str(one.pid), *map(escape, (one.kind, one.name, *facts_of(one))))
    return table


# -- keyshard status --watch: the status at an interval, with rates, until the source ends ---------

EVERY_S = 1.0
"""Interval between two requests of the status, seconds."""


def _watch(
    source: RunningSource,
    again: Callable[[Any], Any | None],
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
            for status, rates in _looks(source, again):
                if as_json:
                    typer.echo(json.dumps(status))
                else:
                    with source.read():
                        shown.print(view(status, rates))
        else:
            with Live(console=shown, auto_refresh=False) as live:
                for status, rates in _looks(source, again):
                    with source.read():
                        live.update(view(status, rates), refresh=True)
    except KeyboardInterrupt:
        return
    typer.echo(f"The {source.title}, pid {source.pid}, has stopped.", err=True)


def _looks(
    source: RunningSource, again: Callable[[Any], Any | None]
) -> Iterator[tuple[Status, Rates]]:
    rates = Rates()
    while (status := again(source)) is not None:
        with source.read():
            rates.look(time.monotonic(), status)
        yield status, rates
        time.sleep(EVERY_S)


def _again(source: RunningSource) -> Any | None:
    """Return the status of a source, sink or worker of this machine; ``None`` if it has stopped.

    Raises:
        ControlError: It does not answer, or it is gone without having stopped.
    """
    try:
        return source.ask("status")
    except ControlError as exc:
        if not source.path.exists():
            return None
        if isinstance(exc.__cause__, ConnectionRefusedError):
            raise ControlError(
                f"The {source.title}, pid {source.pid}, crashed or was killed.",
                "Start it again.",
            ) from exc
        raise
