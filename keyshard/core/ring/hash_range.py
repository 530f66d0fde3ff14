"""Hash ranges of the 16-bit ring, and how the ring is split.

In Key_Shared STICKY mode, Pulsar hashes keys to 0-65535, and each consumer owns inclusive
intervals. Together they must cover the ring; otherwise the topic partition stops.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from keyshard.errors import ConfigError

RING_SIZE = 65_536
"""Number of slots of the ring."""


@dataclass(frozen=True, slots=True, order=True)
class HashRange:
    """Inclusive interval ``[start, end]`` of the ring, owned by one sticky consumer."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end < RING_SIZE:
            raise ConfigError(
                f"A hash range needs 0 <= start <= end <= {RING_SIZE - 1}, but is [{self.start}, "
                f"{self.end}]."
            )

    def __contains__(self, slot: int) -> bool:
        return self.start <= slot <= self.end

    def __len__(self) -> int:
        return self.end - self.start + 1

    def __str__(self) -> str:
        return f"{self.start}-{self.end}"


def split_ring(count: int) -> tuple[HashRange, ...]:
    """Split the whole ring into ``count`` contiguous ranges whose sizes differ by at most one.

    Args:
        count: Number of ranges, 1 to 65,536.

    Returns:
        The ranges in ascending order; they cover the ring without overlap.

    Raises:
        ConfigError: ``count`` is outside its limits.
    """
    if not 1 <= count <= RING_SIZE:
        raise ConfigError(f"parallelism is {count}; it must be an integer from 1 to {RING_SIZE}.")
    return tuple(
        HashRange(-(-i * RING_SIZE // count), -(-(i + 1) * RING_SIZE // count) - 1)
        for i in range(count)
    )


def range_index(slot: int, count: int) -> int:
    """Return the index, in ``split_ring(count)``, of the range that holds ``slot``."""
    return slot * count // RING_SIZE


def gaps(owned: Iterable[HashRange]) -> tuple[HashRange, ...]:
    """Return the parts of the ring that no range covers, ascending; ranges may overlap."""
    found: list[HashRange] = []
    free = 0
    for hash_range in sorted(owned):
        if hash_range.start > free:
            found.append(HashRange(free, hash_range.start - 1))
        free = max(free, hash_range.end + 1)
    if free < RING_SIZE:
        found.append(HashRange(free, RING_SIZE - 1))
    return tuple(found)


def overlap(some: Iterable[HashRange], others: Sequence[HashRange]) -> bool:
    """Return whether a range of ``some`` and one of ``others`` share a slot."""
    return any(
        one.start <= other.end and other.start <= one.end for one in some for other in others
    )
