"""How much goes into a batch: limits split over topic partitions, and the cut by position."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, TypeVar

from keyshard.core.position.entry import EntryBlock

K = TypeVar("K")

Sizes = tuple[int, int, int]
"""Rows, memory in bytes, payload in bytes."""


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


def split_limits(
    demands: Mapping[K, Sizes], limits: tuple[int, int, int | None], left_out: Collection[K]
) -> dict[K, Sizes]:
    """Most that a cut takes of each topic partition.

    Args:
        demands: What each has, positive, in the order of keys as for :func:`share_out`.
        limits: Most rows, memory and payload of the batch; ``None``: any payload.
        left_out: Who was left out of the cut before has a part in this one, whatever the limit.

    Returns:
        Per topic partition that may give any rows: most rows, memory and payload.
    """
    rows_max, memory_max, payload_max = limits
    rows = share_out(rows_max, {key: sizes[0] for key, sizes in demands.items()})
    memory = share_out(memory_max, {key: sizes[1] for key, sizes in demands.items()})
    payload = {key: sizes[2] for key, sizes in demands.items()}
    if payload_max:
        payload = share_out(payload_max, payload)
    rows |= {key: max(1, rows[key]) for key in demands if key in left_out}
    return {key: (rows[key], memory[key], payload[key]) for key in demands if rows[key]}


def take_aligned(
    received: Sequence[EntryBlock],
    limits: Sizes,
    sizes: Callable[[EntryBlock], Sizes],
    left_out: set[int],
) -> tuple[list[EntryBlock], list[EntryBlock]]:
    """Choose the cut position of one topic partition and take everything received up to it.

    Entries of one key arrive in position order, so a prefix by position keeps the order of every
    key. One cut position for all ranges keeps the delivered set in few runs.

    Args:
        received: Entries, ascending by position.
        limits: Most rows, memory and payload; the first entry is taken whatever its size.
        sizes: What an entry uses of them.
        left_out: Ranges that had data and no part in the cut before: the first entry of each is
            taken even beyond the cut position and the limits.

    Returns:
        (taken, rest), both ascending by position.
    """
    rows_left, memory_left, payload_left = limits
    position = 0
    for block in received:
        rows, memory, payload = sizes(block)
        rows_left -= rows
        memory_left -= memory
        payload_left -= payload
        if position and min(rows_left, memory_left, payload_left) < 0:
            break
        position += 1
    taken = list(received[:position])
    waiting = left_out - {block.received_by for block in taken}
    if not waiting:
        return taken, list(received[position:])
    rest: list[EntryBlock] = []
    for block in received[position:]:
        if block.received_by in waiting:
            waiting.discard(block.received_by)
            taken.append(block)
        else:
            rest.append(block)
    return taken, rest


def waits_for_more(rows: int, rows_min: int, waited_s: float, delay_max_s: float) -> bool:
    """Whether a cut waits until there are ``rows_min`` rows, for at most ``delay_max_s`` seconds.

    Args:
        rows: Rows that could be cut.
        rows_min: Fewest rows of a batch.
        waited_s: Time since the cut before, seconds.
        delay_max_s: Longest time between cuts while there are rows, seconds.
    """
    return rows < rows_min and waited_s < delay_max_s


class Held(NamedTuple):
    """Messages of one topic partition that a source leaves unacknowledged."""

    rows: int
    """Most rows in its window; 0 or less: the broker's limits leave no room for any."""
    queue: int
    """Most messages in the client queue of each consumer."""


def held_max(
    *,
    window_rows_max: int,
    topic_partitions: int,
    ranges: int,
    queue: int,
    per_consumer: int,
    per_subscription: int,
) -> Held:
    """What may be held of one topic partition.

    It stays below what the broker leaves unacknowledged, client queues included: a consumer at its
    limit gets nothing more, and holds up the other ranges. One range may have all rows of a
    partition, so the limit per consumer counts for the whole. Where both do not fit, the queues
    become smaller first, until rows and queues have half each.

    Args:
        window_rows_max: Most rows over all topic partitions.
        topic_partitions: Number of topic partitions.
        ranges: Number of hash ranges, each with a consumer per topic partition.
        queue: Most messages in the client queue of a consumer.
        per_consumer: Broker's limit per consumer; 0 for none.
        per_subscription: Broker's limit per subscription and topic partition; 0 for none.
    """
    rows = max(1, window_rows_max // max(1, topic_partitions))
    for limit, consumers in ((per_consumer, 1), (per_subscription, ranges)):
        if limit:
            left = limit - min(rows, limit // 2)
            queue = max(1, min(queue, left // consumers))
            rows = min(rows, limit - consumers * queue)
    return Held(rows, queue)
