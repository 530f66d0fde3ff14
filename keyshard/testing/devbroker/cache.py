"""The cache directory of the user, locks between processes, and progress on stderr."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from keyshard.errors import DevBrokerError

_POLL_S = 0.1


def cache_dir() -> Path:
    """Return the directory for files that keyshard downloads or records; it may not exist yet.

    ``$KEYSHARD_CACHE``, or else ``$XDG_CACHE_HOME/keyshard``, or else ``~/.cache/keyshard``.
    """
    own = os.environ.get("KEYSHARD_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME")
    base = Path(shared).expanduser() if shared else Path.home() / ".cache"
    return (base / "keyshard").absolute()


@contextmanager
def file_lock(
    path: Path, timeout_s: float, on_wait: Callable[[], None] | None = None
) -> Iterator[None]:
    """Hold an exclusive lock on ``path`` between processes; it ends with its process.

    Args:
        path: The lock file; it is created and stays.
        timeout_s: Longest wait for another holder, seconds.
        on_wait: Called once if another process holds the lock.

    Raises:
        DevBrokerError: Another process held the lock until the deadline.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout_s
    waited = False
    with path.open("a") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise DevBrokerError(
                        f"Another process held {path} for {timeout_s:g} s.",
                        "End that process, then try again.",
                    ) from None
                if on_wait is not None and not waited:
                    on_wait()
                waited = True
                time.sleep(_POLL_S)
        yield


# -- Progress on stderr of large downloads and archives --------------------------------------------

_WORTH_TELLING_BYTES = 1_000_000


class Announcer:
    """Shows a progress bar per piece of work on a terminal, and one line each elsewhere."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console if console is not None else Console(stderr=True)

    def say(self, text: str) -> None:
        """Print one line."""
        self._console.print(text, highlight=False, soft_wrap=True)

    @contextmanager
    def download(self, name: str, size_bytes: int) -> Iterator[Callable[[int], None]]:
        """Show the progress of one download; small files are not shown."""
        if size_bytes < _WORTH_TELLING_BYTES:
            yield lambda _count: None
        else:
            with self.progress(f"Fetching {name}", size_bytes) as advance:
                yield advance

    @contextmanager
    def progress(self, what: str, size_bytes: int) -> Iterator[Callable[[int], None]]:
        """Show the progress of some work; yields a function that takes the number of bytes done."""
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
