"""Checkers of workers: owners of ranges, handlers of keys, acknowledgements."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from keyshard.core.ring.hash_range import HashRange, split_ring
from keyshard.core.ring.key_slot import possible_slots
from keyshard.testing.verify.history import Event, Name, parse_range
from keyshard.testing.verify.history_view import DONE, HistoryView, HostKind, is_row
from keyshard.testing.verify.verdict import Findings, Verdict

_OF_HANDLERS = frozenset({"started", "completed", "failed", "parked"})
_CAME = frozenset({"delivered", "started", *DONE})
"""Kinds that show that a message came."""


def mutual_exclusion(events: Sequence[Event]) -> Verdict:
    """Check that one handler at a time works on a key of a topic partition, and on each message.

    A handler runs from ``started`` to ``completed``, ``failed``, ``parked`` or the ``crashed`` of
    its worker. A worker may work on several rows of one batch at once. It may work on several
    messages without a key at once, but on each of them only once.
    """
    found = Findings("one handler per key", "handlers that started", "no handler started")
    running = _Running()
    for event in HistoryView.of(events):
        if event.kind == "crashed":
            running.crash(event)
        elif event.kind in _OF_HANDLERS and event.has_message:
            if event.kind != "started":
                running.end(event)
                continue
            found.checked += 1
            same, other = running.start(event)
            if same is not None:
                of = "without a key" if event.key is None else f"of key {event.key!r}"
                found.violation(
                    f"{event.worker} started a message {of} while it handled that message",
                    *(same, event),
                )
            elif other is not None:
                found.violation(
                    f"key {event.key!r} was started by {event.worker} while {other.worker} "
                    "handled it",
                    *(other, event),
                )
    return found.verdict()


class _Running:
    """Running handlers; the cost of an event does not depend on their number."""

    def __init__(self) -> None:
        self._of_key: defaultdict[Name, dict[Name, dict[Name, Event]]] = defaultdict(dict)
        """By key, then by group: the rows of one batch with one worker may run together."""
        self._of_worker: defaultdict[str | None, dict[tuple[Name, Name, Name], None]] = defaultdict(
            dict
        )
        self._attempts: dict[Name, tuple[Name, Name, Name]] = {}

    def start(self, event: Event) -> tuple[Event | None, Event | None]:
        """Note that a handler starts.

        Returns:
            The running handler of the same message with the same worker, and another running
            handler that may not run beside it.
        """
        mine: Name = (event.worker, *event.stored)
        together: Name = mine if event.batch is None else (event.worker, event.batch)
        of_key = self._of_key[event.routing_name if event.key is not None else mine]
        before = self._attempts.get(mine)
        same = None
        if before is not None:
            same = self._of_key[before[0]][before[1]][mine]
            # A batch may run again before the end of its last run is noticed.
            same = None if event.batch is not None and same.batch == event.batch else same
        other_name = next((name for name in of_key if name != together), None)
        other = None if other_name is None else next(iter(of_key[other_name].values()))
        self.end(event)
        key = event.routing_name if event.key is not None else mine
        self._of_key[key].setdefault(together, {})[mine] = event
        self._attempts[mine] = attempt = key, together, mine
        self._of_worker[event.worker][attempt] = None
        return same, other

    def end(self, event: Event) -> None:
        attempt = self._attempts.get((event.worker, *event.stored))
        if attempt is not None:
            self._end(event.worker, attempt)

    def crash(self, event: Event) -> None:
        """End the handlers of a crashed worker, or all handlers if the event names no worker."""
        if event.worker is None:
            self._of_key.clear()
            self._of_worker.clear()
            self._attempts.clear()
            return
        for attempt in list(self._of_worker.get(event.worker, ())):
            self._end(event.worker, attempt)

    def _end(self, worker: str | None, attempt: tuple[Name, Name, Name]) -> None:
        key, together, mine = attempt
        del self._attempts[mine]
        del self._of_worker[worker][attempt]
        if not self._of_worker[worker]:
            del self._of_worker[worker]
        of_key = self._of_key[key]
        del of_key[together][mine]
        if not of_key[together]:
            del of_key[together]
        if not of_key:
            del self._of_key[key]


def ack_after_checkpoint(events: Sequence[Event]) -> Verdict:
    """Check that an entry is acknowledged only after every delivered message of it is done.

    In batches, a message is done when the checkpoint of its batch is durable; with handlers, when
    it is completed or parked. To acknowledge an entry that was never delivered is a violation too.
    """
    view = HistoryView.of(events)
    found = Findings(
        "acknowledged after the checkpoint",
        "acknowledgements",
        "nothing was acknowledged, or no event marks a message as done",
    )
    if view.host is HostKind.DELIVERIES:
        return found.verdict()
    came: defaultdict[Name | None, set[int | None]] = defaultdict(set)
    """Indices of the delivered messages of an entry."""
    undone: defaultdict[Name | None, dict[Name, Event]] = defaultdict(dict)
    """Delivered messages of an entry that are not done."""
    done: set[Name] = set()
    commits = {id(commit.event): commit for commit in view.commits}
    for event in view:
        entry = event.entry_name
        if event.kind in _CAME and event.ledger is not None:
            came[entry].add(event.index)
            if event.stored not in done:
                undone[entry].setdefault(event.stored, event)
        if event.kind in DONE and view.host is HostKind.HANDLERS:
            done.add(event.stored)
            undone[entry].pop(event.stored, None)
        elif id(event) in commits:
            for row in commits[id(event)].rows:
                done.add(row.stored)
                undone[row.entry_name].pop(row.stored, None)
        elif event.kind == "acked":
            found.checked += 1
            name = f"{event.topic} {event.partition}/{event.ledger}:{event.entry}"
            if event.index is None:
                is_known = bool(came.get(entry))
                early = next(iter(undone[entry].values()), None)
            else:
                is_known = event.index in came[entry]
                early = undone[entry].get(event.stored)
            if not is_known:
                found.violation(f"{name} was acknowledged, but never delivered", event)
            elif early is not None:
                found.violation(f"{name} was acknowledged before it was done", early, event)
    return found.verdict()


def ring_coverage(events: Sequence[Event]) -> Verdict:
    """Check that no slot ever has two owners, and that the ring is covered once it is stable.

    The ring of a topic partition is stable after its last ``range_gained``, and then has no gap.
    A ``range_lost`` after that belongs to a stop, and is allowed. After a crash, the ranges of the
    crashed worker must be gained again, by any worker. If the owner of a slot changes, the epoch
    increases. If the events name no topic partition, there is one ring for all of them.
    """
    found = Findings("ring covered without overlap", "changes of owners", "no range was gained")
    owners = Owners()
    for event in HistoryView.of(events):
        if event.kind in {"range_gained", "range_lost"}:
            found.checked += 1
        for why, offending in owners.follow(event):
            found.violation(why, *offending)
    for why, offending in owners.gaps():
        found.violation(why, *offending)
    return found.verdict()


def routing(events: Sequence[Event]) -> Verdict:
    """Check that a message is delivered to the range of its key's hash, and to the owning worker.

    The worker is checked only for messages that are no rows of a batch, and if the history names
    the owners of ranges.
    """
    found = Findings(
        "routed by key",
        "deliveries with a key and a range or an owner",
        "no delivery has a key and a range, and no range was gained",
    )
    owners = Owners()
    slots: dict[str, tuple[int, ...]] = {}
    for event in HistoryView.of(events):
        if event.kind in {"range_gained", "range_lost", "crashed"}:
            owners.follow(event)
            continue
        if event.kind not in {"delivered", "started"} or event.key is None:
            continue
        owned = not is_row(event) and event.batch is None and event.worker is not None
        if event.range is None and not (owned and owners.known):
            continue
        found.checked += 1
        # Two slots for a key that may have been set as bytes: the history does not say.
        possible = slots.get(event.key)
        if possible is None:
            possible = slots[event.key] = possible_slots(event.key)
        if event.range is not None:
            hash_range = parse_range(event.range)
            possible = tuple(slot for slot in possible if slot in hash_range)
        if not possible:
            slot = possible_slots(event.key)[0]
            found.violation(f"slot {slot} of key {event.key!r} is not in {event.range}", event)
        elif owned and not any(owners.own(event, slot) for slot in possible):
            found.violation(
                f"slot {possible[0]} of key {event.key!r} was not owned by {event.worker}", event
            )
    return found.verdict()


# -- Owners of hash ranges during a history --------------------------------------------

Problem = tuple[str, tuple[Event, ...]]
"""A violation as a sentence without its full stop, and the events that show it."""

_RING = split_ring(1)[0]


class Owners:
    """The owners of every topic partition, or of all together if the events name none."""

    def __init__(self) -> None:
        self._scopes: defaultdict[tuple[str | None, int | None], _Scope] = defaultdict(_Scope)
        self._of_worker: defaultdict[str | None, dict[tuple[str | None, int | None], _Scope]] = (
            defaultdict(dict)
        )
        """Topic partitions in which a worker gained ranges since its last crash."""

    @property
    def known(self) -> bool:
        """Whether any worker has gained a range."""
        return bool(self._scopes)

    def follow(self, event: Event) -> list[Problem]:
        """Take the next event. Return the violations that it causes, if it is a gain.

        Events other than gains, losses and crashes are ignored.
        """
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
        """Return slots without an owner at the end that should have one."""
        return [problem for scope in self._scopes.values() for problem in scope.gaps()]

    def own(self, event: Event, slot: int) -> bool:
        """Whether the event's worker owns the slot; true if the history names no owners."""
        names = ((event.topic, event.partition), (event.topic, None), (None, None))
        scopes = [self._scopes[name] for name in names if name in self._scopes]
        return not scopes or any(scope.owns(event, slot) for scope in scopes)


