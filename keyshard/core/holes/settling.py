"""Settling: which undelivered entries are certain never to come, and how far the floor goes.

A hole is an entry below the newest delivered one that no batch holds. It is either a late entry of
a slow range, which must never be settled, or one that nobody will ever deliver: a transaction or
replication marker, an aborted message, or one that somebody else acknowledged, skipped or expired.

The evidence comes from outside (:class:`Proofs`); what follows from it is decided here. Settled
holes join the ``delivered`` set, which so stays in few runs, and the floor moves over both.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import pairwise

from keyshard.core.holes.broker_state import BrokerState
from keyshard.core.position.checkpoint import PartitionCheckpoint
from keyshard.core.position.entry import EntryId
from keyshard.core.position.entry_set import EntrySet, Run, Runs

FIRST = EntryId(0, 0)
"""The lowest position there is."""


@dataclass(frozen=True, slots=True)
class LedgerEnd:
    """Where a ledger ends and what follows it."""

    last: int
    """Last entry that exists; -1 when none does."""
    next: EntryId
    """The next position at which an entry can be; nothing lies between."""


@dataclass(slots=True)
class Proofs:
    """Evidence about one topic partition that no checkpoint has yet."""

    base: EntryId | None = None
    """Everything before this position is settled; ``None`` when that is not known of any."""
    settled: EntrySet = field(default_factory=EntrySet)
    """Entries that nobody will ever deliver."""
    ledger_ends: dict[int, LedgerEnd] = field(default_factory=dict)
    """Ends of ledgers that take no more entries."""
    published_ms: int = 0
    """Nothing that is settled because somebody acknowledged it was published later than this,
    milliseconds since the epoch. Its redelivery is then no sign of a re-created topic."""

    def merge(self, other: Proofs) -> None:
        """Take the evidence of ``other`` too."""
        if other.base is not None and (self.base is None or other.base > self.base):
            self.base = other.base
        self.settled |= other.settled
        self.ledger_ends.update(other.ledger_ends)
        self.published_ms = max(self.published_ms, other.published_ms)

    def applied(self, floor: EntryId | None) -> None:
        """Drop what a checkpoint with this floor has now."""
        self.settled = EntrySet()
        if floor is not None:
            if self.base is not None and self.base <= _after(floor):
                self.base = None
            self.ledger_ends = {
                ledger: end for ledger, end in self.ledger_ends.items() if end.next > floor
            }

    def __bool__(self) -> bool:
        return self.base is not None or bool(self.settled) or bool(self.ledger_ends)


@dataclass(frozen=True, slots=True)
class Settled:
    """What a checkpoint is going to say of what was delivered before it."""

    floor: EntryId | None
    delivered: EntrySet
    """Delivered or settled entries above the floor."""
    newly: int
    """Holes that this settled."""


def settle(state: PartitionCheckpoint, proofs: Proofs, undelivered: Collection[EntryId]) -> Settled:
    """Apply evidence to a checkpoint's state.

    Args:
        state: The newest checkpoint's.
        proofs: The evidence.
        undelivered: Entries that were received and are in no batch yet, or only in the one that is
            being made: whatever the evidence says, they are going to be delivered.
    """
    holes = proofs.settled - state.delivered
    if state.floor is not None:
        holes = holes.above(state.floor)
    if holes:
        holes -= EntrySet.of(entry_id for entry_id in undelivered if entry_id in holes)
    delivered = state.delivered | holes
    floor = _raise(state.floor, delivered, proofs, min(undelivered, default=None))
    if floor is not None:
        delivered = delivered.above(floor)
    return Settled(floor, delivered, len(holes))


def settles_more(state: PartitionCheckpoint, proofs: Proofs) -> bool:
    """Whether evidence says anything that does not follow from what is delivered."""
    if not proofs:
        return False
    alone = _raise(state.floor, state.delivered, Proofs(), None)
    return bool(proofs.settled) or alone != _raise(state.floor, state.delivered, proofs, None)


def _raise(
    floor: EntryId | None, delivered: EntrySet, proofs: Proofs, limit: EntryId | None
) -> EntryId | None:
    """The highest entry with everything up to it settled; ``limit`` itself never is."""
    at = None if floor is None else _after(floor)
    if proofs.base is not None and (at is None or proofs.base > at):
        at = proofs.base
    while at is not None:
        if limit is not None and at >= limit:
            at = limit
        if at.entry > 0:
            before = EntryId(at.ledger, at.entry - 1)
            floor = before if floor is None else max(floor, before)
        if at == limit:
            break
        run_end = delivered.run_end(at)
        if run_end is not None:
            at = _after(run_end)
            continue
        end = proofs.ledger_ends.get(at.ledger)
        at = end.next if end is not None and at.entry > end.last else None
    return floor


def _after(entry_id: EntryId) -> EntryId:
    return EntryId(entry_id.ledger, entry_id.entry + 1)


def holes_of(state: PartitionCheckpoint, broker: BrokerState | None = None) -> EntrySet:
    """Entries above the floor and below the newest delivered one that no batch holds.

    Args:
        state: The newest checkpoint's.
        broker: Where there is one, tells the ledgers that hold nothing delivered, and ledger ends.
    """
    newest = state.delivered.last
    if newest is None:
        return EntrySet()
    spans: dict[int, Runs] = {ledger: ((0, last),) for ledger, _, last in state.delivered.runs()}
    for ledger, entries in broker.ledgers.items() if broker else ():
        if ledger < newest.ledger and entries:
            last = max(entries - 1, spans.get(ledger, ((0, 0),))[0][1])
            spans[ledger] = ((0, last),)
    holes = EntrySet(spans) - state.delivered
    return holes if state.floor is None else holes.above(state.floor)


def borders_of(state: PartitionCheckpoint) -> EntrySet:
    """Positions that show a Reader where ledgers begin and end, where no list of them is at hand.

    A Reader that starts behind the last delivered entry of a ledger and lands on the next ledger
    proves the end; one that starts at the very first position shows the first stored entry.
    """
    newest = state.delivered.last
    if newest is None:
        return EntrySet()
    ends = {ledger: last for ledger, _, last in state.delivered.runs() if ledger < newest.ledger}
    if state.floor is not None and state.floor.ledger < newest.ledger:
        ends.setdefault(state.floor.ledger, state.floor.entry)
    borders = [EntryId(ledger, last + 1) for ledger, last in ends.items()]
    return EntrySet.of(borders if state.floor is not None else [FIRST, *borders])


def proofs_of_ledgers(state: PartitionCheckpoint, holes: EntrySet, broker: BrokerState) -> Proofs:
    """What the list of stored ledgers proves: ends of closed ones, and that others are gone."""
    stored = sorted(broker.ledgers)
    if not stored:
        return Proofs()
    lasts = {ledger: last for ledger, _, last in state.delivered.runs()}
    ends = {
        ledger: LedgerEnd(broker.ledgers[ledger] - 1, EntryId(following, 0))
        for ledger, following in pairwise(stored)
        # A list that lags behind, or a size not told yet, ends nothing.
        if broker.ledgers[ledger] > lasts.get(ledger, 0)
    }
    known = {ledger for ledger, _, _ in (*state.delivered.runs(), *holes.runs())}
    if state.floor is not None:
        known.add(state.floor.ledger)
    gone: dict[int, Runs] = {}
    for ledger in known - broker.ledgers.keys():
        following = next((other for other in stored if other > ledger), None)
        if following is not None:
            ends[ledger] = LedgerEnd(-1, EntryId(following, 0))
            gone[ledger] = _runs(holes, ledger)
    return Proofs(EntryId(stored[0], 0), EntrySet(gone), ends)


def _runs(entries: EntrySet, ledger: int) -> tuple[Run, ...]:
    return tuple((first, last) for other, first, last in entries.runs() if other == ledger)


class Lasting:
    """Tells which entries of a changing set have been in it for a while.

    Args:
        period_ms: How long that is, milliseconds.
    """

    def __init__(self, period_ms: int) -> None:
        self._period_ms = period_ms
        self._since: list[tuple[int, EntrySet]] = []

    def update(self, now_ms: int, entries: EntrySet) -> EntrySet:
        """Entries that were in the set at every call for the period; those gone start anew."""
        kept: list[tuple[int, EntrySet]] = []
        lasting = EntrySet()
        for since_ms, known in self._since:
            still = known & entries
            entries -= still
            if now_ms - since_ms >= self._period_ms:
                lasting |= still
            if still:
                kept.append((since_ms, still))
        if entries:
            kept.append((now_ms, entries))
        # Old generations are one: only whether the period has passed counts.
        old = [known for since_ms, known in kept if now_ms - since_ms >= self._period_ms]
        young = [item for item in kept if now_ms - item[0] < self._period_ms]
        if old:
            merged = EntrySet()
            for known in old:
                merged |= known
            young.insert(0, (now_ms - self._period_ms, merged))
        self._since = young
        return lasting
