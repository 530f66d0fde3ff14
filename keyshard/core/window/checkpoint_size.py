"""Limits the size of a checkpoint while entries are missing.

Entries that are delivered around missing ones form runs, and the runs determine the size of a
checkpoint. Entries are missing because a range is slow, or because they are delayed messages whose
time has not come. So a cut takes only entries that fit, and a range with many entries that did not
fit pauses. Missing entries join runs when they come, so they always fit. A range that owes missing
entries continues to receive. Once it holds its part of half the budget, it takes only late entries
(ADR 43).

Entries that make no new run always fit. So do the first few runs of each topic partition, however
many topic partitions there are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from keyshard.core.position.entry import EntryBlock, EntryId
from keyshard.core.position.entry_set import EntrySet

RUN_BYTES_MAX = 24
"""Upper estimate for the text of one run, bytes."""
PARTITION_BYTES = 300
"""Text of a topic partition beside its sets: names, floor, publish time; bytes."""
RUNS_ALWAYS = 4
"""Runs that a topic partition may always have. With a single run, the next ledger would have to
wait for proof that the previous one has ended."""


def fitting(delivered: EntrySet, received: Sequence[EntryBlock], bytes_max: int) -> int:
    """Return how many of the received entries, ascending, fit into a checkpoint of ``bytes_max``.

    Entries after the newest delivered one may use three quarters of the room; the rest is reserved
    for late entries. The first late entry always fits, so a slow range is never locked out. Entries
    that leave the set in few runs always fit as well.
    """
    room = bytes_max - PARTITION_BYTES
    before = delivered.text_bytes
    if not received or 2 * len(received) * RUN_BYTES_MAX + before <= room * 3 // 4:
        return len(received)
    ids = [block.id for block in received]
    # Most sets have few runs and are far from the limit, so most cuts end here.
    if 2 * _runs_in(ids) * RUN_BYTES_MAX + before <= room * 3 // 4:
        return len(ids)
    newest = delivered.last
    count = len(ids)
    late_room = room if before <= room else before + room // 8
    while count:
        batch = EntrySet.of(ids[:count])
        late = newest is not None and ids[count - 1] <= newest
        needed = (delivered | batch).text_bytes + batch.text_bytes
        if needed <= (late_room if late else room * 3 // 4):
            return count
        count = count // 2
    first_is_late = bool(ids) and newest is not None and ids[0] < newest
    return max(first_is_late, _joining(delivered, ids))


def _joining(delivered: EntrySet, ids: Sequence[EntryId]) -> int:
    """Return how many entries, ascending, leave a set in few runs, or add none."""
    runs = delivered.run_count
    most = max(runs, RUNS_ALWAYS)
    newest: EntryId | None = None
    for count, entry_id in enumerate(ids):
        ledger, entry = entry_id
        before = EntryId(ledger, entry - 1)
        runs += 1 - (before == newest or before in delivered)
        runs -= EntryId(ledger, entry + 1) in delivered
        if runs > most:
            return count
        newest = entry_id
    return len(ids)


def _runs_in(ids: Sequence[EntryId]) -> int:
    """Return the approximate number of runs of some ids: one id or more, ascending."""
    first, last = ids[0], ids[-1]
    if first.ledger == last.ledger and last.entry - first.entry == len(ids) - 1:
        return 1
    return 1 + sum(later.entry != entry.entry + 1 for entry, later in pairwise(ids))


class Kept(NamedTuple):
    """The ranges that a checkpoint without room restrains."""

    paused: frozenset[int] = frozenset()
    """They receive nothing."""
    late_only: frozenset[int] = frozenset()
    """They owe missing entries. They take nothing but late entries."""


def kept(
    range_rows: Mapping[int, int],
    row_bytes: float,
    limits: tuple[float, float],
    ranges: int,
    owners: Collection[int],
) -> Kept:
    """Return the ranges that are restrained while a partition's checkpoint has no room.

    Each range may hold its part of half the budget. So a range that owes missing entries, and
    received other keys ahead, has the other half for late entries.

    Args:
        range_rows: Held rows by the range that received them; a negative index is no range.
        row_bytes: Mean memory of a held row, bytes.
        limits: Rows and bytes that the topic partition may hold: its budget.
        ranges: Number of ranges.
        owners: Ranges known to owe a missing entry.
    """
    rows_max, bytes_max = limits
    paused: set[int] = set()
    late_only: set[int] = set()
    for index, rows in range_rows.items():
        if index < 0:
            continue
        if max(rows / rows_max, rows * row_bytes / bytes_max) * 2 * ranges >= 1:
            (late_only if index in owners else paused).add(index)
    return Kept(frozenset(paused), frozenset(late_only))
