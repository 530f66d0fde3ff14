"""Received messages are counted by slot and key; many of them by a sample."""

from __future__ import annotations

import pytest

from keyshard.consumers.intake import LoadMeter
from keyshard.core.ring.key_slot import key_slot
from tests.helpers import block


def test_every_entry_counts_at_first() -> None:
    meter = LoadMeter()
    meter.add([block(1, 0, "a", "a", "a"), block(1, 1, "b")])
    meter.add([block(1, 2, "b", ordering_key="a")])
    meter.add([])
    load = meter.load()
    assert load.messages == 5
    assert (load.slots[key_slot("a")], load.slots[key_slot("b")]) == (4, 1)
    assert load.hottest_keys() == [("a", 4), ("b", 1)]


def test_keyless_messages_count_nowhere_and_mixed_entries_by_message() -> None:
    meter = LoadMeter()
    meter.add([block(1, 0, None), block(1, 1, "a", None, "b")])
    load = meter.load()
    assert load.messages == 2
    assert load.slots[key_slot("a")] == load.slots[key_slot("b")] == 1
    assert load.hottest_keys() == [("a", 1), ("b", 1)]


def test_a_sample_counts_for_all() -> None:
    meter = LoadMeter()
    blocks = [block(1, 0, *["a"] * 3), block(1, 1, *["b"] * 1)]
    for _ in range(40_000):
        meter.add(blocks)
    load = meter.load()
    assert load.messages == pytest.approx(160_000, rel=0.1)
    assert load.slots[key_slot("a")] / load.messages == pytest.approx(0.75, abs=0.05)
