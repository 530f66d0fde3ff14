"""The load by slot and key: exact for slots, sure of frequent keys, bounded."""

from __future__ import annotations

import pytest

from keyshard.core.ring import slot_load
from keyshard.core.ring.key_slot import key_slot
from keyshard.core.ring.slot_load import SlotLoad


def test_messages_are_counted_by_slot_and_key() -> None:
    load = SlotLoad()
    load.add(7, 3, "a")
    load.add(7, 2)
    load.add(8, key="b")
    assert (load.slots[7], load.slots[8], load.messages) == (5, 1, 6)
    assert load.hottest_keys() == [("a", 3), ("b", 1)]


def test_hot_keys_have_a_share_of_the_messages() -> None:
    load = SlotLoad()
    assert load.hot_keys(5, 0.01) == []
    load.add(7, 60, "a")
    load.add(8, 39, "b")
    load.add(9, 1, "c")
    assert load.hot_keys(5, 0.02) == [("a", 0.6), ("b", 0.39)]
    assert load.hot_keys(1, 0.0) == [("a", 0.6)]


def test_frequent_keys_survive_any_number_of_rare_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_load, "KEYS_MAX", 50)
    load = SlotLoad()
    for number in range(20_000):
        load.add(1, key=f"rare-{number}")
        if number % 10 == 0:
            load.add(2, key="frequent")
        assert len(load._keys) <= 101
    (key, count), *_ = load.hottest_keys()
    assert key == "frequent"
    assert 2_000 - 22_000 / 50 <= count <= 2_000, "never more than it has, and little less"


def test_the_load_is_that_of_the_recent_past(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_load, "MESSAGES_MAX", 1_000)
    load = SlotLoad()
    load.add(1, 900, "old")
    for _ in range(10):
        load.add(2, 500, "new")
        assert load.messages == sum(load.slots) <= 1_000
    assert load.slots[2] > 30 * load.slots[1]
    assert load.hottest_keys()[0][0] == "new"


def test_keys_of_a_slot_are_found() -> None:
    load = SlotLoad()
    for key in ("a", "b"):
        load.add(key_slot(key), 4, key)
    assert load.keys_in(key_slot("b")) == ["b"]
    assert load.keys_in(key_slot("b") + 1) == []


def test_a_copy_stays_as_it_is() -> None:
    load = SlotLoad()
    load.add(1, 1, "a")
    copied = load.copy()
    load.add(1, 1, "a")
    assert (copied.slots[1], copied.messages, copied.hottest_keys()) == (1, 1, [("a", 1)])
