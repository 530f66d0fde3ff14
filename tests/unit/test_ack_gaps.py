"""Ack gaps: the effect of evidence on the delivered set and the floor."""

from __future__ import annotations

import pytest

from keyshard.core.ack_gaps import (
    FIRST,
    AgedEntries,
    GapEvidence,
    LedgerEnd,
    ack_gaps_of,
    evidence_of_ledgers,
    ledger_borders,
    resolve,
)
from keyshard.core.position.checkpoint import PartitionCheckpoint
from keyshard.core.position.entry import EntryId
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.subscription_state import CursorState


def state(delivered: str, floor: tuple[int, int] | None = None) -> PartitionCheckpoint:
    return PartitionCheckpoint(EntryId(*floor) if floor else None, EntrySet.parse(delivered))


def result(
    before: PartitionCheckpoint, proofs: GapEvidence, *undelivered: tuple[int, int]
) -> tuple[tuple[int, int] | None, str, int]:
    after = resolve(before, proofs, [EntryId(*entry) for entry in undelivered])
    return after.floor and tuple(after.floor), str(after.delivered), after.newly  # type: ignore[return-value]


def parse(text: str) -> EntrySet:
    return EntrySet.parse(text)


def test_without_evidence_a_first_floor_is_not_invented() -> None:
    assert result(state("7:3-9"), GapEvidence()) == (None, "7:3-9", 0)


def test_a_known_floor_moves_over_the_entries_after_it() -> None:
    assert result(state("7:3-9,11", (7, 2)), GapEvidence()) == ((7, 9), "7:11", 0)


@pytest.mark.parametrize(("base", "floor"), [((7, 3), (7, 9)), ((7, 2), (7, 1)), ((3, 0), None)])
def test_the_base_of_the_evidence_gives_the_first_floor(
    base: tuple[int, int], floor: tuple[int, int] | None
) -> None:
    """All entries before the base are delivered or resolved."""
    after = result(state("7:3-9"), GapEvidence(EntryId(*base)))
    assert after == (floor, "" if floor == (7, 9) else "7:3-9", 0)


def test_resolved_ack_gaps_join_the_set_and_the_floor_moves_over_both() -> None:
    proofs = GapEvidence(resolved=parse("7:4,6,12"))
    assert result(state("7:3,5,7,9,11", (7, 2)), proofs) == ((7, 7), "7:9,11-12", 3)


def test_an_ack_gap_after_an_unresolved_one_is_kept_in_the_set() -> None:
    proofs = GapEvidence(resolved=parse("7:5-8"))
    assert result(state("7:4,9", (7, 2)), proofs) == ((7, 2), "7:4-9", 4)


def test_a_received_entry_is_never_resolved_by_any_evidence() -> None:
    proofs = GapEvidence(EntryId(8, 0), parse("7:4-6"), {7: LedgerEnd(3, EntryId(8, 0))})
    assert result(state("7:3,7;8:0", (7, 2)), proofs, (7, 5)) == ((7, 4), "7:6-7;8:0", 2)


def test_a_received_entry_at_the_start_of_a_ledger_stops_the_floor() -> None:
    proofs = GapEvidence(ledger_ends={7: LedgerEnd(3, EntryId(8, 2))})
    assert result(state("7:3;8:1", (7, 2)), proofs, (8, 0)) == ((7, 3), "8:1", 0)


def test_the_floor_moves_over_the_ends_of_ledgers() -> None:
    ends = {7: LedgerEnd(3, EntryId(9, 0)), 9: LedgerEnd(-1, EntryId(12, 4))}
    assert result(state("7:3;12:4-5", (7, 2)), GapEvidence(ledger_ends=ends)) == ((12, 5), "", 0)


def test_the_floor_stays_in_a_ledger_that_has_more() -> None:
    proofs = GapEvidence(ledger_ends={7: LedgerEnd(4, EntryId(9, 0))})
    assert result(state("7:3;9:0", (7, 2)), proofs) == ((7, 3), "9:0", 0)


def test_ack_gaps_lie_between_the_floor_and_the_newest_delivered_entry() -> None:
    assert str(ack_gaps_of(state("7:3,5;9:2"))) == "7:0-2,4;9:0-1"
    assert str(ack_gaps_of(state("7:3,5;9:2", (7, 2)))) == "7:4;9:0-1"
    assert ack_gaps_of(state("")) == EntrySet()


def test_the_list_of_ledgers_shows_ack_gaps_at_ledger_ends_and_in_whole_ledgers() -> None:
    broker = CursorState({7: 8, 8: 2, 9: 50})
    assert str(ack_gaps_of(state("7:3,5;9:2", (7, 2)), broker)) == "7:4,6-7;8:0-1;9:0-1"


def test_the_list_of_ledgers_proves_ends_and_deleted_ledgers() -> None:
    before = state("5:3;7:0-3;9:0", (4, 1))
    broker = CursorState({7: 4, 8: 2, 9: 50})
    proofs = evidence_of_ledgers(before, ack_gaps_of(before, broker), broker)
    assert proofs.base == EntryId(7, 0)
    assert str(proofs.resolved) == "5:0-2"
    assert proofs.ledger_ends == {
        4: LedgerEnd(-1, EntryId(7, 0)),
        5: LedgerEnd(-1, EntryId(7, 0)),
        7: LedgerEnd(3, EntryId(8, 0)),
        8: LedgerEnd(1, EntryId(9, 0)),
    }
    assert result(before, proofs) == ((7, 3), "9:0", 3)


def test_a_ledger_listed_shorter_than_its_delivered_entries_has_no_proven_end() -> None:
    before = state("7:0-3;9:0", (6, 1))
    broker = CursorState({7: 0, 9: 1})
    assert 7 not in evidence_of_ledgers(before, ack_gaps_of(before, broker), broker).ledger_ends


def test_ledger_borders_are_after_each_older_ledger_and_without_a_floor_at_the_start() -> None:
    assert str(ledger_borders(state("7:3,5;9:2"))) == "0:0;7:6"
    assert str(ledger_borders(state("9:2", (7, 5)))) == "7:6"
    assert ledger_borders(state("")) == EntrySet()


def test_evidence_is_dropped_once_a_checkpoint_has_it() -> None:
    proofs = GapEvidence(
        EntryId(7, 0),
        parse("7:1;9:9"),
        {7: LedgerEnd(3, EntryId(8, 0)), 8: LedgerEnd(3, EntryId(9, 0))},
    )
    proofs.applied(EntryId(8, 0))
    assert proofs == GapEvidence(None, EntrySet(), {8: LedgerEnd(3, EntryId(9, 0))})
    proofs.applied(EntryId(9, 9))
    assert not proofs


def test_entries_that_stay_for_the_period_are_returned_and_others_start_again() -> None:
    lasting = AgedEntries(100)
    assert not lasting.update(0, parse("1:0-4"))
    assert not lasting.update(60, parse("1:0-3,9"))
    assert str(lasting.update(100, parse("1:0-4,9"))) == "1:0-3"
    assert str(lasting.update(160, parse("1:0-4,9"))) == "1:0-3,9"
    assert str(lasting.update(199, parse("1:4"))) == ""
    assert str(lasting.update(200, parse("1:0-4"))) == "1:4"
    assert str(lasting.update(10_000, parse("1:0-4"))) == "1:0-4"


def test_the_first_position_is_the_lowest_entry_id() -> None:
    assert EntryId(0, 0) == FIRST
