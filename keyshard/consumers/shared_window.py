"""The window that threads share: its lock, and the error that ends the source."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from keyshard.core.recent_history import History
from keyshard.core.window.window import Window
from keyshard.errors import KeyShardError, RuntimeStoppedError


class SharedWindow:
    """One window, which all threads use under one lock.

    Args:
        window: The window.
        stopping: Set when the source stops.
        on_failure: Called after the error that ends the source was stored.
        place: The source, as errors name it.
    """

    def __init__(
        self, window: Window, stopping: threading.Event, on_failure: Callable[[], None], place: str
    ) -> None:
        self.lock = threading.Condition()
        """Notified when rows or evidence arrive, and at the end."""
        self.window = window
        self.history = History()
        """Commits and rescales of the last minutes, under the lock."""
        self.full_since_s = time.monotonic()
        """Monotonic time at which the window last became full."""
        self.without_room_since_s: float | None = None
        """Monotonic time since when a topic partition has had no room in the checkpoint; ``None``
        if all have room."""
        self.stopping = stopping
        """Set when the source stops."""
        self._on_failure = on_failure
        self._place = place
        self._error: KeyShardError | None = None

    def check(self) -> None:
        """Raise the error that ended the source, if there was one."""
        if self._error is not None:
            raise self._error
        if self.stopping.is_set():
            raise RuntimeStoppedError("The source is stopped.")

    def look_for_room(self) -> None:
        """Record whether each topic partition has room in the checkpoint. Called under the lock."""
        if not self.window.tight:
            self.without_room_since_s = None
        elif self.without_room_since_s is None:
            self.without_room_since_s = time.monotonic()

    @property
    def without_room_s(self) -> float:
        """Seconds for which a topic partition has had no room in the checkpoint; 0 with room."""
        since_s = self.without_room_since_s
        return time.monotonic() - since_s if since_s is not None and self.window.tight else 0.0

    def fail(self, error: KeyShardError) -> None:
        """End the source with an error. The first error stays."""
        error.place = error.place or self._place
        with self.lock:
            if self._error is None and not self.stopping.is_set():
                self._error = error
            self.lock.notify_all()
        self._on_failure()

    def wait_for_rows(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` seconds for rows to cut; return whether there are any.

        The caller holds the lock.

        Raises:
            KeyShardError: The error that ended the source.
        """
        self.lock.wait_for(
            lambda: self.window.received_rows or self._error is not None or self.stopping.is_set(),
            timeout_s,
        )
        self.check()
        return bool(self.window.received_rows)
