"""The window between threads: its lock, and the error that ends the source."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from keyshard.core.window.window import Window
from keyshard.errors import KeyShardError, RuntimeStoppedError


class SharedWindow:
    """One window, which every thread uses under one lock.

    Args:
        window: What is received, planned and delivered.
        stopping: Set when the source is to end.
        on_failure: Called after the error that ends the source was remembered.
    """

    def __init__(
        self, window: Window, stopping: threading.Event, on_failure: Callable[[], None]
    ) -> None:
        self.lock = threading.Condition()
        """Notified when rows or evidence came, and at the end."""
        self.window = window
        self.full_since_s = time.monotonic()
        """When the window became full last, on the monotonic clock."""
        self.stopping = stopping
        """Set when the source is to end."""
        self._on_failure = on_failure
        self._error: KeyShardError | None = None

    def check(self) -> None:
        """Raise the error that ended the source, if there was one."""
        if self._error is not None:
            raise self._error
        if self.stopping.is_set():
            raise RuntimeStoppedError("The source is stopped.")

    def fail(self, error: KeyShardError) -> None:
        """Remember the error that ends the source."""
        with self.lock:
            if self._error is None and not self.stopping.is_set():
                self._error = error
            self.lock.notify_all()
        self._on_failure()

    def wait_for_rows(self, timeout_s: float) -> bool:
        """Wait, with the lock held, until something can be cut; whether it can.

        Raises:
            KeyShardError: What ended the source.
        """
        self.lock.wait_for(
            lambda: self.window.received_rows or self._error is not None or self.stopping.is_set(),
            timeout_s,
        )
        self.check()
        return bool(self.window.received_rows)
