"""Decisions about publishing: sequence ids, partitions of keys, entries, resuming."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyshard.core.publishing import (
    NOTHING,
    BatchChangedError,
    ForgottenError,
    LaterBatchError,
    OtherWriterError,
    Resume,
    batch_layout,
    batch_of,
    entry_ends,
    first_row,
    key_partition,
    layout_of,
    resume,
    row_of,
    sequence_id,
)


@given(st.integers(0, 2**31 - 1), st.integers(0, 2**24 - 1), st.integers(0, 255))
def test_a_sequence_id_is_that_of_a_batch_its_layout_and_a_row(
    batch: int, row: int, layout: int
) -> None:
    made = sequence_id(batch, row, layout)
    assert (batch_of(made), layout_of(made), row_of(made)) == (batch, layout, row)
    assert made == sequence_id(batch, 0, layout) + row < 2**63
    assert sequence_id(batch + 1, 0) > made


def test_a_batch_continues_after_an_earlier_attempt_only_with_an_equal_layout() -> None:
    first = sequence_id(7, 0, 3)
    assert first_row(NOTHING, first, 10) == 0
    assert first_row(sequence_id(6, 9, 200), first, 10) == 0
    assert first_row(first + 4, first, 10) == 4
    assert first_row(first + 4, first, 10, stored=True) == 5
    for other in (sequence_id(7, 4, 2), sequence_id(7, 4, 4), first + 10):
        with pytest.raises(BatchChangedError):
            first_row(other, first, 10)
    with pytest.raises(LaterBatchError):
        first_row(sequence_id(8, 0), first, 10)


def test_a_layout_depends_on_every_topic_and_not_on_their_order() -> None:
    topics = {"a": 1, "b": 2, "c": 3}
    layout = batch_layout(topics.items())
    assert layout == batch_layout(reversed(topics.items()))
    others = [{"a": 1, "b": 2}, topics | {"c": 4}, {"a": 2, "b": 1, "c": 3}]
    assert layout not in {batch_layout(other.items()) for other in others}


@pytest.mark.parametrize(
    ("key", "code"), [("", 0), ("a", 97), ("hello", 99_162_322), ("polygenelubricants", 0)]
)
def test_the_hash_of_a_key_is_that_of_java(key: str, code: int) -> None:
    # "polygenelubricants".hashCode() is the smallest number; its sign is dropped.
    assert key_partition(key, 2**31) == code
    assert key_partition(key, 7) == code % 7
    assert key_partition(key, 7, "murmur3") in range(7)


def test_a_key_beyond_the_basic_plane_hashes_as_two_units() -> None:
    high, low = 0xD83D, 0xDD11
    assert key_partition("\U0001f511", 2**31) == (31 * high + low) & 0x7FFFFFFF


SIZES = st.lists(st.tuples(st.integers(1, 100), st.booleans(), st.booleans()), min_size=1)


@given(SIZES, st.integers(1, 10), st.integers(1, 300))
def test_entries_lie_in_groups_and_keep_to_the_limits(
    drawn: list[tuple[int, bool, bool]], messages_max: int, bytes_max: int
) -> None:
    sizes = [size for size, _, _ in drawn]
    groups = [row + 1 for row, (_, ends, _) in enumerate(drawn) if ends or row + 1 == len(drawn)]
    alone = {row for row, (_, _, single) in enumerate(drawn) if single}
    ends = entry_ends(groups, list(accumulate(sizes)), messages_max, bytes_max, alone)
    assert ends[-1] == len(drawn)
    for start, stop in pairwise([0, *ends]):
        assert start < stop
        assert bisect_right(groups, start) == bisect_right(groups, stop - 1), "one group"
        assert stop - start == 1 or not alone & set(range(start, stop))
        assert stop - start <= messages_max
        assert stop - start == 1 or sum(sizes[start:stop]) <= bytes_max


@given(SIZES, st.integers(1, 10), st.integers(1, 300))
def test_no_entry_could_take_the_next_message(
    drawn: list[tuple[int, bool, bool]], messages_max: int, bytes_max: int
) -> None:
    sizes = [size for size, _, _ in drawn]
    ends = entry_ends([len(drawn)], list(accumulate(sizes)), messages_max, bytes_max)
    for start, stop in pairwise([0, *ends]):
        if stop < len(drawn):
            assert stop - start == messages_max or sum(sizes[start : stop + 1]) > bytes_max


@pytest.mark.parametrize(
    ("last", "confirmed", "entries", "expected"),
    [
        # The broker knows nothing, or what was confirmed: everything is new.
        (NOTHING, NOTHING, [(0, 4)], Resume(0, None, split=False)),
        (4, 4, [(5, 9)], Resume(0, None, split=False)),
        (9, 4, [], Resume(0, None, split=False)),
        # It knows older ids than those that wait: a batch before.
        (9, NOTHING, [(20, 29)], Resume(0, None, split=False)),
        # It knows whole entries, and a part of one.
        (9, 4, [(5, 9), (10, 19)], Resume(1, 9, split=False)),
        (19, 4, [(5, 9), (10, 19)], Resume(2, 19, split=False)),
        (12, 4, [(5, 9), (10, 19)], Resume(1, 12, split=True)),
        (0, NOTHING, [(0, 3)], Resume(0, 0, split=True)),
    ],
)
def test_after_a_lost_connection_only_entries_that_the_broker_lacks_are_sent(
    last: int, confirmed: int, entries: list[tuple[int, int]], expected: Resume
) -> None:
    assert resume(last, confirmed, entries) == expected


def test_ids_that_no_entry_has_are_those_of_another_writer() -> None:
    with pytest.raises(OtherWriterError):
        resume(30, 4, [(5, 9), (10, 19)])
    with pytest.raises(OtherWriterError):
        resume(22, 4, [(5, 9), (25, 29)])


def test_ids_that_were_confirmed_and_are_not_known_are_forgotten() -> None:
    with pytest.raises(ForgottenError):
        resume(NOTHING, 4, [(5, 9)])
