"""Counts what comes, by slot and key: all of it at first, then a sample."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import accumulate

from keyshard.arrow.content import gather
from keyshard.core.position.entry import EntryBlock
from keyshard.core.ring.key_slot import routing_key
from keyshard.core.ring.slot_load import SlotLoad

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

    def add(self, blocks: Sequence[EntryBlock]) -> None:
        """New entries came. Keyless messages count nowhere: no key decides who gets them."""
        times = 1
        if self._load.messages >= ALL_MESSAGES:
            times = ONE_OF
            blocks = [block for block in blocks if not self._random.randrange(ONE_OF)]
        for block, key in zip(blocks, _first_keys(blocks), strict=True):
            if block.mixed_slots is not None:
                for slot in block.mixed_slots:
                    if slot is not None:
                        self._load.add(slot, times)
            elif block.slot is not None:
                self._load.add(block.slot, times * block.rows, key)

    def load(self) -> SlotLoad:
        """The load so far; it does not change with what comes later."""
        return self._load.copy()


def _first_keys(blocks: Sequence[EntryBlock]) -> Iterator[str | None]:
    """The routing key of the first message of each entry."""
    if not blocks:
        return iter(())
    columns = gather(blocks, ("__key", "__orderingKey"))
    keys, ordering_keys = (column.to_pylist() for column in columns.values())
    first = accumulate((block.rows for block in blocks[:-1]), initial=0)
    return (routing_key(keys[row], ordering_keys[row]) for row in first)
