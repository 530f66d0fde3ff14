"""Looks at holes with plain Readers: what a Reader does not show, nobody will ever be delivered."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from keyshard.broker.port import Broker, Reader
from keyshard.core.entry import EntryId, TopicPartition
from keyshard.core.entry_set import EntrySet
from keyshard.core.settling import LedgerEnd, Proofs
from keyshard.runtime.replay import READ_WAIT_MS, stretches


@dataclass(slots=True)
class Inspection:
    """What was found out about the holes that there was time for."""

    proofs: Proofs = field(default_factory=Proofs)
    """Holes without an entry, and ledger ends that were passed."""
    existing: dict[EntryId, int | None] = field(default_factory=dict)
    """Entries that do exist, with the slots that route them."""


def inspect_holes(
    broker: Broker,
    topic_partition: TopicPartition,
    holes: EntrySet,
    deadline: float,
    *,
    existing_max: int = 10**9,
) -> Inspection:
    """Read over holes until a moment of the monotonic clock, or enough existing entries.

    Raises:
        BrokerError: The broker cannot be reached, or refused.
    """
    found = Inspection()
    for stretch in stretches(holes):
        start = stretch.first
        assert start is not None
        if time.monotonic() >= deadline or len(found.existing) >= existing_max:
            break
        reader = broker.reader(topic_partition, start)
        try:
            decided = _read_over(
                reader, stretch, start, found, deadline=deadline, existing_max=existing_max
            )
        finally:
            reader.close()
        # Entry -1 is before the first: `above` then takes the whole ledger.
        inspected = stretch - stretch.above(EntryId(decided.ledger, decided.entry - 1))
        found.proofs.settled |= inspected - EntrySet.of(found.existing)
    return found


def _read_over(
    reader: Reader,
    stretch: EntrySet,
    start: EntryId,
    found: Inspection,
    *,
    deadline: float,
    existing_max: int,
) -> EntryId:
    """Read over a stretch; everything before the position that this returns was shown or is not."""
    position, last = start, stretch.last
    assert last is not None
    while position <= last and time.monotonic() < deadline:
        blocks = reader.read(READ_WAIT_MS)
        for block in blocks:
            if block.id < position:
                continue
            if block.id.ledger > position.ledger:
                found.proofs.ledger_ends[position.ledger] = LedgerEnd(position.entry - 1, block.id)
            if block.id in stretch:
                found.existing[block.id] = block.slot
            position = EntryId(block.id.ledger, block.id.entry + 1)
            if position > last:
                break
        if len(found.existing) >= existing_max or (not blocks and reader.at_end()):
            break
    return position
