"""Options, console and text parts that commands for a running source share."""

# ruff: noqa: PLC0415 - each command imports its modules when it runs, so that --help is fast.
from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from keyshard.observe.status_types import NewestErrorStatus

_PIPE_WIDTH = 200
"""Width of output that is no terminal, in columns, so that lines are not broken."""

_TEXT_MAX = 300
"""Most characters of a foreign text that are shown."""
ERROR_MAX = 1_000
"""Most characters of the error of a status, which is a sentence for the reader."""

SubscriptionOption = Annotated[
    str | None,
    typer.Option(
        "--subscription", help="Subscription of the running source. Default: the only one."
    ),
]
ServiceUrlOption = Annotated[
    str | None, typer.Option("--service-url", help="Service URL of the running source.")
]
PidOption = Annotated[
    int | None,
    typer.Option("--pid", min=1, max=2**31 - 1, help="Process id of the running source."),
]
ASK_TIMEOUT_S = 300.0
"""Longest wait for a running source to do a request, seconds."""

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def console(*, stderr: bool = False) -> Console:
    """Return a console for standard output, or for standard error."""
    from rich.console import Console

    made = Console(soft_wrap=False, stderr=stderr)
    return made if made.is_terminal else Console(width=_PIPE_WIDTH, stderr=stderr)


def plural(count: int, noun: str, nouns: str | None = None) -> str:
    """Return a count with its noun: ``1 range``, ``2 ranges``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {nouns or f'{noun}s'}"


def pace(value: float | None) -> str:
    """Return a rate; ``-`` while it is unknown."""
    return "-" if value is None else f"{value:,.0f}" if value >= 10 or not value else f"{value:.1f}"


def duration(seconds: float) -> str:
    """Return a duration in its two largest units."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = int(seconds) // 60
    if minutes < 60:
        return f"{minutes} min {int(seconds) % 60} s"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"


def newest_error(newest: NewestErrorStatus | None) -> str:
    """Return the newest error of a status, with its age."""
    if newest is None:
        return ""
    ago_s, error = newest["secondsAgo"], plain(newest["error"], ERROR_MAX)
    return error if ago_s is None else f"{error} ({duration(ago_s)} ago)"


def plain(text: str, length_max: int = _TEXT_MAX) -> str:
    """Return an untrusted text on one line, shortened, without control characters of terminals."""
    text = " ".join(text.split())
    shown = "".join(one if one.isprintable() else "?" for one in text[:length_max])
    return shown if len(text) <= length_max else f"{shown}..."


def age(seconds: float) -> str:
    """Return a duration with one unit: ``2.0 h``."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"
