"""Reads ack gaps with plain Readers: an entry that no Reader returns will never be delivered."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from keyshard.broker.port import Broker
from keyshard.broker.retry import retry_until
from keyshard.core.ack_gaps import GapEvidence, LedgerEnd
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.errors import UnreadableEntryError
from keyshard.reading.replay import stretches
from keyshard.reading.scan import Scan


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
    parked: tuple[type[UnreadableEntryError], ...] = (),
) -> GapReport:
    """Read ack gaps until a deadline, or until enough existing entries are found.

    Args:
        broker: Connection for Readers.
        topic_partition: The topic partition.
        ack_gaps: The ack gaps.
        deadline: Monotonic time at which to end.
        existing_max: Number of existing entries at which to end.
        skipped: Kinds of unreadable entries that the source skips.
        parked: Kinds whose stored bytes the source takes. These entries exist, with unknown slots.

    Raises:
        UnreadableEntryError: An ack gap contains an unreadable entry of another kind.
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
                    elif entry_id in stretch and isinstance(error, parked):
                        found.existing[entry_id] = ()
                    elif entry_id in stretch:
                        raise error
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
