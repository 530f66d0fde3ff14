"""Splits: what one task of a bounded read takes of a topic partition.

A read is a stretch of each topic partition, from its start to an end that is fixed when the read is
planned. A stretch is a split already; :func:`cut` makes more of them, about equal in bytes, as many
as the host wants, whatever the number of topic partitions. The splits of a stretch are disjoint and
together exactly it: each entry of the ledger list is in one, and an entry is never cut.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from keyshard.core.message import MessageId
from keyshard.core.position.bounds import Bound
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Span:
    """Entries of one ledger that follow one another."""

    ledger: int
    first: int
    end: int
    """Exclusive."""
    size_bytes: int
    """Estimate by the mean size of the ledger's entries."""

    @property
    def entries(self) -> int:
        """How many."""
        return self.end - self.first

    def part(self, start: int, end: int) -> Span:
        """Entries from one number of the span to another; parts that join have all its bytes."""
        size = self.size_bytes * end // self.entries - self.size_bytes * start // self.entries
        return Span(self.ledger, self.first + start, self.first + end, size)


@dataclass(frozen=True, slots=True)
class Split:
    """Entries of one topic partition, and what of them is read; small, picklable, prints well."""

    topic_partition: TopicPartition
    spans: tuple[Span, ...]
    """Ascending, none empty."""
    first_index: int = 0
    """Messages of the first entry with a lower batch index are not read."""
    end_index: int | None = None
    """Messages of the last entry from this batch index on are not read; ``None``: all are."""
    start_ms: int | None = None
    """Publish time, milliseconds since the epoch, from which on messages are read."""
    end_ms: int | None = None
    """Publish time up to which they are, exclusive."""
    end: Bound | None = None
    """Where the stretch ends that it is a part of: what is read next begins there."""
    created: str = ""
    """When its storage was created, as the broker says it; empty where that is not known."""

    def __post_init__(self) -> None:
        assert all(span.first < span.end for span in self.spans), "no span is empty"

    @property
    def entries(self) -> int:
        """Entries at most: what nobody receives, such as a transaction marker, counts as well."""
        return sum(span.entries for span in self.spans)

    @property
    def size_bytes(self) -> int:
        """Estimate of what they take as they are stored."""
        return sum(span.size_bytes for span in self.spans)

    @property
    def first(self) -> EntryId:
        """The first entry."""
        return EntryId(self.spans[0].ledger, self.spans[0].first)

    @property
    def last(self) -> EntryId:
        """The last entry."""
        return EntryId(self.spans[-1].ledger, self.spans[-1].end - 1)

    @property
    def weight(self) -> int:
        """What a part's share goes by; never 0."""
        return sum(map(_weight, self.spans))

    def matches(self, publish_ms: int) -> bool:
        """Whether a publish time is one that is read; 0, for none, is in no bounds of time."""
        if self.start_ms is None and self.end_ms is None:
            return True
        after = publish_ms > 0 and (self.start_ms is None or publish_ms >= self.start_ms)
        return after and (self.end_ms is None or publish_ms < self.end_ms)

    def cut(self, parts: int) -> list[Split]:
        """This split as so many, or as many as it has entries; in their order."""
        parts = min(parts, self.entries)
        if parts <= 1:
            return [self]
        bounds = [0, *self._cuts(parts), self.entries]
        offsets = list(accumulate((span.entries for span in self.spans), initial=0))
        made = [
            replace(self, spans=tuple(self._spans(offsets, start, end)), first_index=0,
                    end_index=None)
            for start, end in pairwise(bounds)
        ]  # fmt: skip
        made[0] = replace(made[0], first_index=self.first_index)
        made[-1] = replace(made[-1], end_index=self.end_index)
        return made

    def _cuts(self, parts: int) -> Iterator[int]:
        """Numbers of entries before which to cut, each entry of a ledger weighing the same."""
        weights = list(accumulate(map(_weight, self.spans), initial=0))
        offsets = list(accumulate((span.entries for span in self.spans), initial=0))
        at, entries = 0, self.entries
        for number in range(1, parts):
            target = weights[-1] * number // parts
            i = bisect_right(weights, target) - 1
            share = (target - weights[i]) * self.spans[i].entries // (weights[i + 1] - weights[i])
            # Each part has an entry, also those that follow.
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
    """What a read takes of a topic partition, as one split; without spans when that is nothing.

    Args:
        topic_partition: Which.
        ledgers: All that is stored, ascending.
        start: First message; ``None``: the first that is stored.
        end: Message that is not read any more; ``None``: all up to the last that is stored.
        start_ms: First publish time.
        end_ms: Publish time that is not read any more.
    """
    spans, first_index, end_index = [], 0, None
    for ledger in ledgers:
        first, stop = 0, ledger.entries
        if start is not None and ledger.id <= start.ledger:
            first = stop if ledger.id < start.ledger else min(start.entry, stop)
        if end is not None and ledger.id >= end.ledger:
            # Of the entry that the end is in, the messages before it are read.
            reach = end.entry + (end.batch_index > 0)
            stop = 0 if ledger.id > end.ledger else min(reach, stop)
        if first < stop:
            spans.append(Span(ledger.id, 0, ledger.entries, ledger.size_bytes).part(first, stop))
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
    """Cut stretches into so many splits, about equal in bytes; in the order of the stretches.

    At least one for each stretch that is not empty, at most one for each entry.
    """
    stretches = [one for one in stretches if one.spans]
    parts = [1] * len(stretches)
    weights, limits = [one.weight for one in stretches], [one.entries for one in stretches]
    # The stretch whose parts are the largest is cut into one more.
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
    """Splits in at most so many groups of neighbours, about equal in bytes; none is empty."""
    if len(splits) <= tasks:
        return [[split] for split in splits]
    groups: list[list[Split]] = [[] for _ in range(tasks)]
    total, before = sum(split.weight for split in splits), 0
    for split in splits:
        # By its middle, so that no group takes more than its share and a half of a split.
        groups[(2 * before + split.weight) * tasks // (2 * total)].append(split)
        before += split.weight
    return [group for group in groups if group]
