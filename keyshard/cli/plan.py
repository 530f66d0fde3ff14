"""``keyshard plan``: what another number of ranges would change; nothing is done."""

# ruff: noqa: PLC0415 - what a command needs is imported when it runs, so that --help is fast.
from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keyshard.cli.connecting import ClientConfOption, service_url_of
from keyshard.cli.output import (
    JsonOption,
    PidOption,
    ServiceUrlOption,
    SubscriptionOption,
    console,
    plural,
)

if TYPE_CHECKING:
    from keyshard.core.ring.rescale_plan import Ceiling, RescalePlan

_LANES = 16
_MOVES_MAX = 20


def plan(  # noqa: PLR0917 - one argument per option
    ranges: Annotated[int, typer.Option(help="Number of ranges to plan for.")],
    start: Annotated[
        int | None,
        typer.Option("--from", help="Ranges now, equal ones; default: those of a running source."),
    ] = None,
    handler_ms: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=86_400_000,
            help="Mean time of the handler; default: as measured by the source.",
        ),
    ] = None,
    lanes: Annotated[
        int | None,
        typer.Option(
            min=1, max=10_000, help=f"Lanes in each range; default: of the source, or {_LANES}."
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10_000,
            help="Handlers at the same time; default: of the source, or no limit.",
        ),
    ] = None,
    subscription: SubscriptionOption = None,
    service_url: ServiceUrlOption = None,
    client_conf: ClientConfOption = None,
    pid: PidOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a rescale would move, and the most that handlers could do after it."""
    from keyshard.core.ring.assignment import assign
    from keyshard.core.ring.rescale_plan import Ceiling, RescalePlan
    from keyshard.observe.control import running_source

    status: Mapping[str, Any] = {}
    if start is None:
        status = running_source(subscription, service_url_of(service_url, client_conf), pid).ask(
            "status"
        )
        before = _assignment_of(status)
    else:
        before = assign(start)
    made = RescalePlan.make(before, ranges)
    lanes = lanes or status.get("lanes") or _LANES
    handler_s = _mean_s(status) if handler_ms is None else handler_ms / 1000
    workers = workers or status.get("workersMax")
    ceilings = [Ceiling.of(count, lanes, handler_s, workers) for count in (len(before), ranges)]
    if as_json:
        typer.echo(json.dumps(_as_json(made, ceilings, lanes, handler_s), indent=2))
    else:
        _print(made, ceilings, lanes, handler_s)


def _assignment_of(status: Mapping[str, Any]) -> Any:
    from keyshard.core.ring.hash_range import HashRange

    return tuple(
        tuple(HashRange(*map(int, text.split("-"))) for text in each["hashRanges"])
        for each in status["ranges"]
    )


def _mean_s(status: Mapping[str, Any]) -> float | None:
    """Mean time of an attempt, as a running source measured it."""
    seconds = status.get("handlerSeconds") or {}
    return seconds["sum"] / seconds["count"] if seconds.get("count") else None


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
