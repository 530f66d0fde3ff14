"""Rescales of a source: the last ones by phase, the one that runs, and a summary."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypedDict

RESCALES_MAX = 20
"""Most rescales that are kept."""
ERROR_MAX = 500
"""Most characters of the error of a rescale."""


class RescaleEnd(Enum):
    """How a rescale or balance ended."""

    MOVED = "moved"
    """The new assignment holds."""
    UNCHANGED = "unchanged"
    """The assignment was as asked already."""
    KEPT = "kept"
    """It failed, and the old assignment holds."""
    LOST = "lost"
    """It failed, and the source ends."""


class PhaseStatus(TypedDict):
    """A phase of a rescale, as JSON values."""

    phase: str
    """``check``, ``drain``, ``close``, ``subscribe``, ``adopt`` or ``restore``; of actors also
    ``start``."""
    millis: float


class RescaleStatus(TypedDict):
    """A rescale or balance, as JSON values."""

    secondsAgo: float
    """Time since its end."""
    asked: dict[str, int | bool]
    """``{"ranges": N}``, ``{"balance": True}``, or ``{"actors": N}`` of a Ray job."""
    epoch: int
    before: int
    after: int
    movedFraction: float
    durationMillis: float
    phases: list[PhaseStatus]
    """In their order. They take the whole time but the decision about the new assignment."""
    pauseMillis: float | None
    """Longest pause of a range."""
    end: str
    """A value of :class:`RescaleEnd`."""
    error: str
    """The reason why nothing moved; empty if it succeeded."""


class DrainedMessage(TypedDict):
    """A message whose handler a rescale waits for, as JSON values."""

    key: str | None
    messageId: str
    runningSeconds: float


class RunningRescaleStatus(TypedDict):
    """The rescale or balance that runs, as JSON values."""

    asked: dict[str, int | bool]
    before: int
    after: int
    forSeconds: float
    phases: list[PhaseStatus]
    """The last one runs."""
    drainTimeoutSeconds: float
    """Longest drain. After it, the old assignment holds."""
    waitsFor: DrainedMessage | None
    """The message whose handler has run longest; ``None`` unless the phase is ``drain``."""


class RescaleSummary(TypedDict):
    """All rescales and balances since the start, as JSON values."""

    moved: int
    unchanged: int
    kept: int
    lost: int
    meanMillis: float | None
    """Mean duration of those that moved slots; ``None`` without one. So are the next two."""
    maxMillis: float | None
    maxPauseMillis: float | None
    """Longest pause of a range."""
    drainTimeoutSeconds: float | None
    """Longest drain of a rescale of ranges; ``None`` if they are fixed."""


@dataclass(frozen=True, slots=True)
class Rescale:
    """A rescale or balance that has begun."""

    asked: Mapping[str, int | bool]
    """``{"ranges": N}`` or ``{"balance": True}``, as in a request; ``{"actors": N}`` of a Ray
    job."""
    before: int
    """Number of ranges, or of actors; so is the next one."""
    after: int
    began_s: float
    drain_timeout_s: float


@dataclass(slots=True, eq=False)
class RunningRescale:
    """A rescale that runs. Times are those of any monotonic clock, in seconds."""

    rescale: Rescale
    phases: list[tuple[str, float]] = field(default_factory=list)
    """Name and start of each."""
    waits_for: DrainedMessage | None = None

    def phase_begins(self, now_s: float, name: str) -> None:
        """End the phase, and begin the next one."""
        self.phases.append((name, now_s))
        self.waits_for = None

    def drain_waits(self, message: DrainedMessage | None) -> None:
        """Show the message that the drain waits for."""
        self.waits_for = message

    def timed(self, now_s: float) -> list[PhaseStatus]:
        """Return the phases; the last one takes until now."""
        ends = [*(began_s for _, began_s in self.phases[1:]), now_s]
        return [
            {"phase": name, "millis": _millis(end_s - began_s)}
            for (name, began_s), end_s in zip(self.phases, ends, strict=False)
        ]


class RescaleHistory:
    """The rescales of a source. Not thread-safe: the owner calls it under one lock.

    Times are those of any monotonic clock, in seconds.
    """

    def __init__(self) -> None:
        self._rescales: deque[tuple[float, RescaleStatus]] = deque(maxlen=RESCALES_MAX)
        """Each with the time of its end."""
        self._running: list[RunningRescale] = []
        """In the order of their starts: the actors of a Ray job may rescale beside its ranges."""
        self._ends = dict.fromkeys(RescaleEnd, 0)
        self._moved_ms = self._max_ms = self._max_pause_ms = 0.0
        self.drain_timeout_s: float | None = None
        """Longest drain of a rescale of ranges; ``None`` if they are fixed."""

    def begins(self, rescale: Rescale) -> RunningRescale:
        """Show a rescale as one that runs."""
        running = RunningRescale(rescale)
        self._running.append(running)
        return running

    def ends(
        self, running: RunningRescale, now_s: float, end: RescaleEnd, *, epoch: int,
        moved_fraction: float = 0.0, pause_ms: float | None = None, error: str = "",
    ) -> None:  # fmt: skip
        """Add a running rescale to the last ones.

        Args:
            running: The rescale.
            now_s: The end.
            end: How it ended.
            epoch: Number of the assignment that holds.
            moved_fraction: Part of the ring that has another owner.
            pause_ms: Longest pause of a range, milliseconds; ``None`` if it failed.
            error: The reason of a failure.
        """
        self._running.remove(running)
        rescale = running.rescale
        status: RescaleStatus = {
            "secondsAgo": 0.0,
            "asked": dict(rescale.asked),
            "epoch": epoch,
            "before": rescale.before,
            "after": rescale.after,
            "movedFraction": moved_fraction,
            "durationMillis": _millis(now_s - rescale.began_s),
            "phases": running.timed(now_s),
            "pauseMillis": pause_ms,
            "end": end.value,
            "error": error[:ERROR_MAX],
        }
        self._rescales.append((now_s, status))
        self._ends[end] += 1
        if end is RescaleEnd.MOVED:
            self._moved_ms += status["durationMillis"]
            self._max_ms = max(self._max_ms, status["durationMillis"])
            self._max_pause_ms = max(self._max_pause_ms, pause_ms or 0.0)

    def forget(self, rescale: Rescale) -> None:
        """Show a rescale no longer as one that runs, if it still is."""
        self._running = [one for one in self._running if one.rescale is not rescale]

    def last(self, now_s: float) -> list[RescaleStatus]:
        """Return the last rescales, the oldest first."""
        return [{**one, "secondsAgo": round(now_s - at_s, 1)} for at_s, one in self._rescales]

    def running(self, now_s: float) -> RunningRescaleStatus | None:
        """Return the rescale that runs; of two, the one that began last."""
        if not self._running:
            return None
        running = self._running[-1]
        rescale = running.rescale
        return {
            "asked": dict(rescale.asked),
            "before": rescale.before,
            "after": rescale.after,
            "forSeconds": round(now_s - rescale.began_s, 1),
            "phases": running.timed(now_s),
            "drainTimeoutSeconds": rescale.drain_timeout_s,
            "waitsFor": running.waits_for,
        }

    def summary(self) -> RescaleSummary:
        """Return the numbers of all rescales."""
        moved = self._ends[RescaleEnd.MOVED]
        return {
            "moved": moved,
            "unchanged": self._ends[RescaleEnd.UNCHANGED],
            "kept": self._ends[RescaleEnd.KEPT],
            "lost": self._ends[RescaleEnd.LOST],
            "meanMillis": round(self._moved_ms / moved, 3) if moved else None,
            "maxMillis": self._max_ms if moved else None,
            "maxPauseMillis": self._max_pause_ms if moved else None,
            "drainTimeoutSeconds": self.drain_timeout_s,
        }


def _millis(seconds: float) -> float:
    return round(1_000 * seconds, 3)
