"""``keyshard status --watch``: the status again and again, with rates, until the source ends."""

# ruff: noqa: PLC0415 - what a command needs is imported when it runs, so that --help is fast.
from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import typer

from keyshard.cli.output import console
from keyshard.errors import ControlError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from keyshard.observe.control import RunningSource
    from keyshard.observe.status_types import Status

EVERY_S = 1.0
"""Time between two looks, seconds."""
RATES_OVER = 5
"""Looks over which rates are taken."""


class Rates:
    """Rates between the first and the last of a few looks at a source."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, Status]] = deque(maxlen=RATES_OVER + 1)

    def look(self, now_s: float, told: Status) -> None:
        """Take a status, and the time it was told at."""
        if self._looks and self._looks[-1][1]["epoch"] != told["epoch"]:
            self._looks.clear()  # a rescale: its ranges are others, and count from 0
        self._looks.append((now_s, told))

    def of(self, count: Callable[[Status], int | None]) -> float | None:
        """How much something that only grows grows per second; ``None`` while that is unknown."""
        if len(self._looks) < 2:
            return None
        (began_s, first), (now_s, last) = self._looks[0], self._looks[-1]
        before, after = count(first), count(last)
        if before is None or after is None or now_s <= began_s:
            return None
        return max(0, after - before) / (now_s - began_s)


def watch(
    source: RunningSource,
    view: Callable[[Status, Rates], RenderableType],
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
            for told, rates in _looks(source):
                if as_json:
                    typer.echo(json.dumps(told))
                else:
                    with source.read():
                        shown.print(view(told, rates))
        else:
            with Live(console=shown, auto_refresh=False) as live:
                for told, rates in _looks(source):
                    with source.read():
                        live.update(view(told, rates), refresh=True)
    except KeyboardInterrupt:
        return
    typer.echo(f"The source of {source.subscription!r}, pid {source.pid}, has stopped.", err=True)


def _looks(source: RunningSource) -> Iterator[tuple[Status, Rates]]:
    rates = Rates()
    while True:
        try:
            told: Status = source.ask("status")
        except ControlError as exc:
            if not source.path.exists():
                return
            if isinstance(exc.__cause__, ConnectionRefusedError):
                raise ControlError(
                    f"The source of {source.subscription!r}, pid {source.pid}, is gone without "
                    "having stopped: it was killed, or it crashed."
                ) from exc
            raise
        with source.read():
            rates.look(time.monotonic(), told)
        yield told, rates
        time.sleep(EVERY_S)
