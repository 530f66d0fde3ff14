"""``keyshard rescale``: change the number of ranges; show what would move, and past rescales."""

# ruff: noqa: PLC0415 - each command imports its modules when it runs, so that --help is fast.
from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keyshard.cli.connecting import ClientConfOption, source_of
from keyshard.cli.output import (
    ASK_TIMEOUT_S,
    JsonOption,
    PidOption,
    ServiceUrlOption,
    SubscriptionOption,
    console,
)
from keyshard.errors import ConfigError, NotRunningError

if TYPE_CHECKING:
    from keyshard.control import RunningSource
    from keyshard.core.ring.assignment import Assignment, Ceiling, RescaleDryRun
    from keyshard.observe.status_types import Status

_LANES = 16
_StartOption = Annotated[
    int | None,
    typer.Option(
        "--from",
        min=1,
        max=65_536,
        help="With --dry-run: number of equal ranges before. Default: the ranges of a running "
        "source.",
    ),
]
_HistoryOption = Annotated[
    bool,
    typer.Option(
        "--history",
        help="Show the last rescales with the time of each phase, and the one that runs.",
    ),
]
_HandlerMsOption = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=86_400_000,
        help="With --dry-run: mean time of a handler, milliseconds. Default: as measured by "
        "the source.",
    ),
]
_LanesOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=10_000,
        help=f"With --dry-run: lanes in each range. Default: as in the source, or {_LANES}.",
    ),
]
_WorkersOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=10_000,
        help="With --dry-run: most concurrent handlers. Default: as in the source, or no limit.",
    ),
]


def rescale(  # noqa: PLR0917 - one argument per option
    ranges: Annotated[
        int | None, typer.Argument(min=1, max=65_536, help="New number of ranges.")
    ] = None,
    balance: Annotated[
        bool, typer.Option("--balance", help="Keep the number of ranges, and balance their load.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Show the moves and the limits of the handlers, without moving anything.",
        ),
    ] = False,
    start: _StartOption = None,
    history: _HistoryOption = False,
    handler_ms: _HandlerMsOption = None,
    lanes: _LanesOption = None,
    workers: _WorkersOption = None,
    subscription: SubscriptionOption = None,
    service_url: ServiceUrlOption = None,
    client_conf: ClientConfOption = None,
    pid: PidOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change the number of ranges of a running source, or balance their load."""

    from keyshard.core.ring.assignment import assign

    source = partial(source_of, subscription, service_url, client_conf, pid)
    if history:
        if ranges is not None or balance or dry_run:
            raise ConfigError(
                "--history changes nothing, so it takes no number of ranges, --balance or "
                "--dry-run.",
                "Leave them out.",
            )
        _show_history(source(), as_json=as_json)
        return
    if (ranges is None) != balance:
        raise ConfigError("A rescale needs a number of ranges or --balance.", "Give one of them.")
    of_dry_run = {
        "--from": start,
        "--handler-ms": handler_ms,
        "--lanes": lanes,
        "--workers": workers,
    }
    if not dry_run:
        if useless := [name for name, value in of_dry_run.items() if value is not None]:
            raise ConfigError(
                f"{useless[0]} needs --dry-run.", f"Add --dry-run, or leave out {useless[0]}."
            )
        _rescale(source(), ranges, balance=balance, as_json=as_json)
        return
    if ranges is None:
        raise ConfigError(
            "--dry-run needs a number of ranges. The moves of --balance depend on the load at "
            "that moment, so they cannot be shown before.",
            "Give the number.",
        )
    show = partial(
        _show, ranges=ranges, handler_ms=handler_ms, lanes=lanes, workers=workers,
        as_json=as_json,
    )  # fmt: skip
    if start is not None:
        show(assign(start), None)
    else:
        _show_running(source(), show)


def _rescale(source: RunningSource, ranges: int | None, *, balance: bool, as_json: bool) -> None:
    report = source.ask("rescale", ranges=ranges, balance=balance, timeout_s=ASK_TIMEOUT_S)
    with source.read():
        typer.echo(json.dumps(report, indent=2) if as_json else _moved(report))


def _show_history(source: RunningSource, *, as_json: bool) -> None:
    from keyshard.cli.rescale_text import history_text
    from keyshard.core.recent_history import rescales_of

    status: Status = source.ask("status")
    with source.read():
        history = status["history"]
        if history is None:
            raise NotRunningError("The source is still starting.", "Try again later.")
        if as_json:
            typer.echo(json.dumps(rescales_of(history), indent=2))
        else:
            console().print(history_text(history))


def _show_running(source: RunningSource, show: Callable[[Assignment, Status], None]) -> None:
    status: Status = source.ask("status")
    with source.read():
        show(_assignment_of(status), status)


def _show(
    before: Assignment,
    status: Status | None,
    *,
    ranges: int,
    handler_ms: float | None,
    lanes: int | None,
    workers: int | None,
    as_json: bool,
) -> None:
    """Show what would move, and the limits of handlers before and after it."""
    from keyshard.core.ring.assignment import Ceiling, RescaleDryRun

    made = RescaleDryRun.make(before, ranges)
    lanes = lanes or (status and status["lanes"]) or _LANES
    handler_s = _mean_s(status) if handler_ms is None else handler_ms / 1000
    workers = workers or (status and status["workersMax"]) or None
    ceilings = [Ceiling.of(count, lanes, handler_s, workers) for count in (len(before), ranges)]
    if as_json:
        typer.echo(json.dumps(_as_json(made, ceilings, lanes, handler_s), indent=2))
    else:
        from keyshard.cli.rescale_text import dry_run_text

        console().print(dry_run_text(made, ceilings, lanes, handler_s), highlight=False)


def _moved(report: dict[str, Any]) -> str:
    pauses = [each["pause_ms"] for each in report["pauses"]]
    least = report["optimum_fraction"]
    text = (
        f"{report['ranges_before']} ranges to {report['ranges_after']}: "
        f"{report['moved_fraction']:.1%} of the ring moved"
    )
    text += "" if least is None else f", at least {least:.1%} were necessary"
    text += f"; epoch {report['epoch']}"
    return f"{text}; longest pause of a range {max(pauses):.0f} ms." if pauses else f"{text}."


def _assignment_of(status: Status) -> Assignment:
    from keyshard.core.ring.hash_range import HashRange

    return tuple(
        tuple(HashRange(*map(int, text.split("-"))) for text in each["hashRanges"])
        for each in status["ranges"]
    )


def _mean_s(status: Status | None) -> float | None:
    """Return the mean time of an attempt, as a running source measured it."""
    if status is None or status["kind"] != "handlers":
        return None  # An attempt of a Ray job may handle many rows, and its ranges handle none.
    seconds = status["handlerSeconds"]
    return seconds["sum"] / seconds["count"] if seconds and seconds["count"] else None


def _as_json(
    made: RescaleDryRun, ceilings: list[Ceiling], lanes: int, handler_s: float | None
) -> dict[str, Any]:
    names = ("before", "after")
    return {
        "rangesBefore": len(made.before),
        "rangesAfter": len(made.after),
        "movedFraction": made.moved_fraction,
        "optimumFraction": made.optimum_fraction,
        "moves": [
            {"slots": str(move.hash_range), "from": move.source, "to": move.target}
            for move in made.moves
        ],
        "lanes": lanes,
        "handlerSeconds": handler_s,
        "ceiling": {
            name: {
                "keys": ceiling.keys,
                "rowsPerSecond": ceiling.rows_per_s,
                "limitedBy": ceiling.limited_by,
            }
            for name, ceiling in zip(names, ceilings, strict=True)
        },
    }
