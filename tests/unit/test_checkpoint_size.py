"""The room of a checkpoint while a range is slow, and the ranges that pause."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from keyshard.core.position.entry import EntryBlock, EntryId
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.window.checkpoint_size import PARTITION_BYTES, fitting, kept
from tests.helpers import block

Received = list[EntryBlock]


def received(*entries: int, index: int = 0) -> Received:
    one = block(1, 0)
    return [replace(one, id=EntryId(1, entry), received_by=index) for entry in entries]


def text_bytes(delivered: EntrySet, taken: Received) -> int:
    batch = EntrySet.of(entry.id for entry in taken)
    return len(str(delivered | batch)) + len(str(batch))


def test_any_number_of_consecutive_entries_fits() -> None:
    assert fitting(EntrySet(), received(*range(50_000)), PARTITION_BYTES + 100) == 50_000


def test_entries_that_make_runs_fit_in_three_quarters_of_the_room() -> None:
    entries = received(*range(0, 12_000, 2))
    count = fitting(EntrySet(), entries, PARTITION_BYTES + 1_000)
    assert 0 < count < 6_000
    assert text_bytes(EntrySet(), entries[:count]) <= 750


def test_without_room_nothing_fits_but_the_first_late_entry() -> None:
    delivered = EntrySet.of(entry.id for entry in received(*range(0, 400, 2)))
    assert fitting(delivered, received(402, 404), PARTITION_BYTES + 100) == 0
    assert fitting(delivered, received(13, 402), PARTITION_BYTES + 100) >= 1
    assert fitting(EntrySet(), received(13), PARTITION_BYTES) == 1
    assert fitting(delivered, [], PARTITION_BYTES) == 0


def test_late_entries_use_the_last_quarter() -> None:
    delivered = EntrySet.of(entry.id for entry in received(*range(0, 4_000, 2)))
    room = PARTITION_BYTES + len(str(delivered)) + 200
    late = received(*range(1, 41, 2))
    assert fitting(delivered, late, room) == len(late)
    assert fitting(delivered, received(4_002), room) == 0


@pytest.mark.parametrize(
    ("rows", "owners", "paused", "late_only"),
    [
        (24, (), set(), set()),
        (25, (), {1}, set()),
        (24, (1,), set(), set()),
        (25, (1,), set(), {1}),
        (25, (0,), {1}, set()),
    ],
)
def test_a_range_is_restrained_when_it_holds_its_share_of_half_the_budget(
    rows: int, owners: tuple[int, ...], paused: set[int], late_only: set[int]
) -> None:
    """A restrained range pauses. If it owes missing entries, it takes only late entries."""
    assert kept({0: 1, 1: rows, -1: 100}, 1.0, (100, 10**9), 2, owners) == (paused, late_only)


def test_a_range_is_restrained_by_bytes_too() -> None:
    assert kept({0: 2}, 50.0, (10**9, 200), 1, ()).paused == {0}
    assert kept({0: 2}, 49.0, (10**9, 200), 1, ()).paused == set()
    assert kept({0: 2}, 50.0, (10**9, 200), 1, (0,)).late_only == {0}
