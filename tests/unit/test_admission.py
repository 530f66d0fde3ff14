"""Admission: shares of a limit, and the cut by position."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from keyshard.core.position.entry import EntryBlock
from keyshard.core.window.admission import (
    Held,
    held_max,
    take_aligned,
    waits_for_more,
)
from tests.helpers import block, ids

Received = list[EntryBlock]


def came(to: int, entry: int, *keys: str, values: list[bytes] | None = None) -> EntryBlock:
    """An entry that a range received."""
    return replace(block(1, entry, *keys, values=values), received_by=to)


def take(
    received: Received,
    rows_max: int = 10**9,
    bytes_max: int = 10**9,
    left_out: set[int] | None = None,
) -> tuple[Received, Received]:
    def sizes(entry: EntryBlock) -> tuple[int, int, int]:
        return entry.rows, entry.payload_bytes, 0

    return take_aligned(received, (rows_max, bytes_max, 0), sizes, left_out or set())


def places(received: Received) -> list[tuple[int, int]]:
    return [(b.id.entry, b.received_by) for b in received]


def test_the_cut_is_one_position_for_all_ranges() -> None:
    received = [came(entry % 3, entry) for entry in range(9)]
    taken, rest = take(received, rows_max=4)
    assert places(taken) == [(0, 0), (1, 1), (2, 2), (3, 0)]
    assert places(rest) == [(4, 1), (5, 2), (6, 0), (7, 1), (8, 2)]


@pytest.mark.parametrize(("rows_max", "expected"), [(1, 1), (2, 1), (3, 2), (4, 2), (6, 3), (7, 3)])
def test_the_row_limit_holds_and_entries_stay_whole(rows_max: int, expected: int) -> None:
    received = [came(0, 0), came(0, 1, "a", "b"), came(0, 2, "a", "b", "c")]
    taken, rest = take(received, rows_max=rows_max)
    assert len(taken) == expected
    assert taken + rest == received


def test_the_byte_limit_holds() -> None:
    received = [came(0, entry, values=[b"x" * 10]) for entry in range(5)]
    assert len(take(received, bytes_max=29)[0]) == 2
    assert len(take(received, bytes_max=30)[0]) == 3


def test_a_single_entry_larger_than_the_limits_is_taken_alone() -> None:
    received = [came(0, 0, *("k" for _ in range(50))), came(0, 1)]
    for rows_max, bytes_max in ((10, 10**9), (10**9, 10), (0, 0)):
        taken, rest = take(received, rows_max, bytes_max)
        assert ids(taken) == [(1, 0)]
        assert ids(rest) == [(1, 1)]


def test_a_range_left_out_before_gets_its_first_entry_beyond_the_cut() -> None:
    received = [came(index, entry) for entry, index in enumerate([0, 0, 1, 2, 1, 2])]
    taken, rest = take(received, rows_max=2, left_out={2})
    assert places(taken) == [(0, 0), (1, 0), (3, 2)]
    assert places(rest) == [(2, 1), (4, 1), (5, 2)]


def test_a_range_left_out_before_gets_nothing_extra_when_the_cut_reaches_it() -> None:
    received = [came(index, entry) for entry, index in enumerate([0, 1, 1])]
    taken, rest = take(received, rows_max=2, left_out={1})
    assert places(taken) == [(0, 0), (1, 1)]
    assert places(rest) == [(2, 1)]


def test_a_range_left_out_before_that_has_nothing_now_changes_nothing() -> None:
    received = [came(0, 0), came(0, 1)]
    assert places(take(received, rows_max=1, left_out={7})[0]) == [(0, 0)]


def test_the_payload_limit_holds_beside_the_others() -> None:
    received = [came(0, entry, "k") for entry in range(5)]
    taken, rest = take_aligned(received, (100, 100, 25), lambda _: (1, 1, 10), set())
    assert (places(taken), places(rest)) == ([(0, 0), (1, 0)], [(2, 0), (3, 0), (4, 0)])


@pytest.mark.parametrize(
    ("rows", "waited_s", "waits"), [(9, 1.0, True), (10, 1.0, False), (9, 5.0, False)]
)
def test_a_cut_waits_for_rows_but_not_for_ever(rows: int, waited_s: float, waits: bool) -> None:
    assert waits_for_more(rows, 10, waited_s, 5.0) is waits


def held(window: int, partitions: int, ranges: int = 10, **limits: int) -> Held:
    given = {"per_consumer": 50_000, "per_subscription": 200_000, "queue": 1_000} | limits
    return held_max(window_rows_max=window, topic_partitions=partitions, ranges=ranges, **given)


def test_rows_held_of_a_partition_stay_below_the_limit_of_the_broker() -> None:
    assert held(200_000, 5)[:3] == (40_000, 49_000, 1_000)
    assert held(10**7, 5)[:3] == (180_000, 49_000, 1_000)
    assert held(10**7, 5, ranges=2)[:3] == (98_000, 49_000, 1_000)
    assert held(200_000, 1, per_consumer=0)[:3] == (180_000, None, 1_000)
    assert held(200_000, 1, per_consumer=0, per_subscription=0)[:3] == (200_000, None, 1_000)
    assert held(200_000, 1, per_consumer=10)[:3] == (50, 5, 5)


def test_rows_behind_a_target_leave_the_broker_room_for_missing_ones() -> None:
    assert held(200_000, 1, ranges=2).behind_rows == 12_500
    assert held(200_000, 1, ranges=1_000).behind_rows == 50
    assert held(200_000, 1, ranges=65_536, per_subscription=60_000).behind_rows == 1
    assert held(200_000, 1, per_consumer=0, per_subscription=0).behind_rows is None


@pytest.mark.parametrize("ranges", [1, 100, 199, 200, 201, 1_000, 10_000, 65_536])
def test_the_queues_of_many_ranges_become_smaller_before_the_window_does(ranges: int) -> None:
    found = held(200_000, 5, ranges)
    assert found.rows == 40_000
    assert found.queue == min(1_000, 160_000 // ranges)
    assert held(200_000, 1, ranges).rows >= 49_000
    assert held(10**7, 5, ranges).rows >= 49_000


def test_no_row_is_held_if_the_smallest_queues_fill_the_limit_of_the_broker() -> None:
    assert held(200_000, 5, 1_000, per_subscription=1_001)[:3] == (1, 49_000, 1)
    assert held(200_000, 5, 1_000, per_subscription=1_000).rows == 0
    assert held(200_000, 5, per_consumer=1).rows == 0
