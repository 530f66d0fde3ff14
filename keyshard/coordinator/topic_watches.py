"""Standing requests to the broker to report the topics of a source."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from keyshard.broker.reports import TopicWatch
from keyshard.broker.topics import Catalog
from keyshard.errors import KeyShardError

WATCHES_MAX = 8
"""Maximum number of watches; each of persistent topics has a connection. Topics of further
namespaces are found in rounds."""
AGAIN_S = 60.0
"""Shortest time between two attempts to open a watch, seconds."""

_log = logging.getLogger(__name__)


class TopicWatches:
    """Watches of one source. One thread opens and closes them.

    Args:
        catalog: Names the topics of the source.
        changed: Called when one of them, or a topic partition, was created or deleted. Any thread
            may call it.
    """

    def __init__(self, catalog: Catalog, changed: Callable[[], None]) -> None:
        self._catalog = catalog
        self._changed = changed
        self._open: dict[str, TopicWatch] = {}
        self._again_s: dict[str, float] = {}

    def open(self) -> bool:
        """Open the watches that are not open, and return whether one was opened.

        Without a watch, topics are found a round later.
        """
        now_s, opened = time.monotonic(), False
        for prefix in self._catalog.prefixes()[:WATCHES_MAX]:
            standing = self._open.get(prefix)
            if standing is not None and standing.is_open:
                continue
            if now_s < self._again_s.get(prefix, now_s):
                continue
            self._again_s[prefix] = now_s + AGAIN_S
            try:
                watch = self._catalog.watch(prefix, self._changed)
            except KeyShardError as exc:
                _log.debug("the broker does not report topics of %s: %s", prefix, exc.summary)
                continue
            if watch is not None:
                self._open[prefix], opened = watch, True
        return opened

    def close(self) -> None:
        """Close all watches."""
        for watch in self._open.values():
            watch.close()
