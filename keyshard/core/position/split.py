"""Splits: the parts of a bounded read that tasks take.

For each topic partition, a read covers one stretch: from a start to an end that is fixed at
planning. A stretch is already a split. :func:`cut` divides stretches into as many splits as the
host wants, about equal in bytes, independent of the number of topic partitions. The splits of a
stretch are disjoint and cover it exactly: each entry of the ledger list is in one split, and no
entry is divided.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

from keyshard.core.message import MessageId
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.ledger import Ledger
from keyshard.core.position.read_bounds import Bound
from keyshard.core.position.replicas import UNKNOWN, LedgerReplicas, Placement


class Closed(NamedTuple):
    """A closed ledger. Its content never changes, so these numbers identify it."""

    entries: int
    size_bytes: int
    """Stored size of its entries: with metadata, and after compression."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive entries of one ledger."""

    ledger: int
    first: int
    end: int
    """Exclusive."""
    size_bytes: int
    """Estimate from the mean size of the ledger's entries."""
    placement: Placement = UNKNOWN
    """Where the entries were stored at planning, or why they are read by the broker."""
    closed: Closed | None = None
    """The whole ledger, if it is closed and the index lacks some of the entries."""
    lacking: tuple[tuple[int, int], ...] = ()
    """Runs of entries of a closed ledger that the index lacks: the first entry and the end,
    exclusive, of each, in ascending order. They may reach beyond the span."""

    @property
    def entries(self) -> int:
        """Number of entries."""
        return self.end - self.first

    def part(self, start: int, end: int) -> Span:
        """Return the entries between two numbers. Adjoining parts add up to all its bytes."""
        size = self.size_bytes * end // self.entries - self.size_bytes * start // self.entries
        first, stop, placement = self.first + start, self.first + end, self.placement
        if isinstance(placement, LedgerReplicas):
            placement = placement.part(first, stop)
        return Span(self.ledger, first, stop, size, placement, self.closed, self.lacking)


@dataclass(frozen=True, slots=True)
class Split:
    """Entries of one topic partition, and the bounds of the read; small and picklable."""

    topic_partition: TopicPartition
    spans: tuple[Span, ...]
    """Ascending, none empty."""
    first_index: int = 0
    """Batch index at which the read of the first entry starts, inclusive."""
    end_index: int | None = None
    """Batch index at which the read of the last entry ends, exclusive; ``None``: no limit."""
    start_ms: int | None = None
    """First publish time that is read, milliseconds since the epoch."""
    end_ms: int | None = None
    """End of the publish times that are read, exclusive, milliseconds since the epoch."""
    end: Bound | None = None
    """End of the whole stretch; the next read begins there."""
    created: str = ""
    """Creation time of the storage, in the broker's words; empty if unknown."""
    skipped: tuple[Span, ...] = ()
    """Entries of the stretch that are not read, because the index rules them out. Only the first
    split of the stretch has them."""

    def __post_init__(self) -> None:
        assert all(span.first < span.end for span in self.spans), "no span is empty"

    @property
    def entries(self) -> int:
        """Upper limit of the number of entries.

        It includes entries that no consumer receives, such as transaction markers.
        """
        return sum(span.entries for span in self.spans)

    @property
    def size_bytes(self) -> int:
        """Estimate of the stored size, bytes."""
        return sum(span.size_bytes for span in self.spans)

    @property
    def first(self) -> EntryId:
        return EntryId(self.spans[0].ledger, self.spans[0].first)

    @property
    def last(self) -> EntryId:
        return EntryId(self.spans[-1].ledger, self.spans[-1].end - 1)

    @property
    def weight(self) -> int:
        """Weight for an equal division; never 0."""
        return sum(map(_weight, self.spans))

    def matches(self, publish_ms: int) -> bool:
        """Return whether a publish time is within the bounds, if any; 0 means no time."""
        if self.start_ms is None and self.end_ms is None:
            return True
        after = publish_ms > 0 and (self.start_ms is None or publish_ms >= self.start_ms)
        return after and (self.end_ms is None or publish_ms < self.end_ms)

    def only(self, spans: Iterable[Span]) -> Split:
        """Return this split with only some of its entries; ``skipped`` is left out.

        ``first_index`` applies only if the first entry is kept, ``end_index`` only if the last is.
        """
        found = replace(self, spans=tuple(spans), first_index=0, end_index=None, skipped=())
        if not found.spans:
            return found
        return replace(
            found,
            first_index=self.first_index if found.first == self.first else 0,
            end_index=self.end_index if found.last == self.last else None,
        )

    def cut(self, parts: int) -> list[Split]:
        """Divide this split into ``parts`` parts, in order; into single entries if it has fewer."""
        parts = min(parts, self.entries)
        if parts <= 1:
            return [self]
        bounds = [0, *self._cuts(parts), self.entries]
        offsets = list(accumulate((span.entries for span in self.spans), initial=0))
        first, *others = (
            self.only(self._spans(offsets, start, end)) for start, end in pairwise(bounds)
        )
        return [replace(first, skipped=self.skipped), *others]

    def _cuts(self, parts: int) -> Iterator[int]:
        """Yield the entry numbers at which parts begin; all entries of a ledger weigh the same."""
        weights = list(accumulate(map(_weight, self.spans), initial=0))
        offsets = list(accumulate((span.entries for span in self.spans), initial=0))
        at, entries = 0, self.entries
        for number in range(1, parts):
            target = weights[-1] * number // parts
            i = bisect_right(weights, target) - 1
            share = (target - weights[i]) * self.spans[i].entries // (weights[i + 1] - weights[i])
            # Leave at least one entry for each part, including the following ones.
            at = min(max(offsets[i] + share, at + 1), entries - (parts - number))
            yield at

    def _spans(self, offsets: Sequence[int], start: int, end: int) -> Iterator[Span]:
        i = bisect_right(offsets, start) - 1
        while i < len(self.spans) and offsets[i] < end:
            span, offset = self.spans[i], offsets[i]
            yield span.part(max(0, start - offset), min(span.entries, end - offset))
            i += 1


