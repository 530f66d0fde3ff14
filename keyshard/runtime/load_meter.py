"""Counts what comes, by slot and key: all of it at first, then a sample."""

from __future__ import annotations

import random

from keyshard.core.entry import EntryBlock
from keyshard.core.key_slot import routing_key
from keyshard.core.slot_load import SlotLoad

ALL_MESSAGES = 20_000
"""Messages up to which every entry is counted."""
ONE_OF = 16
"""From then on one entry of so many is, by chance, and counts for all: looking at an entry's key
takes a fifth of what making its messages does."""


class LoadMeter:
    """Measures the load of a source. Not thread-safe: its owner calls it under its lock."""

    def __init__(self) -> None:
        self._random = random.Random()
        self._load = SlotLoad()

    def add(self, block: EntryBlock) -> None:
        """A new entry came. Keyless messages count nowhere: no key decides who gets them."""
        times = 1
        if self._load.messages >= ALL_MESSAGES:
            if self._random.randrange(ONE_OF):
                return
            times = ONE_OF
        if block.mixed_slots is not None:
            for slot in block.mixed_slots:
                if slot is not None:
                    self._load.add(slot, times)
        elif block.slot is not None:
            part = block.parts[0]
            key, ordering_key = (
                part.content.column(name)[part.start].as_py() for name in ("__key", "__orderingKey")
            )
            self._load.add(block.slot, times * block.rows, routing_key(key, ordering_key))

    def load(self) -> SlotLoad:
        """The load so far; it does not change with what comes later."""
        return self._load.copy()