_Holder = tuple[str | None, str | None]
"""Worker and range."""


@dataclass(slots=True)
class _Scope:
    """Owners of one topic partition.

    While no two holders share a slot, a change costs the logarithm of the number of held ranges.
    """

    held: dict[_Holder, Event] = field(default_factory=dict)
    """The gain of each (worker, range) that is held now."""
    of_worker: dict[str | None, dict[_Holder, None]] = field(default_factory=dict)
    """The same by worker."""
    spans: list[tuple[int, int, str]] = field(default_factory=list)
    """First slot, last slot and worker of each held range, ascending."""
    holders: dict[tuple[int, int, str], _Holder] = field(default_factory=dict)
    """Holders of each span."""
    disjoint: bool = True
    """Whether no two holders had a slot in common since the last time that nothing was held."""
    gains: list[Event] = field(default_factory=list)
    epochs: list[tuple[int, int, Event]] = field(default_factory=list)
    """First slot, last slot and their last gain; disjoint and ascending."""
    crashed: list[tuple[Event, int]] = field(default_factory=list)
    """Gains that a crash ended, with the number of gains until then."""
    stable: bool = False
    """Whether ``gap`` is that of the last gain."""
    gap: HashRange | None = None
    """Slots without an owner after the last gain, before anything was lost."""

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
        self.stable = False

    def _overlapping(self, gained: HashRange) -> Iterator[Event]:
        """Yield the gains of held ranges that share a slot with a range."""
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
        self._judge_stable()
        self._let_go((event.worker, event.range))

    def crash(self, holders: Iterable[_Holder]) -> None:
        """Note that the worker with these ranges crashed."""
        for holder in holders:
            self._judge_stable()
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

    def _judge_stable(self) -> None:
        if not self.stable:
            self.gap = _gap(self.spans, _RING)
            self.stable = True

    def gaps(self) -> Iterator[Problem]:
        self._judge_stable()
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
    """Slots that are in at least one of several ranges."""

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
        """Return the spans that share a slot with a range."""
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
    """Whether a range is gained in an epoch that another gain has ended."""
    if event.epoch is None or before.epoch is None:
        return False
    other = event.worker != before.worker
    return event.epoch < before.epoch or (other and event.epoch == before.epoch)


def _gap(spans: Iterable[tuple[int, int, str]], whole: HashRange) -> HashRange | None:
    """Return the first part of a range that lies in no span; spans ascend by their first slot."""
    at = whole.start
    for start, end, _ in spans:
        if start > at:
            return HashRange(at, min(whole.end, start - 1))
        at = max(at, end + 1)
    return None if at > whole.end else HashRange(at, whole.end)
