"""Entry sets do exactly what Python's own sets do."""

from __future__ import annotations

import random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from keyshard.core.position.checkpoint import PartitionCheckpoint
from keyshard.core.position.entry import EntryId
from keyshard.core.position.entry_runs import index_runs, parse_indices
from keyshard.core.position.entry_set import EntrySet
from keyshard.errors import CheckpointError

BOUNDED = settings(max_examples=100, deadline=None)

ids = st.builds(EntryId, st.integers(0, 1), st.integers(0, 9))
plain_sets = st.frozensets(ids, max_size=20)
wide_ids = st.builds(EntryId, st.sampled_from([7, 12]), st.integers(85, 130))


def many(seed: int, first: int, span: int, share: float) -> frozenset[EntryId]:
    chance = random.Random(seed)
    return frozenset(
        EntryId(7, entry) for entry in range(first, first + span) if chance.random() < share
    )


compact_sets = st.builds(
    many,
    st.integers(0, 99),
    st.sampled_from([0, 60, 65_500, 2**32 - 400]),
    st.sampled_from([150, 400]),
    st.sampled_from([0.1, 0.5, 0.9]),
)
"""Enough runs for a bitmap, or nearly."""
wide_sets = st.frozensets(wide_ids, max_size=60) | plain_sets | compact_sets
"""The set may have many runs, and numbers of different lengths."""


@BOUNDED
@given(wide_sets, wide_sets)
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
@given(st.lists(wide_sets, max_size=6), st.lists(st.booleans(), min_size=7), wide_ids)
def test_the_length_of_a_text_is_known_without_it(
    parts: list[frozenset[EntryId]], asked: list[bool], position: EntryId
) -> None:
    found = EntrySet()
    for part, ask in zip(parts, asked, strict=False):
        found |= EntrySet.of(part)
        if ask:
            assert found.text_bytes == len(str(EntrySet.of(set(found))))
    above = found.above(position)
    for one in (found, above, found - above, found & above):
        assert one.text_bytes == len(str(one))


@BOUNDED
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 9), st.integers(0, 3)), max_size=9))
def test_runs_may_touch_and_overlap(found: list[tuple[int, int, int]]) -> None:
    runs = [(ledger, first, first + more) for ledger, first, more in found]
    plain = {EntryId(ledger, n) for ledger, a, b in runs for n in range(a, b + 1)}
    assert EntrySet.of_runs(runs) == EntrySet.of(plain)


@BOUNDED
@given(wide_sets, wide_sets)
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
@given(plain_sets, ids)
def test_entries_above_a_position(plain: frozenset[EntryId], position: EntryId) -> None:
    expected = {entry_id for entry_id in plain if entry_id > position}
    above = EntrySet.of(plain).above(position)
    assert above == EntrySet.of(expected)
    assert str(above) == str(EntrySet.of(expected))


@BOUNDED
@given(plain_sets, ids)
def test_pruning_below_a_floor_resolves_the_same_entries_and_those_below_it(
    plain: frozenset[EntryId], floor: EntryId
) -> None:
    pruned = PartitionCheckpoint(floor, EntrySet.of(plain).above(floor))
    for entry_id in universe():
        assert pruned.covers(entry_id) == (entry_id in plain or entry_id <= floor)


@BOUNDED
@given(plain_sets, ids)
def test_the_end_of_a_run_is_where_its_neighbours_end(
    plain: frozenset[EntryId], entry_id: EntryId
) -> None:
    end = None
    ledger, entry = entry_id
    while EntryId(ledger, entry) in plain:
        end = EntryId(ledger, entry)
        entry += 1
    assert EntrySet.of(plain).run_end(entry_id) == end


@BOUNDED
@given(plain_sets, ids)
@example(frozenset({EntryId(1, 4), EntryId(1, 5)}), EntryId(1, 3))
@example(frozenset({EntryId(1, 4), EntryId(1, 6)}), EntryId(1, 3))
@example(frozenset({EntryId(1, 4), EntryId(2, 0)}), EntryId(1, 3))
@example(frozenset({EntryId(1, 3), EntryId(1, 4)}), EntryId(1, 3))
def test_a_floor_rises_over_the_run_after_it(plain: frozenset[EntryId], floor: EntryId) -> None:
    entries = EntrySet.of(plain)
    end, rest = entries.following(floor)
    assert end == (entries.run_end(EntryId(floor.ledger, floor.entry + 1)) or floor)
    assert set(rest) == {one for one in plain if one > end}
    assert type(end) is EntryId


@BOUNDED
@given(st.text(alphabet="0123456789:;,- +_\u0663", max_size=14) | st.text(max_size=6))
@example("1:0-3,4")
@example("1:5;1:6")
@example("2:0;1:0")
@example("1:3-1")
@example("-1:0")
@example("1:+1")
@example("1:0_1")
@example("1:\u0663")
@example("1:00")
@example("1:")
@example(";")
@example(f"1:{'9' * 5_000}")
def test_any_text_is_the_one_text_of_a_set_or_is_refused(text: str) -> None:
    try:
        found = EntrySet.parse(text)
    except CheckpointError as exc:
        assert exc.message.endswith(".")  # noqa: PT017 - other texts are those of sets
    else:
        assert str(found) == text


@BOUNDED
@given(plain_sets, st.data())
def test_no_other_text_than_its_own_stands_for_a_set(
    plain: frozenset[EntryId], data: st.DataObject
) -> None:
    text = str(EntrySet.of(plain))
    at = data.draw(st.integers(0, len(text)))
    changed = data.draw(st.sampled_from(["0", "1", "-", ",", ":", ";", " ", ""]))
    other = text[:at] + changed + text[at + data.draw(st.integers(0, 1)) :]
    try:
        found = EntrySet.parse(other)
    except CheckpointError:
        return
    assert (found == EntrySet.of(plain)) == (other == text)


@BOUNDED
@given(st.frozensets(st.integers(0, 200), min_size=1))
def test_index_sets_round_trip(indices: frozenset[int]) -> None:
    assert parse_indices(index_runs(indices)) == indices


@BOUNDED
@given(st.text(alphabet="0123456789,- +", max_size=12))
@example("0-99999999999")
@example("99999999999")
def test_any_text_is_the_one_text_of_an_index_set_or_is_refused(text: str) -> None:
    try:
        indices = parse_indices(text)
    except ValueError:
        return
    assert index_runs(indices) == text


def universe() -> list[EntryId]:
    return [EntryId(ledger, entry) for ledger in range(5) for entry in range(27)]
