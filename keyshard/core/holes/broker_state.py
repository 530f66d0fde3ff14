"""What the broker says about one topic partition and one subscription of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote_plus

from keyshard.core.position.entry import EntryId
from keyshard.core.position.entry_set import EntrySet, Runs
from keyshard.core.position.ledger import ledgers_of

_RANGE = re.compile(r"\((-?\d+):(-?\d+)\.\.(-?\d+):(-?\d+)\]")


@dataclass(frozen=True, slots=True)
class BrokerState:
    """Ledgers and cursor, as of one moment."""

    ledgers: Mapping[int, int]
    """Entries of every stored ledger, ascending by ledger; the last is the one written to."""
    mark_delete: EntryId | None = None
    """Everything up to it is acknowledged; its entry may be -1. ``None`` without a cursor."""
    individually: EntrySet = field(default_factory=EntrySet)
    """What is acknowledged beyond the mark-delete."""

    @classmethod
    def from_internal_stats(cls, stats: Mapping[str, Any], subscription: str) -> BrokerState:
        """Read the admin interface's ``internalStats``.

        Raises:
            KeyError, TypeError, ValueError: The broker names or writes things otherwise.
        """
        ledgers = {ledger.id: ledger.entries for ledger in ledgers_of(stats)}
        cursor = stats.get("cursors", {}).get(_cursor_name(subscription))
        if cursor is None:
            return cls(ledgers)
        ledger, _, entry = str(cursor["markDeletePosition"]).partition(":")
        individually = _parse_ranges(str(cursor.get("individuallyDeletedMessages", "")), ledgers)
        return cls(ledgers, EntryId(int(ledger), int(entry)), individually)

    @property
    def newest_ledger(self) -> int:
        """The ledger that is written to; -1 when the broker knows none."""
        return max(self.ledgers, default=-1)

    def acknowledged(self) -> EntrySet:
        """Everything that is stored and acknowledged."""
        return self.marked() | self.individually

    def marked(self) -> EntrySet:
        """Everything that is stored and not after the mark-delete."""
        if self.mark_delete is None:
            return EntrySet()
        marked, entry = self.mark_delete
        runs: dict[int, Runs] = {}
        for ledger, entries in self.ledgers.items():
            last = entries - 1 if ledger < marked else min(entry, entries - 1)
            if ledger <= marked and last >= 0:
                runs[ledger] = ((0, last),)
        return EntrySet(runs)

    def lacks(self, entries: EntrySet) -> EntrySet:
        """Those of the entries that are not acknowledged, whether they are stored or not."""
        above = entries if self.mark_delete is None else entries.above(self.mark_delete)
        return above - self.individually


def _cursor_name(subscription: str) -> str:
    """A subscription's cursor as the broker lists it: under the name encoded as for a form."""
    # Java and Python differ in two characters.
    return quote_plus(subscription, safe="*").replace("~", "%7E")


def _parse_ranges(text: str, ledgers: Mapping[int, int]) -> EntrySet:
    """Read ``[(12:3..12:5],(12:8..13:0]]``; a range begins after its first id."""
    runs: list[tuple[int, int, int]] = []
    for match in _RANGE.finditer(text):
        from_ledger, from_entry, to_ledger, to_entry = map(int, match.groups())
        for ledger in {from_ledger, to_ledger, *ledgers}:
            if from_ledger <= ledger <= to_ledger:
                first = from_entry + 1 if ledger == from_ledger else 0
                last = to_entry if ledger == to_ledger else ledgers.get(ledger, 0) - 1
                if first <= last:
                    runs.append((ledger, first, last))
    return EntrySet.of_runs(runs)
