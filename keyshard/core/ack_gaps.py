"""Decides which entries of ack gaps will certainly never be delivered, and raises the floor.

Ack gaps are the entries below the newest delivered one that no batch holds. Each is one of two
kinds. Either it is a late entry of a slow range: this must never be resolved. Or it will never be
delivered: a transaction or replication marker, an aborted message, or an entry that another
application acknowledged, skipped or expired.

The evidence comes from outside (:class:`GapEvidence`); this module draws the conclusions. Resolved
entries join the ``delivered`` set, which keeps it in few runs, and the floor moves over both.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from keyshard.core.position.checkpoint import PartitionCheckpoint
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.subscription_state import CursorState
from keyshard.errors import DataLossAckedElsewhereError, DataLossTrimmedError

FIRST = EntryId(0, 0)
"""The lowest possible position."""


@dataclass(frozen=True, slots=True)
class LedgerEnd:
    """The end of a ledger, and the position after it."""

    last: int
    """Last entry of the ledger; -1 if it is empty."""
    next: EntryId
    """The next possible position of an entry."""


@dataclass(slots=True)
class GapEvidence:
    """Evidence about one topic partition that no checkpoint has yet."""

    base: EntryId | None = None
    """Every entry before this position is delivered or resolved; ``None`` if unknown."""
    resolved: EntrySet = field(default_factory=EntrySet)
    """Entries that will never be delivered."""
    ledger_ends: dict[int, LedgerEnd] = field(default_factory=dict)
    """Ends of closed ledgers."""
    published_ms: int = 0
    """Latest possible publish time of entries resolved because another application acknowledged
    them, milliseconds since the epoch. The redelivery of such an entry is no sign of a
    re-created topic."""

    def merge(self, other: GapEvidence) -> None:
        """Add the evidence of ``other``."""
        if other.base is not None and (self.base is None or other.base > self.base):
            self.base = other.base
        self.resolved |= other.resolved
        self.ledger_ends.update(other.ledger_ends)
        self.published_ms = max(self.published_ms, other.published_ms)

    def applied(self, floor: EntryId | None) -> None:
        """Drop the evidence that a checkpoint with this floor contains."""
        self.resolved = EntrySet()
        if floor is not None:
            if self.base is not None and self.base <= _after(floor):
                self.base = None
            self.ledger_ends = {
                ledger: end for ledger, end in self.ledger_ends.items() if end.next > floor
            }

    def __bool__(self) -> bool:
        return self.base is not None or bool(self.resolved) or bool(self.ledger_ends)


class Resolution(NamedTuple):
    """State of a topic partition in the next checkpoint, without the entries of its batch."""

    floor: EntryId | None
    delivered: EntrySet
    """Delivered or resolved entries above the floor."""
    newly: int
    """Number of entries of ack gaps that this step resolves."""


def resolve(
    state: PartitionCheckpoint, proofs: GapEvidence, undelivered: Collection[EntryId]
) -> Resolution:
    """Apply evidence to a checkpoint's state.

    Args:
        state: State of the newest checkpoint.
        proofs: The evidence.
        undelivered: Received entries that are in no batch yet, or only in the one being made. They
            will be delivered, so they are not resolved, even if the evidence says so.
    """
    ack_gaps = proofs.resolved
    if ack_gaps:
        ack_gaps -= state.delivered
        if state.floor is not None:
            ack_gaps = ack_gaps.above(state.floor)
        ack_gaps -= EntrySet.of(entry_id for entry_id in undelivered if entry_id in ack_gaps)
    delivered = state.delivered | ack_gaps
    floor = _raise(state.floor, delivered, proofs, min(undelivered, default=None))
    if floor is not None:
        delivered = delivered.above(floor)
    return Resolution(floor, delivered, len(ack_gaps) if ack_gaps else 0)


def resolves_more(state: PartitionCheckpoint, proofs: GapEvidence) -> bool:
    """Return whether the evidence resolves anything that the delivered entries do not imply."""
    if not proofs:
        return False
    alone = _raise(state.floor, state.delivered, GapEvidence(), None)
    return bool(proofs.resolved) or alone != _raise(state.floor, state.delivered, proofs, None)


def _raise(
    floor: EntryId | None, delivered: EntrySet, proofs: GapEvidence, limit: EntryId | None
) -> EntryId | None:
    """Return the highest entry up to which everything is resolved; ``limit`` itself never is."""
    at = None if floor is None else _after(floor)
    if proofs.base is not None and (at is None or proofs.base > at):
        at = proofs.base
    reached: EntryId | None = None
    while at is not None:
        if limit is not None and at >= limit:
            at = limit
        if at.entry > 0:
            reached = at
        if at == limit:
            break
        run_end = delivered.run_end(at)
        if run_end is not None:
            at = _after(run_end)
            continue
        end = proofs.ledger_ends.get(at.ledger)
        at = end.next if end is not None and at.entry > end.last else None
    if reached is None:
        return floor
    before = EntryId(reached.ledger, reached.entry - 1)
    return before if floor is None else max(floor, before)


def _after(entry_id: EntryId) -> EntryId:
    return EntryId(entry_id.ledger, entry_id.entry + 1)


def ack_gaps_of(state: PartitionCheckpoint, broker: CursorState | None = None) -> EntrySet:
    """Return the entries above the floor and below the newest delivered one that no batch holds.

    Args:
        state: State of the newest checkpoint.
        broker: Optional list of ledgers: adds ledgers without delivered entries, and ledger ends.
    """
    newest = state.delivered.last
    if newest is None:
        return EntrySet()
    ends = state.delivered.last_entries
    for ledger, entries in broker.ledgers.items() if broker else ():
        if ledger < newest.ledger and entries:
            ends[ledger] = max(entries - 1, ends.get(ledger, 0))
    spans = EntrySet.of_runs((ledger, 0, last) for ledger, last in ends.items())
    ack_gaps = spans - state.delivered
    return ack_gaps if state.floor is None else ack_gaps.above(state.floor)


def ledger_borders(state: PartitionCheckpoint) -> EntrySet:
    """Return positions at which a Reader shows ledger borders, if no list of ledgers exists.

    A Reader that starts after the last delivered entry of a ledger and lands on the next ledger
    proves the end. A Reader that starts at the very first position shows the first stored entry.
    """
    newest = state.delivered.last
    if newest is None:
        return EntrySet()
    ends = state.delivered.last_entries
    del ends[newest.ledger]
    if state.floor is not None and state.floor.ledger < newest.ledger:
        ends.setdefault(state.floor.ledger, state.floor.entry)
    borders = [EntryId(ledger, last + 1) for ledger, last in ends.items()]
    return EntrySet.of(borders if state.floor is not None else [FIRST, *borders])


def evidence_of_ledgers(
    state: PartitionCheckpoint, ack_gaps: EntrySet, broker: CursorState
) -> GapEvidence:
    """Return what the list of stored ledgers proves: ends of ledgers, and deleted ledgers."""
    stored = sorted(broker.ledgers)
    if not stored:
        return GapEvidence()
    lasts = state.delivered.last_entries
    ends = {
        ledger: LedgerEnd(broker.ledgers[ledger] - 1, EntryId(following, 0))
        for ledger, following in pairwise(stored)
        # A list that is out of date, or has no size for a ledger yet, proves no end.
        if broker.ledgers[ledger] > lasts.get(ledger, 0)
    }
    known = {*lasts, *ack_gaps.last_entries}
    if state.floor is not None:
        known.add(state.floor.ledger)
    gone = EntrySet()
    for ledger in known - broker.ledgers.keys():
        following = next((other for other in stored if other > ledger), None)
        if following is not None:
            ends[ledger] = LedgerEnd(-1, EntryId(following, 0))
            gone |= ack_gaps.of_ledger(ledger)
    return GapEvidence(EntryId(stored[0], 0), gone, ends)


class AgedEntries:
    """Finds the entries of a changing set that have been in it for a period.

    Args:
        period_ms: The period, milliseconds.
    """

    def __init__(self, period_ms: int) -> None:
        self._period_ms = period_ms
        self._since: list[tuple[int, EntrySet]] = []

    def update(self, now_ms: int, entries: EntrySet) -> EntrySet:
        """Return the entries that were in the set at every call for the period.

        An entry that leaves the set starts again.
        """
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
        # Merge the old generations: only whether the period has passed matters.
        old = [known for since_ms, known in kept if now_ms - since_ms >= self._period_ms]
        young = [item for item in kept if now_ms - item[0] < self._period_ms]
        if old:
            merged = EntrySet()
            for known in old:
                merged |= known
            young.insert(0, (now_ms - self._period_ms, merged))
        self._since = young
        return lasting


# -- The audit at the start: the broker's cursor against the checkpoint ----------------------------

IDS_SHOWN_MAX = 80
"""Most characters of ids in a message."""


def acknowledged_unknown(state: PartitionCheckpoint, broker: CursorState) -> EntrySet:
    """Return stored and acknowledged entries that are neither delivered nor resolved.

    If a checkpoint has no floor, entries before its first delivered one were acknowledged before
    the source began.
    """
    return _since_the_start(state, broker.acknowledged() - state.delivered)


def _since_the_start(state: PartitionCheckpoint, entries: EntrySet) -> EntrySet:
    """Return the entries above the floor; without a floor, those above the first delivered one."""
    before = state.floor or state.delivered.first
    return EntrySet() if before is None else entries.above(before)


def before_the_start(broker: CursorState, now_ms: int) -> GapEvidence:
    """Return evidence for the first start on an existing subscription.

    All entries that are acknowledged then are resolved.
    """
    marked = broker.mark_delete
    if marked is None:
        return GapEvidence()
    return GapEvidence(EntryId(marked.ledger, marked.entry + 1), broker.individually, {}, now_ms)


class Trimmed(NamedTuple):
    """Entries that no batch holds and that the broker no longer stores."""

    entries: EntrySet
    """Ack gaps of the checkpoint in deleted ledgers."""
    newest: EntryId | None
    """The newest entry of the checkpoint, if its ledger is deleted. An unknown number of entries
    after it may be deleted, too."""
    oldest_stored: int
    """The oldest stored ledger."""

    def __bool__(self) -> bool:
        return bool(self.entries) or self.newest is not None

    @property
    def least(self) -> int:
        """Number of entries to report as lost. All that may follow ``newest`` count as one."""
        return len(self.entries) + (self.newest is not None)


def trimmed_unread(state: PartitionCheckpoint, broker: CursorState) -> Trimmed:
    """Return entries that the broker may have deleted while no subscription retained them.

    The broker deletes whole ledgers, the oldest first. So if it stores the ledger of the newest
    delivered entry, it stores all later entries, too.
    """
    gaps, deleted = _since_the_start(state, ack_gaps_of(state)), EntrySet()
    for ledger in gaps.last_entries:
        if ledger not in broker.ledgers:
            deleted |= gaps.of_ledger(ledger)
    newest = state.delivered.last or state.floor
    if newest is not None and (newest.ledger in broker.ledgers or newest == broker.last_written):
        newest = None
    return Trimmed(deleted, newest, min(broker.ledgers, default=-1))


def without_subscription(
    topic_partition: TopicPartition, subscription: str, trimmed: Trimmed
) -> DataLossTrimmedError:
    """Return the error that names entries deleted while no subscription retained them."""
    lost = []
    if trimmed.entries:
        ids = str(trimmed.entries)[:IDS_SHOWN_MAX]
        lost.append(f"{len(trimmed.entries)} entries that are in no batch, first {ids}")
    if trimmed.newest is not None:
        ledger, entry = trimmed.newest
        lost.append(
            f"entries between {ledger}:{entry}, where the checkpoint ends, and ledger "
            f"{trimmed.oldest_stored}, the oldest that is stored, if there were any"
        )
    return DataLossTrimmedError(
        f"No subscription {subscription!r} of {topic_partition} has retained entries since the "
        "checkpoint. It expired or was deleted, perhaps with its topic, even if one of this name "
        f"exists now. The broker no longer stores {', nor '.join(lost)}. Nothing was acknowledged.",
        "To accept the loss, set fail_on_data_loss to false. Check when the namespace lets "
        "subscriptions expire.",
        topic_partition=topic_partition.name,
        count=trimmed.least,
    )


def acked_elsewhere(
    topic_partition: TopicPartition, subscription: str, lost: EntrySet, *, complete: bool = True
) -> DataLossAckedElsewhereError:
    """Return the error that names entries acknowledged by another application.

    Args:
        topic_partition: Their topic partition.
        subscription: The subscription.
        lost: The entries.
        complete: Whether these are all.
    """
    return DataLossAckedElsewhereError(
        f"{'' if complete else 'At least '}{len(lost)} entries of {topic_partition} are "
        f"acknowledged for {subscription!r}, but are "
        f"in no batch of this checkpoint, first {str(lost)[:IDS_SHOWN_MAX]}. The checkpoint is "
        "an older copy, or another client acknowledged, skipped or expired the entries.",
        "Restore the newest checkpoint. To accept the loss, set fail_on_data_loss to false.",
        topic_partition=topic_partition.name,
        count=len(lost),
        first=str(lost)[:IDS_SHOWN_MAX],
    )
