"""Zones: bounds of the messages in consecutive entries of a closed ledger.

A bounded read leaves out the zones that have no message it wants. A zone may be kept for nothing,
but never left out wrongly: its bounds contain every message, and entries are never changed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

import mmh3
from pyroaring import BitMap

from keyshard.core.position.entry import TopicPartition
from keyshard.core.position.replicas import LedgerReplicas
from keyshard.core.position.split import Closed, Span, Split

BYTES = 4 * 1024 * 1024
"""Stored bytes of a zone."""
HOLE_BYTES = 1024 * 1024
"""Fewest bytes that are left out between two parts: to begin another part takes as long as to read
these."""
_HASH_MASK = (1 << 24) - 1
"""Bits of a key's hash. 80,000 keys in a zone then take 2 bytes each, and another key is taken for
one of them in 0.5 % of all cases."""

Limits: TypeAlias = tuple[int | None, int | None]
"""First time, inclusive, and end, exclusive, milliseconds since the epoch; ``None``: no limit."""
NO_LIMITS: Limits = (None, None)
Intervals: TypeAlias = list[tuple[int, int]]
"""First entries and ends, exclusive."""


def hashed(keys: Iterable[str | None]) -> list[int]:
    """Return the hashes of partition keys, without those that are ``None``."""
    return [mmh3.hash(key, signed=False) & _HASH_MASK for key in keys if key is not None]


@dataclass(frozen=True, slots=True)
class Zone:
    """Consecutive entries of a ledger, and the bounds of all their messages."""

    ledger: int
    first: int
    end: int
    """End of the entries, exclusive."""
    rows: int
    """Number of messages."""
    published: tuple[int, int] | None
    """Least and greatest publish time, milliseconds since the epoch; ``None``: none is set."""
    events: tuple[int, int] | None
    """Least and greatest event time, milliseconds since the epoch; ``None``: none is set."""
    schema_versions: tuple[int, ...] = ()
    """Versions of the topic's schema, ascending; without messages that have none."""
    keys: bytes | None = field(default=None, repr=False)
    """Hashes of the partition keys, a serialized roaring bitmap; ``None``: they are not loaded."""


@dataclass(frozen=True, slots=True)
class Storage:
    """Storage of a topic partition. The index uses only zones of the same storage and ledgers."""

    topic_partition: TopicPartition
    created: str
    """Creation time of the storage; not empty."""
    closed: Mapping[int, Closed]
    """The closed ledgers."""


@dataclass(frozen=True)
class Wanted:
    """The messages that a read wants, as far as zones can tell them apart."""

    published: Limits = NO_LIMITS
    """Publish times; a message without one is not wanted if there is a limit."""
    events: Limits = NO_LIMITS
    """Event times; a message without one is not wanted if there is a limit."""
    keys: Collection[str] | None = None
    """Partition keys; ``None``: all, and messages without a key."""

    def rules_out(self, zone: Zone) -> bool:
        """Return whether a zone has no wanted message."""
        if _outside(zone.published, self.published) or _outside(zone.events, self.events):
            return True
        if self.keys is None or zone.keys is None:
            return False
        try:
            found = BitMap.deserialize(zone.keys)
        except (ValueError, IndexError):  # not a bitmap, so the zone may have wanted messages
            return False
        return not found.intersect(self._hashes)

    @cached_property
    def _hashes(self) -> BitMap:
        """Hashes of the keys, made once for all zones."""
        return BitMap(hashed(self.keys or ()))


def _outside(bounds: tuple[int, int] | None, limits: Limits) -> bool:
    if limits == NO_LIMITS:
        return False
    if bounds is None:
        return True
    (start, end), (least, greatest) = limits, bounds
    return (start is not None and greatest < start) or (end is not None and least >= end)


class Zoned:
    """Entries of a topic partition that have zones, and those that a read leaves out.

    Args:
        zones: The zones that fit the stored ledgers. They may overlap.
        wanted: The messages that the read wants.
    """

    def __init__(self, zones: Iterable[Zone], wanted: Wanted) -> None:
        known: defaultdict[int, Intervals] = defaultdict(list)
        left_out: defaultdict[int, Intervals] = defaultdict(list)
        for zone in zones:
            known[zone.ledger].append((zone.first, zone.end))
            if wanted.rules_out(zone):
                left_out[zone.ledger].append((zone.first, zone.end))
        self._known = {ledger: _union(found) for ledger, found in known.items()}
        self._left_out = {ledger: _union(found) for ledger, found in left_out.items()}

    def of(self, stretch: Split, closed: Mapping[int, Closed]) -> list[Split]:
        """Return the parts of a stretch that may have wanted messages, at least one.

        Args:
            stretch: Entries of the topic partition.
            closed: Its closed ledgers. A span of one that lacks zones gets ``closed`` and
                ``lacking``.

        Returns:
            Splits without holes. The first one names the entries that are left out. It has no spans
            if none is left.
        """
        runs: list[list[Span]] = []
        skipped: list[Span] = []
        hole: list[Span] = []
        for span, kept in self._parts(stretch):
            if not kept:
                hole.append(span)
                continue
            if not runs or (hole and sum(one.size_bytes for one in hole) >= HOLE_BYTES):
                runs.append([])
                skipped += hole
                hole = []
            for one in (*hole, span):
                _append(runs[-1], one)
            hole = []
        of_runs = ((self._marked(span, closed) for span in run) for run in runs)
        first, *others = map(stretch.only, of_runs if runs else [()])
        return [replace(first, skipped=(*skipped, *hole)), *others]

    def _parts(self, stretch: Split) -> Iterator[tuple[Span, bool]]:
        """Yield consecutive parts of a stretch, and whether each may have wanted messages."""
        for span in stretch.spans:
            for first, end, left_out in _divided(span, self._left_out):
                yield span.part(first - span.first, end - span.first), not left_out

    def _marked(self, span: Span, closed: Mapping[int, Closed]) -> Span:
        """Mark a span of a closed ledger if some of its entries have no zone."""
        lacking = [(first, end) for first, end, known in _divided(span, self._known) if not known]
        if not lacking or span.ledger not in closed:
            return span
        return replace(span, closed=closed[span.ledger], lacking=tuple(lacking))


def _divided(span: Span, by: Mapping[int, Intervals]) -> Iterator[tuple[int, int, bool]]:
    """Yield the entries of a span by first and end, and whether the intervals have them."""
    at = span.first
    for begin, stop in (*by.get(span.ledger, ()), (span.end, span.end)):
        first, end = min(max(begin, at), span.end), min(stop, span.end)
        if first > at:
            yield at, first, False
        if end > first:
            yield first, end, True
        at = max(at, end)


def _union(intervals: Intervals) -> Intervals:
    """Join intervals that overlap or touch; ascending."""
    joined: Intervals = []
    for first, end in sorted(intervals):
        if joined and first <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((first, end))
    return joined


def _append(spans: list[Span], span: Span) -> None:
    """Append a span; one that continues the last one is joined with it."""
    if not spans or spans[-1].ledger != span.ledger:
        spans.append(span)
        return
    last = spans[-1]
    placement = last.placement
    if isinstance(placement, LedgerReplicas) and isinstance(span.placement, LedgerReplicas):
        ensembles = dict(placement.ensembles) | dict(span.placement.ensembles)
        placement = replace(placement, ensembles=tuple(sorted(ensembles.items())))
    spans[-1] = replace(
        last, end=span.end, size_bytes=last.size_bytes + span.size_bytes, placement=placement
    )