def _weight(span: Span) -> int:
    return max(span.size_bytes, span.entries)


def stretch(
    topic_partition: TopicPartition,
    ledgers: Sequence[Ledger],
    start: MessageId | None = None,
    end: MessageId | None = None,
    *,
    start_ms: int | None = None,
    end_ms: int | None = None,
) -> Split:
    """Return the stretch of a read in a topic partition, as one split.

    Args:
        topic_partition: The topic partition.
        ledgers: All stored ledgers, ascending.
        start: First message, inclusive; ``None``: the first stored one.
        end: End of the messages, exclusive; ``None``: after the last stored one.
        start_ms: First publish time, inclusive, milliseconds since the epoch.
        end_ms: End of the publish times, exclusive.

    Returns:
        The split; without spans if the stretch is empty.
    """
    spans, first_index, end_index = [], 0, None
    for ledger in ledgers:
        first, stop = 0, ledger.entries
        if start is not None and ledger.id <= start.ledger:
            first = stop if ledger.id < start.ledger else min(start.entry, stop)
        if end is not None and ledger.id >= end.ledger:
            # If the end is inside a producer batch, its entry is read up to the end.
            reach = end.entry + (end.batch_index > 0)
            stop = 0 if ledger.id > end.ledger else min(reach, stop)
        if first < stop:
            whole = Span(ledger.id, 0, ledger.entries, ledger.size_bytes, ledger.placement)
            spans.append(whole.part(first, stop))
    if spans and start is not None:
        first_entry = (spans[0].ledger, spans[0].first)
        first_index = start.batch_index if first_entry == start[:2] else 0
    if spans and end is not None:
        last_entry = (spans[-1].ledger, spans[-1].end - 1)
        end_index = end.batch_index if last_entry == end[:2] else None
        if start is not None and start[:2] == end[:2] and start >= end:
            spans = []
    return Split(topic_partition, tuple(spans), first_index, end_index, start_ms, end_ms)


def cut(stretches: Sequence[Split], splits: int) -> list[Split]:
    """Cut stretches into ``splits`` splits of about equal bytes, in the order of the stretches.

    Each stretch that is not empty gives at least one split. An entry is never divided.
    """
    stretches = [one for one in stretches if one.spans]
    parts = [1] * len(stretches)
    weights, limits = [one.weight for one in stretches], [one.entries for one in stretches]
    # Repeatedly give one more part to the stretch with the largest parts.
    largest = [(-weight, i) for i, weight in enumerate(weights) if limits[i] > 1]
    heapq.heapify(largest)
    for _ in range(splits - len(stretches)):
        if not largest:
            break
        _, i = largest[0]
        parts[i] += 1
        if parts[i] < limits[i]:
            heapq.heapreplace(largest, (-weights[i] // (parts[i]), i))
        else:
            heapq.heappop(largest)
    return [split for one, count in zip(stretches, parts, strict=True) for split in one.cut(count)]


def grouped(splits: Sequence[Split], tasks: int) -> list[list[Split]]:
    """Group neighbouring splits into at most ``tasks`` groups of about equal bytes.

    No group is empty.
    """
    if len(splits) <= tasks:
        return [[split] for split in splits]
    groups: list[list[Split]] = [[] for _ in range(tasks)]
    total, before = sum(split.weight for split in splits), 0
    for split in splits:
        # The middle of a split decides its group, so that no group exceeds its share by more than
        # half a split.
        groups[(2 * before + split.weight) * tasks // (2 * total)].append(split)
        before += split.weight
    return [group for group in groups if group]


def divided(stretches: Sequence[Split], tasks: int) -> list[list[Split]]:
    """Divide stretches between at most ``tasks`` tasks, by about equal bytes, in their order.

    Returns:
        The splits of each task; at least one task. The first task also has the stretches without
        entries, because their ``skipped`` may name entries that an index rules out.
    """
    first, *others = grouped(cut(stretches, tasks), tasks) or [[]]
    return [[*(one for one in stretches if not one.spans), *first], *others]
