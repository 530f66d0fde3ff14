"""A rescale in the history of its source, written by the thread that makes it."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

from keyshard.consumers.shared_window import SharedWindow
from keyshard.core.rescale_history import DrainedMessage, Rescale, RescaleEnd
from keyshard.errors import KeyShardError


class Outcome(NamedTuple):
    """How a rescale ended."""

    end: RescaleEnd
    epoch: int
    """Number of the assignment that holds."""
    moved_fraction: float = 0.0
    """Part of the ring that has another owner."""
    pause_ms: float | None = None
    """Longest pause of a range, milliseconds; ``None`` if it failed."""


class RecordedRescale:
    """A block that is shown as the running rescale, and after it among the last ones.

    Args:
        shared: Holds the history, and its lock.
        rescale: The rescale, which has begun.
        outcome: Returns how it ended; called at the end of the block with the error that leaves
            it, if any.
    """

    def __init__(
        self, shared: SharedWindow, rescale: Rescale,
        outcome: Callable[[BaseException | None], Outcome],
    ) -> None:  # fmt: skip
        self._shared = shared
        self._rescale = rescale
        self._outcome = outcome

    def __enter__(self) -> RecordedRescale:
        try:
            with self._shared.lock:
                self._running = self._shared.history.rescales.begins(self._rescale)
            return self
        except BaseException:
            # An interrupt may come when the rescale is shown already, and no exit follows it.
            self._forget()
            raise

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:  # fmt: skip
        try:
            if isinstance(error, KeyShardError):
                text = error.message
            else:
                text = "" if error is None else repr(error)
            outcome = self._outcome(error)
            with self._shared.lock:
                self._shared.history.rescales.ends(
                    self._running, time.monotonic(), outcome.end, epoch=outcome.epoch,
                    moved_fraction=outcome.moved_fraction, pause_ms=outcome.pause_ms, error=text,
                )  # fmt: skip
        finally:
            self._forget()

    def _forget(self) -> None:
        with self._shared.lock:
            self._shared.history.rescales.forget(self._rescale)

    def phase(self, name: str) -> None:
        """End the present phase, and begin the next one."""
        with self._shared.lock:
            self._running.phase_begins(time.monotonic(), name)

    def waits_for(self, message: DrainedMessage | None) -> None:
        """Show the message that the drain waits for."""
        with self._shared.lock:
            self._running.drain_waits(message)
