"""Entry sets: text form, refusals, and small cases; the algebra is in tests/property."""

from __future__ import annotations

import pytest

from keyshard.core.position.entry import EntryId
from keyshard.core.position.entry_set import (
    EntrySet,
    format_runs,
    index_runs,
    parse_indices,
    parse_runs,
)
from keyshard.errors import CheckpointError


def entries(*pairs: tuple[int, int]) -> EntrySet:
    return EntrySet.of(EntryId(*pair) for pair in pairs)


def test_the_text_is_ascending_with_runs_as_long_as_possible() -> None:
    found = entries((13, 0), (12, 3), (12, 1), (12, 2), (12, 7), (12, 2), (13, 1))
    assert str(found) == "12:1-3,7;13:0-1"
    assert repr(found) == "EntrySet('12:1-3,7;13:0-1')"
    assert list(found.runs()) == [(12, 1, 3), (12, 7, 7), (13, 0, 1)]
    assert found.run_count == 3


def test_ledgers_sort_by_number_not_by_text() -> None:
    assert str(entries((10, 0), (9, 0))) == "9:0;10:0"


@pytest.mark.parametrize("text", ["", "0:0", "7:0-79", "12:0-99,101;13:0-5", "1:0,2,4;10:3-4"])
def test_canonical_text_round_trips(text: str) -> None:
    assert str(EntrySet.parse(text)) == text
    assert EntrySet.of(EntrySet.parse(text)) == EntrySet.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "7", ":", "7:", ":1", "7:a", "a:1", "7:1-", "7:-1", "7:2-1", "7:1,1", "7:1,2", "7:1-2,3",
        "7:1-1", "7:3,1", "8:1;7:1", "7:1;7:3", "7:1;", ";7:1", "7:1,", "7: 1", " 7:1", "7:1 ",
        "07:1", "7:01", "7:1-02", "+7:1", "7:+1", "7:1-+2", "7:1_0", "7:1-2-3", "7:1:2", "-1:0-3",
        "7:\u0663", "7:1-\u0663", "x" * 500,
    ],
)  # fmt: skip
def test_text_that_is_not_canonical_is_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(
        CheckpointError, match=r"is no entry set; expected runs .*backup\."
    ) as caught:
        EntrySet.parse(text)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("text", ["0", "0-3", "1,3,5-9"])
def test_index_sets_round_trip(text: str) -> None:
    assert index_runs(parse_indices(text)) == text
    assert format_runs(parse_runs(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", ",", "a", "-1", "1-", "3-1", "1-1", "1,1", "1,2", "2,1", "00", "01", "0-03", "0-+3",
     "0- 3", "0-3_0", " 1", "1 ", "\u0663", "0-\u0663"],
)  # fmt: skip
def test_an_index_set_that_is_not_canonical_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the caller makes the sentence
        parse_indices(text)


def test_indices_are_written_as_runs_whatever_their_order() -> None:
    assert index_runs([5, 1, 0, 2, 7]) == "0-2,5,7"
    assert parse_indices("0-2,5,7") == frozenset({0, 1, 2, 5, 7})


def test_equal_sets_are_equal_however_they_were_made() -> None:
    left = entries((1, 0), (1, 1), (2, 5))
    right = EntrySet.parse("2:5") | EntrySet.parse("1:0-1")
    assert left == right
    assert hash(left) == hash(right)
    assert left != EntrySet.parse("1:0-1")
    assert left != "1:0-1;2:5"
    assert EntrySet.parse("1:0") - EntrySet.parse("1:0") == EntrySet()


def test_first_and_last_are_the_ends_and_none_when_empty() -> None:
    found = EntrySet.parse("9:4-6;10:0,3")
    assert (found.first, found.last) == (EntryId(9, 4), EntryId(10, 3))
    assert (EntrySet().first, EntrySet().last) == (None, None)
    assert not EntrySet()
    assert found


def test_membership_at_the_ends_of_runs() -> None:
    found = EntrySet.parse("9:4-6,9")
    assert [entry for entry in range(12) if EntryId(9, entry) in found] == [4, 5, 6, 9]
    assert EntryId(8, 5) not in found


def test_subset() -> None:
    small, large = EntrySet.parse("1:2-3"), EntrySet.parse("1:0-9")
    assert small <= large
    assert small <= small  # noqa: PLR0124
    assert EntrySet() <= small
    assert not large <= small
    assert not EntrySet.parse("2:2") <= large


def test_neighbours_become_one_run() -> None:
    assert str(EntrySet.parse("1:0") | EntrySet.parse("1:1")) == "1:0-1"
    assert str(EntrySet.parse("1:0-2,6") | EntrySet.parse("1:3-5")) == "1:0-6"
    assert str(EntrySet.parse("1:5") | EntrySet.parse("2:6")) == "1:5;2:6"


def test_millions_of_entries_cost_as_much_as_their_runs() -> None:
    huge = EntrySet.parse("1:0-999999999999")
    assert len(huge) == 10**12
    assert str(huge - EntrySet.parse("1:5")) == "1:0-4,6-999999999999"
    assert EntryId(1, 10**11) in huge
