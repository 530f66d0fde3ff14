"""The last minutes of a source: its commits in intervals, and its rescales."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TypedDict

INTERVAL_S = 10.0
"""Length of an interval of commits, seconds."""
INTERVALS_MAX = 30
"""Most intervals that are kept, those without a commit included."""
RESCALES_MAX = 20
"""Most rescales that are kept."""
ERROR_MAX = 500
"""Most characters of the error of a rescale."""


class CommitsStatus(TypedDict):
    """Commits of one interval, as JSON values."""

    secondsAgo: float
    """Age of the start of the interval."""
    commits: int
    entries: int
    """Entries that the commits acknowledged."""
    checkpointBytes: int | None
    """Size of the newest checkpoint that the source stored itself; ``None`` if it stored none."""


class RescaleStatus(TypedDict):
    """A rescale or balance, as JSON values."""

    secondsAgo: float
    epoch: int
    before: int
    after: int
    movedFraction: float
    durationMillis: float
    pauseMillis: float | None
    """Longest pause of a range."""
    error: str
    """Why nothing moved; empty if it succeeded."""


class HistoryStatus(TypedDict):
    """The last minutes, oldest first."""

    commits: list[CommitsStatus]
    rescales: list[RescaleStatus]


@dataclass(slots=True)
class _Interval:
    number: int
    commits: int = 0
    entries: int = 0
    checkpoint_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Rescale:
    """One rescale or balance."""

    epoch: int
    before: int
    after: int
    moved_fraction: float
    duration_ms: float
    pause_ms: float | None
    error: str = ""


class History:
    """The newest commits and rescales. Not thread-safe: the owner calls it under one lock.

    Times are those of any monotonic clock, in seconds.
    """

    def __init__(self) -> None:
        self._intervals: deque[_Interval] = deque(maxlen=INTERVALS_MAX)
        self._rescales: deque[tuple[float, Rescale]] = deque(maxlen=RESCALES_MAX)

    def committed(self, now_s: float, entries: int) -> None:
        """Count a commit and its entries; one without entries does not count."""
        if entries:
            interval = self._interval(now_s)
            interval.commits += 1
            interval.entries += entries

    def saved(self, now_s: float, checkpoint_bytes: int) -> None:
        """Note the size of a stored checkpoint, bytes."""
        self._interval(now_s).checkpoint_bytes = checkpoint_bytes

    def rescaled(self, now_s: float, rescale: Rescale) -> None:
        """Add a rescale."""
        self._rescales.append((now_s, rescale))

    def status(self, now_s: float) -> HistoryStatus:
        """Return the last intervals with a commit or a checkpoint, and the last rescales."""
        oldest = _number(now_s) - INTERVALS_MAX
        return {
            "commits": [
                {
                    "secondsAgo": round(now_s - one.number * INTERVAL_S, 1),
                    "commits": one.commits,
                    "entries": one.entries,
                    "checkpointBytes": one.checkpoint_bytes,
                }
                for one in self._intervals
                if one.number > oldest
            ],
            "rescales": [
                {
                    "secondsAgo": round(now_s - at_s, 1),
                    "epoch": one.epoch,
                    "before": one.before,
                    "after": one.after,
                    "movedFraction": one.moved_fraction,
                    "durationMillis": one.duration_ms,
                    "pauseMillis": one.pause_ms,
                    "error": one.error[:ERROR_MAX],
                }
                for at_s, one in self._rescales
            ],
        }

    def _interval(self, now_s: float) -> _Interval:
        number = _number(now_s)
        if not self._intervals or self._intervals[-1].number < number:
            self._intervals.append(_Interval(number))
        return self._intervals[-1]


def _number(now_s: float) -> int:
    return int(now_s // INTERVAL_S)
