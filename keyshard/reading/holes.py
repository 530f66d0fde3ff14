"""Looks at holes with plain Readers: what a Reader does not show, nobody will ever be delivered."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from keyshard.broker.port import Broker
from keyshard.broker.retry import retry_until
from keyshard.core.holes.settling import LedgerEnd, Proofs
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.errors import UnreadableEntryError
from keyshard.reading.replay import stretches
from keyshard.reading.scan import Scan


@dataclass(slots=True)
class Inspection:
    """What was found out about the holes that there was time for."""

    proofs: Proofs = field(default_factory=Proofs)
    """Holes without an entry, and ledger ends that were passed."""
    existing: dict[EntryId, tuple[int, ...]] = field(default_factory=dict)
    """Entries that do exist, with the slots that may route them."""
    complete: bool = True
    """Whether every hole is known to hold an entry or none."""


def inspect_holes(
    broker: Broker,
    topic_partition: TopicPartition,
    holes: EntrySet,
    deadline: float,
    *,
    existing_max: int = 10**9,
    skipped: tuple[type[UnreadableEntryError], ...] = (),
    parked: tuple[type[UnreadableEntryError], ...] = (),
) -> Inspection:
    """Read over holes until a moment of the monotonic clock, or enough existing entries.

    Args:
        broker: Connection to read through.
        topic_partition: Whose holes.
        holes: The holes.
        deadline: When to end.
        existing_max: Entries that exist after which it ends.
        skipped: Kinds of unreadable entries that the source leaves out.
        parked: Kinds of which it takes what is stored: they exist, and nobody knows their slots.

    Raises:
        UnreadableEntryError: A hole is an entry of another kind that cannot be read.
        BrokerError: The broker cannot be reached until that moment, or refused.
    """
    found = Inspection()
    for stretch in stretches(holes):
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
                    if entry_id in stretch and isinstance(error, parked):
                        found.existing[entry_id] = ()
                    elif entry_id in stretch and not isinstance(error, skipped):
                        raise error
                    position = _passed(found, position, entry_id)
                unreadable.clear()
                _take(found, stretch, position, blocks)
        # Entry -1 is before the first: `above` then takes the whole ledger.
        at = EntryId(scan.position.ledger, scan.position.entry - 1)
        found.proofs.settled |= (stretch - stretch.above(at)) - EntrySet.of(found.existing)
        found.complete = found.complete and scan.done
        if not scan.done:
            break
    return found


def _take(
    found: Inspection, stretch: EntrySet, position: EntryId, blocks: Sequence[EntryBlock]
) -> None:
    """What was read from a position on, where every entry before it is known."""
    for block in blocks:
        position = _passed(found, position, block.id)
        if block.id in stretch:
            found.existing[block.id] = block.possible_slots


def _passed(found: Inspection, position: EntryId, entry_id: EntryId) -> EntryId:
    """The position behind an entry that came at another one."""
    if entry_id.ledger > position.ledger:
        found.proofs.ledger_ends[position.ledger] = LedgerEnd(position.entry - 1, entry_id)
    return EntryId(entry_id.ledger, entry_id.entry + 1)
