"""The end of a bounded run in a topic partition, and the entries that may still come before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from keyshard.core.position.entry import EntryId
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.subscription_state import CursorState


class Gap(NamedTuple):
    """Consecutive positions, none with an entry that is known to be delivered or resolved."""

    start: EntryId
    """First position, inclusive."""
    end: EntryId
    """End, exclusive."""


def gaps(done: EntrySet, after: EntryId | None, target: EntryId) -> Iterator[Gap]:
    """Return the gaps up to ``target``, inclusive: entries may be missing there.

    Ids do not show where a ledger ends, so there is a gap at each change of ledger.

    Args:
        done: Entries that are delivered or acknowledged.
        after: Every entry up to this position is delivered or resolved; ``None`` if unknown.
        target: Last entry of interest.

    Returns:
        The gaps, ascending.
    """
    end = EntryId(target.ledger, target.entry + 1)
    start = EntryId(0, 0) if after is None else EntryId(after.ledger, after.entry + 1)
    for ledger, first, last in done.runs():
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
    """``None`` if the partition was empty: then no entry belongs to the run."""
    passed: EntryId | None = None
    """Every entry up to this position is delivered, is left, or will never come."""
    reached: bool = False
    """Whether every entry up to ``last`` is delivered, is left, or will never come."""

    def __post_init__(self) -> None:
        self.reached = self.last is None

    def includes(self, entry_id: EntryId) -> bool:
        """Return whether an entry belongs to the run."""
        return self.last is not None and entry_id <= self.last

    def open_gaps(
        self, delivered: EntrySet, floor: EntryId | None, broker: CursorState | None = None
    ) -> Iterator[Gap]:
        """Return the gaps to resolve before the target is reached, ascending.

        Args:
            delivered: Entries that are in a batch.
            floor: Every entry up to this position is delivered or resolved.
            broker: Acknowledged entries, if known.
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
        """Record that the run waits for no entry of a gap any more.

        Called in the order of :meth:`open_gaps`, because all earlier gaps count as resolved, too.
        """
        self.passed = EntryId(gap.end.ledger, gap.end.entry - 1)
