"""What a source tells its user: counts, full windows, old rows, misrouted messages."""

from __future__ import annotations

import logging
import time
from typing import Any

from keyshard.core.position.entry import EntryBlock
from keyshard.core.window.window import Window
from keyshard.errors import MisroutedError
from keyshard.worker.receiver import OwnedRange

FULL_WAIT_S = 1.0
"""Time that a window stands full before a cut and is worth a word, seconds."""
WARN_INTERVAL_S = 60.0
"""Shortest time between two warnings of one kind, seconds."""
OLDEST_INTERVAL_S = 1.0
"""How often the oldest row is looked up, seconds."""

_log = logging.getLogger(__name__)


class Watch:
    """Counts, times and warnings of one coordinator, which calls it under its lock.

    Args:
        fail_on_misrouted: Whether a misrouted message ends the source instead of being warned of.
    """

    def __init__(self, *, fail_on_misrouted: bool) -> None:
        self._fail_on_misrouted = fail_on_misrouted
        self._last_cut_s = self._full_since_s = time.monotonic()
        self._oldest_looked_s = 0.0
        self._oldest_published_ms: int | None = None
        self._warned_s: dict[str, float] = {}
        self._named_unreadable = False
        self.keeps_up_ms: int | None = None
        """Trigger interval that would have kept up with the newest batch, milliseconds; ``None``
        when the one in use does."""

    def since_cut_s(self) -> float:
        """Time since the newest cut, seconds."""
        return time.monotonic() - self._last_cut_s

    def full(self) -> None:
        """The window has just become full."""
        self._full_since_s = time.monotonic()

    def cut(self, *, full: bool) -> None:
        """A batch was cut; ``full``: the window was full until then."""
        now = time.monotonic()
        filled_s = self._full_since_s - self._last_cut_s
        self.keeps_up_ms = None
        if full and now - self._full_since_s > FULL_WAIT_S and filled_s > 0:
            self.keeps_up_ms = max(1, int(filled_s * 1000))
            self._warn(
                "full",
                f"The window was full {filled_s:.1f} s after the batch before, and the next batch "
                f"came after {now - self._last_cut_s:.1f} s: a trigger interval of {filled_s:.1f} "
                "s would keep up, or a larger window_rows_max and window_bytes_max.",
            )
        self._last_cut_s = now

    def misrouted(self, owned_range: OwnedRange, rows: int) -> None:
        """Messages came to a range that they do not hash into.

        Raises:
            MisroutedError: If that ends the source.
        """
        text = (
            f"{rows} messages of {owned_range.topic_partition} came to range "
            f"{owned_range.hash_range}, outside of which their keys hash: a "
            "producer batches by default, which routes a batch by its first key, so the order of "
            "the other keys is not kept. Let it batch by key "
            "(BatchingType.KeyBased), or not at all."
        )
        if self._fail_on_misrouted:
            raise MisroutedError(
                f"{text} Or set on_misrouted to warn.",
                topic_partition=owned_range.topic_partition.name,
            )
        self._warn("misrouted", text)

    def unreadable(self, owned_range: OwnedRange, block: EntryBlock) -> None:
        """A message has metadata that cannot be what it should; named once."""
        if not self._named_unreadable:
            self._named_unreadable = True
            _log.warning(
                "%d messages of entry %d:%d of %s have a time, a key or a property that cannot be "
                "read: a time before 1970 or after 9998 (micro- or nanoseconds in place of "
                "milliseconds?) is null and its number is property __eventTime or __publishTime; "
                "bytes that are no text are replaced. Such messages are delivered, and counted as "
                "'unreadable'; this is said once.",
                block.unreadable, *block.id, owned_range.topic_partition,
            )  # fmt: skip

    def status(self, window: Window) -> dict[str, Any]:
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

    def _warn(self, kind: str, text: str) -> None:
        """Log a warning, each kind at most once in a while."""
        now = time.monotonic()
        if now - self._warned_s.get(kind, -WARN_INTERVAL_S) >= WARN_INTERVAL_S:
            self._warned_s[kind] = now
            _log.warning("%s", text)
