"""The last minutes of a source: its commits in intervals, and its rescales."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TypedDict

from keyshard.core.rescale_history import (
    RescaleHistory,
    RescaleStatus,
    RescaleSummary,
    RunningRescaleStatus,
)

INTERVAL_S = 10.0
"""Length of an interval of commits, seconds."""
INTERVALS_MAX = 30
"""Most intervals that are kept, those without a commit included."""


class CommitsStatus(TypedDict):
    """Commits of one interval, as JSON values."""

    secondsAgo: float
    """Age of the start of the interval."""
    commits: int
    entries: int
    """Entries that the commits acknowledged."""
    checkpointBytes: int | None
    """Size of the newest checkpoint that the source stored itself; ``None`` if it stored none."""


class RescalesStatus(TypedDict):
    """The last rescales, oldest first."""

    rescales: list[RescaleStatus]
    rescaling: RunningRescaleStatus | None
    """The rescale that runs; ``None`` without one."""
    rescaleSummary: RescaleSummary


class HistoryStatus(RescalesStatus):
    """The last minutes, oldest first."""

    commits: list[CommitsStatus]


def rescales_of(history: HistoryStatus) -> RescalesStatus:
    """Return the fields of a history that are about rescales."""
    return {
        "rescales": history["rescales"],
        "rescaling": history["rescaling"],
        "rescaleSummary": history["rescaleSummary"],
    }


@dataclass(slots=True)
class _Interval:
    number: int
    commits: int = 0
    entries: int = 0
    checkpoint_bytes: int | None = None


class History:
    """The newest commits and rescales. Not thread-safe: the owner calls it under one lock.

    Times are those of any monotonic clock, in seconds.
    """

    def __init__(self) -> None:
        self._intervals: deque[_Interval] = deque(maxlen=INTERVALS_MAX)
        self.rescales = RescaleHistory()

    def committed(self, now_s: float, entries: int) -> None:
        """Count a commit and its entries; one without entries does not count."""
        if entries:
            interval = self._interval(now_s)
            interval.commits += 1
            interval.entries += entries

    def saved(self, now_s: float, checkpoint_bytes: int) -> None:
        """Note the size of a stored checkpoint, bytes."""
        self._interval(now_s).checkpoint_bytes = checkpoint_bytes

    def status(self, now_s: float) -> HistoryStatus:
        """Return the last intervals with a commit or a checkpoint, and the rescales."""
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
            "rescales": self.rescales.last(now_s),
            "rescaling": self.rescales.running(now_s),
            "rescaleSummary": self.rescales.summary(),
        }

    def _interval(self, now_s: float) -> _Interval:
        number = _number(now_s)
        if not self._intervals or self._intervals[-1].number < number:
            self._intervals.append(_Interval(number))
        return self._intervals[-1]


def _number(now_s: float) -> int:
    return int(now_s // INTERVAL_S)
