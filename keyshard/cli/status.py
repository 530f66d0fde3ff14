"""``keyshard status``: the state of a running source, range by range, and of sinks and workers."""

# ruff: noqa: PLC0415 - each command imports its modules when it runs, so that --help is fast.
from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from keyshard.cli.connecting import ClientConfOption, others_of, source_of, sources_of
from keyshard.cli.others import sink_view, sinks_table, worker_view, workers_table
from keyshard.cli.output import (
    ERROR_MAX,
    JsonOption,
    PidOption,
    ServiceUrlOption,
    console,
    duration,
    newest_error,
    pace,
    plain,
    plural,
)
from keyshard.cli.page_token import TokenFileOption, read_token
from keyshard.errors import ConfigError, ControlError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from keyshard.control import RunningSource
    from keyshard.coordinator.progress import SourceWorker
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
                "--url shows the status once, for sources of its page. Leave out --watch, "
                "--service-url and --client-conf; --token-file needs --url."
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
        return _view(status, rates, all_ranges=all_ranges)

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
            f"{len(found)} {found[0].kind_word}s match: {names}. Select one by its name, "
            "--service-url or --pid."
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
        raise ControlError(f"The page at {url} shows no such source. Leave the name out.")
    if as_json:
        typer.echo(json.dumps(found[0] if len(found) == 1 else found, indent=2))
    elif len(found) == 1:
        console().print(_view(found[0], None, all_ranges=all_ranges))
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
                _facts(status)
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
        facts = ["?", "-", "-", "-", status] if isinstance(status, str) else _facts(status)
        table.add_row(str(pid), *map(escape, (kind, name, *facts)))
    return table


def _facts(status: Status) -> list[str]:
    return [
        status["state"],
        pace(status["rates"]["received"]),
        _lag(status["lag"]),
        duration(status["uptimeSeconds"]),
        newest_error(status["newestError"]),
    ]


def _lag(lag: Lag) -> str:
    """Return a lag in rows and seconds, with its trend, as far as they are known."""
    rows, seconds = lag["rows"], lag["seconds"]
    parts = [] if rows is None else [f"{rows:,} rows"]
    parts += [] if seconds is None else [f"{seconds:.1f} s"]
    parts += [] if lag["trend"] is None else [lag["trend"]]
    return ", ".join(parts) or "-"


def _view(status: Status, rates: Rates | None, *, all_ranges: bool | None) -> RenderableType:
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
    if status["window"] and status["window"]["sourceWorkers"]:
        parts.append(Text(_source_workers(status["window"]["sourceWorkers"])))
    circuit = status["circuit"]
    if circuit["state"] != "closed":
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
        left = status["parkedKeys"] - len(named)
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
        "receive nothing",
    )
    parts += _named(
        [
            f"{_name_of(each)} is stalled for {stalled['forSeconds']:.0f} s: {stalled['reason']}"
            for each in status["partitions"]
            if (stalled := each["stalled"]) is not None
        ],
        "are stalled",
    )
    if status["brokerError"]:
        parts.append(Text(f"broker facts are outdated: {status['brokerError']}", style="yellow"))
    parts += _table_of(
        status["ranges"], partial(_ranges, rates=rates), _ranges_summary,
        lambda each: each["state"] not in ("running", "idle"), all_ranges,
    )  # fmt: skip
    parts += _table_of(
        status["partitions"], _partitions, _partitions_summary,
        lambda each: not each["covered"] or each["stalled"] is not None, all_ranges,
    )  # fmt: skip
    return Group(*parts)


def _named(troubles: list[str], others: str) -> list[RenderableType]:
    """Return a line for each of the first troubled topic partitions, and the number of others."""
    from rich.text import Text

    more = len(troubles) - _NAMED_MAX
    rest = [f"{more} more topic partitions {others}"] if more > 0 else []
    return [Text(line, style="red") for line in troubles[:_NAMED_MAX] + rest]


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
    stalled = sum(each["stalled"] is not None for each in rows)
    return (
        f"{plural(len(rows), 'topic partition')}: backlog "
        f"{_number(sum(backlogs) if backlogs else None)}, {gaps:,} with slots without a consumer"
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
    if status["executor"] in ("batches", "ray"):
        acknowledged = window["entriesAcknowledged"] if window else 0
        return (
            f"received {_received(status) or 0:,} rows, acknowledged {acknowledged:,} entries, "
            f"redeliveries dropped {dropped:,}"
        )
    return (
        f"completed {counters['completed']:,}, failed attempts {counters['failedAttempts']:,}, "
        f"rejected {counters['rejected']:,}, parked {counters['parked']:,}, dead letters "
        f"{counters['deadLettered']:,}, redeliveries dropped {dropped:,}"
    )


def _received(status: Status) -> int | None:
    return status["window"]["rowsReceived"] if status["window"] else None


def _paces(status: Status, rates: Rates) -> str:
    received = rates.of(_received)
    if status["executor"] == "batches":
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
            f"{each['waiting']:,}",
            f"{each['inFlight']:,}",
            *([] if rates is None else [pace(rates.of(_handled(each["index"])))]),
            "-" if oldest is None else f"{oldest / 1000:.1f} s",
            escape(plain(_why(each), ERROR_MAX)),
        )
    return table


def _why(each: RangeStatus) -> str:
    key = each["blockedBy"]
    if each["stalled"] is not None:
        return f"{each['stalled']['reason']} (for {each['stalled']['forSeconds']:.0f} s)"
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
            f"{_number(each['ackGaps'])} / {_number(each['ackGapsMax'])}",
            f"{_number(each['replay'])} / {_number(each['replayMax'])}",
        )
    return table


def _name_of(each: PartitionStatus) -> str:
    number = each["partition"]
    return each["topic"] if number < 0 else f"{each['topic']}-partition-{number}"


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


# -- keyshard status --watch: the status at an interval, with rates, until the source ends ---------

EVERY_S = 1.0
"""Interval between two requests of the status, seconds."""
RATES_OVER = 5
"""Number of intervals over which rates are computed."""


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
                    f"The {source.title}, pid {source.pid}, crashed or was killed. Start it again."
                ) from exc
            raise
        with source.read():
            rates.look(time.monotonic(), status)
        yield status, rates
        time.sleep(EVERY_S)
