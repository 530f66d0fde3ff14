"""The rescales of a source, and the dry run of one, as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from keyshard.cli.output import ERROR_MAX, duration, plain, plural
from keyshard.core.recent_history import HistoryStatus
from keyshard.core.rescale_history import (
    PhaseStatus,
    RescaleStatus,
    RescaleSummary,
    RunningRescaleStatus,
)
from keyshard.core.ring.assignment import Ceiling, RescaleDryRun
from keyshard.core.ring.hash_range import RING_SIZE

_MOVES_MAX = 20


def history_text(history: HistoryStatus) -> RenderableType:
    """Return the rescale that runs, a table of the last ones, and the summary of all."""
    running, rescales = history["rescaling"], history["rescales"]
    parts: list[RenderableType] = [] if running is None else [escape(_running(running))]
    parts.append(_table(rescales) if rescales else "No rescale has ended since the start.")
    if rescales:
        parts.append(_summary(history["rescaleSummary"]))
    return Group(*parts)


def _table(rescales: Sequence[RescaleStatus]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("ago", "asked", "ranges", "end", "moved", "took", "phases", "longest pause"):
        table.add_column(name)
    for one in reversed(rescales):
        pause = one["pauseMillis"]
        table.add_row(
            duration(one["secondsAgo"]), _asked(one), f"{one['before']} to {one['after']}",
            one["end"], f"{one['movedFraction']:.1%}", _millis(one["durationMillis"]),
            _phases(one["phases"]), "-" if pause is None else _millis(pause),
        )  # fmt: skip
        if one["error"]:
            table.add_row("", "", "", "", "", "", escape(plain(one["error"], ERROR_MAX)), "")
    return table


def _asked(one: RescaleStatus) -> str:
    if one["asked"].get("balance"):
        return "balance"
    return f"{one['asked'][_parts(one)]} {_parts(one)}"


def _parts(one: RescaleStatus | RunningRescaleStatus) -> str:
    """Return the name of the parts that divide the ring."""
    return "actors" if "actors" in one["asked"] else "ranges"


def _phases(phases: Sequence[PhaseStatus]) -> str:
    return ", ".join(f"{one['phase']} {_millis(one['millis'])}" for one in phases)


def _millis(millis: float) -> str:
    return f"{millis:.0f} ms" if millis < 1_000 else f"{millis / 1_000:.1f} s"


def _running(one: RunningRescaleStatus) -> str:
    text = (
        f"A rescale from {one['before']} to {one['after']} {_parts(one)} has run for "
        f"{duration(one['forSeconds'])}: {_phases(one['phases'])}."
    )
    waits = one["waitsFor"]
    if waits is None:
        return text
    key = "None" if waits["key"] is None else repr(plain(waits["key"]))
    return (
        f"{text} It waits at most {one['drainTimeoutSeconds']:g} s, for message "
        f"{waits['messageId']} of key {key}, whose handler has run for "
        f"{duration(waits['runningSeconds'])}."
    )


def _summary(summary: RescaleSummary) -> str:
    counts = {
        "moved": summary["moved"], "unchanged": summary["unchanged"], "kept": summary["kept"],
        "lost": summary["lost"],
    }  # fmt: skip
    text = "Since the start: " + ", ".join(
        f"{count} {end}" for end, count in counts.items() if count
    )
    mean, longest, pause = summary["meanMillis"], summary["maxMillis"], summary["maxPauseMillis"]
    if mean is None or longest is None or pause is None:
        return f"{text}."
    return (
        f"{text}. Those that moved slots took {_millis(mean)} on average and {_millis(longest)} at "
        f"most; the longest pause of a range was {_millis(pause)}."
    )


def dry_run_text(
    made: RescaleDryRun, ceilings: Sequence[Ceiling], lanes: int, handler_s: float | None
) -> RenderableType:
    """Return what a rescale would move, and the limits of handlers before and after it.

    Args:
        made: The moves.
        ceilings: The limits before and after.
        lanes: Lanes in each range.
        handler_s: Mean time of a handler, seconds; ``None`` if unknown.
    """
    from_, to = len(made.before), len(made.after)
    moves = plural(len(made.moves), "piece")
    first = (
        f"{plural(from_, 'range')} to {to}: {made.moved_fraction:.1%} of the ring moves in "
        f"{moves}; the optimum is {made.optimum_fraction:.1%}."
    )
    parts: list[RenderableType] = [first]
    if made.moves:
        table = Table("slots", "from range", "to range", "of the ring")
        for move in made.moves[:_MOVES_MAX]:
            part = len(move.hash_range) / RING_SIZE
            table.add_row(str(move.hash_range), str(move.source), str(move.target), f"{part:.2%}")
        parts.append(table)
        if len(made.moves) > _MOVES_MAX:
            parts.append(f"... and {len(made.moves) - _MOVES_MAX} more; --json lists them all.")
    table = Table("ranges", "lanes each", "keys at once", "messages/s at most", "limited by")
    for count, ceiling in zip((from_, to), ceilings, strict=True):
        rate = "-" if ceiling.rows_per_s is None else f"{ceiling.rows_per_s:,.0f}"
        table.add_row(str(count), str(lanes), f"{ceiling.keys:,}", rate, ceiling.limited_by)
    parts.append(table)
    if handler_s is None:
        parts.append("To see messages per second, add --handler-ms.")
    else:
        parts.append(f"Handler time: {handler_s * 1000:.2f} ms.")
    return Group(*parts)
