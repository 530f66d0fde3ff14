"""Where a bounded run ends in a topic partition, and what may still come before that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from keyshard.core.holes.broker_state import BrokerState
from keyshard.core.position.entry import EntryId
from keyshard.core.position.entry_set import EntrySet


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
        self, delivered: EntrySet, floor: EntryId | None, broker: BrokerState | None = None
    ) -> Iterator[Gap]:
        """What must be looked at before the target is reached, ascending.

        Args:
            delivered: Entries that are in a batch.
            floor: Everything at or below it is settled.
            broker: What is acknowledged, where that is known.
        """
        if self.reached or self.last is None:
            return
        known = [floor, self.passed]
        if broker is not None:
            known.append(broker.mark_delete)
            delivered |= broker.individually
        after = max((one for one in known if one is not None), default=None)
        yield from gaps(delivered, after, self.last)

    def nothing_in(self, gap: Gap) -> None:
        """Nothing more comes from a gap; called in the order of :meth:`open_gaps`."""
        self.passed = EntryId(gap.end.ledger, gap.end.entry - 1)
