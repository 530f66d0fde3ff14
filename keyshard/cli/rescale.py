"""``keyshard rescale``: another number of ranges, or what it would change with ``--dry-run``."""

# ruff: noqa: PLC0415 - what a command needs is imported when it runs, so that --help is fast.
from __future__ import annotations

import json
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
    plural,
)
from keyshard.errors import ConfigError

if TYPE_CHECKING:
    from keyshard.core.ring.assignment import Assignment
    from keyshard.core.ring.rescale_plan import Ceiling, RescalePlan
    from keyshard.observe.status_types import Status

_LANES = 16
_MOVES_MAX = 20


def rescale(  # noqa: PLR0917 - one argument per option
    ranges: Annotated[
        int | None, typer.Argument(min=1, max=65_536, help="Number of ranges.")
    ] = None,
    balance: Annotated[
        bool, typer.Option("--balance", help="Keep the number; weigh the ranges by their load.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Move nothing; show what would move, and what handlers could do then."
        ),
    ] = False,
    start: Annotated[
        int | None,
        typer.Option(
            "--from",
            min=1,
            max=65_536,
            help="With --dry-run: equal ranges now; default: those of a running source.",
        ),
    ] = None,
    handler_ms: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=86_400_000,
            help="With --dry-run: mean time of the handler; default: as measured by the source.",
        ),
    ] = None,
    lanes: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10_000,
            help=f"With --dry-run: lanes in each range; default: of the source, or {_LANES}.",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10_000,
            help="With --dry-run: handlers at the same time; default: of the source, or no limit.",
        ),
    ] = None,
    subscription: SubscriptionOption = None,
    service_url: ServiceUrlOption = None,
    client_conf: ClientConfOption = None,
    pid: PidOption = None,
    as_json: JsonOption = False,
) -> None:
    """Cut the ring of a running source anew, while it runs."""

    from keyshard.core.ring.assignment import assign

    if (ranges is None) != balance:
        raise ConfigError("Give the number of ranges, or --balance to keep it.")
    of_dry_run = {
        "--from": start,
        "--handler-ms": handler_ms,
        "--lanes": lanes,
        "--workers": workers,
    }
    if not dry_run:
        if useless := [name for name, value in of_dry_run.items() if value is not None]:
            raise ConfigError(f"{useless[0]} goes with --dry-run only.")
        source = source_of(subscription, service_url, client_conf, pid)
        told = source.ask("rescale", ranges=ranges, balance=balance, timeout_s=ASK_TIMEOUT_S)
        with source.read():
            typer.echo(json.dumps(told, indent=2) if as_json else _moved(told))
        return
    if ranges is None:
        raise ConfigError(
            "--dry-run shows what another number of ranges moves. What --balance moves is decided "
            "by the load when it is done."
        )
    show = partial(
        _show, ranges=ranges, handler_ms=handler_ms, lanes=lanes, workers=workers,
        as_json=as_json,
    )  # fmt: skip
    if start is not None:
        show(assign(start), None)
        return
    source = source_of(subscription, service_url, client_conf, pid)
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
    """What would move, and the most that handlers could do before and after it."""
    from keyshard.core.ring.rescale_plan import Ceiling, RescalePlan

    made = RescalePlan.make(before, ranges)
    lanes = lanes or (status and status["lanes"]) or _LANES
    handler_s = _mean_s(status) if handler_ms is None else handler_ms / 1000
    workers = workers or (status and status["workersMax"]) or None
    ceilings = [Ceiling.of(count, lanes, handler_s, workers) for count in (len(before), ranges)]
    if as_json:
        typer.echo(json.dumps(_as_json(made, ceilings, lanes, handler_s), indent=2))
    else:
        _print(made, ceilings, lanes, handler_s)


def _moved(told: dict[str, Any]) -> str:
    pauses = [each["pause_ms"] for each in told["pauses"]]
    least = told["optimum_fraction"]
    text = (
        f"{told['ranges_before']} ranges to {told['ranges_after']}: {told['moved_fraction']:.1%} "
        "of the ring moved"
    )
    text += "" if least is None else f", and at least {least:.1%} had to"
    text += f"; epoch {told['epoch']}"
    return f"{text}; longest pause of a range {max(pauses):.0f} ms." if pauses else f"{text}."


def _assignment_of(status: Status) -> Assignment:
    from keyshard.core.ring.hash_range import HashRange

    return tuple(
        tuple(HashRange(*map(int, text.split("-"))) for text in each["hashRanges"])
        for each in status["ranges"]
    )


def _mean_s(status: Status | None) -> float | None:
    """Mean time of an attempt, as a running source measured it."""
    if status is None or not status["handlerSeconds"]["count"]:
        return None
    return status["handlerSeconds"]["sum"] / status["handlerSeconds"]["count"]


def _as_json(
    made: RescalePlan, ceilings: list[Ceiling], lanes: int, handler_s: float | None
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


def _print(made: RescalePlan, ceilings: list[Ceiling], lanes: int, handler_s: float | None) -> None:
    from rich.table import Table

    from_, to = len(made.before), len(made.after)
    out = console()
    out.print(
        f"{plural(from_, 'range')} to {to}: {made.moved_fraction:.1%} of the ring moves in "
        f"{plural(len(made.moves), 'piece')}; no plan moves less than "
        f"{made.optimum_fraction:.1%}.",
        highlight=False,
    )
    if made.moves:
        table = Table("slots", "from range", "to range", "of the ring")
        for move in made.moves[:_MOVES_MAX]:
            part = len(move.hash_range) / 65_536
            table.add_row(str(move.hash_range), str(move.source), str(move.target), f"{part:.2%}")
        out.print(table)
        if len(made.moves) > _MOVES_MAX:
            out.print(f"... and {len(made.moves) - _MOVES_MAX} more; --json lists them all.")
    table = Table("ranges", "lanes each", "keys at once", "messages/s at most", "limited by")
    for count, ceiling in zip((from_, to), ceilings, strict=True):
        rate = "-" if ceiling.rows_per_s is None else f"{ceiling.rows_per_s:,.0f}"
        table.add_row(str(count), str(lanes), f"{ceiling.keys:,}", rate, ceiling.limited_by)
    out.print(table)
    if handler_s is None:
        out.print("Give --handler-ms to see messages per second.")
    else:
        out.print(f"With handlers of {handler_s * 1000:.2f} ms.", highlight=False)
