"""Counts what comes, by slot and key."""

from __future__ import annotations

from keyshard.core.entry import EntryBlock
from keyshard.core.key_slot import key_slot
from keyshard.core.slot_load import SlotLoad


def measure(load: SlotLoad, block: EntryBlock) -> None:
    """Count the messages of a received entry; keyless ones lie on no slot that a key decides."""
    if block.mixed_slots is not None:
        for slot in block.mixed_slots:
            if slot is not None:
                load.add(slot)
    elif block.slot is not None:
        part = block.parts[0]
        key = part.content.column("__key")[part.start].as_py()
        # An ordering key routes a message whatever its partition key is.
        known = key is not None and key_slot(key) == block.slot
        load.add(block.slot, block.rows, key if known else None)
