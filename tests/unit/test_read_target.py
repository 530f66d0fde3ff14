"""Targets of a bounded run: the gaps below them, and the resolved ones."""

from __future__ import annotations

import pytest

from keyshard.core.position.entry import EntryId
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.read_target import Gap, Target, gaps
from keyshard.core.subscription_state import CursorState


def found(delivered: str, after: EntryId | None, target: EntryId) -> list[tuple[str, str]]:
    """Gaps as text."""
    listed = list(gaps(EntrySet.parse(delivered), after, target))
    return [(f"{a.ledger}:{a.entry}", f"{b.ledger}:{b.entry}") for a, b in listed]


@pytest.mark.parametrize(
    ("delivered", "after", "target", "expected"),
    [
        ("", None, (3, 4), [("0:0", "3:5")]),
        ("3:0-4", None, (3, 4), [("0:0", "3:0")]),
        ("3:0-4", (2, 9), (3, 4), [("2:10", "3:0")]),
        ("3:0-4", (3, 4), (3, 4), []),
        ("3:0-9", (3, -1), (3, 4), []),
        ("3:0-1,3-9", (3, -1), (3, 4), [("3:2", "3:3")]),
        ("3:0-1,3-4;5:0-7", (3, -1), (5, 9), [("3:2", "3:3"), ("3:5", "5:0"), ("5:8", "5:10")]),
        ("3:0-4;5:0-7", (3, 2), (3, 4), []),
        ("3:0-4;5:3", (3, 2), (5, 1), [("3:5", "5:2")]),
        ("3:6-9", (3, 7), (3, 4), []),
    ],
)
def test_gaps_are_the_unresolved_entries_up_to_the_target(
    delivered: str,
    after: tuple[int, int] | None,
    target: tuple[int, int],
    expected: list[tuple[str, str]],
) -> None:
    assert found(delivered, after and EntryId(*after), EntryId(*target)) == expected


def test_an_empty_partition_has_reached_its_target_and_includes_nothing() -> None:
    target = Target(None)
    assert target.reached
    assert not target.includes(EntryId(0, 0))
    assert list(target.open_gaps(EntrySet(), None)) == []


def test_a_target_includes_entries_published_up_to_it() -> None:
    target = Target(EntryId(3, 4))
    assert not target.reached
    assert target.includes(EntryId(3, 4))
    assert target.includes(EntryId(2, 99))
    assert not target.includes(EntryId(3, 5))


def test_a_gap_that_is_empty_is_not_asked_for_again() -> None:
    target, delivered = Target(EntryId(5, 3)), EntrySet.parse("3:0-4;5:0-1")
    asked = list(target.open_gaps(delivered, None))
    assert asked == [
        Gap(EntryId(0, 0), EntryId(3, 0)),
        Gap(EntryId(3, 5), EntryId(5, 0)),
        Gap(EntryId(5, 2), EntryId(5, 4)),
    ]
    target.nothing_in(asked[0])
    target.nothing_in(asked[1])
    assert list(target.open_gaps(delivered, None)) == asked[2:]


def test_an_entry_acknowledged_in_the_cursor_is_no_gap() -> None:
    target, delivered = Target(EntryId(5, 9)), EntrySet.parse("5:4-5")
    cursor = CursorState({}, EntryId(5, 1), EntrySet.parse("5:3,6-8"))
    assert list(target.open_gaps(delivered, None, cursor)) == [
        Gap(EntryId(5, 2), EntryId(5, 3)),
        Gap(EntryId(5, 9), EntryId(5, 10)),
    ]
    assert next(target.open_gaps(delivered, EntryId(5, 8), cursor)).start == EntryId(5, 9)
