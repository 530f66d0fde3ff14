"""Exact sets of entries of one topic partition, as runs.

Positions inside one hash range are not monotonic, so delivered entries are a set, not an offset.
Checkpoints store the text form: ``ledger:first-last,entry;ledger:first-last``, ascending, with runs
as long as possible. So equal sets have equal texts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from keyshard.core.position.entry import EntryId
from keyshard.errors import CheckpointError

INDEX_MAX = 1_000_000
"""Highest batch index accepted in a text. Brokers refuse batches with more messages."""

Run = tuple[int, int]
Runs = tuple[Run, ...]

_AFTER_ALL = float("inf")


def _runs_of(entries: Collection[int]) -> Runs:
    """Return the longest runs of integers, which come in any order and may repeat."""
    if len(entries) < 2:
        return tuple([(entry, entry) for entry in entries])
    ascending = sorted(set(entries))
    first, end = ascending[0], ascending[-1]
    if end - first == len(ascending) - 1:
        return ((first, end),)
    runs: list[Run] = []
    last = first
    for entry in ascending:
        if entry > last + 1:
            runs.append((first, last))
            first = entry
        last = entry
    runs.append((first, last))
    return tuple(runs)


def _touched(runs: Runs, first: int, last: int, at: int) -> tuple[int, int]:
    """Return start and stop of the runs, from index ``at`` on, that overlap the interval."""
    start = bisect_right(runs, (first, _AFTER_ALL), at)
    if start > at and runs[start - 1][1] >= first:
        start -= 1
    return start, bisect_right(runs, (last, _AFTER_ALL), start)


def _union(left: Runs, right: Runs) -> tuple[Runs, int]:
    """Return the union, and the growth of the text of ``left``.

    Linear in the runs of ``right``, except for a copy of ``left``.
    """
    runs: list[Run] = []
    at = growth = 0
    for run in right:
        first, last = run
        start, stop = _touched(left, first - 1, last + 1, at)
        runs += left[at:start]
        at = stop
        if stop > start:
            first, last = min(first, left[start][0]), max(last, left[stop - 1][1])
            growth -= _length(left[start:stop])
        if runs and runs[-1][1] >= first - 1:
            before = runs.pop()
            growth -= _length((before,))
            first, last = before[0], max(last, before[1])
        runs.append((first, last))
        growth += _length(runs[-1:])
    runs += left[at:]
    return tuple(runs), growth


def _overlaps(few: Runs, many: Runs) -> Iterator[tuple[Run, Runs]]:
    """Yield each run of ``few`` with the runs of ``many`` that overlap it."""
    at = 0
    for run in few:
        start, stop = _touched(many, *run, at)
        yield run, many[start:stop]
        at = max(start, stop - 1)


def _intersection(left: Runs, right: Runs) -> Runs:
    few, many = (left, right) if len(left) < len(right) else (right, left)
    return tuple(
        (max(first, other_first), min(last, other_last))
        for (first, last), others in _overlaps(few, many)
        for other_first, other_last in others
    )


def _difference(left: Runs, right: Runs) -> Runs:
    return _difference_from_few(left, right) if len(left) < len(right) else _cut(left, right)


def _difference_from_few(few: Runs, many: Runs) -> Runs:
    runs: list[Run] = []
    for (start, last), others in _overlaps(few, many):
        first = start
        for other_first, other_last in others:
            if other_first > first:
                runs.append((first, other_first - 1))
            first = other_last + 1
        if first <= last:
            runs.append((first, last))
    return tuple(runs)


def _cut(many: Runs, few: Runs) -> Runs:
    """Return ``many`` without ``few``. Linear in the runs of ``few``, except for a copy."""
    runs: list[Run] = []
    at = 0
    for first, last in few:
        start, stop = _touched(many, first, last, at)
        runs += many[at:start]
        at = stop
        cut = many[start:stop]
        if runs and runs[-1][1] >= first:
            # The previous run has already cut this one and left its end.
            cut = (runs.pop(), *cut)
        if cut and cut[0][0] < first:
            runs.append((cut[0][0], first - 1))
        if cut and cut[-1][1] > last:
            runs.append((last + 1, cut[-1][1]))
    runs += many[at:]
    return tuple(runs)


def _length(runs: Sequence[Run]) -> int:
    """Return the length of the text of some runs, including one separator after each."""
    return sum([
        len(str(first)) + 1 + (len(str(last)) + 1 if last != first else 0) for first, last in runs
    ])  # fmt: skip


class EntrySet:
    """Immutable set of :class:`EntryId` with exact set algebra.

    Let n be the runs of the smaller set and m those of the larger. An operation costs n log m, plus
    a copy of the runs that stay. The length of the text of a union costs the same. Only the text
    itself is linear in all runs. The number of entries does not matter.
    """

    __slots__ = ("_ledgers", "_lengths", "_text", "_text_bytes")

    def __init__(self, ledgers: Mapping[int, Runs] | None = None) -> None:
        self._text: str | None = None
        self._text_bytes: int | None = None
        items = ledgers.items() if ledgers else ()
        ascending = sorted(items) if len(items) > 1 else items
        self._ledgers: dict[int, Runs] = {ledger: runs for ledger, runs in ascending if runs}
        self._lengths: dict[int, int] = {}
        """Cached text lengths of the runs of ledgers."""

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
        result = cls()
        ascending = sorted(by_ledger) if len(by_ledger) > 1 else by_ledger
        result._ledgers = {ledger: _runs_of(by_ledger[ledger]) for ledger in ascending}
        return result

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
        return cls({ledger: tuple(own) for ledger, own in ledgers.items()})

    @classmethod
    def parse(cls, text: str) -> EntrySet:
        """Parse the text form.

        Raises:
            CheckpointError: The text is not the canonical form of a set.
        """
        ledgers: dict[int, Runs] = {}
        try:
            for part in text.split(";") if text else ():
                ledger, _, runs = part.partition(":")
                ledgers[int(ledger)] = parse_runs(runs)
        except ValueError as exc:
            raise CheckpointError(_bad(text)) from exc
        result = cls(ledgers)
        if str(result) != text or any(ledger < 0 for ledger in ledgers):
            raise CheckpointError(_bad(text))
        return result

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield all runs as (ledger, first entry, last entry), ascending, ends inclusive."""
        for ledger, runs in self._ledgers.items():
            for first, last in runs:
                yield ledger, first, last

    @property
    def run_count(self) -> int:
        """Number of runs; determines the length of the text form."""
        return sum(map(len, self._ledgers.values()))

    @property
    def text_bytes(self) -> int:
        """Length of the text form."""
        if self._text is not None:
            return len(self._text)
        if self._text_bytes is None:
            lengths, size = self._lengths, 0
            for ledger, runs in self._ledgers.items():
                length = lengths.get(ledger)
                if length is None:
                    length = lengths[ledger] = _length(runs)
                size += len(str(ledger)) + 1 + length
            self._text_bytes = max(0, size - 1)
        return self._text_bytes

    @property
    def first(self) -> EntryId | None:
        """Lowest entry; ``None`` if empty."""
        for ledger, runs in self._ledgers.items():
            return EntryId(ledger, runs[0][0])
        return None

    @property
    def last(self) -> EntryId | None:
        """Highest entry; ``None`` if empty."""
        if not self._ledgers:
            return None
        ledger, runs = next(reversed(self._ledgers.items()))
        return EntryId(ledger, runs[-1][1])

    def run_end(self, entry_id: EntryId) -> EntryId | None:
        """Return the last entry of the run that holds ``entry_id``; ``None`` without one."""
        ledger, entry = entry_id
        runs = self._ledgers.get(ledger, ())
        at = bisect_right(runs, (entry, _AFTER_ALL)) - 1
        return EntryId(ledger, runs[at][1]) if at >= 0 and entry <= runs[at][1] else None

    def above(self, entry_id: EntryId) -> EntrySet:
        """Return the entries after ``entry_id``."""
        ledger, entry = entry_id
        for lowest, runs in self._ledgers.items():
            if (lowest, runs[0][0]) > entry_id:
                return self
            if len(self._ledgers) == 1 and (lowest, runs[-1][1]) <= entry_id:
                return EMPTY
            break
        else:
            return self
        result = EntrySet()
        result._ledgers = {other: runs for other, runs in self._ledgers.items() if other > ledger}
        result._lengths = {
            other: length for other, length in self._lengths.items() if other > ledger
        }
        own = self._ledgers.get(ledger, ())
        at = bisect_right(own, (entry, _AFTER_ALL))
        cut = own[at - 1 : at] if at and own[at - 1][1] > entry else ()
        if cut or own[at:]:
            kept = tuple((entry + 1, last) for _, last in cut) + own[at:]
            result._ledgers = {ledger: kept, **result._ledgers}
            if ledger in self._lengths:
                gone = _length(own[:at]) - _length(kept[: len(cut)])
                result._lengths[ledger] = self._lengths[ledger] - gone
        return result

    def following(self, entry_id: EntryId) -> tuple[EntryId, EntrySet]:
        """Return the end of the run that holds the next entry, and the entries after that end.

        Without such a run, the end is ``entry_id`` itself.
        """
        ledger, entry = entry_id
        runs = self._ledgers.get(ledger)
        if runs is not None and runs[0][0] == entry + 1:
            entry_id = EntryId(ledger, runs[0][1])
            if len(runs) == len(self._ledgers) == 1:
                return entry_id, EMPTY
        else:
            entry_id = self.run_end(EntryId(ledger, entry + 1)) or entry_id
        return entry_id, self.above(entry_id)

    def __contains__(self, entry_id: EntryId) -> bool:
        ledger, entry = entry_id
        runs = self._ledgers.get(ledger)
        if runs is None:
            return False
        at = bisect_right(runs, (entry, _AFTER_ALL)) - 1
        return at >= 0 and entry <= runs[at][1]

    def __iter__(self) -> Iterator[EntryId]:
        for ledger, first, last in self.runs():
            for entry in range(first, last + 1):
                yield EntryId(ledger, entry)

    def __len__(self) -> int:
        return sum(last - first + 1 for _, first, last in self.runs())

    def __bool__(self) -> bool:
        return bool(self._ledgers)

    def __or__(self, other: EntrySet) -> EntrySet:
        if not other._ledgers:
            return self
        if not self._ledgers:
            return other
        ledgers, lengths = dict(self._ledgers), dict(self._lengths)
        for ledger, runs in other._ledgers.items():
            many, few, known = ledgers.get(ledger, ()), runs, self._lengths
            if len(many) < len(few):
                many, few, known = few, many, other._lengths
            ledgers[ledger], growth = _union(many, few)
            lengths.pop(ledger, None)
            if ledger in known:
                lengths[ledger] = known[ledger] + growth
        result = EntrySet(ledgers)
        result._lengths = lengths
        return result

    def __and__(self, other: EntrySet) -> EntrySet:
        return self._merged(other, _intersection, self._ledgers.keys() & other._ledgers.keys())

    def __sub__(self, other: EntrySet) -> EntrySet:
        if not self._ledgers or not other._ledgers:
            return self
        return self._merged(other, _difference, self._ledgers.keys())

    def __le__(self, other: EntrySet) -> bool:
        return not self - other

    def _merged(
        self, other: EntrySet, operation: Callable[[Runs, Runs], Runs], ledgers: Iterable[int]
    ) -> EntrySet:
        return EntrySet({
            ledger: operation(self._ledgers.get(ledger, ()), other._ledgers.get(ledger, ()))
            for ledger in ledgers
        })  # fmt: skip

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EntrySet) and self._ledgers == other._ledgers

    def __hash__(self) -> int:
        return hash(tuple(self._ledgers.items()))

    def __str__(self) -> str:
        if self._text is None:
            self._text = ";".join([
                f"{ledger}:{format_runs(runs)}" for ledger, runs in self._ledgers.items()
            ])  # fmt: skip
        return self._text

    def __repr__(self) -> str:
        return f"EntrySet({str(self)!r})"


