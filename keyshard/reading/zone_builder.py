"""Makes the zones of closed ledgers from the entries that a split reads."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from pyarrow import compute
from pyroaring import BitMap

from keyshard.core.position.entry import EntryBlock, EntryId
from keyshard.core.position.split import Span, Split
from keyshard.core.position.zones import BYTES, Zone, hashed

KEY, EVENT_TIME = "__key", "__eventTime"
COLUMNS = frozenset({KEY, EVENT_TIME})
"""Columns that a zone needs of the content."""
_US_PER_MS = 1000


class ZoneBuilder:
    """Collects the zones of a split.

    A zone is kept only if the read returned all its entries. Readers leave out markers, aborted
    messages, and entries that filters of the broker reject. A later read may return some of these.

    Args:
        split: The entries that are read, in this order. Zones are made of those that the index
            lacks.
    """

    def __init__(self, split: Split) -> None:
        self.zones: list[Zone] = []
        """The whole zones so far."""
        self._spans = {span.ledger: span for span in split.spans if span.closed}
        self._open: _OpenZone | None = None
        self._ledger, self._end = -1, 0
        """Later entries of this ledger than the open zone's begin here."""

    def add(self, block: EntryBlock) -> None:
        """Add the next whole entry."""
        ledger, entry = block.id
        if ledger != self._ledger or entry >= self._end:
            self._begin(block.id)
        if self._open is not None:
            self._open.add(block)

    def finish(self) -> None:
        """Close the last zone."""
        if self._open is not None:
            zone = self._open.zone()
            if zone is not None:
                self.zones.append(zone)
            self._open = None

    def _begin(self, at: EntryId) -> None:
        self.finish()
        span = self._spans.get(at.ledger)
        if span is None:
            self._ledger, self._end = at.ledger, 1 << 63
            return
        lacking = ((max(one[0], span.first), min(one[1], span.end)) for one in span.lacking)
        begin, stop = next((one for one in lacking if at.entry < one[1]), (1 << 63, 1 << 63))
        if at.entry < begin:
            self._ledger, self._end = at.ledger, begin
            return
        size = entries_per_zone(span)
        first = at.entry - (at.entry - begin) % size
        self._ledger, self._end = at.ledger, min(first + size, stop)
        self._open = _OpenZone(at.ledger, first, self._end)


def entries_per_zone(span: Span) -> int:
    """Return the number of entries of a zone."""
    return max(1, BYTES * span.entries // max(1, span.size_bytes))


class _OpenZone:
    """A zone that lacks entries, and adjacent rows of a record batch that are not counted."""

    def __init__(self, ledger: int, first: int, end: int) -> None:
        self._at = (ledger, first, end)
        self._entries = self._rows = 0
        self._least_ms, self._greatest_ms = 1 << 63, 0
        self._events: list[tuple[int, int]] = []
        self._versions: set[int | None] = set()
        self._keys = BitMap()
        self._content: Any = None
        self._start = self._stop = 0

    def add(self, block: EntryBlock) -> None:
        self._entries += 1
        self._rows += len(block.indices)
        time_ms = block.publish_ms
        if time_ms > 0:
            self._least_ms = min(self._least_ms, time_ms)
            self._greatest_ms = max(self._greatest_ms, time_ms)
        self._versions.add(block.schema_version)
        if block.later_parts:
            for part in block.parts:
                self._take(part.content, part.start, part.rows)
        else:
            self._take(block.content, block.start, len(block.indices))

    def zone(self) -> Zone | None:
        """Return the zone; ``None`` if some of its entries did not come."""
        ledger, first, end = self._at
        if self._entries != end - first:
            return None
        self._count()
        published = (self._least_ms, self._greatest_ms) if self._greatest_ms else None
        least, greatest = zip(*self._events, strict=True) if self._events else ((), ())
        events = (min(least), max(greatest)) if self._events else None
        versions = tuple(sorted(one for one in self._versions if one is not None))
        keys = self._keys.serialize()
        return Zone(ledger, first, end, self._rows, published, events, versions, keys)

    def _take(self, content: pa.RecordBatch, start: int, rows: int) -> None:
        """Note rows; adjacent rows of a record batch are counted together."""
        if content is not self._content or start != self._stop:
            self._count()
            self._content, self._start = content, start
        self._stop = start + rows

    def _count(self) -> None:
        content, self._content = self._content, None
        if content is None:
            return
        rows = self._stop - self._start
        keys = content.column(KEY).slice(self._start, rows)
        if keys.null_count < rows:
            self._keys.update(hashed(compute.unique(keys).to_pylist()))
        times = content.column(EVENT_TIME).slice(self._start, rows)
        if times.null_count < rows:
            bounds = compute.min_max(times.cast(pa.int64())).as_py()
            # Rounded outwards.
            self._events.append((bounds["min"] // _US_PER_MS, -(-bounds["max"] // _US_PER_MS)))
