"""The arithmetic of the handler benchmarks: loads, efficiency, pauses."""

from __future__ import annotations

import statistics
from collections import Counter

import pytest

from bench.loads import (
    efficiency,
    even_keys,
    handler_s,
    mixed_keys,
    skewed_keys,
    values,
)
from bench.rescale import Handled, Move, duplicates, history, moved, pause_s
from keyshard.core.ring.assignment import assign, moved_slots, reassign
from keyshard.core.ring.hash_range import HashRange, range_index, split_ring
from keyshard.core.ring.key_slot import key_slot
from keyshard.testing.verify.checkers import key_order, mutual_exclusion
from keyshard.testing.verify.workloads import parse_value


def run_of(
    start_s: float, end_s: float, *, slot: int = 5, seq: int = 0, thread: str = "a"
) -> Handled:
    return Handled(start_s, end_s, slot, thread, "k", seq, "t", 0, (1, seq, 0))


def test_the_skewed_load_is_that_of_the_report_and_always_the_same() -> None:
    keys = skewed_keys()
    assert len(keys) == 73_010
    assert Counter(Counter(keys).values()) == {1_000: 10, 100: 100, 9: 5_890}
    assert keys == skewed_keys()
    first_half = Counter(keys[: len(keys) // 2])
    assert all(400 < first_half[f"s0-{i}"] < 600 for i in range(10)), "evenly mixed"


def test_even_keys_load_every_range_alike_at_any_time() -> None:
    keys = even_keys(20, 3)
    assert len(set(keys)) == 60
    for ranges in (5, 10, 20):
        owners = [range_index(key_slot(key), ranges) for key in keys]
        assert set(Counter(owners).values()) == {60 // ranges}
        assert set(Counter(owners[:20]).values()) == {20 // ranges}


def test_mixed_keys_have_equally_many_messages_at_any_time() -> None:
    keys = mixed_keys(20, 1_000)
    assert keys == mixed_keys(20, 1_000)
    assert set(Counter(keys).values()) == {50}
    assert set(Counter(keys[:400]).values()) == {20}
    assert keys[:20] != keys[20:40]


def test_values_count_the_messages_of_each_key() -> None:
    assert [parse_value(value) for _, value in values("aba")] == [("a", 0), ("b", 0), ("a", 1)]


def test_handlers_take_uniform_times_that_depend_on_the_message_alone() -> None:
    keys = [f"k{i % 10}" for i in range(10_000)]
    times = [handler_s(value, 0, 5) for _, value in values(keys)]
    assert times == [handler_s(value, 0, 5) for _, value in values(keys)]
    assert 0 <= min(times) < 0.000_1
    assert 0.004_9 < max(times) < 0.005
    assert statistics.fmean(times) == pytest.approx(0.002_5, rel=0.03)
    assert handler_s(b"k0:1:xxxx", 0, 5) == handler_s(b"k0:1:", 0, 5), "padding is of no matter"
    assert handler_s(b"k0:1:", 10, 10) == pytest.approx(0.01)


def test_efficiency_is_one_when_all_lanes_always_work() -> None:
    # 100 handlers of 20 ms, 4 at once: 0.5 s at best.
    assert efficiency(100, 0.5, 4, 0.02) == pytest.approx(1.0)
    assert efficiency(100, 1.0, 4, 0.02) == pytest.approx(0.5)


@pytest.mark.parametrize(("old", "new"), [(4, 8), (8, 3), (3, 4)])
def test_moved_parts_are_the_slots_with_another_owner(old: int, new: int) -> None:
    before = assign(old)
    after = reassign(before, new)
    parts = moved(before, after)
    assert sum(map(len, parts)) == moved_slots(before, after)
    for part in parts:
        for assignment in (before, after):
            inside = [one for own in assignment for one in own if part.start in one]
            assert inside, "it has an owner"
            assert part.end in inside[0], "it has one owner"


def test_a_pause_is_the_longest_time_without_a_handler_around_the_move() -> None:
    low, high = split_ring(2)
    runs = [
        run_of(0, 1),
        run_of(1.5, 2),
        run_of(1.8, 3),  # The move begins at 3.5, while nothing runs.
        run_of(5, 6),
        run_of(5.1, 5.2),
        run_of(9, 10),  # Long after the move.
        run_of(3.1, 4.9, slot=high.start),
    ]
    assert pause_s(Move(low, 3.5, 4), runs) == 2
    assert pause_s(Move(low, 3.5, 5.5), runs) == 2
    assert pause_s(Move(low, 1.9, 1.95), runs) == 0, "a handler ran all the time"
    assert pause_s(Move(high, 3.5, 4), runs) is None, "nothing to compare with"
    assert pause_s(Move(HashRange(6, 7), 3.5, 4), runs) is None


def test_duplicates_and_disorder_are_counted() -> None:
    right = [run_of(0, 1), run_of(1, 2, seq=1)]
    assert duplicates(right) == 0
    assert key_order(history(right)).holds
    assert mutual_exclusion(history(right)).holds
    assert duplicates([*right, run_of(3, 4)]) == 1
    assert key_order(history([run_of(0, 1, seq=1), run_of(1, 2)])).violations == 1
    overlapping = [run_of(0, 1), run_of(0.5, 2, seq=1, thread="b")]
    assert mutual_exclusion(history(overlapping)).violations == 1
