"""The user's cache directory, and a lock between processes."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from keyshard.errors import DevBrokerError

_POLL_S = 0.1


def cache_dir() -> Path:
    """Directory for what keyshard fetches and remembers; it may not exist yet.

    ``$KEYSHARD_CACHE``, else ``$XDG_CACHE_HOME/keyshard``, else ``~/.cache/keyshard``.
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
    """Hold an exclusive lock on ``path`` between processes; a dead process holds none.

    Args:
        path: The lock file; it is made and stays.
        timeout_s: Seconds to wait for another holder.
        on_wait: Called once when another process holds the lock.

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
                        f"Another process held {path} for {timeout_s:g} s. End it, then try again."
                    ) from None
                if on_wait is not None and not waited:
                    on_wait()
                waited = True
                time.sleep(_POLL_S)
        yield
