"""Entry sets do exactly what Python's own sets do."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from keyshard.core.entry import EntryId
from keyshard.core.entry_set import EntrySet, index_runs, parse_indices

BOUNDED = settings(max_examples=100, deadline=None)

ids = st.builds(EntryId, st.integers(0, 1), st.integers(0, 9))
plain_sets = st.frozensets(ids, max_size=20)


@BOUNDED
@given(plain_sets, plain_sets)
def test_the_algebra_is_that_of_plain_sets(
    left: frozenset[EntryId], right: frozenset[EntryId]
) -> None:
    a, b = EntrySet.of(left), EntrySet.of(right)
    assert set(a | b) == left | right
    assert set(a & b) == left & right
    assert set(a - b) == left - right
    assert (a <= b) == (left <= right)
    assert (a == b) == (left == right)
    assert bool(a) == bool(left)


@BOUNDED
@given(plain_sets, plain_sets)
def test_results_are_canonical(left: frozenset[EntryId], right: frozenset[EntryId]) -> None:
    a, b = EntrySet.of(left), EntrySet.of(right)
    for result, expected in ((a | b, left | right), (a & b, left & right), (a - b, left - right)):
        assert result == EntrySet.of(expected)
        assert hash(result) == hash(EntrySet.of(expected))
        assert EntrySet.parse(str(result)) == result


@BOUNDED
@given(plain_sets)
def test_members_size_and_ends(plain: frozenset[EntryId]) -> None:
    found = EntrySet.of(plain)
    assert list(found) == sorted(plain)
    assert len(found) == len(plain)
    assert {entry_id for entry_id in universe() if entry_id in found} == plain
    assert found.first == min(plain, default=None)
    assert found.last == max(plain, default=None)


@BOUNDED
@given(st.lists(ids, max_size=60))
def test_repeats_and_order_do_not_matter(listed: list[EntryId]) -> None:
    assert str(EntrySet.of(listed)) == str(EntrySet.of(set(listed)))


@BOUNDED
@given(plain_sets)
def test_runs_are_as_long_as_possible(plain: frozenset[EntryId]) -> None:
    found = EntrySet.of(plain)
    starts = [entry_id for entry_id in plain if (entry_id.ledger, entry_id.entry - 1) not in plain]
    assert found.run_count == len(starts) == len(list(found.runs()))
    assert [EntryId(ledger, first) for ledger, first, _ in found.runs()] == sorted(starts)


@BOUNDED
@given(st.frozensets(st.integers(0, 200), min_size=1))
def test_index_sets_round_trip(indices: frozenset[int]) -> None:
    assert parse_indices(index_runs(indices)) == indices


def universe() -> list[EntryId]:
    return [EntryId(ledger, entry) for ledger in range(5) for entry in range(27)]
