"""Limits the size of a checkpoint while a range is slow.

Entries that fast ranges deliver around the missing entries of a slow range form runs. The number of
runs determines the size of a checkpoint. So a cut takes only entries that fit, and ranges with many
entries that did not fit pause. Missing entries of the slow range lie in ack gaps. They join runs,
so they always fit, and their range never pauses.

Entries that make no new run always fit. So do the first few runs of each topic partition, however
many topic partitions there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import pairwise

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
    if not received or (2 * len(received) + delivered.run_count) * RUN_BYTES_MAX <= room * 3 // 4:
        return len(received)
    ids = [block.id for block in received]
    # Most sets have few runs and are far from the limit, so most cuts end here.
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
    """Return about how many runs these ids have: at least one, ascending."""
    first, last = ids[0], ids[-1]
    if first.ledger == last.ledger and last.entry - first.entry == len(ids) - 1:
        return 1
    return 1 + sum(later.entry != entry.entry + 1 for entry, later in pairwise(ids))


def paused_ranges(
    waiting: Collection[EntryBlock],
    rows_share: int,
    bytes_share: int,
    ranges: int,
    owners: Collection[int],
) -> frozenset[int]:
    """Return the ranges that pause while a partition's checkpoint has no room.

    Each range may hold its part of half the budget. So a slow range that received some keys ahead
    still gets to the other keys.

    Args:
        waiting: Received entries that no cut takes now.
        rows_share: Rows the topic partition may hold.
        bytes_share: Bytes the topic partition may hold.
        ranges: Number of ranges.
        owners: Ranges known to owe an entry of an ack gap. They never pause.
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
