"""A rescale in the history of its source, written by the thread that makes it."""

from __future__ import annotations

import time

from keyshard.consumers.shared_window import SharedWindow
from keyshard.core.rescale_history import DrainedMessage, Rescale, RescaleEnd
from keyshard.errors import KeyShardError


class RecordedRescale:
    """Shows a rescale as one that runs, until :meth:`ends`.

    Args:
        shared: Holds the history, and its lock.
        rescale: The rescale, which has begun.
    """

    def __init__(self, shared: SharedWindow, rescale: Rescale) -> None:
        self._shared = shared
        with shared.lock:
            self._running = shared.history.rescales.begins(rescale)

    def phase(self, name: str) -> None:
        """End the present phase, and begin the next one."""
        with self._shared.lock:
            self._running.phase_begins(time.monotonic(), name)

    def waits_for(self, message: DrainedMessage | None) -> None:
        """Show the message that the drain waits for."""
        with self._shared.lock:
            self._running.drain_waits(message)

    def ends(
        self, end: RescaleEnd, *, epoch: int, moved_fraction: float = 0.0,
        pause_ms: float | None = None, error: BaseException | None = None,
    ) -> None:  # fmt: skip
        """Add the rescale to the last ones.

        Args:
            end: How it ended.
            epoch: Number of the assignment that holds.
            moved_fraction: Part of the ring that has another owner.
            pause_ms: Longest pause of a range, milliseconds; ``None`` if it failed.
            error: The reason of a failure.
        """
        if isinstance(error, KeyShardError):
            text = error.message
        else:
            text = "" if error is None else repr(error)
        with self._shared.lock:
            self._shared.history.rescales.ends(
                self._running, time.monotonic(), end, epoch=epoch,
                moved_fraction=moved_fraction, pause_ms=pause_ms, error=text,
            )  # fmt: skip
