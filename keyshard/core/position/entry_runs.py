"""Sets of integers as ascending runs: the algebra, and the text ``0-3,7``.

Cheap while a set has few runs, however long they are. An operation costs n log m for n runs in the
smaller set and m in the larger, plus a copy of the runs that stay.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator

INDEX_MAX = 1_000_000
"""Highest batch index accepted in a text. Brokers refuse batches with more messages."""

Run = tuple[int, int]
"""First and last number, both inclusive."""
Runs = tuple[Run, ...]
"""Ascending, each as long as possible."""

AFTER_ALL = float("inf")


def runs_of(numbers: Collection[int]) -> Runs:
    """Return the runs of integers, which come in any order and may repeat."""
    if len(numbers) < 2:
        return tuple([(number, number) for number in numbers])
    ascending = sorted(set(numbers))
    first, end = ascending[0], ascending[-1]
    if end - first == len(ascending) - 1:
        return ((first, end),)
    runs: list[Run] = []
    last = first
    for number in ascending:
        if number > last + 1:
            runs.append((first, last))
            first = number
        last = number
    runs.append((first, last))
    return tuple(runs)


def _touched(runs: Runs, first: int, last: int, at: int) -> tuple[int, int]:
    """Return start and stop of the runs, from index ``at`` on, that overlap the interval."""
    start = bisect_right(runs, (first, AFTER_ALL), at)
    if start > at and runs[start - 1][1] >= first:
        start -= 1
    return start, bisect_right(runs, (last, AFTER_ALL), start)


def union(left: Runs, right: Runs) -> Runs:
    """Return the numbers that are in one of the sets."""
    if len(left) < len(right):
        left, right = right, left
    runs: list[Run] = []
    at = 0
    for run in right:
        first, last = run
        start, stop = _touched(left, first - 1, last + 1, at)
        runs += left[at:start]
        at = stop
        if stop > start:
            first, last = min(first, left[start][0]), max(last, left[stop - 1][1])
        if runs and runs[-1][1] >= first - 1:
            before = runs.pop()
            first, last = before[0], max(last, before[1])
        runs.append((first, last))
    runs += left[at:]
    return tuple(runs)


def _overlaps(few: Runs, many: Runs) -> Iterator[tuple[Run, Runs]]:
    """Yield each run of ``few`` with the runs of ``many`` that overlap it."""
    at = 0
    for run in few:
        start, stop = _touched(many, *run, at)
        yield run, many[start:stop]
        at = max(start, stop - 1)


def intersection(left: Runs, right: Runs) -> Runs:
    """Return the numbers that are in both sets."""
    few, many = (left, right) if len(left) < len(right) else (right, left)
    return tuple(
        (max(first, other_first), min(last, other_last))
        for (first, last), others in _overlaps(few, many)
        for other_first, other_last in others
    )


def difference(left: Runs, right: Runs) -> Runs:
    """Return the numbers of ``left`` that are not in ``right``."""
    return _difference_from_few(left, right) if len(left) < len(right) else _cut(left, right)


def _difference_from_few(few: Runs, many: Runs) -> Runs:
    runs: list[Run] = []
    for (start, last), others in _overlaps(few, many):
        first = start
        for other_first, other_last in others:
            if other_first > first:
                runs.append((first, other_first - 1))
            first = other_last + 1
        if first <= last:
            runs.append((first, last))
    return tuple(runs)


def _cut(many: Runs, few: Runs) -> Runs:
    """Return ``many`` without ``few``. Linear in the runs of ``few``, except for a copy."""
    runs: list[Run] = []
    at = 0
    for first, last in few:
        start, stop = _touched(many, first, last, at)
        runs += many[at:start]
        at = stop
        cut = many[start:stop]
        if runs and runs[-1][1] >= first:
            # The previous run has already cut this one and left its end.
            cut = (runs.pop(), *cut)
        if cut and cut[0][0] < first:
            runs.append((cut[0][0], first - 1))
        if cut and cut[-1][1] > last:
            runs.append((last + 1, cut[-1][1]))
    runs += many[at:]
    return tuple(runs)


def run_at(runs: Runs, number: int) -> Run | None:
    """Return the run that holds a number; ``None`` without one."""
    at = bisect_right(runs, (number, AFTER_ALL)) - 1
    return runs[at] if at >= 0 and number <= runs[at][1] else None


def format_runs(runs: Runs) -> str:
    """Return the text form of runs: ``0-3,7``."""
    return ",".join([str(first) if first == last else f"{first}-{last}" for first, last in runs])


def parse_runs(text: str) -> Runs:
    """Parse ``0-3,7``.

    Raises:
        ValueError: The text is no ascending list of non-negative runs, each as long as possible.
    """
    runs: list[Run] = []
    for part in text.split(","):
        first_text, dash, last_text = part.partition("-")
        first = int(first_text)
        last = int(last_text) if dash else first
        if first > last or (runs and first <= runs[-1][1] + 1):
            raise ValueError(part)
        runs.append((first, last))
    result = tuple(runs)
    if format_runs(result) != text:
        raise ValueError(text)
    return result


def index_runs(indices: Collection[int]) -> str:
    """Return the text form of a set of batch indices."""
    return format_runs(runs_of(indices))


def parse_indices(text: str) -> frozenset[int]:
    """Parse the text form of a set of batch indices.

    Raises:
        ValueError: The text is not canonical, or an index is above :data:`INDEX_MAX`.
    """
    runs = parse_runs(text)
    if runs[-1][1] > INDEX_MAX:
        raise ValueError(f"{runs[-1][1]} is not a batch index")
    return frozenset(i for first, last in runs for i in range(first, last + 1))
