"""Who owns which hash range at any time of a history."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from keyshard.core.ring.hash_range import HashRange, split_ring
from keyshard.testing.verify.history import Event, parse_range

Problem = tuple[str, tuple[Event, ...]]
"""What is wrong, a sentence without its full stop, and the events that show it."""

_RING = split_ring(1)[0]


class Owners:
    """The owners of every topic partition, or of all together where the events name none."""

    def __init__(self) -> None:
        self._scopes: defaultdict[tuple[str | None, int | None], _Scope] = defaultdict(_Scope)
        self._of_worker: defaultdict[str | None, dict[tuple[str | None, int | None], _Scope]] = (
            defaultdict(dict)
        )
        """Topic partitions in which a worker gained ranges since its last crash."""

    @property
    def known(self) -> bool:
        """Whether anybody gained a range yet."""
        return bool(self._scopes)

    def follow(self, event: Event) -> list[Problem]:
        """Take the next event; says what is wrong with a gain. Others than of ranges pass by."""
        where = event.topic, event.partition
        if event.kind == "range_gained":
            scope = self._of_worker[event.worker][where] = self._scopes[where]
            return list(scope.gain(event))
        if event.kind == "range_lost":
            self._scopes[where].lose(event)
        elif event.kind == "crashed" and event.worker is None:
            for scope in self._scopes.values():
                scope.crash(list(scope.held))
            self._of_worker.clear()
        elif event.kind == "crashed":
            for scope in self._of_worker.pop(event.worker, {}).values():
                scope.crash(list(scope.of_worker.get(event.worker, ())))
        return []

    def gaps(self) -> list[Problem]:
        """What has no owner at the end, and should have one."""
        return [problem for scope in self._scopes.values() for problem in scope.gaps()]

    def own(self, event: Event, slot: int) -> bool:
        """Whether the event's worker owns the slot; true where nothing says who owns it."""
        names = ((event.topic, event.partition), (event.topic, None), (None, None))
        scopes = [self._scopes[name] for name in names if name in self._scopes]
        return not scopes or any(scope.owns(event, slot) for scope in scopes)


_Holder = tuple[str | None, str | None]
"""Worker and range."""


