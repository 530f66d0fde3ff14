"""What is told on stderr while something large is fetched or unpacked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

_WORTH_TELLING_BYTES = 1_000_000


class Announcer:
    """A progress bar per piece of work on a terminal, one line each elsewhere."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console if console is not None else Console(stderr=True)

    def say(self, text: str) -> None:
        """Print one line."""
        self._console.print(text, highlight=False, soft_wrap=True)

    @contextmanager
    def download(self, name: str, size_bytes: int) -> Iterator[Callable[[int], None]]:
        """Tell about one download; small files are not worth telling."""
        if size_bytes < _WORTH_TELLING_BYTES:
            yield lambda _count: None
        else:
            with self.progress(f"Fetching {name}", size_bytes) as advance:
                yield advance

    @contextmanager
    def progress(self, what: str, size_bytes: int) -> Iterator[Callable[[int], None]]:
        """Tell about work on ``size_bytes`` bytes; yields a function that takes bytes done."""
        if not self._console.is_terminal:
            self.say(f"{what} ({size_bytes / 1e6:.0f} MB)")
            yield lambda _count: None
            return
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=self._console,
        ) as bars:
            task = bars.add_task(what, total=size_bytes)
            yield lambda count: bars.update(task, advance=count)
            bars.update(task, completed=size_bytes)
