"""Reads gaps with plain Readers: an entry that no Reader returns will never be delivered."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from keyshard.broker.port import Broker, ReadOptions
from keyshard.broker.retry import retry_until
from keyshard.core.ack_gaps import GapEvidence, LedgerEnd
from keyshard.core.metadata_columns import DELIVER_AT
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.read_target import Gap
from keyshard.errors import ReplayTimeoutError, UnreadableEntryError
from keyshard.reading.replay import GAP_ENTRIES_MAX, stretches
from keyshard.reading.scan import Scan

READER_TIMEOUT_S = 5.0
"""Longest wait of a search for a Reader, seconds."""
READ_S = 30.0
"""Time after which a search reads no further; the next one continues, seconds."""


@dataclass(slots=True)
class GapReport:
    """Findings about the ack gaps that were read in time."""

    proofs: GapEvidence = field(default_factory=GapEvidence)
    """Ack gaps without an entry, and ledger ends that were passed."""
    existing: dict[EntryId, tuple[int, ...]] = field(default_factory=dict)
    """Entries that exist, with the slots that may route them."""
    skipped: EntrySet = field(default_factory=EntrySet)
    """Unreadable entries that the source skips. They are resolved as well."""
    complete: bool = True
    """Whether all ack gaps were read."""


def inspect_ack_gaps(
    broker: Broker,
    topic_partition: TopicPartition,
    ack_gaps: EntrySet,
    deadline: float,
    *,
    existing_max: int = 10**9,
    skipped: tuple[type[UnreadableEntryError], ...] = (),
) -> GapReport:
    """Read ack gaps until a deadline, or until enough existing entries are found.

    Unreadable entries of kinds that the source does not skip exist, with unknown slots.

    Args:
        broker: Connection for Readers.
        topic_partition: The topic partition.
        ack_gaps: The ack gaps.
        deadline: Monotonic time at which to end.
        existing_max: Number of existing entries at which to end.
        skipped: Kinds of unreadable entries that the source skips.

    Raises:
        BrokerError: The broker cannot be reached before the deadline, or refused.
    """
    found, passed_over = GapReport(), list[EntryId]()
    for stretch in stretches(ack_gaps):
        start, last = stretch.first, stretch.last
        assert start is not None
        unreadable: dict[EntryId, UnreadableEntryError] = {}
        with Scan(broker, topic_partition, start, last, unreadable=unreadable) as scan:
            while not scan.done and len(found.existing) < existing_max:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    break
                position = scan.position
                blocks = retry_until(scan.read, left_s)
                for entry_id, error in unreadable.items():
                    if entry_id in stretch and isinstance(error, skipped):
                        passed_over.append(entry_id)
                    elif entry_id in stretch:
                        found.existing[entry_id] = ()
                    position = _passed(found, position, entry_id)
                unreadable.clear()
                if not blocks and scan.position.ledger > position.ledger:
                    # The scan ended at an unreadable entry after the stretch.
                    _passed(found, position, scan.position)
                _take(found, stretch, position, blocks)
        # The entry before entry 0 is -1: `above` then takes the whole ledger.
        at = EntryId(scan.position.ledger, scan.position.entry - 1)
        found.proofs.resolved |= (stretch - stretch.above(at)) - EntrySet.of(found.existing)
        found.complete = found.complete and scan.done
        if not scan.done:
            break
    found.skipped = EntrySet.of(passed_over)
    return found


def _take(
    found: GapReport, stretch: EntrySet, position: EntryId, blocks: Sequence[EntryBlock]
) -> None:
    """Record blocks that were read from a position on; every earlier entry is known."""
    for block in blocks:
        position = _passed(found, position, block.id)
        if block.id in stretch:
            found.existing[block.id] = block.possible_slots


def _passed(found: GapReport, position: EntryId, entry_id: EntryId) -> EntryId:
    """Return the position after an entry, and record the end of a ledger that was passed."""
    if entry_id.ledger > position.ledger:
        found.proofs.ledger_ends[position.ledger] = LedgerEnd(position.entry - 1, entry_id)
    return EntryId(entry_id.ledger, entry_id.entry + 1)


# -- Gaps of a bounded run -------------------------------------------------------------------------


class Found(NamedTuple):
    """The result of reading some gaps."""

    entry: EntryId | None
    """The first entry that is still to come."""
    not_due: int
    """Number of entries that are not due, in the first ``passed`` gaps."""
    passed: int
    """Number of gaps, from the first on, in which nothing is still to come."""


def grouped(gaps: Iterable[Gap]) -> Iterator[list[Gap]]:
    """Group gaps for one Reader each: those in one ledger with little between them."""
    part: list[Gap] = []
    for gap in gaps:
        near = part and (
            gap.start.ledger == part[-1].end.ledger
            and gap.start.entry - part[-1].end.entry <= GAP_ENTRIES_MAX
        )
        if part and not near:
            yield part
            part = []
        part.append(gap)
    if part:
        yield part


def search(
    broker: Broker,
    where: TopicPartition,
    gaps: Sequence[Gap],
    skipped: tuple[type[UnreadableEntryError], ...],
) -> Found:
    """Look for the first stored entry of some gaps that can be received now.

    Args:
        broker: Connection for Readers.
        where: The topic partition.
        gaps: The gaps, ascending.
        skipped: Kinds of unreadable entries that the source skips.

    Raises:
        ReplayTimeoutError: The Reader returned nothing in time.
        UnreadableEntryError: An entry of a gap cannot be read, and its kind is not skipped.
    """
    end_s = time.monotonic() + READ_S
    deadline = time.monotonic() + READER_TIMEOUT_S
    end = gaps[-1].end
    last = EntryId(end.ledger, end.entry - 1)
    unreadable: dict[EntryId, UnreadableEntryError] = {}
    passed = not_due = of_this_gap = 0
    how = ReadOptions(columns=(DELIVER_AT,))
    with Scan(broker, where, gaps[0].start, last, how, unreadable=unreadable) as scan:
        while not scan.done and time.monotonic() < end_s:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise ReplayTimeoutError(
                    f"A reader of {where} received nothing from {scan.position} on.",
                    "Check the load of the broker.",
                )
            blocks = retry_until(scan.read, left_s)
            for entry_id, error in unreadable.items():
                if _is_in(gaps, entry_id) and not isinstance(error, skipped):
                    raise error
            unreadable.clear()
            if blocks:
                deadline = time.monotonic() + READER_TIMEOUT_S
            for block in blocks:
                while passed < len(gaps) and gaps[passed].end <= block.id:
                    passed, not_due, of_this_gap = passed + 1, not_due + of_this_gap, 0
                if passed == len(gaps) or block.id < gaps[passed].start:
                    continue
                if not _is_delayed(block):
                    return Found(block.id, not_due, passed)
                of_this_gap += 1
        if scan.done:
            passed, not_due = len(gaps), not_due + of_this_gap
    return Found(None, not_due, passed)


def _is_in(gaps: Sequence[Gap], entry_id: EntryId) -> bool:
    """Return whether an entry lies in one of some gaps, ascending, and not between them."""
    before = bisect_right(gaps, entry_id, key=lambda gap: gap.start)
    return before > 0 and entry_id < gaps[before - 1].end


def _is_delayed(block: EntryBlock) -> bool:
    """Return whether the delivery time of an entry is still to come.

    ``False`` if the entry has none, or if the client does not tell it.
    """
    due = block.column(DELIVER_AT)[0]
    return due is not None and bool(due.timestamp() > time.time())
