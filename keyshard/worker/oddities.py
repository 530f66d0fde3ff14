"""Names messages that came where they do not belong, or that cannot be read."""

from __future__ import annotations

import logging
import time

from keyshard.config.source import UNREADABLE
from keyshard.core.position.entry import EntryBlock
from keyshard.errors import MisroutedError, UnreadableEntryError
from keyshard.worker.receiver import OwnedRange

WARN_INTERVAL_S = 60.0
"""Shortest time between two warnings of misrouted messages or of skipped entries, seconds."""

_log = logging.getLogger(__name__)


class Oddities:
    """Told by receive threads.

    Args:
        fail_on_misrouted: Whether a misrouted message ends the source instead of being warned of.
    """

    def __init__(self, *, fail_on_misrouted: bool) -> None:
        self._fail_on_misrouted = fail_on_misrouted
        self._warned_s = -WARN_INTERVAL_S
        self._named_unreadable = False
        self._named_skipped_s = dict.fromkeys(UNREADABLE, -WARN_INTERVAL_S)

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
        now_s = time.monotonic()
        if now_s - self._warned_s >= WARN_INTERVAL_S:
            self._warned_s = now_s
            _log.warning("%s", text)

    def skipped(self, error: UnreadableEntryError, skipped: int) -> None:
        """Log that an unreadable entry is skipped, and why.

        Args:
            error: Names the entry.
            skipped: Entries of its kind that have been skipped.
        """
        option = next(name for name, kind in UNREADABLE.items() if isinstance(error, kind))
        now_s, level = time.monotonic(), logging.DEBUG
        if now_s - self._named_skipped_s[option] >= WARN_INTERVAL_S:
            self._named_skipped_s[option], level = now_s, logging.WARNING
        why = error.message.partition(". ")[0]
        _log.log(
            level, "%s. It is acknowledged and left out, because %s is skip; %d so far.",
            why, option, skipped,
        )  # fmt: skip

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
