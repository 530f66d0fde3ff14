"""Reports of bounded reads: entries by their origin, with the reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from keyshard.core.position.replicas import LedgerReplicas, OffloadedLedger
from keyshard.core.position.split import Span, Split

NAMED_MAX = 20
"""Most ledgers, and most bookies, that the text of a report names."""


@dataclass(frozen=True, slots=True)
class SpanRead:
    """Consecutive entries of a ledger, and the number of them by their origin."""

    topic_partition: str
    ledger: int
    first: int
    """First entry."""
    end: int
    """End of the entries, exclusive."""
    by_bookies: int
    """Entries that bookies returned; in a plan, entries for which they will be asked."""
    by_broker: int
    """Entries that the broker returned; in a plan, entries for which it will be asked."""
    why: str = ""
    """Why the broker is asked; empty if it is not."""
    skipped: int = 0
    """Entries that are not read, because the index rules them out; then all of the span."""
    one_by_one: tuple[str, ...] = ()
    """Bookies of these entries that refuse batch reads, and so returned them one by one."""
    by_offloads: int = 0
    """Entries from the store of offloads; in a plan, those for which it will be asked."""

    def __str__(self) -> str:
        if self.skipped:
            return f"{self.ledger}: {self.skipped:,} entries ruled out by the index"
        stored = f"{self.by_bookies:,} entries from bookies"
        if self.by_offloads:
            stored = f"{self.by_offloads:,} entries from the store of offloads"
        if not self.why:
            return f"{self.ledger}: {stored}"
        by_broker = f"{self.by_broker:,} by the broker, because {self.why}"
        then = f"{stored}, then " if self.by_bookies or self.by_offloads else ""
        return f"{self.ledger}: {then}{by_broker}"


SpansByStart = dict[tuple[str, int, int], SpanRead]
"""Spans by topic partition, ledger and first entry. A later report replaces its spans."""


@dataclass(frozen=True, slots=True)
class ReadReport:
    """Entries of a bounded read by their origin.

    If a task runs again, its report replaces that of the earlier run.
    """

    spans: tuple[SpanRead, ...] = ()
    """By topic partition, ledger and first entry, ascending."""

    @classmethod
    def of(cls, spans: SpansByStart) -> ReadReport:
        """Return the report of collected spans."""
        return cls(tuple(spans[start] for start in sorted(spans)))

    def by_start(self) -> SpansByStart:
        """Return the spans by start; to join reports, update one dict with those of each."""
        return {(one.topic_partition, one.ledger, one.first): one for one in self.spans}

    @property
    def by_bookies(self) -> int:
        """Entries from bookies."""
        return sum(one.by_bookies for one in self.spans)

    @property
    def by_offloads(self) -> int:
        """Entries from the store of offloaded ledgers."""
        return sum(one.by_offloads for one in self.spans)

    @property
    def by_broker(self) -> int:
        """Entries from the broker."""
        return sum(one.by_broker for one in self.spans)

    @property
    def skipped(self) -> int:
        """Entries that are not read, because the index rules them out."""
        return sum(one.skipped for one in self.spans)

    @property
    def reasons(self) -> dict[str, int]:
        """Why the broker was asked: entries by reason, most first."""
        found: Counter[str] = Counter()
        for one in self.spans:
            if one.why:
                found[one.why] += one.by_broker
        return dict(found.most_common())

    @property
    def one_by_one(self) -> tuple[str, ...]:
        """Bookies that refuse batch reads, and so were read entry by entry; ascending."""
        return tuple(sorted({name for one in self.spans for name in one.one_by_one}))

    def __str__(self) -> str:
        """Return the spans, ledger by ledger, and the bookies that were read entry by entry."""
        text = _limited(list(map(str, self.spans[:NAMED_MAX])), len(self.spans), "; ")
        names = self.one_by_one
        if not names:
            return text
        named = _limited(names[:NAMED_MAX], len(names), ", ")
        return f"{text}; bookies that refuse batch reads: {len(names):,} ({named})"


def _limited(named: Sequence[str], count: int, separator: str) -> str:
    more = [f"and {count - len(named):,} more"] if count > len(named) else []
    return separator.join([*named, *more])


def planned(splits: Iterable[Split]) -> ReadReport:
    """Return the entries of a plan by the origin from which they will be read."""
    spans = []
    for split in splits:
        name = split.topic_partition.name
        spans += _skipped(split)
        for span in split.spans:
            why = span.placement if isinstance(span.placement, str) else ""
            spans.append(_read(name, span, 0 if why else span.entries, span.entries, why))
    return ReadReport.of(ReadReport(tuple(spans)).by_start())


def was_read(
    split: Split,
    seen: Mapping[int, int],
    from_storage: Mapping[int, int],
    left: Mapping[int, str],
    one_by_one: Collection[str] = (),
) -> ReadReport:
    """Return the entries of a split by the origin from which they were read.

    Args:
        split: The split.
        seen: Entries that were read, by ledger.
        from_storage: Entries that came without the broker, by ledger.
        left: Why the broker was asked for a ledger, from some entry on.
        one_by_one: Bookies that refuse batch reads, and have returned entries one by one.
    """
    spans = _skipped(split)
    for span in split.spans:
        count = seen.get(span.ledger, 0)
        stored = min(from_storage.get(span.ledger, 0), count)
        read = _read(split.topic_partition.name, span, stored, count, left.get(span.ledger, ""))
        if stored and isinstance(span.placement, LedgerReplicas):
            single = tuple(sorted(span.placement.names.intersection(one_by_one)))
            read = replace(read, one_by_one=single)
        spans.append(read)
    return ReadReport(tuple(spans))


def _read(name: str, span: Span, stored: int, count: int, why: str) -> SpanRead:
    """Return the report of a span of which ``stored`` of ``count`` entries need no broker."""
    by_offloads = stored if isinstance(span.placement, OffloadedLedger) else 0
    return SpanRead(
        name, span.ledger, span.first, span.end, stored - by_offloads, count - stored, why,
        by_offloads=by_offloads,
    )  # fmt: skip


def _skipped(split: Split) -> list[SpanRead]:
    name = split.topic_partition.name
    return [
        SpanRead(name, span.ledger, span.first, span.end, 0, 0, skipped=span.entries)
        for span in split.skipped
    ]