EMPTY = EntrySet()


def format_runs(runs: Runs) -> str:
    """Return the text form of runs: ``0-3,7``."""
    return ",".join([str(first) if first == last else f"{first}-{last}" for first, last in runs])


def parse_runs(text: str) -> Runs:
    """Parse ``0-3,7``.

    Raises:
        ValueError: The text is no ascending list of non-negative runs, each as long as possible.
    """
    runs: list[Run] = []
    for part in text.split(","):
        first_text, dash, last_text = part.partition("-")
        first = int(first_text)
        last = int(last_text) if dash else first
        if first > last or (runs and first <= runs[-1][1] + 1):
            raise ValueError(part)
        runs.append((first, last))
    result = tuple(runs)
    if format_runs(result) != text:
        raise ValueError(text)
    return result


def index_runs(indices: Collection[int]) -> str:
    """Return the text form of a set of batch indices."""
    return format_runs(_runs_of(indices))


def parse_indices(text: str) -> frozenset[int]:
    """Parse the text form of a set of batch indices.

    Raises:
        ValueError: The text is not canonical, or an index is above :data:`INDEX_MAX`.
    """
    runs = parse_runs(text)
    if runs[-1][1] > INDEX_MAX:
        raise ValueError(f"{runs[-1][1]} is not a batch index")
    return frozenset(i for first, last in runs for i in range(first, last + 1))


def _bad(text: str) -> str:
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    return (
        f"{shown!r} is not an entry set, such as '12:0-99,101;13:0-5'. Another program changed "
        "the checkpoint: restore it from a backup."
    )
