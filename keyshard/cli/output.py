"""What commands that talk to a running source share: options, console, and parts of their text."""

# ruff: noqa: PLC0415 - what a command needs is imported when it runs, so that --help is fast.
from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

_PIPE_WIDTH = 200
"""Columns where the output is no terminal, so that lines are not broken."""

_TEXT_MAX = 300
"""Most characters of an error that are shown."""

SubscriptionOption = Annotated[
    str | None,
    typer.Option(
        "--subscription", help="Subscription of the running source; default: the only one."
    ),
]
ServiceUrlOption = Annotated[
    str | None, typer.Option("--service-url", help="Cluster of the running source.")
]
PidOption = Annotated[
    int | None, typer.Option("--pid", min=1, max=2**31 - 1, help="Process of the running source.")
]
ASK_TIMEOUT_S = 300.0
"""Longest wait for a running source to do what it was asked, seconds."""

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def console() -> Console:
    """Standard output."""
    from rich.console import Console

    made = Console(soft_wrap=False)
    return made if made.is_terminal else Console(width=_PIPE_WIDTH)


def plural(count: int, noun: str) -> str:
    """``1 range``, ``2 ranges``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def plain(text: str, length_max: int = _TEXT_MAX) -> str:
    """A foreign text on one line, shortened, without control characters of terminals."""
    text = " ".join(text.split())
    shown = "".join(one if one.isprintable() else "?" for one in text[:length_max])
    return shown if len(text) <= length_max else f"{shown}..."
