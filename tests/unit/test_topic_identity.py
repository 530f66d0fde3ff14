"""Fingerprints distinguish ids that are handed out a second time from late entries."""

from __future__ import annotations

import pytest

from keyshard.core.position.checkpoint import Checkpoint, PartitionCheckpoint
from keyshard.core.position.entry import EntryId
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.subscription_state import CursorState
from keyshard.core.topic_identity import CLOCK_SKEW_MS, check_ledgers, lowest_known_ledger
from keyshard.core.window.admission import Budget
from keyshard.core.window.partition_window import ReceiveResult
from keyshard.core.window.window import Window
from keyshard.errors import TopicRecreatedError
from tests.helpers import P0, block

NOW = 1_000_000
STATE = PartitionCheckpoint(None, EntrySet.parse("7:0-9;8:2"), published_ms=NOW)


def window() -> Window:
    return Window(Checkpoint("c", "s", 2, {P0: STATE}), 2, Budget(100, 10**6))


def test_a_late_entry_of_a_lower_ledger_is_no_alarm() -> None:
    late = window()
    for entry, publish_ms in ((0, NOW - 5_000), (1, NOW), (2, NOW + CLOCK_SKEW_MS)):
        made = block(6, entry, publish_ms=publish_ms)
        assert late.receive(P0, 0, [made]) == [ReceiveResult.ACCEPTED]


def test_a_new_entry_below_all_known_ledgers_is_of_another_topic() -> None:
    with pytest.raises(TopicRecreatedError, match="is below ledger 7"):
        window().receive(P0, 0, [block(6, 0, publish_ms=NOW + CLOCK_SKEW_MS + 1)])


def test_entries_before_one_of_another_topic_are_received() -> None:
    known = window()
    delivery = [block(8, 3), block(6, 0, publish_ms=NOW + CLOCK_SKEW_MS + 1), block(8, 4)]
    with pytest.raises(TopicRecreatedError, match="is below ledger 7"):
        known.receive(P0, 0, delivery)
    known.validate()
    assert known.counters.entries_received == known.received_rows == known.rows == 1


def test_a_new_entry_in_or_above_a_known_ledger_is_new() -> None:
    new = window()
    for ledger, entry in ((7, 10), (8, 0), (9, 0)):
        made = block(ledger, entry, publish_ms=10 * NOW)
        assert new.receive(P0, 0, [made]) == [ReceiveResult.ACCEPTED]


def test_without_a_checkpoint_no_ledger_is_known() -> None:
    first = Window(Checkpoint("c", "s", 2), 2, Budget(100, 10**6))
    first.add_partition(P0)
    assert first.receive(P0, 0, [block(7, 0)]) == [ReceiveResult.ACCEPTED]
    assert first.cut() is not None
    assert first.receive(P0, 0, [block(6, 0, publish_ms=10 * NOW)]) == [ReceiveResult.ACCEPTED]


def test_the_lowest_ledger_is_that_of_the_floor_where_there_is_one() -> None:
    assert lowest_known_ledger(STATE) == 7
    assert lowest_known_ledger(PartitionCheckpoint(EntryId(3, 1), STATE.delivered)) == 3
    assert lowest_known_ledger(PartitionCheckpoint()) == -1


@pytest.mark.parametrize("ledgers", [{7: 10, 8: 3}, {8: 3}, {9: 0}, {}])
def test_ledgers_that_grew_or_were_trimmed_are_no_alarm(ledgers: dict[int, int]) -> None:
    check_ledgers(P0, STATE, CursorState(ledgers))


@pytest.mark.parametrize("ledgers", [{7: 10}, {7: 9, 8: 3}, {7: 10, 8: 2}])
def test_ledgers_shorter_than_the_checkpoint_belong_to_another_topic(
    ledgers: dict[int, int],
) -> None:
    with pytest.raises(TopicRecreatedError, match="according to the checkpoint"):
        check_ledgers(P0, STATE, CursorState(ledgers))


def test_a_redelivery_is_the_same_entry() -> None:
    """Found by the simulation of a wiped broker: the new entry was dropped, and acknowledged."""
    again = window()
    made = block(8, 3, publish_ms=NOW + 5)
    assert again.receive(P0, 0, [made]) == [ReceiveResult.ACCEPTED]
    assert again.receive(P0, 0, [made]) == [ReceiveResult.HELD]
    with pytest.raises(TopicRecreatedError, match="published 1 ms after the first delivery"):
        again.receive(P0, 0, [block(8, 3, publish_ms=NOW + 6)])


def test_entries_redelivered_before_the_replay_belong_to_the_planned_batch() -> None:
    planned = Checkpoint(
        "c", "s", 2, {P0: PartitionCheckpoint(None, STATE.delivered, STATE.delivered, {}, NOW)}
    )
    again = Window(planned, 2, Budget(100, 10**6))
    again.expect(planned)
    assert again.receive(P0, 0, [block(8, 2, publish_ms=NOW)]) == [ReceiveResult.HELD]
    with pytest.raises(TopicRecreatedError, match="was delivered again"):
        again.receive(P0, 0, [block(8, 2, publish_ms=NOW + 1)])
