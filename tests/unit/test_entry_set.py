"""Entry sets: text form, refusals, and small cases; the algebra is in tests/property."""

from __future__ import annotations

import pytest

from keyshard.core.position.entry import EntryId
from keyshard.core.position.entry_set import (
    EntrySet,
    index_runs,
    parse_indices,
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
    with pytest.raises(CheckpointError, match=r"is not an entry set, such as .*backup\.") as caught:
        EntrySet.parse(text)
    assert len(str(caught.value)) < 300


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


def test_millions_of_entries_cost_as_much_as_their_runs() -> None:
    huge = EntrySet.parse("1:0-999999999999")
    assert len(huge) == 10**12
    assert str(huge - EntrySet.parse("1:5")) == "1:0-4,6-999999999999"
    assert EntryId(1, 10**11) in huge