@dataclass(slots=True)
class _Scope:
    """Owners of one topic partition. A change costs the logarithm of what is held, while no two
    hold the same slot."""

    held: dict[_Holder, Event] = field(default_factory=dict)
    """The gain of each (worker, range) that is held now."""
    of_worker: dict[str | None, dict[_Holder, None]] = field(default_factory=dict)
    """The same by worker."""
    spans: list[tuple[int, int, str]] = field(default_factory=list)
    """First slot, last slot and worker of what is held, ascending."""
    holders: dict[tuple[int, int, str], _Holder] = field(default_factory=dict)
    """Holders of each span."""
    disjoint: bool = True
    """Whether no two of them had a slot in common since the last time that nothing was held."""
    gains: list[Event] = field(default_factory=list)
    epochs: list[tuple[int, int, Event]] = field(default_factory=list)
    """First slot, last slot and their last gain; disjoint and ascending."""
    crashed: list[tuple[Event, int]] = field(default_factory=list)
    """Gains that a crash ended, with the number of gains until then."""
    settled: bool = False
    """Whether ``gap`` is that of the last gain."""
    gap: HashRange | None = None
    """What had no owner after the last gain before something was lost."""

    def gain(self, event: Event) -> Iterator[Problem]:
        gained, holder = _range(event), (event.worker, event.range)
        self._let_go(holder)
        other = next(self._overlapping(gained), None)
        if other is not None:
            self.disjoint = False
            yield (
                f"{event.worker} gained {gained} while {other.worker} held {other.range}",
                (other, event),
            )
        yield from self._fence(event, gained)
        self.held[holder] = event
        self.of_worker.setdefault(event.worker, {})[holder] = None
        span = gained.start, gained.end, _name(event.worker)
        insort(self.spans, span)
        self.holders[span] = holder
        self.gains.append(event)
        self.settled = False

    def _overlapping(self, gained: HashRange) -> Iterator[Event]:
        """Gains of what is held and has a slot in common with a range."""
        if not self.disjoint:
            yield from (one for one in self.held.values() if _overlap(gained, _range(one)))
            return
        at = max(0, bisect_left(self.spans, gained.start, key=_first) - 1)
        for start, end, worker in islice(self.spans, at, None):
            if start > gained.end:
                return
            if end >= gained.start:
                yield self.held[self.holders[start, end, worker]]

    def _fence(self, event: Event, gained: HashRange) -> Iterator[Problem]:
        epochs = self.epochs
        begin = bisect_left(epochs, gained.start, key=_first)
        if begin and epochs[begin - 1][1] >= gained.start:
            begin -= 1
        end = bisect_right(epochs, gained.end, key=_first)
        pieces: list[tuple[int, int, Event]] = []
        for first, last, before in epochs[begin:end]:
            if _stale(event, before):
                then = f"{before.worker} gained {before.range} in epoch {before.epoch}"
                yield (
                    f"{event.worker} gained {gained} in epoch {event.epoch} after {then}",
                    (before, event),
                )
            if first < gained.start:
                pieces.append((first, gained.start - 1, before))
            if last > gained.end:
                pieces.append((gained.end + 1, last, before))
        pieces.append((gained.start, gained.end, event))
        epochs[begin:end] = sorted(pieces, key=_first)

    def lose(self, event: Event) -> None:
        self._settle()
        self._let_go((event.worker, event.range))

    def crash(self, holders: Iterable[_Holder]) -> None:
        """A worker that held this is gone."""
        for holder in holders:
            self._settle()
            self.crashed.append((self.held[holder], len(self.gains)))
            self._let_go(holder)

    def _let_go(self, holder: _Holder) -> None:
        event = self.held.pop(holder, None)
        if event is None:
            return
        worker = event.worker
        del self.of_worker[worker][holder]
        if not self.of_worker[worker]:
            del self.of_worker[worker]
        lost = _range(event)
        span = lost.start, lost.end, _name(worker)
        self.holders.pop(span, None)
        del self.spans[bisect_left(self.spans, span)]
        self.disjoint = self.disjoint or not self.held

    def _settle(self) -> None:
        if not self.settled:
            self.gap = _gap(self.spans, _RING)
            self.settled = True

    def gaps(self) -> Iterator[Problem]:
        self._settle()
        if self.gap is not None and self.gains:
            last = self.gains[-1]
            change = f"{last.worker} gained {last.range}"
            yield f"{self.gap} had no owner after the last change, when {change}", (last,)
        gained_later, at = _Union(), len(self.gains)
        missing: list[tuple[Event, HashRange]] = []
        for lost, gains in reversed(self.crashed):
            while at > gains:
                at -= 1
                gained_later.add(_range(self.gains[at]))
            gap = _gap(gained_later.spans_in(_range(lost)), _range(lost))
            if gap is not None:
                missing.append((lost, gap))
        for lost, gap in reversed(missing):
            yield f"{gap} had no owner after {lost.worker} crashed", (lost,)

    def owns(self, event: Event, slot: int) -> bool:
        if (event.worker, event.range) in self.held:
            return True
        if not self.disjoint:
            mine = self.of_worker.get(event.worker, ())
            return any(slot in _range(self.held[holder]) for holder in mine)
        at = bisect_right(self.spans, slot, key=_first) - 1
        return at >= 0 and self.spans[at][1] >= slot and self.spans[at][2] == _name(event.worker)


class _Union:
    """Slots that lie in any of some ranges."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int, str]] = []
        """Disjoint and ascending."""

    def add(self, hash_range: HashRange) -> None:
        begin, end = self._at(hash_range)
        touched = self._spans[begin:end]
        starts = [hash_range.start, *(one[0] for one in touched)]
        ends = [hash_range.end, *(one[1] for one in touched)]
        self._spans[begin:end] = [(min(starts), max(ends), "")]

    def spans_in(self, hash_range: HashRange) -> list[tuple[int, int, str]]:
        """Those that have a slot in common with a range."""
        begin, end = self._at(hash_range)
        return self._spans[begin:end]

    def _at(self, hash_range: HashRange) -> tuple[int, int]:
        begin = bisect_left(self._spans, hash_range.start, key=_first)
        if begin and self._spans[begin - 1][1] >= hash_range.start:
            begin -= 1
        return begin, bisect_right(self._spans, hash_range.end, key=_first)


def _first(span: tuple[int, int, object]) -> int:
    return span[0]


def _name(worker: str | None) -> str:
    return "" if worker is None else worker


def _range(event: Event) -> HashRange:
    return parse_range(event.range or "")


def _overlap(one: HashRange, other: HashRange) -> bool:
    return one.start <= other.end and other.start <= one.end


def _stale(event: Event, before: Event) -> bool:
    """Whether a range is gained in an epoch that came to an end with another gain."""
    if event.epoch is None or before.epoch is None:
        return False
    other = event.worker != before.worker
    return event.epoch < before.epoch or (other and event.epoch == before.epoch)


def _gap(spans: Iterable[tuple[int, int, str]], whole: HashRange) -> HashRange | None:
    """The first part of a range that lies in no span; they ascend by their first slot."""
    at = whole.start
    for start, end, _ in spans:
        if start > at:
            return HashRange(at, min(whole.end, start - 1))
        at = max(at, end + 1)
    return None if at > whole.end else HashRange(at, whole.end)
