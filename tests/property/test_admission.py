"""Shares and cuts, for any demand, any limit and any arrival."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from keyshard.core.position.entry import EntryBlock
from keyshard.core.window.admission import share_out, take_aligned
from tests.helpers import block

BOUNDED = settings(max_examples=60, deadline=None)

demands = st.dictionaries(st.integers(0, 9), st.integers(1, 1_000), max_size=8)


@BOUNDED
@given(st.integers(1, 3_000), demands)
def test_shares_use_the_limit_and_omit_no_demand(limit: int, demand: dict[int, int]) -> None:
    shares = share_out(limit, demand)
    assert list(shares) == list(demand)
    assert all(0 <= shares[key] <= wanted for key, wanted in demand.items())
    assert sum(shares.values()) == min(limit, sum(demand.values()))
    if limit >= len(demand):
        assert all(share >= 1 for share in shares.values())
    else:
        assert list(shares.values()) == [1] * limit + [0] * (len(demand) - limit)


@BOUNDED
@given(st.integers(1, 3_000), demands)
def test_shares_are_proportional_but_for_rounding(limit: int, demand: dict[int, int]) -> None:
    total = sum(demand.values())
    shares = share_out(limit, demand)
    for key, wanted in demand.items():
        ideal = wanted * min(1.0, limit / total)
        assert abs(shares[key] - ideal) <= 2 * len(demand)


sizes = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), max_size=25)


@BOUNDED
@given(sizes, st.integers(1, 30), st.integers(1, 400), st.sets(st.integers(0, 4)))
def test_a_cut_is_a_prefix_and_the_first_entry_of_each_range_left_out(
    entries: list[tuple[int, int]], rows_max: int, bytes_max: int, left_out: set[int]
) -> None:
    received = [
        replace(block(1, at, *["k"] * rows), received_by=index)
        for at, (rows, index) in enumerate(entries)
    ]

    def size(entry: EntryBlock) -> tuple[int, int, int]:
        return entry.rows, entry.payload_bytes, 0

    taken, rest = take_aligned(received, (rows_max, bytes_max, 0), size, left_out)
    order = [(at.id, at.received_by) for at in received]
    assert sorted((at.id, at.received_by) for at in taken + rest) == order
    assert [(at.id, at.received_by) for at in rest] == sorted(
        (at.id, at.received_by) for at in rest
    )
    assert [(at.id, at.received_by) for at in taken] == sorted(
        (at.id, at.received_by) for at in taken
    )

    with_data = {at.received_by for at in received}
    assert with_data & left_out <= {at.received_by for at in taken}
    for index in with_data:  # order of a range: always a prefix of what it received
        own = [at.id for at in received if at.received_by == index]
        got = [at.id for at in taken if at.received_by == index]
        assert got == own[: len(got)]
    assert any(
        explains(received[:position], taken, rows_max, bytes_max, left_out)
        for position in range(len(received) + 1)
    )
    assert bool(taken) == bool(received)


def explains(
    prefix: list[EntryBlock],
    taken: list[EntryBlock],
    rows_max: int,
    bytes_max: int,
    left_out: set[int],
) -> bool:
    """Whether ``taken`` is this prefix, within the limits, and one entry of each of some ranges."""
    extra = [at.received_by for at in taken[len(prefix) :]]
    within = (
        sum(at.rows for at in prefix) <= rows_max
        and sum(at.payload_bytes for at in prefix) <= bytes_max
    )
    return (
        taken[: len(prefix)] == prefix
        and (within or len(prefix) == 1)
        and len(extra) == len(set(extra))
        and set(extra) <= left_out - {at.received_by for at in prefix}
    )
