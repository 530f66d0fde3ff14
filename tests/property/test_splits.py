"""Splits are disjoint and cover exactly the bounds, for any ledgers and number."""

from __future__ import annotations

import pickle

from hypothesis import given, settings
from hypothesis import strategies as st

from keyshard.core.message import MessageId
from keyshard.core.position.entry import EntryId
from keyshard.core.position.ledger import Ledger
from keyshard.core.position.split import Split, cut, grouped, stretch
from tests.helpers import P0, P1, P2

BOUNDED = settings(max_examples=300, deadline=None)
COUNTS = st.integers(0, 12) | st.integers(0, 10**7)
SIZES = st.integers(0, 10**10)
LEDGERS = st.lists(st.tuples(st.integers(0, 60), COUNTS, SIZES), max_size=8).map(
    lambda found: tuple(Ledger(*one) for one in sorted({one[0]: one for one in found}.values()))
)
POSITIONS = st.builds(
    MessageId, st.integers(0, 62), st.integers(0, 14), st.integers(0, 3)
) | st.builds(MessageId, st.integers(0, 62), st.integers(0, 10**7), st.integers(0, 3))
BATCH = 3
"""Messages of each entry, where they are counted."""


def runs(splits: list[Split]) -> list[tuple[int, int, int]]:
    """Spans of splits; adjacent ones are joined."""
    joined: list[tuple[int, int, int]] = []
    for span in (span for split in splits for span in split.spans):
        if joined and joined[-1][0] == span.ledger and joined[-1][2] == span.first:
            joined[-1] = (span.ledger, joined[-1][1], span.end)
        else:
            joined.append((span.ledger, span.first, span.end))
    return joined


def messages(split: Split) -> list[tuple[int, int, int]]:
    """Every message of a split, where each entry is a batch of three."""
    found = []
    for span in split.spans:
        for entry in range(span.first, span.end):
            here = EntryId(span.ledger, entry)
            first = split.first_index if here == split.first else 0
            end = BATCH if split.end_index is None or here != split.last else split.end_index
            found += [(span.ledger, entry, index) for index in range(first, min(end, BATCH))]
    return found


@BOUNDED
@given(LEDGERS, st.none() | POSITIONS, st.none() | POSITIONS, st.integers(1, 40))
def test_the_splits_of_a_stretch_cover_exactly_that_stretch(
    ledgers: tuple[Ledger, ...], start: MessageId | None, end: MessageId | None, number: int
) -> None:
    whole = stretch(P0, ledgers, start, end)
    splits = cut([whole], number)
    assert len(splits) == min(number, whole.entries)
    assert all(split.entries for split in splits)
    assert runs(splits) == runs([whole])
    assert sum(split.size_bytes for split in splits) == whole.size_bytes
    if splits:
        assert splits[0].first_index == whole.first_index
        assert splits[-1].end_index == whole.end_index
        assert {split.first_index for split in splits[1:]} <= {0}
        assert {split.end_index for split in splits[:-1]} <= {None}
    assert pickle.loads(pickle.dumps(splits)) == splits


@BOUNDED
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 5)), max_size=5),
    st.none() | st.builds(MessageId, st.integers(0, 7), st.integers(0, 6), st.integers(0, 4)),
    st.none() | st.builds(MessageId, st.integers(0, 7), st.integers(0, 6), st.integers(0, 4)),
    st.integers(1, 9),
)
def test_each_message_from_the_start_up_to_the_end_is_in_one_split(
    sizes: list[tuple[int, int]], start: MessageId | None, end: MessageId | None, number: int
) -> None:
    ledgers = tuple(Ledger(one, entries, 10 * one) for one, entries in sorted(dict(sizes).items()))
    stored = messages(stretch(P0, ledgers))
    expected = [
        one for one in stored if (start is None or one >= start) and (end is None or one < end)
    ]
    splits = cut([stretch(P0, ledgers, start, end)], number)
    assert [one for split in splits for one in messages(split)] == expected


@BOUNDED
@given(st.lists(LEDGERS, min_size=3, max_size=3), st.integers(1, 200), st.integers(1, 20))
def test_any_number_of_splits_is_made_of_any_number_of_partitions(
    lists: list[tuple[Ledger, ...]], number: int, tasks: int
) -> None:
    stretches = [stretch(tp, each) for tp, each in zip((P0, P1, P2), lists, strict=True)]
    filled = [one for one in stretches if one.spans]
    splits = cut(stretches, number)
    entries = sum(one.entries for one in stretches)
    assert len(splits) == min(max(number, len(filled)), entries)
    for one in filled:
        own = [split for split in splits if split.topic_partition == one.topic_partition]
        assert runs(own) == runs([one])
    groups = grouped(splits, tasks)
    assert [split for group in groups for split in group] == splits
    assert len(groups) <= tasks
    assert all(groups)


@BOUNDED
@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 50)), min_size=1, max_size=6),
    st.integers(1, 30),
)
def test_splits_are_about_equal_in_bytes(shapes: list[tuple[int, int]], number: int) -> None:
    """No split has more than its share and the entries that it begins and ends with."""
    ledgers = tuple(
        Ledger(number, entries, entries * each) for number, (entries, each) in enumerate(shapes)
    )
    whole = stretch(P0, ledgers)
    entry = max(each for _, each in shapes)
    for split in cut([whole], number):
        assert split.weight <= whole.weight / number + 2 * entry + len(ledgers)


@BOUNDED
@given(
    st.integers(0, 10), st.none() | st.integers(0, 10), st.none() | st.integers(0, 10)
)  # fmt: skip
def test_time_bounds_are_half_open_and_a_missing_time_matches_only_no_bounds(
    publish_ms: int, start_ms: int | None, end_ms: int | None
) -> None:
    split = stretch(P0, (Ledger(1, 1, 1),), start_ms=start_ms, end_ms=end_ms)
    unbounded = start_ms is None and end_ms is None
    inside = (start_ms or 0) <= publish_ms < (11 if end_ms is None else end_ms)
    assert split.matches(publish_ms) == (unbounded or (inside and publish_ms > 0))
