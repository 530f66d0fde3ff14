"""The ledgers of a segment, found by the first entries at or after some positions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keyshard.core.position.entry import EntryId
from keyshard.core.position.ledger import Ledger, ledgers_read

COUNTS = st.lists(
    st.tuples(st.integers(1, 9), st.one_of(st.integers(1, 70), st.just(50_000))), max_size=6
)


class Stored:
    """Ledgers, as pairs of the distance to the id before and the number of entries."""

    def __init__(self, counts: list[tuple[int, int]]) -> None:
        self.ledgers: dict[int, int] = {}
        self.looks = ledger = 0
        for step, entries in counts:
            ledger += step
            self.ledgers[ledger] = entries

    def first_from(self, at: EntryId) -> EntryId | None:
        self.looks += 1
        if at.entry < self.ledgers.get(at.ledger, 0):
            return at
        later = (ledger for ledger in self.ledgers if ledger > at.ledger)
        return next((EntryId(ledger, 0) for ledger in later), None)


@given(COUNTS)
def test_all_ledgers_are_found_with_their_numbers_of_entries(counts: list[tuple[int, int]]) -> None:
    stored = Stored(counts)
    found = ledgers_read(stored.first_from, 0)
    assert {one.id: one.entries for one in found} == stored.ledgers
    assert [one.id for one in found] == sorted(stored.ledgers)
    assert stored.looks <= 1 + sum(2 + 2 * count.bit_length() for _, count in counts) + sum(
        2 * before.bit_length() for _, before in counts
    )


def test_ledgers_of_the_same_length_take_two_looks_each() -> None:
    stored = Stored([(1, 50_000)] * 11)
    ledgers_read(stored.first_from, 0)
    before = Stored([(1, 50_000)])
    ledgers_read(before.first_from, 0)
    assert stored.looks - before.looks == 2 * 10


def test_entries_that_come_meanwhile_end_the_search_all_the_same() -> None:
    stored = Stored([(1, 5)])

    def first_from(at: EntryId) -> EntryId | None:
        found = stored.first_from(at)
        stored.ledgers[1] += 1
        return found

    (found,) = ledgers_read(first_from, 0)
    assert 5 <= found.entries <= stored.ledgers[1]


def test_each_entry_gets_an_equal_part_of_the_bytes() -> None:
    stored = Stored([(1, 30), (1, 10)])
    assert ledgers_read(stored.first_from, 400) == (Ledger(1, 30, 300), Ledger(2, 10, 100))


def test_an_empty_segment_has_no_ledgers() -> None:
    assert ledgers_read(lambda _: None, 0) == ()
