"""How long handlers take: a histogram with fixed buckets."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TypedDict

BOUNDS_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
"""Upper bounds of the buckets, seconds, inclusive; what is longer counts in none of them."""


class HandlerSeconds(TypedDict):
    """Durations of attempts, as plain JSON values."""

    count: int
    sum: float
    buckets: list[list[float]]
    """Upper bound, and how many do not exceed it."""


class Timings:
    """Counts of durations. Not thread-safe: the owner calls it under one lock."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self.count = 0
        self.sum_s = 0.0
        self.longest_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self._counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.count += 1
        self.sum_s += seconds
        self.longest_s = max(self.longest_s, seconds)

    @property
    def p99_s(self) -> float:
        """What 99 of 100 do not exceed, as far as the buckets tell; 0 without any. Seconds."""
        counts = accumulate(self._counts)
        index = next((i for i, count in enumerate(counts) if count >= 0.99 * self.count), 0)
        bound_s = BOUNDS_S[index] if index < len(BOUNDS_S) else self.longest_s
        return min(bound_s, self.longest_s)

    def status(self) -> HandlerSeconds:
        """As plain JSON values; each bucket counts everything up to its bound."""
        totals = accumulate(self._counts[:-1])
        return {
            "count": self.count,
            "sum": self.sum_s,
            "buckets": [list(pair) for pair in zip(BOUNDS_S, totals, strict=True)],
        }
