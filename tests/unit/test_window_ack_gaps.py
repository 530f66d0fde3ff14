"""The window applies evidence with the next cut, and a planned batch stays the same."""

from __future__ import annotations

import pytest

from keyshard.core.ack_gaps import GapEvidence
from keyshard.core.position.checkpoint import Checkpoint, PartitionCheckpoint
from keyshard.core.position.entry import EntryId
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.window.admission import Budget
from keyshard.core.window.partition_window import PartitionWindow
from keyshard.core.window.window import Window
from tests.helpers import P0, P1, block


@pytest.mark.parametrize(
    ("base", "floor", "delivered"),
    [(None, None, "1:0-3"), (EntryId(1, 0), EntryId(1, 2), "1:3")],
)
def test_a_batch_names_its_own_entries_and_no_ack_gap_resolved_with_it(
    base: EntryId | None, floor: EntryId | None, delivered: str
) -> None:
    window = Window(Checkpoint("c", "s", 4), 4, Budget(1_000, 10**9))
    window.add_partition(P0)
    for entry in (0, 2):
        window.receive(P0, 0, [block(1, entry)])
    assert window.cut() is not None
    window.receive(P0, 0, [block(1, 3)])
    window.prove(P0, GapEvidence(base=base, resolved=EntrySet.parse("1:1")))
    end = window.cut()
    window.validate()
    assert end is not None
    state = end.partitions[P0]
    assert (state.floor, str(state.delivered)) == (floor, delivered)
    assert str(state.batch) == "1:3"


@pytest.mark.parametrize(
    ("floor", "delivered", "has"),
    [
        (None, "1:5-9", False),
        (None, "1:5-9,11", True),
        (EntryId(1, 4), "", False),
        (EntryId(1, 4), "1:5-9", False),
        (EntryId(1, 4), "1:6-9", True),
        (EntryId(1, 4), "1:5-9,11", True),
        (EntryId(1, 4), "2:0-9", True),
    ],
)
def test_a_gap_may_lie_between_the_floor_and_a_single_run(
    floor: EntryId | None, delivered: str, has: bool
) -> None:
    """Without a gap, the gap resolver asks the broker nothing."""
    state = PartitionCheckpoint(floor=floor, delivered=EntrySet.parse(delivered))
    assert PartitionWindow(state).has_ack_gaps is has


def test_evidence_during_doubt_resolves_nothing_until_the_doubt_ends() -> None:
    """It would also apply to new entries of the same age: those of a wiped cluster."""
    window = Window(Checkpoint("c", "s", 4), 4, Budget(1_000, 10**9))
    window.add_partition(P0)
    window.receive(P0, 0, [block(4, 0, publish_ms=1_000)])
    assert window.cut() is not None
    known = window.known[P0]
    known.doubt()
    window.prove(P0, GapEvidence(resolved=EntrySet.parse("5:1-2"), published_ms=50_000))
    window.receive(P0, 0, [block(4, 1, publish_ms=1_001)])
    end = window.cut()
    assert end is not None
    assert str(end.partitions[P0].delivered) == "4:0-1"
    assert end.partitions[P0].published_ms == 1_001
    assert known.compare(P0, block(4, 0, publish_ms=1_000))
    window.receive(P0, 0, [block(4, 2, publish_ms=1_002)])
    end = window.cut()
    window.validate()
    assert end is not None
    assert str(end.partitions[P0].delivered) == "4:0-2;5:1-2"
    assert end.partitions[P0].published_ms == 50_000


def test_evidence_from_before_an_absence_resolves_nothing_after_it() -> None:
    """A cluster that was wiped meanwhile assigns the same ids, from below the evidence."""
    window = Window(Checkpoint("c", "s", 4), 4, Budget(1_000, 10**9))
    window.add_partition(P0)
    window.prove(P0, GapEvidence(base=EntryId(17, 0)))
    window.known[P0].doubt()
    window.receive(P0, 0, [block(13, 6)])
    end = window.cut()
    window.validate()
    assert end is not None
    assert not end.partitions[P0].covers(EntryId(13, 3))


def test_rows_without_room_are_tried_again_once_another_topic_partition_has_made_room() -> None:
    """They waited for the next entry of their own topic partition, whenever it came."""
    window = Window(Checkpoint("c", "s", 4), 4, Budget(10_000, 10**9, checkpoint_bytes_max=4_096))
    window.add_partition(P0)
    window.add_partition(P1)
    for where, ledgers in (P1, range(1, 801)), (P0, range(1, 201)):
        for ledger in ledgers:
            for entry in 0, 2:
                window.receive(where, 0, [block(ledger, entry)])
        while end := window.cut():
            window.release(end)
    waiting = window.known[P0].waiting_rows
    assert waiting
    assert window.received_rows == 0
    assert not window.retry_without_room(), "the checkpoint is as large as before"
    newest = window.known[P1].state.delivered.last
    assert newest is not None
    window.prove(P1, GapEvidence(base=newest))
    end = window.cut()
    window.validate()
    assert end is not None
    assert P0 not in end.partitions or not end.partitions[P0].batch
    assert window.retry_without_room()
    assert window.received_rows >= waiting
    end = window.cut()
    window.validate()
    assert end is not None
    assert window.known[P0].waiting_rows == 0
