"""The number of tasks of a batch, decided from the cost of the rows of recent batches.

A task has a fixed cost, so cheap rows get few tasks. Expensive rows get one task for each range. A
host shows when its tasks begin and when its batch ends, but not when a task ends: a task that is
slow has taken all of its rows long before. A host with a trigger interval shows the end of a batch
only at the next trigger. The time of such a batch includes the wait for the trigger, so it can
lower the estimated cost of rows, but not raise it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from keyshard.core.window.layout import merged

TASK_COST_S = 0.05
"""Fixed cost of a task: its scheduling, and the garbage collection of its worker, seconds."""
TASK_S = 1.0
"""Duration of a task from which its fixed cost does not count, seconds."""
BATCH_COST_S = 0.3
"""Time of a batch in which the host runs no task, after the first one began, seconds."""
OLDER_WEIGHT = 0.5
"""Weight of all older batches against the newest one, in addition to their rows."""
TRIGGER_MIN_MS = 1_000
"""Shortest trigger interval that is looked for. A shorter wait is little work."""
TRIGGER_STEP_MS = 100
"""Intervals that are looked for are multiples of this."""
TRIGGER_LATE_MS = 50
"""Longest delay after its trigger at which a batch is cut, or its end is shown."""
TRIGGER_LATE_SHARE = 0.02
"""The same as a share of a known interval; the longer one counts."""


class TaskCosts:
    """Cost of rows to the tasks of a source. Not thread-safe: the owner calls it under its lock.

    Args:
        fixed: Number of tasks of every batch; ``None``: decided from the cost of its rows.
    """

    def __init__(self, fixed: int | None = None) -> None:
        self._fixed = fixed
        self._rows = self._work_s = 0.0
        """Rows of recent batches, and the time that tasks took for them, seconds."""
        self._at_once: int | None = None
        """Tasks that the host runs at once; ``None`` while no batch had more."""
        self._interval_ms: int | None = None
        """Trigger interval of the host; ``None`` if none is known."""

    def learn(
        self, rows: int, began_s: Sequence[float], took_s: float, between_ms: tuple[int, int]
    ) -> None:
        """Take the times of a batch that ended.

        Args:
            rows: Rows of the batch.
            began_s: Time at which each task began, seconds since the first one.
            took_s: Time from the first task to the end of the batch, seconds.
            between_ms: Times at which the batch was cut, and at which the host showed that it
                ended; milliseconds since the epoch.
        """
        if not rows or not began_s:
            return
        waited = self._waited(*between_ms)
        at_once = tasks_at_once(began_s, took_s)
        if at_once < len(began_s):
            self._at_once = at_once
        elif self._at_once is not None and at_once > self._at_once:
            self._at_once = None
        fixed_s = BATCH_COST_S + math.ceil(len(began_s) / at_once) * TASK_COST_S
        work_s = at_once * max(0.0, took_s - fixed_s)
        if waited and work_s * self._rows >= self._work_s * rows:
            return
        self._rows = self._rows * OLDER_WEIGHT + rows
        self._work_s = self._work_s * OLDER_WEIGHT + work_s

    def _waited(self, cut_ms: int, end_ms: int) -> bool:
        """Return whether the host waited for its next trigger before it showed the end of a batch.

        An interval becomes known by a batch that is cut at a trigger and ends at the next.
        """
        if self._interval_ms is not None and at_trigger(end_ms, self._interval_ms):
            return True
        found_ms = trigger_interval(cut_ms, end_ms)
        if found_ms is None:
            return False
        self._interval_ms = found_ms
        # Until now the waits counted as work. This may forget expensive rows for one batch.
        self._rows = self._work_s = 0.0
        return True

    def tasks(self, rows: int, size_bytes: int, ranges: int) -> int:
        """Return the number of tasks of the next batch, 1 to ``ranges``.

        Args:
            rows: Rows of the batch.
            size_bytes: Its payload, bytes.
            ranges: Number of ranges.
        """
        if self._fixed is not None:
            return min(self._fixed, ranges)
        if not self._rows:
            return merged(rows, size_bytes, ranges)
        return min(ranges, tasks_worth(rows * self._work_s / self._rows, self._at_once))


def tasks_worth(work_s: float, at_once: int | None) -> int:
    """Return how many tasks some work is worth, at least 1.

    The number has the lowest sum of the time of the batch and the fixed costs. More tasks than run
    at once only balance the load, so each of them has to take :data:`TASK_S`.

    Args:
        work_s: Time that one task would take, seconds.
        at_once: Tasks that the host runs at once; ``None`` if unknown.
    """
    wanted = math.ceil(math.sqrt(work_s / TASK_COST_S))
    if at_once is not None:
        wanted = min(wanted, max(at_once, int(work_s / TASK_S)))
    return max(1, wanted)


def tasks_at_once(began_s: Sequence[float], took_s: float) -> int:
    """Return how many tasks of a batch ran at once.

    With ``n`` at once, the first ``n`` begin long before these end. The others begin later.

    Args:
        began_s: Time at which each task began, seconds since the first one.
        took_s: Time from the first task to the end of the batch, seconds.
    """
    began, count = sorted(began_s), len(began_s)
    return max(n for n in range(1, count + 1) if began[n - 1] <= took_s * n / (3 * count))


def trigger_interval(cut_ms: int, end_ms: int) -> int | None:
    """Return the trigger interval of a host if a batch is cut at one trigger and ends at the next.

    Spark's triggers are at multiples of their interval since the epoch
    (``ProcessingTimeExecutor``). Without a trigger interval, about one batch in several hundred
    matches by chance.

    Args:
        cut_ms: Time at which the batch was cut, milliseconds since the epoch.
        end_ms: Time at which the host showed that it ended, milliseconds since the epoch.
    """
    interval_ms = round((end_ms - cut_ms) / TRIGGER_STEP_MS) * TRIGGER_STEP_MS
    if interval_ms < TRIGGER_MIN_MS:
        return None
    late_ms = max(cut_ms % interval_ms, end_ms % interval_ms)
    return interval_ms if late_ms <= TRIGGER_LATE_MS else None


def at_trigger(at_ms: int, interval_ms: int) -> bool:
    """Return whether a time is that of a trigger, or shortly after it."""
    return at_ms % interval_ms <= max(TRIGGER_LATE_MS, TRIGGER_LATE_SHARE * interval_ms)
