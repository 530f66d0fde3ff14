"""Keeps a checkpoint small while a range is slow.

What the fast ranges deliver around the missing entries of a slow one makes runs, and runs are the
size of a checkpoint. So a cut takes only what fits, and ranges with many entries that did not fit
pause. The entries that the slow range is going to bring lie in the holes: they join runs, always
fit, and their range keeps receiving whatever else is full.

However many topic partitions there are, and whatever the others take: what makes no new run always
fits, and so do the first few runs of each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import pairwise

from keyshard.core.position.entry import EntryBlock, EntryId
from keyshard.core.position.entry_set import EntrySet

RUN_BYTES_MAX = 24
"""Text of one run with generous numbers, bytes; for an estimate from above."""
PARTITION_BYTES = 300
"""Text of a topic partition beside its sets: names, floor, publish time; bytes."""
RUNS_ALWAYS = 4
"""Runs that a topic partition may always have: one cannot wait for the proof that a ledger has
ended before the next ledger begins."""


def fitting(delivered: EntrySet, received: Sequence[EntryBlock], bytes_max: int) -> int:
    """How many of the received entries, ascending, a checkpoint of ``bytes_max`` has room for.

    Entries beyond the newest delivered one use three quarters of the room: the rest is kept for
    those that come late. The first late entry always fits, so a slow range is never locked out;
    and so does what leaves the set in few runs.
    """
    room = bytes_max - PARTITION_BYTES
    ids = [block.id for block in received]
    # Sets of this many runs are far from the limit: most cuts end here.
    if (2 * _runs_in(ids) + delivered.run_count) * RUN_BYTES_MAX <= room * 3 // 4:
        return len(ids)
    newest = delivered.last
    count = len(ids)
    before = delivered.text_bytes
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
    """How many entries, ascending, leave a set in few runs, or in no more than it has."""
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
    return 1 + sum(later.entry != entry.entry + 1 for entry, later in pairwise(ids))


def paused_ranges(
    waiting: Collection[EntryBlock],
    rows_share: int,
    bytes_share: int,
    ranges: int,
    owners: Collection[int],
) -> frozenset[int]:
    """Ranges that pause while a partition's checkpoint has no room.

    Each range may hold its part of half the budget, so a slow one that ran ahead in some of its
    keys still gets to the rest.

    Args:
        waiting: Received entries, which no cut takes now.
        rows_share: Rows the topic partition may hold.
        bytes_share: Bytes the topic partition may hold.
        ranges: Number of ranges.
        owners: Ranges that are known to owe an entry of a hole: they never pause.
    """
    rows: Counter[int] = Counter()
    size: Counter[int] = Counter()
    for block in waiting:
        rows[block.received_by] += block.rows
        size[block.received_by] += block.memory_bytes
    return frozenset(
        index
        for index in rows
        if index not in owners
        and (rows[index] * 2 * ranges >= rows_share or size[index] * 2 * ranges >= bytes_share)
    )
