"""Progress of a source, field by field; see ``docs/options.md``."""

from __future__ import annotations

import logging
import time
from typing import TypedDict

from keyshard.core.position.entry import TopicPartition
from keyshard.core.window.window import Window


class WindowProgress(TypedDict):
    """Contents and counts of the window."""

    topicPartitions: int
    rowsReceived: int
    entriesReceived: int
    windowRows: int
    windowFill: float
    keepsUpTriggerMillis: int | None
    oldestUnacknowledgedMillis: int | None
    duplicatesDropped: int
    misrouted: int
    keyless: int
    unreadable: int
    corruptSkipped: int
    encryptedSkipped: int
    ackGaps: int
    ackGapsResolved: int
    plannedBatches: int


class DiscoveryProgress(TypedDict):
    """Counts of topic partitions found and deleted since the start."""

    partitionsDiscovered: int
    partitionsGone: int
    segmentsWaiting: int
    """Segments of scalable topics with parents that are not acknowledged."""
    discoveryError: str
    backlogEntries: int | None


class SourceWorker(TypedDict):
    """A worker outside the source's process. If it is gone, ``pid`` and ``host`` are ``None``."""

    kind: str
    pid: int | None
    host: str | None
    consumers: int
    forSeconds: float
    restarts: int


class Progress(WindowProgress, DiscoveryProgress):
    """Progress of one source; counts are since its start."""

    ranges: int
    rangesPaused: int
    checkpointBytes: int
    partitionsWithoutRoom: int
    withoutRoomMillis: int
    connectionError: str
    gapResolverError: str
    entriesNotDue: int | None
    """``None`` for a bounded run of pulsar-client without ``admin_url``."""
    entriesLost: int | None
    """Without ``admin_url``, only entries of a planned batch are missed; ``None`` if there are
    none."""
    entriesAcknowledged: int
    entriesToAcknowledge: int
    sourceWorkers: list[SourceWorker]


# -- Pace, and the age of rows ---------------------------------------------------------------------

FULL_WAIT_S = 1.0
"""Longest time that a window may be full before a cut without a warning, seconds."""
WARN_INTERVAL_S = 60.0
"""Shortest time between two warnings, seconds."""
OLDEST_INTERVAL_S = 1.0
"""Time between two look-ups of the oldest row, seconds."""

_log = logging.getLogger(__name__)


class PaceMonitor:
    """Measures the pace of cuts and the age of rows. Called under the window's lock."""

    def __init__(self) -> None:
        self._last_cut_s = time.monotonic()
        self._oldest_looked_s = 0.0
        self._oldest_published_ms: dict[TopicPartition, int] = {}
        self._warned_s = -WARN_INTERVAL_S
        self.keeps_up_ms: int | None = None
        """Trigger interval that would have kept up with the newest batch, milliseconds; ``None`` if
        the current one keeps up."""

    def since_cut_s(self) -> float:
        """Return the time since the newest cut, seconds."""
        return time.monotonic() - self._last_cut_s

    def cut(self, *, full_since_s: float | None) -> None:
        """Record a cut, and warn if the window was full for long.

        Args:
            full_since_s: Monotonic time at which the window became full; ``None`` if it was not
                full.
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
                "The window was full %.1f s after the previous batch, and the next batch came "
                "after %.1f s. Set the trigger interval to %.1f s, or raise window_rows_max and "
                "window_bytes_max.",
                filled_s, now - self._last_cut_s, filled_s,
            )  # fmt: skip

    def status(self, window: Window) -> WindowProgress:
        """Return contents and counts of a window as plain JSON values."""
        counters = window.counters
        return {
            "topicPartitions": len(window.partitions),
            "rowsReceived": counters.rows_received,
            "entriesReceived": counters.entries_received,
            "windowRows": window.rows,
            "windowFill": round(window.pauses.fill(), 3),
            "keepsUpTriggerMillis": self.keeps_up_ms,
            "oldestUnacknowledgedMillis": max(self.oldest_ms(window).values(), default=None),
            "duplicatesDropped": counters.duplicates_dropped,
            "misrouted": counters.misrouted,
            "keyless": counters.keyless,
            "unreadable": counters.unreadable,
            "corruptSkipped": counters.corrupt_skipped,
            "encryptedSkipped": counters.encrypted_skipped,
            "ackGaps": window.ack_gaps,
            "ackGapsResolved": counters.ack_gaps_resolved,
            "plannedBatches": len(window.batches),
        }

    def oldest_ms(self, window: Window) -> dict[TopicPartition, int]:
        """Return the age of the oldest row that each topic partition holds, milliseconds."""
        now = time.monotonic()
        if now - self._oldest_looked_s >= OLDEST_INTERVAL_S:
            self._oldest_looked_s = now
            self._oldest_published_ms = window.oldest_published_ms()
        now_ms = int(time.time() * 1000)
        return {
            where: max(0, now_ms - published_ms)
            for where, published_ms in self._oldest_published_ms.items()
            if (held := window.known.get(where)) is not None and held.held
        }
