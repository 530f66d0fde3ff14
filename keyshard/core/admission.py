"""How much goes into a batch: limits split over topic partitions, and the cut by position."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from keyshard.core.entry import EntryBlock

K = TypeVar("K")


def share_out(limit: int, demand: Mapping[K, int]) -> dict[K, int]:
    """Split a limit in proportion to demand, so that small demands are not starved.

    Args:
        limit: What may be given out in all, at least 1.
        demand: What each key could take, positive. The order of keys decides who comes first when
            the limit is smaller than the number of keys.

    Returns:
        Per key at most its demand; at least 1 while the limit lasts; the sum is at most ``limit``.
    """
    total = sum(demand.values())
    if total <= limit:
        return dict(demand)
    shares = {key: min(1, limit - i) if i < limit else 0 for i, key in enumerate(demand)}
    spare = limit - sum(shares.values())
    for key, wanted in demand.items():
        shares[key] += (wanted - shares[key]) * spare // total
    for key, wanted in demand.items():
        extra = min(limit - sum(shares.values()), wanted - shares[key])
        if extra <= 0:
            continue
        shares[key] += extra if shares[key] else 0
    return shares


def take_aligned(
    received: Sequence[tuple[EntryBlock, int]],
    rows_max: int,
    bytes_max: int,
    size: Callable[[EntryBlock], tuple[int, int]],
    left_out: set[int],
) -> tuple[list[tuple[EntryBlock, int]], list[tuple[EntryBlock, int]]]:
    """Choose the cut position of one topic partition and take everything received up to it.

    Entries of one key arrive in position order, so a prefix by position keeps the order of every
    key. One cut position for all ranges keeps the delivered set in few runs.

    Args:
        received: Entries with the range that received them, ascending by position.
        rows_max: Most rows; the first entry is taken whatever its size.
        bytes_max: Most bytes; the first entry is taken whatever its size.
        size: Rows and bytes of an entry.
        left_out: Ranges that had data and no part in the cut before: the first entry of each is
            taken even beyond the cut position and the limits.

    Returns:
        (taken, rest), both ascending by position.
    """
    rows = size_bytes = position = 0
    for block, _ in received:
        block_rows, block_bytes = size(block)
        if position and (rows + block_rows > rows_max or size_bytes + block_bytes > bytes_max):
            break
        rows += block_rows
        size_bytes += block_bytes
        position += 1
    taken = list(received[:position])
    waiting = left_out - {index for _, index in taken}
    rest: list[tuple[EntryBlock, int]] = []
    for block, index in received[position:]:
        if index in waiting:
            waiting.discard(index)
            taken.append((block, index))
        else:
            rest.append((block, index))
    return taken, rest
