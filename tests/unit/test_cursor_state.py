"""The broker's internalStats: ledgers, and the cursor of one subscription."""

from __future__ import annotations

import pytest

from keyshard.core.position.entry import EntryId
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.subscription_state import CursorState

STATS = {
    # Two of them are not confirmed.
    "currentLedgerEntries": 42,
    "lastConfirmedEntry": "14:39",
    "ledgers": [{"ledgerId": 12, "entries": 9}, {"ledgerId": 14, "entries": 0}],
    "cursors": {
        "s": {
            "markDeletePosition": "12:2",
            "individuallyDeletedMessages": "[(12:3..12:5],(12:7..14:0],(14:3..14:4]]",
        }
    },
}


def test_internal_statistics_have_ledgers_and_the_cursor() -> None:
    broker = CursorState.from_internal_stats(STATS, "s")
    assert broker.ledgers == {12: 9, 14: 40}
    assert broker.newest_ledger == 14
    assert broker.mark_delete == EntryId(12, 2)
    assert str(broker.individually) == "12:4-5,8;14:0,4"
    assert str(broker.acknowledged()) == "12:0-2,4-5,8;14:0,4"
    other = CursorState.from_internal_stats(STATS, "other")
    assert (other.mark_delete, other.acknowledged()) == (None, EntrySet())


def test_entries_of_the_ledger_before_are_not_counted_for_the_new_one() -> None:
    """The broker counted, closed the ledger and opened the next, and listed the ledgers."""
    stats = {"currentLedgerEntries": 100, "lastConfirmedEntry": "3:99", "cursors": {}}
    stats |= {"ledgers": [{"ledgerId": 3, "entries": 100}, {"ledgerId": 4, "entries": 0}]}
    assert CursorState.from_internal_stats(stats, "s").ledgers == {3: 100, 4: 0}


@pytest.mark.parametrize(
    ("position", "deleted", "acknowledged"),
    [
        ("3:1", "[]", "3:0-1"),
        ("3:-1", "[(3:1..3:3],(3:5..3:6]]", "3:2-3,6"),
        ("3:1", "[(4:-1..4:2],(4:2..4:5]]", "3:0-1;4:0-5"),
        ("3:1", "[(3:4..4:2]]", "3:0-1,5-7;4:0-2"),
    ],
)
def test_the_position_and_intervals_of_a_cursor_give_the_acknowledged_entries(
    position: str, deleted: str, acknowledged: str
) -> None:
    cursor = {"markDeletePosition": position, "individuallyDeletedMessages": deleted}
    ledgers = [{"ledgerId": 3, "entries": 8}, {"ledgerId": 4, "entries": 9}]
    stats = {"ledgers": ledgers, "lastConfirmedEntry": "4:8", "cursors": {"s": cursor}}
    assert str(CursorState.from_internal_stats(stats, "s").acknowledged()) == acknowledged


def test_a_cursor_in_another_form_is_refused() -> None:
    stats = {
        "ledgers": [],
        "lastConfirmedEntry": "3:-1",
        "cursors": {"s": {"markDeletePosition": "nowhere"}},
    }
    with pytest.raises(ValueError, match="nowhere"):
        CursorState.from_internal_stats(stats, "s")


@pytest.mark.parametrize(
    ("subscription", "listed"),
    [("a b/c+d", "a+b%2Fc%2Bd"), ("50%~*._-", "50%25%7E*._-"), ("\xe9", "%C3%A9")],
)
def test_a_cursor_is_listed_under_the_encoded_name(subscription: str, listed: str) -> None:
    found = {"markDeletePosition": "3:1"}
    stats = {"ledgers": [], "lastConfirmedEntry": "3:-1", "cursors": {listed: found}}
    assert CursorState.from_internal_stats(stats, subscription).mark_delete == EntryId(3, 1)
    # "a+b" is how the cursor of "a b" is listed: the plain name may be somebody else's.
    stats = {"ledgers": [], "lastConfirmedEntry": "3:-1", "cursors": {subscription: found}}
    assert CursorState.from_internal_stats(stats, subscription).mark_delete is None


def test_unacknowledged_entries_are_reported() -> None:
    state = CursorState({3: 9, 5: 9}, EntryId(3, 4), EntrySet.parse("3:6;5:0-1"))
    delivered = EntrySet.parse("2:0-9;3:0-8;5:0-2")
    assert str(state.lacks(delivered)) == "3:5,7-8;5:2"
    assert CursorState({}).lacks(delivered) == delivered
