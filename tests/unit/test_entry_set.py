"""Entry sets: text form, refusals, and small cases; the algebra is in tests/property."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest

from keyshard.core.position.entry import EntryId
from keyshard.core.position.entry_runs import index_runs, parse_indices
from keyshard.core.position.entry_set import EntrySet
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
    with pytest.raises(
        CheckpointError, match=r"(?s)is not an entry set, such as .*backup\."
    ) as caught:
        EntrySet.parse(text)
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    "text",
    ["", ",", "a", "-1", "1-", "3-1", "1-1", "1,1", "1,2", "2,1", "00", "01", "0-03", "0-+3",
     "0- 3", "0-3_0", " 1", "1 ", "\u0663", "0-\u0663"],
)  # fmt: skip
def test_an_index_set_that_is_not_canonical_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the caller makes the sentence
        parse_indices(text)


def test_indices_in_any_order_are_written_as_runs() -> None:
    assert index_runs([5, 1, 0, 2, 7]) == "0-2,5,7"
    assert parse_indices("0-2,5,7") == frozenset({0, 1, 2, 5, 7})


def test_millions_of_entries_cost_as_much_as_their_runs() -> None:
    huge = EntrySet.parse("1:0-999999999999")
    assert len(huge) == 10**12
    assert str(huge - EntrySet.parse("1:5")) == "1:0-4,6-999999999999"
    assert EntryId(1, 10**11) in huge


def numbered(numbers: Iterable[int]) -> EntrySet:
    return EntrySet.of(EntryId(7, number) for number in numbers)


FORMS = {
    "runs, if they are few": (range(0, 128, 2), r"7:0,2,4,.*,126"),
    "runs, if they are far apart": (range(0, 10**8, 10**6), r"7:0,1000000,.*,99000000"),
    "bits, if the ledger is short": (range(1_000, 7_000, 2), r"7:1000~V{999}V"),
    "bits, beyond one container": (range(40_000, 100_000, 2), r"7:40000~V+"),
    "bits, of any pattern": (
        sorted({n * n % 65_521 + 3 for n in range(40_000)}), r"7:3~[A-Za-z0-9+/=]+"
    ),
    "a roaring bitmap, if it is long": (range(0, 200_000, 2), r"7:~OjAAAA[A-Za-z0-9+/=]+"),
    "a roaring bitmap, if gaps are rare": (
        sorted(set(range(60_000)) - set(range(0, 60_000, 800))), r"7:~OzA[A-Za-z0-9+/=]+"
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_the_set_decides_the_form_of_its_text(form: str) -> None:
    numbers, text = FORMS[form]
    found = numbered(numbers)
    assert re.fullmatch(text, str(found)), str(found)
    assert EntrySet.parse(str(found)) == found
    assert list(EntrySet.parse(str(found))) == list(found)
    assert found.is_compact == ("~" in text)
    union = numbered([*numbers][::3]) | numbered([*numbers][1::3]) | numbered([*numbers][2::3])
    assert str(union) == str(found)
    others = EntrySet.parse(f"7:0-{max(numbers)}") - found
    assert str(EntrySet.parse(f"7:0-{max(numbers)}") - others) == str(found)


@pytest.mark.parametrize(
    "text", ["7:~", "7:~AAAA", "7:0~", "7:0~AAAA", "7:1000~VVVV", "7:~OjAAAA", "7:x~VVVV", "7:~é"]
)
def test_a_compact_text_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match="is not an entry set"):
        EntrySet.parse(text)


def test_the_readable_text_of_many_runs_is_still_read() -> None:
    """Releases before the compact text wrote it."""
    many = range(0, 2_000, 2)
    assert EntrySet.parse("7:" + ",".join(map(str, many))) == numbered(many)


def test_a_million_gaps_take_about_a_bit_for_each_entry() -> None:
    found = numbered(range(0, 2_000_000, 2))
    assert found.run_count == 1_000_000
    assert found.text_bytes == len(str(found)) < 2_000_000 / 8 * 1.4


TIES = {
    "one container of three": [*range(0, 128, 2), *range(65_536, 65_539)],
    "many runs in one container": [*(n for i in range(99) for n in (200 * i, 200 * i + 1)),
                                   *range(19_800, 19_803)],
}  # fmt: skip
"""A container of n runs and 2n + 1 numbers is as small with runs as with an array."""


@pytest.mark.parametrize("numbers", TIES.values(), ids=TIES)
def test_the_text_does_not_depend_on_the_way_to_the_set(numbers: list[int]) -> None:
    at_once, one_by_one = numbered(numbers), numbered(numbers[:-3])
    for number in numbers[-3:]:
        one_by_one |= numbered([number])
    parsed = EntrySet.parse(str(at_once))
    assert str(at_once) == str(one_by_one) == str(parsed)
    assert str((at_once | numbered(range(10**5))) & parsed) == str(parsed)
