"""Counts what comes, by slot and key."""

from __future__ import annotations

from keyshard.core.entry import EntryBlock
from keyshard.core.key_slot import routing_key
from keyshard.core.slot_load import SlotLoad


def measure(load: SlotLoad, block: EntryBlock) -> None:
    """Count the messages of a received entry; keyless ones lie on no slot that a key decides."""
    if block.mixed_slots is not None:
        for slot in block.mixed_slots:
            if slot is not None:
                load.add(slot)
    elif block.slot is not None:
        part = block.parts[0]
        key, ordering_key = (
            part.content.column(name)[part.start].as_py() for name in ("__key", "__orderingKey")
        )
        load.add(block.slot, block.rows, routing_key(key, ordering_key))
