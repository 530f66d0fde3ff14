"""Exact sets of entries of one topic partition.

Positions inside one hash range are not monotonic, so delivered entries are a set, not an offset.
Checkpoints store the text form: ``ledger:first-last,entry;ledger:first-last``, ascending, with runs
as long as possible. A ledger with many runs has a compact text instead
(:mod:`keyshard.core.position.ledger_entries`). Equal sets have equal texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from keyshard.core.position.entry import NUMBER_MAX, EntryId
from keyshard.core.position.entry_runs import Run, runs_of
from keyshard.core.position.ledger_entries import (
    LedgerEntries,
    above,
    any_compact,
    count,
    end_of_run,
    highest,
    holds,
    intersect,
    lowest,
    parse_entries,
    run_count,
    runs_in,
    settled,
    subtract,
    text_of,
    unite,
)
from keyshard.errors import CheckpointError


class EntrySet:
    """Immutable set of :class:`EntryId` with exact set algebra.

    An operation changes only ledgers that are in both sets; the others are shared. In a changed
    ledger it costs time for each run, or for each 65,536 entries once it has many runs. The number
    of entries does not matter.
    """

    __slots__ = ("_ledgers", "_text_bytes", "_texts")

    def __init__(self) -> None:
        self._ledgers: dict[int, LedgerEntries] = {}
        """Entries of each ledger that has any, ascending."""
        self._texts: dict[int, str] = {}
        """Cached texts of ledgers. Another thread may add one, so it is copied before a loop."""
        self._text_bytes = -1
        """Cached length of the text; -1 while it is unknown."""

    @classmethod
    def _of(
        cls, ledgers: Mapping[int, LedgerEntries], texts: Mapping[int, str] | None = None
    ) -> EntrySet:
        """Return the set of the given entries.

        Args:
            ledgers: Entries of each ledger, as :func:`settled` returns them; ledgers in any order.
                Ledgers without entries are left out.
            texts: Known texts, also of other ledgers.
        """
        result = cls()
        ascending = sorted(ledgers.items()) if len(ledgers) > 1 else ledgers.items()
        result._ledgers = {ledger: entries for ledger, entries in ascending if entries}
        if texts:
            result._texts = {one: texts[one] for one in texts if one in result._ledgers}
        return result

    @classmethod
    def of(cls, entries: Iterable[EntryId]) -> EntrySet:
        """Return the set of the given entries, in any order, repeats allowed."""
        by_ledger: dict[int, list[int]] = {}
        for ledger, entry in entries:
            own = by_ledger.get(ledger)
            if own is None:
                by_ledger[ledger] = [entry]
            else:
                own.append(entry)
        return cls._of({ledger: settled(runs_of(own)) for ledger, own in by_ledger.items()})

    @classmethod
    def of_runs(cls, runs: Iterable[tuple[int, int, int]]) -> EntrySet:
        """Return the set of (ledger, first entry, last entry) runs, in any order.

        Runs may touch and overlap.
        """
        ledgers: dict[int, list[Run]] = {}
        for ledger, first, last in sorted(runs):
            own = ledgers.setdefault(ledger, [])
            if own and first <= own[-1][1] + 1:
                own[-1] = own[-1][0], max(last, own[-1][1])
            else:
                own.append((first, last))
        return cls._of({ledger: settled(tuple(own)) for ledger, own in ledgers.items()})

    @classmethod
    def parse(cls, text: str) -> EntrySet:
        """Parse the text form.

        Ledgers with many runs may have the plain text of releases without the compact form.

        Raises:
            CheckpointError: The text is not that of a set.
        """
        ledgers: dict[int, LedgerEntries] = {}
        newest = -1
        try:
            for part in text.split(";") if text else ():
                name, _, entries = part.partition(":")
                ledger = int(name)
                if ledger <= newest or str(ledger) != name:
                    raise ValueError(name)
                found = ledgers[ledger] = parse_entries(entries)
                if max(ledger, highest(found)) > NUMBER_MAX:
                    raise ValueError(name)
                newest = ledger
        except ValueError as exc:
            raise _bad(text) from exc
        return cls._of(ledgers)

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield all runs as (ledger, first entry, last entry), ascending, ends inclusive."""
        for ledger, entries in self._ledgers.items():
            for first, last in runs_in(entries):
                yield ledger, first, last

    def of_ledger(self, ledger: int) -> EntrySet:
        """Return the entries of one ledger."""
        return self._of({ledger: self._ledgers[ledger]} if ledger in self._ledgers else {})

    @property
    def last_entries(self) -> dict[int, int]:
        """The last entry of each ledger that has any; ledgers ascending."""
        return {ledger: highest(entries) for ledger, entries in self._ledgers.items()}

    @property
    def run_count(self) -> int:
        """Number of runs."""
        return sum(map(run_count, self._ledgers.values()))

    @property
    def is_compact(self) -> bool:
        """Whether the text contains a compact form, which older releases cannot read."""
        return any_compact(self._ledgers.values())

    @property
    def text_bytes(self) -> int:
        """Length of the text form."""
        if self._text_bytes < 0:
            lengths = [len(self._text_of(ledger)) + 1 for ledger in self._ledgers]
            self._text_bytes = max(0, sum(lengths) - 1)
        return self._text_bytes

    def _text_of(self, ledger: int) -> str:
        text = self._texts.get(ledger)
        if text is None:
            text = self._texts[ledger] = f"{ledger}:{text_of(self._ledgers[ledger])}"
        return text

    @property
    def first(self) -> EntryId | None:
        """Lowest entry; ``None`` if empty."""
        for ledger, entries in self._ledgers.items():
            return EntryId(ledger, lowest(entries))
        return None

    @property
    def last(self) -> EntryId | None:
        """Highest entry; ``None`` if empty."""
        if not self._ledgers:
            return None
        ledger, entries = next(reversed(self._ledgers.items()))
        return EntryId(ledger, highest(entries))

    def run_end(self, entry_id: EntryId) -> EntryId | None:
        """Return the last entry of the run that holds ``entry_id``; ``None`` without one."""
        ledger, entry = entry_id
        end = end_of_run(self._ledgers.get(ledger, ()), entry)
        return None if end is None else EntryId(ledger, end)

    def above(self, entry_id: EntryId) -> EntrySet:
        """Return the entries after ``entry_id``."""
        ledgers, (ledger, entry) = self._ledgers, entry_id
        if len(ledgers) == 1 and ledger in ledgers and highest(ledgers[ledger]) <= entry:
            return EMPTY
        first = self.first
        if first is None or first > entry_id:
            return self
        own = self._ledgers.get(ledger)
        later = {one: entries for one, entries in self._ledgers.items() if one > ledger}
        if own is not None and highest(own) > entry:
            later[ledger] = above(own, entry)
        texts = {one: text for one, text in dict(self._texts).items() if one > ledger}
        return self._of(later, texts) if later else EMPTY

    def following(self, entry_id: EntryId) -> tuple[EntryId, EntrySet]:
        """Return the end of the run that holds the next entry, and the entries after that end.

        Without such a run, the end is ``entry_id`` itself.
        """
        ledger, entry = entry_id
        end = end_of_run(self._ledgers.get(ledger, ()), entry + 1)
        if end is not None:
            entry_id = EntryId(ledger, end)
        return entry_id, self.above(entry_id)

    def __contains__(self, entry_id: EntryId) -> bool:
        ledger, entry = entry_id
        entries = self._ledgers.get(ledger)
        return entries is not None and holds(entries, entry)

    def __iter__(self) -> Iterator[EntryId]:
        for ledger, first, last in self.runs():
            for entry in range(first, last + 1):
                yield EntryId(ledger, entry)

    def __len__(self) -> int:
        return sum(map(count, self._ledgers.values()))

    def __bool__(self) -> bool:
        return bool(self._ledgers)

    def __or__(self, other: EntrySet) -> EntrySet:
        if not other._ledgers:
            return self
        if not self._ledgers:
            return other
        ledgers, texts = self._ledgers | other._ledgers, self._texts | other._texts
        changed = self._combined(other, unite)
        texts = {one: text for one, text in texts.items() if one not in changed}
        return self._of(ledgers | changed, texts)

    def __and__(self, other: EntrySet) -> EntrySet:
        return self._of(self._combined(other, intersect))

    def __sub__(self, other: EntrySet) -> EntrySet:
        changed = self._combined(other, subtract)
        texts = {one: text for one, text in dict(self._texts).items() if one not in changed}
        return self._of(self._ledgers | changed, texts) if changed else self

    def _combined(
        self, other: EntrySet, operation: Callable[[LedgerEntries, LedgerEntries], LedgerEntries]
    ) -> dict[int, LedgerEntries]:
        """Return the outcome of an operation for each ledger that is in both sets."""
        own, others = self._ledgers, other._ledgers
        return {ledger: operation(own[ledger], others[ledger]) for ledger in own.keys() & others}

    def __le__(self, other: EntrySet) -> bool:
        return not self - other

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EntrySet) and self._ledgers == other._ledgers

    def __hash__(self) -> int:
        return hash(tuple([(one, count(entries)) for one, entries in self._ledgers.items()]))

    def __str__(self) -> str:
        return ";".join([self._text_of(ledger) for ledger in self._ledgers])

    def __repr__(self) -> str:
        return f"EntrySet({str(self)!r})"


EMPTY = EntrySet()


def _bad(text: str) -> CheckpointError:
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    return CheckpointError(
        f"{shown!r} is not an entry set, such as '12:0-99,101;13:0-5'. Another program changed "
        "the checkpoint.",
        "Restore the checkpoint from a backup.",
    )
