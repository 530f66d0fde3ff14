"""What a source tells its user: counts, full windows, old rows."""

from __future__ import annotations

import logging
import time

from keyshard.coordinator.progress import WindowProgress
from keyshard.core.window.window import Window

FULL_WAIT_S = 1.0
"""Time that a window stands full before a cut and is worth a word, seconds."""
WARN_INTERVAL_S = 60.0
"""Shortest time between two warnings, seconds."""
OLDEST_INTERVAL_S = 1.0
"""How often the oldest row is looked up, seconds."""

_log = logging.getLogger(__name__)


class Watch:
    """Counts and times of one source, called under the window's lock."""

    def __init__(self) -> None:
        self._last_cut_s = time.monotonic()
        self._oldest_looked_s = 0.0
        self._oldest_published_ms: int | None = None
        self._warned_s = -WARN_INTERVAL_S
        self.keeps_up_ms: int | None = None
        """Trigger interval that would have kept up with the newest batch, milliseconds; ``None``
        when the one in use does."""

    def since_cut_s(self) -> float:
        """Time since the newest cut, seconds."""
        return time.monotonic() - self._last_cut_s

    def cut(self, *, full_since_s: float | None) -> None:
        """A batch was cut.

        Args:
            full_since_s: Since when the window had been full, on the monotonic clock; ``None``: it
                was not.
        """
        now = time.monotonic()
        self.keeps_up_ms = None
        if full_since_s is not None:
            self._check_pace(now, full_since_s)
        self._last_cut_s = now

    def _check_pace(self, now: float, full_since_s: float) -> None:
        filled_s = full_since_s - self._last_cut_s
        if now - full_since_s <= FULL_WAIT_S or filled_s <= 0:
            return
        self.keeps_up_ms = max(1, int(filled_s * 1000))
        if now - self._warned_s >= WARN_INTERVAL_S:
            self._warned_s = now
            _log.warning(
                "The window was full %.1f s after the batch before, and the next batch came after "
                "%.1f s: a trigger interval of %.1f s would keep up, or a larger window_rows_max "
                "and window_bytes_max.",
                filled_s, now - self._last_cut_s, filled_s,
            )  # fmt: skip

    def status(self, window: Window) -> WindowProgress:
        """What a window holds and has counted since the start, as plain JSON values."""
        counters = window.counters
        return {
            "topicPartitions": len(window.partitions),
            "rowsReceived": counters.rows_received,
            "windowRows": window.rows,
            "windowFill": round(window.pauses.fill(), 3),
            "keepsUpTriggerMillis": self.keeps_up_ms,
            "oldestUnacknowledgedMillis": self.oldest_ms(window),
            "duplicatesDropped": counters.duplicates_dropped,
            "misrouted": counters.misrouted,
            "keyless": counters.keyless,
            "unreadable": counters.unreadable,
            "corruptSkipped": counters.corrupt_skipped,
            "encryptedSkipped": counters.encrypted_skipped,
            "ackHoles": window.holes,
            "holesSettled": counters.holes_settled,
            "entriesLost": counters.entries_lost,
            "plannedBatches": len(window.batches),
        }

    def oldest_ms(self, window: Window) -> int | None:
        """Age of the oldest row held, milliseconds; ``None`` without rows."""
        now = time.monotonic()
        if now - self._oldest_looked_s >= OLDEST_INTERVAL_S:
            self._oldest_looked_s = now
            self._oldest_published_ms = window.oldest_published_ms()
        if self._oldest_published_ms is None or not window.rows:
            return None
        return max(0, int(time.time() * 1000) - self._oldest_published_ms)
