"""Size of a batch: limits split over topic partitions, and the cut by position."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import le
from typing import NamedTuple, TypeVar

from keyshard.core.position.entry import EntryBlock

K = TypeVar("K")

Sizes = tuple[int, int, int]
"""Rows, memory in bytes, payload in bytes."""


def share_out(limit: int, demand: Mapping[K, int]) -> dict[K, int]:
    """Split a limit in proportion to demand, so that small demands are not starved.

    Args:
        limit: Amount to distribute, at least 1.
        demand: Positive demand of each key. If the limit is smaller than the number of keys, the
            first ``limit`` keys get 1 each, and the other keys nothing.

    Returns:
        Share of each key: at most its demand and, if the limit suffices, at least 1. The sum of all
        shares is at most ``limit``.
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
    """Return the most that a cut takes of each topic partition.

    Args:
        demands: Positive demand of each topic partition; order as for :func:`share_out`.
        limits: Most rows, memory and payload of the batch; ``None``: any payload.
        left_out: Topic partitions with ranges that the previous cut left out. They get at least one
            row, even beyond the limit.

    Returns:
        Most rows, memory and payload of each topic partition that may give rows.
    """
    rows_max, memory_max, payload_max = limits
    totals = map(sum, zip(*demands.values(), strict=True))
    limited = (rows_max, memory_max, payload_max or math.inf)
    if all(map(le, totals, limited)):
        return dict(demands)
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
        limits: Most rows, memory and payload; the first entry is taken even if it is larger.
        sizes: Returns rows, memory and payload of an entry.
        left_out: Ranges that had data and were left out of the previous cut. The first entry of
            each is taken, even beyond the cut position and the limits.

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
    """Return whether a cut waits until there are ``rows_min`` rows, or ``delay_max_s`` has passed.

    Args:
        rows: Rows that could be cut.
        rows_min: Fewest rows of a batch.
        waited_s: Time since the previous cut, seconds.
        delay_max_s: Longest time between cuts while there are rows, seconds.
    """
    return rows < rows_min and waited_s < delay_max_s


class Held(NamedTuple):
    """Messages of one topic partition that a source leaves unacknowledged."""

    rows: int
    """Most rows in its window; 0 or less if the broker's limits leave no room."""
    range_rows: int | None
    """Most of those rows that one range received; ``None`` for no limit."""
    queue: int
    """Most messages in the client queue of each consumer."""
    behind_rows: int | None
    """Most messages after the target of a bounded run that one range received; ``None`` for no
    limit."""


def held_max(
    *,
    window_rows_max: int,
    topic_partitions: int,
    ranges: int,
    queue: int,
    per_consumer: int,
    per_subscription: int,
) -> Held:
    """Return how many messages of one topic partition the source may hold unacknowledged.

    The sum stays below the broker's limits, client queues included. At the limit of a subscription
    the broker sends nothing more until half is acknowledged. An entry may exceed the permits of its
    consumer. So if rows take more than half of that limit, twice the size of the queues stays free
    for queues. If rows and queues do not fit together, the queues shrink first, until both have
    half each.

    Messages after the target of a bounded run are in no batch, so no commit acknowledges them. They
    are not part of that sum, but have a limit of their own: a quarter of the broker's limit for a
    consumer, or of a range's share of the limit for a subscription if that is smaller. The broker
    sends nothing to a consumer at its limit until half is acknowledged.

    Args:
        window_rows_max: Most rows over all topic partitions.
        topic_partitions: Number of topic partitions.
        ranges: Number of hash ranges, each with a consumer per topic partition.
        queue: Most messages in the client queue of a consumer.
        per_consumer: Broker's limit per consumer; 0 for none.
        per_subscription: Broker's limit per subscription and topic partition; 0 for none.
    """
    rows = max(1, window_rows_max // max(1, topic_partitions))
    range_rows = None
    shares = [per_consumer] if per_consumer else []
    shares += [per_subscription // ranges] if per_subscription else []
    behind_rows = max(1, min(shares) // 4) if shares else None
    if per_consumer:
        queue = max(1, min(queue, per_consumer - min(rows, per_consumer // 2)))
        range_rows = per_consumer - queue
        rows = min(rows, ranges * range_rows)
    if per_subscription:
        left = per_subscription - min(rows, per_subscription // 2)
        queue = max(1, min(queue, left // ranges))
        queues = ranges * queue
        rows = min(rows, per_subscription - queues)
        if 2 * rows > per_subscription:
            rows = max(per_subscription // 2, min(rows, per_subscription - 2 * queues))
    return Held(rows, range_rows, queue, behind_rows)


# -- The limits of a window, and the share of each topic partition ---------------------------------


@dataclass(frozen=True, slots=True)
class Budget:
    """The limits of a window, for received and planned entries together."""

    rows_max: int
    bytes_max: int
    partition_rows_max: int | None = None
    """Most rows of one topic partition; ``None``: only its share of ``rows_max``."""
    checkpoint_bytes_max: int = 1024 * 1024
    """Size of a checkpoint at which the fast ranges of a topic partition pause."""
    queue_max: int = 1_000
    """Most messages in the client queue of each consumer, in addition to those rows."""
    range_rows_max: int | None = None
    """Most rows of one topic partition that one range received; ``None``: no limit."""
    behind_rows_max: int | None = None
    """Most rows after the target of a bounded run that one range received; ``None``: no limit."""

    def fill(self, rows: int, size: int, shares: int) -> float:
        """Return how full a topic partition's share is, from 0 to 1, rarely more.

        Args:
            rows: Held rows of the topic partition.
            size: Their memory, bytes.
            shares: Number of topic partitions.
        """
        rows_max, bytes_max = self.share(shares)
        return max(rows / rows_max, size / bytes_max)

    def share(self, shares: int) -> tuple[float, float]:
        """Return the rows and bytes that one of some equal topic partitions may hold."""
        rows_max = self.rows_max / shares
        if self.partition_rows_max is not None:
            rows_max = min(rows_max, self.partition_rows_max)
        return rows_max, self.bytes_max / shares
