"""Where a bounded run ends in a topic partition, and what may still come before that."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from keyshard.core.entry import EntryId
from keyshard.core.entry_set import EntrySet

_RANGE = re.compile(r"\((\d+):(-?\d+)\.\.(\d+):(-?\d+)\]")


class Gap(NamedTuple):
    """A stretch of positions in which no entry is known to be settled."""

    start: EntryId
    """First position, inclusive."""
    end: EntryId
    """End, exclusive."""


def gaps(settled: EntrySet, after: EntryId | None, target: EntryId) -> Iterator[Gap]:
    """Stretches up to and including ``target`` that may hold an entry that is not settled.

    Ledgers have ends that ids do not show, so there is a gap at each change of ledger.

    Args:
        settled: Entries that are delivered or acknowledged.
        after: Everything at or below it is settled; ``None`` when nothing is known to be.
        target: Last entry of interest.

    Returns:
        The gaps, ascending.
    """
    end = EntryId(target.ledger, target.entry + 1)
    start = EntryId(0, 0) if after is None else EntryId(after.ledger, after.entry + 1)
    for ledger, first, last in settled.runs():
        run_start = EntryId(ledger, first)
        if run_start >= end:
            break
        if start < run_start:
            yield Gap(start, run_start)
        start = max(start, EntryId(ledger, last + 1))
    if start < end:
        yield Gap(start, end)


@dataclass(frozen=True, slots=True)
class CursorState:
    """What the broker's cursor of a subscription calls acknowledged."""

    mark_delete: EntryId | None = None
    """Everything at or below it is acknowledged."""
    acked: EntrySet = field(default_factory=EntrySet)
    """Entries above it that are."""

    @classmethod
    def parse(cls, stats: Mapping[str, Any]) -> CursorState:
        """Read a cursor of the broker's ``internalStats``.

        Raises:
            ValueError: The broker writes it in another form.
        """
        ledger, _, entry = str(stats["markDeletePosition"]).partition(":")
        ledgers: dict[int, list[tuple[int, int]]] = {}
        for match in _RANGE.finditer(str(stats.get("individuallyDeletedMessages", ""))):
            below, before_first, last_ledger, last = map(int, match.groups())
            # Where a range spans ledgers, nobody knows here how long the first one is.
            first = before_first + 1 if below == last_ledger else 0
            runs = ledgers.setdefault(last_ledger, [])
            if runs and first <= runs[-1][1] + 1:
                runs[-1] = (runs[-1][0], max(last, runs[-1][1]))
            elif first <= last:
                runs.append((first, last))
        acked = EntrySet({number: tuple(runs) for number, runs in ledgers.items()})
        return cls(EntryId(int(ledger), int(entry)), acked)

    def lacks(self, entries: EntrySet) -> EntrySet:
        """Those of the entries that it does not call acknowledged."""
        low = self.mark_delete or EntryId(0, -1)
        ledgers: dict[int, list[tuple[int, int]]] = {}
        for ledger, first, last in entries.runs():
            if (ledger, last) > low:
                start = low.entry + 1 if ledger == low.ledger else 0
                ledgers.setdefault(ledger, []).append((max(first, start), last))
        above = EntrySet({ledger: tuple(runs) for ledger, runs in ledgers.items()})
        return above - self.acked


@dataclass(slots=True)
class Target:
    """Last entry of a topic partition that belongs to a bounded run."""

    last: EntryId | None
    """``None``: the partition was empty, nothing belongs to the run."""
    passed: EntryId | None = None
    """Everything at or below it is settled, or certain never to come."""
    reached: bool = False
    """Whether everything up to ``last`` is."""

    def __post_init__(self) -> None:
        self.reached = self.last is None

    def includes(self, entry_id: EntryId) -> bool:
        """Whether an entry belongs to the run."""
        return self.last is not None and entry_id <= self.last

    def open_gaps(
        self, delivered: EntrySet, floor: EntryId | None, cursor: CursorState
    ) -> Iterator[Gap]:
        """What must be looked at before the target is reached, ascending."""
        if self.reached or self.last is None:
            return
        known = [one for one in (floor, self.passed, cursor.mark_delete) if one is not None]
        yield from gaps(delivered | cursor.acked, max(known, default=None), self.last)

    def nothing_in(self, gap: Gap) -> None:
        """Nothing more comes from a gap; called in the order of :meth:`open_gaps`."""
        self.passed = EntryId(gap.end.ledger, gap.end.entry - 1)
